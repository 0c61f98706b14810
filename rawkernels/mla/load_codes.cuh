// Finds keys that are codes and copies them to shared memory by cp.async.
#pragma once

#include "mla/copy_codes.cuh"
#include "mla/layout_codes.cuh"

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
    const Place place = keys.next();
    // What is rotated lies behind the panels of codes.
    copy_code_rows<kQuarters, sizeof(stage.codes[0])>(params, mla, place, stage.codes,
                                                      warp * kWarpKeys);
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
