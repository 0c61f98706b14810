// Merges what the thread blocks of mla/decode_few_sm90.cu have of a tile of rows: those of a
// cluster through distributed shared memory, and the clusters through global memory.
//
// A thread block of a cluster merges kOwnColumns columns of O. It gets the others' by st.async, in
// the place of Q, which by then nobody needs. A cluster leaves its result for the last one of the
// tile with a flag: packets that hold the launch's id beside their numbers, as of
// decoding/combine.cuh, would be twice as many bytes for few blocks to read.
#pragma once

#include "mla/layout_sm90.cuh"
#include "ptx/acquire_release.cuh"
#include "ptx/cluster.cuh"

namespace mla {

constexpr int kCluster = Config::cluster;
constexpr int kOwnColumns = kLatent / kCluster;
constexpr int kOwnVecs = kOwnColumns / 4;

struct FewSmem : Smem {
  float final_max[kRows];           // of this block's rows
  float2 max_sum[kCluster][kRows];  // of those of each block
  ptx::Mbarrier received;           // the cluster's blocks' results
};
static_assert(sizeof(FewSmem) <= Config::smem_bytes, "Config has to ask for all of it");

// Four columns of O of a row, of each block of the cluster.
using Inbox = decoding::FourColumns<float>[kCluster][kOwnVecs];

__device__ __forceinline__ Inbox& inbox_row(FewSmem& smem, int row) {
  return reinterpret_cast<Inbox*>(smem.q)[row];
}

// Rows of O on their way to others, in the place of odd blocks of keys, with a stride that puts
// neighbouring rows into other banks.
constexpr int kFewRows = 32, kStagedStride = kLatent + 8;
static_assert(kFewRows * kStagedStride * 4 <= sizeof(Smem::k[1]) &&
                  kFewRows * sizeof(Inbox) <= sizeof(Smem::q),
              "rows that come and rows that go have places of their own");

__device__ __forceinline__ float* staged_row(FewSmem& smem, int row) {
  return reinterpret_cast<float*>(smem.k[1]) + row * kStagedStride;
}

// What a thread block leaves of the columns that it merges, where its cluster is not the last one.
struct ClusterPartial {
  unsigned long long flag;  // the launch's id, when the rest is there
  alignas(16) float2 max_sum[kRows];
  decoding::FourColumns<float> o[kRows][kOwnVecs];
};
static_assert(sizeof(ClusterPartial) == 16 + kRows * (8 + 4 * kOwnColumns),
              "part_bytes of the Config must have room for it");

// Who has work for a tile of rows: blocks of keys are dealt out to thread blocks in turn.
struct FewBlocks {
  const int count;  // of blocks of keys

  __device__ __forceinline__ explicit FewBlocks(const decoding::Split& split)
      : count(split.end > split.begin ? (split.end - split.origin - 1) / kBlockKeys + 1 : 0) {}
  __device__ __forceinline__ static int cluster() { return blockIdx.x / kCluster; }
  __device__ __forceinline__ static int rank() { return blockIdx.x % kCluster; }
  // Of this thread block.
  __device__ __forceinline__ int own() const {
    const int first = blockIdx.x, step = gridDim.x;
    return first < count ? (count - first - 1) / step + 1 : 0;
  }
  // Thread blocks of this cluster that have any.
  __device__ __forceinline__ int peers() const {
    return min(max(count - cluster() * kCluster, 0), kCluster);
  }
  // Clusters that have any; the first has a result to write even where there are no keys.
  __device__ __forceinline__ int clusters() const {
    const int all = gridDim.x / kCluster, needed = (count + kCluster - 1) / kCluster;
    return max(min(all, needed), 1);
  }
};

// Merges a tile of rows; by the threads of both consumers, after they have sent.
struct FewMerge {
  using Sum = decoding::Partial<T>;
  static constexpr int kBatch = 8;  // partial results that a thread has on their way

  FewSmem& smem;
  const DecodeParams& params;
  const decoding::Split& split;
  const FewBlocks blocks;
  const int rows;  // that exist

