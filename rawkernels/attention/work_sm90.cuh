// What a block of attention/forward_sm90.cu works on: the order of tiles over blocks, and a tile's
// rows and keys.
#pragma once

#include "attention/params.cuh"
#include "ptx/acquire_release.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "tile/varlen.cuh"

constexpr int kTileM = 64 * Config::warpgroups;

struct Sm90Params {
  ptx::TensorMap q, k, v;     // dimensions (head_dim, row, head, outer), see Sequence
  ptx::TensorMap bias, mask;  // (key, query, head, batch), of length 1 where broadcast
  // Varlen: the tiles that have been taken, once `opened` is the launch's ticket. Any content will
  // do before.
  struct Taken {
    unsigned long long opened;
    unsigned tiles;
  }* taken;
  unsigned long long ticket;  // a random number of this launch's own
  int section;  // heads that are worked on together; 0: fixed-length tiles cost the same
  // Scores are softcap * tanh(cap_scale * q·k), or scale * q·k where cap_scale is 0. The last
  // factor waits: kernels keep scores over score_scale, unless there is a bias, and exp(x) is
  // exp2(x * log2(e)).
  float cap_scale, score_scale, scale_log2;
  // Config::prefix: key j lies in slot j % 2^page_shift of page page_table[j >> page_shift] (null:
  // of page 0). One copy brings 2^box_shift keys.
  const int* page_table;
  int page_shift, box_shift;
  int bias_mapped, mask_mapped;  // whether the copy engine can address them
};

// Where the copy engine finds one sequence's rows. Of fixed length, they are rows of the batch
// `outer`. A varlen call's maps have kFarRows rows, of which a sequence has the last: so boxes that
// reach beyond it are cut off there. Two more axes lead back to where it lies: `outer` counts rows
// too, and at kFarRows the last axis, whose stride is 2^34 less a row's, has gone round the address
// space and kFarRows rows back.
constexpr int kFarRows = 1 << 30;

// With Config::prefix there is one sequence, whose keys are cut into params.batch parts: a tile's
// `batch` is its part, and each part has a result of its own. A warpgroup's 64 rows are as many
// tokens, all with the whole group of query heads that share a key head, as fit: head after head
// and token after token, and the rest idle.
__device__ __forceinline__ int group_of(const ForwardParams& params) {
  return params.heads_q / params.heads_kv;
}
__device__ __forceinline__ int tokens_of_64_rows(const ForwardParams& params) {
  return 64 / group_of(params);
}

struct Sequence {
  int length, shift, outer;
};

struct Tile {
  Sequence queries, keys;
  int row;  // the first of the tile's queries; negative: no tiles are left
  int head, head_kv, batch;
  int block_begin, block_end;  // blocks of keys that some query of the tile sees

  __device__ __forceinline__ bool empty() const { return block_begin == block_end; }

  __device__ __forceinline__ int diagonal() const { return keys.length - queries.length; }

  // The keys that a query sees by its position: from first_key to before end_key.
  __device__ __forceinline__ int first_key(const ForwardParams& params, int query) const {
    return Config::bound_left ? query + diagonal() - params.window_left : 0;
  }

  __device__ __forceinline__ int end_key(const ForwardParams& params, int query) const {
    return Config::bound_right ? min(query + diagonal() + params.window_right + 1, keys.length)
                               : keys.length;
  }

  // Whether none of a consumer's 64 queries sees the tile's first block, or its last.
  __device__ __forceinline__ bool hides_first_block(const ForwardParams& params,
                                                    int consumer) const {
    return first_key(params, row + 64 * consumer) >= (block_begin + 1) * Config::tile_n &&
           block_end - block_begin > 1;
  }
  __device__ __forceinline__ bool hides_last_block(const ForwardParams& params,
                                                   int consumer) const {
    const int last = min(row + 64 * consumer + 64, queries.length) - 1;
    return end_key(params, last) <= (block_end - 1) * Config::tile_n && block_end - block_begin > 1;
  }

