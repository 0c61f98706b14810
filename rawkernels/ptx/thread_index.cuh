// threadIdx.x, read anew at every call: what is computed from it is not kept in registers from one call to the next.
#pragma once

namespace ptx {

__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace ptx
