// dk and dv on Hopper where both of 64 keys are too many registers for a warpgroup: one consuming
// warpgroup computes S, P and dv, another dP, dS and dk.
//
//   Arguments as gradients/backward_sm90.cu, but for the sums of dq. A thread block has 64 keys and
//   walks over the queries that see them, 64 at a time, of all heads that share the keys. Every sum
//   has one order: the same bits in every run.
//   Consumer 0: S^T = K Q^T, P^T, dV += P^T dO. Consumer 1: dP^T = V dO^T, dS^T, dK += dS^T Q. P
//   goes from one to the other through shared memory, in the order of accumulators.
//
// Software pipelining: the first product of one block and the second of the block before are in
// flight together, and P or dS of the former is computed beside the latter.
#include "gradients/layout_sm90.cuh"
#include "gradients/products_sm90.cuh"
#include "gradients/write_sm90.cuh"
#include "ptx/bulk.cuh"
#include "ptx/math.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"

constexpr int kDimV = Config::head_dim_v;  // of values and dout, padded; kDim is of the others
constexpr int kPanelsV = kDimV / 64;
constexpr int kStages = Config::stages;  // of queries and dout, and of P
static_assert(kDimV % 64 == 0, "panels are whole");

struct Smem {
  alignas(1024) unsigned char k[kPanels * kPanelBytesK];
  alignas(1024) unsigned char v[kPanelsV * kPanelBytesK];
  alignas(1024) unsigned char q[kStages][kPanels * kPanelBytesQ];
  alignas(1024) unsigned char dout[kStages][kPanelsV * kPanelBytesQ];
  uint4 p[kStages][kQueries / 16][128];  // pairs of 16 bits, as accumulators lie in a warpgroup
  alignas(128) float score_start[kStages][kQueries], dp_start[kStages][kQueries];
  // TMA's bytes -> the consumer of keys, of values; its warps -> the loading warp.
  ptx::Mbarrier full_k, full_v, empty_k, empty_v;
  // TMA's bytes -> both consumers; their warps -> the loading warp.
  ptx::Mbarrier full_q[kStages], full_o[kStages], empty_q[kStages], empty_o[kStages];
  ptx::Mbarrier full_p[kStages], empty_p[kStages];  // consumer 0's warps -> consumer 1's, and back
  TileQueue<Tile> queue;
};
static_assert(sizeof(Smem) <= Config::smem_bytes, "Config::smem_bytes must hold Smem");
static_assert(Config::threads == 384, "one warpgroup loads, two compute");
static_assert(kKeys == 64 && kQueries == 64, "a consumer has all keys of the thread block");

// A warpgroup that computes dv (kRole 0) or dk (kRole 1).
template <int kRole>
struct Consumer {
  static constexpr int kColumns = kRole == 0 ? kDimV : kDim;  // of the gradient

  Smem& smem;
  const float scale_log2;

  int first_key;
  tile::Range see_all_keys;  // the rows that need no mask
  tile::PipelineState<kTiles> at;
  tile::PipelineState<1> keys;
  // Of the block whose first product is next, and of the one before, whose second product is.
  tile::PipelineState<kStages> first, second;
  float sum[kColumns / 2];
  float x[kQueries / 2];  // S or dP, then P or dS
  unsigned packed[kQueries / 4];

  __device__ __forceinline__ const Tile& tile() const { return smem.queue.tiles[at.index]; }

  __device__ __forceinline__ void run(const ForwardParams& params, void* gradient, float scale,
                                      int columns, int* nonfinite) {
    while (true) {
      ptx::mbarrier_wait(smem.queue.full[at.index], at.parity);
      const int blocks = uniform(tile().blocks);
      if (blocks < 0) return;
      first_key = uniform(tile().first_key);
      see_all_keys = tile().visibility.rows_of_all(first_key, first_key + kKeys - 1);
      if (first_key + kKeys > tile().seqlen_k) see_all_keys.end = see_all_keys.begin;
      see_all_keys = {uniform(see_all_keys.begin), uniform(see_all_keys.end)};
      compute(params.heads_q / params.heads_kv * blocks);
      write(params, gradient, scale, columns, nonfinite);
      tile::arrive_warp(smem.queue.empty[at.index]);
      at.advance();
    }
  }

