// cp.async.bulk.tensor: TMA copies boxes of a tensor from global to shared
// memory. Coordinates are in elements, innermost first, and may be out of range: loads fill with
// zeros, stores write nothing there.
#pragma once

#include "ptx/mbarrier.cuh"

namespace ptx {

// What cuTensorMapEncodeTiled fills; a `const __grid_constant__` kernel parameter.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// How long L2 should keep what a copy touches; the encodings that CUTLASS calls TMA::CacheHintSm90.
constexpr unsigned long long kEvictNormal = 0x1000000000000000;
constexpr unsigned long long kEvictFirst = 0x12F0000000000000;
constexpr unsigned long long kEvictLast = 0x14F0000000000000;

__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void tma_load(void* destination, const TensorMap& map, Mbarrier& full,
                                         int c0, int c1, int c2, int c3,
                                         unsigned long long cache_hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(destination)),
      "l"(&map), "r"(shared_address(&full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(cache_hint)
      : "memory");
}

__device__ __forceinline__ void tma_load(void* destination, const TensorMap& map, Mbarrier& full,
                                         int c0, int c1, int c2, int c3, int c4,
                                         unsigned long long cache_hint) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(destination)),
      "l"(&map), "r"(shared_address(&full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4),
      "l"(cache_hint)
      : "memory");
}

// Makes this thread's ordinary writes to shared memory visible to TMA and to wgmma.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace ptx
