// stmatrix: a warp stores four 8x8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8.
#pragma once

#include "ptx/shared.cuh"

namespace ptx {

__device__ __forceinline__ void stmatrix_x4(unsigned row, const unsigned (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]), "r"(m[1]), "r"(m[2]),
               "r"(m[3])
               : "memory");
}

}  // namespace ptx
