// Who computes what, worked out by every block for itself from the lengths as they are when the
// kernel runs.
//
// An item is one tile of rows (query heads that share a key head, and their query tokens) of one
// sequence over all keys it may see. Items are cut into units of keys; all units of a key head, in
// the order sequence, row tile, key, are dealt out to groups of blocks in consecutive runs of equal
// cost. The blocks of a group do the same for different heads, at the same time: what they read
// lies side by side in memory. (Where there are too many heads for that a block takes several in
// turn.) What a block has of one item is a piece. An item in one piece is written out; of the
// others each piece leaves a partial result in a slot of its own, and the block with the last piece
// merges them: at its end, where they are not all its own. Nobody waits for a block behind it,
// which might never run.
#pragma once

#include "decoding/params.cuh"

namespace decoding {

struct Sequence {
  int index;
  int begin_q;  // row of q of its first query
  int seqlen_q, length;
};

__device__ __forceinline__ Sequence sequence_at(const DecodeParams& params, int index) {
  Sequence seq = {index, 0, params.seqlen_q, params.capacity};
  if (params.cu_seqlens_q != nullptr) {
    seq.begin_q = params.cu_seqlens_q[index];
    seq.seqlen_q = max(params.cu_seqlens_q[index + 1] - seq.begin_q, 0);
  }
  if (params.seq_lens != nullptr) seq.length = min(max(params.seq_lens[index], 0), params.capacity);
  return seq;
}

// Which of a sequence's first `end` keys its queries see; a query's row is its position among the
// keys, from -2^30 to 2^30.
__device__ __forceinline__ tile::Visibility visibility(const DecodeParams& params, int end) {
  return {-params.window_left, params.window_right + 1, end};
}

// The keys that a query token sees and that are to be read.
__device__ __forceinline__ tile::Range visible_keys(const DecodeParams& params, const Sequence& seq,
                                                    int token) {
  const int position = seq.length - seq.seqlen_q + token;
  const tile::Range keys = visibility(params, seq.length).keys(position);
  const int begin = min(max(keys.begin, params.first_key), seq.length);
  return {begin, max(begin, keys.end)};
}

// How the keys of an item are cut: unit i is [origin + (i << shift), origin + (i + 1 << shift)), of
// it what lies in [begin, end).
struct Cut {
  int begin, end, origin, shift, count;
};

template <int kRows>
__device__ __forceinline__ int tiles_of(const DecodeParams& params, const Sequence& seq) {
  return (seq.seqlen_q * params.group + kRows - 1) / kRows;
}

__device__ constexpr int log2_of(int n) { return n == 1 ? 0 : 1 + log2_of(n / 2); }

template <int kRows, int kTileKeys>
__device__ __forceinline__ Cut cut_item(const DecodeParams& params, const Sequence& seq, int tile) {
  static_assert((kTileKeys & (kTileKeys - 1)) == 0, "keys are cut by shifts");
  const int rows = seq.seqlen_q * params.group;
  const int first = divided_by_group(params, tile * kRows);
  const int last = divided_by_group(params, max(min((tile + 1) * kRows, rows) - 1, 0));
  Cut cut;
  cut.begin = visible_keys(params, seq, first).begin;
  cut.end = max(cut.begin, visible_keys(params, seq, last).end);
  cut.shift = log2_of(kTileKeys);
  cut.origin = cut.begin & -kTileKeys;
  if (params.split_units != 0) {
    if (rows > kRows) {  // prompts need no splitting, and would leave many rows behind
      cut.shift = 30;
    } else if (params.num_splits > 0) {
      while (cut.end - cut.origin > params.num_splits << cut.shift) ++cut.shift;
    } else {
      cut.shift = params.unit_shift;
      cut.origin = cut.begin >> cut.shift << cut.shift;
    }
  }
  cut.count = (cut.end - cut.origin - 1 >> cut.shift) + 1;
  cut.count = max(cut.count, 1);  // one even where there is no key: 0 must be written
  return cut;
}

struct Piece {
  Sequence seq;
  int head, tile;          // of keys; of rows
  int begin, end, origin;  // keys [begin, end), in tiles counted from origin
};

// Which partial results a block merges: `count`, the first few of them in slots that lie otherwise.
struct Merge {
  int count, few;
  unsigned few_slot, few_stride, slot, stride;

