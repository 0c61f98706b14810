// Who computes what, worked out by every block for itself from the lengths as they are when the kernel runs.
//
// An item is one tile of rows (query heads that share a key head, and their query tokens) of one sequence over all keys it
// may see. Items are cut into units of keys; all units of a key head, in the order sequence, row tile, key, are dealt out
// to groups of blocks in consecutive runs of equal cost. The blocks of a group do the same for different heads, at the same time:
// what they read lies side by side in memory. (Where there are too many heads for that a block takes several in turn.)
// What a block has of one item is a piece. An item in one piece is written out; of the others each piece leaves a partial
// result in a slot of its own, and the block with the last piece merges them when it has nothing else to do.
#pragma once

#include "decoding/params.cuh"

namespace decoding {

struct Sequence {
  int index;
  int begin_q;  // row of q of its first query
  int seqlen_q, length;
};

struct KeyRange {
  int begin, end;
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ Sequence sequence_at(const DecodeParams& params, int index) {
  Sequence seq = {index, 0, params.seqlen_q, params.capacity};
  if (params.cu_seqlens_q != nullptr) {
    seq.begin_q = params.cu_seqlens_q[index];
    seq.seqlen_q = max(params.cu_seqlens_q[index + 1] - seq.begin_q, 0);
  }
  if (params.seq_lens != nullptr) seq.length = min(max(params.seq_lens[index], 0), params.capacity);
  return seq;
}

// The keys that a query may see by its position.
__device__ __forceinline__ KeyRange visible_keys(const DecodeParams& params, const Sequence& seq, int token) {
  const int position = seq.length - seq.seqlen_q + token;
  const int left = params.window_left == kUnbounded ? 0 : position - params.window_left;
  const int right = params.window_right == kUnbounded ? seq.length : position + params.window_right + 1;
  const int begin = min(max(left, params.first_key), seq.length);
  return {begin, max(begin, min(right, seq.length))};
}

// How the keys of an item are cut: unit i is [origin + i * unit, origin + (i + 1) * unit), of it what lies in [begin, end).
struct Cut {
  int begin, end, origin, unit, count;
};

template <int kRows>
__device__ __forceinline__ int tiles_of(const DecodeParams& params, const Sequence& seq) {
  return ceil_div(seq.seqlen_q * (params.heads_q / params.heads_kv), kRows);
}

template <int kRows, int kTileKeys>
__device__ __forceinline__ Cut cut_item(const DecodeParams& params, const Sequence& seq, int tile) {
  static_assert((kTileKeys & (kTileKeys - 1)) == 0, "tiles of keys are cut by shifts");
  const int group = params.heads_q / params.heads_kv;
  const bool several_tiles = seq.seqlen_q * group > kRows;
  const int first = several_tiles ? tile * kRows / group : 0;
  const int last = several_tiles ? (min((tile + 1) * kRows, seq.seqlen_q * group) - 1) / group : seq.seqlen_q - 1;
  Cut cut;
  cut.begin = visible_keys(params, seq, first).begin;
  cut.end = max(cut.begin, visible_keys(params, seq, last).end);
  cut.origin = cut.begin & -kTileKeys;
  cut.unit = kTileKeys;
  cut.count = (cut.end - cut.origin + kTileKeys - 1) / kTileKeys;
  if (params.split_units != 0) {
    if (several_tiles) {  // prompts need no splitting, and would leave many rows behind
      cut.unit = max(cut.count, 1) * kTileKeys;
    } else if (params.num_splits > 0) {
      cut.unit = max(ceil_div(cut.count, params.num_splits), 1) * kTileKeys;
    } else {
      cut.unit = params.unit_keys;
      cut.origin = cut.begin / cut.unit * cut.unit;
    }
    cut.count = ceil_div(cut.end - cut.origin, cut.unit);
  }
  cut.count = max(cut.count, 1);  // one even where there is no key: 0 must be written
  return cut;
}

struct Piece {
  Sequence seq;
  int head, tile;          // of keys; of rows
  int begin, end, origin;  // keys [begin, end), in tiles counted from origin
  int part, parts;         // this is piece number `part` of the item's `parts`
  int first_slot, slot_stride;
  bool balanced;

  // Where part i's partial result lies. Balanced, a block has at most two incomplete pieces: one that goes on in the next
  // group and one that came from the group before.
  __device__ __forceinline__ long long slot(int i) const {
    return first_slot + static_cast<long long>(balanced ? 2 * i + (i + 1 < parts) : i) * slot_stride;
  }
};

template <int kRows, int kTileKeys>
struct Schedule {
  // An item also costs as much as so many units: its queries, its end. Its steps are these and then its units; blocks get
  // equal runs of steps. Where every unit is a result of its own there is nothing to begin with.
  static constexpr int kItemSteps = 1;

  Sequence seq;
  Cut cut;
  int head, tile, index;  // of the next step; head counts this block's heads
  int step, end;          // the next step, and this block's end
  int share, larger;      // steps of a group; the first groups, `larger` of them, have one more

