// Work partition of mla/decode_sm90.cu: that of decoding/schedule.cuh, or whole sequences where
// these leave no thread block much more than its share.
//
// A split costs more here than elsewhere: Q of 72 KiB is loaded again, a partial result of 64 rows
// of 512 numbers is 128 KiB, and a second launch reads it. 64 sequences of 4096 tokens on 66 groups
// of thread blocks, 128 heads, are 32 steps a group if they are shared evenly, and 33 whole.
#pragma once

#include "decoding/schedule.cuh"

namespace mla {

template <int kRows, int kTileKeys>
struct WholeSchedule : decoding::Schedule<kRows, kTileKeys> {
  using Even = decoding::Schedule<kRows, kTileKeys>;
  // How many steps, of a pair of blocks of keys, splitting costs: of few sequences, and what is
  // added where there is one for every group.
  static constexpr int kSplitSteps = 2, kManySplitSteps = 4;
  static constexpr int kMostWhole = 4;  // sequences of a group
  static constexpr int kAtOnce = 4;     // lengths that a lane has requested

  // Finds this thread block's first step; false where there is none. By all lanes of a warp.
  __device__ __forceinline__ bool start(const DecodeParams& params) {
    const int groups = gridDim.y, each = (params.batch + groups - 1) / groups;
    if (params.batch == 1 || each > kMostWhole || params.fixed_splits != 0 ||
        params.heads_per_block > 1 || !keeps_whole(params, each))
      return Even::start(params);
    this->share = this->larger = 0;
    this->head = this->row_tile = this->index = this->step = this->end = 0;
    const int first = min(static_cast<int>(blockIdx.y) * each, params.batch);
#pragma unroll 1
    for (int i = min(first + each, params.batch) - 1; i >= first; --i) {
      const decoding::CachedSequence sequence = decoding::sequence_at(params, i);
      const int steps = Even::steps_per_head(params, sequence, this->blocks);
      if (steps > 0) this->seq = sequence;
      this->end += steps;
    }
    if (this->end == 0) return false;
    this->blocks = decoding::cut_keys<kRows, kTileKeys>(params, this->seq, 0);
    return true;
  }

 private:
  // Whether `each` of the longest sequences take little longer than a group's share of all.
  __device__ __forceinline__ bool keeps_whole(const DecodeParams& params, int each) {
    const int lane = threadIdx.x % 32, groups = gridDim.y;
    int longest = 0, total = 0;
#pragma unroll 1
    for (int first = lane; first < params.batch; first += 32 * kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int index = first + 32 * i;
        if (index >= params.batch) continue;
        const int steps =
            Even::steps_per_head(params, decoding::sequence_at(params, index), this->blocks);
        longest = max(longest, steps);
        total += steps;
      }
    }
    longest = __reduce_max_sync(~0u, longest);
    total = __reduce_add_sync(~0u, total);
    const int splitting = kSplitSteps + kManySplitSteps * min(params.batch, groups) / groups;
    return longest * each <= total / groups + splitting;
  }
};

}  // namespace mla
