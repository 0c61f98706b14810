// Thread block clusters: rank, barrier, and the shared memory of the other blocks.
#pragma once

#include "ptx/shared.cuh"

namespace ptx {

__device__ __forceinline__ int cluster_ctarank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The two halves of a barrier: work between them need not wait.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Without what was written before being seen, and without the fence of all memory that this takes.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// All threads of the cluster wait for each other and see what was written before.
__device__ __forceinline__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}

// Where a variable in shared memory is in the block of another rank; read and written like any
// pointer.
template <class T>
__device__ __forceinline__ T* mapa(T* pointer, int rank) {
  T* mapped;
  asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(pointer), "r"(rank));
  return mapped;
}

// Sends 8 bytes to where `target` is in the block of another rank, and counts them there off what
// `barrier` (mbarrier.cuh) waits for: no one else has to be waited for.
template <class T>
__device__ __forceinline__ void store_async(T& target, float a, float b,
                                            unsigned long long& barrier, int rank) {
  static_assert(sizeof(T) == 8, "8 bytes");
  asm volatile(
      "{\n"
      ".reg .b32 target, barrier;\n"
      "mapa.shared::cluster.u32 target, %0, %4;\n"
      "mapa.shared::cluster.u32 barrier, %3, %4;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [target], {%1, %2}, "
      "[barrier];\n"
      "}" ::"r"(shared_address(&target)),
      "f"(a), "f"(b), "r"(shared_address(&barrier)), "r"(rank)
      : "memory");
}

// The same with 16 bytes, as one message: what receives them counts messages, 8 bytes or 16.
template <class T>
__device__ __forceinline__ void store_async(T& target, const float (&x)[4],
                                            unsigned long long& barrier, int rank) {
  static_assert(sizeof(T) == 16, "16 bytes");
  asm volatile(
      "{\n"
      ".reg .b32 target, barrier;\n"
      "mapa.shared::cluster.u32 target, %0, %6;\n"
      "mapa.shared::cluster.u32 barrier, %5, %6;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [target], {%1, %2, %3, %4}, "
      "[barrier];\n"
      "}" ::"r"(shared_address(&target)),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(shared_address(&barrier)), "r"(rank)
      : "memory");
}

}  // namespace ptx
