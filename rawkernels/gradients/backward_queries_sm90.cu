// dq on Hopper by a pass of its own: dq = scale * dS K, with wgmma, TMA and specialised warps.
//
//   Arguments as gradients/backward_sm90.cu, but for the sums of dq. A thread block has 128
//   queries, 64 a consuming warpgroup, and walks over the keys that they see, kTileN at a time.
//   Nothing is added up in memory: the same bits in every run. Warpgroup 0 loads.
//
// Software pipelining, as in attention/forward_sm90.cu: dP = dO V^T and S = Q K^T of one block of
// keys and dS K of the block before are in flight together, and exponentials hide behind the latter
// and behind the other consumer's products. dP comes first, so that V's stage, which may be the
// only one, is free early.
#include "gradients/layout_sm90.cuh"
#include "gradients/write_sm90.cuh"
#include "ptx/math.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"

constexpr int kDimV = Config::head_dim_v;  // of values and dout, padded; kDim is of the others
constexpr int kPanelsV = kDimV / 64;
constexpr int kConsumers = 2;
constexpr int kRows = 64 * kConsumers;  // queries of a thread block
constexpr int kPanelBytes = kRows * kRowBytes;
constexpr int kStages = 2;
constexpr int kStagesV = Config::v_stages;

struct Smem {
  alignas(1024) unsigned char q[kPanels * kPanelBytes];
  alignas(1024) unsigned char dout[kPanelsV * kPanelBytes];
  alignas(1024) unsigned char k[kStages][kPanels * kPanelBytesK];
  alignas(1024) unsigned char v[kStagesV][kPanelsV * kPanelBytesK];
  // TMA's bytes -> all consumers; every consumer warp -> the loading warp.
  ptx::Mbarrier full_q, full_o;
  ptx::Mbarrier full_k[kStages], empty_k[kStages], full_v[kStagesV], empty_v[kStagesV];
};
static_assert(sizeof(Smem) <= Config::smem_bytes, "Config::smem_bytes must hold Smem");
static_assert(Config::threads == 128 * (kConsumers + 1), "one warpgroup loads, two compute");
static_assert(kStatisticsPad % kRows == 0, "rows do not reach beyond their statistics");

// The queries of a thread block and the blocks of keys that they see.
struct QueryTile {
  int batch, head, head_kv, first_row, seqlen_q, seqlen_k;
  long long row_q;     // of the sequence's first query in dq
  int statistics_row;  // of its first query
  int begin, end;      // blocks
  tile::TmaRows queries, keys;
  tile::Visibility visibility;  // rows are counted from the sequence's first
};

// False where there is nothing to do. The same for all threads; whole warps together.
__device__ __forceinline__ bool find_queries(QueryTile& tile, const ForwardParams& params) {
  const int slots = gridDim.x / params.heads_q, slot = blockIdx.x % slots;
  tile.head = blockIdx.x / slots;
  tile.head_kv = tile.head / (params.heads_q / params.heads_kv);
  if constexpr (Config::varlen) {
    const tile::Sequence found = tile::varlen_sequence<kRows>(params, slot);
    if (found.tile < 0) return false;
    const int begin_q = static_cast<int>(found.begin_q), begin_k = static_cast<int>(found.begin_k);
    tile.batch = found.index;
    tile.seqlen_q = found.seqlen_q;
    tile.seqlen_k = found.seqlen_k;
    tile.first_row = found.tile * kRows;
    tile.row_q = begin_q;
    tile.statistics_row = (begin_q / kStatisticsPad + found.index) * kStatisticsPad;
    tile.queries = tile::ragged_tma_rows(begin_q, tile.seqlen_q);
    tile.keys = tile::ragged_tma_rows(begin_k, tile.seqlen_k);
  } else {
    // The last queries come first: with a causal mask they are the most work.
    tile.batch = blockIdx.z * gridDim.y + blockIdx.y;
    if (tile.batch >= params.batch) return false;
    tile.seqlen_q = params.seqlen_q;
    tile.seqlen_k = params.seqlen_k;
    tile.first_row = (slots - 1 - slot) * kRows;
    tile.row_q = static_cast<long long>(tile.batch) * params.seqlen_q;
    tile.statistics_row = 0;
    tile.queries = {params.seqlen_q, 0, tile.batch};
    tile.keys = {params.seqlen_k, 0, tile.batch};
  }
  tile.visibility = tile::Visibility::from_row(0, tile.seqlen_q + kRows, params.window_left,
                                               params.window_right, tile.seqlen_q, tile.seqlen_k);
  const int last_row = min(tile.first_row + kRows, tile.seqlen_q) - 1;
  const tile::Range keys = tile.visibility.keys_of_any(tile.first_row, last_row);
  tile.begin = max(keys.begin, 0) / kKeys;
  tile.end = max((keys.end + kKeys - 1) / kKeys, tile.begin);
  return true;
}

