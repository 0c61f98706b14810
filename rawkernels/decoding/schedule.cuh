// Work partition of the decoding kernels, computed by every thread block from the sequence lengths
// in device memory, so that no host-side plan is needed.
//
// A work tile is one tile of rows (the query heads that share a key head, and their query tokens)
// of one sequence over all keys that it may see. Its keys are cut into blocks. All blocks of a key
// head, in the order sequence, row tile, key, are shared by groups of thread blocks in contiguous
// ranges of equal cost. The thread blocks of a group do the same for different heads, at the same
// time: what they read lies side by side in memory. (Where there are too many heads for that, a
// thread block takes several in turn, and where a tile has kHeads neighbouring ones these are
// counted as one.) What a thread block has of one work tile is a split. A work
// tile of one split is written out at once; of others each split leaves a partial result in a slot
// of its own, and the thread block with the last split merges them: at its end, where they are not
// all its own.
//
// No deadlock: a thread block waits only for partial results of thread blocks of its head with
// lower blockIdx.y, and only after all its own are written. Those before it in the grid are
// resident or have ended, and the first waits for nobody.
#pragma once

#include "decoding/params.cuh"
#include "tile/ragged.cuh"

namespace decoding {

// The rows of a tile that has kHeads neighbouring key heads: the first one's, then the next one's.
template <int kRows, int kHeads>
struct HeadRows {
  static constexpr int kEach = kRows / kHeads;

  __device__ __forceinline__ static int head_of(int row) { return kHeads == 1 ? 0 : row / kEach; }
  __device__ __forceinline__ static int in_head(int row) { return kHeads == 1 ? row : row % kEach; }
};

// A sequence of a batch, whose keys lie in a cache.
struct CachedSequence {
  int index;
  int begin_q;  // row of q of its first query
  int seqlen_q, seqlen_k;
};

// How many keys a sequence has. Lengths that are not what they must be, here and below, are moved
// to the nearest that can be, so that no address is wrong.
__device__ __forceinline__ int count_keys(const DecodeParams& params, int index) {
  if (params.seq_lens == nullptr) return params.capacity;
  return tile::clamped(params.seq_lens[index], 0, params.capacity);
}

__device__ __forceinline__ CachedSequence sequence_at(const DecodeParams& params, int index) {
  CachedSequence seq = {index, 0, params.seqlen_q, count_keys(params, index)};
  if (params.cu_seqlens_q != nullptr) {
    const tile::Rows rows = tile::ragged_rows(params.cu_seqlens_q, params.seqlen_q, index);
    seq.begin_q = rows.begin;
    seq.seqlen_q = rows.length <= params.max_queries ? rows.length : 0;
  }
  return seq;
}

// Which of a sequence's first `end` keys its queries see; a query's row is its position among the
// keys, from -2^30 to 2^30.
__device__ __forceinline__ tile::Visibility visibility(const DecodeParams& params, int end) {
  return {-params.window_left, params.window_right + 1, end};
}

// The keys that a query token sees and that are to be read.
__device__ __forceinline__ tile::Range visible_keys(const DecodeParams& params,
                                                    const CachedSequence& seq, int token) {
  const int position = seq.seqlen_k - seq.seqlen_q + token;
  const tile::Range keys = visibility(params, seq.seqlen_k).keys(position);
  const int begin = min(max(keys.begin, params.first_key), seq.seqlen_k);
  return {begin, max(begin, keys.end)};
}

// How the keys of a work tile are cut: block i is [origin + (i << shift), origin + (i + 1 <<
// shift)), as far as it lies in [begin, end).
struct KvBlocks {
  int begin, end, origin, shift, count;
};

template <int kRows>
__device__ __forceinline__ int count_row_tiles(const DecodeParams& params,
                                               const CachedSequence& seq) {
  return (seq.seqlen_q * params.group + kRows - 1) / kRows;
}

__device__ constexpr int log2_of(int n) { return n == 1 ? 0 : 1 + log2_of(n / 2); }

template <int kRows, int kTileKeys>
__device__ __forceinline__ KvBlocks cut_keys(const DecodeParams& params, const CachedSequence& seq,
                                             int row_tile) {
  static_assert((kTileKeys & (kTileKeys - 1)) == 0,
                "kTileKeys must be a power of two, since keys are cut by shifts");
  const int rows = seq.seqlen_q * params.group;
  const int first = divided_by_group(params, row_tile * kRows);
  const int last = divided_by_group(params, max(min((row_tile + 1) * kRows, rows) - 1, 0));
  KvBlocks blocks;
  blocks.begin = visible_keys(params, seq, first).begin;
  blocks.end = max(blocks.begin, visible_keys(params, seq, last).end);
  blocks.shift = log2_of(kTileKeys);
  blocks.origin = blocks.begin & -kTileKeys;
  if (params.fixed_splits != 0) {
    if (rows > kRows) {  // prompts need no splitting, and would leave many rows to merge
      blocks.shift = 30;
    } else if (params.num_splits > 0) {
      while (blocks.end - blocks.origin > params.num_splits << blocks.shift) ++blocks.shift;
    } else {
      blocks.shift = params.kv_block_shift;
      blocks.origin = blocks.begin >> blocks.shift << blocks.shift;
    }
  } else {
    blocks.shift = max(blocks.shift, params.kv_block_shift);
  }
  blocks.count = (blocks.end - blocks.origin - 1 >> blocks.shift) + 1;
  blocks.count = max(blocks.count, 1);  // one even where there is no key: 0 must be written
  return blocks;
}

// What one thread block computes at a time: some keys of a work tile.
struct Split {
  CachedSequence seq;
  int head, row_tile;      // head of the keys, the first of kHeads
  int begin, end, origin;  // keys [begin, end), in tiles counted from origin
};

// Which partial results a thread block merges: `count`, of which the first `few` are in slots of
// another stride.
struct MergeList {
  int count, few;
  unsigned few_slot, few_stride, slot, stride;

