// cp.async: 16 bytes from global to shared memory without registers, past L1. The copies a thread
// issued since its last commit form a group; what they wrote is seen by the thread after
// cp_async_wait, and by the block after a barrier too.
#pragma once

namespace ptx {

__device__ __forceinline__ void cp_async_16(unsigned shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global)
               : "memory");
}

// Copies 16 bytes, or writes 16 zeros without reading. (A byte count in a register, the other form,
// costs six instructions.)
__device__ __forceinline__ void cp_async_16(unsigned shared, const void* global, bool copy) {
  asm volatile(
      "{\n"
      ".reg .pred zero;\n"
      "setp.eq.u32 zero, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, zero;\n"
      "}" ::"r"(shared),
      "l"(global), "r"(static_cast<unsigned>(copy))
      : "memory");
}

// The same, with a policy (createpolicy.cuh) for what L2 keeps of it; L2 reads the whole line of
// 128 bytes, or what is asked for.
template <bool kWholeLine = true>
__device__ __forceinline__ void cp_async_16(unsigned shared, const void* global, bool copy,
                                            unsigned long long policy) {
  if constexpr (kWholeLine)
    asm volatile(
        "{\n"
        ".reg .pred zero;\n"
        "setp.eq.u32 zero, %2, 0;\n"
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, zero, %3;\n"
        "}" ::"r"(shared),
        "l"(global), "r"(static_cast<unsigned>(copy)), "l"(policy)
        : "memory");
  else
    asm volatile(
        "{\n"
        ".reg .pred zero;\n"
        "setp.eq.u32 zero, %2, 0;\n"
        "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, zero, %3;\n"
        "}" ::"r"(shared),
        "l"(global), "r"(static_cast<unsigned>(copy)), "l"(policy)
        : "memory");
}

// Copies 4 bytes.
__device__ __forceinline__ void cp_async_4(unsigned shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

// Copies 4 bytes, or writes 4 zeros without reading.
__device__ __forceinline__ void cp_async_4(unsigned shared, const void* global, bool copy) {
  asm volatile(
      "{\n"
      ".reg .pred zero;\n"
      "setp.eq.u32 zero, %2, 0;\n"
      "cp.async.ca.shared.global [%0], [%1], 4, zero;\n"
      "}" ::"r"(shared),
      "l"(global), "r"(static_cast<unsigned>(copy))
      : "memory");
}

// Copies `bytes` bytes, 1 to 4, to 4: the others become zeros. What follows them is not read.
__device__ __forceinline__ void cp_async_4_of(unsigned shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all copies of the thread.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Waits until at most `kPending` of the thread's newest groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace ptx
