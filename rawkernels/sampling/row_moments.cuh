// Sums over a row whose rounding does not depend on the cluster, and the one for typical-p: the
// mean logit of a row by its probabilities. |-log p - entropy| is the distance from it, over
// temperature.
#pragma once

#include "sampling/tiles.cuh"

// Sums that decide are taken over these segments whatever the cluster, so that their rounding does
// not depend on it. Sums of bins do, and decide only what is clear by more than kTolerance.
constexpr int kSegments = 8;
constexpr int kOwnSegments = kSegments / Config::cluster;
constexpr int kSumWarps = 8;  // that sum a segment together, whatever Config::threads is
constexpr int kSumTokens =
    16;  // of a thread's tile, whatever Config::unroll is: it decides how sums round
static_assert(kSegments % Config::cluster == 0, "every block must own whole segments");
static_assert(kWarps % kSumWarps == 0, "every segment must have a whole team of warps");

// A row's largest logit, the sum of its probabilities relative to that one, and the sum of their
// products with the logits' distances from it.
struct RowMoments {
  float high, sum, moment;

  __device__ __forceinline__ float mean() const { return high + moment * ptx::rcp(sum); }
};

struct JoinMoments {
  float slope;

  __device__ __forceinline__ RowMoments operator()(RowMoments a, RowMoments b) const {
    const float high = fmaxf(a.high, b.high);
    const auto about = [&](RowMoments m) -> RowMoments {
      const float below = fmaxf(m.high - high, -kMaxFloat);
      const float sum = m.sum * ptx::ex2(below * slope);
      return {high, sum, fmaf(sum, below, m.moment * ptx::ex2(below * slope))};
    };
    a = about(a);
    b = about(b);
    return {high, a.sum + b.sum, a.moment + b.moment};
  }
};

__device__ __forceinline__ RowMoments shuffle_xor(RowMoments value, int lanes) {
  return {shuffle_xor(value.high, lanes), shuffle_xor(value.sum, lanes),
          shuffle_xor(value.moment, lanes)};
}

// Reads a row for its moments, in an order that does not depend on the cluster; each tile is loaded
// while the one before it is added. Contains the wait of the kernel's first cluster barrier.
__device__ __forceinline__ RowMoments moments_of_row(const Row& logits, int vocab, float slope,
                                                     RowMoments* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kSumWarps;
  const JoinMoments join = {slope};
  const RowMoments none = {-kMaxFloat, 0.0f, 0.0f};
  wait_cluster();
#pragma unroll 1
  for (int own = threadIdx.x / 32 / kSumWarps; own < kOwnSegments; own += kWarps / kSumWarps) {
    const int number = rank_in_cluster() * kOwnSegments + own;
    RowMoments sum = none;
    Tiles<kSumTokens, kSumWarps> tiles(logits, part_of_row<kGroup, kSegments>(vocab, number));
    float ahead[kSumTokens];
    if (tiles.any()) tiles.load(ahead);
    while (tiles.any()) {
      float x[kSumTokens];
      RowMoments tile = none;
#pragma unroll
      for (int j = 0; j < kSumTokens; ++j) {
        x[j] = ahead[j];
        tile.high = fmaxf(tile.high, x[j]);
      }
      tiles.next();
      if (tiles.any()) tiles.load(ahead);
#pragma unroll
      for (int j = 0; j < kSumTokens; ++j) {
        const float below = fmaxf(x[j] - tile.high, -kMaxFloat);
        const float p = ptx::ex2(below * slope);
        tile.sum += p;
        tile.moment = fmaf(p, below, tile.moment);
      }
      sum = join(sum, tile);
    }
    sum = reduce_warp(sum, join);
    if (lane < Config::cluster) *of_rank(&sums[number * kSumWarps + warp], lane) = sum;
  }
  sync_cluster();
  RowMoments sum = none;
  for (int slot = lane; slot < kSegments * kSumWarps; slot += 32) sum = join(sum, sums[slot]);
  return reduce_warp(sum, join);
}
