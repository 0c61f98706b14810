// Finds keys that are codes and copies them to shared memory by cp.async: the loading warps of
// mla/decode_codes_sm90.cu.
#pragma once

#include "mla/layout_codes_sm90.cuh"
#include "ptx/cp_async.cuh"

namespace mla {

// Of a block each warp has 16 keys, which its lanes look up, each key by two of them.
struct Loader {
  Smem& smem;
  const DecodeParams& params;
  const MlaParams& mla;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  KeyLookup<kKeys> keys = {params, mla, warp * kWarpKeys + lane % kWarpKeys,
                           smem.loaded[warp].keys};

  __device__ __forceinline__ void run() {
    LoadedSplit& own = smem.loaded[warp];
    tile::PipelineState<kStages> at, last = {kStages - 1, 1};
    while (true) {
      __syncwarp();
      if (lane == 0) own.exists = own.schedule.next(params, own.split);
      __syncwarp();
      if (!own.exists) return;
      const int blocks = count_blocks(own.split);
      keys.start(own.split);
#pragma unroll 1
      for (int block = 0; block < blocks; ++block, at.advance()) {
        Stage& stage = smem.ring[at.index];
        ptx::mbarrier_wait(smem.empty[at.index][warp / 2], at.parity ^ 1);
        copy(stage);
        ptx::mbarrier_arrive_after_copies(smem.full[at.index]);
        // Blocks become full in their order, which copies need not end in: a warpgroup that has had
        // the block kWarpgroups before waits for this one by a parity, and the one before in this
        // stage may have been another's.
        if (kStages % kWarpgroups != 0) ptx::mbarrier_wait(smem.full[last.index], last.parity);
        ptx::mbarrier_arrive(smem.full[at.index]);
        last = at;
      }
    }
  }

  // Asks for the next block.
  __device__ __forceinline__ void copy(Stage& stage) {
    // Places are in 16 bytes: half the registers of an address.
    constexpr unsigned kNowhere = ~0u;
    const Place place = keys.next();
    const unsigned own_latent = place.has ? place.in_chunks(params.k_stride, 4) : kNowhere;
    const unsigned own_rope = place.in_chunks(mla.rope_stride, 3);
    const int chunk = lane % 8, rope_dim = params.head_dim - params.head_dim_v;
    const unsigned to = ptx::shared_address(stage.tokens[warp * kWarpKeys + lane / 8]) + chunk * 16;
#pragma unroll
    for (int i = 0; i < kWarpKeys / 4; ++i) {
      const int row = i * 4 + lane / 8;
      const unsigned latent = __shfl_sync(~0u, own_latent, row);
      const unsigned rope = __shfl_sync(~0u, own_rope, row);
      const bool has = latent != kNowhere;
      const unsigned its_to = to + i * 4 * kTokenBytes;
      const uint4* const from = static_cast<const uint4*>(params.k) + (latent + chunk);
#pragma unroll
      for (int quarter = 0; quarter < kQuarters; ++quarter)
        ptx::cp_async_16(its_to + quarter * kScaleColumns, from + quarter * 8,
                         has && quarter * kScaleColumns + chunk * 16 < params.head_dim_v);
      ptx::cp_async_16(its_to + kRopeAt, static_cast<const uint4*>(mla.rope) + (rope + chunk),
                       has && chunk * 8 < rope_dim);
    }
    copy_scales(stage, place);
    const unsigned exist = __ballot_sync(~0u, place.has) & 0xffff;
    if (lane == 0) stage.exist[warp] = exist;
  }

  // Scales lie in memory as float or bfloat16: words of four bytes that have them.
  __device__ __forceinline__ void copy_scales(Stage& stage, const Place& place) const {
    const int key = warp * kWarpKeys + lane % kWarpKeys;
    const ScaleStrides& stride = params.v_scale_stride;  // of groups: 0 where there is one
    const long long at = place.page * stride.page + place.slot * stride.seq;
    unsigned halves = 0;
#pragma unroll
    for (int i = 0; i < kTokenScales; i += 2) {
      const int piece = i + lane / 16;  // of kScaleColumns
      if (piece >= kTokenScales) break;
      const int group = params.v_group == 2 * kScaleColumns ? piece / 2 : piece;
      const long long own = at + group * stride.group;
      const char* from =
          static_cast<const char*>(params.v_scale) + own * (params.v_scale_is_float ? 4 : 2);
      const unsigned upper = reinterpret_cast<unsigned long long>(from) >> 1 & 1;
      halves |= upper << piece;
      ptx::cp_async_4(ptx::shared_address(stage.tokens[key] + kScaleAt) + piece * 4,
                      from - 2 * upper, place.has && piece * kScaleColumns < params.head_dim_v);
    }
    if (kTokenScales > 1) halves |= __shfl_xor_sync(~0u, halves, 16);
    if (lane < 16) stage.halves[key] = halves;
  }
};

}  // namespace mla