// X (64 queries × kKeys) = A B^T for this consumer's rows of q or dout and a block of keys or
// values: issued, not waited for.
template <int kColumns>
__device__ __forceinline__ void multiply_rows(float (&x)[kKeys / 2], const unsigned char* rows,
                                              const unsigned char* keys) {
  const unsigned long long a = ptx::wgmma_descriptor(rows, 0, 1024);
  const unsigned long long b = ptx::wgmma_descriptor(keys, 0, 1024);
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step)
    ptx::Wgmma<kKeys, T>::template shared_shared<false, false>(
        x, ptx::wgmma_advance(a, step / 4 * kPanelBytes + step % 4 * 32),
        ptx::wgmma_advance(b, step / 4 * kPanelBytesK + step % 4 * 32), step > 0);
  ptx::wgmma_commit_group();
}

// dQ += dS K for a block of keys.
__device__ __forceinline__ void multiply_keys(float (&dq)[kDim / 2],
                                              const unsigned (&ds)[kKeys / 4],
                                              const unsigned char* keys) {
  const unsigned long long b = ptx::wgmma_descriptor(keys, kPanelBytesK, 1024);
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step)
    ptx::Wgmma<kDim, T>::template register_shared<true>(
        dq, ds + 4 * step, ptx::wgmma_advance(b, step * 16 * kRowBytes), true);
  ptx::wgmma_commit_group();
}

// A warpgroup that computes: 64 queries.
struct Consumer {
  Smem& smem;
  const QueryTile& tile;
  const float scale_log2;
  const int consumer;
  const int first_row = tile.first_row + 64 * consumer;

  tile::PipelineState<kStages> stage_k, before;  // before: of the block whose dS is packed
  tile::PipelineState<kStagesV> stage_v;
  float score_start[2], dp_start[2];  // of this lane's rows
  float dq[kDim / 2];

  __device__ __forceinline__ void run(const float* score_starts, const float* dp_starts) {
    const int row = 64 * consumer + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      score_start[r] = score_starts[row + 8 * r] * scale_log2;
      dp_start[r] = dp_starts[row + 8 * r];
    }
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dq[i] = 0.0f;
    if (tile.begin == tile.end) return;
    ptx::mbarrier_wait(smem.full_q, 0);
    ptx::mbarrier_wait(smem.full_o, 0);

    unsigned ds[kKeys / 4];
    {
      float s[kKeys / 2], dp[kKeys / 2];
      wait_block();
      ptx::wgmma_fence();
      multiply_block(s, dp, 0);
      ptx::wgmma_wait_group<0>();
      release_values();
      weigh(s, dp, tile.begin);
      tile::pack_fragment<T>(ds, dp);
    }
#pragma unroll 1
    for (int block = tile.begin + 1; block < tile.end; ++block) {
      float s[kKeys / 2], dp[kKeys / 2];
      wait_block();
      ptx::wgmma_keep(dq);
      ptx::wgmma_fence();
      multiply_block(s, dp, block >> 30);
      multiply_keys(dq, ds, smem.k[before.index]);
      ptx::wgmma_wait_group<2>();
      release_values();
      ptx::wgmma_wait_group<1>();
      weigh(s, dp, block);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_keep(dq);
      tile::arrive_warp(smem.empty_k[before.index]);
      before.advance();
      tile::pack_fragment<T>(ds, dp);
    }
    ptx::wgmma_keep(dq);
    ptx::wgmma_fence();
    multiply_keys(dq, ds, smem.k[before.index]);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_keep(dq);
  }

  __device__ __forceinline__ void wait_block() {
    ptx::mbarrier_wait(smem.full_v[stage_v.index], stage_v.parity);
    ptx::mbarrier_wait(smem.full_k[stage_k.index], stage_k.parity);
  }
  // zero: known to be 0 when the kernel runs and no sooner, so that descriptors of queries and
  // dout, of which there are 32, are computed for every block and not kept in registers.
  __device__ __forceinline__ void multiply_block(float (&s)[kKeys / 2], float (&dp)[kKeys / 2],
                                                 int zero) {
    const int rows = (64 * consumer + zero) * kRowBytes;
    multiply_rows<kDimV>(dp, smem.dout + rows, smem.v[stage_v.index]);
    multiply_rows<kDim>(s, smem.q + rows, smem.k[stage_k.index]);
    stage_k.advance();
  }
  __device__ __forceinline__ void release_values() {
    tile::arrive_warp(smem.empty_v[stage_v.index]);
    stage_v.advance();
  }

  // From S and dP, once they are there, to dS, in dP's place.
  __device__ __forceinline__ void weigh(float (&s)[kKeys / 2], float (&dp)[kKeys / 2], int block) {
    ptx::wgmma_keep(s);
    ptx::wgmma_keep(dp);
    if (!tile.visibility.keys_of_all(first_row, first_row + 63).contains(block * kKeys, kKeys)) {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
      tile::hide_keys(s, tile.visibility, first_row + 16 * warp + tile::lane_row(lane),
                      block * kKeys + tile::lane_column(lane));
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i)
      dp[i] =
          ptx::ex2(fmaf(s[i], scale_log2, score_start[i / 2 % 2])) * (dp[i] + dp_start[i / 2 % 2]);
  }

  __device__ __forceinline__ void write(const ForwardParams& params, const BackwardParams& backward,
                                        int* nonfinite) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int query = first_row + 16 * warp + tile::lane_row(lane);
    const long long row_stride = static_cast<long long>(params.heads_q) * params.head_dim;
    T* const out = static_cast<T*>(backward.dq) + (tile.row_q + query) * row_stride +
                   static_cast<long long>(tile.head) * params.head_dim;
    const float zeros = write_gradient<T, kDim>(dq, static_cast<float>(params.scale), out,
                                                row_stride, tile.seqlen_q - query, params.head_dim);
    if (zeros != 0.0f) *nonfinite = 1;
  }
};

