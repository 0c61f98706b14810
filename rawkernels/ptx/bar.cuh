// bar: the block's 16 named barriers. A barrier completes when `threads` threads have arrived or
// synchronised on it.
#pragma once

namespace ptx {

__device__ __forceinline__ void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Synchronises, and tells whether `predicate` is true for any of the threads.
__device__ __forceinline__ bool bar_sync_or(int barrier, int threads, bool predicate) {
  unsigned any;
  asm volatile(
      "{\n"
      ".reg .pred own, any;\n"
      "setp.ne.u32 own, %3, 0;\n"
      "bar.red.or.pred any, %1, %2, own;\n"
      "selp.u32 %0, 1, 0, any;\n"
      "}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(static_cast<unsigned>(predicate))
      : "memory");
  return any;
}

}  // namespace ptx
