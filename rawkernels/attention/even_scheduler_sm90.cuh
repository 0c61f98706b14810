// The even tile scheduler of attention/forward_sm90.cu (Config::even_keys), which shares keys out
// to thread blocks whatever the sequences' lengths, and the choice between schedulers.
#pragma once

#include "attention/scheduler_sm90.cuh"

// Config::even_keys: a tile has all rows of a sequence and key head. The blocks of keys of all of
// them lie in one row, sequence after sequence and head after head, of which every thread block has
// an equal range. A sequence without keys counts as one block, which is a tile of its own. All
// lanes of one warp together.
struct EvenTileScheduler {
  const ForwardParams& params;
  const Sm90Params& sm90;
  unsigned total = 0, ranges;    // blocks of keys, and thread blocks that have some
  unsigned at, end;              // where this one is in its range
  int index = 0;                 // the sequence there,
  unsigned first = 0, cost = 1;  // where its keys begin, and its blocks for each head

  __device__ __forceinline__ EvenTileScheduler(const ForwardParams& params, const Sm90Params& sm90,
                                               SortedTiles::Shared&)
      : params(params), sm90(sm90) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = lane; i < params.batch; i += 32) total += cost_of(keys_of(i));
    total = __reduce_add_sync(~0u, total) * params.heads_kv;
    ranges = min(gridDim.x, total);
    at = blockIdx.x < ranges ? begin_of(blockIdx.x) : total;
    end = blockIdx.x < ranges ? begin_of(blockIdx.x + 1) : total;
#pragma unroll 1
    for (; at < end; index += 32) {
      unsigned until = index + lane < params.batch ? cost_of(keys_of(index + lane)) : 0;
      until *= params.heads_kv;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const unsigned before = __shfl_up_sync(~0u, until, step);
        if (lane >= step) until += before;
      }
      const unsigned owners = __ballot_sync(~0u, at < first + until);
      if (owners != 0) {
        const int owner = __ffs(owners) - 1;
        if (owner > 0) first += __shfl_sync(~0u, until, owner - 1);
        index += owner;
        break;
      }
      first += __shfl_sync(~0u, until, 31);
    }
  }

  __device__ __forceinline__ Tile next(bool is_first) {
    Tile tile;
    tile.row = -1;
    if (at >= end) return tile;
    int keys = keys_of(index);
    if (!is_first && at >= first + cost * params.heads_kv) {
      first += cost * params.heads_kv;
      keys = keys_of(++index);
    }
    cost = cost_of(keys);
    const int head = (at - first) / cost;
    const unsigned begin = first + head * cost, until = min(end, begin + cost);
    tile.row = 0;
    tile.batch = index;
    set_head(tile, params, head);
    tile.queries = {params.seqlen_q, 0, index};
    tile.keys = {keys, 0, index};
    tile.block_begin = at - begin;
    tile.block_end = keys == 0 ? 0 : until - begin;
    tile.set_blocks(block_of(begin), block_of(begin + cost - 1));
    at = until;
    return tile;
  }

 private:
  __device__ __forceinline__ int keys_of(int index) const {
    return find_sequence(params, sm90, index).seqlen_k;
  }
  __device__ __forceinline__ static unsigned cost_of(int keys) {
    return max(1, (keys + Config::tile_n - 1) / Config::tile_n);
  }
  __device__ __forceinline__ unsigned begin_of(unsigned block) const {
    return static_cast<unsigned long long>(total) * block / ranges;
  }
  // The thread block whose range has a place.
  __device__ __forceinline__ unsigned block_of(unsigned place) const {
    return ((place + 1ull) * ranges - 1) / total;
  }
};

template <bool kIsDynamic, bool kIsEven>
struct TileSchedulerOf {
  using Type = StaticTileScheduler;
};
template <>
struct TileSchedulerOf<true, false> {
  using Type = DynamicTileScheduler;
};
template <>
struct TileSchedulerOf<true, true> {
  using Type = EvenTileScheduler;
};
using TileScheduler = TileSchedulerOf<kDynamic, Config::even_keys>::Type;
