// Attention backward on Hopper for head_dim up to 192 with values of up to 128: dk, dv and the sums
// of dq in one pass of five products, as gradients/backward_sm90.cu, in another order.
//
//   Arguments, roles, and what lies where as there, but for dropout. A thread block has 128 keys,
//   64 a consuming warpgroup.
//
// dk and dv of 64 keys are 160 registers of the 240 that a consumer has, which leaves one place to
// S, dP and a part of dq, one after the other. So P is 16-bit when dS = P * dP is computed, and no
// product of one block of queries is in flight with those of another: the products of one consumer
// hide the elementwise phases of the other. A consumer's part of dq is 96 columns by one product, a
// panel of K and half of the last one: two products would read dS twice, and shared memory is what
// bounds this kernel.
#include "gradients/consume_sm90.cuh"
#include "gradients/produce_sm90.cuh"
#include "gradients/products_sm90.cuh"
#include "gradients/write_sm90.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"

static_assert(kDim == 192 && kDimV == 128 && kConsumers == 2, "what registers suffice for");
static_assert(Config::computes_dq && !Config::in_order && !Config::dropout && !kStoresByTma,
              "what there are variants of");
constexpr int kColumnsDq = part_columns(kDim);

// X (64 queries × 96 columns) = dS K over all keys of the thread block, for columns 64 i to 64 i +
// 63 and 128 + 32 i to 159 + 32 i.
__device__ __forceinline__ void multiply_keys(float (&x)[kColumnsDq / 2], const unsigned char* ds,
                                              const unsigned char* keys, int i) {
  const unsigned long long a = ptx::wgmma_descriptor(ds, 0, 1024);
  const unsigned long long b =
      ptx::wgmma_descriptor(keys + i * kPanelBytesK, (2 - i) * kPanelBytesK + 64 * i, 1024);
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step)
    ptx::Wgmma<kColumnsDq, T>::template shared_shared<false, true>(
        x, ptx::wgmma_advance(a, step / 4 * kPanelBytesQ + step % 4 * 32),
        ptx::wgmma_advance(b, step * 16 * kRowBytes), step > 0);
  ptx::wgmma_commit_group();
}

// A warpgroup that computes: 64 keys of each tile.
struct Consumer {
  Smem& smem;
  const ForwardParams& params;
  const BackwardParams& backward;
  const Sm90BackwardParams& sm90;
  const int consumer;

  int first_key;             // of this consumer
  tile::Range see_all_keys;  // the rows that need no mask
  tile::PipelineState<kTiles> at;
  tile::PipelineState<1> keys;
  tile::PipelineCounter<kStages> stage;  // a block of queries has one of each ring
  float dk[kDim / 2], dv[kDimV / 2];

  // Of the tile no more is in registers than every block needs.
  __device__ __forceinline__ const Tile& tile() const { return smem.queue.tiles[at.index]; }

  __device__ __forceinline__ void run() {
    while (true) {
      ptx::mbarrier_wait(smem.queue.full[at.index], at.parity);
      const int blocks = uniform(tile().blocks);
      if (blocks < 0) return;
      first_key = uniform(tile().first_key) + 64 * consumer;
      see_all_keys = tile().visibility.rows_of_all(first_key, first_key + 63);
      if (first_key + 64 > tile().seqlen_k) see_all_keys.end = see_all_keys.begin;
      see_all_keys = {uniform(see_all_keys.begin), uniform(see_all_keys.end)};
      compute(sm90.group * blocks);
      write();
      tile::arrive_warp(smem.queue.empty[at.index]);
      at.advance();
    }
  }

