// The warps of attention/forward_codes_sm90.cu that load codes of keys and values, and that expand
// them: codes of a block come by TMA, as they lie in memory, into a ring of stages of shared
// memory; each of Config::expand_warps warps makes numbers of some of its keys, and writes them
// where wgmma reads them. Scales come by ordinary loads, a block ahead, a key's to a lane.
//
// Every tile of queries expands its keys anew, also where others have the same: that takes about a
// quarter of the issue slots beside a tile of 128 queries, and half of the bytes from L2 that
// 16-bit keys take.
#pragma once

#include "attention/code_rows_sm90.cuh"
#include "attention/produce_sm90.cuh"

template <>
struct CodeWarps<true> : CodeRows {
  static constexpr int kWarpKeys = kTileN / kExpandWarps;  // of a block, a warp's

  // ------------------------------------------------------------------------------------- loading

  // Loads the codes of a block of keys, or of values: lane i knows the page of box i.
  template <int kRowCodeBytes>
  __device__ __forceinline__ static void load_codes(Smem& smem,
                                                    tile::PipelineState<kCodeStages>& stage,
                                                    const ptx::TensorMap& map,
                                                    const Sm90Params& sm90, int block, int head,
                                                    int page) {
    unsigned char* place = smem.codes[stage.index];
    ptx::Mbarrier& full = smem.full_codes[stage.index];
    ptx::mbarrier_wait(smem.empty_codes[stage.index], stage.parity ^ 1);
    if (ptx::elect_one()) ptx::mbarrier_arrive_expect_tx(full, kTileN * kRowCodeBytes);
    const kvcache::PageTable table = page_table(sm90);
    int slot = table.slot(block * kTileN);
#pragma unroll 1
    for (int first = 0, box = 0; first < kTileN; first += 1 << sm90.box_shift, ++box) {
      const int page_of_box = __shfl_sync(~0u, page, box);
      if (ptx::elect_one())
        ptx::tma_load(place, map, full, 0, slot, head, page_of_box, ptx::kEvictLast);
      slot = table.slot(slot + (1 << sm90.box_shift));
      place += kRowCodeBytes << sm90.box_shift;
    }
    __syncwarp();
    stage.advance();
  }

  // Loads the codes of all tiles: values of a block after the keys of the next, as consumers ask
  // for them.
  __device__ __forceinline__ static void load(Smem& smem, const Sm90Params& sm90) {
    tile::PipelineState<kCodeStages> stage;
    tile::PipelineState<TileQueue::kSize> queue;
    for (Tile tile = read_tile(smem, queue); tile.row >= 0; tile = read_tile(smem, queue)) {
      if (tile.empty()) continue;
      int next_entry = entry_of_lane(sm90, tile, tile.block_end - 1), last_page = -1;
      for (int block = tile.block_end - 1; block >= tile.block_begin; --block) {
        const int page = page_of_lane(sm90, tile.keys.length, block, next_entry);
        next_entry = entry_of_lane(sm90, tile, max(block - 1, tile.block_begin));
        load_codes<kKeyCodeBytes>(smem, stage, sm90.k, sm90, block, tile.head_kv, page);
        if (block + 1 < tile.block_end)
          load_codes<kValueCodeBytes>(smem, stage, sm90.v, sm90, block + 1, tile.head_kv,
                                      last_page);
        last_page = page;
      }
      load_codes<kValueCodeBytes>(smem, stage, sm90.v, sm90, tile.block_begin, tile.head_kv,
                                  last_page);
    }
  }

  // ----------------------------------------------------------------------------------- expanding

  template <int kFormat>
  __device__ __forceinline__ static void expand_block(
      Smem& smem, tile::PipelineState<kCodeStages>& from, tile::PipelineState<kStages>& to,
      unsigned char* numbers, ptx::Mbarrier& full, ptx::Mbarrier& empty, unsigned scale, int warp) {
    using Rows = Expander<kFormat, kWarpKeys>;
    unsigned* const scales = smem.scales + warp * kWarpKeys;
    Rows::put_scale(scales, scale);
    __syncwarp();
    ptx::mbarrier_wait(smem.full_codes[from.index], from.parity);
    ptx::mbarrier_wait(empty, to.parity ^ 1);
    const int first = warp * kWarpKeys;
    constexpr int kRowCodeBytes = Rows::kRowLanes * Rows::kChunkBytes;
    Rows::expand(numbers + first * kRowBytes, kPanelBytesK,
                 smem.codes[from.index] + first * kRowCodeBytes, scales);
    ptx::fence_proxy_async();
    tile::arrive_warp(full);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.empty_codes[from.index]);
    from.advance();
    to.advance();
  }

  // Expands one warp's keys, and values, of all tiles.
  __device__ __forceinline__ static void expand(Smem& smem, const Sm90Arguments& sm90, int warp) {
    tile::PipelineState<kCodeStages> stage;
    tile::PipelineState<kStages> stage_k, stage_v;
    tile::PipelineState<TileQueue::kSize> queue;
    const int key_of_lane = warp * kWarpKeys + static_cast<int>(threadIdx.x) % kWarpKeys;
    for (Tile tile = read_tile(smem, queue); tile.row >= 0; tile = read_tile(smem, queue)) {
      if (tile.empty()) continue;
      // The page table is read two blocks ahead, and scales one.
      const auto look_up = [&](int block) {
        return entry_of_key(sm90, tile,
                            block < tile.block_begin ? -1 : block * kTileN + key_of_lane);
      };
      const auto fetch = [&](int block, int entry) {
        return scales_of_key(sm90, tile, block * kTileN + key_of_lane, page_of_entry(sm90, entry));
      };
      Scales next = fetch(tile.block_end - 1, look_up(tile.block_end - 1));
      int entry = look_up(tile.block_end - 2);
      unsigned last_v = 0;
      for (int block = tile.block_end - 1; block >= tile.block_begin - 1; --block) {
        const Scales now = next;
        if (block > tile.block_begin) {
          next = fetch(block - 1, entry);
          entry = look_up(block - 2);
        }
        if (block >= tile.block_begin)
          expand_block<Options::k_format>(smem, stage, stage_k, smem.k[stage_k.index],
                                          smem.full_k[stage_k.index], smem.empty_k[stage_k.index],
                                          now.k, warp);
        if (block + 1 < tile.block_end)
          expand_block<Options::v_format>(smem, stage, stage_v, smem.v[stage_v.index],
                                          smem.full_v[stage_v.index], smem.empty_v[stage_v.index],
                                          last_v, warp);
        last_v = now.v;
      }
    }
  }
};
