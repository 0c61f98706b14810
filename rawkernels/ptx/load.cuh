// Loads of 16 bytes that nothing writes during the launch.
#pragma once

namespace ptx {

__device__ __forceinline__ uint4 load_16(const void* global) {
  uint4 x;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(global));
  return x;
}

}  // namespace ptx