  // Blocks in which some of the queries from `first` to `last` does not see some key: those before
  // `before`, and from `from` on.
  struct Partial {
    int before, from;

    __device__ __forceinline__ bool has(int block) const {
      return block >= from || (Config::bound_left && block < before);
    }
  };
  __device__ __forceinline__ Partial partial(const ForwardParams& params, int first,
                                             int last) const {
    const int first_key_of_last = max(first_key(params, last), 0);
    return {(first_key_of_last + Config::tile_n - 1) / Config::tile_n,
            max(end_key(params, first), 0) / Config::tile_n};
  }

  // The same of the tile, but for keys past the sequence's end, which are zeros.
  __device__ __forceinline__ Partial guarded(const ForwardParams& params) const {
    if (Config::elementwise && params.mask != nullptr) return {0, 0};
    Partial guarded = partial(params, row, row + kTileM - 1);
    if (end_key(params, row) == keys.length) guarded.from = block_end;
    return guarded;
  }

  __device__ __forceinline__ bool sees(const ForwardParams& params, int query, int key) const {
    if (query >= queries.length || key < first_key(params, query) || key >= end_key(params, query))
      return false;
    const ScoreStrides& stride = params.mask_stride;
    return !Config::elementwise || params.mask == nullptr ||
           params.mask[batch * stride.batch + head * stride.head + query * stride.row +
                       key * stride.col];
  }

  __device__ __forceinline__ long long value_offset(const ForwardParams& params, int key) const {
    const int first = Config::varlen ? keys.outer - keys.length : 0;
    return batch * (Config::varlen ? 0 : params.v_stride.batch) + head_kv * params.v_stride.head +
           (first + key) * params.v_stride.seq;
  }

  // With Config::prefix, the token and the head of a row, whose number goes on from one warpgroup
  // to the next.
  struct Packed {
    int token, head;
    bool exists;
  };
  __device__ __forceinline__ Packed packed(const ForwardParams& params, int row) const {
    const int group = group_of(params), tokens = tokens_of_64_rows(params);
    const int index = row % 64, token = index / group;
    Packed packed = {row / 64 * tokens + token, head_kv * group + index - token * group};
    packed.exists = token < tokens && packed.token < queries.length;
    return packed;
  }

  __device__ __forceinline__ bool exists(const ForwardParams& params, int query) const {
    return Config::prefix ? packed(params, query).exists : query < queries.length;
  }

  // Of a query, in rows of out and lse.
  __device__ __forceinline__ long long out_offset(const ForwardParams& params, int query) const {
    if constexpr (Config::prefix) {
      const Packed at = packed(params, query);
      return batch * params.out_stride.batch + at.token * params.out_stride.seq +
             at.head * params.out_stride.head;
    }
    const int first = Config::varlen ? queries.outer - queries.length : 0;
    return batch * (Config::varlen ? 0 : params.out_stride.batch) + head * params.out_stride.head +
           (first + query) * params.out_stride.seq;
  }

  __device__ __forceinline__ long long lse_offset(const ForwardParams& params, int query) const {
    if constexpr (Config::prefix) {
      const Packed at = packed(params, query);
      return (static_cast<long long>(batch) * params.heads_q + at.head) * params.seqlen_q +
             at.token;
    }
    const int first = Config::varlen ? queries.outer - queries.length : 0;
    return (static_cast<long long>(Config::varlen ? 0 : batch) * params.heads_q + head) *
               params.seqlen_q +
           first + query;
  }

  __device__ __forceinline__ void find_blocks(const ForwardParams& params) {
    if constexpr (Config::prefix) {
      const int blocks = (keys.length + Config::tile_n - 1) / Config::tile_n;
      block_begin = static_cast<long long>(blocks) * batch / params.batch;
      block_end = static_cast<long long>(blocks) * (batch + 1) / params.batch;
      return;
    }
    const int end = max(0, end_key(params, min(row + kTileM, queries.length) - 1));
    const int first = max(0, first_key(params, row));
    block_end = (end + Config::tile_n - 1) / Config::tile_n;
    block_begin = first < end ? first / Config::tile_n : block_end;
  }
};

