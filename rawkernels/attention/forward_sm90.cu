// Attention forward on Hopper: out = softmax(scale * Q K^T) V with wgmma, TMA and specialised warps.
//
//   q (batch, seqlen_q, heads_q, head_dim), k and v with heads_kv heads, out; float16 or bfloat16; 16-byte strides.
//   One block an SM, walking over tiles of 64 * Config::warpgroups queries of one head.
//   Warpgroup 0 serves: warp 0 brings K and V, block after block of keys through a ring of stages; warp 1 + w brings the
//   64 queries of consumer w and takes their output away. Warpgroups 1 and on consume: they compute, 64 queries each.
#include "attention/params.cuh"
#include "attention/work_sm90.cuh"
#include "ptx/bar.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/softmax.cuh"

using T = Config::dtype;

constexpr int kWarpgroups = Config::warpgroups;  // that consume
constexpr int kTileM = 64 * kWarpgroups;
constexpr int kTileN = Config::tile_n;
constexpr int kHeadDim = Config::head_dim;      // of q and k, padded: the copy engine fills with zeros
constexpr int kHeadDimV = Config::head_dim_v;
constexpr int kPanels = (kHeadDim + 63) / 64;   // a tile lies in shared memory as panels of 64 columns, 128 bytes a row
constexpr int kPanelsV = (kHeadDimV + 63) / 64;
constexpr int kPanelColumns = 64;
constexpr int kRowBytes = 128;
constexpr int kPanelBytesQ = 64 * kRowBytes;
constexpr int kPanelBytesK = kTileN * kRowBytes;
constexpr int kStages = Config::stages;
constexpr int kSlots = Config::q_slots;
constexpr int kSlotPanels = kPanels > kPanelsV ? kPanels : kPanelsV;

// Registers of a thread: the block has 65536, and gets them evenly at first.
constexpr int kProducerRegisters = kWarpgroups == 1 ? 56 : kWarpgroups == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kWarpgroups == 1 ? 256 : kWarpgroups == 2 ? 232 : 160;

struct Smem {
  // Queries of one consumer; their output later, as no other warp reads them.
  alignas(1024) unsigned char q[kSlots][kWarpgroups][kSlotPanels * kPanelBytesQ];
  alignas(1024) unsigned char k[kStages][kPanels * kPanelBytesK];
  alignas(1024) unsigned char v[kStages][kPanelsV * kPanelBytesK];
  ptx::Mbarrier full_k[kStages], full_v[kStages];    // the copy engine's bytes -> consumers
  ptx::Mbarrier empty_k[kStages], empty_v[kStages];  // every consumer warp -> loader
  ptx::Mbarrier full_q[kSlots][kWarpgroups];         // the copy engine's bytes -> one consumer
  ptx::Mbarrier full_o[kSlots][kWarpgroups];         // one consumer's warps -> its warp of the producers
};

static_assert(sizeof(Smem) <= Config::smem_bytes, "Config::smem_bytes must hold Smem");
static_assert(Config::threads == 128 * (kWarpgroups + 1), "one warpgroup serves, the others consume");
static_assert(kWarpgroups <= 3, "warps 1 to 3 of the serving warpgroup serve a consumer each");
static_assert(kTileN % 16 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "wgmma multiplies by steps of 16");
static_assert(kPanelBytesK % 1024 == 0, "panels start where the 128-byte swizzle does");