  __device__ __forceinline__ static int heads_of_block(const DecodeParams& params) {
    return params.heads_kv / params.head_lanes;
  }
  __device__ __forceinline__ static int lane_of_block(const DecodeParams& params) { return blockIdx.x % params.head_lanes; }
  __device__ __forceinline__ static int group_of_block(const DecodeParams& params) { return blockIdx.x / params.head_lanes; }

  __device__ __forceinline__ static int extra_steps(const DecodeParams& params) {
    return params.split_units != 0 ? 0 : kItemSteps;
  }

  __device__ __forceinline__ static int steps_per_head(const DecodeParams& params, const Sequence& seq) {
    const int tiles = tiles_of<kRows>(params, seq);
    int steps = 0;
    for (int tile = 0; tile < tiles; ++tile) steps += cut_item<kRows, kTileKeys>(params, seq, tile).count;
    return steps + tiles * extra_steps(params);
  }

  // Finds this block's first step. By all lanes of a warp: 32 runs of sequences are summed at a time, and the run that
  // holds the step is looked into, so that a thousand sequences take two rounds.
  __device__ __forceinline__ void start(const DecodeParams& params) {
    const int lane = threadIdx.x % 32;
    int low = 0, count = params.batch;
    int before = 0;  // steps of the sequences before `low`
    bool first = true;
    do {
      const int run = ceil_div(count, 32);
      int steps = 0;
      for (int i = lane * run; i < min((lane + 1) * run, count); ++i)
        steps += steps_per_head(params, sequence_at(params, low + i)) * heads_of_block(params);
      int inclusive = steps;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, inclusive, distance);
        if (lane >= distance) inclusive += other;
      }
      if (first) {
        const int total = __shfl_sync(~0u, inclusive, 31);
        const int group = group_of_block(params), groups = gridDim.x / params.head_lanes;
        share = total / groups;
        larger = total - share * groups;
        step = group * share + min(group, larger);
        end = step + share + (group < larger ? 1 : 0);
        if (step == end) return;
        first = false;
      }
      const int holder = __ffs(__ballot_sync(~0u, before + inclusive > step)) - 1;
      before += __shfl_sync(~0u, inclusive - steps, holder);
      low += holder * run;
      count = min(run, count - holder * run);
    } while (count > 1);

    seq = sequence_at(params, low);
    const int per_head = steps_per_head(params, seq);
    head = (step - before) / per_head;
    index = step - before - head * per_head;
    tile = 0;
    cut = cut_item<kRows, kTileKeys>(params, seq, tile);
    while (index >= cut.count + extra_steps(params)) {
      index -= cut.count + extra_steps(params);
      cut = cut_item<kRows, kTileKeys>(params, seq, ++tile);
    }
  }

  // The block's next piece; false where there is none.
  __device__ __forceinline__ bool next(const DecodeParams& params, Piece& piece) {
    const int extra = extra_steps(params);
    if (step < end && index == cut.count + extra) next_item(params);
    const int first = max(extra - index, 0);  // of these steps the first unit's is so far away
    if (step + first >= end) return false;
    const int unit = max(index - extra, 0);
    const bool split = extra == 0;
    const int units = split ? 1 : min(cut.count - unit, end - step - first);
    piece.seq = seq;
    piece.head = lane_of_block(params) * heads_of_block(params) + head;
    piece.tile = tile;
    piece.origin = cut.origin + unit * cut.unit;
    piece.begin = max(cut.begin, piece.origin);
    piece.end = min(cut.end, piece.origin + units * cut.unit);
    piece.balanced = !split;
    const int item = step - index;  // its first step
    int first_slot = item;
    piece.part = split ? unit : 0;
    piece.parts = split ? cut.count : 1;
    if (!split && units < cut.count) {
      const int first_group = group_of(item + extra);
      piece.part = group_of_block(params) - first_group;
      piece.parts = group_of(item + extra + cut.count - 1) - first_group + 1;
      first_slot = 2 * first_group;
    }
    piece.slot_stride = params.head_lanes;
    piece.first_slot = first_slot * params.head_lanes + lane_of_block(params);
    step += first + units;
    index += first + units;
    return true;
  }

 private:
  __device__ __forceinline__ int group_of(int some_step) const {
    const int in_larger = larger * (share + 1);
    return some_step < in_larger ? some_step / (share + 1) : larger + (some_step - in_larger) / share;
  }

  __device__ __forceinline__ void next_item(const DecodeParams& params) {
    index = 0;
    if (++tile == tiles_of<kRows>(params, seq)) {
      tile = 0;
      if (++head == heads_of_block(params)) {
        head = 0;
        do seq = sequence_at(params, seq.index + 1);
        while (seq.seqlen_q == 0);
      }
    }
    cut = cut_item<kRows, kTileKeys>(params, seq, tile);
  }
};

}  // namespace decoding
