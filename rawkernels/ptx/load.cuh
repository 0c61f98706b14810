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

// Zeros where not `exists`, without a branch.
__device__ __forceinline__ uint4 load_16_if(const void* global, bool exists) {
  uint4 x;
  asm("{\n"
      ".reg .pred exists;\n"
      "setp.ne.u32 exists, %5, 0;\n"
      "mov.u32 %0, 0;\n"
      "mov.u32 %1, 0;\n"
      "mov.u32 %2, 0;\n"
      "mov.u32 %3, 0;\n"
      "@exists ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(global), "r"(static_cast<unsigned>(exists)));
  return x;
}

}  // namespace ptx