// Which stage of a ring, and the parity of its current use.
template <int kSize>
struct Ring {
  int index = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kSize) {
      index = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ void arrive_warp(ptx::Mbarrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// Brings a block of keys, or of values, when its stage is free.
template <int kCount>
__device__ __forceinline__ void load_block(unsigned char* stage, const ptx::TensorMap& map, ptx::Mbarrier& full,
                                           ptx::Mbarrier& empty, unsigned parity, const Sequence& seq, int row, int head) {
  ptx::mbarrier_wait(empty, parity ^ 1);
  ptx::mbarrier_arrive_expect_tx(full, kCount * kPanelBytesK);
#pragma unroll
  for (int panel = 0; panel < kCount; ++panel)
    ptx::tma_load(stage + panel * kPanelBytesK, map, full, panel * kPanelColumns, seq.shift + row, head, seq.outer,
                  ptx::kEvictLast);
}

__device__ __forceinline__ void load_keys_and_values(Smem& smem, const ForwardParams& params, const TensorMaps& maps) {
  Ring<kStages> ring;
  for (Work work(params); work.valid(); work.next(params)) {
    const Tile tile = work.tile(params);
    Ring<kStages> ring_v = ring;
    for (int block = tile.block_end - 1; block >= tile.block_begin; --block) {
      load_block<kPanels>(smem.k[ring.index], maps.k, smem.full_k[ring.index], smem.empty_k[ring.index], ring.parity,
                          tile.keys, block * kTileN, tile.head_kv);
      ring.advance();
      // The consumers ask for the values of a block after the keys of the next.
      if (block != tile.block_end - 1) {
        load_block<kPanelsV>(smem.v[ring_v.index], maps.v, smem.full_v[ring_v.index], smem.empty_v[ring_v.index],
                             ring_v.parity, tile.keys, (block + 1) * kTileN, tile.head_kv);
        ring_v.advance();
      }
    }
    if (tile.block_begin < tile.block_end)
      load_block<kPanelsV>(smem.v[ring_v.index], maps.v, smem.full_v[ring_v.index], smem.empty_v[ring_v.index],
                           ring_v.parity, tile.keys, tile.block_begin * kTileN, tile.head_kv);
  }
}

__device__ __forceinline__ void load_queries(Smem& smem, const ForwardParams& params, const TensorMaps& maps,
                                             const Tile& tile, int slot, int consumer) {
  ptx::Mbarrier& full = smem.full_q[slot][consumer];
  ptx::mbarrier_arrive_expect_tx(full, kPanels * kPanelBytesQ);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel)
    ptx::tma_load(smem.q[slot][consumer] + panel * kPanelBytesQ, maps.q, full, panel * kPanelColumns,
                  tile.queries.shift + tile.row + 64 * consumer, tile.head, tile.queries.outer, ptx::kEvictFirst);
}

// Brings queries as far ahead as there are slots; a slot is free again once the output that took its place has been read.
__device__ __forceinline__ void serve_consumer(Smem& smem, const ForwardParams& params, const TensorMaps& maps, int consumer) {
  Work ahead(params);
  for (int slot = 0; slot < kSlots && ahead.valid(); ++slot, ahead.next(params))
    load_queries(smem, params, maps, ahead.tile(params), slot, consumer);
  Ring<kSlots> ring;
  for (Work work(params); work.valid(); work.next(params)) {
    const Tile tile = work.tile(params);
    ptx::mbarrier_wait(smem.full_o[ring.index][consumer], ring.parity);
#pragma unroll
    for (int panel = 0; panel < kPanelsV; ++panel)
      ptx::tma_store(maps.out, smem.q[ring.index][consumer] + panel * kPanelBytesQ, panel * kPanelColumns,
                     tile.queries.shift + tile.row + 64 * consumer, tile.head, tile.queries.outer);
    ptx::bulk_commit_group();
    ptx::bulk_wait_group_read<0>();
    if (ahead.valid()) {
      load_queries(smem, params, maps, ahead.tile(params), ring.index, consumer);
      ahead.next(params);
    }
    ring.advance();
  }
}

// S = Q K^T for 64 queries and a block of keys: issued, not waited for.
__device__ __forceinline__ void multiply_keys(float (&s)[kTileN / 2], const unsigned char* q, const unsigned char* k) {
  const unsigned long long a = ptx::wgmma_descriptor(q, 0, 1024);
  const unsigned long long b = ptx::wgmma_descriptor(k, 0, 1024);
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step)
    ptx::Wgmma<kTileN, T>::shared_shared<false, false>(s, ptx::wgmma_advance(a, step / 4 * kPanelBytesQ + step % 4 * 32),
                                                       ptx::wgmma_advance(b, step / 4 * kPanelBytesK + step % 4 * 32), step > 0);
  ptx::wgmma_commit_group();
}

