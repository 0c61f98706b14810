// Zeros in place of a key's values that are not the split's. They may be NaN, and 0 · NaN is NaN.
#pragma once

#include "tile/swizzle.cuh"

namespace mla {

// Every second 16 bytes of a row of 128, in each of kCount panels kPanelBytes apart: the even ones
// or the odd ones. Lanes side by side, with rows side by side, meet in no bank; and where lanes
// 0-15 have the even ones of 16 rows, 16-31 the odd ones, each clears what it has read by ldmatrix.
template <int kCount, int kPanelBytes>
__device__ __forceinline__ void clear_half_row(unsigned char* panels, int row, int odd) {
#pragma unroll 1
  for (int chunk = odd; chunk < 8; chunk += 2) {
    unsigned char* const at = panels + tile::Swizzled<8>::at(row, chunk);
#pragma unroll
    for (int panel = 0; panel < kCount; ++panel)
      *reinterpret_cast<uint4*>(at + panel * kPanelBytes) = {};
  }
}

}  // namespace mla
