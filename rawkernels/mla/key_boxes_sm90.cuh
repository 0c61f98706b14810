// How TMA copies blocks of 64 keys for mla/decode_sm90.cu and decode_few_sm90.cu: in boxes, of
// which a lane of a warp has the page.
#pragma once

#include "decoding/params.cuh"
#include "mla/maps.cuh"
#include "ptx/elect.cuh"

namespace mla {

struct KeyBoxes {
  static constexpr int kKeysLog2 = 6;  // of a block

  const DecodeParams& params;
  const Maps& maps;
  const kvcache::PageTable table = page_table(params);
  const int box_shift = min(table.page_shift, kKeysLog2);  // log2 of the keys of a box
  const int lane = threadIdx.x % 32;

  // The page of this lane's box of a block, from a sequence's row of the page table: keys from
  // `end` on have none. TMA gives zeros for pages that do not exist.
  __device__ __forceinline__ int page_of_lane(const int* row, int first, int end) const {
    const int key = first + (lane << box_shift);
    const bool has = lane << box_shift < 1 << kKeysLog2 && key < end;
    return has ? row[key >> table.page_shift] : table.num_pages;
  }
  // Calls copy(page, slot, box) for each box of a block, whose pages lanes have. By one lane, from
  // uniform registers: a loop over the lanes of a warp takes about a hundred cycles for each panel.
  template <class Copy>
  __device__ __forceinline__ void for_each_box(int first, int page, const Copy& copy) const {
    const int slot = box_shift == kKeysLog2 ? table.slot(first) : 0;
#pragma unroll 1
    for (int box = 0; box << box_shift < 1 << kKeysLog2; ++box) {
      const int its_page = __shfl_sync(~0u, page, box);
      if (ptx::elect_one()) copy(its_page, slot, box);
      __syncwarp();
    }
  }
  // Copies a box of a panel to where the panel's first key is. L2 need not keep it, though several
  // tiles of heads read the same keys: they do so at about the same time.
  __device__ __forceinline__ void copy_panel(unsigned char* panel_at, int panel, bool rotated,
                                             int page, int slot, int box,
                                             ptx::Mbarrier& full) const {
    // Where nothing is rotated, the map is the latents', which have no such panel: zeros.
    const int rope_index = params.head_dim > params.head_dim_v ? 0 : panel;
    ptx::tma_load(panel_at + (box << box_shift) * 128, rotated ? maps.rope : maps.latent, full, 0,
                  slot, rotated ? rope_index : panel, page, ptx::kEvictFirst);
  }
};

}  // namespace mla
