// The producing warps of mla/decode_sm90.cu where latents are codes: each of four warps has 16 keys
// of a block, whose codes it reads into registers, expands to 16-bit numbers with their scale, and
// stores as TMA would have. What is rotated is copied by cp.async.
//
// A warp's chain of instructions is what limits this, some 2,000 for two blocks of keys. So no load
// is waited for long: codes are asked for a panel ahead, and L2 has been told of their lines half a
// block or more before. Deeper than that, registers would spill.
#pragma once

#include "mla/codes.cuh"
#include "mla/lookup_sm90.cuh"
#include "mla/produce_sm90.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/registers.cuh"

namespace mla {

// What a warp does not need while it loads keys: codes take the registers.
struct BetweenSplits {
  Schedule schedule;
  tile::PipelineState<kQueue> queue;
  unsigned uses = 0;  // of both buffers in turn
};
struct ExpanderSmem : Smem {
  BetweenSplits warps[4];
  decoding::Split splits[4];
  SplitKeys keys[4];
};

template <int kFormat>
struct Expander {
  static constexpr int kWarpKeys = kBlockKeys / 4;
  static constexpr int kRowGroups = 4;  // of four rows, which a warp reads 64 columns of at a time
  static constexpr int kHalf = kLatentPanels / 2;
  static_assert(kHalf * 64 == 2 * kScaleColumns, "half of a block has two scales a key");

  ExpanderSmem& smem;
  const DecodeParams& params;
  const MlaParams& mla;
  const int thread;
  const int warp = thread / 32 % 4, lane = thread % 32;
  KeyLookup keys = {params, mla, warp * kWarpKeys + lane % kWarpKeys, smem.keys[warp]};

  Place here;               // this lane's key of the present block, or already of the next
  uint2 codes[kRowGroups];  // of the panel that is expanded next
  StoredScale scale;        // of a half's columns 128 (lane / 16) on, of key lane % 16
  // Where this lane reads the codes of rows group * 4 + lane / 8, in 16 bytes, or kNowhere.
  static constexpr unsigned kNowhere = ~0u;
  unsigned row_chunks[kRowGroups];

  // Which of the warp's keys of the present block exist.
  __device__ __forceinline__ unsigned exist() const {
    return __ballot_sync(~0u, here.has) & 0xffff;
  }

  // The rows that codes are read of.
  __device__ __forceinline__ void find_rows() {
    const long long at = here.page * params.k_stride.page + here.slot * params.k_stride.seq;
    const unsigned own_chunk = here.has ? static_cast<unsigned>(at >> 4) : kNowhere;
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group)
      row_chunks[group] = __shfl_sync(~0u, own_chunk, group * 4 + lane / 8);
  }

  // Asks for the codes of 64 columns of four rows; zeros for what does not exist.
  __device__ __forceinline__ void load(int group, int column) {
    codes[group] = {};
    const unsigned char* const row =
        static_cast<const unsigned char*>(params.k) + lane % 8 * 8 + row_chunks[group] * 16ull;
    if (row_chunks[group] != kNowhere && column < params.head_dim_v)
      codes[group] = __ldg(reinterpret_cast<const uint2*>(row + column));
  }
  __device__ __forceinline__ void load_own_scale(int half) {
    scale.load(params, here.page, here.slot, 2 * half + lane / kWarpKeys, here.has);
  }

