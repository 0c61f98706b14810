// Finds keys that are codes and copies them to shared memory: the loading warps of
// mla/decode_codes_sm90.cu. TMA copies keys of a page side by side; tokens that are chosen, and
// pages of fewer than 8 keys, are copied row by row, by cp.async.
#pragma once

#include "mla/copy_codes.cuh"
#include "mla/layout_codes_sm90.cuh"
#include "mla/maps.cuh"
#include "ptx/elect.cuh"

namespace mla {

// Of a block each warp has 16 keys, which its lanes look up, each key by two of them.
struct Loader {
  Smem& smem;
  const DecodeParams& params;
  const MlaParams& mla;
  const Maps& maps;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  KeyLookup<kKeys> keys = {params, mla, warp * kWarpKeys + lane % kWarpKeys,
                           smem.loaded[warp].keys};

  __device__ __forceinline__ void run() {
    LoadedSplit& own = smem.loaded[warp];
    tile::PipelineState<kStages> at;
    while (true) {
      __syncwarp();
      if (lane == 0) own.exists = own.schedule.next(params, own.split);
      __syncwarp();
      if (!own.exists) return;
      const int blocks = count_blocks(own.split);
      keys.start(own.split);
      Key next = find();
#pragma unroll 1
      for (int block = 0; block < blocks; ++block, at.advance()) {
        Stage& stage = smem.ring[at.index];
        const Key key = next;
        next = find();
        ptx::mbarrier_wait(smem.empty[at.index][warp / 2], at.parity ^ 1);
        copy(stage, smem.full[at.index], key);
        ptx::mbarrier_arrive_after_copies(smem.full[at.index]);
        // Blocks become full in their order, which copies need not end in, where a warpgroup waits
        // for some only: it has had the block kWarpgroups before, and waits for this one by a
        // parity, but the one before in this stage may have been another's.
        if (!kSharesValues && kStages % kWarpgroups != 0)
          ptx::mbarrier_wait(smem.full[(at.index + kStages - 1) % kStages],
                             at.parity ^ (at.index == 0));
        ptx::mbarrier_arrive(smem.full[at.index]);
      }
    }
  }

  // A key of a block, and scales of it, on their way. Of several each of its two lanes has two.
  struct Key {
    Place place;
    StoredScale scales[(kTokenScales + 1) / 2];
  };
  __device__ __forceinline__ int piece(int i) const { return 2 * i + lane / kWarpKeys; }
  __device__ __forceinline__ Key find() {
    Key key = {keys.next()};
#pragma unroll
    for (int i = 0; i < (kTokenScales + 1) / 2; ++i)
      if (piece(i) < kTokenScales)
        key.scales[i].load(params, key.place.page, key.place.slot, piece(i), key.place.has);
    return key;
  }

  // Asks for a block.
  __device__ __forceinline__ void copy(Stage& stage, ptx::Mbarrier& full, const Key& key) const {
    const unsigned exist = __ballot_sync(~0u, key.place.has) & 0xffff;
    if (mla.key_rows > 0)
      copy_boxes(stage, full, key.place, exist);
    else
      copy_rows(stage, key.place);
    put_scales(stage, key);
    if (lane == 0) stage.exist[warp] = exist;
  }

  // A key's scale; of several the largest one, and what the others are of it.
  __device__ __forceinline__ void put_scales(Stage& stage, const Key& key) const {
    // Where scales go is not worked out ahead of all blocks: there are no registers for it.
    const int own = ptx::opaque(warp * kWarpKeys + lane % kWarpKeys);
    float scale = key.scales[0].value(params);
    if constexpr (Config::several_scales) {
      const float other = key.scales[1].value(params);
      float largest = fmaxf(fabsf(scale), fabsf(other));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, kWarpKeys));
      const float inverse = largest == 0.0f ? 0.0f : 1.0f / largest;
      put_quarter(stage, own, piece(0), scale, scale * inverse);
      put_quarter(stage, own, piece(1), other, other * inverse);
      scale = largest;
    }
    if (lane < kWarpKeys) stage.scales[own] = scale;
  }

  __device__ __forceinline__ static void put_quarter(Stage& stage, int key, int quarter,
                                                     float scale, float quotient) {
    const __half factor = __float2half_rn(quotient);
    const int half = key / 8 % 2;
    if constexpr (kByQuarter) stage.quarter_scales[quarter][2 * pair_of(key) + half] = scale;
    stage.key_factors[pair_of(key)][quarter][half] = factor;
    if constexpr (kScalesOperands) stage.value_factors[quarter][value_slot(key)] = factor;
  }

  // By TMA. Keys of the same pages come along that are not the split's; where all of a box are not,
  // zeros do, of a page that does not exist.
  __device__ __forceinline__ void copy_boxes(Stage& stage, ptx::Mbarrier& full, const Place& place,
                                             unsigned exist) const {
    const int rope_column = params.head_dim > params.head_dim_v ? 0 : kLatent;
#pragma unroll 1
    for (int first = 0; first < kWarpKeys; first += mla.key_rows) {
      const unsigned of_box = exist >> first & (1u << mla.key_rows) - 1;
      const int holder = first + (of_box == 0 ? 0 : __ffs(of_box) - 1);
      const int its_page = __shfl_sync(~0u, place.page, holder);
      const int slot = __shfl_sync(~0u, place.slot, holder) & -mla.key_rows;
      const int page = of_box == 0 ? -1 : its_page;
      if (ptx::elect_one()) {
        const int bytes = mla.key_rows * Panel::kRowBytes;
        ptx::mbarrier_expect_tx(full, (kKeyPanels + 1) * bytes);
        const int at = (warp * kWarpKeys + first) * Panel::kRowBytes;
#pragma unroll
        for (int i = 0; i < kKeyPanels; ++i)
          ptx::tma_load(stage.panels[i] + at, maps.latent, full, i * 128, slot, 0, page,
                        ptx::kEvictFirst);
        ptx::tma_load(stage.panels[kKeyPanels] + at, maps.rope, full, rope_column, slot, 0, page,
                      ptx::kEvictFirst);
      }
      __syncwarp();
    }
  }

  // Row by row.
  __device__ __forceinline__ void copy_rows(Stage& stage, const Place& place) const {
    copy_code_rows<kKeyPanels, kKeyPanelBytes>(params, mla, place, stage.panels, warp * kWarpKeys);
  }
};

}  // namespace mla
