// The counter in memory that thread blocks of attention/forward_sm90.cu take tiles from. Each of
// them takes until it finds none, and the last one that does closes the counter.
#pragma once

#include "attention/tile_sm90.cuh"
#include "ptx/acquire_release.cuh"

// All lanes of one warp together.
struct TileCounter {
  const Sm90Params& sm90;

  __device__ __forceinline__ explicit TileCounter(const Sm90Params& sm90) : sm90(sm90) {
    if (threadIdx.x % 32 != 0) return;
    if (has_late_blocks())
      open_once();
    else if (blockIdx.x == 0)
      open(gridDim.x);
  }

  // Beside another launch some blocks begin late, as a launch of their own. A tile that were theirs
  // from the start would wait as long.
  __device__ __forceinline__ bool has_late_blocks() const {
    return Config::varlen && Config::seq_lens && sm90.blocks > 0;
  }

  // The next of total() tiles, or a number beyond them. A function, so that no register holds how
  // many there are meanwhile.
  template <class Total>
  __device__ __forceinline__ unsigned take(const Total& total) const {
    unsigned taken;
    if (threadIdx.x % 32 == 0) {
      while (ptx::load_acquire(&sm90.scheduler->initialised) != sm90.launch_id) {
      }
      taken = atomicAdd(&sm90.scheduler->next_tile, 1);
      // The last of all: a replay of this launch in a CUDA graph must not find the launch_id.
      const unsigned blocks = has_late_blocks() ? sm90.blocks : gridDim.x;
      if (taken == total() + blocks - 1) sm90.scheduler->initialised = ~sm90.launch_id;
    }
    return __shfl_sync(~0u, taken, 0);
  }

 private:
  __device__ __forceinline__ void open(unsigned next_tile) const {
    sm90.scheduler->next_tile = next_tile;
    ptx::store_release(&sm90.scheduler->initialised, sm90.launch_id);
  }
  // By whichever block comes first: of two launches neither may wait for the other, which may be
  // waiting for this one's multiprocessors.
  __device__ __forceinline__ void open_once() const {
    unsigned long long* state = &sm90.scheduler->initialised;
    const unsigned long long found = ptx::load_acquire(state), opening = sm90.launch_id + 1;
    if (found == sm90.launch_id || found == opening) return;
    if (atomicCAS(state, found, opening) == found) open(0);
  }
};
