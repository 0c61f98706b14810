// Tiles of a row, which warps read with as many loads in flight as there are registers for.
#pragma once

#include "ptx/prefetch.cuh"
#include "sampling/row.cuh"

constexpr int kUnroll = Config::unroll;   // groups that a warp has in flight
constexpr int kTileTokens = 8 * kUnroll;  // tokens of a thread in them

struct Row {
  const Config::dtype* logits;

  __device__ __forceinline__ float operator()(int i) const { return to_float(logits[i]); }

  // Asks L2 for a segment ahead of its use.
  __device__ __forceinline__ void prefetch(Segment segment) const {
    constexpr int kLine = 128 / sizeof(Config::dtype);
    for (int i = segment.begin + threadIdx.x * kLine; i < segment.end; i += Config::threads * kLine)
      ptx::prefetch_l2(logits + i);
  }
};

// Token j of a thread in the groups from `base` on.
__device__ __forceinline__ int tile_token(int base, int j) {
  return base + 32 * j + int(threadIdx.x % 32);
}

// Whether there are registers to hold the next tile while one is worked on.
constexpr bool kDoubleBuffer = Config::blocks_per_sm == 1;

// A warp's tiles of a segment, each of kTokens tokens of each thread; beyond the segment's end a
// logit is -inf. Tiles go to kTeam warps in turn.
template <int kTokens, int kTeam = kWarps>
struct Tiles {
  const Row& logits;
  const Segment segment;
  int base;

  __device__ __forceinline__ Tiles(const Row& logits, Segment segment)
      : logits(logits),
        segment(segment),
        base(segment.begin + int(threadIdx.x / 32) % kTeam * 32 * kTokens) {}

  __device__ __forceinline__ bool any() const { return base < segment.end; }

  __device__ __forceinline__ void next() { base += kTeam * 32 * kTokens; }

  __device__ __forceinline__ void load(float (&x)[kTokens]) const {
    if (base + 32 * kTokens <= segment.end) {
#pragma unroll
      for (int j = 0; j < kTokens; ++j) x[j] = logits(tile_token(base, j));
    } else {
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        const int i = tile_token(base, j);
        x[j] = i < segment.end ? logits(i) : -kInfinity;
      }
    }
  }

  __device__ __forceinline__ void load_ahead(float (&ahead)[kTokens]) const {
    if (kDoubleBuffer) load(ahead);
  }
};

// f(base, logits) for each tile. With kDoubleBuffer, `ahead` holds the first tile, from
// load_ahead(), and then each tile that follows, which is loaded while f runs.
template <int kTokens, class F>
__device__ __forceinline__ void for_each_tile(Tiles<kTokens> tiles, float (&ahead)[kTokens], F f) {
  float x[kTokens];
  while (tiles.any()) {
    const int base = tiles.base;
    if (kDoubleBuffer) {
#pragma unroll
      for (int j = 0; j < kTokens; ++j) x[j] = ahead[j];
      tiles.next();
      if (tiles.any()) tiles.load(ahead);
    } else {
      tiles.load(x);
      tiles.next();
    }
    f(base, x);
    __syncwarp();  // diverged lanes would go on alone, each with loads of its own
  }
}
