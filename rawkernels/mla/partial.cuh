// Partial results of mla/decode_sm90.cu, decode_80_sm90.cu and the kernels for codes. Thread blocks
// merge them where there are many tiles of rows (merge_parts.cuh), else mla/combine.cu does, in a
// launch of its own: with rows of 512 numbers that takes all multiprocessors.
#pragma once

#include "decoding/combine.cuh"
#include "mla/params.cuh"

namespace mla {

// Softmax-weighted sums of a split's values, relative to 2^max, and the sums of weights. O is in
// vectors of four numbers: row after row, or, of 64 rows, as the lanes of wgmma hold it. There
// eight rows have each vector side by side, so that a warp's stores are 512 contiguous bytes, and
// vector 4m + t of a row is columns 2t and 2t + 1 of the 8 from 16m on, then of the next 8.
template <int kRows, int kLatent, bool kHalf = false>
struct PartialTile {
  static constexpr bool kFragments = kRows == 64;
  static constexpr int kVecs = kLatent / 4;  // of a row
  using Vec = float4;
  Vec o[kRows * kVecs];
  float2 max_sum[kRows];

  __device__ __forceinline__ static constexpr int at(int row, int vec) {
    if (!kFragments) return row * kVecs + vec;
    return ((row / 8 * (kVecs / 4) + vec / 4) * 8 + row % 8) * 4 + vec % 4;
  }
  __device__ __forceinline__ static float4 numbers(const Vec& vec) { return vec; }
};

// Numbers of O as float16, in half of the bytes: partial results are written when all thread blocks
// end and read by all of the next launch, and 17 MB of float32 took 4.5 us to write on an H200, and
// 2 us to read. Float16 has an eighth of the rounding of a bfloat16 result, and a row's `max` is
// what its numbers need.
struct HalfNumbers {
  __device__ __forceinline__ static float2 pair(unsigned word) {
    return __half22float2(reinterpret_cast<const __half2&>(word));
  }
  __device__ __forceinline__ static float4 numbers(const uint2& vec) {
    const float2 low = pair(vec.x), high = pair(vec.y);
    return {low.x, low.y, high.x, high.y};
  }
  __device__ __forceinline__ static uint4 packed(const float (&x)[8]) {
    return {tile::pack<__half>(x[0], x[1]), tile::pack<__half>(x[2], x[3]),
            tile::pack<__half>(x[4], x[5]), tile::pack<__half>(x[6], x[7])};
  }
  // By how much `max` is raised where O has numbers up to `largest`, which then are 2^15 at most,
  // and by what O and sum are multiplied. A weight that counts becomes 0 only if some parts' values
  // are beyond 2^81 and all of others' below 2^-45.
  __device__ __forceinline__ static int rise_for(float largest) {
    const int exponent = min(__float_as_int(largest) >> 23, 254) - 127;
    return largest == 0.0f ? 0 : max(exponent - 14, -60);
  }
  __device__ __forceinline__ static float factor_for(int rise) {
    return __int_as_float(127 - rise << 23);
  }
};

// Row after row.
template <int kRows, int kLatent>
struct PartialTile<kRows, kLatent, true> : HalfNumbers {
  static constexpr bool kFragments = false;
  static constexpr int kVecs = kLatent / 4;
  using Vec = uint2;
  alignas(16) Vec o[kRows * kVecs];
  float2 max_sum[kRows];

  __device__ __forceinline__ static constexpr int at(int row, int vec) { return row * kVecs + vec; }
};

// As the lanes of wgmma hold it. Vectors 8m + t and 8m + 4 + t lie side by side.
template <int kLatent>
struct PartialTile<64, kLatent, true> : HalfNumbers {
  static constexpr bool kFragments = true;
  static constexpr int kVecs = kLatent / 4;
  using Vec = uint2;
  alignas(16) Vec o[64 * kVecs];
  float2 max_sum[64];

