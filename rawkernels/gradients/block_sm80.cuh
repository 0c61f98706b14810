// A thread block of gradients/backward_sm80.cu: which rows it has, which columns it walks over, and
// how they come to shared memory.
#pragma once

#include "gradients/params.cuh"
#include "ptx/shared.cuh"
#include "tile/ragged.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"
#include "tile/visibility.cuh"

using T = Config::dtype;
constexpr int kDim = Config::head_dim, kDimV = Config::head_dim_v;
constexpr int kTileM = Config::tile_m, kTileN = Config::tile_n, kThreads = Config::threads;
constexpr bool kKeysStationary = Config::keys_stationary;
constexpr bool kFirst = Config::first, kSecond = Config::second;  // dq or dk; dv
constexpr bool kGeneral = Config::general;  // scores are more than scaled, or there is dropout

static_assert(kTileM == kThreads / 2, "16 rows a warp");
static_assert(kTileN % 16 == 0, "whole k16 steps of the last products");
static_assert(kKeysStationary || (kFirst && !kSecond),
              "with queries stationary dq is all there is");

using Tile0 = tile::Swizzled<kDim / 8>;   // of q and k
using Tile1 = tile::Swizzled<kDimV / 8>;  // of dout and v
constexpr int kRows0 = kTileM * Tile0::kRowBytes, kRows1 = kTileM * Tile1::kRowBytes;
constexpr int kCols0 = kTileN * Tile0::kRowBytes, kCols1 = kTileN * Tile1::kRowBytes;
constexpr int kStageBytes = kCols0 + kCols1 + kTileN * 8;
static_assert(kRows0 + kRows1 + 2 * kStageBytes <= Config::smem_bytes, "two stages of columns");
static_assert(kCols0 % 128 == 0 && kCols1 % 128 == 0 && kTileN * 8 % 128 == 0,
              "the permutation counts rows from a multiple of 128 bytes");

struct Block {
  tile::Sequence seq;
  tile::Visibility visibility;  // rows are counted from the sequence's first
  int head, first_row;
  int rows;                          // of all in the sequence
  int first_column, columns, heads;  // heads * columns are walked over
};

// What tile::varlen_sequence wants to know, of rows as its queries.
struct Lengths {
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  int batch, seqlen_q, seqlen_k;
};

// Of the block with these indices, in a grid of `blocks` along x.
__device__ __forceinline__ Block find_block(const ForwardParams& params, int x, int blocks,
                                            int batch) {
  const int heads = kKeysStationary ? params.heads_kv : params.heads_q;
  const int slots = blocks / heads, slot = x % slots;
  Block block;
  block.head = x / slots;
  tile::Sequence& seq = block.seq;
  if (params.cu_seqlens_q != nullptr && kKeysStationary) {
    const Lengths lengths = {params.cu_seqlens_k, params.cu_seqlens_q, params.batch,
                             params.seqlen_k, params.seqlen_q};
    const tile::Sequence found = tile::varlen_sequence<kTileM>(lengths, slot);
    seq = {found.index, found.begin_k, found.begin_q, found.seqlen_k, found.seqlen_q, found.tile};
  } else if (params.cu_seqlens_q != nullptr) {
    seq = tile::varlen_sequence<kTileM>(params, slot);
  } else {
    // With a causal mask the last queries, and the first keys, are the most work.
    seq = {
        batch, 0, 0, params.seqlen_q, params.seqlen_k, kKeysStationary ? slot : slots - 1 - slot};
  }
  block.visibility = tile::Visibility::from_row(0, seq.seqlen_q, params.window_left,
                                                params.window_right, seq.seqlen_q, seq.seqlen_k);
  block.first_row = seq.tile * kTileM;
  block.rows = kKeysStationary ? seq.seqlen_k : seq.seqlen_q;
  const int last_row = min(block.first_row + kTileM, block.rows) - 1;
  tile::Range columns = kKeysStationary ? block.visibility.rows_of_any(block.first_row, last_row)
                                        : block.visibility.keys_of_any(block.first_row, last_row);
  if (kKeysStationary) columns.end = min(columns.end, seq.seqlen_q);
  block.first_column = max(columns.begin, 0) / kTileN * kTileN;
  block.columns = max(columns.end - block.first_column + kTileN - 1, 0) / kTileN;
  block.heads = kKeysStationary ? params.heads_q / params.heads_kv : 1;
  return block;
}

template <class Tile, int kTileRows>
using Loader = tile::TileLoader<T, Tile, kTileRows, kThreads>;

// Loaders of q and dout of a query head, and of k and v of a key head.
template <class Tile, int kTileRows>
__device__ __forceinline__ Loader<Tile, kTileRows> loader(const ForwardParams& params,
                                                          const void* base, const Strides& stride,
                                                          int batch, long long row, int head,
                                                          int columns) {
  const long long at = (params.cu_seqlens_q != nullptr ? 0 : batch * stride.batch) +
                       row * stride.seq + head * stride.head;
  return {static_cast<const T*>(base) + at, stride.seq, columns, true};
}

template <bool kOfKeys, int kTileRows>
__device__ __forceinline__ void load_pair(const ForwardParams& params,
                                          const BackwardParams& backward, const Block& block,
                                          unsigned tile0, unsigned tile1, int head, int row,
                                          int content0 = tile::kValues,
                                          int content1 = tile::kValues) {
  const tile::Sequence& seq = block.seq;
  const long long begin = kOfKeys ? seq.begin_k : seq.begin_q;
  const int end = kOfKeys ? seq.seqlen_k : seq.seqlen_q;
  loader<Tile0, kTileRows>(params, kOfKeys ? params.k : params.q,
                           kOfKeys ? params.k_stride : params.q_stride, seq.index, begin, head,
                           params.head_dim)
      .load(tile0, row, 0, end, content0);
  loader<Tile1, kTileRows>(params, kOfKeys ? params.v : backward.dout,
                           kOfKeys ? params.v_stride : backward.dout_stride, seq.index, begin, head,
                           params.head_dim_v)
      .load(tile1, row, 0, end, content1);
}

// lse in units of log2, +inf where p is to be 0, and delta.
__device__ __forceinline__ float2 statistics(const ForwardParams& params,
                                             const BackwardParams& backward, const Block& block,
                                             int head, int query) {
  if (query >= block.seq.seqlen_q) return {tile::infinity(), 0.0f};
  const bool ragged = params.cu_seqlens_q != nullptr;
  const long long row =
      ragged ? head : static_cast<long long>(block.seq.index) * params.heads_q + head;
  const long long at = row * params.seqlen_q + block.seq.begin_q + query;
  const float lse = static_cast<const float*>(params.lse)[at];
  return {lse == tile::negative_infinity() ? tile::infinity() : lse * tile::kLog2e,
          static_cast<const float*>(backward.delta)[at]};
}
