// Steps of a consumer that Hopper's backward kernels of one pass share: gradients/backward_sm90.cu
// and gradients/backward_192_sm90.cu. A consumer is a warpgroup with 64 keys of a tile.
#pragma once

#include "gradients/produce_sm90.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"

// From S^T of the block of queries from `first_query` on to P^T. Rows of `see_all_keys` need no
// mask.
__device__ __forceinline__ void exponentiate(float (&s)[kQueries / 2], const Tile& tile,
                                             const tile::Range& see_all_keys, int first_key,
                                             int first_query, float scale_log2) {
  ptx::wgmma_keep(s);
  if (!see_all_keys.contains(first_query, kQueries)) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    hide(s, tile, first_key + 16 * warp + tile::lane_row(lane),
         first_query + tile::lane_column(lane));
  }
#pragma unroll
  for (int i = 0; i < kQueries / 2; ++i) s[i] = ptx::ex2(s[i] * scale_log2);
}

// Writes dS^T, pairs of 16 bits, into a panel of 64 columns of dS; `lane` is threadIdx.x % 32.
__device__ __forceinline__ void store_transposed(unsigned char* panel,
                                                 const unsigned (&ds)[kQueries / 4], int lane) {
  // Matrices 2i and 2i + 1 are of queries 8i to 8i + 7, and of the warp's first and second 8 keys.
  const int warp = threadIdx.x / 32 % 4;
  const int row = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
  const unsigned address = ptx::shared_address(panel) + row * kRowBytes + (chunk ^ lane % 8) * 16;
#pragma unroll
  for (int i = 0; i < kQueries / 16; ++i)
    ptx::stmatrix_x4_trans(address + i * 16 * kRowBytes, ds + 4 * i);
}

// Writes a part of dq in the order of a warpgroup's accumulators, as the sums have it.
template <int n>
__device__ __forceinline__ void store_part(float* part, const float (&dq)[n]) {
  float4* const out = reinterpret_cast<float4*>(part) + threadIdx.x % 128;
#pragma unroll
  for (int i = 0; i < n / 4; ++i)
    out[128 * i] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
}