  // The `count` blocks of queries of a tile.
  __device__ __forceinline__ void compute(int count) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sum[i] = 0.0f;
    if (count == 0) return;
    ptx::mbarrier_wait(kRole == 0 ? smem.full_k : smem.full_v, keys.parity);
    keys.advance();
    Walk walk(tile());
    start_first();
    ptx::wgmma_fence();
    multiply_first();
    ptx::wgmma_wait_group<0>();
    weigh(walk.row());
    pack();
#pragma unroll 1
    for (int n = 1; n < count; ++n) {
      walk.advance();
      // The second product of the block before comes first: it hides how long the first one's
      // operand takes to come, which is asked for no sooner than both consumers have left its
      // place.
      wait_second();
      ptx::wgmma_keep(sum);
      ptx::wgmma_fence();
      multiply_second();
      start_first();
      ptx::wgmma_fence();
      multiply_first();
      ptx::wgmma_wait_group<1>();
      release_second();
      ptx::wgmma_wait_group<0>();
      weigh(walk.row());
      ptx::wgmma_keep(sum);
      pack();
    }
    tile::arrive_warp(kRole == 0 ? smem.empty_k : smem.empty_v);
    wait_second();
    ptx::wgmma_keep(sum);
    ptx::wgmma_fence();
    multiply_second();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_keep(sum);
    release_second();
  }

  __device__ __forceinline__ void start_first() {
    const int now = first.index;
    ptx::mbarrier_wait(kRole == 0 ? smem.full_q[now] : smem.full_o[now], first.parity);
    start(x, kRole == 0 ? smem.score_start[now] : smem.dp_start[now]);
    ptx::wgmma_keep(x);
  }
  __device__ __forceinline__ void multiply_first() {
    if (kRole == 0)
      multiply_rows(x, smem.k, smem.q[first.index]);
    else
      multiply_rows<kDimV>(x, smem.v, smem.dout[first.index]);
  }
  __device__ __forceinline__ void wait_second() {
    const int now = second.index;
    ptx::mbarrier_wait(kRole == 0 ? smem.full_o[now] : smem.full_q[now], second.parity);
  }
  __device__ __forceinline__ void multiply_second() {
    multiply_columns(sum, packed, kRole == 0 ? smem.dout[second.index] : smem.q[second.index]);
  }
  __device__ __forceinline__ void release_second() {
    tile::arrive_warp(kRole == 0 ? smem.empty_o[second.index] : smem.empty_q[second.index]);
    second.advance();
  }

  // From the first product, once it is there, to P, which goes to the other consumer too, or dS.
  __device__ __forceinline__ void weigh(int first_query) {
    ptx::wgmma_keep(x);
    const int now = first.index;
    tile::arrive_warp(kRole == 0 ? smem.empty_q[now] : smem.empty_o[now]);
    uint4* const p = smem.p[now][0] + threadIdx.x % 128;
    if (kRole == 0) {
      if (!see_all_keys.contains(first_query, kQueries)) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        hide(x, tile(), first_key + 16 * warp + tile::lane_row(lane),
             first_query + tile::lane_column(lane));
      }
#pragma unroll
      for (int i = 0; i < kQueries / 2; ++i) x[i] = ptx::ex2(x[i] * scale_log2);
      ptx::mbarrier_wait(smem.empty_p[now], first.parity ^ 1);
#pragma unroll
      for (int i = 0; i < kQueries / 16; ++i)
        p[128 * i] = make_uint4(
            tile::pack<T>(x[8 * i], x[8 * i + 1]), tile::pack<T>(x[8 * i + 2], x[8 * i + 3]),
            tile::pack<T>(x[8 * i + 4], x[8 * i + 5]), tile::pack<T>(x[8 * i + 6], x[8 * i + 7]));
      tile::arrive_warp(smem.full_p[now]);
    } else {
      ptx::mbarrier_wait(smem.full_p[now], first.parity);
#pragma unroll
      for (int i = 0; i < kQueries / 16; ++i) {
        const uint4 four = p[128 * i];
        const unsigned words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const unsigned short half = static_cast<unsigned short>(words[e / 2] >> (16 * (e % 2)));
          x[8 * i + e] *= static_cast<float>(reinterpret_cast<const T&>(half));
        }
      }
      tile::arrive_warp(smem.empty_p[now]);
    }
    first.advance();
  }

  __device__ __forceinline__ void pack() { tile::pack_fragment<T>(packed, x); }

  __device__ __forceinline__ void write(const ForwardParams& params, void* gradient, float scale,
                                        int columns, int* nonfinite) const {
    const Tile& tile = this->tile();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int key = first_key + 16 * warp + tile::lane_row(lane);
    const long long row_stride = static_cast<long long>(params.heads_kv) * columns;
    T* const out = static_cast<T*>(gradient) + (tile.row_k + key) * row_stride +
                   static_cast<long long>(tile.head_kv) * columns;
    const float zeros =
        write_gradient<T, kColumns>(sum, scale, out, row_stride, tile.seqlen_k - key, columns);
    if (zeros != 0.0f) *nonfinite = 1;
  }
};

// The warp that loads, one thread of it: keys and values of a tile, then block after block of
// queries and dout with their statistics.
struct Loader {
  Smem& smem;
  const ForwardParams& params;
  const Sm90BackwardParams& sm90;
  tile::PipelineState<kStages> stage;
  tile::PipelineState<1> keys;

