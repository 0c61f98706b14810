// The producing warps of attention/forward_sm90.cu where one prefix is shared by all queries
// (Config::prefix): rows are query heads of tokens, and keys lie in pages.
#pragma once

#include "attention/produce_sm90.cuh"

// The page that a lane's part of a block of keys lies in; for a part beyond the last key one that
// does not exist, which reads as zeros.
__device__ __forceinline__ int page_of_lane(const Sm90Params& sm90, int length, int block) {
  const int first = static_cast<int>(threadIdx.x % 32) << sm90.box_shift;
  const int key = block * kTileN + first;
  if (first >= kTileN || key >= length) return -1;
  return sm90.page_table == nullptr ? 0 : sm90.page_table[key >> sm90.page_shift];
}

// Brings the keys, or the values, of one tile after another, from a map (head_dim, slot, head,
// page). Each lane brings a part of a block.
template <int kPanels>
__device__ __forceinline__ void load_pages(
    Smem& smem, unsigned char (&places)[kStages][kPanels * kPanelBytesK], const ptx::TensorMap& map,
    ptx::Mbarrier (&full)[kStages], ptx::Mbarrier (&empty)[kStages], const Sm90Params& sm90) {
  Ring<kStages> ring;
  Ring<TileQueue::kSize> tiles;
  const int first = static_cast<int>(threadIdx.x % 32) << sm90.box_shift;
  for (Tile tile = read_tile(smem, tiles); tile.row >= 0; tile = read_tile(smem, tiles)) {
    int next_page = page_of_lane(sm90, tile.keys.length, tile.block_end - 1);
    for (int block = tile.block_end - 1; block >= tile.block_begin; --block) {
      const int page = next_page;
      next_page = page_of_lane(sm90, tile.keys.length, max(block - 1, tile.block_begin));
      const int slot = block * kTileN + first & (1 << sm90.page_shift) - 1;
      ptx::mbarrier_wait(empty[ring.index], ring.parity ^ 1);
      if (threadIdx.x % 32 == 0)
        ptx::mbarrier_arrive_expect_tx(full[ring.index], kPanels * kPanelBytesK);
      __syncwarp();
      if (first < kTileN) {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
          ptx::tma_load(places[ring.index] + panel * kPanelBytesK + first * kRowBytes, map,
                        full[ring.index], panel * kPanelColumns, slot, tile.head_kv, page,
                        ptx::kEvictLast);
      }
      __syncwarp();
      ring.advance();
    }
  }
}

// Finds tiles for all, and brings 64 rows of a key head for each consumer, from a map (head_dim,
// head of the group, token, key head).
__device__ __forceinline__ void load_packed_queries(Smem& smem, const ForwardParams& params,
                                                    const Sm90Params& sm90) {
  const int tokens = tokens_of_64_rows(params);
  Ring<kSlots> slots;
  Ring<TileQueue::kSize> ring;
  FixedWalk walk(params, sm90);
  while (true) {
    const Tile tile = walk.next();
    put_tile(smem, ring, tile);
    if (tile.row < 0) break;
    for (int consumer = 0; consumer < kWarpgroups; ++consumer) {
      ptx::Mbarrier& full = smem.full_q[slots.index][consumer];
      ptx::mbarrier_wait(smem.empty_q[slots.index][consumer], slots.parity ^ 1);
      if (threadIdx.x % 32 == 0) {
        ptx::mbarrier_arrive_expect_tx(full, kPanelsK * tokens * group_of(params) * kRowBytes);
#pragma unroll
        for (int panel = 0; panel < kPanelsK; ++panel)
          ptx::tma_load(smem.q[slots.index][consumer] + panel * kPanelBytesQ, sm90.q, full,
                        panel * kPanelColumns, 0, (tile.row / 64 + consumer) * tokens, tile.head_kv,
                        ptx::kEvictFirst);
      }
      __syncwarp();
    }
    slots.advance();
  }
}

// Where pages are small a block takes dozens of copies: keys and values have a warp each.
__device__ __forceinline__ void produce_prefix(Smem& smem, const ForwardParams& params,
                                               const Sm90Params& sm90, int warp) {
  if (warp == 0) {
    load_pages<kPanelsK>(smem, smem.k, sm90.k, smem.full_k, smem.empty_k, sm90);
  } else if (warp == 1) {
    load_packed_queries(smem, params, sm90);
  } else if (warp == 2) {
    load_pages<kPanelsV>(smem, smem.v, sm90.v, smem.full_v, smem.empty_v, sm90);
  }
}
