// dq of the queries that a thread block of gradients/backward_sm80.cu is at, from its keys: dS K,
// added to sums in global memory.
#pragma once

#include "gradients/block_sm80.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/red.cuh"
#include "tile/fragment.cuh"

using Weights = unsigned[kBlocks][kTileN / 4];  // of a warp's rows and all columns, in pairs

constexpr int kDqRowBlocks = kTileN / 16;  // of queries, each of which some warps share
constexpr int kDqWarps = kThreads / 32 / kDqRowBlocks;
constexpr int kDqColumns = kDim / (kDqWarps > 0 ? kDqWarps : 1);                      // of a warp
constexpr int kDqChunk = kDqColumns % 64 == 0 ? 64 : kDqColumns % 32 == 0 ? 32 : 48;  // at a time
using TileDs = tile::Swizzled<kTileN / 8>;
static_assert(!kAddsDq || (kThreads / 32 % kDqRowBlocks == 0 && kDqColumns % kDqChunk == 0),
              "a warp has whole blocks of 16 queries");

// All warps together. ds: dS^T of this warp's keys. keys: the address in shared memory of all keys
// of the block. ds_tile: room for all of dS^T, which nobody reads any more.
__device__ __forceinline__ void add_dq(const ForwardParams& params, const BackwardParams& backward,
                                       const Block& block, const Weights& ds, unsigned keys,
                                       unsigned char* ds_tile, const Columns& columns,
                                       float scale) {
  const int lane = ptx::thread_index() % 32, warp = ptx::thread_index() / 32;
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
    for (int i = 0; i < kTileN / 4; ++i) {
      const int row = warp * kRows + 16 * m + lane / 4 + i % 2 * 8;
      *reinterpret_cast<unsigned*>(ds_tile + TileDs::at(row, i / 2) + lane % 4 * 4) = ds[m][i];
    }
  }
  __syncthreads();

  const int row_block = warp % kDqRowBlocks, part = warp / kDqRowBlocks;
  const int query = columns.first + 16 * row_block + tile::lane_row(lane);
  const long long index = params.cu_seqlens_q != nullptr ? 0 : block.seq.index;
  const long long row = index * params.seqlen_q + block.seq.begin_q + query;
  const long long row_stride = static_cast<long long>(params.heads_q) * params.head_dim;
  float* const sums = backward.dq_sums + row * row_stride + columns.head * params.head_dim +
                      tile::lane_column(lane);
  const unsigned a =
      TileDs::at_chunks(ptx::shared_address(ds_tile) + TileDs::lane_column_major(), row_block);
  const unsigned b = keys + Tile0::lane_row_major();
#pragma unroll 1
  for (int first = part * kDqColumns; first < (part + 1) * kDqColumns; first += kDqChunk) {
    float x[kDqChunk / 2] = {};
#pragma unroll
    for (int step = 0; step < kTileM / 16; ++step) {
      unsigned frag_a[4];
      ptx::ldmatrix_x4_trans(frag_a, a + step * 16 * TileDs::kRowBytes);
#pragma unroll
      for (int n = 0; n < kDqChunk / 16; ++n) {
        unsigned frag_b[4];
        ptx::ldmatrix_x4_trans(frag_b,
                               Tile0::at_chunks(b, first / 16 + n) + step * 16 * Tile0::kRowBytes);
        ptx::mma_m16n8k16<T>(&x[8 * n], frag_a, frag_b[0], frag_b[1]);
        ptx::mma_m16n8k16<T>(&x[8 * n + 4], frag_a, frag_b[2], frag_b[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < kDqChunk / 2; i += 2) {
      const int column = first + i / 4 * 8, down = tile::fragment_row(i);
      if (query + down < block.seq.seqlen_q && column < params.head_dim)
        ptx::red_add(sums + down * row_stride + column, x[i] * scale, x[i + 1] * scale);
    }
  }
}
