// Keys shared out evenly (Config::even_keys of attention/forward_sm90.cu): every thread block has
// an equal range of all blocks of keys (attention/even_scheduler_sm90.cuh). Of a tile that ranges
// cut, each part's thread block leaves its share of O in memory, and whichever is the last merges
// them: nobody waits.
#pragma once

#include "attention/layout_sm90.cuh"
#include "attention/score_sm90.cuh"

// What a thread block leaves of a tile that it has not all keys of, as the lanes of its consumer
// have it.
struct PartOfTile {
  struct OfWarp {
    float4 o[kHeadDimV / 8][32];
    float4 softmax[32];  // both rows' maxima, then this lane's sums
    bool replaced;
  } warps[4];
};

// The workspace. A thread block leaves two parts at most: one of a tile that an earlier block
// begins with, and one of a tile that it begins with itself.
struct PartsOfTiles {
  unsigned long long* arrived;  // [thread block][warp] of tiles that it begins with
  PartOfTile* parts;            // [thread block][2]

  __device__ __forceinline__ explicit PartsOfTiles(const Sm90Params& sm90)
      : arrived(&sm90.scheduler->initialised),
        parts(reinterpret_cast<PartOfTile*>(arrived + (4 * gridDim.x + 31) / 32 * 32)) {}

  __device__ __forceinline__ PartOfTile::OfWarp& part(const Tile& tile, int block) const {
    return parts[2 * block + (block == tile.first_block())].warps[threadIdx.x / 32 % 4];
  }

  // Counts a warp's part, which is written; whether all parts of the warp's rows are there. A count
  // lies below the bits of the launch's id: any other content is none, as is what a replay of the
  // launch in a CUDA graph finds, since the last one leaves none. All lanes go through the loop
  // together, and `replaced` below comes from a vote: else ptxas takes the lanes to be apart in the
  // consumer's main loop, too, and copies the descriptors of every product from registers.
  __device__ __forceinline__ bool is_last(const Tile& tile, unsigned long long launch_id) const {
    constexpr unsigned long long kCounts = 0xffff;
    unsigned long long* const count = arrived + 4 * tile.first_block() + threadIdx.x / 32 % 4;
    const unsigned long long none = launch_id & ~kCounts;
    unsigned long long found = none, expected;
    bool last;
    __syncwarp();
    __threadfence();
    do {
      expected = found;
      const unsigned long long before = (expected & ~kCounts) == none ? expected : none;
      last = (before & kCounts) + 1 == tile.parts();
      if (threadIdx.x % 32 == 0) found = atomicCAS(count, expected, last ? ~none : before + 1);
      found = __shfl_sync(~0u, found, 0);
    } while (found != expected);
    __threadfence();
    __syncwarp();
    return last;
  }
};

// A consumer's O of one part of a tile, for the others; true in the warps that are the last, which
// then have the O, the maxima and the sums of all parts. `replaced`: whether the filter has
// replaced values, of the part, then of all parts.
__device__ __forceinline__ bool merge_parts(float (&o)[kHeadDimV / 2], Softmax& softmax,
                                            bool& replaced, const Tile& tile,
                                            const Sm90Params& sm90) {
  const PartsOfTiles all(sm90);
  const int lane = threadIdx.x % 32;
  PartOfTile::OfWarp& own = all.part(tile, blockIdx.x);
#pragma unroll
  for (int j = 0; j < kHeadDimV / 8; ++j)
    own.o[j][lane] = make_float4(o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]);
  own.softmax[lane] =
      make_float4(softmax.row_max[0], softmax.row_max[1], softmax.row_sum[0], softmax.row_sum[1]);
  if (lane == 0) own.replaced = replaced;
  if (!all.is_last(tile, sm90.launch_id)) return false;
  softmax = Softmax();
#pragma unroll
  for (int i = 0; i < kHeadDimV / 2; ++i) o[i] = 0.0f;
#pragma unroll 1
  for (int i = 0; i < tile.parts(); ++i) {
    const PartOfTile::OfWarp& part = all.part(tile, tile.first_block() + i * sm90.section);
    const float4 its = part.softmax[lane];
    const float its_max[2] = {its.x, its.y}, its_sum[2] = {its.z, its.w};
    float factor[2], its_factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float larger = fmaxf(softmax.row_max[i], its_max[i]);
      const float offset = Softmax::offset(larger, sm90.scale_log2);
      factor[i] = ptx::ex2(softmax.row_max[i] * sm90.scale_log2 - offset);
      its_factor[i] = ptx::ex2(its_max[i] * sm90.scale_log2 - offset);
      softmax.row_max[i] = larger;
      softmax.row_sum[i] = softmax.row_sum[i] * factor[i] + its_sum[i] * its_factor[i];
    }
    replaced |= __any_sync(~0u, part.replaced);
#pragma unroll
    for (int j = 0; j < kHeadDimV / 8; ++j) {
      const float4 its_o = part.o[j][lane];
      o[4 * j] = o[4 * j] * factor[0] + its_o.x * its_factor[0];
      o[4 * j + 1] = o[4 * j + 1] * factor[0] + its_o.y * its_factor[0];
      o[4 * j + 2] = o[4 * j + 2] * factor[1] + its_o.z * its_factor[1];
      o[4 * j + 3] = o[4 * j + 3] * factor[1] + its_o.w * its_factor[1];
    }
  }
  return true;
}
