// Work partition of mla/decode_sm90.cu: each group of thread blocks has one piece of one sequence
// where that gives none of them much more than an even share.
//
// A split costs more here than in the kernels that share all keys evenly (decoding/schedule.cuh): Q
// of 72 KiB is loaded for it, and a partial result of 64 rows of 512 numbers is 128 KiB. Even
// shares give most groups parts of two sequences. 64 sequences of 4096 tokens on 66 groups are 33
// steps whole and 32 shared evenly, which took 160 us on an H200 where FlashMLA took 128; 23 of
// 1012 on 132 groups are four pieces each, of 2 steps, and 1.4 steps shared evenly, in up to two
// splits. A step is a pair of blocks of keys.
#pragma once

#include "decoding/schedule.cuh"
#include "ptx/prefetch.cuh"

namespace mla {

// n / d for 0 < d < 2^16 and 0 <= n < 2^16, by a multiplication: a warp that looks for its piece
// divides several times, and nothing else of its block can begin before.
struct Divisor {
  unsigned d, magic;
  __device__ __forceinline__ explicit Divisor(int n) : d(n), magic(0xffffffffu / d + 1) {}
  __device__ __forceinline__ int divide(int n) const { return d == 1 ? n : __umulhi(n, magic); }
};

template <int kRows, int kTileKeys, int kTileSteps>
struct PieceSchedule : decoding::Schedule<kRows, kTileKeys, 1, false, kTileSteps> {
  using Even = decoding::Schedule<kRows, kTileKeys, 1, false, kTileSteps>;
  static constexpr int kSplitSteps = 3;  // what a split costs beside its keys, about
  static constexpr int kPartSteps = 3;   // and partial results, if all groups have some
  static constexpr int kLaneSequences = 5, kStepBits = 12;

  // A group's piece, and how many its sequence has, are in place of its share: there are no
  // registers for both.
  __device__ __forceinline__ int piece() const { return this->share; }
  __device__ __forceinline__ int pieces() const { return -this->larger; }

  // Finds this thread block's first step; false where there is none. By all lanes of a warp.
  __device__ __forceinline__ bool start(const DecodeParams& params) {
    const int batch = params.batch, groups = gridDim.y;
    if (batch > 1 && batch <= min(groups, 32 * kLaneSequences) && params.fixed_splits == 0 &&
        params.heads_per_block == 1) {
      const unsigned long long steps = steps_of_lane(params);
      const int most = most_of_piece(steps, batch, groups);
      if (most > 0) return start_piece(params, steps, most);
    }
    return Even::start(params);
  }

  // The place of the split that next() gave last.
  __device__ __forceinline__ decoding::SplitPlace place_of(const DecodeParams& params,
                                                           const decoding::Split& split) const {
    if (pieces() <= 1) return Even::place_of(params, split);
    decoding::SplitPlace place = {piece(), pieces(), false, false, true, 0};
    place.plan_merge();
    place.first_slot = 2 * (blockIdx.y - piece()) * gridDim.x + blockIdx.x;
    return place;
  }

 private:
  // Steps of sequences 32 i + lane, kStepBits for each i; all bits where one has too many of them,
  // or several tiles of rows.
  __device__ __forceinline__ unsigned long long steps_of_lane(const DecodeParams& params) {
    unsigned long long steps = 0;
    // The loop below waits for one length at a time: this way only the first comes from afar.
    const int line = threadIdx.x % 32 * 32;
    if (params.seq_lens != nullptr && line < params.batch) ptx::touch(params.seq_lens + line);
#pragma unroll 1
    for (int i = 0; 32 * i < params.batch; ++i) {
      const int index = 32 * i + threadIdx.x % 32;
      if (index >= params.batch) break;
      const decoding::CachedSequence sequence = decoding::sequence_at(params, index);
      const int row_tiles = decoding::count_row_tiles<kRows>(params, sequence);
      const int count = decoding::cut_keys<kRows, kTileKeys>(params, sequence, 0).count;
      if (row_tiles > 1 || count >= 1 << kStepBits) return ~0ull;
      if (row_tiles == 1) steps |= static_cast<unsigned long long>(count) << kStepBits * i;
    }
    return steps;
  }
  __device__ __forceinline__ static int steps_of(unsigned long long steps, int i) {
    return static_cast<unsigned>(steps >> kStepBits * i) & (1 << kStepBits) - 1;
  }
  __device__ __forceinline__ static int pieces_of(unsigned long long steps, int i,
                                                  const Divisor& most) {
    return most.divide(steps_of(steps, i) + most.d - 1);
  }

  // How many steps a piece has at most; 0 if groups are to have even shares.
  __device__ __forceinline__ static int most_of_piece(unsigned long long steps, int batch,
                                                      int groups) {
    if (__any_sync(~0u, steps == ~0ull)) return 0;
    int longest = 0, total = 0;
#pragma unroll 1
    for (int i = 0; 32 * i < batch; ++i) {
      const int count = steps_of(steps, i);
      longest = max(longest, count);
      total += count;
    }
    longest = __reduce_max_sync(~0u, longest);
    total = __reduce_add_sync(~0u, total);
    const int share = max(1, (total + groups - 1) / groups);
    // Shared evenly, a group has a split for each of its sequences, and another one.
    const int splits = kSplitSteps * batch / groups, parts = kPartSteps * batch / groups;
    if (longest <= share + splits + parts) return max(1, longest);
#pragma unroll 1
    for (int most = share; most <= share + splits; ++most) {
      const Divisor divisor(most);
      int count = 0;
#pragma unroll 1
      for (int i = 0; 32 * i < batch; ++i) count += pieces_of(steps, i, divisor);
      if (__reduce_add_sync(~0u, count) <= groups) return most;
    }
    return 0;
  }

  // This group's piece of at most `most` steps.
  __device__ __forceinline__ bool start_piece(const DecodeParams& params, unsigned long long steps,
                                              int most) {
    const int lane = threadIdx.x % 32, group = blockIdx.y;
    this->head = this->row_tile = this->step = this->end = 0;
    const Divisor divisor(most);
    int before = 0;
#pragma unroll 1
    for (int i = 0; 32 * i < params.batch; ++i) {
      const int own = pieces_of(steps, i, divisor);
      const int all = __reduce_add_sync(~0u, own);
      if (group >= before + all) {
        before += all;
        continue;
      }
      int inclusive = own;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, inclusive, distance);
        if (lane >= distance) inclusive += other;
      }
      const int holder = __ffs(__ballot_sync(~0u, before + inclusive > group)) - 1;
      this->larger = -__shfl_sync(~0u, own, holder);
      this->share = group - before - __shfl_sync(~0u, inclusive - own, holder);
      this->seq = decoding::sequence_at(params, 32 * i + holder);
      this->blocks = decoding::cut_keys<kRows, kTileKeys>(params, this->seq, 0);
      const int begin = begin_of_piece(piece());
      this->index = Even::extra_steps(params) + begin;
      this->end = begin_of_piece(piece() + 1) - begin;
      return true;
    }
    return false;
  }
  __device__ __forceinline__ int begin_of_piece(int i) const {
    return static_cast<unsigned>(i * this->blocks.count) / pieces();
  }
};

}  // namespace mla
