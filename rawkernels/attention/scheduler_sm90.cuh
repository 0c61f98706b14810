// The tile scheduler of attention/forward_sm90.cu: which thread block works on which tiles, in what
// order. One warp of a block finds its tiles and passes them to the others through a queue.
#pragma once

#include "attention/tile_counter_sm90.cuh"
#include "attention/tile_sm90.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"

__device__ __forceinline__ int scheduled_heads(const ForwardParams& params) {
  if constexpr (Config::pack_gqa) return params.heads_kv;
  return params.heads_q;
}

// Sets the head of a tile: number `head` of those that are scheduled.
__device__ __forceinline__ void set_head(Tile& tile, const ForwardParams& params, int head) {
  if constexpr (Config::pack_gqa) {
    tile.head = head * params.group;
    tile.head_kv = head;
  } else {
    tile.head = head;
    tile.head_kv = head / params.group;
  }
}

// Sequence `index` of a batch whose lengths the device knows; its tile is left to the caller.
__device__ __forceinline__ tile::Sequence find_sequence(const ForwardParams& params,
                                                        const Sm90Params& sm90, int index) {
  if constexpr (kRaggedKeys) {
    return tile::sequence(params, index);
  } else {
    tile::Rows q = {0, params.seqlen_q};
    if constexpr (Config::varlen) {
      q = tile::ragged_rows(params.cu_seqlens_q, params.seqlen_q, index);
      if (q.length < sm90.min_queries) q.length = 0;
    }
    const int keys = Config::seq_lens ? tile::clamped(sm90.seq_lens[index], 0, params.seqlen_k)
                                      : params.seqlen_k;
    return {index, q.begin, 0, q.length, keys, -1};
  }
}

// A tile: of which sequence of the batch, and which of its tiles; a negative one: there is none.
struct FoundTile {
  int index, tile;
};

// The tiles of a batch of up to 32 sequences without a mask, those of the sequences with the most
// keys first. One warp's lanes know a sequence each. Not where windows make the tiles' costs much
// the same, or where all tiles are worked on at about the same time: there the warp has no
// registers left.
struct TilesByKeys {
  static constexpr int kMost = Config::bound_left || Config::split_kv || Config::even_keys ? 0 : 32;

  struct Shared {
    __device__ __forceinline__ void start(const ForwardParams&, const Sm90Params&) {}
  };

  int count = 0;  // of the lane's sequence
  int first = 0;  // its lowest number, as sequences follow each other

  __device__ __forceinline__ TilesByKeys(const ForwardParams& params, const Sm90Params& sm90,
                                         Shared&) {
    if (!serves(params, sm90)) return;
    const int lane = threadIdx.x % 32;
    int keys = -1;
    if (lane < params.batch) {
      const tile::Sequence mine = find_sequence(params, sm90, lane);
      count = divided_by_tile(sm90, mine.seqlen_q + queries_of_tile(params) - 1);
      keys = mine.seqlen_k;
    }
#pragma unroll 1
    for (int other = 0; other < params.batch; ++other) {
      const int other_keys = __shfl_sync(~0u, keys, other);
      const int other_count = __shfl_sync(~0u, count, other);
      if (other_keys > keys || (other_keys == keys && other < lane)) first += other_count;
    }
  }

  __device__ __forceinline__ static bool serves(const ForwardParams& params, const Sm90Params&) {
    return kMost > 0 && params.batch <= kMost;
  }

  // All lanes together, with the same number.
  __device__ __forceinline__ FoundTile find(const ForwardParams&, const Sm90Params&,
                                            int number) const {
    const unsigned owner = __ballot_sync(~0u, number >= first && number < first + count);
    if (owner == 0) return {0, -1};
    const int index = __ffs(owner) - 1;
    return {index, __shfl_sync(~0u, first + count - 1 - number, index)};
  }
};

// The tiles of up to kMost sequences under a causal mask, by their place among the sequence's keys,
// the last first: they see the most keys. They are sorted into classes, each of a quarter of the
// places that are left; within a class the tiles of a sequence follow each other, whose keys then
// stay in L2. (By simulation, the busiest of 132 thread blocks has 1.01 of the mean for 64
// sequences of 16 to 4096 tokens and 8 heads, in the order of the batch 1.09.) The table lies in
// shared memory, as the warp that finds tiles has no registers for it.
struct TilesByPlace {
  static constexpr int kMost = 256;

  struct Sequence {
    int count, first;  // tiles, and the place of the first
  };
  struct Shared {
    Sequence sequences[kMost];
    int low, high;                  // the class: places from `low` to before `high`
    unsigned first_tile, end_tile;  // the numbers of its tiles

