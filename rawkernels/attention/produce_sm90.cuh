// The warps of attention/forward_sm90.cu that load: one finds tiles and loads their queries, one
// or two load keys and values.
#pragma once

#include "attention/layout_sm90.cuh"
#include "ptx/elect.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"

// The columns of the last panel of q or k, where they are an array of their own
// (Config::rope_panel): heads of q have one each, those of k have one in common.
struct RopePanel {
  const ptx::TensorMap& map;
  int head;
};

// Loads `kPanels` panels of rows of one head once the consumers have left their place; with
// `kRope` the last one from `rope`. All lanes of a warp together.
template <int kPanels, int kPanelBytes, bool kRagged, bool kRope>
__device__ __forceinline__ void load_rows(unsigned char* place, const ptx::TensorMap& map,
                                          const RopePanel& rope, ptx::Mbarrier& full,
                                          ptx::Mbarrier& empty, unsigned parity,
                                          const tile::TmaRows& rows, int row, int head,
                                          unsigned long long cache_hint) {
  ptx::mbarrier_wait(empty, parity ^ 1);
  if (ptx::elect_one()) {
    ptx::mbarrier_arrive_expect_tx(full, kPanels * kPanelBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      unsigned char* const to = place + panel * kPanelBytes;
      const bool own = kRope && panel + 1 == kPanels;
      const ptx::TensorMap& from = own ? rope.map : map;
      const int column = own ? 0 : panel * kPanelColumns, shifted = rows.shift + row;
      const int of_head = own ? rope.head : head;
      if constexpr (kRagged)
        ptx::tma_load(to, from, full, column, shifted, of_head, rows.outer, tile::kFarRows,
                      cache_hint);
      else
        ptx::tma_load(to, from, full, column, shifted, of_head, rows.outer, cache_hint);
    }
  }
  __syncwarp();
}

// Some keys or values of a page: `map` knows how many. One lane alone.
template <int kPanels>
__device__ __forceinline__ void load_box(unsigned char* to, const ptx::TensorMap& map,
                                         ptx::Mbarrier& full, const Sm90Params& sm90, int slot,
                                         int head, int page) {
  if constexpr (Config::key_groups) {
    ptx::tma_load(to, map, full, 0, 0, 0, slot / kGroupKeys, page * sm90.page_heads + head,
                  ptx::kEvictLast);
  } else {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      ptx::tma_load(to + panel * kPanelBytesK, map, full, panel * kPanelColumns, slot, head, page,
                    ptx::kEvictLast);
  }
}

// Loads a block of keys or values that lies in pages: lane i knows the page of box i. One
// elected lane issues all boxes, from uniform registers: lanes that issue their own take turns, at
// about a hundred cycles a box. Where a page has room for two boxes, one copy brings both, but for
// the odd one, which is the block's first or its last: copies of 16 keys are short, and their
// number decides when the last of them arrives.
template <int kPanels>
__device__ __forceinline__ void load_pages(unsigned char* place, const ptx::TensorMap& map,
                                           const ptx::TensorMap& pair_map, ptx::Mbarrier& full,
                                           ptx::Mbarrier& empty, unsigned parity,
                                           const Sm90Params& sm90, int block, int head, int page) {
  constexpr int kBoxKeys = kTileN & -kTileN, kBoxes = kTileN / kBoxKeys;
  constexpr int kKeyBytes = KeyLayout<kPanels>::kKeyBytes;
  const kvcache::PageTable table = page_table(sm90);
  ptx::mbarrier_wait(empty, parity ^ 1);
  if (ptx::elect_one()) ptx::mbarrier_arrive_expect_tx(full, kPanels * kPanelBytesK);
  if (kBoxes > 1 && sm90.pairs_of_boxes) {
    const int odd = block * kBoxes & 1, single = odd ? 0 : kBoxes - 1;
    int pages[kBoxes / 2 + 1];
#pragma unroll
    for (int i = 0; i < kBoxes / 2; ++i) pages[i] = __shfl_sync(~0u, page, odd + 2 * i);
    pages[kBoxes / 2] = __shfl_sync(~0u, page, single);
    if (ptx::elect_one()) {
#pragma unroll
      for (int i = 0; i <= kBoxes / 2; ++i) {
        const int first = (i < kBoxes / 2 ? odd + 2 * i : single) * kBoxKeys;
        load_box<kPanels>(place + first * kKeyBytes, i < kBoxes / 2 ? pair_map : map, full, sm90,
                          table.slot(block * kTileN + first), head, pages[i]);
      }
    }
  } else {
    int next = __shfl_sync(~0u, page, 0), slot = table.slot(block * kTileN);
#pragma unroll 1
    for (int first = 0, box = 1; first < kTileN; first += 1 << sm90.box_shift, ++box) {
      const int page_of_box = next, slot_of_box = slot;
      next = __shfl_sync(~0u, page, box);
      slot = table.slot(slot + (1 << sm90.box_shift));
      if (ptx::elect_one())
        load_box<kPanels>(place, map, full, sm90, slot_of_box, head, page_of_box);
      place += kKeyBytes << sm90.box_shift;
    }
  }
  __syncwarp();
}

