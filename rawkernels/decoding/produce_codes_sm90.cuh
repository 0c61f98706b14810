// The warps of decode_codes_sm90.cu that load: each walks through the splits, and keeps the rings
// of its units full.
#pragma once

#include "decoding/layout_codes_sm90.cuh"
#include "ptx/tma.cuh"

// Loads a split's queries; by `threads` threads, of which this one is number `thread`.
__device__ __forceinline__ void load_queries(const DecodeParams& params, T* queries,
                                             const decoding::Split& split, int thread,
                                             int threads) {
  const int group = params.group, rows = split.seq.seqlen_q * group - split.row_tile * kRows;
  const unsigned target = ptx::shared_address(queries);
#pragma unroll 1
  for (int i = thread; i < kRows * kChunks; i += threads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int index = split.row_tile * kRows + row;
    const int token = divided_by_group(params, index);
    const T* source = static_cast<const T*>(params.q) + split.seq.index * params.q_stride.batch +
                      (split.seq.begin_q + token) * params.q_stride.seq +
                      (split.head * group + index - token * group) * params.q_stride.head +
                      chunk * 8;
    ptx::cp_async_16(target + QTile::at(row, chunk), source, row < rows);
  }
}

// Fills in what is known of a split's rows; by a warp.
__device__ __forceinline__ void locate_rows(const DecodeParams& params,
                                            const decoding::Split& split,
                                            decoding::Rows<T, kRows>& rows) {
  const int lane = threadIdx.x % 32;
  if (lane >= kRows) return;
  const int index =
      min(split.row_tile * kRows + lane, split.seq.seqlen_q * params.group - 1);  // as the last
  const int token = divided_by_group(params, index);
  rows.position[lane] = split.seq.seqlen_k - split.seq.seqlen_q + token;
  if (params.alibi_slopes != nullptr)
    rows.slope[lane] = rows.score_mod(params).slope(
        split.seq.index, split.head * params.group + index - token * params.group);
}

// Waits until nobody needs what was written down for the split before the last any more.
__device__ __forceinline__ Work& room_for(Smem& smem, int number) {
  if (number >= 2) ptx::mbarrier_wait(smem.empty_queries[number % 2], number / 2 - 1 & 1);
  return smem.work[number % 2];
}
__device__ __forceinline__ void hand_over(Smem& smem, int number) {
  ptx::Mbarrier& full = smem.full_queries[number % 2];
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(full);
  ptx::mbarrier_arrive_after_copies(full);
}

// Writes down split `number`, and loads its queries; by the first loading warp, the first split by
// the first warp that computes. Its queries all of these have loaded.
__device__ __forceinline__ void publish(const DecodeParams& params, Smem& smem,
                                        const Schedule& schedule, const decoding::Split& split,
                                        int number) {
  Work& work = room_for(smem, number);
  if (number > 0) load_queries(params, smem.queries[number % 2], split, threadIdx.x % 32, 32);
  locate_rows(params, split, work.rows);
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    work.exists = true;
    work.split = split;
    work.place = schedule.place_of(params, split);
    work.common_keys = {work.rows.keys(params, split, kRows - 1).begin,
                        work.rows.keys(params, split, 0).end};
  }
  hand_over(smem, number);
}

// That there is no split `number`.
__device__ __forceinline__ void publish_end(Smem& smem, int number) {
  Work& work = room_for(smem, number);
  if (threadIdx.x % 32 == 0) work.exists = false;
  hand_over(smem, number);
}

// Copies 16 bytes of scales, from those of a box's key `first` on: of keys that exist.
template <class Word>
__device__ __forceinline__ void copy_scales(const Word* words, const void* scales,
                                            const ScaleStrides& stride, int head, int page,
                                            int slot, bool exists) {
  // Strides are of bfloat16.
  const auto* const from = static_cast<const unsigned short*>(scales) + page * stride.page +
                           head * stride.head + slot * static_cast<int>(sizeof(Word) / 2);
  ptx::cp_async_16(ptx::shared_address(words), from, exists);
}

// Loads one of a tile's boxes, of all heads of a block.
template <class Panels>
__device__ __forceinline__ void load_panels(Panels& to, const ptx::TensorMap& map,
                                            ptx::Mbarrier& full, int first_key, int slot, int head,
                                            int page, unsigned long long hint) {
#pragma unroll
  for (int i = 0; i < Panels::kPanels; ++i)
    ptx::tma_load(to.panels[i] + first_key * Panels::kPanelBytes, map, full, 0, slot,
                  head * Panels::kPanels + i, page, hint);
}