    // All threads of a block together, before a warp finds tiles.
    __device__ __forceinline__ void start(const ForwardParams& params, const Sm90Params& sm90) {
      if (!serves(params, sm90)) return;
      for (int i = threadIdx.x; i < kMost; i += Config::threads) {
        sequences[i] = {0, 0};
        if (i >= params.batch) continue;
        const tile::Sequence mine = find_sequence(params, sm90, i);
        sequences[i] = {divided_by_tile(sm90, mine.seqlen_q + queries_of_tile(params) - 1),
                        divided_by_tile(sm90, max(0, mine.seqlen_k - mine.seqlen_q))};
      }
      first_tile = ~0u;  // no class yet
    }
  } & shared;

  __device__ __forceinline__ TilesByPlace(const ForwardParams&, const Sm90Params&, Shared& shared)
      : shared(shared) {}

  // Not where most sequences have a tile at most: there is little to sort, and no time for it.
  __device__ __forceinline__ static bool serves(const ForwardParams& params,
                                                const Sm90Params& sm90) {
    if (Config::varlen && params.batch > 32 &&
        divided_by_tile(sm90, params.seqlen_q) < params.batch)
      return false;
    return params.batch <= kMost;
  }

  // All lanes of one warp together, with the same number.
  __device__ __forceinline__ FoundTile find(const ForwardParams& params, const Sm90Params&,
                                            unsigned number) const {
    if (number < shared.first_tile) restart(params);  // for another section of heads
    while (number >= shared.end_tile)
      if (!next_class(params)) return {0, -1};
    unsigned rest = number - shared.first_tile;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int from = 0;; from += 32) {
      const unsigned own = members(shared.sequences[from + lane]);
      unsigned until = own;  // with those of the lanes before
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const unsigned before = __shfl_up_sync(~0u, until, step);
        if (lane >= step) until += before;
      }
      const unsigned owners = __ballot_sync(~0u, rest < until);
      if (owners == 0) {
        rest -= __shfl_sync(~0u, until, 31);
        continue;
      }
      const int owner = __ffs(owners) - 1;
      rest -= __shfl_sync(~0u, until - own, owner);
      const Sequence found = shared.sequences[from + owner];
      return {from + owner,
              min(found.count, shared.high - found.first) - 1 - static_cast<int>(rest)};
    }
  }

 private:
  // How many of a sequence's tiles are of the class.
  __device__ __forceinline__ int members(const Sequence& sequence) const {
    return max(0,
               min(shared.high, sequence.first + sequence.count) - max(shared.low, sequence.first));
  }

  // To the empty class above all others.
  __device__ __forceinline__ void restart(const ForwardParams& params) const {
    int end = 0;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < params.batch; i += 32)
      end = max(end, shared.sequences[i].first + shared.sequences[i].count);
    shared.low = __reduce_max_sync(~0u, end);
    shared.first_tile = shared.end_tile = 0;
    __syncwarp();
  }

  // To the class below; false if there is none.
  __device__ __forceinline__ bool next_class(const ForwardParams& params) const {
    const int end = shared.low;
    const unsigned tiles = shared.end_tile;
    if (end == 0) return false;
    __syncwarp();
    shared.high = end;
    shared.low = end - (end + 3) / 4;
    shared.first_tile = tiles;
    __syncwarp();
    unsigned all = 0;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < params.batch; i += 32) all += members(shared.sequences[i]);
    shared.end_tile = tiles + __reduce_add_sync(~0u, all);
    __syncwarp();
    return true;
  }
};

template <bool kByPlace>
struct SortedTilesOf {
  using Type = TilesByKeys;
};
template <>
struct SortedTilesOf<true> {
  using Type = TilesByPlace;
};
constexpr bool kSortsByPlace = kDynamic && Config::bound_right && !Config::bound_left &&
                               !Config::split_kv && !Config::even_keys && !kSharesCodes;
using SortedTiles = SortedTilesOf<kSortsByPlace>::Type;

// Tiles whose costs the host knows. Where they all cost the same, tile i is that of block i modulo
// the grid. Else, as under a causal mask, the later rows cost more: the tiles of a section of
// heads, few enough that their keys and values stay in L2, are dealt out last first, forward and
// backward in turn, as is one section after another, so that every block's sum comes out the same.
struct StaticTileScheduler {
  const ForwardParams& params;
  const Sm90Params& sm90;
  int heads, tiles_m, section;  // heads of all sequences, and of all parts of their keys
  bool even;                    // all tiles cost the same: one section, head after head
  int first_head = 0, round = 0;

  __device__ __forceinline__ StaticTileScheduler(const ForwardParams& params,
                                                 const Sm90Params& sm90, SortedTiles::Shared&)
      : params(params),
        sm90(sm90),
        heads(scheduled_heads(params) * params.batch * num_splits(sm90)),
        tiles_m(divided_by_tile(sm90, params.seqlen_q + queries_of_tile(params) - 1)) {
    even = sm90.section == 0;
    section = even ? heads : sm90.section;
  }

