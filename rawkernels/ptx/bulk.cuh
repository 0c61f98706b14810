// cp.async.bulk and cp.reduce.async.bulk: asynchronous copies of contiguous bytes between global
// and shared memory, and sums of contiguous floats from shared into global memory. Addresses and
// sizes are multiples of 16 bytes.
#pragma once

#include "ptx/mbarrier.cuh"

namespace ptx {

__device__ __forceinline__ void bulk_load(void* destination, const void* source, int bytes,
                                          Mbarrier& full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(destination)),
      "l"(source), "r"(bytes), "r"(shared_address(&full))
      : "memory");
}

__device__ __forceinline__ void bulk_store(void* destination, const void* source, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(shared_address(source)), "r"(bytes)
               : "memory");
}

// destination[i] += source[i], each sum atomic; the order of several such sums is any.
__device__ __forceinline__ void bulk_reduce_add(float* destination, const float* source,
                                                int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   destination),
               "r"(shared_address(source)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until the groups of this thread but the latest `kPending` have read their sources.
template <int kPending>
__device__ __forceinline__ void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's bulk copies to global memory from here on after what it has acquired.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Waits until all groups of this thread are complete.
__device__ __forceinline__ void bulk_wait_all() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace ptx