  __device__ __forceinline__ unsigned slot_of(int i) const {
    return i < few ? few_slot + i * few_stride : slot + i * stride;
  }
};

// A split's place among those of its work tile. Where there are many, they are merged in two steps:
// of every 2^shift splits, the last one's thread block merges all and leaves the result in its
// other slot, and the thread block of the work tile's last split merges these results and the
// splits after them.
struct SplitPlace {
  int index, count;
  bool merges;    // this thread block is to merge some
  bool alone;     // and has computed them all itself
  bool balanced;  // splits are of equal cost, one for each thread block
  int first_slot;
  int shift;

  __device__ __forceinline__ void plan_merge() {
    shift = !balanced || count <= 16 ? 30 : count > 72 ? 4 : 3;
    merges = merges_for_later() ? (index + 1 & (1 << shift) - 1) == 0 : count > 1;
  }

  // Whether what is merged here is a part of the work tile's result, not yet the result.
  __device__ __forceinline__ bool merges_for_later() const { return index + 1 < count; }

  // Where split i's partial result lies. Balanced, a thread block has at most two incomplete work
  // tiles: one that came from the group before, and one that begins here.
  __device__ __forceinline__ unsigned slot(int i) const {
    return first_slot + (balanced ? 2 * i + (i == 0) : i) * gridDim.x;
  }
  // Where split i's thread block leaves what it has merged: no work tile begins there.
  __device__ __forceinline__ unsigned merged_slot(int i) const { return slot(i) + gridDim.x; }

