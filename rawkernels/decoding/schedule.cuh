// Who computes what, worked out by every block for itself from the lengths as they are when the kernel runs.
//
// An item is one tile of rows (query heads that share a key head, and their query tokens) of one sequence over all keys it
// may see. Items are cut into units of keys; all units, in the order sequence, head, row tile, key, are dealt out to the
// blocks in equal consecutive runs. What a block has of one item is a piece. An item in one piece is written out; of the
// others each piece leaves a partial result in a slot of its own, and the last to arrive merges them.
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
  const int group = params.heads_q / params.heads_kv;
  const int last_row = min((tile + 1) * kRows, seq.seqlen_q * group) - 1;
  Cut cut;
  cut.begin = visible_keys(params, seq, tile * kRows / group).begin;
  cut.end = max(cut.begin, visible_keys(params, seq, last_row / group).end);
  if (params.split_units != 0 && tiles_of<kRows>(params, seq) > 1) {  // prompts need no splitting, and have many rows
    cut.origin = 0;
    cut.unit = max(seq.length, 1);
  } else if (params.num_splits > 0) {
    cut.origin = cut.begin / kTileKeys * kTileKeys;
    const int tiles = ceil_div(cut.end - cut.origin, kTileKeys);
    cut.unit = max(ceil_div(tiles, params.num_splits), 1) * kTileKeys;
  } else {
    cut.unit = params.unit_keys;
    cut.origin = cut.begin / cut.unit * cut.unit;
  }
  cut.count = max(ceil_div(cut.end - cut.origin, cut.unit), 1);  // one even where there is no key: 0 must be written
  return cut;
}

struct Piece {
  Sequence seq;
  int head, tile;          // of keys; of rows
  int begin, end, origin;  // keys [begin, end), in tiles counted from origin
  int part, parts;         // this is piece number `part` of the item's `parts`
  long long first_slot;
  bool balanced;

  // Where part i's partial result lies. A block has at most two incomplete pieces: one that goes on in the next block and
  // one that came from the block before.
  __device__ __forceinline__ long long slot(int i) const {
    return balanced ? first_slot + 2 * i + (i + 1 < parts) : first_slot + i;
  }
};

template <int kRows, int kTileKeys>
struct Schedule {
  Sequence seq;
  Cut cut;
  int head, tile, index;  // of the next unit
  long long unit, end;    // the next unit, and this block's end
  long long total;
  int blocks;  // that have something to do

  __device__ __forceinline__ static long long units_of(const DecodeParams& params, int index) {
    const Sequence seq = sequence_at(params, index);
    long long units = 0;
    for (int tile = 0; tile < tiles_of<kRows>(params, seq); ++tile) units += cut_item<kRows, kTileKeys>(params, seq, tile).count;
    return units * params.heads_kv;
  }

  // Finds this block's first unit. By all lanes of a warp: 32 runs of sequences are summed at a time, and the run that
  // holds the unit is looked into, so that a thousand sequences take two steps.
  __device__ __forceinline__ void start(const DecodeParams& params) {
    const int lane = threadIdx.x % 32;
    int low = 0, count = params.batch;
    long long before = 0;  // units of the sequences before `low`
    bool first = true;
    do {
      const int run = ceil_div(count, 32);
      long long units = 0;
      for (int i = lane * run; i < min((lane + 1) * run, count); ++i) units += units_of(params, low + i);
      long long inclusive = units;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const long long other = __shfl_up_sync(~0u, inclusive, distance);
        if (lane >= distance) inclusive += other;
      }
      if (first) {
        total = __shfl_sync(~0u, inclusive, 31);
        blocks = static_cast<int>(min(static_cast<long long>(gridDim.x), total));
        unit = end = 0;
        if (blockIdx.x >= blocks) return;
        unit = total * blockIdx.x / blocks;
        end = total * (blockIdx.x + 1) / blocks;
        first = false;
      }
      const int holder = __ffs(__ballot_sync(~0u, before + inclusive > unit)) - 1;
      before += __shfl_sync(~0u, inclusive - units, holder);
      low += holder * run;
      count = min(run, count - holder * run);
    } while (count > 1);

    seq = sequence_at(params, low);
    int units = static_cast<int>(unit - before);
    const int per_head = static_cast<int>(units_of(params, low) / params.heads_kv);
    head = units / per_head;
    index = units % per_head;
    tile = 0;
    cut = cut_item<kRows, kTileKeys>(params, seq, tile);
    while (index >= cut.count) {
      index -= cut.count;
      cut = cut_item<kRows, kTileKeys>(params, seq, ++tile);
    }
  }

  __device__ __forceinline__ int block_of(long long some_unit) const {
    return static_cast<int>(((some_unit + 1) * blocks - 1) / total);
  }

  // The block's next piece; false where there is none.
  __device__ __forceinline__ bool next(const DecodeParams& params, Piece& piece) {
    if (unit >= end) return false;
    if (index == cut.count) next_item(params);
    const bool split = params.split_units != 0;
    const int units = split ? 1 : static_cast<int>(min(static_cast<long long>(cut.count - index), end - unit));
    piece.seq = seq;
    piece.head = head;
    piece.tile = tile;
    piece.origin = cut.origin + index * cut.unit;
    piece.begin = max(cut.begin, piece.origin);
    piece.end = min(static_cast<long long>(cut.end), piece.origin + static_cast<long long>(units) * cut.unit);
    piece.balanced = !split;
    const long long first = unit - index;
    if (split) {
      piece.part = index;
      piece.parts = cut.count;
      piece.first_slot = first;
    } else {
      const int first_block = block_of(first);
      piece.part = blockIdx.x - first_block;
      piece.parts = block_of(first + cut.count - 1) - first_block + 1;
      piece.first_slot = 2LL * first_block;
    }
    unit += units;
    index += units;
    return true;
  }

 private:
  __device__ __forceinline__ void next_item(const DecodeParams& params) {
    index = 0;
    if (++tile == tiles_of<kRows>(params, seq)) {
      tile = 0;
      if (++head == params.heads_kv) {
        head = 0;
        do seq = sequence_at(params, seq.index + 1);
        while (seq.seqlen_q == 0);
      }
    }
    cut = cut_item<kRows, kTileKeys>(params, seq, tile);
  }
};

}  // namespace decoding