// Loads the queries of all splits but the first (the first loading warp), and this warp's share of
// their tiles.
__device__ __forceinline__ void load_all(const DecodeParams& params, const Maps& maps, Smem& smem,
                                         Schedule& schedule, decoding::Split& split) {
  const int lane = threadIdx.x % 32, loader = (threadIdx.x - kThreads) / 32;
  const int first_unit = loader * kLoadedUnits;  // of those that this warp loads for
  // TMA copies boxes of 32 keys, or of 16 where pages have so few: a box for each lane.
  const int key_shift = params.page_shift < 5 ? 4 : 5, box_keys = 1 << key_shift;
  const int tile_boxes = kWarpKeys >> key_shift;
  const int unit = first_unit + lane / tile_boxes, box = lane % tile_boxes;
  const int key_of_lane = first_unit * kWarpKeys + lane * box_keys;
  const bool has_box = lane < kLoadedUnits * tile_boxes;
  const kvcache::PageTable table = page_table(params);
  // By one tile of rows; as a rule also of ragged rows, whose mean the tile is for.
  const bool read_once = params.cu_seqlens_q != nullptr || params.seqlen_q * params.group <= kRows;
  const unsigned long long hint = read_once ? ptx::kEvictFirst : ptx::kEvictNormal;
  int stage = 0;
  unsigned phase = 0;
#pragma unroll 1
  for (int number = 0;; ++number) {
    const auto look_up = [&](int key) {
      if (table.entries == nullptr) return split.seq.index;
      return has_box && key < min(split.end, params.capacity) ? *table.entry(split.seq.index, key)
                                                              : -1;
    };
    // Behind the rings' traffic a look-up takes microseconds.
    constexpr int kAhead = 3;
    int page = look_up(split.origin + key_of_lane), ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead - 1; ++i)
      ahead[i] = look_up(split.origin + key_of_lane + (i + 1) * kTileKeys);
    bool published = loader != 0 || number == 0;
#pragma unroll 1
    for (int first = split.origin;; first += kTileKeys) {
      // After the first tiles, which take longer to arrive.
      if (!published && (first > split.origin || first >= split.end)) {
        publish(params, smem, schedule, split, number);
        published = true;
      }
      if (first >= split.end) break;
      const int key = first + key_of_lane;
      ahead[kAhead - 1] = look_up(key + kAhead * kTileKeys);
      const bool exists = has_box && first + unit * kWarpKeys < split.end;
      if (exists) {
        ptx::Mbarrier& full = smem.full[unit][stage];
        Tiles& tiles = smem.ring[unit][stage];
        const int slot = table.slot(key);
        ptx::mbarrier_wait(smem.empty[unit][stage], phase ^ 1);
        if (box == 0) ptx::mbarrier_arrive_expect_tx(full, sizeof(Tiles));
        load_panels(tiles.k, maps.k, full, box * box_keys, slot, split.head, page, hint);
        load_panels(tiles.v, maps.v, full, box * box_keys, slot, split.head, page, hint);
      }
      __syncwarp();
      // 16 bytes of scales are of some keys of a tile, and of a head.
#pragma unroll
      for (int i = 0; i < kScaleChunks; i += 32) {
        const int scale_unit = (i + lane) / (kScaleLanes * kHeads);
        const int scale_head = (i + lane) / kScaleLanes % kHeads, part = lane % kScaleLanes;
        const int k_part = part * (kWarpKeys / kKScaleLanes),
                  v_part = part * (kWarpKeys / kVScaleLanes);
        const int its_lane = scale_unit * tile_boxes;
        const int its_stage = __shfl_sync(~0u, stage, its_lane);
        const int k_page = __shfl_sync(~0u, page, its_lane + (k_part >> key_shift));
        const int v_page = __shfl_sync(~0u, page, its_lane + (v_part >> key_shift));
        const int its_key = first + (first_unit + scale_unit) * kWarpKeys;
        if (scale_unit >= kLoadedUnits || its_key >= split.end) continue;
        Scales& scales = smem.scales[first_unit + scale_unit][its_stage][scale_head];
        const int head = split.head * kHeads + scale_head;
        if (part < kKScaleLanes)
          copy_scales(scales.k[0] + k_part, params.k_scale, params.k_scale_stride, head,
                      table.existing(k_page), table.slot(its_key + k_part),
                      its_key + k_part < split.end);
        if (part < kVScaleLanes)
          copy_scales(scales.v[0] + v_part, params.v_scale, params.v_scale_stride, head,
                      table.existing(v_page), table.slot(its_key + v_part),
                      its_key + v_part < split.end);
        ptx::mbarrier_arrive_after_copies(smem.full[first_unit + scale_unit][its_stage]);
      }
      if (exists && ++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
      page = ahead[0];
#pragma unroll
      for (int i = 0; i < kAhead - 1; ++i) ahead[i] = ahead[i + 1];
    }
    if (!schedule.next(params, split)) {
      if (loader == 0) publish_end(smem, number + 1);
      return;
    }
  }
}
