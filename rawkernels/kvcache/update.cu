// Updates a batch's page table and lengths in place, from one array of numbers copied from the
// host:
//   batch lengths, batch + 1 cumulative numbers of new tokens, then for each changed entry its
//   index and its page.
extern "C" __global__ void __launch_bounds__(Config::threads)
    update(const int* numbers, int* page_table, int* seq_lens, int* cu_new, int batch,
           int changes) {
  const int header = 2 * batch + 1;
  for (int i = blockIdx.x * Config::threads + threadIdx.x; i < header + changes;
       i += gridDim.x * Config::threads) {
    if (i < batch)
      seq_lens[i] = numbers[i];
    else if (i < header)
      cu_new[i - batch] = numbers[i];
    else
      page_table[numbers[2 * i - header]] = numbers[2 * i - header + 1];
  }
}
