// The producing warps of mla/decode_sm90.cu where keys lie apart: chosen tokens, and pages too
// small for TMA's boxes. Each of four warps copies 16 keys of a block by cp.async, and says which
// exist.
#pragma once

#include "mla/produce_sm90.cuh"

namespace mla {

struct Gatherer {
  static constexpr int kRowGroups = 4;  // of four rows, which a warp copies at a time
  static constexpr int kWarpKeys = kBlockKeys / 4;

  Smem& smem;
  const DecodeParams& params;
  const MlaParams& mla;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const kvcache::PageTable table = page_table(params);

  Tokens tokens;
  int begin = 0, end = 0;        // keys of the split
  int pending = -1;              // half of a buffer that is being copied: 2 buffer + half
  long long latent_at, rope_at;  // of the next block's key of this lane
  bool has;                      // … which exists

  // Keys of a split come next, from `first` on.
  __device__ __forceinline__ void start(const decoding::Split& split) {
    tokens = tokens_of(params, mla, split.seq.index);
    begin = split.begin;
    end = split.end;
    find(split.origin);
  }

  // Looks up this lane's key of the block from `first` on.
  __device__ __forceinline__ void find(int first) {
    const int key = first + warp * kWarpKeys + lane % kWarpKeys;
    has = key >= begin && key < end;
    const int token = has ? tokens.of_key(key) : 0;
    has = has && tokens.has(token);
    const int there = has ? token : 0;
    const int page = has ? table.page(tokens.sequence, there) : 0, slot = table.slot(there);
    latent_at = page * params.k_stride.page + slot * params.k_stride.seq;
    rope_at = page * mla.rope_stride.page + slot * mla.rope_stride.seq;
  }

  // Waits until a half of a buffer is free. What is being copied is finished first if that takes
  // a while: consumers may need it to free anything.
  __device__ __forceinline__ void acquire(ptx::Mbarrier& empty, unsigned parity) {
    if (__all_sync(~0u, ptx::mbarrier_try_wait(empty, parity))) return;
    finish();
    ptx::mbarrier_wait(empty, parity);
  }

  // The half that is being copied, if any, is there.
  __device__ __forceinline__ void finish() {
    ptx::cp_async_wait<0>();
    signal();
  }
  __device__ __forceinline__ void signal() {
    if (pending < 0) return;
    ptx::fence_proxy_async();
    __syncwarp();
    const int buffer = pending / 2, half = pending % 2;
    const int split = first_panels(buffer);
    for (int i = half * split; i < (half == 0 ? split : kPanels); ++i)
      if (lane == 0) ptx::mbarrier_arrive(smem.full_k[buffer][panel_in_order(buffer, i)]);
    pending = -1;
  }

  // Copies half of a block to a buffer, of keys `exist`, of which a lane has the address of one;
  // the half before may still be under way.
  template <int kBuffer, int kHalf>
  __device__ __forceinline__ void copy(long long own_latent, long long own_rope, unsigned exist) {
    constexpr int kSplit = first_panels(kBuffer);
    const int rope_dim = params.head_dim - params.head_dim_v;
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const int row = group * 4 + lane / 8;
      const T* const latent =
          static_cast<const T*>(params.k) + __shfl_sync(~0u, own_latent, row) + lane % 8 * 8;
      const T* const rope =
          static_cast<const T*>(mla.rope) + __shfl_sync(~0u, own_rope, row) + lane % 8 * 8;
      const bool copied = exist >> row & 1;
#pragma unroll
      for (int i = kHalf * kSplit; i < (kHalf == 0 ? kSplit : kPanels); ++i) {
        const int panel = panel_in_order(kBuffer, i);
        const bool rotated = panel == kRopePanel;
        const int columns = rotated ? rope_dim - lane % 8 * 8 : params.head_dim_v - panel * 64;
        const unsigned to = ptx::shared_address(smem.k[kBuffer][panel]) +
                            Panel::at(warp * kWarpKeys + row, lane % 8);
        ptx::cp_async_16(to, rotated ? rope : latent + panel * 64, copied && columns > 0);
      }
    }
    ptx::cp_async_commit();
    if (pending >= 0) {
      ptx::cp_async_wait<1>();
      signal();
    }
    pending = 2 * kBuffer + kHalf;
  }

  // Copies a block to a buffer, and looks up the keys of the next.
  template <int kBuffer>
  __device__ __forceinline__ void load(int first, unsigned parity) {
    const unsigned exist = __ballot_sync(~0u, has) & 0xffff;
    const long long latent = latent_at, rope = rope_at;
    acquire(smem.empty_first[kBuffer], parity);
    copy<kBuffer, 0>(latent, rope, exist);
    find(first + kBlockKeys);
    acquire(smem.empty_second[kBuffer], parity);
    if (lane == 0) smem.exist[kBuffer][warp] = exist;
    copy<kBuffer, 1>(latent, rope, exist);
  }
};

__device__ __forceinline__ void gather(Smem& smem, const DecodeParams& params,
                                       const MlaParams& mla) {
  Schedule schedule;
  Gatherer gatherer = {smem, params, mla};
  tile::PipelineState<kQueue> queue;
  unsigned parity = 0;
  bool exists = schedule.start(params);
  while (true) {
    decoding::Split split;
    exists = exists && schedule.next(params, split);
    const int pairs = put_work(smem, params, schedule, split, exists, queue);
    __syncwarp();
    if (!exists) return;
    if (pairs > 0) gatherer.start(split);
    int first = split.origin;
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair, parity ^= 1, first += 2 * kBlockKeys) {
      gatherer.load<0>(first, parity ^ 1);
      gatherer.load<1>(first + kBlockKeys, parity ^ 1);
    }
    gatherer.finish();
  }
}

}  // namespace mla
