// What a block of attention/forward_sm90.cu works on: the order of tiles over blocks, and a tile's rows and keys.
#pragma once

#include "attention/params.cuh"
#include "ptx/tma.cuh"

struct TmaParams {
  ptx::TensorMap q, k, v;  // dimensions (head_dim, row, head, outer)
  int section;             // heads that are worked on together
};

// Where one sequence's rows are.
struct Sequence {
  int length;
  int shift;  // of the copy engine's row coordinate
  int outer;  // its last coordinate
};

struct Tile {
  Sequence queries, keys;
  int row;  // the first of the tile's queries
  int head, head_kv, batch;
  int block_begin, block_end;    // blocks of keys that some query of the tile sees
  int window_first, window_end;  // query i sees keys from i + window_first to before i + window_end

  __device__ __forceinline__ bool empty() const { return block_begin == block_end; }

  __device__ __forceinline__ int first_key(int query) const { return query + window_first; }

  __device__ __forceinline__ int end_key(int query) const {
    return Config::bound_right ? min(query + window_end, keys.length) : keys.length;
  }

  // Whether one of the 64 queries from `offset` on must not see a key of the block.
  __device__ __forceinline__ bool hides_keys(int block, int offset) const {
    return (block + 1) * Config::tile_n > end_key(row + offset) ||
           (Config::bound_left && block * Config::tile_n < first_key(row + offset + 63));
  }

  __device__ __forceinline__ Config::dtype* out_row(const ForwardParams& params, int query) const {
    return static_cast<Config::dtype*>(params.out) + batch * params.out_stride.batch + head * params.out_stride.head +
           query * params.out_stride.seq;
  }

  __device__ __forceinline__ float* lse_row(const ForwardParams& params, int query) const {
    return static_cast<float*>(params.lse) + (static_cast<long long>(batch) * params.heads_q + head) * params.seqlen_q + query;
  }
};

// Walks over this block's tiles. Every role of the block walks on its own and meets the same tiles.
//
// Where all tiles cost the same, tile i is block i's, modulo the grid. Under a causal mask the later rows cost more: the tiles of
// a section of heads, few enough that their keys and values stay in L2, are dealt out longest first, forward and backward
// in turn, as is one section after another, so that every block's sum comes out the same.
struct Work {
  static constexpr int kTileM = 64 * Config::warpgroups;
  static constexpr bool kSections = Config::bound_right && !Config::bound_left;

  const ForwardParams& params;
  int heads, tiles_m;
  int section, first_head, round, item;

  __device__ __forceinline__ Work(const ForwardParams& params, const TmaParams& tma)
      : params(params), heads(params.heads_q * params.batch), tiles_m((params.seqlen_q + kTileM - 1) / kTileM) {
    section = kSections ? tma.section : heads;
    first_head = 0;
    round = -1;
    next();
  }

  __device__ __forceinline__ bool valid() const { return first_head < heads; }

  __device__ __forceinline__ void next() {
    const int grid = gridDim.x;
    do {
      ++round;
      if (round * grid >= section * tiles_m) {
        round = 0;
        first_head += section;
      }
      const bool backward = kSections && (round + first_head / section) % 2;
      item = round * grid + (backward ? grid - 1 - blockIdx.x : blockIdx.x);
    } while (valid() && item >= min(section, heads - first_head) * tiles_m);
  }

  __device__ __forceinline__ Tile tile() const {
    Tile tile;
    const int size = min(section, heads - first_head);
    const int head = first_head + (kSections ? item % size : item / tiles_m);
    const int m = kSections ? tiles_m - 1 - item / size : item % tiles_m;
    tile.batch = head / params.heads_q;
    tile.head = head % params.heads_q;
    tile.head_kv = tile.head / (params.heads_q / params.heads_kv);
    tile.row = m * kTileM;
    tile.queries = {params.seqlen_q, 0, tile.batch};
    tile.keys = {params.seqlen_k, 0, tile.batch};
    const int diagonal = tile.keys.length - tile.queries.length;
    tile.window_first = diagonal - params.window_left;
    tile.window_end = diagonal + params.window_right + 1;
    const int end = max(0, tile.end_key(min(tile.row + kTileM, tile.queries.length) - 1));
    const int first = Config::bound_left ? max(0, tile.first_key(tile.row)) : 0;
    tile.block_end = (end + Config::tile_n - 1) / Config::tile_n;
    tile.block_begin = first < end ? first / Config::tile_n : tile.block_end;
    return tile;
  }
};
