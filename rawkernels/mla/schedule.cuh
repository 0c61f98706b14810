// Work partition of mla/decode_sm90.cu and of the kernels for codes: each group of thread blocks
// has one piece of one sequence where that gives none of them much more than an even share.
//
// A split costs more here than in the kernels that share all keys evenly (decoding/schedule.cuh): Q
// of 72 KiB is loaded for it, and a partial result of 64 rows of 512 floats is 128 KiB. Even
// shares give most groups parts of two sequences. 64 sequences of 4096 tokens on 66 groups are 33
// steps whole and 32 shared evenly, which took 160 us on an H200 where FlashMLA took 128; 23 of
// 1012 on 132 groups are four pieces each, of 2 steps, and 1.4 steps shared evenly, in up to two
// splits. A step is a pair of blocks of keys, and pieces are whole blocks; of
// mla/decode_codes_sm90.cu a step is one block.
#pragma once

#include "decoding/schedule.cuh"
#include "ptx/math.cuh"

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

// A step of decoding::Schedule is kStepBlocks of what pieces consist of.
template <int kRows, int kTileKeys, int kTileSteps, int kStepBlocks, int kTileHeads = kRows>
struct PieceSchedule : decoding::Schedule<kRows, kTileKeys, 1, false, kTileSteps, kTileHeads> {
  using Even = decoding::Schedule<kRows, kTileKeys, 1, false, kTileSteps, kTileHeads>;
  static constexpr int kSplitSteps = 3;  // what a split costs beside its keys, about
  static constexpr int kPartSteps = 3;   // and partial results, if all groups have some
  static constexpr int kLaneSequences = 5, kCountBits = 12;

  // A group's piece, and how many its sequence has, are in place of its share: there are no
  // registers for both.
  __device__ __forceinline__ int piece() const { return this->share; }
  __device__ __forceinline__ int pieces() const { return -this->larger; }
  __device__ __forceinline__ bool has_pieces() const { return this->larger < 0; }

  // Finds this thread block's first step; false where there is none. By all lanes of a warp.
  __device__ __forceinline__ bool start(const DecodeParams& params) {
    const int batch = params.batch, groups = gridDim.y;
    if (batch > 1 && batch <= min(groups, 32 * kLaneSequences) && params.fixed_splits == 0 &&
        params.heads_per_block == 1) {
      const unsigned long long counts = counts_of_lane(params);
      const int most = most_of_piece(counts, batch, groups);
      if (most > 0) return start_piece(params, counts, most);
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
  // The keys of a sequence's only tile of rows, cut into what pieces consist of.
  __device__ __forceinline__ static decoding::KvBlocks cut(const DecodeParams& params,
                                                           const decoding::CachedSequence& seq) {
    decoding::KvBlocks blocks = decoding::cut_keys<kRows, kTileKeys>(params, seq, 0);
    if (kStepBlocks > 1) {
      blocks.shift -= decoding::log2_of(kStepBlocks);
      blocks.count = max((blocks.end - blocks.origin - 1 >> blocks.shift) + 1, 1);
    }
    return blocks;
  }
  // How many blocks sequences 32 i + lane have, kCountBits for each i; all bits where one has too
  // many of them, or several tiles of rows. The next length is asked for before it is needed.
  __device__ __forceinline__ unsigned long long counts_of_lane(const DecodeParams& params) {
    unsigned long long counts = 0;
    int index = threadIdx.x % 32;
    if (index >= params.batch) return 0;
    decoding::CachedSequence next = decoding::sequence_at(params, index);
#pragma unroll 1
    for (int shift = 0; index < params.batch; shift += kCountBits) {
      const decoding::CachedSequence sequence = next;
      index += 32;
      if (index < params.batch) next = decoding::sequence_at(params, index);
      const int row_tiles = decoding::count_row_tiles<kRows>(params, sequence);
      const int count = cut(params, sequence).count;
      if (row_tiles > 1 || count >= 1 << kCountBits) return ~0ull;
      if (row_tiles == 1) counts |= static_cast<unsigned long long>(count) << shift;
    }
    return counts;
  }
  __device__ __forceinline__ static int count_of(unsigned long long counts, int i) {
    return static_cast<unsigned>(counts >> kCountBits * i) & (1 << kCountBits) - 1;
  }

  // How many blocks a piece has at most; 0 if groups are to have even shares.
  __device__ __forceinline__ static int most_of_piece(unsigned long long counts, int batch,
                                                      int groups) {
    if (__any_sync(~0u, counts == ~0ull)) return 0;
    int longest = 0, total = 0;
#pragma unroll 1
    for (int i = 0; 32 * i < batch; ++i) {
      const int count = count_of(counts, i);
      longest = max(longest, count);
      total += count;
    }
    longest = __reduce_max_sync(~0u, longest);
    total = __reduce_add_sync(~0u, total);
    const Divisor by_groups(groups);
    const int share = max(1, by_groups.divide_up(total));
    // Shared evenly, a group has whole steps, a split for each of its sequences, and another one.
    const int splits = by_groups.divide(kSplitSteps * batch);
    const int parts = by_groups.divide(kPartSteps * batch);
    const int limit = ((share + kStepBlocks - 1) / kStepBlocks + splits) * kStepBlocks;
    if (longest <= limit + parts * kStepBlocks) return max(1, longest);
#pragma unroll 1
    for (int most = share; most <= limit; ++most) {
      const Divisor divisor(most);
      int count = 0;
#pragma unroll 1
      for (int i = 0; 32 * i < batch; ++i) count += divisor.divide_up(count_of(counts, i));
      if (__reduce_add_sync(~0u, count) <= groups) return most;
    }
    return 0;
  }

  // This group's piece of at most `most` blocks.
  __device__ __forceinline__ bool start_piece(const DecodeParams& params, unsigned long long counts,
                                              int most) {
    const int lane = threadIdx.x % 32, group = blockIdx.y;
    this->head = this->row_tile = this->step = this->end = 0;
    const Divisor divisor(most);
    int before = 0;
#pragma unroll 1
    for (int i = 0; 32 * i < params.batch; ++i) {
      const int own = divisor.divide_up(count_of(counts, i));
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
      this->blocks = cut(params, this->seq);
      // The first pieces have one more, where these are not equal.
      const int each = Divisor(pieces()).divide(this->blocks.count);
      const int more = this->blocks.count - each * pieces();
      this->index = Even::extra_steps(params) + piece() * each + min(piece(), more);
      this->end = each + (piece() < more ? 1 : 0);
      return true;
    }
    return false;
  }
};

}  // namespace mla
