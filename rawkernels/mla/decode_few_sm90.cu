// Latent attention of few sequences on Hopper, where latency decides: several clusters of thread
// blocks for each tile of 64 rows, which merge in the same launch.
//
//   What mla/decode_sm90.cu computes, with as many queries for each sequence, at most kFewRows rows
//   in a tile, and pages of at least 8 keys. Grid: (kCluster times clusters, tiles of heads times
//   tiles of rows, batch). Blocks of 64 keys are dealt out to the thread blocks of a tile in turn,
//   so that where a thread block begins is known before the sequence's length is. Two warpgroups
//   compute (consumer_sm90.cuh), a third one loads keys, and the two merge (merge_few_sm90.cuh).
//
//   No deadlock: the blocks of a cluster are resident together, and every block sends before it
//   waits for the others. The last cluster of a tile waits for clusters that come before it in the
//   grid, wait for nobody, and are resident or have ended.
#include "mla/consumer_sm90.cuh"
#include "mla/merge_few_sm90.cuh"
#include "mla/produce_sm90.cuh"
#include "ptx/setmaxnreg.cuh"

namespace mla {

// Requests Q in 16-byte pieces, with zeros in columns that do not exist, and puts zeros into rows
// that do not. A warp has every eighth row, so that where a row lies is worked out once.
__device__ __forceinline__ void request_queries(Smem& smem, const DecodeParams& params,
                                                const MlaParams& mla,
                                                const decoding::Split& split) {
  const int warp = threadIdx.x / 32 % 8, lane = threadIdx.x % 32;
  const int rope_columns = params.head_dim - params.head_dim_v;
  const int rows = split.seq.seqlen_q * params.group - split.row_tile * kRows;
  constexpr int kHalf = kLatentPanels / 2 * kPanelBytes;
#pragma unroll 4
  for (int row = warp; row < kRows; row += kConsumers / 32) {
    unsigned char* const target = smem.q[lane / 8] + Panel::at(row, lane % 8);
    if (row >= rows) {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<uint4*>(target + kHalf) = {};
      if (lane < 8) *reinterpret_cast<uint4*>(target + kRopePanel * kPanelBytes) = {};
      continue;
    }
    const int index = split.row_tile * kRows + row;
    const int token = divided_by_group(params, index);
    const int head = split.head * params.group + index - token * params.group;
    const auto row_of = [&](const void* q, const Strides& stride) {
      return static_cast<const T*>(q) + split.seq.index * stride.batch +
             (split.seq.begin_q + token) * stride.seq + head * stride.head + lane * 8;
    };
    const T* const latent = row_of(params.q, params.q_stride);
    const unsigned address = ptx::shared_address(target);
    ptx::cp_async_16(address, latent, lane * 8 < params.head_dim_v);
    ptx::cp_async_16(address + kHalf, latent + kLatent / 2,
                     lane * 8 + kLatent / 2 < params.head_dim_v);
    if (lane < 8)
      ptx::cp_async_16(address + kRopePanel * kPanelBytes, row_of(mla.q_rope, mla.q_rope_stride),
                       lane * 8 < rope_columns);
  }
}

struct FewConsumer : Consumer<true> {
  const FewBlocks blocks;
  const int rows;  // that exist

  // Q has been requested.
  __device__ __forceinline__ void run() {
    FewSmem& few = static_cast<FewSmem&>(smem);
    const int count = blocks.own();
    work = &smem.queue[0];
    ends_even = count % 2 == 1;
    ptx::cp_async_wait_all();
    ptx::fence_proxy_async();
    ptx::bar_sync(kBoth, kConsumers);  // the split is there
    if (count > 0) {
      start();
      ptx::bar_sync(kBoth, kConsumers);
      if (odd)
        odd_rounds((count + 1) / 2);
      else
        even_rounds((count + 1) / 2);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = tile::quad_sum(softmax.row_sum[r]);
        if (lane % 4 == 0) {
          smem.row_sum[odd][row + 8 * r] = sum;
          if (!odd) few.final_max[row + 8 * r] = softmax.row_max[r] * scale_log2;
        }
      }
      ptx::bar_sync(kBoth, kConsumers);  // nobody reads keys any more
      if (16 * warp < rows) stage(few);
      ptx::bar_sync(kBoth, kConsumers);
    } else {
      leave_queries();
    }
    ptx::cluster_wait();
    if (count > 0) send(few);
    FewMerge{few, params, work->split, blocks, rows}.run();
  }

  // This consumer's half of O to where keys were: sent from registers, rows would go in pieces of
  // 32 bytes.
  __device__ __forceinline__ void stage(FewSmem& few) const {
    float* const to = staged_row(few, row) + first_panel * 64 + tile::lane_column(lane);
#pragma unroll
    for (int i = 0; i < kLatent / 4; i += 4) {
      const int column = tile::fragment_column(i);
      *reinterpret_cast<float2*>(to + column) = {o[i], o[i + 1]};
      *reinterpret_cast<float2*>(to + 8 * kStagedStride + column) = {o[i + 2], o[i + 3]};
    }
  }

