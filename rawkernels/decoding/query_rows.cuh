// Queries as the products with codes of keys take them: float16, whatever type they have.
#pragma once

#include "decoding/slice.cuh"
#include "tile/expand.cuh"

namespace decoding {

// What the scores of a row need, beside its queries in float16. With kScaled, the call's scale is
// in them already.
template <int kGroups>
struct alignas(16) QueryRow {
  float factor;                 // what a product of operands is worth: a power of two
  float added;                  // to all scores
  float minus_excess[kGroups];  // of the keys' operands over their codes
  float sum[kGroups];           // of q
  float scale;                  // of the keys' scales
};

// Turns a split's queries, in shared memory, into float16 in the order of the keys' operands; by
// kWarps warps, which take rows in turn: this one has number `warp` of them.
template <class KCodes, class QTile, int kHeadDim, int kRows, int kWarps, bool kScaled, class T,
          int kKGroups>
__device__ __forceinline__ void prepare_queries(const DecodeParams& params, const Split& split,
                                                T* queries, QueryRow<kKGroups>* query_rows,
                                                int warp) {
  constexpr int kLaneDims = kHeadDim / 32;
  char* const bytes = reinterpret_cast<char*>(queries);
  const int lane = threadIdx.x % 32;
  const bool by_channel = params.k_group == 1;
#pragma unroll 1
  for (int row = warp; row < kRows; row += kWarps) {
    // Columns 32 i + lane.
    float x[kLaneDims];
    float added = 0, largest = 0;
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) {
      const int column = 32 * i + lane;
      x[i] = static_cast<float>(
          reinterpret_cast<const T*>(bytes + QTile::at(row, column / 8))[column % 8]);
      if (params.k_offset != nullptr && column < params.head_dim)
        added = fmaf(x[i], params.k_offset[split.head * params.head_dim + column], added);
    }
    if (params.k_rotated) {
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) x[i] = tile::with_rotation_sign(x[i], 32 * i + lane);
      tile::hadamard(x, tile::rotation_block(params.head_dim));
    }
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) {
      const int column = 32 * i + lane;
      if (by_channel && column < params.head_dim) {
        if (params.k_minimum != nullptr)
          added = fmaf(x[i],
                       tile::scale_value(params.k_minimum,
                                         split.head * params.k_minimum_stride.head +
                                             column * params.k_minimum_stride.group,
                                         params.k_scale_is_float),
                       added);
        x[i] *= tile::scale_value(
            params.k_scale,
            split.head * params.k_scale_stride.head + column * params.k_scale_stride.group,
            params.k_scale_is_float);
      }
      largest = fmaxf(largest, fabsf(x[i]));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
      added += __shfl_xor_sync(~0u, added, distance);
    }
    // The row's largest becomes 2^14 or more, below 2^15.
    const int exponent = max(__float_as_int(largest) >> 23, 15);
    const float factor = __int_as_float(exponent - 14 << 23);
    const float inverse = __int_as_float(268 - exponent << 23);
    float scale = 1;
    if constexpr (kScaled)
      scale = ScoreMod<__half, true, true>{score_inputs(params)}.scale_factor();
    const float worth = fminf(factor * KCodes::kKeyUnit, 0x1p127f);
    float excess[kKGroups] = {}, sum[kKGroups] = {};
    __syncwarp();  // the row has been read
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) {
      const int column = 32 * i + lane, slot = KCodes::slot(column);
      const __half stored = __float2half_rn(x[i] * inverse * KCodes::query_factor(column));
      reinterpret_cast<__half*>(bytes + QTile::at(row, slot / 8))[slot % 8] = stored;
      const float product = __half2float(stored);
      excess[i * kKGroups / kLaneDims] -= product * KCodes::key_excess(column);
      // What is rotated is rounded here: its sum, with which keys' minima go, has to be of the same
      // numbers as the products with their codes.
      sum[i * kKGroups / kLaneDims] += params.k_rotated && !by_channel
                                           ? __half2float(__float2half_rn(x[i] * inverse)) * factor
                                           : x[i];
    }
#pragma unroll
    for (int group = 0; group < kKGroups; ++group) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        excess[group] += __shfl_xor_sync(~0u, excess[group], distance);
        sum[group] += __shfl_xor_sync(~0u, sum[group], distance);
      }
      query_rows[row].minus_excess[group] = excess[group] * worth;
      query_rows[row].sum[group] = sum[group] * scale;
    }
    query_rows[row].factor = worth;
    query_rows[row].added = added * scale;
    query_rows[row].scale = scale;
  }
}

}  // namespace decoding