// Where all tiles cost the same, tile i of fixed-length sequences is block i's, modulo the grid.
// Else, as under a causal mask, the later rows cost more: the tiles of a section of heads, few
// enough that their keys and values stay in L2, are dealt out last first, forward and backward in
// turn, as is one section after another, so that every block's sum comes out the same.
struct FixedWalk {
  const ForwardParams& params;
  int heads, tiles_m, section;
  bool even;  // all tiles cost the same: one section, head after head
  int first_head = 0, round = 0;

  __device__ __forceinline__ FixedWalk(const ForwardParams& params, const Sm90Params& sm90)
      : params(params),
        heads(walked_heads() * params.batch),
        tiles_m((rows() + kTileM - 1) / kTileM) {
    even = sm90.section == 0;
    section = even ? heads : sm90.section;
  }

  __device__ __forceinline__ Tile next() {
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

  __device__ __forceinline__ Tile tile(int head_of_batch, int m) const {
    Tile tile;
    tile.batch = head_of_batch / walked_heads();
    tile.head = head_of_batch % walked_heads();
    tile.head_kv = Config::prefix ? tile.head : tile.head / (params.heads_q / params.heads_kv);
    tile.row = m * kTileM;
    tile.queries = {params.seqlen_q, 0, tile.batch};
    tile.keys = {params.seqlen_k, 0, tile.batch};
    tile.find_blocks(params);
    return tile;
  }

 private:
  __device__ __forceinline__ int walked_heads() const {
    return Config::prefix ? params.heads_kv : params.heads_q;
  }
  __device__ __forceinline__ int rows() const {
    if (!Config::prefix) return params.seqlen_q;
    const int tokens = tokens_of_64_rows(params);
    return (params.seqlen_q + tokens - 1) / tokens * 64;
  }
};

// The tiles of a batch of up to 32 sequences, those that cost the most first: under a causal mask
// by their place among the sequence's keys, the last first, else by how many keys there are. One
// warp's lanes know a sequence each. Not where windows make the tiles' costs much the same: there
// the warp has no registers left.
struct SortedTiles {
  static constexpr int kMost = Config::bound_left ? 0 : 32;
  static constexpr bool kByPlace = Config::bound_right;

  int count = 0;  // of the lane's sequence
  int first = 0;  // the place of its first; else its lowest number, as sequences follow each other

  __device__ __forceinline__ explicit SortedTiles(const ForwardParams& params) {
    if (!serves(params)) return;
    const int lane = threadIdx.x % 32;
    int keys = -1;
    if (lane < params.batch) {
      const tile::Sequence mine = tile::sequence(params, lane);
      count = (mine.seqlen_q + kTileM - 1) / kTileM;
      keys = mine.seqlen_k;
      if (kByPlace) first = max(0, mine.seqlen_k - mine.seqlen_q) / kTileM;
    }
    if (kByPlace) return;
#pragma unroll 1
    for (int other = 0; other < params.batch; ++other) {
      const int other_keys = __shfl_sync(~0u, keys, other);
      const int other_count = __shfl_sync(~0u, count, other);
      if (other_keys > keys || (other_keys == keys && other < lane)) first += other_count;
    }
  }

  __device__ __forceinline__ static bool serves(const ForwardParams& params) {
    return kMost > 0 && params.batch <= kMost;
  }

