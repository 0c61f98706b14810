// A pipeline between warps: producers fill the stages of a ring in shared memory, consumers empty
// them, and a pair of mbarriers for each stage says when it is full and when it is empty.
#pragma once

#include "ptx/mbarrier.cuh"

namespace tile {

// Which stage of a ring a warp is at, and the parity of that stage's present use. Who reads waits
// for the full barrier's `parity`; who writes waits for the empty barrier's `parity ^ 1`, which a
// new barrier has completed already.
template <int kStages>
struct PipelineState {
  int index = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

// The same in one register, where registers are few: how many stages the warp has used.
template <int kStages>
struct PipelineCounter {
  unsigned count = 0;

  __device__ __forceinline__ PipelineState<kStages> state() const {
    static_assert((kStages & (kStages - 1)) == 0,
                  "the count wraps around at a multiple of a round");
    return {static_cast<int>(count % kStages), count / kStages % 2};
  }
  __device__ __forceinline__ void advance() { ++count; }
};

// One arrival for a whole warp, after all that its lanes did before.
__device__ __forceinline__ void arrive_warp(ptx::Mbarrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

}  // namespace tile
