// red: adds to floats in global memory, in any order, without waiting for what was there.
#pragma once

namespace ptx {

// Two neighbours, at a multiple of 8 bytes.
__device__ __forceinline__ void red_add(float* to, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
#else
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + 1), "f"(y) : "memory");
#endif
}

}  // namespace ptx