  __device__ __forceinline__ void run() const {
    ptx::mbarrier_wait_cluster(smem.received, 0);
    const int before = blocks.clusters() - 1;  // clusters before the last one
    const bool is_last = FewBlocks::cluster() == before;
    if (is_last) await_clusters(before);
#pragma unroll 1
    for (int item = threadIdx.x; item < rows * kOwnVecs; item += kConsumers) {
      const int row = item / kOwnVecs, vec = item % kOwnVecs;
      Sum whole = merged_over_cluster(row, vec);
      if (is_last) {
        if (before > 0) add_clusters(before, row, vec, whole);
        put_columns<T>(params, output_row<T, kRows>(params, split, row, whole.max, whole.sum),
                       FewBlocks::rank() * kOwnColumns + vec * 4, whole.o);
      } else {
        ClusterPartial& part = partial(FewBlocks::cluster());
        part.o[row][vec] = whole.o;
        if (vec == 0) part.max_sum[row] = {whole.max, whole.sum};
      }
    }
    ptx::bar_sync(kBoth, kConsumers);
    const int thread = threadIdx.x;
    if (!is_last) {
      if (thread == 0) ptx::store_release(&partial(FewBlocks::cluster()).flag, params.launch_id);
    } else if (thread < before) {
      partial(thread).flag = 0;  // for a replay of the launch in a CUDA graph
    }
  }

 private:
  __device__ __forceinline__ Sum merged_over_cluster(int row, int vec) const {
    const int peers = blocks.peers();
    const Inbox& inbox = inbox_row(smem, row);
    Sum whole;
    float2 max_sum[kCluster];
    decoding::FourColumns<float> o[kCluster];
#pragma unroll
    for (int peer = 0; peer < kCluster; ++peer) {
      max_sum[peer] = smem.max_sum[peer][row];
      o[peer] = inbox[peer][vec];
    }
#pragma unroll
    for (int peer = 0; peer < kCluster; ++peer) {
      if (peer >= peers) {
        max_sum[peer] = {tile::negative_infinity(), 0.0f};
        o[peer] = {};
      }
      whole.max = fmaxf(whole.max, max_sum[peer].x);
    }
#pragma unroll
    for (int peer = 0; peer < kCluster; ++peer)
      whole.add(o[peer], max_sum[peer].x, max_sum[peer].y);
    return whole;
  }

  __device__ __forceinline__ ClusterPartial& partial(int cluster) const {
    const int block =
        (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + cluster * kCluster + FewBlocks::rank();
    return static_cast<ClusterPartial*>(params.workspace)[block];
  }

  // Waits for what `count` clusters leave; each lane for one of them. They have lower indices than
  // the one that waits: no deadlock. A flag in memory needs no initial value, since no stale
  // content is this launch's random id.
  __device__ __forceinline__ void await_clusters(int count) const {
#pragma unroll 1
    for (int cluster = threadIdx.x % 32; cluster < count; cluster += 32)
      while (ptx::load_acquire(&partial(cluster).flag) != params.launch_id) {
      }
    __syncwarp();
  }

  // Adds what they have left.
  __device__ __forceinline__ void add_clusters(int count, int row, int vec, Sum& whole) const {
#pragma unroll 1
    for (int first = 0; first < count; first += kBatch) {
      float2 max_sum[kBatch];
      float4 o[kBatch];
      float new_max = whole.max;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        // What does not exist is read as the last is, and not added.
        const ClusterPartial& part = partial(min(first + i, count - 1));
        max_sum[i] = __ldcg(&part.max_sum[row]);
        o[i] = __ldcg(reinterpret_cast<const float4*>(&part.o[row][vec]));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= count) max_sum[i] = {tile::negative_infinity(), 0.0f};
        new_max = fmaxf(new_max, max_sum[i].x);
      }
      whole.rescale(new_max);
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (first + i < count)
          whole.add({o[i].x, o[i].y, o[i].z, o[i].w}, max_sum[i].x, max_sum[i].y);
    }
  }
};

}  // namespace mla
