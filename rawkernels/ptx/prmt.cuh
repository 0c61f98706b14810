// prmt: four bytes picked from two words.
#pragma once

namespace ptx {

// Byte i is byte s of (a, b), 0 to 7 from a's lowest on, for the i-th lowest hexadecimal digit s of
// `selector`; for a digit of 8 + s it is the sign of that byte in all eight bits.
__device__ __forceinline__ unsigned prmt(unsigned a, unsigned b, unsigned selector) {
  unsigned bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
  return bytes;
}

}  // namespace ptx