  __device__ __forceinline__ MergeList merge_list() const {
    const int radix = 1 << shift;
    const unsigned stride = (balanced ? 2 : 1) * gridDim.x;
    const int merged = merges_for_later() ? 0 : count - 1 >> shift;
    const int first = merges_for_later() ? index + 1 - radix : merged * radix;  // not merged yet
    const int length = merges_for_later() ? radix : merged + count - first;
    if (merged > 0)
      return {length, merged, merged_slot(radix - 1), radix * stride, slot(first) - merged * stride,
              stride};
    // Split 0 lies where work tiles begin.
    return {length, 1, slot(first), 0, slot(first + 1) - stride, stride};
  }
};

// The splits of this thread block, one after the other. A work tile's steps are one for each block
// of keys, and kTileSteps for its queries and its epilogue, or half as many where there are several
// and a token has fewer heads than kTileHeads; groups get equal contiguous ranges of steps. With
// fixed splits nothing is counted but the blocks. With kSpread, groups that have one step more lie
// evenly among the others: work tiles of n blocks that have equal numbers of groups, which divide
// n, are then cut into equal splits.
template <int kRows, int kTileKeys, int kHeads = 1, bool kSpread = false, int kTileSteps = 1,
          int kTileHeads = kRows>
struct Schedule {
  CachedSequence seq;
  KvBlocks blocks;
  int head, row_tile, index;  // of the next step; head counts this thread block's heads
  int step, end;              // the next step, and where this group's end
  int share, larger;          // steps of a group; `larger` groups, the first ones, have one more

  __device__ __forceinline__ static int extra_steps(const DecodeParams& params) {
    if (params.fixed_splits != 0 || params.single_tile) return 0;
    return kTileSteps > 1 && params.group < kTileHeads ? kTileSteps / 2 : kTileSteps;
  }

  // Leaves the last row tile's blocks in `blocks`.
  __device__ __forceinline__ static int steps_per_head(const DecodeParams& params,
                                                       const CachedSequence& seq,
                                                       KvBlocks& blocks) {
    const int row_tiles = count_row_tiles<kRows>(params, seq);
    int steps = row_tiles * extra_steps(params);
#pragma unroll 1
    for (int row_tile = 0; row_tile < row_tiles; ++row_tile) {
      blocks = cut_keys<kRows, kTileKeys>(params, seq, row_tile);
      steps += blocks.count;
    }
    return steps;
  }

  // Finds this thread block's first step; false where there is none. By all lanes of a warp.
  __device__ __forceinline__ bool start(const DecodeParams& params) {
    if (params.single_tile) {
      seq = sequence_at(params, 0);
      blocks = cut_keys<kRows, kTileKeys>(params, seq, 0);
      partition(blocks.count);
      head = row_tile = 0;
      index = step;
      return step < end;
    }
    int low = 0;     // the sequence that holds it
    int before = 0;  // steps of the sequences before
    if (params.batch == 1)
      partition(steps_per_head(params, sequence_at(params, 0), blocks) * params.heads_per_block);
    else
      search(params, low, before);
    if (step == end) return false;
    seq = sequence_at(params, low);
    const int per_head = steps_per_head(params, seq, blocks);
    index = step - before;
    for (head = 0; index >= per_head; index -= per_head) ++head;
    row_tile = 0;
    if (count_row_tiles<kRows>(params, seq) == 1) return true;
    while (true) {
      blocks = cut_keys<kRows, kTileKeys>(params, seq, row_tile);
      const int steps = blocks.count + extra_steps(params);
      if (index < steps) return true;
      index -= steps;
      ++row_tile;
    }
  }

  // The next split; false where there is none.
  __device__ __forceinline__ bool next(const DecodeParams& params, Split& split) {
    if (step == end) return false;
    if (index == blocks.count + extra_steps(params)) next_work_tile(params);
    return here(params, split);
  }

  // The same, where no work tile has been finished just before.
  __device__ __forceinline__ bool here(const DecodeParams& params, Split& split) {
    const int extra = extra_steps(params);
    const int first = max(extra - index, 0);  // so many steps before the first block of keys
    if (step + first >= end) {
      step = end;
      return false;
    }
    const int block = max(index - extra, 0);
    const int count = params.fixed_splits != 0 ? 1 : min(blocks.count - block, end - step - first);
    split.seq = seq;
    split.head = (blockIdx.x * params.heads_per_block + head) * kHeads;
    split.row_tile = row_tile;
    split.origin = blocks.origin + (block << blocks.shift);
    split.begin = max(blocks.begin, split.origin);
    split.end = count == blocks.count ? blocks.end
                                      : min(blocks.end, split.origin + (count << blocks.shift));
    step += first + count;
    index += first + count;
    return true;
  }

