// Shared memory of mla/decode_few_sm90.cu, and who has which keys.
#pragma once

#include "decoding/combine.cuh"
#include "mla/maps.cuh"
#include "mla/panels_sm90.cuh"
#include "mla/partial.cuh"
#include "ptx/tma.cuh"

namespace mla {

using T = Config::dtype;

constexpr int kRows = Config::rows;  // of a tile: heads times query tokens
constexpr int kKeys = 64;            // of a block: the rows of a product
constexpr int kThreads = Config::threads;
constexpr int kWarpgroups = Config::warpgroups;
constexpr int kMostBlocks = kThreads;  // thread blocks of a tile: a thread waits for each

// A warpgroup reads, and frees, the panels of half of the columns first: those that it writes in
// the end. Of panels in this order every two have an mbarrier, the last one with what is rotated.
constexpr int kHalfPanels = kLatentPanels / 2;
constexpr int kFulls = 4;
__device__ __forceinline__ constexpr int full_of(int i) { return i / 2 < 3 ? i / 2 : 3; }
__device__ __forceinline__ constexpr bool begins_full(int i) {
  return i % 2 == 0 && i < kRopePanel;
}

// A row of O as 16-bit numbers, in the place of Q: 1040 bytes, so that eight rows meet in no bank.
constexpr int kRowBytes = kLatent * 2 + 16;

struct Smem {
  unsigned char q[kPanels][kRows * 128];
  // Keys; in the end what a warpgroup has of the other's columns of O.
  unsigned char k[kWarpgroups][kPanels][kPanelBytes];
  unsigned char p[kWarpgroups][kRows * 128];  // probabilities, a row for each query
  float warp_max[kWarpgroups][4][kRows];      // of each warp's keys of a block; in the end of |O|
  float warp_sum[kWarpgroups][4][kRows];      // of each warp's keys
  float row_max[kWarpgroups][kRows];
  tile::Range visible[kRows];         // the keys that each row sees
  long long out_at[kRows];            // where its rows of the result are
  float2 max_sum[kRows];              // of this thread block's partial result
  float2 their_max_sum[kMostBlocks];  // of partial results that this thread block merges
  bool left[kMostBlocks];             // thread blocks that have left their tasks to the last one
  bool waits;                         // all thread blocks run: this one may wait for them
  ptx::Mbarrier full[kWarpgroups][kFulls];
};
static_assert(sizeof(Smem) <= Config::smem_bytes, "Config has to ask for all of it");
static_assert(kRows * kRowBytes <= sizeof(Smem::q), "O takes the place of Q");

__device__ __forceinline__ unsigned char* row_of_o(Smem& smem, int row) {
  return smem.q[0] + row * kRowBytes;
}

// Who has which blocks of a tile's keys: they are dealt out to thread blocks in turn, and to a
// thread block's warpgroups, so that where each begins is known before the sequence's length is.
struct Deal {
  const int count;  // of blocks of keys

  __device__ __forceinline__ explicit Deal(const decoding::Split& split)
      : count(split.end > split.begin ? (split.end - split.origin - 1) / kKeys + 1 : 0) {}
  // Thread blocks that have any; the first has a result to write even where there are no keys.
  __device__ __forceinline__ int blocks() const {
    return min(static_cast<int>(gridDim.x), max(count, 1));
  }
  __device__ __forceinline__ static int first(int warpgroup) {
    return blockIdx.x + warpgroup * gridDim.x;
  }
  __device__ __forceinline__ static int step() { return kWarpgroups * gridDim.x; }
  __device__ __forceinline__ bool has(int warpgroup) const { return first(warpgroup) < count; }
};

}  // namespace mla
