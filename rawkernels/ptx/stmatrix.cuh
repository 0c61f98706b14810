// stmatrix: four 8×8 matrices of 16-bit elements to shared memory. Lanes 8i to 8i+7 give the
// addresses of matrix i's eight rows (16 bytes each, 16-byte aligned); r[i] of lane 4g + t holds
// row g, columns 2t and 2t+1 of it, or with .trans rows 2t and 2t+1 of column g. The inverse of
// ldmatrix.cuh.
#pragma once

namespace ptx {

__device__ __forceinline__ void stmatrix_x4(unsigned address, const unsigned* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(unsigned address, const unsigned* r) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

}  // namespace ptx
