// Telling the compiler what to keep in registers and what not, where it would spill or recompute at
// the wrong place.
#pragma once

namespace ptx {

// threadIdx.x, read anew at every call: nothing computed from it is kept from one call to the next.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Makes x a value of unknown origin: outside of a loop it is kept and not computed again, inside of
// one nothing computed from it is kept.
__device__ __forceinline__ unsigned opaque(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The same for what is one value for a whole block, inside of a loop: from Hopper on such values
// and what is computed from them stay in uniform registers, if they are left alone.
__device__ __forceinline__ long long opaque_uniform(long long x) {
#if __CUDA_ARCH__ < 900
  asm volatile("" : "+l"(x));
#endif
  return x;
}

}  // namespace ptx
