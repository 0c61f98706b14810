// prefetch: asks for a line of memory without waiting for it.
#pragma once

namespace ptx {

__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// The same of some memory: `bytes`, a multiple of 16, from a multiple of 16 on.
__device__ __forceinline__ void prefetch_bulk_l2(const void* global, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
}

}  // namespace ptx
