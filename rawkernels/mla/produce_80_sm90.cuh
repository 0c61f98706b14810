// The producing warps of mla/decode_80_sm90.cu: two load a half of the columns of keys each, one
// what is rotated of them, and one loads queries.
#pragma once

#include "mla/key_boxes_sm90.cuh"
#include "mla/layout_80_sm90.cuh"
#include "mla/query_boxes_sm90.cuh"
#include "tile/pipeline.cuh"

namespace mla {

struct Producer {
  Smem& smem;
  const DecodeParams& params;
  const MlaParams& mla;
  const Maps& maps;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  const KeyBoxes boxes = {params, maps};

  __device__ __forceinline__ void run() const {
#pragma unroll 1
    for (int number = 0;; ++number) {
      ptx::mbarrier_wait(smem.full_work[number % 2], number / 2 % 2);
      const Work& work = smem.work[number % 2];
      if (!work.exists) return;
      if (warp < 3) {
        load_keys(work);
      } else {
        ptx::mbarrier_wait(smem.empty_q, number % 2 ^ 1);
        if (ptx::elect_one())
          ask_query_boxes<kRows>(smem.q, smem.full_q, params, mla, maps, work.split);
      }
      tile::arrive_warp(smem.empty_work[number % 2]);
    }
  }

 private:
  __device__ __forceinline__ void load_keys(const Work& work) const {
    const int* const row = boxes.table.entry(work.split.seq.index, 0);
    const int begin = work.first, end = work.end, end_key = work.split.end;
    int first = work.split.origin;
    int next_page = boxes.page_of_lane(row, first, end_key);
#pragma unroll 1
    for (int block = begin; block < end; ++block, first += kKeys) {
      const int page = next_page;
      next_page = boxes.page_of_lane(row, first + kKeys, end_key);
      if (warp == 2)
        load(first, page, kRopePanel, smem.rope[block % 2], smem.full_rope[block % 2],
             smem.empty_rope[block % 2], block / 2 % 2);
      else
#pragma unroll
        for (int panel = 0; panel < kHalfPanels; ++panel) {
          const Place place = Place::of(block, panel);
          const int to = place.index();
          load(first, page, warp * kHalfPanels + panel, smem.k[warp][to], smem.full_k[warp][to],
               smem.empty_k[warp][to], place.parity());
        }
    }
  }
  // A panel of a block, as soon as its place is free.
  __device__ __forceinline__ void load(int first, int page, int panel, unsigned char* to,
                                       ptx::Mbarrier& full, ptx::Mbarrier& empty,
                                       unsigned parity) const {
    const auto copy = [&](int its_page, int slot, int box) {
      if (box == 0) ptx::mbarrier_arrive_expect_tx(full, kPanelBytes);
      boxes.copy_panel(to, panel, panel == kRopePanel, its_page, slot, box, full);
    };
    if (boxes.box_shift < KeyBoxes::kKeysLog2) {
      ptx::mbarrier_wait(empty, parity ^ 1);
      boxes.for_each_box(first, page, copy);
      return;
    }
    // Nothing is left to be worked out when the place is free.
    const int its_page = __shfl_sync(~0u, page, 0), slot = boxes.table.slot(first);
    ptx::mbarrier_wait(empty, parity ^ 1);
    if (ptx::elect_one()) copy(its_page, slot, 0);
    __syncwarp();
  }
};

}  // namespace mla
