// Arithmetic as IEEE 754 has it, rounded to nearest, subnormal numbers included: CuPy compiles with
// -ftz=true, by which the operators and intrinsics of CUDA take these for 0.
#pragma once

namespace ptx {

__device__ __forceinline__ float add_rn(float a, float b) {
  float y;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ __forceinline__ float sub_rn(float a, float b) {
  float y;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ __forceinline__ float mul_rn(float a, float b) {
  float y;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ __forceinline__ float fma_rn(float a, float b, float c) {
  float y;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
}

__device__ __forceinline__ float cvt_rn(double x) {
  float y;
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
  return y;
}

}  // namespace ptx