// O += P V for a block of keys: issued, not waited for.
__device__ __forceinline__ void multiply_values(float (&o)[kHeadDimV / 2], const unsigned (&p)[kTileN / 4],
                                                const unsigned char* v) {
  const unsigned long long b = ptx::wgmma_descriptor(v, kPanelBytesK, 1024);
#pragma unroll
  for (int step = 0; step < kTileN / 16; ++step)
    ptx::Wgmma<kHeadDimV, T>::register_shared<true>(o, p + 4 * step, ptx::wgmma_advance(b, step * 16 * kRowBytes), true);
  ptx::wgmma_commit_group();
}

// Sets scores that a query must not see to -inf. Columns are relative to the lane's first, at 2 * (lane % 4).
__device__ __forceinline__ void mask_scores(float (&s)[kTileN / 2], const Tile& tile, int row, int column) {
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) {
    const int first = tile.first_key(row + 8 * (i / 2 % 2)) - column;
    const int end = tile.end_key(row + 8 * (i / 2 % 2)) - column;
    const int j = i / 4 * 8 + i % 2;
    if (j >= end || (Config::bound_left && j < first)) s[i] = tile::negative_infinity();
  }
}

// Divides O by the sums, writes it to the slot in the layout of the copy engine's 128-byte swizzle.
__device__ __forceinline__ void write_output(float (&o)[kHeadDimV / 2], unsigned char* slot) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % 128 / 32 * 16 + lane % 16;
  const unsigned base = ptx::shared_address(slot) + row * kRowBytes;
#pragma unroll
  for (int step = 0; step < kHeadDimV / 16; ++step) {
    const int chunk = (step % 4 * 2 + lane / 16) ^ row % 8;
    unsigned m[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) m[i] = tile::pack<T>(o[8 * step + 2 * i], o[8 * step + 2 * i + 1]);
    ptx::stmatrix_x4(base + step / 4 * kPanelBytesQ + chunk * 16, m);
  }
}

