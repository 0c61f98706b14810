// createpolicy: which lines L2 is to give up first, for accesses that are told so.
#pragma once

namespace ptx {

__device__ __forceinline__ unsigned long long createpolicy_evict_first() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ unsigned long long createpolicy_evict_normal() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace ptx