  __device__ __forceinline__ void run() {
    tile::PipelineState<kTiles> at;
    while (true) {
      ptx::mbarrier_wait(smem.queue.full[at.index], at.parity);
      const Tile& tile = smem.queue.tiles[at.index];
      if (tile.blocks < 0) return;
      load(tile);
      ptx::mbarrier_arrive(smem.queue.empty[at.index]);
      at.advance();
    }
  }

  __device__ __forceinline__ void load(const Tile& tile) {
    const int group = sm90.group;
    if (tile.blocks == 0) return ptx::mbarrier_arrive(smem.queue.loaded);
    const int until_next = max(group * tile.blocks - kBlocksAhead, 0);
    Walk walk(tile);
    for (int n = 0; n < group * tile.blocks; ++n) {
      if (n == until_next) ptx::mbarrier_arrive(smem.queue.loaded);
      const int head = tile.head_kv * group + walk.head, row = walk.row();
      const long long at =
          statistics_row(params, sm90, tile.batch, head, tile.statistics_row + row);
      const int now = stage.index;
      if (n == 0) load_keys<kPanels>(smem.k, sm90.k, smem.full_k, smem.empty_k, tile);
      ptx::mbarrier_wait(smem.empty_q[now], stage.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(smem.full_q[now], kPanels * kPanelBytesQ + kQueries * 4);
      ptx::bulk_load(smem.score_start[now], sm90.score_start + at, kQueries * 4, smem.full_q[now]);
      load_rows<kPanelBytesQ>(smem.q[now], sm90.q, smem.full_q[now], tile.queries, row, head);
      if (n == 0) load_keys<kPanelsV>(smem.v, sm90.v, smem.full_v, smem.empty_v, tile);
      ptx::mbarrier_wait(smem.empty_o[now], stage.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(smem.full_o[now], kPanelsV * kPanelBytesQ + kQueries * 4);
      ptx::bulk_load(smem.dp_start[now], sm90.dp_start + at, kQueries * 4, smem.full_o[now]);
      load_rows<kPanelBytesQ, kPanelsV>(smem.dout[now], sm90.dout, smem.full_o[now], tile.queries,
                                        row, head);
      stage.advance();
      walk.advance();
    }
    keys.advance();
  }

  template <int kCount>
  __device__ __forceinline__ void load_keys(unsigned char* place, const ptx::TensorMap& map,
                                            ptx::Mbarrier& full, ptx::Mbarrier& empty,
                                            const Tile& tile) {
    ptx::mbarrier_wait(empty, keys.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, kCount * kPanelBytesK);
    load_rows<kPanelBytesK, kCount>(place, map, full, tile.keys, tile.first_key, tile.head_kv);
  }
};

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    backward_keys_sm90(const __grid_constant__ ForwardParams params,
                       const __grid_constant__ BackwardParams backward,
                       const __grid_constant__ Sm90BackwardParams sm90) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Smem& smem = *reinterpret_cast<Smem*>(shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(sm90.q);
    ptx::prefetch_tensormap(sm90.k);
    ptx::prefetch_tensormap(sm90.v);
    ptx::prefetch_tensormap(sm90.dout);
    ptx::mbarrier_init(smem.full_k, 1);
    ptx::mbarrier_init(smem.full_v, 1);
    ptx::mbarrier_init(smem.empty_k, 4);
    ptx::mbarrier_init(smem.empty_v, 4);
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(smem.full_q[i], 1);
      ptx::mbarrier_init(smem.full_o[i], 1);
      ptx::mbarrier_init(smem.empty_q[i], 8);
      ptx::mbarrier_init(smem.empty_o[i], 8);
      ptx::mbarrier_init(smem.full_p[i], 4);
      ptx::mbarrier_init(smem.empty_p[i], 4);
    }
    for (int i = 0; i < kTiles; ++i) {
      ptx::mbarrier_init(smem.queue.full[i], 1);
      ptx::mbarrier_init(smem.queue.empty[i], 9);
    }
    ptx::mbarrier_init(smem.queue.loaded, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 0)
      Loader{smem, params, sm90}.run();
    else if (warp == 1)
      find_tiles(smem.queue, params, sm90, sm90.tiles, sm90.next_tile);
  } else if (warpgroup == 1) {
    ptx::setmaxnreg_inc<232>();
    Consumer<0>{smem, sm90.scale_log2}.run(params, backward.dv, 1.0f, params.head_dim_v,
                                           backward.nonfinite);
  } else {
    ptx::setmaxnreg_inc<232>();
    Consumer<1>{smem, sm90.scale_log2}.run(params, backward.dk, static_cast<float>(params.scale),
                                           params.head_dim, backward.nonfinite);
  }
}
