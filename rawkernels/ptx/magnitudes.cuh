// Arithmetic on magnitudes, subnormal numbers included.
#pragma once

#include "ptx/math.cuh"

namespace ptx {

// |x|, which fabsf is but for subnormal numbers.
__device__ __forceinline__ float magnitude(float x) {
  return __uint_as_float(__float_as_uint(x) & 0x7fffffff);
}

// The larger of the magnitudes, of any sign, or NaN if either is.
__device__ __forceinline__ float max_magnitude_nan(float a, float b) {
#if __CUDA_ARCH__ >= 860
  float y;
  asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return max_nan(magnitude(a), magnitude(b));
#endif
}

// |a| + |b|, rounded to nearest: the larger magnitude of a + b and of a - b as they are rounded.
__device__ __forceinline__ float add_magnitudes_rn(float a, float b) {
  float y;
  asm("{\n"
      ".reg .f32 x, y;\n"
      "abs.f32 x, %1;\n"
      "abs.f32 y, %2;\n"
      "add.rn.f32 %0, x, y;\n"
      "}"
      : "=f"(y)
      : "f"(a), "f"(b));
  return y;
}

}  // namespace ptx
