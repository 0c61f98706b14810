// Descriptors of operands of wgmma in shared memory, as the kernels of latent attention make them:
// from a base that is the same for all lanes. From bases that the compiler finds in vector
// registers they would be computed in each lane and moved for each product, and kernels spill.
#pragma once

#include "ptx/shared.cuh"

namespace mla {

// Of rows of 128 bytes in TMA's swizzle: its number, and groups of eight rows 1024 bytes apart.
constexpr unsigned long long kSwizzledRows = 1ull << 62 | 1024ull >> 4 << 32;

// Where an operand lies, over 16, in a register that ptxas knows to be the same in all lanes.
__device__ __forceinline__ unsigned reduced_base(const void* operand) {
  return __reduce_or_sync(~0u, ptx::shared_address(operand) >> 4);
}

// The descriptor of what lies `bytes` after a base, a shared address over 16; `leading` bytes lie
// between panels of 64 columns of an operand whose columns lie side by side.
__device__ __forceinline__ unsigned long long descriptor(unsigned base, int bytes,
                                                         int leading = 0) {
  return kSwizzledRows | (base + static_cast<unsigned>(bytes >> 4) + (leading >> 4 << 16));
}

}  // namespace mla