  // The `count` blocks of queries of a tile.
  __device__ __forceinline__ void compute(int count) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kDimV / 2; ++i) dv[i] = 0.0f;
    if (count == 0) return;
    ptx::mbarrier_wait(smem.full_k, keys.parity);
    ptx::mbarrier_wait(smem.full_v, keys.parity);
    keys.advance();
    QueryWalk walk(tile());
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      step(walk.row(), n == count - 1);
      walk.advance(params, sm90.group);
    }
    tile::arrive_warp(smem.empty_k);
  }

  // One block of queries. After the `last` of a tile its values are read no more.
  __device__ __forceinline__ void step(int first_query, bool last) {
    const auto [now, parity] = stage.state();
    const int once = stage.count % 2;            // the parity of rings of one stage
    unsigned p[kQueries / 4], ds[kQueries / 4];  // P^T and dS^T as pairs of 16 bits
    {
      float s[kQueries / 2];
      ptx::mbarrier_wait(smem.full_q[now], parity);
      start(s, smem.score_start[now]);
      ptx::wgmma_keep(s);
      ptx::wgmma_fence();
      multiply_rows(s, smem.k + 64 * kRowBytes * consumer, smem.q[now]);
      ptx::wgmma_wait_group<0>();
      exponentiate(s, first_query);
      tile::pack_fragment<T>(p, s);
    }
    {
      float dp[kQueries / 2];
      ptx::mbarrier_wait(smem.full_o[now], parity);
      start(dp, smem.dp_start[now]);
      ptx::wgmma_keep(dp);
      ptx::wgmma_keep(dv);
      ptx::wgmma_fence();
      multiply_rows<kDimV>(dp, smem.v + 64 * kRowBytes * consumer, smem.dout[now]);
      multiply_columns(dv, p, smem.dout[now]);
      ptx::wgmma_wait_group<1>();
      if (last) tile::arrive_warp(smem.empty_v);
      ptx::wgmma_keep(dp);
      multiply_gradients(dp, p);
      tile::pack_fragment<T>(ds, dp);
    }
    store_ds(ds, once);
    ptx::wgmma_keep(dk);
    ptx::wgmma_fence();
    multiply_columns(dk, ds, smem.q[now]);
    ptx::mbarrier_wait(smem.full_ds[0], once);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_keep(dk);
    ptx::wgmma_keep(dv);
    tile::arrive_warp(smem.empty_q[now]);
    tile::arrive_warp(smem.empty_o[now]);

    float dq[kColumnsDq / 2];
    ptx::wgmma_fence();
    multiply_keys(dq, smem.ds[0][0], smem.k, consumer);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_keep(dq);
    tile::arrive_warp(smem.empty_ds[0]);
    send_dq(dq, once);
    stage.advance();
  }

  // From S to P.
  __device__ __forceinline__ void exponentiate(float (&s)[kQueries / 2], int first_query) {
    ::exponentiate(s, tile(), see_all_keys, first_key, first_query, sm90.scale_log2);
  }

  // From dP^T to dS^T, with P^T.
  __device__ __forceinline__ void multiply_gradients(float (&dp)[kQueries / 2],
                                                     const unsigned (&p)[kQueries / 4]) {
#pragma unroll
    for (int i = 0; i < kQueries / 2; ++i) {
      const unsigned short half = static_cast<unsigned short>(p[i / 2] >> (16 * (i % 2)));
      dp[i] *= static_cast<float>(reinterpret_cast<const T&>(half));
    }
  }

  // dS^T, turned into this consumer's panel of dS.
  __device__ __forceinline__ void store_ds(const unsigned (&ds)[kQueries / 4], int parity) {
    ptx::mbarrier_wait(smem.empty_ds[0], parity ^ 1);
    store_transposed(smem.ds[0][consumer], ds, threadIdx.x % 32);
    ptx::fence_proxy_async();
    tile::arrive_warp(smem.full_ds[0]);
  }

  // Hands this consumer's part of dq to the warp that adds it to the sums.
  __device__ __forceinline__ void send_dq(const float (&dq)[kColumnsDq / 2], int parity) {
    ptx::mbarrier_wait(smem.empty_dq[consumer][0], parity ^ 1);
    store_part(smem.dq[consumer][0], dq);
    ptx::fence_proxy_async();
    tile::arrive_warp(smem.full_dq[consumer][0]);
  }

  __device__ __forceinline__ void write() {
    const Tile& tile = this->tile();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int key = first_key + 16 * warp + tile::lane_row(lane);
    const long long row = (tile.row_k + key) * params.heads_kv + tile.head_kv;
    const float zeros =
        write_gradient<T, kDim>(dk, static_cast<float>(params.scale),
                                static_cast<T*>(backward.dk) + row * params.head_dim,
                                params.heads_kv * params.head_dim, tile.seqlen_k - key,
                                params.head_dim) +
        write_gradient<T, kDimV>(dv, 1.0f, static_cast<T*>(backward.dv) + row * params.head_dim_v,
                                 params.heads_kv * params.head_dim_v, tile.seqlen_k - key,
                                 params.head_dim_v);
    if (zeros != 0.0f) *backward.nonfinite = 1;
  }
};

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    backward_192_sm90(const __grid_constant__ ForwardParams params,
                      const __grid_constant__ BackwardParams backward,
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
    ptx::setmaxnreg_dec<24>();
    if (warp == 0 && threadIdx.x == 0)
      Loader{smem, params, sm90}.run();
    else if (warp == 1)
      find_tiles(smem.queue, params, sm90, sm90.tiles, sm90.next_tile);
    else if (warp >= 2)
      add_dq(smem, params, sm90, warp - 2);
  } else {
    ptx::setmaxnreg_inc<240>();
    Consumer{smem, params, backward, sm90, warpgroup - 1}.run();
  }
}