  // Rows to the blocks that merge their columns, and maxima and sums to all.
  __device__ __forceinline__ void send(FewSmem& few) const {
    const int rank = FewBlocks::rank();
    if (threadIdx.x < rows * kCluster) {
      const int its_row = threadIdx.x / kCluster;
      ptx::store_async(few.max_sum[rank][its_row], few.final_max[its_row],
                       smem.row_sum[0][its_row] + smem.row_sum[1][its_row], few.received,
                       threadIdx.x % kCluster);
    }
    constexpr int kVecs = kLatent / 4;
    const int vec = threadIdx.x % kVecs;
#pragma unroll 4
    for (int its_row = threadIdx.x / kVecs; its_row < rows; its_row += kConsumers / kVecs) {
      const auto& columns = reinterpret_cast<const float (&)[4]>(staged_row(few, its_row)[vec * 4]);
      ptx::store_async(inbox_row(few, its_row)[rank][vec % kOwnVecs], columns, few.received,
                       vec / kOwnVecs);
    }
  }
};
static_assert(kFewRows * kCluster <= kConsumers, "a thread sends one maximum");

// By each of four warps: half of one buffer's blocks, of which a lane has the first one's pages.
__device__ __forceinline__ void produce_few(Smem& smem, const FewBlocks& blocks, Loader& loader,
                                            int origin, int page) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  const int buffer = warp / 2, half = warp % 2;
  ptx::Mbarrier& empty = (half == 0 ? smem.empty_first : smem.empty_second)[buffer];
  const unsigned long long hint = gridDim.y > 1 ? ptx::kEvictNormal : ptx::kEvictFirst;
  const int distance = gridDim.x * kBlockKeys;
  int first = origin + blockIdx.x * kBlockKeys + buffer * distance;
  unsigned parity = 0;
#pragma unroll 1
  for (int i = buffer, count = blocks.own(); i < count; i += 2, parity ^= 1) {
    const int next_page = loader.page_of_lane(first + 2 * distance);
    ptx::mbarrier_wait(empty, parity ^ 1);
    loader.load_half_of_warp(smem, warp, first, page, hint);
    first += 2 * distance;
    page = next_page;
  }
}

}  // namespace mla

extern "C" __global__ void __cluster_dims__(Config::cluster, 1, 1)
    __launch_bounds__(Config::threads, 1)
        mla_decode_few_sm90(const __grid_constant__ DecodeParams params,
                            const __grid_constant__ MlaParams mla_params,
                            const __grid_constant__ Maps maps) {
  using namespace mla;
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  FewSmem& smem = *reinterpret_cast<FewSmem*>(dynamic_smem);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  // Reads with long latency are requested first: the sequence's length, the pages of the first
  // blocks, and Q. A page that lies beyond the length may be any number. TMA gives zeros where
  // there is no such page, and what it reads otherwise is hidden and cleared with the keys beyond
  // the end.
  decoding::Split split;
  split.seq = {static_cast<int>(blockIdx.z), 0, params.seqlen_q,
               decoding::count_keys(params, blockIdx.z)};
  split.row_tile = blockIdx.y % mla_params.row_tiles;
  split.head = blockIdx.y / mla_params.row_tiles;
  const bool begins_with_length = params.window_left != kUnbounded;
  const auto cut = [&] {
    const auto keys = decoding::cut_keys<kRows, kBlockKeys>(params, split.seq, split.row_tile);
    split.begin = keys.begin;
    split.end = keys.end;
  };
  split.begin = params.first_key;
  if (begins_with_length) cut();
  split.origin = split.begin & -kBlockKeys;
  if (warpgroup == 2) {
    Loader loader = {params, maps};
    loader.row = loader.table.entry(split.seq.index, 0);
    loader.end = params.capacity;
    const int buffer = threadIdx.x / 64 % 2;
    const int page =
        loader.page_of_lane(split.origin + (blockIdx.x + buffer * gridDim.x) * kBlockKeys);
    if (threadIdx.x == kConsumers) {
      ptx::mbarrier_init(smem.received, 1);
      prepare(smem, maps);
    }
    ptx::bar_sync(kLoaders, 128);  // barriers are there
    ptx::bar_arrive(kRequested, Config::threads);
    ptx::setmaxnreg_dec<Config::producer_registers>();
    cut();
    loader.end = split.end;
    produce_few(smem, FewBlocks(split), loader, split.origin, page);
  } else {
    request_queries(smem, params, mla_params, split);
    ptx::bar_sync(kRequested, Config::threads);
    ptx::setmaxnreg_inc<Config::consumer_registers>();
    cut();
    const FewBlocks blocks(split);
    if (FewBlocks::cluster() >= blocks.clusters()) {
      ptx::cp_async_wait_all();
      return;
    }
    const int rows = min(kRows, split.seq.seqlen_q * params.group - split.row_tile * kRows);
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(smem.received, blocks.peers() * rows * (kOwnColumns * 4 + 8));
      smem.queue[0].split = split;
    }
    FewConsumer{{smem, params, mla_params, warpgroup == 1}, blocks, rows}.run();
  }
}
