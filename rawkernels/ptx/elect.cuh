// elect.sync: one lane of a warp.
#pragma once

namespace ptx {

// True in one lane of a converged warp. The compiler knows that it is one: an instruction of the
// uniform datapath, such as a TMA copy, then needs no loop over lanes.
__device__ __forceinline__ bool elect_one() {
  unsigned elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(elected));
  return elected;
}

}  // namespace ptx
