// The producing warps of attention/forward_sm90.cu: they find tiles, load, and guard.
#pragma once

#include "attention/layout_sm90.cuh"
#include "attention/score_sm90.cuh"
#include "ptx/tma.cuh"

// Brings `kPanels` panels of rows of one head when the consumers have left their place. All lanes
// of a warp together.
template <int kPanels, int kPanelBytes>
__device__ __forceinline__ void load(unsigned char* place, const ptx::TensorMap& map,
                                     ptx::Mbarrier& full, ptx::Mbarrier& empty, unsigned parity,
                                     const Sequence& sequence, int row, int head,
                                     unsigned long long cache_hint) {
  ptx::mbarrier_wait(empty, parity ^ 1);
  if (threadIdx.x % 32 == 0) {
    ptx::mbarrier_arrive_expect_tx(full, kPanels * kPanelBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      unsigned char* const to = place + panel * kPanelBytes;
      const int column = panel * kPanelColumns, shifted = sequence.shift + row;
      if constexpr (Config::varlen)
        ptx::tma_load(to, map, full, column, shifted, head, sequence.outer, kFarRows, cache_hint);
      else
        ptx::tma_load(to, map, full, column, shifted, head, sequence.outer, cache_hint);
    }
  }
  __syncwarp();
}

// For all warps that work on it: called by the warp that has found it.
__device__ __forceinline__ void put_tile(Smem& smem, Ring<TileQueue::kSize>& ring,
                                         const Tile& tile) {
  ptx::mbarrier_wait(smem.queue.empty[ring.index], ring.parity ^ 1);
  if (threadIdx.x % 32 == 0) {
    smem.queue.tiles[ring.index] = tile;
    ptx::mbarrier_arrive(smem.queue.full[ring.index]);
  }
  __syncwarp();
  ring.advance();
}

// The next tile that the finding warp has put into the queue.
__device__ __forceinline__ Tile read_tile(Smem& smem, Ring<TileQueue::kSize>& ring) {
  ptx::mbarrier_wait(smem.queue.full[ring.index], ring.parity);
  Tile tile = smem.queue.tiles[ring.index];
  int (&words)[sizeof(Tile) / 4] = reinterpret_cast<int (&)[sizeof(Tile) / 4]>(tile);
#pragma unroll
  for (int& word : words)
    word = __shfl_sync(~0u, word, 0);  // the compiler is to know that it is the warp's
  arrive_warp(smem.queue.empty[ring.index]);
  ring.advance();
  return tile;
}

__device__ __forceinline__ void load_keys_and_values(Smem& smem, const Sm90Params& sm90) {
  Ring<kStages> ring_k, ring_v;
  Ring<TileQueue::kSize> ring;
  int pending = -1;  // the block whose keys have been asked for, and whose values have not
  Sequence keys;
  int head;
  const auto load_values = [&] {
    load<kPanelsV, kPanelBytesK>(smem.v[ring_v.index], sm90.v, smem.full_v[ring_v.index],
                                 smem.empty_v[ring_v.index], ring_v.parity, keys, pending * kTileN,
                                 head, ptx::kEvictLast);
    ring_v.advance();
    pending = -1;
  };
  for (Tile tile = read_tile(smem, ring); tile.row >= 0; tile = read_tile(smem, ring)) {
    // The guards wait for the values before they read on, and the queue for the guards: values must
    // not wait for a tile that has keys, as it may be further away than the queue is long.
    if (kGuards > 0 && tile.empty() && pending >= 0) load_values();
    for (int block = tile.block_end - 1; block >= tile.block_begin; --block) {
      load<kPanelsK, kPanelBytesK>(smem.k[ring_k.index], sm90.k, smem.full_k[ring_k.index],
                                   smem.empty_k[ring_k.index], ring_k.parity, tile.keys,
                                   block * kTileN, tile.head_kv, ptx::kEvictLast);
      ring_k.advance();
      if (pending >= 0)
        load_values();  // consumers ask for the values of a block after the keys of the next
      pending = block;
      keys = tile.keys;
      head = tile.head_kv;
    }
  }
  if (pending >= 0) load_values();
}

