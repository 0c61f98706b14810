// The products of Hopper's backward kernels whose thread blocks have keys: of 64 rows of keys or
// values, a consumer's, with blocks of queries or dout in shared memory.
#pragma once

#include "gradients/layout_sm90.cuh"
#include "ptx/wgmma.cuh"

// X (64 × kQueries) += A B^T for the kColumns columns of A, this consumer's 64 rows of keys or
// values, and B, a block of queries or dout: issued, not waited for.
template <int kColumns = kDim>
__device__ __forceinline__ void multiply_rows(float (&x)[kQueries / 2], const unsigned char* keys,
                                              const unsigned char* queries) {
  const unsigned long long a = ptx::wgmma_descriptor(keys, 0, 1024);
  const unsigned long long b = ptx::wgmma_descriptor(queries, 0, 1024);
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step)
    ptx::Wgmma<kQueries, T>::template shared_shared<false, false>(
        x, ptx::wgmma_advance(a, step / 4 * kPanelBytesK + step % 4 * 32),
        ptx::wgmma_advance(b, step / 4 * kPanelBytesQ + step % 4 * 32), true);
  ptx::wgmma_commit_group();
}

// X (64 × 2 kHalf) += P B for P (64 × kQueries) in registers and a block of queries or dout.
template <int kHalf>
__device__ __forceinline__ void multiply_columns(float (&x)[kHalf],
                                                 const unsigned (&p)[kQueries / 4],
                                                 const unsigned char* queries) {
  const unsigned long long b = ptx::wgmma_descriptor(queries, kPanelBytesQ, 1024);
#pragma unroll
  for (int step = 0; step < kQueries / 16; ++step)
    ptx::Wgmma<2 * kHalf, T>::template register_shared<true>(
        x, p + 4 * step, ptx::wgmma_advance(b, step * 16 * kRowBytes), true);
  ptx::wgmma_commit_group();
}
