// The nonfinite filter of attention/forward_sm90.cu: two warps that go through values which not
// every query of a tile sees. A hidden key's weight is 0, but 0 * NaN is NaN: they put 0 in the
// place of infinities and NaN, and consumers give those to the queries that do see them
// (restore_values). The same warps load rows of bias and mask, and write the results of tiles
// without any key.
#pragma once

#include "attention/produce_sm90.cuh"
#include "attention/score_sm90.cuh"

__device__ __forceinline__ __half2 as_pair(unsigned pair, __half) {
  return reinterpret_cast<const __half2&>(pair);
}
__device__ __forceinline__ __nv_bfloat162 as_pair(unsigned pair, __nv_bfloat16) {
  return reinterpret_cast<const __nv_bfloat162&>(pair);
}

// The same pair, with 0 for what is not finite.
__device__ __forceinline__ unsigned finite_halves(unsigned pair) {
  const auto values = as_pair(pair, T());
  const auto zeros = __hmul2(values, as_pair(0, T()));  // but NaN for an infinity or NaN
  return pair & __heq2_mask(zeros, zeros);
}

__device__ __forceinline__ bool is_finite(unsigned pair) { return finite_halves(pair) == pair; }

// One warp's half of the values of a block: replaces those that are not finite by 0, and says
// whether any of the first `keys` keys had some.
__device__ __forceinline__ bool replace_nonfinite(unsigned char* values, int filter_warp,
                                                  int keys) {
  constexpr int kWords =
      kPanelsV * kPanelBytesK / sizeof(uint4) / 64;  // of a lane: it takes one in 64
  uint4* const first = reinterpret_cast<uint4*>(values) + filter_warp * 32 + threadIdx.x % 32;
  const auto zero = as_pair(0, T());
  auto sum = zero, sum_y = zero, sum_z = zero, sum_w = zero;  // NaN after an infinity or NaN
#pragma unroll 4
  for (int i = 0; i < kWords; ++i) {
    const uint4 x = first[i * 64];
    sum = __hfma2(as_pair(x.x, T()), zero, sum);
    sum_y = __hfma2(as_pair(x.y, T()), zero, sum_y);
    sum_z = __hfma2(as_pair(x.z, T()), zero, sum_z);
    sum_w = __hfma2(as_pair(x.w, T()), zero, sum_w);
  }
  sum = __hadd2(__hadd2(sum, sum_y), __hadd2(sum_z, sum_w));
  if (__all_sync(~0u, __hbeq2(sum, sum))) return false;
  if constexpr (Config::seq_lens) {
    // What fills unused slots is nobody's value: consumers need not look for it.
    bool replaced = false;
    int key = (filter_warp * 32 + threadIdx.x % 32) / (kRowBytes / sizeof(uint4));
#pragma unroll 1
    for (int i = 0; i < kWords; ++i) {
      uint4& x = first[i * 64];
      replaced |=
          key < keys && !(is_finite(x.x) && is_finite(x.y) && is_finite(x.z) && is_finite(x.w));
      x = {finite_halves(x.x), finite_halves(x.y), finite_halves(x.z), finite_halves(x.w)};
      if (!Config::key_groups || i % kPanelsV == kPanelsV - 1) key += kGroupKeys;
      if (key >= kTileN) key -= kTileN;  // the next panel
    }
    ptx::fence_proxy_async();
    return __any_sync(~0u, replaced);
  }
  for (int i = 0; i < kWords; ++i) {
    uint4& x = first[i * 64];
    x = {finite_halves(x.x), finite_halves(x.y), finite_halves(x.z), finite_halves(x.w)};
  }
  ptx::fence_proxy_async();
  return true;
}

// The output of a tile whose queries see no key: zeros, and lse of the sink alone. Eight rows at a
// time.
__device__ __forceinline__ void write_empty_tile(const ForwardParams& params, const Tile& tile) {
  const int lane = threadIdx.x % 32;
  const int end =
      Config::pack_gqa ? tile.row + kTileM : min(tile.row + kTileM, tile.queries.length);
  for (int row = tile.row + lane / 4; row < end; row += 8) {
    if (Config::pack_gqa && !tile.exists(params, row)) continue;
    Out* const out = static_cast<Out*>(params.out) + tile.out_offset(params, row);
    for (int column = lane % 4 * 8; column < params.head_dim_v; column += 32)
#pragma unroll
      for (int i = 0; i < static_cast<int>(8 * sizeof(Out) / sizeof(uint4)); ++i)
        reinterpret_cast<uint4*>(out + column)[i] = uint4();
    int head = tile.head;
    if constexpr (Config::pack_gqa) head = tile.packed(params, row).head;
    const float* sinks = static_cast<const float*>(params.sinks);
    if constexpr (Config::split_kv) sinks = tile.split() == 0 ? sinks : nullptr;
    if (params.lse != nullptr && lane % 4 == 0)
      static_cast<float*>(params.lse)[tile.lse_offset(params, row)] =
          sinks == nullptr ? tile::negative_infinity() : sinks[head];
  }
}

// Loads rows of bias and mask, filters values, and writes tiles without keys.
__device__ __forceinline__ void filter_values(Smem& smem, const ForwardParams& params,
                                              const Sm90Params& sm90, int filter_warp) {
  tile::PipelineState<kStages> stage_v;
  tile::PipelineState<TileQueue::kSize> queue;
  unsigned rows_parity = 0;
  int number = 0;  // of the tile, modulo 2
  for (Tile tile = read_tile(smem, queue); tile.row >= 0; tile = read_tile(smem, queue)) {
    if (tile.empty()) {
      if (filter_warp == 0) write_empty_tile(params, tile);
      continue;
    }
    const Tile::Partial filtered = tile.filtered(params);
    bool replaced = false;
    for (int block = tile.block_end - 1; block >= tile.block_begin; --block) {
      if constexpr (Config::elementwise) {
        rows_parity ^= 1;
        for (int consumer = filter_warp; consumer < kWarpgroups; consumer += kFilterWarps) {
          ScoreRows& rows = score_rows(smem, consumer);
          ptx::mbarrier_wait(rows.empty, rows_parity);
          load_score_rows(rows, params, sm90, tile, tile.row + 64 * consumer, block * kTileN);
        }
      }
      ptx::mbarrier_wait(smem.full_v[stage_v.index], stage_v.parity);
      if (filtered.has(block))
        replaced |= replace_nonfinite(smem.v[stage_v.index], filter_warp,
                                      tile.keys.length - block * kTileN);
      if (threadIdx.x % 32 == 0) smem.replaced[number][filter_warp] = replaced;
      tile::arrive_warp(smem.filtered_v[stage_v.index]);
      tile::arrive_warp(smem.empty_v[stage_v.index]);  // keeps the filter in step with the ring
      stage_v.advance();
    }
    number ^= 1;
  }
}
