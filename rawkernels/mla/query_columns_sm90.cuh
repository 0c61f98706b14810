// What a lane has of products (wgmma) in which keys, or a value's columns, are the rows, and a
// tile's queries the columns.
#pragma once

#include "ptx/shared.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"
#include "tile/visibility.cuh"

namespace mla {

template <int kRows>
struct QueryColumns {
  static constexpr int kScores = kRows / 2;   // numbers of a product of 64 rows in a lane
  static constexpr int kOwnRows = kRows / 4;  // queries of which a lane has scores
  using Panel = tile::Swizzled<8>;

  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;

  // The lane's queries, and where the numbers of one are, which are of two rows.
  __device__ __forceinline__ int own_row(int i) const { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
  __device__ __forceinline__ static constexpr int at(int i, int h) {
    return i / 2 * 4 + 2 * h + i % 2;
  }

  // The largest score of the warp's keys, of each query.
  __device__ __forceinline__ void put_largest(const float (&s)[kScores],
                                              float (&of_warp)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kOwnRows; i += 4) {
      float max[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) max[j] = fmaxf(s[at(i + j, 0)], s[at(i + j, 1)]);
      max_of_lanes(max);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (lane < 4) of_warp[own_row(i + j)] = max[j];
    }
  }
  // The largest, and the sum, of what the lanes have of each of several queries. Queries take turns
  // at shuffles: with one query after the other, each shuffle would wait for the one before.
  template <int n>
  __device__ __forceinline__ static void max_of_lanes(float (&x)[n]) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
      for (float& own : x) own = fmaxf(own, __shfl_xor_sync(~0u, own, distance));
  }
  template <int n>
  __device__ __forceinline__ static void sum_of_lanes(float (&x)[n]) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
      for (float& own : x) own += __shfl_xor_sync(~0u, own, distance);
  }
  // Scores of keys from `first` on that a query does not see become -inf.
  __device__ __forceinline__ void hide(float (&s)[kScores], const tile::Range (&visible)[kRows],
                                       int first) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const tile::Range& keys = visible[own_row(i / 4 * 2 + i % 2)];
      const int key = first + warp * 16 + i / 2 % 2 * 8 + lane / 4;
      if (key < keys.begin || key >= keys.end) s[i] = tile::negative_infinity();
    }
  }
  // Where a lane stores probabilities of the first 16 queries, a row of the tile for each of these.
  __device__ __forceinline__ unsigned probabilities_at(const unsigned char* tile) const {
    return ptx::shared_address(tile) + Panel::at(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
  }
};

}  // namespace mla
