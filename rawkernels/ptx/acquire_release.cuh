// ld.acquire and st.release: what was written before a release is seen after an acquire that reads
// it, on the whole device.
#pragma once

namespace ptx {

__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* address) {
  unsigned long long value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ unsigned load_acquire(const unsigned* address) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Seen by others, with nothing before it.
__device__ __forceinline__ void store_relaxed(unsigned* address, unsigned value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed(unsigned long long* address,
                                              unsigned long long value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ unsigned long long load_relaxed(const unsigned long long* address) {
  unsigned long long value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(unsigned* address, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_release(unsigned long long* address,
                                              unsigned long long value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Both for what follows and what came before, of this thread and of those that a barrier has put
// before it.
__device__ __forceinline__ void fence_acquire_release() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

}  // namespace ptx
