// ld.relaxed and st.relaxed of 16 bytes at once, past L1: whoever reads sees all of one write or
// nothing of it, on the whole device.
#pragma once

namespace ptx {

struct alignas(16) B128 {
  unsigned long long low, high;
};

__device__ __forceinline__ B128 load_relaxed(const B128* address) {
  B128 value;
  asm volatile(
      "{\n"
      ".reg .b128 whole;\n"
      "ld.relaxed.gpu.global.b128 whole, [%2];\n"
      "mov.b128 {%0, %1}, whole;\n"
      "}"
      : "=l"(value.low), "=l"(value.high)
      : "l"(address)
      : "memory");
  return value;
}

// The same as an acquire: what was written before a release is seen after it.
__device__ __forceinline__ B128 load_acquire(const B128* address) {
  B128 value;
  asm volatile(
      "{\n"
      ".reg .b128 whole;\n"
      "ld.acquire.gpu.global.b128 whole, [%2];\n"
      "mov.b128 {%0, %1}, whole;\n"
      "}"
      : "=l"(value.low), "=l"(value.high)
      : "l"(address)
      : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed(B128* address, B128 value) {
  asm volatile(
      "{\n"
      ".reg .b128 whole;\n"
      "mov.b128 whole, {%1, %2};\n"
      "st.relaxed.gpu.global.b128 [%0], whole;\n"
      "}" ::"l"(address),
      "l"(value.low), "l"(value.high)
      : "memory");
}

}  // namespace ptx
