// Attention backward on Hopper: dk, dv and the sums of dq in one pass of five products, with wgmma,
// TMA and specialised warps, after FlashAttention-3 (Shah et al., 2024).
//
//   q, k, v, dout: float16 or bfloat16 rows that TMA can address; statistics of the rows, and sums
//   of dq that are zeros or marked as not begun, from gradients/around_sm90.cu, which also makes dq
//   of the sums. scale > 0.
//   A thread block has 128 or 192 keys, 64 a consuming warpgroup, and walks over the queries that
//   see them, kQueries at a time, of all heads that share the keys; blocks are persistent and take
//   tile after tile. Warpgroup 0 produces: warp 0 loads, warp 1 finds tiles, warps 2 and 3 each add
//   one of two consumers' parts of dq to the sums in global memory, and have TMA write its dk and
//   dv (Config::stores_by_tma), or warp 2 does so for three. Sums are added up in any order, or in
//   that of keys (Config::in_order).
//
//   S^T = K Q^T and dP^T = V dO^T have keys as rows, so that P^T and dS^T are operands of
//   dV += P^T dO and dK += dS^T Q straight from registers. dS alone goes through shared memory, for
//   dQ = dS K over all keys (Config::computes_dq): 64 queries × 64 columns a consumer, which where
//   there are no more are computed by all in turn. S and dP start at -lse / scale and at -delta: p
//   = exp2(s * scale_log2), dS = p * dP. With dropout all of it is over dropout's scale but what is
//   written.
//
// Each elementwise phase runs beside a product of the same consumer, and all of one consumer's
// beside the other's products: what a consumer waits for of the other, its dS, has two stages, so
// they may be a block apart.
#include "gradients/consume_sm90.cuh"
#include "gradients/dropout_sm90.cuh"
#include "gradients/in_order_sm90.cuh"
#include "gradients/produce_sm90.cuh"
#include "gradients/products_sm90.cuh"
#include "gradients/results_sm90.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"

// X (64 queries × 64 columns) = dS K over all keys of the thread block.
__device__ __forceinline__ void multiply_keys(float (&x)[32], const unsigned char* ds,
                                              const unsigned char* keys) {
  const unsigned long long a = ptx::wgmma_descriptor(ds, 0, 1024);
  const unsigned long long b = ptx::wgmma_descriptor(keys, 0, 1024);
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step)
    ptx::Wgmma<64, T>::template shared_shared<false, true>(
        x, ptx::wgmma_advance(a, step / 4 * kPanelBytesQ + step % 4 * 32),
        ptx::wgmma_advance(b, step * 16 * kRowBytes), step > 0);
  ptx::wgmma_commit_group();
}

using Params = tile::ParamsOf<BackwardParams, Config::dropout>::Type;

// A warpgroup that computes: 64 keys of each tile.
struct Consumer {
  Smem& smem;
  const ForwardParams& params;
  const Params& backward;
  const Sm90BackwardParams& sm90;
  const int consumer;

  int first_key;             // of this consumer
  tile::Range see_all_keys;  // the rows that need no mask
  tile::PipelineCounter<kTiles> at;
  tile::PipelineState<1> keys;
  tile::PipelineState<kStages> stage;
  tile::PipelineState<kStagesDs> ds_stage;
  tile::PipelineState<kStagesDq> dq_stage;
  float dk[kDim / 2], dv[kDim / 2];
  unsigned p[kQueries / 4], ds[kQueries / 4];  // P^T and dS^T of a block as pairs of 16 bits

  // Of the tile no more is in registers than every block needs.
  __device__ __forceinline__ const Tile& tile() const { return smem.queue.tiles[at.state().index]; }

  __device__ __forceinline__ void run() {
    while (true) {
      ptx::mbarrier_wait(smem.queue.full[at.state().index], at.state().parity);
      const int blocks = uniform(tile().blocks);
      if (blocks < 0) return;
      first_key = uniform(tile().first_key) + 64 * consumer;
      see_all_keys = tile().visibility.rows_of_all(first_key, first_key + 63);
      if (first_key + 64 > tile().seqlen_k) see_all_keys.end = see_all_keys.begin;
      see_all_keys = {uniform(see_all_keys.begin), uniform(see_all_keys.end)};
      compute(sm90.group * blocks);
      write();
      tile::arrive_warp(smem.queue.empty[at.state().index]);
      at.advance();
    }
  }

