// Copies rows of codes, and what is rotated of them, to shared memory by cp.async.
#pragma once

#include "mla/codes.cuh"
#include "mla/lookup.cuh"
#include "ptx/cp_async.cuh"
#include "tile/swizzle.cuh"

namespace mla {

// By a warp, of 16 keys, of which lanes l and l + 16 know the place; zeros for keys and columns
// that do not exist. A key has a row of 128 bytes in each of kPanels panels of codes, and one in a
// panel behind them; the first of these has row `first_row`.
template <int kPanels, int kPanelBytes>
__device__ __forceinline__ void copy_code_rows(const DecodeParams& params, const MlaParams& mla,
                                               const Place& place, const void* panels,
                                               int first_row) {
  // Places are in 16 bytes: half the registers of an address.
  constexpr unsigned kNowhere = ~0u;
  const unsigned own_latent = place.has ? place.in_chunks(params.k_stride, 4) : kNowhere;
  const unsigned own_rope = place.in_chunks(mla.rope_stride, 3);
  const int lane = threadIdx.x % 32, chunk = lane % 8;
  const int rope_dim = params.head_dim - params.head_dim_v;
  using Panel = tile::Swizzled<8>;
  const unsigned to = ptx::shared_address(panels) + Panel::at(first_row + lane / 8, chunk);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 4 + lane / 8;
    const unsigned latent = __shfl_sync(~0u, own_latent, row);
    const unsigned rope = __shfl_sync(~0u, own_rope, row);
    const bool has = latent != kNowhere;
    // Rows r and r + 4 differ in where their chunks lie, rows r and r + 8 do not.
    const unsigned its_to = (to ^ i % 2 * 64) + i * 4 * Panel::kRowBytes;
    const uint4* const from = static_cast<const uint4*>(params.k) + (latent + chunk);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      ptx::cp_async_16(its_to + panel * kPanelBytes, from + panel * 8,
                       has && panel * 128 + chunk * 16 < params.head_dim_v);
    ptx::cp_async_16(its_to + kPanels * kPanelBytes,
                     static_cast<const uint4*>(mla.rope) + (rope + chunk),
                     has && chunk * 8 < rope_dim);
  }
}

}  // namespace mla
