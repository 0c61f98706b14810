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

constexpr int kRows = Config::threads / Row::kRowLanes;

__device__ __forceinline__ const T* row_of_x(const QuantizeParams& params,
                                             const quantization::Place& at) {
  const PageStrides& stride = params.x_stride;
  return static_cast<const T*>(params.x) + at.page * stride.page + at.token * stride.seq +
         at.head * stride.head;
}

// A block's rows in turn: the next one is on its way while a row becomes codes.
template <class AnyRow>
__device__ __forceinline__ void quantize_in_turn(const QuantizeParams& params) {
  int first = blockIdx.x * kRows;
  quantization::Place at = quantization::place_of<AnyRow>(params, first);
  typename AnyRow::template Fetched<T> fetched;
  fetched.fetch(row_of_x(params, at));
#pragma unroll 1
  while (true) {
    AnyRow row;
    row.unpack(fetched);
    const quantization::Place here = at;
    first += gridDim.x * kRows;
    const bool more = first < params.rows;
    if (more) {
      at = quantization::place_of<AnyRow>(params, first);
      fetched.fetch(row_of_x(params, at));
    }
    row.quantize(quantization::codes_of<Config::format>(params, here), params.head_dim,
                 here.exists);
    if (!more) return;
  }
}

// Of the usual formats; for the others registers are missing.
constexpr bool kInTurn = Config::format != tile::kAnyFormat;

extern "C" __global__ void __launch_bounds__(Config::threads, kInTurn ? 2 : 3)
    quantize_rows(const __grid_constant__ QuantizeParams params) {
  if constexpr (kInTurn) {
    quantize_in_turn<Row>(params);
  } else {
    const quantization::Place at = quantization::place_of<Row>(params, blockIdx.x * kRows);
    Row row;
    row.load(row_of_x(params, at), params.head_dim, tile::RowRope<T>{});
    row.quantize(quantization::codes_of<>(params, at), params.head_dim, at.exists);
  }
}