  // All lanes together, with the same number.
  __device__ __forceinline__ tile::Sequence find(const ForwardParams& params, int number) const {
    int place = 0;
    bool mine;
    if (kByPlace) {
      int after = __reduce_max_sync(~0u, first + count);  // no tile has this place or a later one
      int later = 0;  // how many tiles have a place after `place`
      while (place < after) {
        const int middle = (place + after) / 2;
        const int beyond = __reduce_add_sync(~0u, min(count, max(0, first + count - middle - 1)));
        if (number < beyond) {
          place = middle + 1;
        } else {
          after = middle;
          later = beyond;
        }
      }
      mine = place >= first && place < first + count;
      const unsigned have = __ballot_sync(~0u, mine);
      mine &= __popc(have & ((1u << threadIdx.x % 32) - 1)) == number - later;
      place -= first;
    } else {
      mine = number >= first && number < first + count;
      place = first + count - 1 - number;
    }
    const unsigned owner = __ballot_sync(~0u, mine);
    if (owner == 0) return {0, 0, 0, 0, 0, -1};
    const int index = __ffs(owner) - 1;
    tile::Sequence found = tile::sequence(params, index);
    found.tile = __shfl_sync(~0u, place, index);
    return found;
  }
};

// Tiles of a varlen call are taken by whichever block is free: no one knows their cost before. The
// tiles of a section of heads at a time, sorted or, of a larger batch, last first. All lanes of one
// warp together.
struct VarlenWalk {
  const ForwardParams& params;
  const Sm90Params& sm90;
  const SortedTiles sorted;
  unsigned item = blockIdx.x;  // the first of each block is given

  __device__ __forceinline__ VarlenWalk(const ForwardParams& params, const Sm90Params& sm90)
      : params(params), sm90(sm90), sorted(params) {
    if (blockIdx.x == 0 && threadIdx.x % 32 == 0) {
      sm90.taken->tiles = gridDim.x;
      ptx::store_release(&sm90.taken->opened, sm90.ticket);
    }
  }

  __device__ __forceinline__ Tile next() {
    Tile tile;
    tile.row = -1;
    while (item < total() && tile.row < 0) {
      const int first_head = item / (slots() * sm90.section) * sm90.section;
      const int size = min(sm90.section, params.heads_q - first_head);
      const unsigned place = item - first_head * slots();
      const int number = place / size;
      const tile::Sequence found =
          SortedTiles::serves(params) ? sorted.find(params, number)
                                      : tile::varlen_sequence<kTileM>(params, slots() - 1 - number);
      tile.row = found.tile * kTileM;
      tile.batch = found.index;
      tile.head = first_head + place % size;
      tile.head_kv = tile.head / (params.heads_q / params.heads_kv);
      tile.queries = sequence(static_cast<int>(found.begin_q), found.seqlen_q);
      tile.keys = sequence(static_cast<int>(found.begin_k), found.seqlen_k);
      tile.find_blocks(params);
      item = take();
    }
    return tile;
  }

 private:
  __device__ __forceinline__ unsigned slots() const {
    return params.seqlen_q / kTileM + params.batch;
  }
  __device__ __forceinline__ unsigned total() const { return slots() * params.heads_q; }

  __device__ __forceinline__ static Sequence sequence(int begin, int length) {
    return {length, kFarRows - length, begin + length};
  }

  __device__ __forceinline__ unsigned take() const {
    unsigned taken;
    if (threadIdx.x % 32 == 0) {
      while (ptx::load_acquire(&sm90.taken->opened) != sm90.ticket) {
      }
      taken = atomicAdd(&sm90.taken->tiles, 1);
      // The last of all: a replay of this launch in a CUDA graph must not find the ticket.
      if (taken == total() + gridDim.x - 1) sm90.taken->opened = ~sm90.ticket;
    }
    return __shfl_sync(~0u, taken, 0);
  }
};

template <bool kVarlen>
struct WalkOf {
  using Type = FixedWalk;
};
template <>
struct WalkOf<true> {
  using Type = VarlenWalk;
};

// The tiles that one warp finds, for all warps that work on them.
struct TileQueue {
  static constexpr int kSize = 4;

  Tile tiles[kSize];
  ptx::Mbarrier full[kSize];   // the finding warp -> readers
  ptx::Mbarrier empty[kSize];  // every reading warp -> the finding warp
};
