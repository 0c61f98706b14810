// Arithmetic on magnitudes, subnormal numbers included.
#pragma once

namespace ptx {

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
