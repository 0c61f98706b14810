// What decode_simt.cu and mla/decode_simt.cu share: the running softmax of a warp's rows, and the
// end of a split, at which a thread block merges its warps' results.
#pragma once

#include "decoding/last_merge.cuh"

namespace decoding {

// The rows of a warp: O relative to 2^max, whose columns l, l + 32, … lane l has, and the sums of
// weights (online softmax). kAnySize: scores may be as large as floats are, as a bias makes them
// that stands for a mask.
template <class Acc, int kRows, int kLaneDims, bool kAnySize = false>
struct WarpRows {
  Acc o[kRows][kLaneDims] = {};
  Acc row_max[kRows], row_sum[kRows] = {};

  __device__ __forceinline__ WarpRows() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_max[r] = tile::negative_infinity<Acc>();
  }

  // Adds keys to row r: their scores, -inf for a hidden key, and values, of which the first
  // kLaneDims numbers count.
  template <int kKeys, int kDims>
  __device__ __forceinline__ void add(int r, const Acc (&s)[kKeys], const Acc (&v)[kKeys][kDims]) {
    Acc new_max = row_max[r];
#pragma unroll
    for (int j = 0; j < kKeys; ++j)
      new_max = fmax(new_max, ceil(kAnySize ? tile::in_log2(s[j])
                                            : s[j] * static_cast<Acc>(1.4426950408889634)));
    const Acc shift = new_max == tile::negative_infinity<Acc>() ? 0 : new_max;
    const Acc factor = power_of_two(row_max[r] - shift);
    Acc sum = 0, weighted[kLaneDims] = {};
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      const Acc weight =
          kAnySize && is_large(shift) ? large_weight(s[j], shift) : decoding::weight(s[j], shift);
      if (weight == 0) continue;  // a hidden key's value may be NaN
      sum += weight;
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) weighted[i] = fma(weight, v[j][i], weighted[i]);
    }
    row_max[r] = new_max;
    row_sum[r] = fma(row_sum[r], factor, sum);
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) o[r][i] = fma(o[r][i], factor, weighted[i]);
  }

 private:
  // Whether a maximum is so large that what in_log2 rounds is more than a weight may be wrong by.
  __device__ __forceinline__ static bool is_large(Acc max) {
    return fabs(max) > static_cast<Acc>(sizeof(Acc) == 4 ? 0x1p24 : 0x1p53);
  }
  // e^x / 2^max, of the x that the maximum is of exactly 1.
  __device__ __forceinline__ static Acc large_weight(Acc x, Acc max) {
    return exp2(tile::in_log2(x) - max);
  }
};

// The results of a thread block's warps for one split.
template <class Acc, int kWarps, int kRows, int kHeadDim>
struct WarpResults {
  alignas(16) Acc o[kWarps][kRows][kHeadDim];
  Acc max_sum[kWarps][kRows][2];

  // Merges what the warps have in registers, and writes it. By all threads of the block.
  template <class T, int kLaneDims, bool kAnySize>
  __device__ __forceinline__ void write(const WarpRows<Acc, kRows, kLaneDims, kAnySize>& rows,
                                        const Writer<T, kRows, kHeadDim, false, 1>& writer) {
    using Columns = FourColumns<Acc>;
    constexpr int kVecs = kHeadDim / 4;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();  // the split before has been merged
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) o[warp][r][lane + 32 * i] = rows.o[r][i];
      if (lane == 0) {
        max_sum[warp][r][0] = rows.row_max[r];
        max_sum[warp][r][1] = rows.row_sum[r];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < writer.rows() * kVecs; i += Config::threads) {
      const int row = i / kVecs, column = i % kVecs * 4;
      if (column >= writer.params.head_dim_v) continue;
      Partial<T> whole;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) whole.max = fmax(whole.max, max_sum[w][row][0]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w)
        whole.add(reinterpret_cast<const Columns&>(o[w][row][column]), max_sum[w][row][0],
                  max_sum[w][row][1]);
      writer.put(row, column, whole);
    }
  }
};

}  // namespace decoding
