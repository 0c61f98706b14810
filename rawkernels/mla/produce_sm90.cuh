// The producing warps of mla/decode_sm90.cu: each finds the block's splits, and loads one half of
// the blocks of one buffer, as soon as it is free. The last one, whose keys are needed last, asks
// for the queries too: while the end of the split before is computed.
#pragma once

#include "mla/key_boxes_sm90.cuh"
#include "mla/layout_sm90.cuh"
#include "mla/query_boxes_sm90.cuh"
#include "ptx/bar.cuh"
#include "ptx/elect.cuh"

namespace mla {

// By one thread, before all else.
__device__ __forceinline__ void prepare(Smem& smem, const Maps& maps) {
  if (!Config::gather) {  // else there are none
    ptx::prefetch_tensormap(maps.latent);
    ptx::prefetch_tensormap(maps.rope);
  }
  for (int buffer = 0; buffer < 2; ++buffer) {
    for (ptx::Mbarrier& full_k : smem.full_k[buffer]) ptx::mbarrier_init(full_k, kFullArrivals);
    ptx::mbarrier_init(smem.empty_first[buffer], 4);
    ptx::mbarrier_init(smem.empty_second[buffer], 4);
  }
  for (int i = 0; i < kQueue; ++i) {
    ptx::mbarrier_init(smem.full_work[i], 1);
    ptx::mbarrier_init(smem.empty_work[i], kConsumers / 32);
  }
  ptx::mbarrier_init(smem.full_q, 1);
  ptx::mbarrier_init(smem.empty_q, kConsumers / 32);
  ptx::fence_mbarrier_init();
}

// Asks TMA for the queries of a split, after the scores of the one before. By one warp, for every
// split.
__device__ __forceinline__ void ask_queries(Smem& smem, const DecodeParams& params,
                                            const MlaParams& mla, const Maps& maps,
                                            const decoding::Split& split, unsigned parity) {
  if (mla.query_rows == 0) return;  // the consumers copy them
  ptx::mbarrier_wait(smem.empty_q, parity ^ 1);
  if (ptx::elect_one()) ask_query_boxes<kRows>(smem.q, smem.full_q, params, mla, maps, split);
  __syncwarp();
}

// Loads blocks of keys, of which a lane has the pages: one, or those that a block consists of. TMA
// gives zeros for pages that do not exist; so there are zeros for keys beyond the end's page.
struct Loader : KeyBoxes {
  const int* row = nullptr;  // of the page table
  int end = 0;

  __device__ __forceinline__ void begin(const decoding::Split& split) {
    row = table.entry(split.seq.index, 0);
    end = split.end;
  }
  __device__ __forceinline__ int page_of_lane(int first) const {
    return KeyBoxes::page_of_lane(row, first, end);
  }
  // Half of a block to a buffer.
  template <int kBuffer, int kHalf>
  __device__ __forceinline__ void load(Smem& smem, int first, int page) const {
    constexpr int kBegin = kHalf * first_panels(kBuffer);
    constexpr int kEnd = kHalf == 0 ? first_panels(kBuffer) : kPanels;
    for_each_box(first, page, [&](int its_page, int slot, int box) {
#pragma unroll
      for (int i = kBegin; i < kEnd; ++i) {
        const int panel = panel_in_order(kBuffer, i);
        ptx::Mbarrier& full = smem.full_k[kBuffer][panel];
        if (box == 0) ptx::mbarrier_arrive_expect_tx(full, kPanelBytes);
        copy_panel(smem.k[kBuffer][panel], panel, panel == kRopePanel, its_page, slot, box, full);
      }
    });
  }
  // The half that is a warp's: of the first buffer warps 0 and 1, of the second warps 2 and 3.
  __device__ __forceinline__ void load_half_of_warp(Smem& smem, int warp, int first,
                                                    int page) const {
    if (warp == 0)
      load<0, 0>(smem, first, page);
    else if (warp == 1)
      load<0, 1>(smem, first, page);
    else if (warp == 2)
      load<1, 0>(smem, first, page);
    else
      load<1, 1>(smem, first, page);
  }
};

// The warp that tells the consumers of splits: not one that loads a split's first keys, where these
// are loaded by other warps than the next ones.
constexpr int kTellingWarp = Config::gather ? 0 : 2;

// Tells the consumers of a split; how many blocks of keys it has, -1 where there is no split.
__device__ __forceinline__ int put_work(Smem& smem, const DecodeParams& params,
                                        const MlaParams& mla, const Schedule& schedule,
                                        const decoding::Split& split, bool exists,
                                        tile::PipelineState<kQueue>& queue) {
  const int keys = exists && split.end > split.begin ? split.end - split.origin : 0;
  const int blocks = exists ? (keys + kBlockKeys - 1) / kBlockKeys : -1;
  if (threadIdx.x != kConsumers + 32 * kTellingWarp) return blocks;
  ptx::mbarrier_wait(smem.empty_work[queue.index], queue.parity ^ 1);
  Work& work = smem.queue[queue.index];
  work.blocks = blocks;
  if (exists) {
    work.split = split;
    work.place = schedule.place_of(params, split);
  }
  ptx::mbarrier_arrive(smem.full_work[queue.index]);
  queue.advance();
  return blocks;
}

// By each of four warps.
__device__ __forceinline__ void produce(Smem& smem, const DecodeParams& params,
                                        const MlaParams& mla, const Maps& maps) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  const int buffer = warp / 2, half = warp % 2;
  ptx::Mbarrier& empty = (half == 0 ? smem.empty_first : smem.empty_second)[buffer];
  Schedule schedule;
  Loader loader = {{params, maps}};
  tile::PipelineState<kQueue> queue;
  unsigned parity = 0, parity_q = 0;  // of the present use of the buffer, and of Q
  bool exists = schedule.start(params);
  ptx::bar_sync(kReady, kReadyThreads);
  while (true) {
    decoding::Split split;
    exists = exists && schedule.next(params, split);
    const int blocks = put_work(smem, params, mla, schedule, split, exists, queue);
    __syncwarp();
    if (!exists) return;
    loader.begin(split);
    int first = split.origin + buffer * kBlockKeys;
    int next_page = buffer < blocks ? loader.page_of_lane(first) : 0;
    if (warp == 3) ask_queries(smem, params, mla, maps, split, parity_q);
    parity_q ^= 1;
#pragma unroll 1
    for (int block = buffer; block < blocks; block += 2, parity ^= 1, first += 2 * kBlockKeys) {
      const int page = next_page;
      next_page = loader.page_of_lane(first + 2 * kBlockKeys);
      ptx::mbarrier_wait(empty, parity ^ 1);
      loader.load_half_of_warp(smem, warp, first, page);
    }
  }
}

}  // namespace mla
