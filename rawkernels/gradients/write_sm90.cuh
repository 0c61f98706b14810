// Writing a gradient from accumulators of a warpgroup, for gradients/backward_sm90.cu and
// around_sm90.cu.
#pragma once

#include "ptx/shared.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/fragment.cuh"
#include "tile/softmax.cuh"

// 0, or NaN where a value is not finite.
template <int n>
__device__ __forceinline__ float zeros_of(const float (&x)[n]) {
  float zeros = 0.0f;
#pragma unroll
  for (int i = 0; i < n; ++i) zeros = fmaf(x[i], 0.0f, zeros);
  return zeros;
}

// Puts 64 rows and kColumns columns, scaled, into shared memory as TMA takes them: panels of 64
// columns, 128 bytes a row. Returns zeros_of(x).
template <class T, int kColumns>
__device__ __forceinline__ float stage_gradient(const float (&x)[kColumns / 2], float scale,
                                                void* place) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const unsigned address = ptx::shared_address(place) + (16 * warp + lane % 16) * 128;
#pragma unroll
  for (int i = 0; i < kColumns / 16; ++i) {
    unsigned of[4];  // columns 16i to 16i + 7 of the warp's first and second 8 rows, and the next 8
#pragma unroll
    for (int j = 0; j < 4; ++j)
      of[j] = tile::pack<T>(x[8 * i + 2 * j] * scale, x[8 * i + 2 * j + 1] * scale);
    const int chunk = i % 4 * 2 + lane / 16;
    ptx::stmatrix_x4(address + i / 4 * 64 * 128 + (chunk ^ lane % 8) * 16, of);
  }
  return zeros_of(x);
}

// Writes 64 rows and kColumns columns, scaled: this lane's two rows are at out and 8 rows on, of
// which `rows` exist from this lane's first. The four lanes of a row exchange words, so that each
// writes eight columns side by side. Returns zeros_of(x).
template <class T, int kColumns>
__device__ __forceinline__ float write_gradient(const float (&x)[kColumns / 2], float scale, T* out,
                                                long long row_stride, int rows, int columns) {
  static_assert(kColumns % 32 == 0, "four lanes write 32 columns");
  const int lane = threadIdx.x % 32;
  const bool odd = lane % 2, high = lane / 2 % 2;
  const int first = lane % 4 * 8;
  out += first;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int step = 0; step < kColumns / 32; ++step) {
      unsigned of[4];  // of columns 8 g + 2 (lane % 4) and the next
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const int i = 16 * step + 4 * g + 2 * r;
        of[g] = tile::pack<T>(x[i] * scale, x[i + 1] * scale);
      }
      // Of lanes 2i and 2i + 1, the former keeps groups 0 and 2, the latter 1 and 3.
      const unsigned other0 = __shfl_xor_sync(~0u, odd ? of[0] : of[1], 1);
      const unsigned other2 = __shfl_xor_sync(~0u, odd ? of[2] : of[3], 1);
      const uint2 two0 = odd ? make_uint2(other0, of[1]) : make_uint2(of[0], other0);
      const uint2 two2 = odd ? make_uint2(other2, of[3]) : make_uint2(of[2], other2);
      // Of lanes i and i + 2, the former keeps groups 0 and 1, the latter 2 and 3.
      const unsigned other_x = __shfl_xor_sync(~0u, high ? two0.x : two2.x, 2);
      const unsigned other_y = __shfl_xor_sync(~0u, high ? two0.y : two2.y, 2);
      if (8 * r < rows && 32 * step + first < columns)
        *reinterpret_cast<uint4*>(out + 32 * step) =
            high ? make_uint4(other_x, other_y, two2.x, two2.y)
                 : make_uint4(two0.x, two0.y, other_x, other_y);
    }
    out += 8 * row_stride;
  }
  return zeros_of(x);
}
