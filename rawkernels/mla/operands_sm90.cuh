// Operands of the products of mla/decode_sm90.cu: bases of descriptors, and Q's way to shared
// memory.
#pragma once

#include "mla/descriptors_sm90.cuh"
#include "mla/layout_sm90.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"

namespace mla {

// A base of descriptors.
__device__ __forceinline__ unsigned uniform_base(const void* tile) {
  return __shfl_sync(~0u, ptx::shared_address(tile) >> 4, 0);
}

// 16-byte pieces of Q, zeros for rows and columns that do not exist.
__device__ __forceinline__ void load_queries(Smem& smem, const DecodeParams& params,
                                             const MlaParams& mla, const decoding::Split& split) {
  constexpr int kChunks = kPanels * 8;
  const int rows = rows_from<kRows>(params, split);
  const int first = ptx::thread_index();  // or addresses are kept, and others spilled
#pragma unroll(Config::gather ? 4 : 6)    // more would spill
  for (int i = first; i < kRows * kChunks; i += kConsumers) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int index = split.row_tile * kRows + min(row, rows - 1);
    const int token = divided_by_group(params, index);
    const bool rotated = chunk >= kLatentPanels * 8;
    const Strides& stride = rotated ? mla.q_rope_stride : params.q_stride;
    const int column = (rotated ? chunk - kLatentPanels * 8 : chunk) * 8;
    const int columns = rotated ? params.head_dim - params.head_dim_v : params.head_dim_v;
    const T* source = static_cast<const T*>(rotated ? mla.q_rope : params.q) +
                      split.seq.index * stride.batch + (split.seq.begin_q + token) * stride.seq +
                      (split.head * params.group + index - token * params.group) * stride.head +
                      column;
    ptx::cp_async_16(ptx::shared_address(smem.q[chunk / 8]) + Panel::at(row, chunk % 8), source,
                     row < rows && column < columns);
  }
  ptx::cp_async_wait_all();
  ptx::fence_proxy_async();
}

}  // namespace mla
