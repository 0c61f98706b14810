// cvt from float8 to float16, exactly: two e4m3 codes, the first in the low byte.
#pragma once

namespace ptx {

#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ unsigned cvt_e4m3x2(unsigned codes) {
  unsigned pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<unsigned short>(codes)));
  return pair;
}
#endif

}  // namespace ptx
