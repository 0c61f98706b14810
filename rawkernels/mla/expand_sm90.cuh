// The producing warps of mla/decode_sm90.cu where latents are codes: four warps for each buffer. A
// warp has 16 keys of a block, whose codes it reads into registers, expands to 16-bit numbers with
// their scale, and stores as TMA would have. What is rotated is copied by cp.async.
//
// A warp reads rows of codes, 16 a lane. Some rows are on their way while others are expanded, and
// L2 has been told of their lines a block before. There are no branches between them: the compiler
// is to overlap what they wait for. While a buffer is in use, its warps find out what comes next: a
// buffer is free for a short time only.
#pragma once

#include "mla/codes.cuh"
#include "mla/lookup.cuh"
#include "mla/produce_sm90.cuh"
#include "ptx/load.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/registers.cuh"

namespace mla {

// What a warp does not need while it loads keys, and its first lane counts on: codes take the
// registers.
struct BetweenSplits {
  Schedule schedule;
  tile::PipelineState<kQueue> queue;
  unsigned parity = 1;  // of the use before, of the warp's buffer
};
struct ExpanderSmem : Smem {
  BetweenSplits warps[kProducers];
  decoding::Split splits[kProducers];
  SplitKeys keys[kProducers];
  // Of the block that each warp expands, of 128 columns each.
  alignas(32) float scales[kProducers][kLatent / kScaleColumns][kWarpKeys];
};

template <int kFormat>
struct Expander {
  static constexpr int kRows = 4;  // on their way
  static constexpr int kPieces = kLatent / kScaleColumns;
  static_assert(kLatent == 32 * 16, "a lane has 16 codes of a row");
  static_assert(kPieces == 4 && kWarpKeys == 16, "lanes have two scales of a key each");

  ExpanderSmem& smem;
  const DecodeParams& params;
  const MlaParams& mla;
  int thread;  // read anew for each block: nothing that is worked out from it is kept
  KeyLookup<2 * kBlockKeys> keys = {params, mla, 0, smem.keys[warp()]};

  uint4 codes[kRows];               // of the rows that are expanded next
  StoredScale scales[kPieces / 2];  // of key lane % 16, columns 128 (lane / 16 + 2 i) on
  // Where this lane's key of the present block has its codes, in 16 bytes, or kNowhere; and where
  // what is rotated is.
  static constexpr unsigned kNowhere = ~0u;
  unsigned chunk, rope_chunk;

  // Of all producing warps: the first four have the first buffer's keys.
  __device__ __forceinline__ int warp() const { return thread / 32 % kProducers; }
  __device__ __forceinline__ int buffer() const { return warp() / kBufferWarps; }
  __device__ __forceinline__ int first_key() const { return warp() % kBufferWarps * kWarpKeys; }
  __device__ __forceinline__ int lane() const { return thread % 32; }
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
  __device__ __forceinline__ int own_row(int row) const { return row ^ lane() / 4 % 2; }

  // Asks for this lane's codes of a row; zeros for what does not exist.
  __device__ __forceinline__ void load(int i, unsigned chunk_of_lane, int row) {
    const unsigned its_chunk = __shfl_sync(~0u, chunk_of_lane, own_row(row));
    codes[i] = ptx::load_16_if(static_cast<const uint4*>(params.k) + (its_chunk + lane()),
                               its_chunk != kNowhere && lane() * 16 < params.head_dim_v);
  }
  __device__ __forceinline__ void load_scales(const Place& place) {
#pragma unroll
    for (int i = 0; i < kPieces / 2; ++i)
      scales[i].load(params, place.page, place.slot, lane() / kWarpKeys + 2 * i, place.has);
  }

  // Keys of a split come next.
  __device__ __forceinline__ void start(const decoding::Split& split) {
    keys.offset = buffer() * kBlockKeys + first_key() + lane() % kWarpKeys;
    keys.start(split);
    const Place first = keys.next();
    chunk = chunk_of(first);
    rope_chunk = rope_chunk_of(first);
    load_scales(first);
#pragma unroll
    for (int i = 0; i < kRows; ++i) load(i, chunk, i);
  }

  __device__ __forceinline__ void copy_rope() const {
    const unsigned column_chunk = lane() % 8u, first_row = lane() / 8u;
    const bool rotated = static_cast<int>(column_chunk * 8) < params.head_dim - params.head_dim_v;
    const unsigned to = ptx::shared_address(smem.k[buffer()][kRopePanel]) +
                        Panel::at(first_key() + first_row, column_chunk);
#pragma unroll 1  // or it spills
    for (int group = 0; group < kWarpKeys / 4; ++group) {
      const int row = group * 4 + first_row;
      const bool exists = __shfl_sync(~0u, chunk, row) != kNowhere;
      const unsigned its_chunk = __shfl_sync(~0u, rope_chunk, row) + column_chunk;
      // Rows r and r + 4 differ in where their chunks lie, rows r and r + 8 do not.
      ptx::cp_async_16((to ^ group % 2 * 64) + group * 4 * Panel::kRowBytes,
                       static_cast<const T*>(mla.rope) + its_chunk * 8ull, exists && rotated);
    }
    // The copies arrive themselves.
    ptx::Mbarrier& full = smem.full_k[buffer()][kRopePanel];
    ptx::mbarrier_arrive_after_copies(full);
    tile::arrive_warp(full);
  }

