// The producing warps of mla/decode_sm90.cu where latents are codes: each of four warps has 16 keys
// of a block, whose codes it reads into registers, expands to 16-bit numbers with their scale, and
// stores as TMA would have. What is rotated is copied by cp.async.
//
// A warp reads rows of codes, 16 a lane. Some rows are on their way while others are expanded, and
// L2 has been told of their lines a block before. There are no branches between them: the compiler
// is to overlap what they wait for.
#pragma once

#include "mla/codes.cuh"
#include "mla/lookup.cuh"
#include "mla/produce_sm90.cuh"
#include "ptx/load.cuh"
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
  // Of the block that each warp expands, of 128 columns each.
  alignas(64) float scales[4][kLatent / kScaleColumns][kBlockKeys / 4];
};

template <int kFormat>
struct Expander {
  static constexpr int kWarpKeys = kBlockKeys / 4;
  static constexpr int kRows = 4;  // on their way
  static constexpr int kPieces = kLatent / kScaleColumns;
  static_assert(kLatent == 32 * 16, "a lane has 16 codes of a row");
  static_assert(kPieces == 4 && kWarpKeys == 16, "lanes have two scales of a key each");

  ExpanderSmem& smem;
  const DecodeParams& params;
  const MlaParams& mla;
  const int thread;
  const int warp = thread / 32 % 4, lane = thread % 32;
  KeyLookup<kBlockKeys> keys = {params, mla, warp * kWarpKeys + lane % kWarpKeys, smem.keys[warp]};

  uint4 codes[kRows];               // of the rows that are expanded next
  StoredScale scales[kPieces / 2];  // of key lane % 16, columns 128 (lane / 16 + 2 i) on
  // Where this lane's key of the present block has its codes, in 16 bytes, or kNowhere; and where
  // what is rotated is.
  static constexpr unsigned kNowhere = ~0u;
  unsigned chunk, rope_chunk;

  __device__ __forceinline__ unsigned chunk_of(const Place& place) const {
    const long long at = place.page * params.k_stride.page + place.slot * params.k_stride.seq;
    return place.has ? static_cast<unsigned>(at >> 4) : kNowhere;
  }
  __device__ __forceinline__ unsigned rope_chunk_of(const Place& place) const {
    return static_cast<unsigned>(
        place.page * mla.rope_stride.page + place.slot * mla.rope_stride.seq >> 3);
  }

  // Which row is this lane's `row`-th: two neighbouring rows are swapped in every second panel, so
  // that no two lanes that store at the same time meet in a bank.
  __device__ __forceinline__ int own_row(int row) const { return row ^ lane / 4 % 2; }

  // Asks for this lane's codes of a row; zeros for what does not exist.
  __device__ __forceinline__ void load(int i, unsigned chunk_of_lane, int row) {
    const unsigned its_chunk = __shfl_sync(~0u, chunk_of_lane, own_row(row));
    codes[i] = ptx::load_16_if(static_cast<const uint4*>(params.k) + (its_chunk + lane),
                               its_chunk != kNowhere && lane * 16 < params.head_dim_v);
  }
  __device__ __forceinline__ void load_scales(const Place& place) {
#pragma unroll
    for (int i = 0; i < kPieces / 2; ++i)
      scales[i].load(params, place.page, place.slot, lane / kWarpKeys + 2 * i, place.has);
  }

  // Keys of a split come next.
  __device__ __forceinline__ void start(const decoding::Split& split) {
    keys.start(split);
    const Place first = keys.next();
    chunk = chunk_of(first);
    rope_chunk = rope_chunk_of(first);
    load_scales(first);
#pragma unroll
    for (int i = 0; i < kRows; ++i) load(i, chunk, i);
  }

  __device__ __forceinline__ void copy_rope(int buffer) const {
    const bool rotated = lane % 8 * 8 < params.head_dim - params.head_dim_v;
    const unsigned to = ptx::shared_address(smem.k[buffer][kRopePanel]);
#pragma unroll
    for (int group = 0; group < kWarpKeys / 4; ++group) {
      const int row = group * 4 + lane / 8;
      const bool exists = __shfl_sync(~0u, chunk, row) != kNowhere;
      const unsigned its_chunk = __shfl_sync(~0u, rope_chunk, row);
      ptx::cp_async_16(to + Panel::at(warp * kWarpKeys + row, lane % 8),
                       static_cast<const T*>(mla.rope) + (its_chunk + lane % 8) * 8ull,
                       exists && rotated);
    }
  }

  // Tells L2 of the lines of a block that is read later.
  __device__ __forceinline__ void prefetch(const Place& place) const {
    if (!place.has) return;
    const unsigned char* const row = static_cast<const unsigned char*>(params.k) +
                                     place.page * params.k_stride.page +
                                     place.slot * params.k_stride.seq;
    const int column = lane / kWarpKeys * 256;
    if (column < params.head_dim_v) ptx::prefetch_l2(row + column);
    if (column + 128 < params.head_dim_v) ptx::prefetch_l2(row + column + 128);
    if (lane < kWarpKeys && params.head_dim > params.head_dim_v)
      ptx::prefetch_l2(static_cast<const T*>(mla.rope) + place.page * mla.rope_stride.page +
                       place.slot * mla.rope_stride.seq);
  }

  // Loads the present block to a buffer, whose use before has `parity`.
  __device__ __forceinline__ void load_block(int buffer, unsigned parity) {
    ptx::mbarrier_wait(smem.empty_first[buffer], parity);
    ptx::mbarrier_wait(smem.empty_second[buffer], parity);
    copy_rope(buffer);
    const unsigned exist = __ballot_sync(~0u, chunk != kNowhere) & 0xffff;
    if (lane == 0) smem.exist[buffer][warp] = exist;
    float (&own_scales)[kPieces][kWarpKeys] = smem.scales[warp];
#pragma unroll
    for (int i = 0; i < kPieces / 2; ++i)
      own_scales[lane / kWarpKeys + 2 * i][lane % kWarpKeys] =
          scales[i].value(params) * tile::Codes<kFormat>::kUnit;
    const Place later = keys.next();
    prefetch(later);
    load_scales(later);
    const unsigned next_chunk = chunk_of(later);
    rope_chunk = rope_chunk_of(later);
    __syncwarp();
    const float* const factors = own_scales[lane * 16 / kScaleColumns];
    unsigned to = lane / 4 * kPanelBytes + Panel::at(warp * kWarpKeys + own_row(0), lane % 4 * 2);
#pragma unroll 1
    for (int first = 0; first < kWarpKeys; first += kRows) {
      const unsigned next = first + kRows == kWarpKeys ? next_chunk : chunk;
      to = ptx::opaque(to);  // where each row is stored is no register of its own
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float factor = factors[own_row(first + i)];
        const uint2 front = {codes[i].x, codes[i].y}, back = {codes[i].z, codes[i].w};
        // As Panel::at, where the bits of a row and of a chunk are apart.
        const unsigned its_to = to ^ (i * Panel::kRowBytes | i % 8 * 16);
        *reinterpret_cast<uint4*>(smem.k[buffer][0] + its_to) = expanded<T, kFormat>(front, factor);
        *reinterpret_cast<uint4*>(smem.k[buffer][0] + (its_to ^ 16)) =
            expanded<T, kFormat>(back, factor);
        load(i, next, (first + kRows + i) % kWarpKeys);
      }
      to = (to + kRows * Panel::kRowBytes) ^ kRows % 8 * 16;
    }
    chunk = next_chunk;
    ptx::cp_async_wait_all();
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane < kPanels) ptx::mbarrier_arrive(smem.full_k[buffer][lane]);
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
