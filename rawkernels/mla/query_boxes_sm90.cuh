// How TMA copies a tile's queries for mla/decode_sm90.cu and decode_80_sm90.cu: a box of heads and
// tokens, panel by panel.
#pragma once

#include "mla/maps.cuh"
#include "mla/params.cuh"
#include "mla/partial.cuh"

namespace mla {

// Asks for the queries of a split, of tiles of kTileRows. By one lane.
template <int kTileRows, int kPanels, int kPanelBytes>
__device__ __forceinline__ void ask_query_boxes(unsigned char (&q)[kPanels][kPanelBytes],
                                                ptx::Mbarrier& full, const DecodeParams& params,
                                                const MlaParams& mla, const Maps& maps,
                                                const decoding::Split& split) {
  const int first = split.row_tile * kTileRows, token = divided_by_group(params, first);
  const int head = split.head * params.group + first - token * params.group;
  const int sequence = params.cu_seqlens_q == nullptr ? split.seq.index : 0;
  // Where nothing is rotated, the map is that of latents, which have no such panel: zeros.
  const int rope_column = params.head_dim > params.head_dim_v ? 0 : (kPanels - 1) * 64;
  ptx::mbarrier_arrive_expect_tx(full, kPanels * 128 * mla.query_rows);
#pragma unroll
  for (int i = 0; i < kPanels; ++i) {
    const bool rotated = i + 1 == kPanels;
    ptx::tma_load(q[i], rotated ? maps.q_rope : maps.q, full, rotated ? rope_column : i * 64, head,
                  split.seq.begin_q + token, sequence, ptx::kEvictNormal);
  }
}

}  // namespace mla