  __device__ __forceinline__ unsigned slot_of(int i) const {
    return i < few ? few_slot + i * few_stride : slot + i * stride;
  }
};

// A piece's place among those of its item. Where an item has many, they are merged in two steps:
// of every so many, the last one's block merges all and leaves the result in its other slot, and
// the item's last block merges these results and the parts behind them.
struct Parts {
  int part, parts;
  bool merges;  // this block is to merge some
  bool alone;   // and had them all itself
  bool balanced;
  int first_slot;
  int shift;  // log2 of how many the first step merges

  __device__ __forceinline__ void arrange() {
    shift = !balanced || parts <= 16 ? 30 : parts > 72 ? 4 : 3;
    merges = leads() ? (part + 1 & (1 << shift) - 1) == 0 : parts > 1;
  }

  // Whether what is merged here is still part of the item's result.
  __device__ __forceinline__ bool leads() const { return part + 1 < parts; }

  // Where part i's partial result lies. Balanced, a block has at most two incomplete pieces: one
  // that came from the group before and one that begins here.
  __device__ __forceinline__ unsigned slot(int i) const {
    return first_slot + (balanced ? 2 * i + (i == 0) : i) * gridDim.x;
  }
  // Where what part i's block has merged lies: no piece begins there.
  __device__ __forceinline__ unsigned merged_slot(int i) const { return slot(i) + gridDim.x; }

  __device__ __forceinline__ Merge merge() const {
    const int radix = 1 << shift;
    const unsigned stride = (balanced ? 2 : 1) * gridDim.x;
    const int merged = leads() ? 0 : parts - 1 >> shift;
    const int first = leads() ? part + 1 - radix : merged * radix;  // of those not merged yet
    const int count = leads() ? radix : merged + parts - first;
    if (merged > 0)
      return {count, merged, merged_slot(radix - 1), radix * stride, slot(first) - merged * stride,
              stride};
    // Part 0 lies where pieces begin.
    return {count, 1, slot(first), 0, slot(first + 1) - stride, stride};
  }
};

template <int kRows, int kTileKeys>
struct Schedule {
  // An item also costs as much as so many units: its queries, its end. Its steps are these and then
  // its units; groups get equal runs of steps. Where every unit is a result of its own there is
  // nothing to begin with.
  static constexpr int kItemSteps = 1;

  Sequence seq;
  Cut cut;
  int head, tile, index;  // of the next step; head counts this block's heads
  int step, end;          // the next step, and where this group's end
  int share, larger;      // steps of a group; the first groups, `larger` of them, have one more

  __device__ __forceinline__ static int extra_steps(const DecodeParams& params) {
    return params.split_units != 0 || params.one_item ? 0 : kItemSteps;
  }

  // Leaves the cut of the last tile in `cut`.
  __device__ __forceinline__ static int steps_per_head(const DecodeParams& params,
                                                       const Sequence& seq, Cut& cut) {
    const int tiles = tiles_of<kRows>(params, seq);
    int steps = tiles * extra_steps(params);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      cut = cut_item<kRows, kTileKeys>(params, seq, tile);
      steps += cut.count;
    }
    return steps;
  }

  // Finds this block's first step; false where there is none. By all lanes of a warp.
  __device__ __forceinline__ bool start(const DecodeParams& params) {
    if (params.one_item) {
      seq = sequence_at(params, 0);
      cut = cut_item<kRows, kTileKeys>(params, seq, 0);
      share_out(cut.count);
      head = tile = 0;
      index = step;
      return step < end;
    }
    int low = 0;     // the sequence that holds it
    int before = 0;  // steps of the sequences before
    if (params.batch == 1)
      share_out(steps_per_head(params, sequence_at(params, 0), cut) * params.heads_of_block);
    else
      search(params, low, before);
    if (step == end) return false;
    seq = sequence_at(params, low);
    const int per_head = steps_per_head(params, seq, cut);
    index = step - before;
    for (head = 0; index >= per_head; index -= per_head) ++head;
    tile = 0;
    if (tiles_of<kRows>(params, seq) == 1) return true;
    while (true) {
      cut = cut_item<kRows, kTileKeys>(params, seq, tile);
      const int steps = cut.count + extra_steps(params);
      if (index < steps) return true;
      index -= steps;
      ++tile;
    }
  }

  // The block's next piece; false where there is none.
  __device__ __forceinline__ bool next(const DecodeParams& params, Piece& piece) {
    if (step == end) return false;
    if (index == cut.count + extra_steps(params)) next_item(params);
    return here(params, piece);
  }

