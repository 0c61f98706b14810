// Quantises rows to int8, 4-bit integers, e4m3 or e5m2, with scales that are found for each row or
// group of its features, or given. Memory-bound.
//
//   x (pages, tokens, heads, head_dim) of any strides with contiguous features; float16, bfloat16,
//   float32, float64. QuantizeParams has the rest. kLanes neighbouring threads have a row: head_dim
//   is 32 * kLanes, pointers and strides are multiples of 16 bytes and groups powers of two; with 0
//   lanes a warp has a row of any kind. With a format in Config, scales are found and kInt4 has
//   minima; else QuantizeParams says. Offset, rotation, scale and codes are those of
//   cuattn/reference/quantization.py, bit for bit.
//
//   With a format, a warp's next rows are on their way while it has others. With in_blocks it has
//   neighbouring tokens of a head, whose scales lie side by side, once, and at least as many exist;
//   a row has one scale, no offset and no rotation.
#include "quantization/params.cuh"
#include "tile/four_rows.cuh"

using T = Config::dtype;
using Row = tile::RowOf<Config::lanes>::type;

constexpr int kRows = Config::threads / Row::kRowLanes;

__device__ __forceinline__ const T* row_of_x(const QuantizeParams& params,
                                             const quantization::Place& at) {
  const PageStrides& stride = params.x_stride;
  return static_cast<const T*>(params.x) + at.page * stride.page + at.token * stride.seq +
         at.head * stride.head;
}

// A thread block's rows in turn: the next one is on its way while a row becomes codes.
template <class AnyRow>
__device__ __forceinline__ void quantize_in_turn(const QuantizeParams& params) {
  int first = blockIdx.x * kRows;
  quantization::Place at = quantization::place_of<AnyRow>(params, first);
  typename AnyRow::template Fetched<T> fetched;
  fetched.fetch(row_of_x(params, at));
#pragma unroll 1
  while (true) {
    const quantization::Place here = at;
    const auto codes = quantization::codes_of<Config::format>(params, here);
    const bool has_signs = codes.rotated && codes.offset == nullptr;
    if (has_signs) fetched.change_signs();
    AnyRow row;
    row.unpack(fetched);
    first += gridDim.x * kRows;
    const bool more = first < params.rows;
    if (more) {
      at = quantization::place_of<AnyRow>(params, first);
      fetched.fetch(row_of_x(params, at));
    }
    row.quantize(codes, params.head_dim, here.exists, has_signs);
    if (!more) return;
  }
}

// Some neighbouring tokens of a head that a warp has, in whole lines: each of its threads has eight
// features of four.
template <class AnyRow>
__device__ __forceinline__ void quantize_tokens(const QuantizeParams& params) {
  constexpr int kWarpTokens = 32 / AnyRow::kRowLanes, kRowThreads = AnyRow::kHeadDim / 8;
  using Rows = tile::FourRows<T, kRowThreads, Config::format>;
  const int index = blockIdx.x * (Config::threads / 32) + threadIdx.x / 32;
  if (index >= params.rows) return;
  const quantization::Tokens at = quantization::tokens_of<kWarpTokens>(params, index);
  const int lane = threadIdx.x % 32, column = lane % kRowThreads * 8;
  // The last warp's tokens may be the one before's too, which writes the same.
  const int token = min(at.first, params.tokens - kWarpTokens) + lane / kRowThreads * 4;
  const quantization::Place first = {at.page, token, at.head, true};
  Rows rows;
  rows.fetch(row_of_x(params, first) + column, params.x_stride.seq);
  auto codes = quantization::codes_of<Config::format>(params, first);
  const int own_row = Rows::own_row();
  codes.scale = static_cast<unsigned short*>(codes.scale) + own_row * params.scale_stride.seq;
  codes.minimum = static_cast<unsigned short*>(codes.minimum) + own_row * params.minimum_stride.seq;
  const tile::FoundScale found = rows.find_scale();
  if (lane % kRowThreads < 4) codes.put_scale(0, found.scale, found.minimum);
  rows.divide(found, [&](auto words) {
    codes.put_codes(column, words);
    codes.codes += params.codes_stride.seq;
  });
}

// Of the usual formats; for the others registers are missing.
constexpr bool kInTurn = Config::format != tile::kAnyFormat;

extern "C" __global__ void __launch_bounds__(Config::threads, Config::in_blocks ? 4
                                                              : kInTurn         ? 2
                                                                                : 3)
    quantize_rows(const __grid_constant__ QuantizeParams params) {
  if constexpr (Config::in_blocks) {
    quantize_tokens<Row>(params);
  } else if constexpr (kInTurn) {
    quantize_in_turn<Row>(params);
  } else {
    const quantization::Place at = quantization::place_of<Row>(params, blockIdx.x * kRows);
    Row row;
    row.load(row_of_x(params, at), params.head_dim, tile::RowRope<T>{});
    row.quantize(quantization::codes_of<>(params, at), params.head_dim, at.exists);
  }
}
