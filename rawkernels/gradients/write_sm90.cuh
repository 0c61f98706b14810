// Writing a gradient from accumulators of a warpgroup, for gradients/backward_sm90.cu and
// around_sm90.cu.
#pragma once

#include "tile/fragment.cuh"
#include "tile/softmax.cuh"

// Writes 64 rows and kColumns columns, scaled: this lane's two rows are at out and 8 rows on, of
// which `rows` exist from this lane's first. Lanes 2i and 2i + 1 exchange halves, so that each
// writes four columns side by side and a row's writes fill whole 32-byte sectors. Returns 0, or NaN
// where a value is not finite.
template <class T, int kColumns>
__device__ __forceinline__ float write_gradient(const float (&x)[kColumns / 2], float scale, T* out,
                                                long long row_stride, int rows, int columns) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane % 2;
  float zeros = 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) zeros = fmaf(x[i], 0.0f, zeros);
  out += tile::lane_column(lane) + (odd ? 6 : 0);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
      const int i = 8 * step + 2 * r;
      const unsigned low = tile::pack<T>(x[i] * scale, x[i + 1] * scale);
      const unsigned high = tile::pack<T>(x[i + 4] * scale, x[i + 5] * scale);
      const unsigned other = __shfl_xor_sync(~0u, odd ? low : high, 1);
      if (8 * r < rows && 16 * step + (odd ? 8 : 0) < columns)
        *reinterpret_cast<uint2*>(out + 16 * step) =
            odd ? make_uint2(other, high) : make_uint2(low, other);
    }
    out += 8 * row_stride;
  }
  return zeros;
}
