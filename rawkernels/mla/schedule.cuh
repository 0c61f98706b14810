// Work partition of mla/decode_sm90.cu. A split costs more here than in decoding/schedule.cuh's
// kernels: Q of 72 KiB is loaded for it, and a partial result of 64 rows of 512 numbers is 128 KiB.
// So thread blocks do not share all keys evenly, which gives most of them parts of two sequences,
// where something else leaves none of them much more to do:
//
// - pieces: each group of thread blocks has one piece of one sequence. 23 sequences of 1012 tokens
//   on 132 groups are five pieces each, of at most 2 steps, where even shares are 1.4 steps in up
//   to two splits.
// - whole sequences, as many for each group: 64 of 4096 tokens on 66 groups are 33 steps whole and
//   32 shared evenly, which took 160 us on an H200 where FlashMLA took 128.
//
// A step is a pair of blocks of keys.
#pragma once

#include "decoding/schedule.cuh"

namespace mla {

template <int kRows, int kTileKeys>
struct PieceSchedule : decoding::Schedule<kRows, kTileKeys> {
  using Even = decoding::Schedule<kRows, kTileKeys>;
  static constexpr int kSplitSteps = 3;  // what a split costs beside its keys, about
  static constexpr int kPartSteps = 3;   // and partial results, if all groups have some
  static constexpr int kLaneSequences = 5;

  int piece = 0, pieces = 0;  // of the sequence; 0: it is not cut into pieces

  // Finds this thread block's first step; false where there is none. By all lanes of a warp.
  __device__ __forceinline__ bool start(const DecodeParams& params) {
    if (params.batch == 1 || params.batch > 32 * kLaneSequences || params.fixed_splits != 0 ||
        params.heads_per_block > 1)
      return Even::start(params);
    const int lane = threadIdx.x % 32, groups = gridDim.y;
    int steps[kLaneSequences], longest = 0, total = 0;
    bool one_tile = true;  // of rows, in all sequences
#pragma unroll
    for (int i = 0; i < kLaneSequences; ++i) {
      steps[i] = 0;
      const int index = 32 * i + lane;
      if (index >= params.batch) continue;
      const decoding::CachedSequence sequence = decoding::sequence_at(params, index);
      const int row_tiles = decoding::count_row_tiles<kRows>(params, sequence);
      steps[i] = Even::steps_per_head(params, sequence, this->blocks) -
                 row_tiles * Even::extra_steps(params);
      one_tile = one_tile && row_tiles <= 1;
      longest = max(longest, steps[i]);
      total += steps[i];
    }
    longest = __reduce_max_sync(~0u, longest);
    total = __reduce_add_sync(~0u, total);
    const int share = (total + groups - 1) / groups;
    const int each = (params.batch + groups - 1) / groups;
    this->share = this->larger = 0;
    this->head = this->row_tile = this->index = this->step = this->end = 0;
    // Shared evenly, a group has a split for each of its sequences and another one.
    const int splits = kSplitSteps * params.batch / groups;
    const int parts = kPartSteps * min(params.batch, groups) / groups;
    if (longest * each <= share + splits + kSplitSteps * (1 - each) + parts)
      return start_whole(params, each);
    if (each == 1 && __all_sync(~0u, one_tile)) {
#pragma unroll 1
      for (int most = share; most <= share + splits; ++most)
        if (count_pieces(steps, most) <= groups) return start_piece(params, steps, most);
    }
    return Even::start(params);
  }

  // The place of the split that next() gave last.
  __device__ __forceinline__ decoding::SplitPlace place_of(const DecodeParams& params,
                                                           const decoding::Split& split) const {
    if (pieces <= 1) return Even::place_of(params, split);
    decoding::SplitPlace place = {piece, pieces, false, false, true, 0};
    place.plan_merge();
    place.first_slot = 2 * (blockIdx.y - piece) * gridDim.x + blockIdx.x;
    return place;
  }

 private:
  // `each` sequences one after the other.
  __device__ __forceinline__ bool start_whole(const DecodeParams& params, int each) {
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

  // Into how many pieces of at most so many steps sequences are cut, all together.
  __device__ __forceinline__ static int count_pieces(const int (&steps)[kLaneSequences], int most) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kLaneSequences; ++i)
      count += static_cast<unsigned>(steps[i] + most - 1) / most;
    return __reduce_add_sync(~0u, count);
  }

  // This group's piece of at most `most` steps.
  __device__ __forceinline__ bool start_piece(const DecodeParams& params,
                                              const int (&steps)[kLaneSequences], int most) {
    const int lane = threadIdx.x % 32, group = blockIdx.y;
    int before = 0;
#pragma unroll
    for (int i = 0; i < kLaneSequences; ++i) {
      const int own = static_cast<unsigned>(steps[i] + most - 1) / most;
      int inclusive = own;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, inclusive, distance);
        if (lane >= distance) inclusive += other;
      }
      const int all = __shfl_sync(~0u, inclusive, 31);
      if (group < before + all) {
        const int holder = __ffs(__ballot_sync(~0u, before + inclusive > group)) - 1;
        pieces = __shfl_sync(~0u, own, holder);
        piece = group - before - __shfl_sync(~0u, inclusive - own, holder);
        this->seq = decoding::sequence_at(params, 32 * i + holder);
        this->blocks = decoding::cut_keys<kRows, kTileKeys>(params, this->seq, 0);
        const int begin = begin_of_piece(piece);
        this->index = Even::extra_steps(params) + begin;
        this->end = begin_of_piece(piece + 1) - begin;
        return true;
      }
      before += all;
    }
    return false;
  }
  __device__ __forceinline__ int begin_of_piece(int i) const {
    return static_cast<unsigned>(i * this->blocks.count) / pieces;
  }
};

}  // namespace mla
