// Ragged arrays: the rows of a batch's sequences lie one after the other, and cu_seqlens says where
// each begins. Which sequence a tile of rows belongs to is found on the device from cu_seqlens
// alone, and TMA reads one sequence's rows with zeros past its end.
#pragma once

namespace tile {

struct Rows {
  int begin, length;
};

struct Sequence {
  int index;                   // of the batch
  long long begin_q, begin_k;  // first rows in q, out, and in k, v
  int seqlen_q, seqlen_k;
  int tile;  // query rows tile * tile_m and on; tile < 0: nothing to do
};

__device__ __forceinline__ int clamped(int x, int low, int high) { return max(low, min(x, high)); }

// The rows of a sequence. Lengths that are not what they must be give nonsense, but no address
// outside of the array.
__device__ __forceinline__ Rows ragged_rows(const int* cu_seqlens, int total, int index) {
  const int begin = clamped(cu_seqlens[index], 0, total);
  return {begin, clamped(cu_seqlens[index + 1], begin, total) - begin};
}

// Sequence `index` of the batch; its tile is left to the caller. `Params` is what a kernel is told
// about its call, with cu_seqlens_q and cu_seqlens_k (batch + 1,), and with the totals of rows in
// seqlen_q and seqlen_k.
template <class Params>
__device__ __forceinline__ Sequence sequence(const Params& params, int index) {
  const Rows q = ragged_rows(params.cu_seqlens_q, params.seqlen_q, index);
  const Rows k = ragged_rows(params.cu_seqlens_k, params.seqlen_k, index);
  return {index, q.begin, k.begin, q.length, k.length, -1};
}

// The index of the sequence that a slot for a tile of `tile_m` rows belongs to. The host provides
// total_q / tile_m + batch slots without knowing a length: sequence b owns those from
// cu_seqlens[b] / tile_m + b on, up to the next sequence's first, which is always enough for its
// tiles, and at most one too many. All 32 lanes of a warp together, with the same slot: with 32
// candidates a step, a thousand sequences are found in two reads. `by_tile` divides by tile_m.
template <class ByTile>
__device__ __forceinline__ int sequence_of_slot(const int* cu_seqlens, int batch, int slot,
                                                ByTile by_tile) {
  const int lane = threadIdx.x % 32;
  int low = 0, count = batch;  // the owner is in [low, low + count)
  while (count > 1) {
    const int step = (count + 31) / 32;
    const int candidate = low + lane * step;
    const bool starts =
        candidate < low + count && by_tile(cu_seqlens[candidate]) + candidate <= slot;
    const int last =
        31 - __clz(__ballot_sync(~0u, starts || lane == 0));  // low's first slot is <= slot
    const int end = low + count;
    low += last * step;
    count = min(step, end - low);
  }
  return low;
}

// Which of its sequence's tiles a slot stands for; -1 where it has none for it.
template <class ByTile>
__device__ __forceinline__ int tile_of_slot(int begin_q, int seqlen_q, int index, int slot,
                                            int tile_m, ByTile by_tile) {
  const int tile = slot - (by_tile(begin_q) + index);
  return tile * static_cast<long long>(tile_m) < seqlen_q ? tile : -1;
}

// The sequence and the tile of a slot, found by a whole warp.
template <int kTileM, class Params>
__device__ __forceinline__ Sequence varlen_sequence(const Params& params, int slot) {
  const auto by_tile = [](int row) { return row / kTileM; };
  const int index = sequence_of_slot(params.cu_seqlens_q, params.batch, slot, by_tile);
  Sequence found = sequence(params, index);
  found.tile =
      tile_of_slot(static_cast<int>(found.begin_q), found.seqlen_q, index, slot, kTileM, by_tile);
  return found;
}

// How TMA addresses one sequence's rows: row `shift + r` of the second axis of a tensor map, index
// `outer` of the fourth. In a batched array these are row r of sequence `outer`. The map of a
// ragged array has kFarRows rows, of which a sequence has the last ones, so that boxes which reach
// beyond it are cut off there. Two more axes lead back to where it lies: `outer` counts rows too,
// and at kFarRows the fifth axis, whose stride is 2^34 bytes less a row's, has gone round the
// address space and kFarRows rows back.
constexpr int kFarRows = 1 << 30;

struct TmaRows {
  int length, shift, outer;
};

__device__ __forceinline__ TmaRows ragged_tma_rows(int begin, int length) {
  return {length, kFarRows - length, begin + length};
}

}  // namespace tile
