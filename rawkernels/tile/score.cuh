// What happens to q·k before the softmax, on accumulator fragments of mma.sync and wgmma alike: a
// thread holds scores of rows `row` and row + 8, s[4j + e] of the first and s[4j + 2 + e] of the
// second in column `column` + 8j + e, e = 0 or 1. Rows and columns count within one sequence.
#pragma once

#include "attention/params.cuh"
#include "tile/softmax.cuh"

namespace tile {

// The keys that rows of one query tile may see by their position: row r of the tile sees [begin +
// r, min(end + r, seqlen_k)).
struct Band {
  int begin, end, seqlen_k;

  __device__ __forceinline__ bool sees_any(int first, int last, int column, int columns) const {
    return column + columns > begin + first && column < min(end + last, seqlen_k);
  }
  __device__ __forceinline__ bool sees_all(int first, int last, int column, int columns) const {
    return column >= begin + last && column + columns <= min(end + first, seqlen_k);
  }
};

// Of the kTileM rows from `row` on. Limits that lie further out than a tile are moved in, so that
// int is wide enough.
template <int kTileM>
__device__ __forceinline__ Band band(const ForwardParams& params, int row, int seqlen_q,
                                     int seqlen_k) {
  const long long diagonal = static_cast<long long>(row) + seqlen_k - seqlen_q;
  const long long lowest = -kTileM, highest = seqlen_k;
  long long begin = params.window_left == kUnbounded ? lowest : diagonal - params.window_left;
  long long end = params.window_right == kUnbounded ? highest : diagonal + params.window_right + 1;
  begin = min(max(begin, lowest), highest);
  end = min(max(end, lowest), highest);
  return {static_cast<int>(begin), static_cast<int>(end), seqlen_k};
}

// Scores of keys outside the band become -inf. `row` counts within the band's tile.
template <int n>
__device__ __forceinline__ void mask_band(float (&s)[n], const Band& band, int row, int column) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int begin = band.begin + row + 8 * r - column;
    const unsigned count = max(min(band.end + row + 8 * r, band.seqlen_k) - column - begin, 0);
#pragma unroll
    for (int j = 0; j < n / 4; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = s[4 * j + 2 * r + e];
        score = static_cast<unsigned>(8 * j + e - begin) < count ? score : negative_infinity();
      }
  }
}

// cap * tanh(x / cap). The quotient loses digits where x is small beside cap, the series where it
// is not.
__device__ __forceinline__ float softcapped(float x, float cap, float inverse_cap) {
  const float y = x * inverse_cap;
  const float y2 = y * y;
  const float series = x * fmaf(y2, fmaf(y2, 2.0f / 15.0f, -1.0f / 3.0f), 1.0f);
  const float quotient = fmaf(__fdividef(-2.0f, 1.0f + ptx::ex2(2.0f * kLog2e * y)), cap, cap);
  return y2 < 0.01f ? series : quotient;
}

// All that changes the scores of one head of one sequence beside their scale. Every term is looked
// up at run time: a call that has any of them takes the kernels' general variant.
template <class T>
struct ScoreTerms {
  const void* bias;
  const unsigned char* mask;
  float slope;
  int seqlen_q, seqlen_k;

  __device__ ScoreTerms(const ForwardParams& params, int batch, int head, int seqlen_q,
                        int seqlen_k)
      : bias(params.bias), mask(params.mask), slope(0.0f), seqlen_q(seqlen_q), seqlen_k(seqlen_k) {
    if (bias != nullptr) {
      const long long offset = batch * params.bias_stride.batch + head * params.bias_stride.head;
      bias = static_cast<const char*>(bias) +
             offset * (params.bias_is_float32 ? sizeof(float) : sizeof(T));
    }
    if (mask != nullptr) mask += batch * params.mask_stride.batch + head * params.mask_stride.head;
    if (params.alibi_slopes != nullptr)
      slope =
          static_cast<const float*>(params.alibi_slopes)[batch * params.alibi_batch_stride + head];
  }

  // From products to scores in natural units, all but mask_band.
  template <int n>
  __device__ __forceinline__ void apply(float (&s)[n], const ForwardParams& params, int row,
                                        int column) const {
    const float scale = static_cast<float>(params.scale);
    const float softcap = static_cast<float>(params.softcap);
#pragma unroll
    for (int i = 0; i < n; ++i) s[i] *= scale;
    if (softcap != 0.0f) {
      const float inverse_cap = 1.0f / softcap;
#pragma unroll
      for (int i = 0; i < n; ++i) s[i] = softcapped(s[i], softcap, inverse_cap);
    }
    if (bias != nullptr) {
      if (params.bias_is_float32)
        add_bias<float>(s, params.bias_stride, row, column);
      else
        add_bias<T>(s, params.bias_stride, row, column);
    }
    if (slope != 0.0f) {
      const int distance = row + seqlen_k - seqlen_q - column;
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const int moved = distance + i / 2 % 2 * 8 - i / 4 * 8 - i % 2;
        s[i] = fmaf(-slope, fabsf(static_cast<float>(moved)), s[i]);
      }
    }
    if (mask != nullptr) apply_mask(s, params.mask_stride, row, column);
  }

 private:
  template <class Bias, int n>
  __device__ __forceinline__ void add_bias(float (&s)[n], const ScoreStrides& stride, int row,
                                           int column) const {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int r = row + i / 2 % 2 * 8, c = column + i / 4 * 8 + i % 2;
      if (r < seqlen_q && c < seqlen_k)
        s[i] += static_cast<float>(static_cast<const Bias*>(bias)[r * stride.row + c * stride.col]);
    }
  }

  template <int n>
  __device__ __forceinline__ void apply_mask(float (&s)[n], const ScoreStrides& stride, int row,
                                             int column) const {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int r = row + i / 2 % 2 * 8, c = column + i / 4 * 8 + i % 2;
      const bool keep = r < seqlen_q && c < seqlen_k && mask[r * stride.row + c * stride.col] != 0;
      s[i] = keep ? s[i] : negative_infinity();
    }
  }
};

}  // namespace tile
