// mbarrier: a barrier in shared memory that counts arrivals and, for TMA, bytes. A wait
// names the parity of the phase it waits for: 0 for the first completion, 1 for the second, and so
// on in turn.
#pragma once

#include "ptx/shared.cuh"

namespace ptx {

using Mbarrier = unsigned long long;

__device__ __forceinline__ void mbarrier_init(Mbarrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals));
}

// Makes the initialisation visible to TMA. Followed by a barrier of the whole block.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

// Arrives when all of the thread's copies by cp.async until now are done.
__device__ __forceinline__ void mbarrier_arrive_after_copies(Mbarrier& barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier))
      : "memory");
}

// Arrives and announces `bytes` that TMA copies before the phase can complete.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier& barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}

// Announces them without arriving; they may have come already.
__device__ __forceinline__ void mbarrier_expect_tx(Mbarrier& barrier, int bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(Mbarrier& barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return done;
}

__device__ __forceinline__ void mbarrier_wait(Mbarrier& barrier, unsigned parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// The same for what other blocks of the cluster have stored.
__device__ __forceinline__ void mbarrier_wait_cluster(Mbarrier& barrier, unsigned parity) {
  unsigned done = 0;
  while (!done) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
  }
}

}  // namespace ptx
