// Work partition of mla/decode_sm90.cu and of the kernels for codes: each group of thread blocks
// has one piece of one sequence where that gives none of them much more than an even share.
//
// A split costs more here than in the kernels that share all keys evenly (decoding/schedule.cuh): Q
// of 72 KiB is loaded for it, and a partial result of 64 rows of 512 numbers is 64 KiB or more.
// Even shares give most groups parts of two sequences. 64 sequences of 4096 tokens on 66 groups are
// 64 blocks of keys whole and 63 shared evenly, which took 160 us on an H200 where FlashMLA took
// 128; 23 of 1012 on 132 groups are four pieces each, of 4 blocks, and 2.8 shared evenly, in up to
// two splits.
//
// Nothing else of a thread block can begin before its work is found. So a warp reads all lengths at
// once, and finds pieces and even shares from the same counts of blocks, where no window begins
// behind a sequence's first key.
#pragma once

#include "decoding/schedule.cuh"
#include "ptx/math.cuh"
#include "tile/prefix_sum.cuh"

namespace mla {

// n / d for 0 < d < 2^12 and 0 <= n < 2^20, by a multiplication: a warp that looks for its piece
// divides several times, and nothing else of its block can begin before. The quotient of n + 1/2 is
// at least 2^-21 of itself away from any integer, and rounding moves it by 2^-22.
struct Divisor {
  int d;
  float inverse;
  __device__ __forceinline__ explicit Divisor(int n)
      : d(n), inverse(ptx::rcp(static_cast<float>(n))) {}
  __device__ __forceinline__ int divide(int n) const {
    return static_cast<int>((static_cast<float>(n) + 0.5f) * inverse);
  }
  __device__ __forceinline__ int divide_up(int n) const { return divide(n + d - 1); }
};

// The keys of a split that a row of its tile sees; rows that do not exist do as the last one does.
template <int kRows>
__device__ __forceinline__ tile::Range keys_of_row(const DecodeParams& params,
                                                   const decoding::Split& split, int row) {
  const int last = split.seq.seqlen_q * params.group - 1;
  const int token = divided_by_group(params, min(split.row_tile * kRows + row, last));
  const int position = split.seq.seqlen_k - split.seq.seqlen_q + token;
  const tile::Range keys = decoding::visibility(params, split.end).keys(position);
  return {max(keys.begin, split.begin), keys.end};
}

// A step of the partition is a block of keys; a split costs as much as kSplitBlocks beside its own,
// about, and if all groups have partial results these cost as much again.
template <int kRows, int kTileKeys, int kTileSteps, int kSplitBlocks, int kTileHeads = kRows>
struct PieceSchedule : decoding::Schedule<kRows, kTileKeys, 1, false, kTileSteps, kTileHeads> {
  using Even = decoding::Schedule<kRows, kTileKeys, 1, false, kTileSteps, kTileHeads>;
  static constexpr int kLaneSequences = 5, kCountBits = 12;

  // A group's piece, and how many its sequence has, are in place of its share: there are no
  // registers for both.
  __device__ __forceinline__ int piece() const { return this->share; }
  __device__ __forceinline__ int pieces() const { return -this->larger; }