// The page table's entry for a lane's box of a block. It is read a block ahead, and looked at when
// the block is loaded.
__device__ __forceinline__ int entry_of_lane(const Sm90Params& sm90, const Tile& tile, int block) {
  if constexpr (Config::paged_kv) {
    const int first = static_cast<int>(threadIdx.x % 32) << sm90.box_shift;
    const int key = block * kTileN + first;
    if (sm90.page_table != nullptr && first < kTileN && key < tile.keys.length)
      return *page_table(sm90).entry(tile.batch, key);
    return tile.batch;
  }
  return 0;
}

// The page of a lane's box of a block; for a box past the last key one that does not exist, which
// reads as zeros.
__device__ __forceinline__ int page_of_lane(const Sm90Params& sm90, int keys, int block,
                                            int entry) {
  if constexpr (Config::paged_kv) {
    const int first = static_cast<int>(threadIdx.x % 32) << sm90.box_shift;
    const int page = sm90.page_table == nullptr ? entry : page_table(sm90).existing(entry);
    return block * kTileN + first < keys ? page : -1;
  }
  return 0;
}

// A block of keys, or of values, which have nothing from sm90.k_rope.
template <int kPanels, bool kRope>
__device__ __forceinline__ void load_block(unsigned char* place, const ptx::TensorMap& map,
                                           const ptx::TensorMap& pair_map, ptx::Mbarrier& full,
                                           ptx::Mbarrier& empty, unsigned parity,
                                           const Sm90Params& sm90, const tile::TmaRows& keys,
                                           int block, int head, int page) {
  if constexpr (Config::paged_kv)
    load_pages<kPanels>(place, map, pair_map, full, empty, parity, sm90, block, head, page);
  else
    load_rows<kPanels, kPanelBytesK, kRaggedKeys, kRope>(place, map, {sm90.k_rope, 0}, full, empty,
                                                         parity, keys, block * kTileN, head,
                                                         ptx::kEvictLast);
}

// Passes a tile to all warps that work on it: called by the warp that has found it.
__device__ __forceinline__ void put_tile(Smem& smem, tile::PipelineState<TileQueue::kSize> queue,
                                         const Tile& tile) {
  ptx::mbarrier_wait(smem.queue.empty[queue.index], queue.parity ^ 1);
  if (threadIdx.x % 32 == 0) {
    smem.queue.tiles[queue.index] = tile;
    ptx::mbarrier_arrive(smem.queue.full[queue.index]);
  }
  __syncwarp();
}

// The next tile of the queue.
__device__ __forceinline__ Tile read_tile(Smem& smem,
                                          tile::PipelineState<TileQueue::kSize>& queue) {
  ptx::mbarrier_wait(smem.queue.full[queue.index], queue.parity);
  Tile tile = smem.queue.tiles[queue.index];
  int (&words)[sizeof(Tile) / 4] = reinterpret_cast<int (&)[sizeof(Tile) / 4]>(tile);
#pragma unroll
  for (int& word : words)
    word = __shfl_sync(~0u, word, 0);  // tells the compiler that all lanes have the same
  tile::arrive_warp(smem.queue.empty[queue.index]);
  queue.advance();
  return tile;
}

// Loads the keys and the values of all tiles.
__device__ __forceinline__ void load_keys_and_values(Smem& smem, const Sm90Params& sm90) {
  tile::PipelineState<kStages> stage_k, stage_v;
  tile::PipelineState<TileQueue::kSize> queue;
  int pending = -1;  // the block whose keys have been asked for, and whose values have not
  tile::TmaRows keys;
  int head, page_of_pending;
  const auto load_values = [&] {
    load_block<kPanelsV, false>(smem.v[stage_v.index], sm90.v, sm90.v_pair,
                                smem.full_v[stage_v.index], smem.empty_v[stage_v.index],
                                stage_v.parity, sm90, keys, pending, head, page_of_pending);
    stage_v.advance();
    pending = -1;
  };
  for (Tile tile = read_tile(smem, queue); tile.row >= 0; tile = read_tile(smem, queue)) {
    if (kFilterWarps > 0 && tile.empty()) {
      // The filter warps wait for the values before they read on, and the queue for the filter
      // warps: values must not wait for a tile that has keys, as it may be further away than the
      // queue is long.
      if (pending >= 0) load_values();
      continue;
    }
    int next_entry = entry_of_lane(sm90, tile, tile.block_end - 1);
    for (int block = tile.block_end - 1; block >= tile.block_begin; --block) {
      const int page = page_of_lane(sm90, tile.keys.length, block, next_entry);
      next_entry = entry_of_lane(sm90, tile, max(block - 1, tile.block_begin));
      load_block<kPanelsK, Config::rope_panel>(
          smem.k[stage_k.index], sm90.k, sm90.k_pair, smem.full_k[stage_k.index],
          smem.empty_k[stage_k.index], stage_k.parity, sm90, tile.keys, block, tile.head_kv, page);
      stage_k.advance();
      if (pending >= 0)
        load_values();  // consumers ask for the values of a block after the keys of the next
      pending = block;
      keys = tile.keys;
      head = tile.head_kv;
      page_of_pending = page;
    }
  }
  if (pending >= 0) load_values();
}

