// Quantises rows to int8, 4-bit integers, e4m3 or e5m2, with scales that are found for each row or
// group of its features, or given. Memory-bound.
//
//   x (pages, tokens, heads, head_dim) of any strides with contiguous features; float16, bfloat16,
//   float32, float64. QuantizeParams has the rest. kLanes neighbouring threads have a row: head_dim
//   is 32 * kLanes, pointers and strides are multiples of 16 bytes and groups powers of two; with 0
//   lanes a warp has a row of any kind. With a format in Config, scales are found and kInt4 has
//   minima; else QuantizeParams says. Offset, rotation, scale and codes are those of
//   cuattn/reference/quantization.py, bit for bit.
#include "quantization/params.cuh"

using T = Config::dtype;
using Row = tile::RowOf<Config::lanes>::type;

extern "C" __global__ void __launch_bounds__(Config::threads, 3)
    quantize_rows(const __grid_constant__ QuantizeParams params) {
  const quantization::Place at = quantization::place_of<Row>(params);
  const PageStrides& stride = params.x_stride;
  const T* const x = static_cast<const T*>(params.x) + at.page * stride.page +
                     at.token * stride.seq + at.head * stride.head;
  Row row;
  row.load(x, params.head_dim, tile::RowRope<T>{});
  row.quantize(quantization::codes_of<Config::format>(params, at), params.head_dim, at.exists);
}