// Finds tiles for all, and loads their queries.
__device__ __forceinline__ void load_queries(Smem& smem, const ForwardParams& params,
                                             const Sm90Params& sm90) {
  Ring<kSlots> slots;
  Ring<TileQueue::kSize> ring;
  WalkOf<Config::varlen>::Type walk(params, sm90);
  while (true) {
    const Tile tile = walk.next();
    put_tile(smem, ring, tile);
    if (tile.row < 0) break;
    if (tile.empty()) continue;
    for (int consumer = 0; consumer < kWarpgroups; ++consumer)
      load<kPanelsK, kPanelBytesQ>(smem.q[slots.index][consumer], sm90.q,
                                   smem.full_q[slots.index][consumer],
                                   smem.empty_q[slots.index][consumer], slots.parity, tile.queries,
                                   tile.row + 64 * consumer, tile.head, ptx::kEvictFirst);
    slots.advance();
  }
}

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

// One guard's half of the values of a block: whether it had any that is not finite, which it has
// replaced by 0.
__device__ __forceinline__ bool clean_values(unsigned char* values, int guard) {
  constexpr int kWords =
      kPanelsV * kPanelBytesK / sizeof(uint4) / 64;  // of a lane: it takes one in 64
  uint4* const first = reinterpret_cast<uint4*>(values) + guard * 32 + threadIdx.x % 32;
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
  for (int i = 0; i < kWords; ++i) {
    uint4& x = first[i * 64];
    x = {finite_halves(x.x), finite_halves(x.y), finite_halves(x.z), finite_halves(x.w)};
  }
  ptx::fence_proxy_async();
  return true;
}

// The output of a tile whose queries see no key: zeros, and the sink alone. Eight rows at a time.
__device__ __forceinline__ void write_nothing(const ForwardParams& params, const Tile& tile) {
  const int lane = threadIdx.x % 32, end = min(tile.row + kTileM, tile.queries.length);
  for (int row = tile.row + lane / 4; row < end; row += 8) {
    T* const out = static_cast<T*>(params.out) + tile.out_offset(params, row);
    for (int column = lane % 4 * 8; column < params.head_dim_v; column += 32)
      *reinterpret_cast<uint4*>(out + column) = uint4();
    if (params.lse != nullptr && lane % 4 == 0)
      static_cast<float*>(params.lse)[tile.lse_offset(params, row)] =
          params.sinks == nullptr ? tile::negative_infinity()
                                  : static_cast<const float*>(params.sinks)[tile.head];
  }
}

// Brings rows of bias and mask, checks values, and writes tiles without keys.
__device__ __forceinline__ void guard_values(Smem& smem, const ForwardParams& params,
                                             const Sm90Params& sm90, int guard) {
  Ring<kStages> ring_v;
  Ring<TileQueue::kSize> ring;
  unsigned rows_parity = 0;
  int number = 0;  // of the tile, modulo 2
  for (Tile tile = read_tile(smem, ring); tile.row >= 0; tile = read_tile(smem, ring)) {
    if (tile.empty()) {
      if (guard == 0) write_nothing(params, tile);
      continue;
    }
    const Tile::Partial guarded = tile.guarded(params);
    bool cleaned = false;
    for (int block = tile.block_end - 1; block >= tile.block_begin; --block) {
      if constexpr (Config::elementwise) {
        rows_parity ^= 1;
        for (int consumer = guard; consumer < kWarpgroups; consumer += kGuards) {
          ScoreRows& rows = score_rows(smem, consumer);
          ptx::mbarrier_wait(rows.empty, rows_parity);
          load_score_rows(rows, params, sm90, tile, tile.row + 64 * consumer, block * kTileN);
        }
      }
      ptx::mbarrier_wait(smem.full_v[ring_v.index], ring_v.parity);
      if (guarded.has(block)) cleaned |= clean_values(smem.v[ring_v.index], guard);
      if (threadIdx.x % 32 == 0) smem.cleaned[number][guard] = cleaned;
      arrive_warp(smem.checked_v[ring_v.index]);
      arrive_warp(smem.empty_v[ring_v.index]);  // keeps the guards in step with the ring
      ring_v.advance();
    }
    number ^= 1;
  }
}
