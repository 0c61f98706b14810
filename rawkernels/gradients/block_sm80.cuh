// A thread block of gradients/backward_sm80.cu: which rows it has, which columns it walks over, and
// how they come to shared memory.
#pragma once

#include "gradients/params.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/registers.cuh"
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

constexpr int kRows = Config::warp_rows, kBlocks = kRows / 16;  // of a warp
static_assert(kRows % 16 == 0 && kBlocks > 0, "a warp's rows must be whole m16 blocks");
static_assert(kTileN % 16 == 0, "whole k16 steps of the last products");
static_assert(kKeysStationary || (kFirst && !kSecond),
              "with queries stationary dq is all there is");

using Tile0 = tile::Swizzled<kDim / 8>;   // of q and k
using Tile1 = tile::Swizzled<kDimV / 8>;  // of dout and v
constexpr int kRows0 = kTileM * Tile0::kRowBytes, kRows1 = kTileM * Tile1::kRowBytes;
constexpr int kCols0 = kTileN * Tile0::kRowBytes, kCols1 = kTileN * Tile1::kRowBytes;
constexpr int kStageBytes = kCols0 + kCols1 + kTileN * 8;
constexpr bool kAddsDq = Config::adds_dq;                    // by keys: adds up dq in memory
constexpr int kDsBytes = kAddsDq ? kTileM * kTileN * 2 : 0;  // dS^T, keys × queries
static_assert(kRows0 + kRows1 + 2 * kStageBytes + kDsBytes <= Config::smem_bytes,
              "two stages of columns");
static_assert(!kAddsDq || (kKeysStationary && kFirst), "dq needs dS and keys");
static_assert(kCols0 % 128 == 0 && kCols1 % 128 == 0 && kTileN * 8 % 128 == 0,
              "the permutation counts rows from a multiple of 128 bytes");

struct Block {
  tile::Sequence seq;
  tile::Visibility visibility;  // rows are counted from the sequence's first
  int head, first_row;
  int rows;                          // of all in the sequence
  int first_column, columns, heads;  // heads * columns are walked over
};

// kTileN columns, the first of them and the query head that they are of. A block walks over those
// of one head after those of another.
struct Columns {
  int head, first;

  __device__ __forceinline__ explicit Columns(const Block& block)
      : head(block.head * block.heads), first(block.first_column) {}
  __device__ __forceinline__ Columns after(const Block& block) const {
    Columns next = *this;
    next.first += kTileN;
    if (kKeysStationary && next.first >= block.first_column + block.columns * kTileN) {
      next.first = block.first_column;
      ++next.head;
    }
    return next;
  }
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

// Where this thread's first chunks of the next columns lie, for columns that are there in whole:
// addresses from scratch are a hundred instructions a step.
struct ColumnSource {
  static constexpr bool kOfKeys = !kKeysStationary;
  const T *of0, *of1;

  __device__ __forceinline__ ColumnSource(const ForwardParams& params,
                                          const BackwardParams& backward, const Block& block,
                                          int head, int row) {
    const long long begin = kOfKeys ? block.seq.begin_k : block.seq.begin_q;
    const long long batch = params.cu_seqlens_q != nullptr ? 0 : block.seq.index;
    const int thread = ptx::thread_index();
    const auto source = [&](const void* base, const Strides& stride, int group) {
      return static_cast<const T*>(base) + batch * stride.batch + head * stride.head +
             (begin + row + thread / group) * stride.seq + thread % group * 8;
    };
    of0 = source(kOfKeys ? params.k : params.q, kOfKeys ? params.k_stride : params.q_stride,
                 Tile0::kGroup);
    of1 = source(kOfKeys ? params.v : backward.dout,
                 kOfKeys ? params.v_stride : backward.dout_stride, Tile1::kGroup);
  }

  __device__ __forceinline__ void advance(const ForwardParams& params,
                                          const BackwardParams& backward) {
    of0 += kTileN * (kOfKeys ? params.k_stride : params.q_stride).seq;
    of1 += kTileN * (kOfKeys ? params.v_stride : backward.dout_stride).seq;
  }

  __device__ __forceinline__ void load(const ForwardParams& params, const BackwardParams& backward,
                                       unsigned tile0, unsigned tile1) const {
    load_tile<Tile0>(tile0, of0, (kOfKeys ? params.k_stride : params.q_stride).seq);
    load_tile<Tile1>(tile1, of1, (kOfKeys ? params.v_stride : backward.dout_stride).seq);
  }

 private:
  template <class Tile>
  __device__ __forceinline__ static void load_tile(unsigned tile, const T* source,
                                                   long long row_stride) {
    constexpr int kRowsPerPass = kThreads / Tile::kGroup;
    const int thread = ptx::thread_index();
    tile += Tile::at(thread / Tile::kGroup, thread % Tile::kGroup);
#pragma unroll
    for (int pass = 0; pass < kTileN / kRowsPerPass; ++pass) {
#pragma unroll
      for (int group = 0; group < Tile::kGroups; ++group)
        ptx::cp_async_16(tile + Loader<Tile, kTileN>::offset(pass, group),
                         source + group * Tile::kGroup * 8);
      source += kRowsPerPass * row_stride;
    }
  }
};

// lse and delta of a query, as they lie in memory; of none, as of a query that sees no key.
__device__ __forceinline__ float2 load_statistics(const ForwardParams& params,
                                                  const BackwardParams& backward,
                                                  const Block& block, int head, int query) {
  if (query >= block.seq.seqlen_q) return {tile::negative_infinity(), 0.0f};
  const bool ragged = params.cu_seqlens_q != nullptr;
  const long long row =
      ragged ? head : static_cast<long long>(block.seq.index) * params.heads_q + head;
  const long long at = row * params.seqlen_q + block.seq.begin_q + query;
  return {static_cast<const float*>(params.lse)[at], static_cast<const float*>(backward.delta)[at]};
}

// The same with lse as exponential() takes it, +inf where p is to be 0.
__device__ __forceinline__ float2 for_exponential(const float2& statistics) {
  const float lse = statistics.x;
  return {lse == tile::negative_infinity() ? tile::infinity()
          : kGeneral                       ? lse
                                           : lse * tile::kLog2e,
          statistics.y};
}

// p of a score. A bias may be as large as floats are: differences come first, which are exact
// where they count. Products alone are not: lse is in units of log2 then.
__device__ __forceinline__ float exponential(float score, float scale_log2, float lse) {
  return ptx::ex2(kGeneral ? (score - lse) * scale_log2 : fmaf(score, scale_log2, -lse));
}