  // Keys of a split come next.
  __device__ __forceinline__ void start(const decoding::Split& split) {
    keys.start(split);
    here = keys.next();
    find_rows();
    load_own_scale(0);
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) load(group, 0);
  }

  // Where this lane writes rows group * 4 + lane / 8 of a panel.
  __device__ __forceinline__ int place_of(int group) const {
    const int first = Panel::at(warp * kWarpKeys + lane / 8, lane % 8);
    return (first ^ group % 2 * 64) + group * 4 * Panel::kRowBytes;
  }

  // Expands a panel of the warp's rows, and asks for the codes of the panel that comes next, which
  // begins at a column.
  __device__ __forceinline__ void expand(int buffer, int panel, float own_scale, int next_column) {
    unsigned char* const to = smem.k[buffer][panel];
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const int owner = panel / 2 % 2 * kWarpKeys + group * 4 + lane / 8;
      const float factor = __shfl_sync(~0u, own_scale, owner);
      const uint4 numbers = expanded<T, kFormat>(codes[group], factor);
      load(group, next_column);
      *reinterpret_cast<uint4*>(to + place_of(group)) = numbers;
    }
    ptx::fence_proxy_async();
    tile::arrive_warp(smem.full_k[buffer][panel]);
  }

  __device__ __forceinline__ void copy_rope(int buffer) const {
    const long long at = here.page * mla.rope_stride.page + here.slot * mla.rope_stride.seq;
    const unsigned own_chunk = here.has ? static_cast<unsigned>(at >> 3) : kNowhere;
    const bool rotated = lane % 8 * 8 < params.head_dim - params.head_dim_v;
    const unsigned to = ptx::shared_address(smem.k[buffer][kRopePanel]);
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const int row = group * 4 + lane / 8;
      const unsigned chunk = __shfl_sync(~0u, own_chunk, row);
      ptx::cp_async_16(to + place_of(group),
                       static_cast<const T*>(mla.rope) + (chunk + lane % 8) * 8ull,
                       chunk != kNowhere && rotated);
    }
  }
  __device__ __forceinline__ void signal_rope(int buffer) const {
    ptx::cp_async_wait_all();
    ptx::fence_proxy_async();
    tile::arrive_warp(smem.full_k[buffer][kRopePanel]);
  }

  // Tells L2 of the lines of a block that is read later.
  __device__ __forceinline__ void prefetch() const {
    if (!here.has) return;
    const unsigned char* const row = static_cast<const unsigned char*>(params.k) +
                                     here.page * params.k_stride.page +
                                     here.slot * params.k_stride.seq;
    const int column = lane / kWarpKeys * 256;
    if (column < params.head_dim_v) ptx::prefetch_l2(row + column);
    if (column + 128 < params.head_dim_v) ptx::prefetch_l2(row + column + 128);
    if (lane < kWarpKeys && params.head_dim > params.head_dim_v)
      ptx::prefetch_l2(static_cast<const T*>(mla.rope) + here.page * mla.rope_stride.page +
                       here.slot * mla.rope_stride.seq);
  }

  // Loads the present block to a buffer, whose use before has `parity`.
  __device__ __forceinline__ void load_block(int buffer, unsigned parity) {
    const int rope_half = first_panels(buffer) == 5 ? 0 : 1;
    float own_scale = 0;
#pragma unroll 1
    for (int panel = 0; panel < kLatentPanels; ++panel) {
      const int half = panel / kHalf;
      if (panel % kHalf == 0) {
        ptx::mbarrier_wait((half == 0 ? smem.empty_first : smem.empty_second)[buffer], parity);
        if (half == rope_half) copy_rope(buffer);
        own_scale = scale.value(params) * tile::Codes<kFormat>::kUnit;
        if (half == 1) {
          const unsigned existing = exist();
          if (lane == 0) smem.exist[buffer][warp] = existing;
          here = keys.next();
          prefetch();
        }
        load_own_scale(1 - half);
      }
      const bool last = panel + 1 == kLatentPanels;
      if (last) find_rows();
      expand(buffer, panel, own_scale, last ? 0 : (panel + 1) * 64);
      if (panel % kHalf == kHalf - 1 && half == rope_half) signal_rope(buffer);
    }
  }
};

template <int kFormat>
__device__ __forceinline__ void expand(Smem& common, const DecodeParams& params,
                                       const MlaParams& mla) {
  static_assert(sizeof(ExpanderSmem) <= Config::smem_bytes, "Config has to ask for all of it");
  ExpanderSmem& smem = static_cast<ExpanderSmem&>(common);
  BetweenSplits state;
  state.schedule.start(params);  // where there is no split, next() says so
  while (true) {
    decoding::Split next_split;
    const bool exists = state.schedule.next(params, next_split);
    const int thread = ptx::thread_index();  // nothing that follows is worked out before
    Expander<kFormat> expander = {smem, params, mla, thread};
    BetweenSplits& stored = smem.warps[expander.warp];
    decoding::Split& split = smem.splits[expander.warp];
    if (expander.lane == 0) {
      stored = state;
      split = next_split;
    }
    __syncwarp();
    const int pairs = put_work(smem, params, stored.schedule, split, exists, stored.queue);
    __syncwarp();
    if (pairs < 0) return;
    if (pairs > 0) expander.start(split);
    unsigned use = stored.uses;
#pragma unroll 1
    for (int left = 2 * pairs; left > 0; --left, ++use)
      expander.load_block(use % 2, use / 2 % 2 ^ 1);
    if (expander.lane == 0) stored.uses = use;
    __syncwarp();
    state = stored;
    __syncwarp();
  }
}

}  // namespace mla
