// Online softmax on accumulator fragments, for mma.sync and wgmma alike: a thread holds scores of
// rows g and g + 8 of its warp's 16, d[4j], d[4j + 1] of the first and d[4j + 2], d[4j + 3] of the
// second (g = lane / 4; a row is four lanes).
#pragma once

#include "ptx/math.cuh"
#include "tile/accumulator.cuh"

namespace tile {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// exp(x * scale) over a row, a block of columns at a time. row_max is what exponents are relative
// to: the largest score so far, or one that lags behind it by at most kRescaleThreshold in log2
// units. A lagging maximum only makes every term and the sum larger by the same factor,
// 2^kRescaleThreshold at most, which the last division takes out; moving it costs a product with
// all of O.
//
// kAnySize: scores may be as large as floats are, as a bias makes them that stands for a mask. The
// product with scale_log2 would round those of one maximum to exponents far from 0, or overflow.
template <bool kAnySize>
struct OnlineSoftmaxOf {
  static constexpr float kRescaleThreshold = 8.0f;
  static constexpr float kLargeLog2 = 0x1p20f;  // exponents up to this are rounded by 2^-4 at most

  float row_max[2] = {negative_infinity(), negative_infinity()};
  float row_sum[2] = {0.0f, 0.0f};  // of this lane's columns; quad_sum gives the row's

  // Replaces scores by exp2((score - row_max) * scale_log2), scale_log2 > 0. Where true is returned
  // (the same in the whole warp) O is to be multiplied by `correction`, row by row.
  template <int n>
  __device__ __forceinline__ bool update(float (&s)[n], float scale_log2, float (&correction)[2]) {
    float block_max[2];
    const bool rescales = __any_sync(~0u, needs_rescale(s, scale_log2, block_max));
    if (rescales) rescale(block_max, scale_log2, correction);
    exponentiate(s, scale_log2);
    return rescales;
  }

  // The three steps of update, for kernels that do other work in between. First: the largest score
  // so far of each row among this lane's columns, and whether one has left row_max too far behind.
  template <int n>
  __device__ __forceinline__ bool needs_rescale(const float (&s)[n], float scale_log2,
                                                float (&block_max)[2]) const {
    return needs_rescale(s, scale_log2, block_max, [](float max, int) { return max; });
  }

  // The same of scores that are yet to be lowered, row by row: lower(score, row).
  template <int n, class Lower>
  __device__ __forceinline__ bool needs_rescale(const float (&s)[n], float scale_log2,
                                                float (&block_max)[2], const Lower& lower,
                                                float threshold = kRescaleThreshold) const {
    // Four chains a row: in one chain each maximum waits for the one before, 390 of a block's 2770
    // cycles in forward_sm90.
    static_assert(n >= 16, "a chain starts from two scores of its own");
    constexpr int kChains = 4;
    float chain[kChains][2];
#pragma unroll
    for (int i = 0; i < n; ++i) {
      float& max = chain[i / 4 % kChains][i / 2 % 2];
      max = i < 4 * kChains && i % 2 == 0 ? s[i] : fmaxf(max, s[i]);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      block_max[row] =
          fmaxf(fmaxf(chain[0][row], chain[1][row]), fmaxf(chain[2][row], chain[3][row]));
      block_max[row] = fmaxf(lower(block_max[row], row), row_max[row]);
    }
    return fmaxf(block_max[0] - row_max[0], block_max[1] - row_max[1]) * scale_log2 > threshold;
  }

  // Second, if that is so for any lane of the warp: move row_max. O is to be multiplied by
  // `correction`. Only here do the lanes of a row compare their maxima: a row_max that no lane's
  // scores leave behind stays, whatever the warp's other rows hold.
  __device__ __forceinline__ void rescale(const float (&block_max)[2], float scale_log2,
                                          float (&correction)[2],
                                          float threshold = kRescaleThreshold) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float largest = quad_max(block_max[row]);
      const bool moves = (largest - row_max[row]) * scale_log2 > threshold;
      if (kAnySize && (is_large(row_max[row], scale_log2) || is_large(largest, scale_log2)))
        correction[row] = moves ? ptx::ex2((row_max[row] - largest) * scale_log2) : 1.0f;
      else
        correction[row] =
            moves ? ptx::ex2(row_max[row] * scale_log2 - offset(largest, scale_log2)) : 1.0f;
      row_sum[row] *= correction[row];
      row_max[row] = moves ? largest : row_max[row];
    }
  }

  // Third, perhaps in parts: scores s[kBegin] to s[kEnd - 1].
  template <int kBegin = 0, int kEnd = 1 << 30, int n>
  __device__ __forceinline__ void exponentiate(float (&s)[n], float scale_log2) {
    exponentiate<kBegin, kEnd>(s, scale_log2, row_max);
  }

  // The same relative to something else than row_max.
  template <int kBegin = 0, int kEnd = 1 << 30, int n>
  __device__ __forceinline__ void exponentiate(float (&s)[n], float scale_log2,
                                               const float (&max)[2]) {
    float offsets[2] = {offset(max[0], scale_log2), offset(max[1], scale_log2)};
    if (kAnySize && (is_large(max[0], scale_log2) || is_large(max[1], scale_log2))) {
      // Rare. Differences are exact where they count.
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float moved = is_large(max[row], scale_log2) ? max[row] : 0.0f;
        if (moved != 0.0f) offsets[row] = 0.0f;
#pragma unroll
        for (int i = kBegin; i < min(n, kEnd); ++i)
          if (i / 2 % 2 == row) s[i] -= moved;
      }
    }
    float sum[2][2] = {};  // two chains a row
#pragma unroll
    for (int i = kBegin; i < min(n, kEnd); ++i) {
      s[i] = ptx::ex2(fmaf(s[i], scale_log2, -offsets[i / 2 % 2]));
      sum[i % 2][i / 2 % 2] += s[i];
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) row_sum[row] += sum[0][row] + sum[1][row];
  }

  // A row that has kept no key yet has no maximum: its terms are exp2(-inf - 0) = 0, and never NaN.
  __device__ __forceinline__ static float offset(float max, float scale_log2) {
    return max == negative_infinity() ? 0.0f : max * scale_log2;
  }

  // Whether a maximum's exponents are differences first. Not of -inf.
  __device__ __forceinline__ static bool is_large(float max, float scale_log2) {
    return fabsf(max) * scale_log2 > kLargeLog2 && max != negative_infinity();
  }
};
using OnlineSoftmax = OnlineSoftmaxOf<false>;

// Multiplies rows of O by a factor each.
template <int n>
__device__ __forceinline__ void scale_rows(float (&o)[n], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < n; ++i) o[i] *= factor[i / 2 % 2];
}

// Two numbers as 16-bit floats, the first in the low half.
template <class T>
__device__ __forceinline__ unsigned pack(float low, float high);
template <>
__device__ __forceinline__ unsigned pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}
template <>
__device__ __forceinline__ unsigned pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}

// The A fragment of the next product: accumulators packed in order.
template <class T, int n>
__device__ __forceinline__ void pack_fragment(unsigned (&p)[n / 2], const float (&s)[n]) {
#pragma unroll
  for (int i = 0; i < n / 2; ++i) p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
}

}  // namespace tile
