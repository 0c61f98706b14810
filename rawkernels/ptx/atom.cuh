// atom.exch: puts a word in global memory and gets what was there. What was written before, by this
// thread and those that a barrier has put before it, is seen after an exchange that gets the word.
#pragma once

namespace ptx {

__device__ __forceinline__ unsigned long long atom_exch(unsigned long long* address,
                                                        unsigned long long value) {
  unsigned long long old;
  asm volatile("atom.acq_rel.gpu.global.exch.b64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(address), "l"(value)
               : "memory");
  return old;
}

}  // namespace ptx
