// Which sequence, and which of its query tiles, a block of a varlen call works on, found on the
// device from cu_seqlens_q alone: the host launches total / kTileM + batch slots without knowing a
// length. Sequence b owns the slots from cu_seqlens_q[b] / kTileM + b on, up to the next sequence's
// first: always enough for its tiles, at most one too many.
//
// `Params` is what a kernel is told about its call, with cu_seqlens_q and cu_seqlens_k (batch +
// 1,), and with the totals of rows in seqlen_q and seqlen_k.
#pragma once

namespace tile {

struct Sequence {
  int index;                   // of the batch
  long long begin_q, begin_k;  // first rows in q, out, and in k, v
  int seqlen_q, seqlen_k;
  int tile;  // query rows tile * kTileM and on; tile < 0: nothing to do
};

__device__ __forceinline__ int clamped(int x, int low, int high) { return max(low, min(x, high)); }

// Number `index` of the batch; its tile is left to the caller. Lengths that are not what they must
// be give nonsense, but no address outside of the arrays.
template <class Params>
__device__ __forceinline__ Sequence sequence(const Params& params, int index) {
  const int* cu_q = params.cu_seqlens_q;
  const int* cu_k = params.cu_seqlens_k;
  const int begin_q = clamped(cu_q[index], 0, params.seqlen_q),
            end_q = clamped(cu_q[index + 1], begin_q, params.seqlen_q);
  const int begin_k = clamped(cu_k[index], 0, params.seqlen_k),
            end_k = clamped(cu_k[index + 1], begin_k, params.seqlen_k);
  return {index, begin_q, begin_k, end_q - begin_q, end_k - begin_k, -1};
}

// All 32 lanes of a warp together, with the same slot. 32 candidates a step: a thousand sequences
// are found in two reads.
template <int kTileM, class Params>
__device__ __forceinline__ Sequence varlen_sequence(const Params& params, int slot) {
  const int* cu_q = params.cu_seqlens_q;
  const int lane = threadIdx.x % 32;
  int low = 0, count = params.batch;  // the owner is in [low, low + count)
  while (count > 1) {
    const int step = (count + 31) / 32;
    const int candidate = low + lane * step;
    const bool starts = candidate < low + count && cu_q[candidate] / kTileM + candidate <= slot;
    const int last =
        31 - __clz(__ballot_sync(~0u, starts || lane == 0));  // low's first slot is <= slot
    const int end = low + count;
    low += last * step;
    count = min(step, end - low);
  }
  Sequence found = sequence(params, low);
  const int tile = slot - (static_cast<int>(found.begin_q) / kTileM + low);
  const bool exists = tile * static_cast<long long>(kTileM) < found.seqlen_q;
  found.tile = exists ? tile : -1;
  return found;
}

}  // namespace tile