// The warp that loads, one thread of it.
__device__ __forceinline__ void load(Smem& smem, const Sm90BackwardParams& sm90,
                                     const QueryTile& tile) {
  tile::PipelineState<kStages> stage_k;
  tile::PipelineState<kStagesV> stage_v;
  for (int block = tile.begin; block < tile.end; ++block) {
    if (block == tile.begin) {
      ptx::mbarrier_arrive_expect_tx(smem.full_o, kPanelsV * kPanelBytes);
      load_rows<kPanelBytes, kPanelsV>(smem.dout, sm90.dout, smem.full_o, tile.queries,
                                       tile.first_row, tile.head);
    }
    ptx::mbarrier_wait(smem.empty_v[stage_v.index], stage_v.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(smem.full_v[stage_v.index], kPanelsV * kPanelBytesK);
    load_rows<kPanelBytesK, kPanelsV>(smem.v[stage_v.index], sm90.v, smem.full_v[stage_v.index],
                                      tile.keys, block * kKeys, tile.head_kv);
    stage_v.advance();
    if (block == tile.begin) {
      ptx::mbarrier_arrive_expect_tx(smem.full_q, kPanels * kPanelBytes);
      load_rows<kPanelBytes>(smem.q, sm90.q, smem.full_q, tile.queries, tile.first_row, tile.head);
    }
    ptx::mbarrier_wait(smem.empty_k[stage_k.index], stage_k.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(smem.full_k[stage_k.index], kPanels * kPanelBytesK);
    load_rows<kPanelBytesK>(smem.k[stage_k.index], sm90.k, smem.full_k[stage_k.index], tile.keys,
                            block * kKeys, tile.head_kv);
    stage_k.advance();
  }
}

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    backward_queries_sm90(const __grid_constant__ ForwardParams params,
                          const __grid_constant__ BackwardParams backward,
                          const __grid_constant__ Sm90BackwardParams sm90) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Smem& smem = *reinterpret_cast<Smem*>(shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  QueryTile tile;
  if (!find_queries(tile, params)) return;

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(sm90.q);
    ptx::prefetch_tensormap(sm90.k);
    ptx::prefetch_tensormap(sm90.v);
    ptx::prefetch_tensormap(sm90.dout);
    ptx::mbarrier_init(smem.full_q, 1);
    ptx::mbarrier_init(smem.full_o, 1);
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(smem.full_k[i], 1);
      ptx::mbarrier_init(smem.empty_k[i], 4 * kConsumers);
    }
    for (int i = 0; i < kStagesV; ++i) {
      ptx::mbarrier_init(smem.full_v[i], 1);
      ptx::mbarrier_init(smem.empty_v[i], 4 * kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<24>();
    if (threadIdx.x == 0) load(smem, sm90, tile);
  } else {
    ptx::setmaxnreg_inc<240>();
    const long long statistics =
        statistics_row(params, sm90, tile.batch, tile.head, tile.statistics_row + tile.first_row);
    Consumer consumer{smem, tile, sm90.scale_log2, warpgroup - 1};
    consumer.run(sm90.score_start + statistics, sm90.dp_start + statistics);
    consumer.write(params, backward, backward.nonfinite);
  }
}
