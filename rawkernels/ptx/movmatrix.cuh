// movmatrix: transposes an 8×8 matrix of 16-bit elements across a warp: lane 4g + t gives row g,
// columns 2t and 2t+1, and receives those of the transpose.
#pragma once

namespace ptx {

__device__ __forceinline__ unsigned movmatrix_trans(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace ptx