  __device__ __forceinline__ static constexpr int at(int row, int vec) {
    return (((row / 8 * (kVecs / 8) + vec / 8) * 8 + row % 8) * 4 + vec % 4) * 2 + vec / 4 % 2;
  }
};

template <class Part>
__device__ __forceinline__ Part* parts_of(const DecodeParams& params, const MlaParams& mla) {
  return static_cast<Part*>(mla.merges_parts ? params.workspace : mla.parts);
}

// Leaves what merges a tile's partial results, by one of its splits.
template <int kRows>
__device__ __forceinline__ void put_task(const DecodeParams& params, const MlaParams& mla,
                                         const decoding::Split& split,
                                         const decoding::SplitPlace& place) {
  if (mla.tasks == nullptr) return;  // no call like this one has more than one split of a tile
  CombineTask task;
  // In a replay of a CUDA graph the tile's task may be there from the replay before.
  task.call_id = place.count > 1 ? mla.call_id : 0;
  task.count = place.count;
  task.first_slot = place.slot(0);
  task.second_slot = place.slot(1);
  task.slot_stride = place.slot(2) - place.slot(1);
  task.sequence = split.seq.index;
  task.begin_q = split.seq.begin_q;
  task.row_tile = split.row_tile;
  task.rows = min(kRows, rows_from<kRows>(params, split));
  task.head = split.head;
  // Tiles of ragged sequences, of which only the device knows the lengths: a sequence owns those
  // from here on.
  const int tile = split.seq.begin_q * params.group / kRows +
                   split.seq.index * (params.cu_seqlens_q == nullptr ? mla.row_tiles : 1) +
                   split.row_tile;
  mla.tasks[tile * params.heads_kv + split.head] = task;
}

// A row of the result: where it begins in `out`, where its lse is, what O is multiplied by, and
// what lse is made of.
struct OutputRow {
  long long at, lse_at;
  float factor, max, sum;
};

// Of a tile of kRows rows, with sums relative to 2^max.
template <class T, int kRows>
__device__ __forceinline__ OutputRow output_row(const DecodeParams& params,
                                                const decoding::Split& split, int row, float max,
                                                float sum) {
  const int index = split.row_tile * kRows + row;
  const int token = divided_by_group(params, index);
  const int head = split.head * params.group + index - token * params.group;
  const int query = split.seq.begin_q + token;
  float moved = 1.0f;
  if (params.sinks != nullptr) {  // a key without a value
    const float sink = static_cast<const float*>(params.sinks)[head];
    const float new_max = fmaxf(max, ceilf(sink * tile::kLog2e));
    const float shift = tile::OnlineSoftmax::offset(new_max, 1.0f);
    moved = decoding::Partial<T>::power(max - shift);
    sum = fmaf(sum, moved, decoding::weight(sink, shift));
    max = new_max;
  }
  return {split.seq.index * params.out_stride.batch + query * params.out_stride.seq +
              head * params.out_stride.head,
          split.seq.index * params.lse_batch_stride + head * params.lse_head_stride + query,
          sum == 0.0f ? 0.0f : moved / sum, max, sum};
}

__device__ __forceinline__ void put_lse(const DecodeParams& params, const OutputRow& row) {
  if (params.lse == nullptr) return;
  static_cast<float*>(params.lse)[row.lse_at] =
      row.sum == 0.0f ? tile::negative_infinity() : decoding::log_of_power(row.max, row.sum);
}

// Four columns of a row of the result.
template <class T>
__device__ __forceinline__ void put_columns(const DecodeParams& params, const OutputRow& row,
                                            int column, const tile::Vec<float, 4>& o) {
  if (column == 0) put_lse(params, row);
  if (column >= params.head_dim_v) return;
  tile::Vec<T, 4> packed;
#pragma unroll
  for (int e = 0; e < 4; ++e) packed.x[e] = static_cast<T>(o.x[e] * row.factor);
  *reinterpret_cast<tile::Vec<T, 4>*>(static_cast<T*>(params.out) + row.at + column) = packed;
}

}  // namespace mla
