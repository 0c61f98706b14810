// Products of gradients/backward_fused_sm80.cu: 32 rows of a warp, fragments of both operands from
// shared memory.
#pragma once

#include "gradients/block_sm80.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

using TileP = tile::Swizzled<kTileN / 8>;  // P^T and dS^T, keys × queries

// D += A B of 32 rows and kN columns, over kSteps blocks of 16. a(step, m) and b(step, n) read
// fragments: of a block of 16 rows of A, and of 16 columns of B.
template <int kSteps, int kN, class A, class B>
__device__ __forceinline__ void multiply(float (&d)[2][kN / 2], const A& a, const B& b) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    unsigned frag_a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) a(frag_a[m], step, m);
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) {
      unsigned frag_b[4];
      b(frag_b, step, n);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        ptx::mma_m16n8k16<T>(&d[m][8 * n], frag_a[m], frag_b[0], frag_b[1]);
        ptx::mma_m16n8k16<T>(&d[m][8 * n + 4], frag_a[m], frag_b[2], frag_b[3]);
      }
    }
  }
}

// S += A B^T of 32 rows of A and kN rows of B, both of kSteps chunks of 16 features. Addresses are
// those of a lane.
template <class Tile, int kSteps, int kN>
__device__ __forceinline__ void multiply_rows(float (&s)[2][kN / 2], unsigned a, unsigned b) {
  multiply<kSteps, kN>(
      s,
      [&](unsigned (&frag)[4], int step, int m) {
        ptx::ldmatrix_x4(frag, Tile::at_chunks(a, step) + m * 16 * Tile::kRowBytes);
      },
      [&](unsigned (&frag)[4], int step, int n) {
        ptx::ldmatrix_x4(frag, Tile::at_chunks(b, step) + n * 16 * Tile::kRowBytes);
      });
}

// S += K Q^T and dP += V dout^T, step by step in turns: with few columns each has few chains of
// sums, which a warp alone would wait for.
template <class Tile, int kSteps, int kN>
__device__ __forceinline__ void multiply_rows_in_turns(float (&s)[2][kN / 2],
                                                       float (&dp)[2][kN / 2], unsigned k,
                                                       unsigned q, unsigned v, unsigned dout) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const unsigned a = which == 0 ? k : v, b = which == 0 ? q : dout;
      multiply<1, kN>(
          which == 0 ? s : dp,
          [&](unsigned (&frag)[4], int, int m) {
            ptx::ldmatrix_x4(frag, Tile::at_chunks(a, step) + m * 16 * Tile::kRowBytes);
          },
          [&](unsigned (&frag)[4], int, int n) {
            ptx::ldmatrix_x4(frag, Tile::at_chunks(b, step) + n * 16 * Tile::kRowBytes);
          });
    }
  }
}

// O += P B of 32 rows of P^T's group and all queries; `chunk`: of B's first 16 features.
template <class Tile, int kN>
__device__ __forceinline__ void multiply_columns(float (&o)[2][kN / 2], unsigned p, unsigned b,
                                                 int chunk) {
  multiply<kTileN / 16, kN>(
      o,
      [&](unsigned (&frag)[4], int step, int m) {
        ptx::ldmatrix_x4(frag, TileP::at_chunks(p, step) + m * 16 * TileP::kRowBytes);
      },
      [&](unsigned (&frag)[4], int step, int n) {
        ptx::ldmatrix_x4_trans(frag, Tile::at_chunks(b, chunk + n) + step * 16 * Tile::kRowBytes);
      });
}
