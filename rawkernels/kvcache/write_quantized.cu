// Quantises new keys, rotated where asked (RoPE), and values into the slots of a paged cache.
// Memory-bound.
//
//   As write.cu; pages hold codes, or one side plain numbers, and scales, which are found for each
//   token, head and group of features, or given. QuantizedWriteParams says how. A row is a token's
//   key or value of a head; kLanes neighbouring threads have one, as in quantization/quantize.cu,
//   and blockIdx.y is 1 for values; with formats in Config they have both, one after the other, so
//   that the value is on its way while the key becomes codes. RoPE's result is rounded to T, as the
//   plain cache would store it, and then quantised: the bytes are those of
//   cuattn/reference/kvcache.py. With formats in Config, scales are found and kInt4 has minima.
#include "kvcache/new_tokens.cuh"
#include "tile/rows.cuh"

using T = Config::dtype;
using Acc = tile::Accumulator<T>;
using Row = tile::RowOf<Config::lanes>::type;

struct QuantizedWriteParams {
  void* k_scale;
  void* k_minimum;
  void* v_scale;
  void* v_minimum;
  const float* k_offset;  // (heads, head_dim); null: none
  const float* v_offset;
  ScaleStrides k_scale_stride, k_minimum_stride, v_scale_stride, v_minimum_stride;
  int k_format, v_format, k_group, v_group, k_group_shift, v_group_shift;
  int k_scale_is_float, v_scale_is_float, k_rotated, v_rotated, k_is_static, v_is_static;
  tile::Divisor by_heads;
};

// Of keys or of values.
struct Side {
  const T* source;
  unsigned char* pages;
  PageStrides stride;
  void* scale;
  void* minimum;
  const float* offset;
  ScaleStrides scale_stride, minimum_stride;
  int format, group, group_shift, scale_is_float, rotated, is_static, head_dim;

  template <int kFormat>
  __device__ __forceinline__ tile::CodeRow<kFormat> row(Slot at, int head) const {
    const auto scale_at = [&](void* scales, const ScaleStrides& stride) -> void* {
      if (scales == nullptr) return nullptr;
      const long long element = at.page * stride.page + at.slot * stride.seq + head * stride.head;
      return static_cast<char*>(scales) + element * (scale_is_float ? 4 : 2);
    };
    return {pages + at.page * stride.page + at.slot * stride.seq + head * stride.head,
            scale_at(scale, scale_stride),
            scale_at(minimum, minimum_stride),
            scale_stride.group,
            minimum_stride.group,
            offset == nullptr ? nullptr : offset + head * head_dim,
            format,
            group,
            group_shift,
            scale_is_float,
            rotated,
            is_static};
  }
};

__device__ __forceinline__ Side keys(const WriteParams& params, const QuantizedWriteParams& codes,
                                     int token, int head) {
  return {static_cast<const T*>(params.k) + token * params.k_token + head * params.k_head,
          static_cast<unsigned char*>(params.k_pages),
          params.k_page,
          codes.k_scale,
          codes.k_minimum,
          codes.k_offset,
          codes.k_scale_stride,
          codes.k_minimum_stride,
          codes.k_format,
          codes.k_group,
          codes.k_group_shift,
          codes.k_scale_is_float,
          codes.k_rotated,
          codes.k_is_static,
          params.head_dim};
}

__device__ __forceinline__ Side values(const WriteParams& params, const QuantizedWriteParams& codes,
                                       int token, int head) {
  return {static_cast<const T*>(params.v) + token * params.v_token + head * params.v_head,
          static_cast<unsigned char*>(params.v_pages),
          params.v_page,
          codes.v_scale,
          codes.v_minimum,
          codes.v_offset,
          codes.v_scale_stride,
          codes.v_minimum_stride,
          codes.v_format,
          codes.v_group,
          codes.v_group_shift,
          codes.v_scale_is_float,
          codes.v_rotated,
          codes.v_is_static,
          params.head_dim_v};
}

__device__ __forceinline__ tile::RowRope<T> rope_of(const WriteParams& params, const Slot& at) {
  if (params.cos == nullptr || !at.exists) return {};
  const long long angles = at.position * static_cast<long long>(params.pairs);
  return {static_cast<const Acc*>(params.cos) + angles,
          static_cast<const Acc*>(params.sin) + angles, params.pairs, params.interleaved};
}

// Keys or values, of any format.
template <class AnyRow>
__device__ __forceinline__ void write_side(const Side& side, const Slot& at, int head,
                                           const tile::RowRope<T>& rope, bool exists) {
  if (side.format == tile::kPlain) {
    T* const target = reinterpret_cast<T*>(side.pages) + at.page * side.stride.page +
                      at.slot * side.stride.seq + head * side.stride.head;
    for (int i = threadIdx.x % AnyRow::kRowLanes; exists && i < side.head_dim;
         i += AnyRow::kRowLanes)
      target[i] = rope.column(side.source, i);
    return;
  }
  AnyRow row;
  row.load(side.source, side.head_dim, rope);
  row.quantize(side.row<tile::kAnyFormat>(at, head), side.head_dim, exists);
}

// Keys and values, of formats that are known.
template <class AnyRow>
__device__ __forceinline__ void write_both(const Side& k, const Side& v, const Slot& at, int head,
                                           const tile::RowRope<T>& rope, bool exists) {
  typename AnyRow::template Fetched<T> key, value;
  key.fetch(k.source);
  value.fetch(v.source);
  AnyRow row;
  row.load(key, k.source, rope);
  row.quantize(k.row<Config::k_format>(at, head), k.head_dim, exists);
  row.unpack(value);
  row.quantize(v.row<Config::v_format>(at, head), v.head_dim, exists);
}

constexpr bool kBoth = Config::k_format != tile::kAnyFormat;

extern "C" __global__ void __launch_bounds__(Config::threads, kBoth ? 2 : 3)
    write_quantized(const __grid_constant__ WriteParams params,
                    const __grid_constant__ QuantizedWriteParams codes) {
  const int index = (blockIdx.x * Config::threads + threadIdx.x) / Row::kRowLanes;
  const int index_of_row = min(index, params.total * params.heads - 1);
  const int token = tile::divided(index_of_row, codes.by_heads);
  const int head = index_of_row - token * params.heads;
  const Slot at = find_slot(params, token);
  const bool exists = at.exists && index == index_of_row;
  if constexpr (kBoth)
    write_both<Row>(keys(params, codes, token, head), values(params, codes, token, head), at, head,
                    rope_of(params, at), exists);
  else if (blockIdx.y == 0)
    write_side<Row>(keys(params, codes, token, head), at, head, rope_of(params, at), exists);
  else
    write_side<Row>(values(params, codes, token, head), at, head, {}, exists);
}
