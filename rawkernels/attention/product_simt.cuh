// The two products of the simt kernels: tiles of shared memory times each other, as outer products
// of registers. Each is a sum of chains of kChain products: one chain over all would round too
// often.
//
// 16 threads share a row of the result, and all threads its rows: a thread has kRows of them,
// evenly spaced, and every sixteenth column, or every sixteenth vector of columns.
#pragma once

#include "attention/slab_simt.cuh"

constexpr int kThreadCols = 16;
constexpr int kChain = 16;  // products added one by one: the error grows with their number

__device__ constexpr int least(int a, int b) { return a < b ? a : b; }

__device__ __forceinline__ const Vec& vec(const Acc& first) {
  return reinterpret_cast<const Vec&>(first);
}

// S += A B^T over `depth` columns of the slabs A and B, or a few more, which are zeros.
template <int kRows, int kCols, int kTileM, int kTileN, int kPitch>
__device__ __forceinline__ void multiply_scores(Acc (&s)[kRows][kCols],
                                                const Acc (&a)[kTileM][kPitch],
                                                const Acc (&b)[kTileN][kPitch], int depth) {
  constexpr int kThreadRows = kTileM / kRows;
  constexpr int kColsAtOnce = least(kCols, 4);
  static_assert(kTileM % kRows == 0 && kTileN == kCols * kThreadCols && kCols % kColsAtOnce == 0,
                "threads and chains cover S evenly");
  const int row = threadIdx.x / kThreadCols, col = threadIdx.x % kThreadCols;
#pragma unroll 1
  for (int begin = 0; begin < depth; begin += kChain)
#pragma unroll
    for (int first = 0; first < kCols; first += kColsAtOnce) {
      Acc chain[kRows][kColsAtOnce];
#pragma unroll
      for (int d = 0; d < kChain; d += kVec) {
        Vec right[kColsAtOnce];
#pragma unroll
        for (int j = 0; j < kColsAtOnce; ++j)
          right[j] = vec(b[col + (first + j) * kThreadCols][begin + d]);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const Vec left = vec(a[row + i * kThreadRows][begin + d]);
#pragma unroll
          for (int j = 0; j < kColsAtOnce; ++j)
#pragma unroll
            for (int e = 0; e < kVec; ++e)
              chain[i][j] = d + e == 0 ? left.x[e] * right[j].x[e]
                                       : fma(left.x[e], right[j].x[e], chain[i][j]);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kColsAtOnce; ++j) s[i][first + j] += chain[i][j];
    }
}

// O += P V over the slab of V, whose first row is column `first_column` of P. kNonfinite: V holds
// infinities or NaN, which a 0 in P must not pass on, since 0 * NaN is NaN. kNumbers: of chains
// that are summed at a time, as registers hold beside O; kKeys: columns of P that are read at a
// time.
template <bool kNonfinite, int kNumbers = 32, int kKeys = kVec, int kRows, int kVecs, int kTileM,
          int kPitch, int kDepth, int kPitchV>
__device__ __forceinline__ void multiply_values(Acc (&o)[kRows][kVecs][kVec],
                                                const Acc (&p)[kTileM][kPitch],
                                                const Acc (&v)[kDepth][kPitchV], int first_column) {
  constexpr int kThreadRows = kTileM / kRows;
  constexpr int kVecsAtOnce = least(kVecs, kNumbers / (kRows * kVec));
  static_assert(kTileM % kRows == 0 && kPitchV >= kVecs * kThreadCols * kVec &&
                    kVecs % kVecsAtOnce == 0 && kDepth % kChain == 0,
                "threads and chains cover O evenly");
  struct alignas(kKeys * sizeof(Acc)) Keys {
    Acc x[kKeys];
  };
  const int row = threadIdx.x / kThreadCols, col = threadIdx.x % kThreadCols;
#pragma unroll 1
  for (int begin = 0; begin < kDepth; begin += kChain)
#pragma unroll
    for (int first = 0; first < kVecs; first += kVecsAtOnce) {
      Acc chain[kRows][kVecsAtOnce][kVec] = {};
#pragma unroll(kNonfinite ? 1 : kChain / kVec)
      for (int n = 0; n < kChain; n += kKeys) {
        Keys left[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          left[i] =
              reinterpret_cast<const Keys&>(p[row + i * kThreadRows][first_column + begin + n]);
#pragma unroll
        for (int e = 0; e < kKeys; ++e)
#pragma unroll
          for (int c = 0; c < kVecsAtOnce; ++c) {
            const Vec right = vec(v[begin + n + e][(col + (first + c) * kThreadCols) * kVec]);
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
              for (int f = 0; f < kVec; ++f)
                if (!kNonfinite && n + e == 0)
                  chain[i][c][f] = left[i].x[e] * right.x[f];
                else if (!kNonfinite || left[i].x[e] != 0)
                  chain[i][c][f] = fma(left[i].x[e], right.x[f], chain[i][c][f]);
          }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int c = 0; c < kVecsAtOnce; ++c)
#pragma unroll
          for (int f = 0; f < kVec; ++f) o[i][first + c][f] += chain[i][c][f];
    }
}