  // The `count` blocks of queries of a tile.
  __device__ __forceinline__ void compute(int count) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dk[i] = dv[i] = 0.0f;
    if (count == 0) return;
    ptx::mbarrier_wait(smem.full_k, keys.parity);
    ptx::mbarrier_wait(smem.full_v, keys.parity);
    keys.advance();
    QueryWalk walk(tile());
    if constexpr (kPipelined) first_scores(walk.row());
#pragma unroll 1
    for (int n = 0; n < count - kPipelined; ++n) {
      if (kPipelined) walk.advance(params, sm90.group);
      const bool in_turn = kOneRing ? dq_stage.index == consumer : n % 2 == consumer;
      if (Config::computes_dq && (!kAlternate || in_turn))
        step<true>(walk, walk.row(), n == count - 1);
      else
        step<false>(walk, walk.row(), n == count - 1);
      if constexpr (kOneRing) dq_stage.advance();
      if (!kPipelined) walk.advance(params, sm90.group);
    }
    if constexpr (kPipelined) {
      tile::arrive_warp(smem.empty_v);
      if (Config::computes_dq && (count - 1) % 2 == consumer)
        last_products<true>();
      else
        last_products<false>();
    }
    tile::arrive_warp(smem.empty_k);
  }

  // One block of queries; where pipelined from its scores to its dS, beside the products that need
  // those of the block before. After the `last` of a tile its values are read no more.
  template <bool kComputesDq>
  __device__ __forceinline__ void step(const QueryWalk& walk, int first_query, bool last) {
    float s[kQueries / 2], dp[kQueries / 2], dq[32];
    const int now = stage.index;
    tile::PipelineState<kStages> next = stage;
    if constexpr (kPipelined) {
      next.advance();
      start_products(s, dp, next);
      ptx::wgmma_keep(dk);
      ptx::wgmma_keep(dv);
      ptx::wgmma_fence();
      multiply_first(s, dp, next.index);
      multiply_columns(dv, p, smem.dout[now]);
      multiply_columns(dk, ds, smem.q[now]);
      multiply_keys_in_turn<kComputesDq>(dq);
      ptx::wgmma_wait_group<3 + kComputesDq>();
      exponentiate(s, first_query);
      ptx::wgmma_wait_group<2 + kComputesDq>();
      ptx::wgmma_keep(dp);
      multiply_gradients(dp, s, KeptSigns(), now);
      finish_block<kComputesDq>(dq);
      tile::pack_fragment<T>(p, s);
      tile::pack_fragment<T>(ds, dp);
      if (Config::computes_dq) store_ds();
      if (kComputesDq) send_dq(dq);
    } else {
      const KeptSigns kept = compute_mask(walk);
      start_products(s, dp, stage);
      ptx::wgmma_fence();
      multiply_first(s, dp, now);
      ptx::wgmma_wait_group<1>();
      exponentiate(s, first_query);
      pack_scores(s, kept);
      ptx::wgmma_keep(dv);
      ptx::wgmma_fence();
      multiply_columns(dv, p, smem.dout[now]);
      ptx::wgmma_wait_group<1>();
      if (last && !Config::dropout) tile::arrive_warp(smem.empty_v);
      ptx::wgmma_keep(dp);
      multiply_gradients(dp, s, kept, now);
      tile::pack_fragment<T>(ds, dp);
      if (last && Config::dropout) tile::arrive_warp(smem.empty_v);  // registers are free again
      if (Config::computes_dq) store_ds();
      ptx::wgmma_keep(dk);
      ptx::wgmma_fence();
      multiply_columns(dk, ds, smem.q[now]);
      multiply_keys_in_turn<kComputesDq>(dq);
      finish_block<kComputesDq>(dq);
      if (kComputesDq) send_dq(dq);
    }
  }

  __device__ __forceinline__ void first_scores(int first_query) {
    float s[kQueries / 2], dp[kQueries / 2];
    start_products(s, dp, stage);
    ptx::wgmma_fence();
    multiply_first(s, dp, stage.index);
    ptx::wgmma_wait_group<0>();
    exponentiate(s, first_query);
    ptx::wgmma_keep(dp);
    multiply_gradients(dp, s, KeptSigns(), stage.index);
    tile::pack_fragment<T>(p, s);
    tile::pack_fragment<T>(ds, dp);
    if (Config::computes_dq) store_ds();
  }

  template <bool kComputesDq>
  __device__ __forceinline__ void last_products() {
    float dq[32];
    ptx::wgmma_keep(dk);
    ptx::wgmma_keep(dv);
    ptx::wgmma_fence();
    multiply_columns(dv, p, smem.dout[stage.index]);
    multiply_columns(dk, ds, smem.q[stage.index]);
    multiply_keys_in_turn<kComputesDq>(dq);
    finish_block<kComputesDq>(dq);
    if (kComputesDq) send_dq(dq);
  }

  __device__ __forceinline__ void start_products(float (&s)[kQueries / 2],
                                                 float (&dp)[kQueries / 2],
                                                 const tile::PipelineState<kStages>& at) {
    ptx::mbarrier_wait(smem.full_q[at.index], at.parity);
    start(s, smem.score_start[at.index]);
    ptx::mbarrier_wait(smem.full_o[at.index], at.parity);
    start(dp, smem.dp_start[at.index]);
    ptx::wgmma_keep(s);
    ptx::wgmma_keep(dp);
  }
  __device__ __forceinline__ void multiply_first(float (&s)[kQueries / 2],
                                                 float (&dp)[kQueries / 2], int index) {
    multiply_rows(s, smem.k + 64 * kRowBytes * consumer, smem.q[index]);
    multiply_rows(dp, smem.v + 64 * kRowBytes * consumer, smem.dout[index]);
  }

  // From S to P.
  __device__ __forceinline__ void exponentiate(float (&s)[kQueries / 2], int first_query) {
    ::exponentiate(s, tile(), see_all_keys, first_key, first_query, sm90.scale_log2);
  }

  // What is kept of a block of queries.
  __device__ __forceinline__ KeptSigns compute_mask(const QueryWalk& walk) const {
    if constexpr (Config::dropout)
      return KeptSigns(smem, tile::dropout_of(backward), walk.row(),
                       first_key / 16 + threadIdx.x / 32 % 4,
                       tile().batch * params.heads_q + tile().head_kv * sm90.group + walk.head);
    return KeptSigns();
  }

  // P^T as the product with dout takes it.
  __device__ __forceinline__ void pack_scores(const float (&s)[kQueries / 2],
                                              const KeptSigns& kept) {
    tile::pack_fragment<T>(p, s);
    if constexpr (Config::dropout) kept.clear(p);
  }

  // From dP^T to dS^T, with P^T. With dropout everything is over its scale, and where it drops an
  // entry dP^T is 0.
  __device__ __forceinline__ void multiply_gradients(float (&dp)[kQueries / 2],
                                                     const float (&p)[kQueries / 2],
                                                     const KeptSigns& kept, int index) {
    if constexpr (Config::dropout) {
      kept.multiply(dp, p, smem.dp_start[index]);
    } else {
#pragma unroll
      for (int i = 0; i < kQueries / 2; ++i) dp[i] *= p[i];
    }
  }

  // This consumer's part of dq of the block whose dS is packed, if there is one.
  template <bool kComputesDq>
  __device__ __forceinline__ void multiply_keys_in_turn(float (&dq)[32]) {
    if constexpr (kComputesDq) {
      // The stage that store_ds has left.
      const int written = ds_stage.index ^ 1;
      ptx::mbarrier_wait(smem.full_ds[written], ds_stage.parity ^ (written == 1));
      ptx::wgmma_fence();
      multiply_keys(dq, smem.ds[written][0], smem.k + (kAlternate ? 0 : kPanelBytesK * consumer));
    }
  }

  // Waits for all products of the block whose dS is packed, and releases what they have read.
  template <bool kComputesDq>
  __device__ __forceinline__ void finish_block(float (&dq)[32]) {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_keep(dk);
    ptx::wgmma_keep(dv);
    tile::arrive_warp(smem.empty_q[stage.index]);
    tile::arrive_warp(smem.empty_o[stage.index]);
    stage.advance();
    if constexpr (kComputesDq) {
      ptx::wgmma_keep(dq);
      tile::arrive_warp(smem.empty_ds[ds_stage.index ^ 1]);
    }
  }

  // dS^T, turned into this consumer's panel of dS.
  __device__ __forceinline__ void store_ds() {
    const int now = ds_stage.index;
    ptx::mbarrier_wait(smem.empty_ds[now], ds_stage.parity ^ 1);
    int lane = threadIdx.x % 32;
    // The address is computed anew for each block: masks leave no register for it.
    if constexpr (Config::dropout) lane = ptx::opaque(lane);
    store_transposed(smem.ds[now][consumer], ds, lane);
    ptx::fence_proxy_async();
    tile::arrive_warp(smem.full_ds[now]);
    ds_stage.advance();
  }

  // Hands this consumer's part of dq to the warp that adds it to the sums.
  __device__ __forceinline__ void send_dq(const float (&dq)[32]) {
    const int now = dq_stage.index;
    const int ring = kOneRing ? 0 : consumer;
    ptx::mbarrier_wait(smem.empty_dq[ring][now], dq_stage.parity ^ 1);
    store_part(smem.dq[ring][now], dq);
    ptx::fence_proxy_async();
    tile::arrive_warp(smem.full_dq[ring][now]);
    if constexpr (!kOneRing) dq_stage.advance();
  }

  __device__ __forceinline__ void write() {
    const Tile& tile = this->tile();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int key = first_key + 16 * warp + tile::lane_row(lane);
    const long long row = (tile.row_k + key) * params.heads_kv + tile.head_kv;
    float scale_of_dv = 1.0f;
    if constexpr (Config::dropout)
      scale_of_dv = static_cast<float>(tile::dropout_of(backward).scale);
    float zeros;
    if constexpr (kStoresByTma) {
      zeros = send_results(smem, consumer, dq_stage, dk, static_cast<float>(params.scale), dv,
                           scale_of_dv);
    } else {
      zeros = write_gradient<T, kDim>(dk, static_cast<float>(params.scale),
                                      static_cast<T*>(backward.dk) + row * params.head_dim,
                                      params.heads_kv * params.head_dim, tile.seqlen_k - key,
                                      params.head_dim) +
              write_gradient<T, kDim>(
                  dv, scale_of_dv, static_cast<T*>(backward.dv) + row * params.head_dim_v,
                  params.heads_kv * params.head_dim_v, tile.seqlen_k - key, params.head_dim_v);
    }
    if (zeros != 0.0f) *backward.nonfinite = 1;
  }
};

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    backward_sm90(const __grid_constant__ ForwardParams params,
                  const __grid_constant__ Params backward,
                  const __grid_constant__ Sm90BackwardParams sm90) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Smem& smem = *reinterpret_cast<Smem*>(shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    prefetch_maps(sm90);
    init_barriers(smem);
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kConsumers == 3 ? 32 : 40>();
    if (warp == 0 && threadIdx.x == 0)
      Loader{smem, params, sm90}.run();
    else if (warp == 1 && Config::in_order)
      find_tiles_in_order(smem.queue, params, sm90);
    else if (warp == 1)
      find_tiles(smem.queue, params, sm90, sm90.tiles, sm90.next_tile);
    else if (Config::in_order && warp >= 2 && warp - 2 < kRings)
      add_dq_in_order(smem, params, sm90, warp - 2);
    else if (Config::computes_dq && warp >= 2 && warp - 2 < kRings)
      add_dq(smem, params, sm90, warp - 2);
  } else {
    ptx::setmaxnreg_inc<kConsumers == 3 ? 160 : 232>();
    Consumer{smem, params, backward, sm90, warpgroup - 1}.run();
  }
}
