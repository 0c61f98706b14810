// prefetch: asks for a line of memory without waiting for it.
#pragma once

namespace ptx {

// Brings a line to L1: a load of 4 bytes that nobody waits for.
__device__ __forceinline__ void touch(const void* global) {
  unsigned unused;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(unused) : "l"(global));
}

__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// The same of some memory: `bytes`, a multiple of 16, from a multiple of 16 on.
__device__ __forceinline__ void prefetch_bulk_l2(const void* global, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
}

}  // namespace ptx
