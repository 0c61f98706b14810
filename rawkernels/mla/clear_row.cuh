// Zeros in place of a key's values that are not the split's. They may be NaN, and 0 · NaN is NaN.
#pragma once

#include "tile/swizzle.cuh"

namespace mla {

// Half of a row of 128 bytes, in each of kCount panels kPanelBytes apart. Lanes side by side, with
// rows side by side, meet in no bank.
template <int kCount, int kPanelBytes>
__device__ __forceinline__ void clear_half_row(unsigned char* panels, int row, int half) {
#pragma unroll 1
  for (int chunk = 0; chunk < 4; ++chunk) {
    unsigned char* const at = panels + tile::Swizzled<8>::at(row, half * 4 + chunk);
#pragma unroll
    for (int panel = 0; panel < kCount; ++panel)
      *reinterpret_cast<uint4*>(at + panel * kPanelBytes) = {};
  }
}

}  // namespace mla
