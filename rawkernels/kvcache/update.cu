// Updates a batch's page table and lengths in place, from one array of numbers that comes from the
// host: with the launch where Config::numbers are enough, else in memory.
//   batch lengths, batch + 1 cumulative numbers of new tokens, then for each changed entry its
//   index and its page.
struct Given {
  int numbers[Config::numbers > 0 ? Config::numbers : 1];

  __device__ __forceinline__ int operator[](int i) const { return numbers[i]; }
};
struct Copied {
  const int* numbers;

  __device__ __forceinline__ int operator[](int i) const { return numbers[i]; }
};
template <bool kGiven>
struct NumbersOf {
  using Type = Given;
};
template <>
struct NumbersOf<false> {
  using Type = Copied;
};
using Numbers = NumbersOf<(Config::numbers > 0)>::Type;

extern "C" __global__ void __launch_bounds__(Config::threads)
    update(const __grid_constant__ Numbers numbers, int* page_table, int* seq_lens, int* cu_new,
           int batch, int changes) {
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
