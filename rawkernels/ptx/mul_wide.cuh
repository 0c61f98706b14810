// mul.wide: the 64-bit product of two words, one instruction for both halves.
#pragma once

namespace ptx {

// {upper half, lower half}
__device__ __forceinline__ uint2 mul_wide(unsigned a, unsigned b) {
  unsigned high, low;
  asm("{\n"
      ".reg .b64 product;\n"
      "mul.wide.u32 product, %2, %3;\n"
      "mov.b64 {%1, %0}, product;\n"
      "}"
      : "=r"(high), "=r"(low)
      : "r"(a), "r"(b));
  return {high, low};
}

}  // namespace ptx