  // Finds this thread block's first step; false where there is none. By all lanes of a warp.
  __device__ __forceinline__ bool start(const DecodeParams& params) {
    const int batch = params.batch;
    const bool unsplit = params.fixed_splits != 0 && params.num_splits == 1;
    const bool windows = params.window_left != kUnbounded || params.window_right < 0;
    if (params.heads_per_block == 1 && batch > 1 && !windows) {
      if (unsplit && params.cu_seqlens_q == nullptr && params.seqlen_q * params.group <= kRows)
        return start_sequence(params);
      if (batch <= 32 * kLaneSequences && (params.fixed_splits == 0 || unsplit)) {
        const Counts counts = {counts_of_lane(params), batch};
        if (!__any_sync(~0u, counts.of_lane == ~0ull)) {
          const Totals totals = counts.totals();
          const int most = most_of_piece(counts, totals);
          return most > 0 ? start_piece(params, counts, most) : start_share(params, counts, totals);
        }
      }
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
  // Of all sequences: how many have queries, their blocks, and those of the longest.
  struct Totals {
    int sequences, blocks, longest;
  };
  // The sequence that has some unit of those of all sequences in order: how many units come before
  // it, and how many it has.
  struct Holder {
    int sequence, before, own;
  };
  // How many blocks sequences 32 i + lane have, kCountBits for each i: 0 where there is no query.
  struct Counts {
    unsigned long long of_lane;
    int batch;

    __device__ __forceinline__ int of(int i) const {
      return static_cast<unsigned>(of_lane >> kCountBits * i) & (1 << kCountBits) - 1;
    }
    __device__ __forceinline__ Totals totals() const {
      Totals totals = {};
#pragma unroll 1
      for (int i = 0; 32 * i < batch; ++i) {
        const int count = of(i);
        totals.sequences += count > 0 ? 1 : 0;
        totals.blocks += count;
        totals.longest = max(totals.longest, count);
      }
      return {__reduce_add_sync(~0u, totals.sequences), __reduce_add_sync(~0u, totals.blocks),
              __reduce_max_sync(~0u, totals.longest)};
    }
    // Of unit `number`, where a sequence of n blocks has units_of(n); none where there are fewer.
    template <class Units>
    __device__ __forceinline__ Holder holder_of(int number, const Units& units_of) const {
      int before = 0;
#pragma unroll 1
      for (int i = 0; 32 * i < batch; ++i) {
        const int own = units_of(of(i));
        const int all = __reduce_add_sync(~0u, own);
        if (number >= before + all) {
          before += all;
          continue;
        }
        const int inclusive = tile::prefix_sum_of_warp(own);
        const int holder = __ffs(__ballot_sync(~0u, before + inclusive > number)) - 1;
        return {32 * i + holder, before + __shfl_sync(~0u, inclusive - own, holder),
                __shfl_sync(~0u, own, holder)};
      }
      return {-1, before, 0};
    }
  };

  // What cut_keys() finds for the only tile of rows of a sequence without a window, by an eighth of
  // the instructions: a thread block reads them for the first time.
  __device__ __forceinline__ static decoding::KvBlocks cut(const DecodeParams& params,
                                                           const decoding::CachedSequence& seq) {
    decoding::KvBlocks blocks;
    blocks.begin = min(params.first_key, seq.seqlen_k);
    blocks.end = seq.seqlen_k;
    blocks.shift = params.fixed_splits != 0
                       ? 30  // one block
                       : max(decoding::log2_of(kTileKeys), params.kv_block_shift);
    blocks.origin = blocks.begin & -kTileKeys;
    blocks.count = max((blocks.end - blocks.origin - 1 >> blocks.shift) + 1, 1);
    return blocks;
  }
  // All bits where a sequence has too many blocks, or several tiles of rows. All lengths are asked
  // for before one is used.
  __device__ __forceinline__ static unsigned long long counts_of_lane(const DecodeParams& params) {
    const int lane = threadIdx.x % 32;
    decoding::CachedSequence next[kLaneSequences];
#pragma unroll
    for (int i = 0; i < kLaneSequences; ++i)
      next[i] = decoding::sequence_at(params, min(32 * i + lane, params.batch - 1));
    unsigned long long counts = 0;
#pragma unroll 1
    for (int i = 0; 32 * i < params.batch; ++i) {
      const int row_tiles = decoding::count_row_tiles<kRows>(params, next[0]);
      const int count = cut(params, next[0]).count;
      if (row_tiles > 1 || count >= 1 << kCountBits) return ~0ull;
      if (row_tiles == 1 && 32 * i + lane < params.batch)
        counts |= static_cast<unsigned long long>(count) << kCountBits * i;
#pragma unroll
      for (int j = 1; j < kLaneSequences; ++j) next[j - 1] = next[j];
    }
    return counts;
  }

  // How many blocks a piece has at most; 0 if groups are to have even shares.
  __device__ __forceinline__ static int most_of_piece(const Counts& counts, const Totals& totals) {
    const int groups = gridDim.y;
    if (counts.batch > groups) return 0;
    const Divisor by_groups(groups);
    const int share = max(1, by_groups.divide_up(totals.blocks));
    // Shared evenly, a group has a split for each of its sequences, and another one.
    const int extra = by_groups.divide(kSplitBlocks * counts.batch), limit = share + extra;
    if (totals.longest <= limit + extra) return max(1, totals.longest);
    // The least number of blocks with which pieces are no more than groups.
    const auto fits = [&](int most) {
      const Divisor divisor(most);
      int count = 0;
#pragma unroll 1
      for (int i = 0; 32 * i < counts.batch; ++i) count += divisor.divide_up(counts.of(i));
      return __reduce_add_sync(~0u, count) <= groups;
    };
    if (!fits(limit)) return 0;
    int least = share, most = limit;
#pragma unroll 1
    while (least < most) {
      const int middle = (least + most) / 2;
      if (fits(middle))
        most = middle;
      else
        least = middle + 1;
    }
    return most;
  }

  // This group's first sequence, where each has one step: no other's length is needed.
  __device__ __forceinline__ bool start_sequence(const DecodeParams& params) {
    this->partition(params.batch);
    if (this->step == this->end) return false;
    begin(params, {this->step, this->step, 1});
    this->index = 0;
    return true;
  }
  // This group's piece of at most `most` blocks.
  __device__ __forceinline__ bool start_piece(const DecodeParams& params, const Counts& counts,
                                              int most) {
    const Divisor divisor(most);
    const Holder holder =
        counts.holder_of(blockIdx.y, [&](int count) { return divisor.divide_up(count); });
    this->step = this->end = 0;
    if (holder.sequence < 0) return false;
    begin(params, holder);
    this->larger = -holder.own;
    this->share = blockIdx.y - holder.before;
    // The first pieces have one more, where these are not equal.
    const int each = Divisor(pieces()).divide(this->blocks.count);
    const int more = this->blocks.count - each * pieces();
    this->index = Even::extra_steps(params) + piece() * each + min(piece(), more);
    this->end = each + (piece() < more ? 1 : 0);
    return true;
  }
  // This group's even share of all steps.
  __device__ __forceinline__ bool start_share(const DecodeParams& params, const Counts& counts,
                                              const Totals& totals) {
    const int extra = Even::extra_steps(params);
    this->partition(totals.blocks + totals.sequences * extra);
    if (this->step == this->end) return false;
    const Holder holder =
        counts.holder_of(this->step, [&](int count) { return count > 0 ? count + extra : 0; });
    begin(params, holder);
    this->index = this->step - holder.before;
    return true;
  }
  __device__ __forceinline__ void begin(const DecodeParams& params, const Holder& holder) {
    this->head = this->row_tile = 0;
    this->seq = decoding::sequence_at(params, holder.sequence);
    this->blocks = cut(params, this->seq);
  }
};

}  // namespace mla
