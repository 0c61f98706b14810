// The end of a split of mla/decode_80_sm90.cu: the consuming warpgroups' O becomes the result or a
// part of it.
#pragma once

#include "mla/consume_80_sm90.cuh"

namespace mla {

struct SplitWarpgroup : Warpgroup {
  // The end of a split, of which O becomes the result or a part of it: sums of rows, O as 16-bit
  // numbers, and these to where they go. By both warpgroups.
  __device__ __forceinline__ void finish() {
    put_sums();
    sync_both();
    if (threadIdx.x < kRows) add_sums(threadIdx.x);
    sync_both();
    if (work->place.count > 1)
      pack<__half>();
    else
      pack<T>();
    sync_both();
    put_rows();
    ptx::fence_proxy_async();  // TMA will write where this thread has written
    tile::arrive_warp(smem.empty_q);
  }

  __device__ __forceinline__ void put_sums() const {
    End& end = smem.end();
    const int row = threadIdx.x % 128;
    if (row < kRows) end.sum[number][row] = row_sum;
    if (work->place.count == 1) return;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      float largest = 0.0f;
#pragma unroll
      for (const auto& panel : o)
        largest = fmaxf(largest, fmaxf(fabsf(panel[at(i, 0)]), fabsf(panel[at(i, 1)])));
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
      if (lane < 4) end.largest[number][warp][own_row(i)] = largest;
    }
  }
  __device__ __forceinline__ void add_sums(int row) const {
    End& end = smem.end();
    const decoding::Split& split = work->split;
    const int rows = rows_from<kRows>(params, split);
    const float sum = end.sum[0][row] + end.sum[1][row];
    const float max = smem.row_max[row] * scale_log2;
    float factor = 0.0f;
    if (work->place.count > 1) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) largest = fmaxf(largest, end.largest[i / 4][i % 4][row]);
      const int rise = Part::rise_for(largest);
      factor = Part::factor_for(rise);
      if (row < rows) part().max_sum[row] = {max + rise, sum * factor};
    } else if (row < rows) {
      const OutputRow result = output_row<T, kRows>(params, split, row, max, sum);
      put_lse(params, result);
      end.out_at[row] = result.at;
      factor = result.factor;
    }
    end.factor[row] = factor;
    if (row == 0 && work->place.index + 1 == work->place.count)
      put_task<kRows>(params, mla, split, work->place);
  }
  __device__ __forceinline__ Part& part() const {
    return static_cast<Part*>(mla.parts)[work->place.slot(work->place.index)];
  }
  // The warpgroup's columns of O to shared memory, row by row.
  template <class To>
  __device__ __forceinline__ void pack() const {
    const unsigned to = ptx::shared_address(smem.row_of_o(lane / 16 * 8 + lane % 8)) +
                        number * kHalfPanels * 128 + warp * 32 + lane / 8 % 2 * 16;
#pragma unroll
    for (int pair = 0; pair < kRows / 16; ++pair) {
      float factor[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) factor[i] = smem.end().factor[own_row(pair * 4 + i)];
#pragma unroll
      for (int panel = 0; panel < kHalfPanels; ++panel) {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const own = o[panel] + pair * 8 + 2 * i;
          words[i] = tile::pack<To>(own[0] * factor[i / 2 * 2], own[1] * factor[i / 2 * 2 + 1]);
        }
        ptx::stmatrix_x4_trans(to + pair * 16 * kRowBytes + panel * 128, words);
      }
    }
  }
  __device__ __forceinline__ void put_rows() const {
    constexpr int kVecs = kLatent / 8;
    const int rows = min(rows_from<kRows>(params, work->split), kRows);
    uint4* const to_part = reinterpret_cast<uint4*>(part().o);
    const bool parts = work->place.count > 1;
#pragma unroll 4
    for (int i = ptx::thread_index(); i < rows * kVecs; i += kConsumers) {
      const int row = i / kVecs, vec = i % kVecs;
      const uint4 own = reinterpret_cast<const uint4*>(smem.row_of_o(row))[vec];
      if (parts)
        to_part[i] = own;
      else if (vec * 8 < params.head_dim_v)
        *reinterpret_cast<uint4*>(static_cast<T*>(params.out) + smem.end().out_at[row] + vec * 8) =
            own;
    }
  }
};

}  // namespace mla
