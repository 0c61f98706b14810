// The producing warps of mla/decode_sm90.cu where keys lie apart: chosen tokens, and pages too
// small for TMA's boxes. Each of four warps copies 16 keys of a block by cp.async, and says which
// exist. No warp waits for what it copies: each lane's copies arrive at the mbarriers themselves.
// Prefetching rows into L2 ahead of the copies made it slower, by 3 to 7%.
#pragma once

#include "mla/lookup.cuh"
#include "mla/produce_sm90.cuh"
#include "ptx/registers.cuh"

namespace mla {

struct GatherSmem : Smem {
  SplitKeys keys[4];
  Schedule schedules[4];  // of each warp, which has no registers for it between splits
};

struct Gatherer {
  static constexpr int kRowGroups = 4;  // of four rows, which a warp copies at a time
  static_assert(kWarpKeys == kRowGroups * 4, "a warp copies all of its keys");

  GatherSmem& smem;
  const DecodeParams& params;
  const MlaParams& mla;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  KeyLookup<kBlockKeys> keys = {params, mla, warp * kWarpKeys + lane % kWarpKeys, smem.keys[warp]};
  // Where a key's row is in the pages, in 16 bytes: half the registers of an address.
  struct Row {
    unsigned latent, rope;
  };
  static constexpr unsigned kNowhere = ~0u;
  Row here;  // of this lane's key of the present block

  // Keys of a split come next.
  __device__ __forceinline__ void start(const decoding::Split& split) {
    keys.start(split);
    advance();
  }
  // To the next block.
  __device__ __forceinline__ void advance() {
    const Place place = keys.found();
    here = {kNowhere, kNowhere};
    if (place.has)
      here = {static_cast<unsigned>(
                  (place.page * params.k_stride.page + place.slot * params.k_stride.seq) / 8),
              static_cast<unsigned>(
                  (place.page * mla.rope_stride.page + place.slot * mla.rope_stride.seq) / 8)};
    keys.ask();
  }

  // Copies half of the present block to a buffer.
  template <int kBuffer, int kHalf>
  __device__ __forceinline__ void copy() const {
    constexpr int kBegin = kHalf * first_panels(kBuffer);
    constexpr int kEnd = kHalf == 0 ? first_panels(kBuffer) : kPanels;
    const int thread = ptx::thread_index();  // no address is kept for the next block
    const int chunk = thread % 8, first_row = thread % 32 / 8;
    const int rope_columns = params.head_dim - params.head_dim_v - chunk * 8;
    const unsigned to = ptx::shared_address(smem.k[kBuffer][0]) +
                        Panel::at(thread / 32 % 4 * kWarpKeys + first_row, chunk);
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const int row = group * 4 + first_row;
      // Rows r and r + 4 differ in where their chunks lie, rows r and r + 8 do not.
      const unsigned its_to = (to ^ group % 2 * 64) + group * 4 * Panel::kRowBytes;
      const unsigned its_latent = __shfl_sync(~0u, here.latent, row);
      const bool copied = its_latent != kNowhere;
      const T* const latent = static_cast<const T*>(params.k) + (its_latent + chunk) * 8ull;
#pragma unroll
      for (int i = kBegin; i < kEnd; ++i) {
        const int panel = panel_in_order(kBuffer, i);
        if (panel == kRopePanel) continue;
        ptx::cp_async_16(its_to + panel * kPanelBytes, latent + panel * 64,
                         copied && panel * 64 < params.head_dim_v);
      }
      if (kHalf == 1) {  // which half the rotated panel is in
        const T* const rope =
            static_cast<const T*>(mla.rope) + (__shfl_sync(~0u, here.rope, row) + chunk) * 8ull;
        ptx::cp_async_16(its_to + kRopePanel * kPanelBytes, rope, copied && rope_columns > 0);
      }
    }
    // Lane 0 arrives itself, too: what it has written is seen with what has been copied.
    ptx::Mbarrier& full = smem.full_k[kBuffer][panel_in_order(kBuffer, kBegin)];
    ptx::mbarrier_arrive_after_copies(full);
    tile::arrive_warp(full);
  }
  // Copies the present block to a buffer, a half as soon as it is free, and goes on to the next.
  template <int kBuffer>
  __device__ __forceinline__ void load(unsigned parity) {
    const unsigned exist = __ballot_sync(~0u, here.latent != kNowhere) & 0xffff;
    ptx::mbarrier_wait((kBuffer == 0 ? smem.empty_first : smem.empty_second)[kBuffer], parity);
    copy<kBuffer, 0>();
    ptx::mbarrier_wait((kBuffer == 0 ? smem.empty_second : smem.empty_first)[kBuffer], parity);
    if (lane == 0) *reinterpret_cast<unsigned short*>(smem.exist[kBuffer] + warp * 2) = exist;
    copy<kBuffer, 1>();
    advance();
  }
};

__device__ __forceinline__ void gather(Smem& common, const DecodeParams& params,
                                       const MlaParams& mla, const Maps& maps) {
  static_assert(sizeof(GatherSmem) <= Config::smem_bytes, "Config has to ask for all of it");
  GatherSmem& smem = static_cast<GatherSmem&>(common);
  Gatherer gatherer = {smem, params, mla};
  tile::PipelineState<kQueue> queue;
  unsigned parities = 0;  // bits: of each buffer's present use, then of the one before; of Q's
  // The last warp asks for the queries: of the first split at once, of others behind their first
  // keys, whose buffer is free before Q is.
  const bool asks = gatherer.warp == kProducers - 1;
  bool asks_first = asks;
  Schedule first;
  first.start(params);  // where there is no split, next() says so
  ptx::bar_sync(kReady, kReadyThreads);
  if (gatherer.lane == 0) smem.schedules[gatherer.warp] = first;
  while (true) {
    __syncwarp();
    Schedule schedule = smem.schedules[gatherer.warp];
    decoding::Split split;
    const bool exists = schedule.next(params, split);
    const int blocks = put_work(common, params, mla, schedule, split, exists, queue);
    __syncwarp();
    if (!exists) return;
    if (gatherer.lane == 0) smem.schedules[gatherer.warp] = schedule;
    asks_first |= asks && blocks == 0;
    if (asks_first) ask_queries(common, params, mla, maps, split, parities >> 2);
    if (blocks > 0) gatherer.start(split);
#pragma unroll 1
    for (int block = 0; block < blocks; block += 2) {
      gatherer.load<0>((parities ^= 1) & 1);
      if (asks && !asks_first && block == 0)
        ask_queries(common, params, mla, maps, split, parities >> 2);
      if (block + 1 < blocks) gatherer.load<1>((parities ^= 2) >> 1 & 1);
    }
    asks_first = false;
    parities ^= 4;
  }
}

}  // namespace mla
