// The rows that a paged cache has of the tokens which a call's queries are, one after the other:
//
//   pages (num_pages, page_size, width) of any strides but the last, out (total, width) contiguous;
//   the last tokens of each sequence, as many as it has queries. A warp copies a token, kVecBytes a
//   lane at a time.
//
// Lengths that are not what they must be name tokens that exist: no address is wrong.
#include "kvcache/pages.cuh"
#include "tile/ragged.cuh"
#include "tile/vec.cuh"

struct TakeParams {
  const void* pages;
  void* out;
  const int* page_table;
  const int* seq_lens;
  const int* cu_seqlens_q;
  long long page_stride, slot_stride, table_stride;  // in bytes; the table's in elements
  int total, batch, capacity, page_shift, num_pages;
  int vecs;  // of a row
};

using Vec = tile::Vec<unsigned char, Config::vec_bytes>;

// The sequence that has a query, the last one for queries that none has.
__device__ __forceinline__ int sequence_of(const TakeParams& params, int query) {
  int low = 0, high = params.batch - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (params.cu_seqlens_q[middle + 1] > query)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    mla_take_tokens(const __grid_constant__ TakeParams params) {
  const int query = (blockIdx.x * Config::threads + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (query >= params.total) return;
  const int sequence = sequence_of(params, query);
  const int begin = params.cu_seqlens_q[sequence], end = params.cu_seqlens_q[sequence + 1];
  const int length = tile::clamped(params.seq_lens[sequence], 0, params.capacity);
  const int before = max(length - (end - begin), 0);
  const int token = tile::clamped(before + query - begin, 0, params.capacity - 1);
  const kvcache::PageTable table = {params.page_table, params.table_stride, params.page_shift,
                                    params.num_pages};
  const auto* const from = static_cast<const unsigned char*>(params.pages) +
                           table.page(sequence, token) * params.page_stride +
                           table.slot(token) * params.slot_stride;
  Vec* const to = static_cast<Vec*>(params.out) + static_cast<long long>(query) * params.vecs;
  for (int i = lane; i < params.vecs; i += 32) to[i] = reinterpret_cast<const Vec*>(from)[i];
}
