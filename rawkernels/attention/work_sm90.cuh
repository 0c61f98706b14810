// What a block of attention/forward_sm90.cu works on: the order of tiles over blocks, and a tile's rows and keys.
#pragma once

#include "attention/params.cuh"
#include "ptx/tma.cuh"

struct TensorMaps {
  ptx::TensorMap q, k, v, out;  // dimensions (head_dim, row, head, outer)
};

// Where the copy engine finds one sequence's rows.
struct Sequence {
  int length;
  int shift;  // of the row coordinate
  int outer;  // the last coordinate: the batch
};

struct Tile {
  Sequence queries, keys;
  int row;  // the first of the tile's queries
  int head, head_kv, batch;
  int block_begin, block_end;      // blocks of keys that some query of the tile sees
  int window_first, window_end;    // query i sees keys from i + window_first to before i + window_end

  __device__ __forceinline__ int first_key(int query) const { return query + window_first; }

  __device__ __forceinline__ int end_key(int query) const {
    return Config::bound_right ? min(query + window_end, keys.length) : keys.length;
  }

  __device__ __forceinline__ long long lse_offset(const ForwardParams& params) const {
    return (static_cast<long long>(batch) * params.heads_q + head) * params.seqlen_q;
  }
};

// Walks over this block's tiles. Every role of the block walks on its own and meets the same tiles.
struct Work {
  int round = 0;
  int tiles_m, total;

  __device__ __forceinline__ explicit Work(const ForwardParams& params) {
    tiles_m = (params.seqlen_q + 64 * Config::warpgroups - 1) / (64 * Config::warpgroups);
    total = tiles_m * params.heads_q * params.batch;
  }

  // Even rounds run forward over the blocks and odd ones backward: where tiles come longest first, every block gets its
  // share of long ones.
  __device__ __forceinline__ int index() const {
    const int block = Config::bound_right && round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    return round * gridDim.x + block;
  }

  __device__ __forceinline__ bool valid() const { return round * int(gridDim.x) < total && index() < total; }

  __device__ __forceinline__ void next(const ForwardParams&) { ++round; }

  __device__ __forceinline__ Tile tile(const ForwardParams& params) const {
    constexpr int kTileM = 64 * Config::warpgroups;
    Tile tile;
    int head_of_batch, m;
    if (Config::bound_right) {
      // Longest first, over as many heads at a time as have room for their keys and values in L2.
      const long long kv_bytes = 2ll * params.seqlen_k * (params.head_dim + params.head_dim_v);
      const int heads = max(1ll, (32ll << 20) / max(kv_bytes, 1ll)) * (params.heads_q / params.heads_kv);
      const int section = index() / (heads * tiles_m);
      const int left = params.heads_q * params.batch - section * heads;
      const int size = min(heads, left);
      const int rest = index() - section * heads * tiles_m;
      head_of_batch = section * heads + rest % size;
      m = tiles_m - 1 - rest / size;
    } else {
      head_of_batch = index() / tiles_m;
      m = index() % tiles_m;
    }
    tile.batch = head_of_batch / params.heads_q;
    tile.head = head_of_batch % params.heads_q;
    tile.head_kv = tile.head / (params.heads_q / params.heads_kv);
    tile.row = m * kTileM;
    tile.queries = {params.seqlen_q, 0, tile.batch};
    tile.keys = {params.seqlen_k, 0, tile.batch};
    const int diagonal = tile.keys.length - tile.queries.length;
    tile.window_first = diagonal - params.window_left;
    tile.window_end = diagonal + params.window_right + 1;
    const int last_row = min(tile.row + kTileM, tile.queries.length) - 1;
    const int end = max(0, tile.end_key(last_row));
    const int first = Config::bound_left ? max(0, tile.first_key(tile.row)) : 0;
    tile.block_end = (end + Config::tile_n - 1) / Config::tile_n;
    tile.block_begin = min(first / Config::tile_n, tile.block_end);
    if (first >= end) tile.block_begin = tile.block_end;
    return tile;
  }
};