  __device__ __forceinline__ Tile next(bool) {
    const int grid = gridDim.x;
    for (; first_head < heads; first_head += section, round = 0) {
      const int size = min(section, heads - first_head);
      while (round * grid < size * tiles_m) {
        const bool backward = !even && (round + first_head / section) % 2;
        const int item = round++ * grid + (backward ? grid - 1 - blockIdx.x : blockIdx.x);
        if (item < size * tiles_m)
          return tile(first_head + (even ? item / tiles_m : item % size),
                      even ? item % tiles_m : tiles_m - 1 - item / size);
      }
    }
    Tile none;
    none.row = -1;
    return none;
  }

  __device__ __forceinline__ Tile tile(int head_of_all, int m) const {
    Tile tile;
    tile.batch = head_of_all / scheduled_heads(params);
    set_head(tile, params, head_of_all % scheduled_heads(params));
    if constexpr (Config::split_kv) {
      tile.set_split(tile.batch / params.batch);
      tile.batch %= params.batch;
    }
    tile.row = m * kTileM;
    tile.queries = {params.seqlen_q, 0, tile.batch};
    tile.keys = {params.seqlen_k, 0, tile.batch};
    tile.find_blocks(params, sm90);
    return tile;
  }
};

// Tiles whose costs only the device can know are taken by whichever block is free: the tiles of a
// section of heads at a time, the dearest first or, of a very large batch, the last first. All
// lanes of one warp together.
struct DynamicTileScheduler {
  const ForwardParams& params;
  const Sm90Params& sm90;
  const SortedTiles sorted;
  const TileCounter counter;

  __device__ __forceinline__ DynamicTileScheduler(const ForwardParams& params,
                                                  const Sm90Params& sm90,
                                                  SortedTiles::Shared& shared)
      : params(params), sm90(sm90), sorted(params, sm90, shared), counter(sm90) {}

  __device__ __forceinline__ Tile next(bool first) {
    Tile tile;
    tile.row = -1;
    unsigned item = first && !counter.has_late_blocks() ? blockIdx.x : take();
    while (item < total()) {
      const int first_head = item / (slots() * sm90.section) * sm90.section;
      const int size = min(sm90.section, heads() - first_head);
      const unsigned place = item - first_head * slots();
      int head = first_head + place % size;
      const tile::Sequence found = find(place / size);
      tile.row = found.tile * kTileM;
      tile.batch = found.index;
      if constexpr (Config::split_kv) {
        tile.set_split(head / scheduled_heads(params));
        head %= scheduled_heads(params);
      }
      set_head(tile, params, head);
      if constexpr (Config::varlen)
        tile.queries = tile::ragged_tma_rows(static_cast<int>(found.begin_q), found.seqlen_q);
      else
        tile.queries = {found.seqlen_q, 0, found.index};
      if constexpr (kRaggedKeys)
        tile.keys = tile::ragged_tma_rows(static_cast<int>(found.begin_k), found.seqlen_k);
      else
        tile.keys = {found.seqlen_k, 0, found.index};
      tile.find_blocks(params, sm90);
      if (tile.row >= 0) break;
      item = take();
    }
    return tile;
  }

 private:
  // The sequence and the tile of one of a head's slots.
  __device__ __forceinline__ tile::Sequence find(int number) const {
    FoundTile at;
    if (SortedTiles::serves(params, sm90)) {
      at = sorted.find(params, sm90, number);
    } else if constexpr (Config::varlen) {
      const int slot = slots() - 1 - number;
      const auto by_tile = [this](int row) { return divided_by_tile(sm90, row); };
      at.index = tile::sequence_of_slot(params.cu_seqlens_q, params.batch, slot, by_tile);
      const tile::Sequence found = find_sequence(params, sm90, at.index);
      at.tile = tile::tile_of_slot(static_cast<int>(found.begin_q), found.seqlen_q, at.index, slot,
                                   queries_of_tile(params), by_tile);
    } else {
      const int slot = slots() - 1 - number;
      at = {slot / tiles_of_sequence(), slot % tiles_of_sequence()};
    }
    tile::Sequence found = find_sequence(params, sm90, at.index);
    found.tile = at.tile;
    return found;
  }

  __device__ __forceinline__ int heads() const {
    return scheduled_heads(params) * num_splits(sm90);
  }
  __device__ __forceinline__ int tiles_of_sequence() const {
    return divided_by_tile(sm90, params.seqlen_q + queries_of_tile(params) - 1);
  }
  __device__ __forceinline__ unsigned slots() const {
    return Config::varlen ? divided_by_tile(sm90, params.seqlen_q) + params.batch
                          : tiles_of_sequence() * params.batch;
  }
  __device__ __forceinline__ unsigned total() const { return slots() * heads(); }

  __device__ __forceinline__ unsigned take() const {
    return counter.take([this] { return total(); });
  }
};

// The tiles that the scheduler's warp finds, for all warps that work on them.
struct TileQueue {
  static constexpr int kSize = 4;

  Tile tiles[kSize];
  ptx::Mbarrier full[kSize];   // the scheduler's warp -> readers
  ptx::Mbarrier empty[kSize];  // every reading warp -> the scheduler's warp
};