  // The place of the split that next() gave last.
  __device__ __forceinline__ SplitPlace place_of(const DecodeParams& params,
                                                 const Split& split) const {
    if (params.single_tile) {
      const int group = blockIdx.y, count = min(static_cast<int>(gridDim.y), blocks.count);
      SplitPlace place = {group, count, false, false, true, static_cast<int>(blockIdx.x)};
      place.plan_merge();
      return place;
    }
    const int block = split.origin - blocks.origin >> blocks.shift;
    const int count = index - extra_steps(params) - block;
    const int tile_step = step - index;  // the work tile's first
    SplitPlace place = {0, 1, false, tile_step >= first_step(blockIdx.y), params.fixed_splits == 0,
                        0};
    if (count == blocks.count) return place;
    if (place.balanced) {
      const int extra = kTileSteps > 1 ? extra_steps(params) : kTileSteps;
      const int first_group = group_of(tile_step + extra);
      place.index = blockIdx.y - first_group;
      place.count = group_of(tile_step + extra + blocks.count - 1) - first_group + 1;
      place.first_slot = 2 * first_group;
    } else {
      place.index = block;
      place.count = blocks.count;
      place.first_slot = tile_step;
    }
    place.plan_merge();
    place.first_slot = place.first_slot * gridDim.x + blockIdx.x;
    return place;
  }

 protected:
  __device__ __forceinline__ void partition(int total) {
    const int group = blockIdx.y, groups = gridDim.y;
    share = static_cast<unsigned>(total) / groups;
    larger = total - share * groups;
    step = first_step(group);
    end = kSpread ? first_step(group + 1) : step + share + (group < larger ? 1 : 0);
  }

 private:
  __device__ __forceinline__ int first_step(int group) const {
    const int groups = gridDim.y;
    if (kSpread && share > 0)
      return group * share + static_cast<unsigned>(group * larger + groups - 1) / groups;
    return group * share + min(group, larger);
  }

  // Finds the sequence `low` that holds the first step, and the steps `before` it: the lanes sum a
  // contiguous range of sequences each, and the range that holds the step is searched next, so that
  // a thousand sequences take two rounds.
  __device__ __forceinline__ void search(const DecodeParams& params, int& low, int& before) {
    const int lane = threadIdx.x % 32;
    int count = params.batch;
    bool first = true;
#pragma unroll 1
    do {
      const int range = (count + 31) / 32;
      int steps = 0;
#pragma unroll 1
      for (int i = lane * range; i < min((lane + 1) * range, count); ++i)
        steps +=
            steps_per_head(params, sequence_at(params, low + i), blocks) * params.heads_per_block;
      int inclusive = steps;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, inclusive, distance);
        if (lane >= distance) inclusive += other;
      }
      if (first) {
        partition(__shfl_sync(~0u, inclusive, 31));
        if (step == end) return;
        first = false;
      }
      const int holder = __ffs(__ballot_sync(~0u, before + inclusive > step)) - 1;
      before += __shfl_sync(~0u, inclusive - steps, holder);
      low += holder * range;
      count = min(range, count - holder * range);
    } while (count > 1);
  }

  __device__ __forceinline__ int group_of(int some_step) const {
    const unsigned groups = gridDim.y;
    if (kSpread && share > 0) return some_step * groups / (share * groups + larger);
    const int in_larger = larger * (share + 1);
    const bool within = some_step < in_larger;
    const unsigned offset = within ? some_step : some_step - in_larger;
    return static_cast<int>(offset / (within ? share + 1 : share)) + (within ? 0 : larger);
  }

  __device__ __forceinline__ void next_work_tile(const DecodeParams& params) {
    index = 0;
    if (++row_tile == count_row_tiles<kRows>(params, seq)) {
      row_tile = 0;
      if (++head == params.heads_per_block) {
        head = 0;
        do seq = sequence_at(params, seq.index + 1);
        while (seq.seqlen_q == 0);
      }
    }
    blocks = cut_keys<kRows, kTileKeys>(params, seq, row_tile);
  }
};

}  // namespace decoding
