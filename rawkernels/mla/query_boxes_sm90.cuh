// How TMA copies a tile's queries for mla/decode_sm90.cu and decode_80_sm90.cu: a box of heads and
// tokens, panel by panel.
#pragma once

#include "mla/maps.cuh"
#include "mla/panels_sm90.cuh"
#include "mla/params.cuh"
#include "mla/partial.cuh"

namespace mla {

// Asks for the queries of a split, of tiles of kTileRows. By one lane.
template <int kTileRows>
__device__ __forceinline__ void ask_query_boxes(unsigned char (&q)[kPanels][kTileRows * 128],
                                                ptx::Mbarrier& full, const DecodeParams& params,
                                                const MlaParams& mla, const Maps& maps,
                                                const decoding::Split& split) {
  const int first = split.row_tile * kTileRows, token = divided_by_group(params, first);
  const int head = split.head * params.group + first - token * params.group;
  const int sequence = params.cu_seqlens_q == nullptr ? split.seq.index : 0;
  // Where nothing is rotated, the map is that of latents, which have no such panel: zeros.
  const int rope_column = params.head_dim > params.head_dim_v ? 0 : kLatent;
  ptx::mbarrier_arrive_expect_tx(full, kPanels * Panel::kRowBytes * mla.query_rows);
#pragma unroll
  for (int i = 0; i < kPanels; ++i) {
    const bool rotated = i == kRopePanel;
    ptx::tma_load(q[i], rotated ? maps.q_rope : maps.q, full, rotated ? rope_column : i * 64, head,
                  split.seq.begin_q + token, sequence, ptx::kEvictFirst);
  }
}

// Zeros for the rows of a tile that no box has, in any split. By kThreads threads.
template <int kTileRows, int kThreads>
__device__ __forceinline__ void clear_missing_queries(unsigned char (&q)[kPanels][kTileRows * 128],
                                                      const MlaParams& mla) {
  constexpr int kChunks = kPanels * 8;
#pragma unroll 1
  for (int i = mla.query_rows * kChunks + threadIdx.x; i < kTileRows * kChunks; i += kThreads)
    *reinterpret_cast<uint4*>(q[i % kChunks / 8] + Panel::at(i / kChunks, i % 8)) = {};
  ptx::fence_proxy_async();
}

}  // namespace mla
