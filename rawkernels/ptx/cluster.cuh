// Thread block clusters: rank, barrier, and the shared memory of the other blocks.
#pragma once

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

}  // namespace ptx
