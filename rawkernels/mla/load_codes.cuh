// Finds keys that are codes and copies them to shared memory by cp.async.
#pragma once

#include "mla/layout_codes.cuh"
#include "ptx/cp_async.cuh"

namespace mla {

// Copies tiles of keys, kStep keys from each to the next: each warp 16 keys of a tile, which its
// lanes look up, each key by two of them.
template <int kStep>
struct Loader {
  const DecodeParams& params;
  const MlaParams& mla;
  const int first_tile;  // of a split
  SplitKeys& split_keys;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  KeyLookup<kStep> keys = {params, mla, first_tile * kKeys + warp * kWarpKeys + lane % kWarpKeys,
                           split_keys};
  // Of the tile that has been asked for last: of columns 128 (lane / 16 + 2 i) on.
  StoredScale scales[kQuarters / 2];

  // Asks for the next tile.
  __device__ __forceinline__ void copy(Stage& stage) {
    // Places are in 16 bytes: half the registers of an address.
    constexpr unsigned kNowhere = ~0u;
    const Place place = keys.next();
    const unsigned own_latent = place.has ? place.in_chunks(params.k_stride, 4) : kNowhere;
    const unsigned own_rope = place.in_chunks(mla.rope_stride, 3);
    const int chunk = lane % 8, rope_dim = params.head_dim - params.head_dim_v;
    const unsigned rope_bytes = ptx::shared_address(stage.rope) - ptx::shared_address(stage.codes);
    const unsigned to = ptx::shared_address(stage.codes) + Tile::at(warp * 16 + lane / 8, chunk);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8;
      const unsigned latent = __shfl_sync(~0u, own_latent, row);
      const unsigned rope = __shfl_sync(~0u, own_rope, row);
      const bool has = latent != kNowhere;
      // Rows r and r + 4 differ in where their chunks lie, rows r and r + 8 do not.
      const unsigned its_to = (to ^ i % 2 * 64) + i * 4 * Tile::kRowBytes;
      const uint4* const from = static_cast<const uint4*>(params.k) + (latent + chunk);
#pragma unroll
      for (int quarter = 0; quarter < kQuarters; ++quarter)
        ptx::cp_async_16(its_to + quarter * sizeof(stage.codes[0]), from + quarter * 8,
                         has && quarter * kQuarter + chunk * 16 < params.head_dim_v);
      ptx::cp_async_16(its_to + rope_bytes, static_cast<const uint4*>(mla.rope) + (rope + chunk),
                       has && chunk * 8 < rope_dim);
    }
#pragma unroll
    for (int i = 0; i < kQuarters / 2; ++i)
      scales[i].load(params, place.page, place.slot, lane / 16 + 2 * i, place.has);
    const unsigned exist = __ballot_sync(~0u, place.has) & 0xffff;
    if (lane == 0) stage.exist[warp] = exist;
  }
  // Puts its scales where it is, when they have arrived.
  __device__ __forceinline__ void put_scales(Stage& stage) const {
    float (&own)[kQuarters] = stage.scales[warp * 16 + lane % 16];
#pragma unroll
    for (int i = 0; i < kQuarters / 2; ++i) own[lane / 16 + 2 * i] = scales[i].value(params);
  }
};

}  // namespace mla