  // The same, where an item has not been finished just before.
  __device__ __forceinline__ bool here(const DecodeParams& params, Piece& piece) {
    const int extra = extra_steps(params);
    const int first = max(extra - index, 0);  // so many steps before the first unit
    if (step + first >= end) {
      step = end;
      return false;
    }
    const int unit = max(index - extra, 0);
    const int units = params.split_units != 0 ? 1 : min(cut.count - unit, end - step - first);
    piece.seq = seq;
    piece.head = blockIdx.x * params.heads_of_block + head;
    piece.tile = tile;
    piece.origin = cut.origin + (unit << cut.shift);
    piece.begin = max(cut.begin, piece.origin);
    piece.end = units == cut.count ? cut.end : min(cut.end, piece.origin + (units << cut.shift));
    step += first + units;
    index += first + units;
    return true;
  }

  // The place of the piece that next() gave last.
  __device__ __forceinline__ Parts place_of(const DecodeParams& params, const Piece& piece) const {
    if (params.one_item) {
      const int group = blockIdx.y, parts = min(static_cast<int>(gridDim.y), cut.count);
      Parts place = {group, parts, false, false, true, static_cast<int>(blockIdx.x)};
      place.arrange();
      return place;
    }
    const int unit = piece.origin - cut.origin >> cut.shift;
    const int units = index - extra_steps(params) - unit;
    const int item = step - index;  // its first step
    Parts place = {0, 1, false, item >= first_step(), params.split_units == 0, 0};
    if (units == cut.count) return place;
    if (place.balanced) {
      const int first_group = group_of(item + kItemSteps);
      place.part = blockIdx.y - first_group;
      place.parts = group_of(item + kItemSteps + cut.count - 1) - first_group + 1;
      place.first_slot = 2 * first_group;
    } else {
      place.part = unit;
      place.parts = cut.count;
      place.first_slot = item;
    }
    place.arrange();
    place.first_slot = place.first_slot * gridDim.x + blockIdx.x;
    return place;
  }

 private:
  __device__ __forceinline__ int first_step() const {
    const int group = blockIdx.y;
    return group * share + min(group, larger);
  }

  __device__ __forceinline__ void share_out(int total) {
    const int group = blockIdx.y, groups = gridDim.y;
    share = static_cast<unsigned>(total) / groups;
    larger = total - share * groups;
    step = first_step();
    end = step + share + (group < larger ? 1 : 0);
  }

  // Finds the sequence `low` that holds the first step, and the steps `before` it: 32 runs of
  // sequences are summed at a time, and the run that holds the step is looked into, so that a
  // thousand sequences take two rounds.
  __device__ __forceinline__ void search(const DecodeParams& params, int& low, int& before) {
    const int lane = threadIdx.x % 32;
    int count = params.batch;
    bool first = true;
#pragma unroll 1
    do {
      const int run = (count + 31) / 32;
      int steps = 0;
#pragma unroll 1
      for (int i = lane * run; i < min((lane + 1) * run, count); ++i)
        steps += steps_per_head(params, sequence_at(params, low + i), cut) * params.heads_of_block;
      int inclusive = steps;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, inclusive, distance);
        if (lane >= distance) inclusive += other;
      }
      if (first) {
        share_out(__shfl_sync(~0u, inclusive, 31));
        if (step == end) return;
        first = false;
      }
      const int holder = __ffs(__ballot_sync(~0u, before + inclusive > step)) - 1;
      before += __shfl_sync(~0u, inclusive - steps, holder);
      low += holder * run;
      count = min(run, count - holder * run);
    } while (count > 1);
  }

  __device__ __forceinline__ int group_of(int some_step) const {
    const int in_larger = larger * (share + 1);
    const bool within = some_step < in_larger;
    const unsigned offset = within ? some_step : some_step - in_larger;
    return static_cast<int>(offset / (within ? share + 1 : share)) + (within ? 0 : larger);
  }

  __device__ __forceinline__ void next_item(const DecodeParams& params) {
    index = 0;
    if (++tile == tiles_of<kRows>(params, seq)) {
      tile = 0;
      if (++head == params.heads_of_block) {
        head = 0;
        do seq = sequence_at(params, seq.index + 1);
        while (seq.seqlen_q == 0);
      }
    }
    cut = cut_item<kRows, kTileKeys>(params, seq, tile);
  }
};

}  // namespace decoding
