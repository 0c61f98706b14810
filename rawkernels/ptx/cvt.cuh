// Two floats to floats of 8 bits, rounded to even, those out of range to the largest: the first in
// the lower byte.
#pragma once

namespace ptx {

#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ unsigned cvt_e4m3x2(float low, float high) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

__device__ __forceinline__ unsigned cvt_e5m2x2(float low, float high) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
#endif

}  // namespace ptx
