// Dequantises codes, which may lie in the pages of a cache. Memory-bound.
//
//   x (pages, tokens, heads, head_dim), or with a page table (sequences, tokens, heads, head_dim).
//   QuantizeParams and quantize.cu say the rest. With Config::tokens of 0 rows are quantize.cu's,
//   and may be rotated. Else a thread has eight neighbouring features of as many neighbouring
//   tokens of a head: the threads of a warp read and write whole lines, each has all its loads
//   under way at the same time, and finds out where a head lies once for all of its tokens, which
//   are in one page.
#include "quantization/params.cuh"

using T = Config::dtype;
using Row = tile::RowOf<Config::lanes>::type;

// One array, or keys and values of a cache at once: blockIdx.y says which.
struct Arrays {
  QuantizeParams of[2];
};

__device__ __forceinline__ void dequantize_rows_of_block(const QuantizeParams& params) {
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

// Eight features of each of kTokens tokens, of which the first has its codes at `from`.
template <int kFormat, bool kHasMinimum, int kTokens>
__device__ __forceinline__ void dequantize_features(const QuantizeParams& params,
                                                    const tile::CodeRow<>& from, T* to) {
  const int scale_bytes = params.scale_is_float ? 4 : 2;
  const auto bits = [&](const char* at) -> unsigned {
    return params.scale_is_float ? *reinterpret_cast<const unsigned*>(at)
                                 : *reinterpret_cast<const unsigned short*>(at);
  };
  const auto number = [&](unsigned bits) {
    return __uint_as_float(params.scale_is_float ? bits : bits << 16);
  };
  const char *scales = static_cast<const char*>(from.scale),
             *minima = static_cast<const char*>(from.minimum);
  unsigned words[kTokens][2], scale[kTokens], minimum[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const unsigned char* const codes = from.codes + t * params.codes_stride.seq;
    if constexpr (kFormat == tile::kInt4)
      words[t][0] = __ldcs(reinterpret_cast<const unsigned*>(codes));
    else
      reinterpret_cast<uint2&>(words[t]) = __ldcs(reinterpret_cast<const uint2*>(codes));
    scale[t] = bits(scales + t * params.scale_stride.seq * scale_bytes);
    if (kHasMinimum) minimum[t] = bits(minima + t * params.minimum_stride.seq * scale_bytes);
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    float x[8];
    tile::expand_eight<kFormat>(x, words[t], kHasMinimum);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      x[e] = ptx::mul_rn(number(scale[t]), x[e]);
      if (kHasMinimum) x[e] = ptx::add_rn(x[e], number(minimum[t]));
    }
    tile::store_eight(to + t * params.x_stride.seq, x);
  }
}

template <int kTokens>
__device__ __forceinline__ void dequantize_any(const QuantizeParams& params,
                                               const quantization::Tokens& at, int column) {
  const PageStrides& stride = params.x_stride;
  T* const x = static_cast<T*>(params.x) + at.page * stride.page + at.first * stride.seq +
               at.head * stride.head + column;
  tile::CodeRow<> from = quantization::codes_of<>(params, {at.page, at.first, at.head, true});
  const bool has_minimum = params.minimum != nullptr;
  const int place = column >> params.group_shift, scale_bytes = params.scale_is_float ? 4 : 2;
  from.codes += params.format == tile::kInt4 ? column / 2 : column;
  from.scale = static_cast<char*>(from.scale) + place * from.scale_stride * scale_bytes;
  if (has_minimum)
    from.minimum = static_cast<char*>(from.minimum) + place * from.minimum_stride * scale_bytes;
  if (params.format == tile::kInt8)
    dequantize_features<tile::kInt8, false, kTokens>(params, from, x);
  else if (params.format == tile::kE4m3)
    dequantize_features<tile::kE4m3, false, kTokens>(params, from, x);
  else if (params.format == tile::kE5m2)
    dequantize_features<tile::kE5m2, false, kTokens>(params, from, x);
  else if (has_minimum)
    dequantize_features<tile::kInt4, true, kTokens>(params, from, x);
  else
    dequantize_features<tile::kInt4, false, kTokens>(params, from, x);
}

template <class AnyRow>
__device__ __forceinline__ void dequantize_tokens(const QuantizeParams& params) {
  constexpr int kRowThreads = AnyRow::kHeadDim / 8;
  const int index = (blockIdx.x * Config::threads + threadIdx.x) / kRowThreads;
  if (index >= params.rows) return;
  quantization::Tokens at = quantization::tokens_of<Config::tokens>(params, index);
  if (params.seq_lens != nullptr && at.first >= params.seq_lens[at.page]) return;
  const int column = static_cast<int>(threadIdx.x) % kRowThreads * 8;
  if (at.count == Config::tokens) return dequantize_any<Config::tokens>(params, at, column);
#pragma unroll 1
  for (const int end = at.first + at.count; at.first < end; ++at.first)
    dequantize_any<1>(params, at, column);
}

extern "C" __global__ void __launch_bounds__(Config::threads, Config::tokens == 0   ? 2
                                                              : Config::tokens == 4 ? 6
                                                                                    : 4)
    dequantize_rows(const __grid_constant__ Arrays arrays) {
  if constexpr (Config::tokens == 0)
    dequantize_rows_of_block(arrays.of[blockIdx.y]);
  else if (blockIdx.y == 0)  // known places of arguments take half of the instructions
    dequantize_tokens<Row>(arrays.of[0]);
  else
    dequantize_tokens<Row>(arrays.of[1]);
}
