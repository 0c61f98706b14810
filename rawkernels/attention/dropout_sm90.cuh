// Dropout of attention/forward_sm90.cu: which of a consumer's probabilities are kept. Computed
// between its products, which are 16 to 64 cycles each, and applied to P as pairs of 16 bits.
#pragma once

#include "attention/layout_sm90.cuh"
#include "ptx/registers.cuh"
#include "tile/fragment.cuh"

// Whether masks are computed when P is there: where registers do not suffice before.
constexpr bool kMasksLate = kWarpgroups == 3 || kHeadDimV == 256;

// Of a lane's P in a block of keys; 16 or 32 keys each.
constexpr int kKeptSteps = kTileN / (kTileN % 32 == 0 ? 32 : 16);
template <int>
struct KeptSignsOf {
  using Type = uint2;
};
template <>
struct KeptSignsOf<32> {
  using Type = uint4;
};
using KeptSigns = KeptSignsOf<kTileN / kKeptSteps>::Type;

// Has the compiler compute a mask here, and not where it is used.
__device__ __forceinline__ uint2 computed_here(uint2 signs) {
  return {ptx::opaque(signs.x), ptx::opaque(signs.y)};
}
__device__ __forceinline__ uint4 computed_here(uint4 signs) {
  return {ptx::opaque(signs.x), ptx::opaque(signs.y), ptx::opaque(signs.z), ptx::opaque(signs.w)};
}

// Of a warp's rows and a block of keys.
template <class Signs>
__device__ __forceinline__ void compute_kept(Signs (&kept)[kKeptSteps],
                                             const tile::DropoutRow& of_row,
                                             const DropoutParams& dropout, int block) {
  if constexpr (sizeof(Signs) == sizeof(uint4)) {
    of_row.kept_signs(kept, dropout, block * kKeptSteps);
  } else {
    // Half of a counter's bits are the next block's or were the last one's.
    const int first = block * kKeptSteps / 2;
    const bool odd = block * kKeptSteps % 2 != 0;
    uint4 signs[kKeptSteps / 2 + 1];
    of_row.kept_signs(signs, dropout, first);
#pragma unroll
    for (int step = 0; step < kKeptSteps; ++step) {
      const uint4 of_even = signs[step / 2], of_odd = signs[(step + 1) / 2];
      const uint2 even = step % 2 == 0 ? uint2{of_even.x, of_even.y} : uint2{of_even.z, of_even.w};
      const uint2 next = step % 2 == 0 ? uint2{of_odd.z, of_odd.w} : uint2{of_odd.x, of_odd.y};
      kept[step] = odd ? next : even;
    }
  }
#pragma unroll
  for (Signs& signs : kept) signs = computed_here(signs);
}

// Clears what is dropped in P; the sums of exponentials have it.
__device__ __forceinline__ void clear_dropped(unsigned (&p)[kTileN / 4],
                                              const KeptSigns (&kept)[kKeptSteps]) {
  if constexpr (Config::dropout) {
#pragma unroll
    for (int step = 0; step < kKeptSteps; ++step)
      tile::clear_dropped(p + kTileN / 4 / kKeptSteps * step, kept[step]);
  }
}