__device__ __forceinline__ void consume(Smem& smem, const ForwardParams& params, int consumer) {
  // Consumers take turns in issuing products, so that one's exponentials run beside another's products.
  const int turn = 1 + consumer, next_turn = 1 + (consumer + 1) % kWarpgroups;
  const auto wait_turn = [&] {
    if (Config::turns) ptx::bar_sync(turn, 256);
  };
  const auto pass_turn = [&] {
    if (Config::turns) ptx::bar_arrive(next_turn, 256);
  };
  if (Config::turns && consumer == kWarpgroups - 1) pass_turn();

  const int lane = threadIdx.x % 32;
  const int lane_row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const float scale_log2 = float(params.scale * 1.44269504088896340736);
  Ring<kStages> ring_k, ring_v;
  Ring<kSlots> slots;
  float s[kTileN / 2], o[kHeadDimV / 2];
  unsigned p[kTileN / 4];

  for (Work work(params); work.valid(); work.next(params), slots.advance()) {
    const Tile tile = work.tile(params);
    const int row = tile.row + 64 * consumer;  // of the warpgroup
    unsigned char* const slot = smem.q[slots.index][consumer];
    tile::OnlineSoftmax softmax;
    float correction[2];
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) o[i] = 0.0f;

    ptx::mbarrier_wait(smem.full_q[slots.index][consumer], slots.parity);
    if (tile.block_begin < tile.block_end) {
      int block = tile.block_end - 1;
      const int masked_from = tile.end_key(row) / kTileN;  // blocks from here on hide keys from some query
      const int masked_to = Config::bound_left ? (tile.first_key(row + 63) + kTileN - 1) / kTileN : 0;  // and those before
      ptx::mbarrier_wait(smem.full_k[ring_k.index], ring_k.parity);
      ptx::wgmma_keep(s);
      ptx::wgmma_fence();
      multiply_keys(s, slot, smem.k[ring_k.index]);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_keep(s);
      arrive_warp(smem.empty_k[ring_k.index]);
      ring_k.advance();
      if (block >= masked_from || block < masked_to) mask_scores(s, tile, row + lane_row, block * kTileN + lane % 4 * 2);
      softmax.update(s, scale_log2, correction);
      ptx::mbarrier_wait(smem.full_v[ring_v.index], ring_v.parity);
      tile::pack_fragment<T>(p, s);

      for (--block; block >= tile.block_begin; --block) {
        wait_turn();
        ptx::mbarrier_wait(smem.full_k[ring_k.index], ring_k.parity);
        ptx::wgmma_keep(s);
        ptx::wgmma_fence();
        multiply_keys(s, slot, smem.k[ring_k.index]);
        ptx::wgmma_keep(o);
        ptx::wgmma_fence();
        multiply_values(o, p, smem.v[ring_v.index]);
        pass_turn();
        ptx::wgmma_wait_group<1>();
        ptx::wgmma_keep(s);
        arrive_warp(smem.empty_k[ring_k.index]);
        ring_k.advance();
        if (block >= masked_from || block < masked_to) mask_scores(s, tile, row + lane_row, block * kTileN + lane % 4 * 2);
        const bool grown = softmax.update(s, scale_log2, correction);
        // This block's values are awaited here, a product early, because the loop of the wait keeps ptxas from
        // moving the exponentials behind the wait for P V.
        ptx::wgmma_keep(s);
        ptx::Mbarrier& empty_v = smem.empty_v[ring_v.index];
        ring_v.advance();
        ptx::mbarrier_wait(smem.full_v[ring_v.index], ring_v.parity);
        ptx::wgmma_wait_group<0>();
        ptx::wgmma_keep(o);
        arrive_warp(empty_v);
        if (grown) tile::scale_rows(o, correction);
        tile::pack_fragment<T>(p, s);
      }

      ptx::wgmma_keep(o);
      ptx::wgmma_fence();
      multiply_values(o, p, smem.v[ring_v.index]);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_keep(o);
      arrive_warp(smem.empty_v[ring_v.index]);
      ring_v.advance();
    }

    float inverse[2], lse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = tile::quad_sum(softmax.row_sum[i]);
      inverse[i] = sum == 0.0f ? 0.0f : __frcp_rn(sum);
      lse[i] = sum == 0.0f ? tile::negative_infinity() : (softmax.row_max[i] * scale_log2 + ptx::lg2(sum)) * tile::kLn2;
    }
    tile::scale_rows(o, inverse);
    ptx::bar_sync(8 + consumer, 128);  // no warp of the four reads queries of this slot any more
    write_output(o, slot);
    ptx::fence_proxy_async();
    arrive_warp(smem.full_o[slots.index][consumer]);
    if (params.lse != nullptr && lane % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (row + lane_row + 8 * i < tile.queries.length)
          static_cast<float*>(params.lse)[tile.lse_offset(params) + row + lane_row + 8 * i] = lse[i];
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    attention_forward_sm90(const __grid_constant__ ForwardParams params, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Smem& smem = *reinterpret_cast<Smem*>(shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(maps.q);
    ptx::prefetch_tensormap(maps.k);
    ptx::prefetch_tensormap(maps.v);
    ptx::prefetch_tensormap(maps.out);
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(smem.full_k[stage], 1);
      ptx::mbarrier_init(smem.full_v[stage], 1);
      ptx::mbarrier_init(smem.empty_k[stage], 4 * kWarpgroups);
      ptx::mbarrier_init(smem.empty_v[stage], 4 * kWarpgroups);
    }
    for (int i = 0; i < kSlots * kWarpgroups; ++i) {
      ptx::mbarrier_init(smem.full_q[i / kWarpgroups][i % kWarpgroups], 1);
      ptx::mbarrier_init(smem.full_o[i / kWarpgroups][i % kWarpgroups], 4);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) {
      load_keys_and_values(smem, params, maps);
    } else if (threadIdx.x % 32 == 0 && warp <= kWarpgroups) {
      serve_consumer(smem, params, maps, warp - 1);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume(smem, params, warpgroup - 1);
  }
}
