// prefetch: asks for a line of memory without waiting for it.
#pragma once

namespace ptx {

__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

}  // namespace ptx