// Loads the keys, or the values, of all tiles. There are no tiles without keys.
template <int kPanels>
__device__ __forceinline__ void load_one_of_both(
    Smem& smem, unsigned char (&places)[kStages][kPanels * kPanelBytesK], const ptx::TensorMap& map,
    const ptx::TensorMap& pair_map, ptx::Mbarrier (&full)[kStages], ptx::Mbarrier (&empty)[kStages],
    const Sm90Params& sm90) {
  static_assert(kFilterWarps == 0 || !Config::paged_kv, "the filter's warp is in its place");
  tile::PipelineState<kStages> stage;
  tile::PipelineState<TileQueue::kSize> queue;
  for (Tile tile = read_tile(smem, queue); tile.row >= 0; tile = read_tile(smem, queue)) {
    int next_entry = entry_of_lane(sm90, tile, tile.block_end - 1);
    for (int block = tile.block_end - 1; block >= tile.block_begin; --block) {
      const int page = page_of_lane(sm90, tile.keys.length, block, next_entry);
      next_entry = entry_of_lane(sm90, tile, max(block - 1, tile.block_begin));
      load_block<kPanels, false>(places[stage.index], map, pair_map, full[stage.index],
                                 empty[stage.index], stage.parity, sm90, tile.keys, block,
                                 tile.head_kv, page);
      stage.advance();
    }
  }
}

// 64 rows of a tile, for one consumer.
__device__ __forceinline__ void load_query_rows(Smem& smem, const ForwardParams& params,
                                                const Sm90Params& sm90, const Tile& tile,
                                                const tile::PipelineState<kStagesQ>& stage,
                                                int consumer) {
  unsigned char* const place = smem.q[stage.index][consumer];
  ptx::Mbarrier& full = smem.full_q[stage.index][consumer];
  ptx::Mbarrier& empty = smem.empty_q[stage.index][consumer];
  if constexpr (Config::pack_gqa) {
    const int row = tile.queries.shift + tile.query_of(params, tile.row + 64 * consumer);
    ptx::mbarrier_wait(empty, stage.parity ^ 1);
    if (ptx::elect_one()) {
      ptx::mbarrier_arrive_expect_tx(
          full, kPanelsK * params.queries_of_64_rows * params.group * kRowBytes);
#pragma unroll
      for (int panel = 0; panel < kPanelsK; ++panel) {
        unsigned char* const to = place + panel * kPanelBytesQ;
        const int column = panel * kPanelColumns;
        if constexpr (Config::varlen)
          ptx::tma_load(to, sm90.q, full, column, tile.head, row, tile.queries.outer,
                        tile::kFarRows, ptx::kEvictFirst);
        else
          ptx::tma_load(to, sm90.q, full, column, tile.head, row, tile.queries.outer,
                        ptx::kEvictFirst);
      }
    }
    __syncwarp();
  } else {
    load_rows<kPanelsK, kPanelBytesQ, Config::varlen, Config::rope_panel>(
        place, sm90.q, {sm90.q_rope, tile.head}, full, empty, stage.parity, tile.queries,
        tile.row + 64 * consumer, tile.head, ptx::kEvictFirst);
  }
}

// Finds tiles for all, and loads their queries.
__device__ __forceinline__ void schedule_tiles(Smem& smem, const ForwardParams& params,
                                               const Sm90Params& sm90) {
  tile::PipelineCounter<kStagesQ> loaded;
  tile::PipelineCounter<TileQueue::kSize> found;
  TileScheduler scheduler(params, sm90, smem.sorted);
  while (true) {
    if constexpr (kTakesLate) {
      const tile::PipelineState<kStagesQ> stage = loaded.state();
      for (int consumer = 0; consumer < kWarpgroups; ++consumer)
        ptx::mbarrier_wait(smem.empty_q[stage.index][consumer], stage.parity ^ 1);
      loaded.count = ptx::opaque(loaded.count);  // else addresses are kept, and others spilled
    }
    const Tile tile = scheduler.next(found.count == 0);
    put_tile(smem, found.state(), tile);
    found.advance();
    if (tile.row < 0) break;
    if (kFilterWarps > 0 && tile.empty()) continue;
    for (int consumer = 0; consumer < kWarpgroups; ++consumer)
      load_query_rows(smem, params, sm90, tile, loaded.state(), consumer);
    loaded.advance();
  }
}