  // Tells L2 of a row that is read later: the first lanes of its codes, the others of what is
  // rotated.
  __device__ __forceinline__ void prefetch(const Place& place) const {
    if (!place.has) return;
    if (lane() < kWarpKeys)
      ptx::prefetch_bulk_l2(static_cast<const unsigned char*>(params.k) +
                                place.page * params.k_stride.page +
                                place.slot * params.k_stride.seq,
                            params.head_dim_v);
    else if (params.head_dim > params.head_dim_v)
      ptx::prefetch_bulk_l2(static_cast<const T*>(mla.rope) + place.page * mla.rope_stride.page +
                                place.slot * mla.rope_stride.seq,
                            (params.head_dim - params.head_dim_v) * sizeof(T));
  }

  // Loads the present block to the warp's buffer, whose use before has `parity`.
  __device__ __forceinline__ void load_block(unsigned parity) {
    thread = ptx::thread_index();
    float (&own_scales)[kPieces][kWarpKeys] = smem.scales[warp()];
#pragma unroll
    for (int i = 0; i < kPieces / 2; ++i)
      own_scales[lane() / kWarpKeys + 2 * i][lane() % kWarpKeys] =
          scales[i].value(params) * tile::Codes<kFormat>::kUnit;
    const Place later = keys.next();
    prefetch(later);
    load_scales(later);
    const unsigned next_chunk = chunk_of(later), next_rope_chunk = rope_chunk_of(later);
    ptx::mbarrier_wait(smem.empty_first[buffer()], parity);
    ptx::mbarrier_wait(smem.empty_second[buffer()], parity);
    copy_rope();
    rope_chunk = next_rope_chunk;
    const unsigned exist = __ballot_sync(~0u, chunk != kNowhere) & 0xffff;
    if (lane() == 0) smem.exist[buffer()][warp() % kBufferWarps] = exist;
    __syncwarp();
    const float* const factors = own_scales[lane() * 16 / kScaleColumns];
    unsigned to = lane() / 4 * kPanelBytes + Panel::at(first_key() + own_row(0), lane() % 4 * 2);
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
        *reinterpret_cast<uint4*>(smem.k[buffer()][0] + its_to) =
            expanded<T, kFormat>(front, factor);
        *reinterpret_cast<uint4*>(smem.k[buffer()][0] + (its_to ^ 16)) =
            expanded<T, kFormat>(back, factor);
        load(i, next, (first + kRows + i) % kWarpKeys);
      }
      to = (to + kRows * Panel::kRowBytes) ^ kRows % 8 * 16;
    }
    chunk = next_chunk;
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane() < kLatentPanels) ptx::mbarrier_arrive(smem.full_k[buffer()][lane()]);
  }
};

template <int kFormat>
__device__ __forceinline__ void expand(Smem& common, const DecodeParams& params,
                                       const MlaParams& mla) {
  static_assert(sizeof(ExpanderSmem) <= Config::smem_bytes, "Config has to ask for all of it");
  ExpanderSmem& smem = static_cast<ExpanderSmem&>(common);
  Expander<kFormat> expander = {smem, params, mla, ptx::thread_index()};
  BetweenSplits first;
  first.schedule.start(params);  // where there is no split, next() says so
  if (expander.lane() == 0) smem.warps[expander.warp()] = first;
  __syncwarp();
  while (true) {
    expander.thread = ptx::thread_index();
    BetweenSplits& state = smem.warps[expander.warp()];
    decoding::Split& split = smem.splits[expander.warp()];
    const bool found = expander.lane() == 0 && state.schedule.next(params, split);
    const bool exists = __any_sync(~0u, found);
    __syncwarp();
    const int pairs = put_work(smem, params, state.schedule, split, exists, state.queue);
    __syncwarp();
    if (pairs < 0) return;
    if (pairs > 0) expander.start(split);
    unsigned parity = state.parity;
#pragma unroll 1
    for (int left = pairs; left > 0; --left, parity ^= 1) expander.load_block(parity);
    __syncwarp();
    if (expander.lane() == 0) smem.warps[expander.warp()].parity = parity;
    __syncwarp();
  }
}

}  // namespace mla
