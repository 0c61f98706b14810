// Dequantises codes, which may lie in the pages of a cache. Memory-bound.
//
//   x (pages, tokens, heads, head_dim), or with a page table (sequences, tokens, heads, head_dim).
//   QuantizeParams and quantize.cu say the rest.
#include "quantization/params.cuh"

using T = Config::dtype;
using Row = tile::RowOf<Config::lanes>::type;

// One array, or keys and values of a cache at once: blockIdx.y says which.
struct Arrays {
  QuantizeParams of[2];
};

extern "C" __global__ void __launch_bounds__(Config::threads, 2)
    dequantize_rows(const __grid_constant__ Arrays arrays) {
  const QuantizeParams& params = arrays.of[blockIdx.y];
  const quantization::Place at =
      quantization::place_of<Row>(params, blockIdx.x * (Config::threads / Row::kRowLanes));
  if (params.seq_lens != nullptr && !__syncthreads_or(at.token < params.seq_lens[at.page])) return;
  const PageStrides& stride = params.x_stride;
  T* const x = static_cast<T*>(params.x) + at.page * stride.page + at.token * stride.seq +
               at.head * stride.head;
  Row row;
  row.dequantize(quantization::codes_of<>(params, at), params.head_dim);
  if (at.exists) row.store(x, params.head_dim);
}
