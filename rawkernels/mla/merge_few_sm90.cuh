// Merges what the thread blocks of mla/decode_few_sm90.cu have of a tile of rows: those of a
// cluster through distributed shared memory, and the clusters through global memory.
//
// A thread block of a cluster merges kOwnColumns columns of O. It gets the others' by st.async, in
// the place of Q and of keys, which by then nobody needs. A cluster leaves its result for the last
// one of the tile in packets of 16 bytes, half of each numbers and half the launch's id, so that
// neither flags nor fences are needed: who reads the id has read the numbers.
#pragma once

#include "mla/layout_sm90.cuh"
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

// What a cluster leaves of a row's columns that a block merges.
struct ClusterPartial {
  ptx::B128 max_sum;
  ptx::B128 o[kOwnVecs][2];
};
static_assert(sizeof(ClusterPartial) == 16 * (kOwnColumns / 2 + 1),
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
  static constexpr int kBatch = 8;   // partial results that a thread has on their way
  static constexpr int kLanes = 16;  // clusters that a tile may have before the last one
  static_assert(kOwnVecs % kLanes == 0 && kLanes % kBatch == 0, "lanes of a row have all of them");

  FewSmem& smem;
  const DecodeParams& params;
  const decoding::Split& split;
  const FewBlocks blocks;
  const int rows;  // that exist

  __device__ __forceinline__ void run() const {
    ptx::mbarrier_wait_cluster(smem.received, 0);
    const int last = blocks.clusters() - 1;
    const int items = rows * kOwnVecs;
#pragma unroll 1
    for (int first = 0; first < items; first += kConsumers) {
      const int item = first + threadIdx.x;
      if (item - static_cast<int>(threadIdx.x % 32) >= items) return;  // a warp of lanes without
      // Lanes without a row do as the one before does, which is of the same warp.
      const int row = min(item / kOwnVecs, rows - 1), vec = item % kOwnVecs;
      const bool exists = item < items;
      Sum whole = merged_over_cluster(row, vec);
      if (FewBlocks::cluster() < last) {
        if (exists) leave(row, vec, whole);
        continue;
      }
      // Clusters have lower indices than those that wait for them: no deadlock.
      if (last > 0) add_clusters(last, row, vec, exists, whole);
      const int column = FewBlocks::rank() * kOwnColumns + vec * 4;
      if (exists)
        put_columns<T>(params, output_row<T, kRows>(params, split, row, whole.max, whole.sum),
                       column, whole.o);
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

  __device__ __forceinline__ ClusterPartial& partial(int cluster, int row) const {
    const int block =
        (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + cluster * kCluster + FewBlocks::rank();
    return static_cast<ClusterPartial*>(params.workspace)[block * kRows + row];
  }

  __device__ __forceinline__ void leave(int row, int vec, const Sum& whole) const {
    ClusterPartial& target = partial(FewBlocks::cluster(), row);
    put_packet(target.o[vec][0], whole.o.x[0], whole.o.x[1]);
    put_packet(target.o[vec][1], whole.o.x[2], whole.o.x[3]);
    if (vec == 0) put_packet(target.max_sum, whole.max, whole.sum);
  }
  __device__ __forceinline__ void put_packet(ptx::B128& packet, float x, float y) const {
    const float2 numbers = {x, y};
    ptx::store_relaxed(&packet,
                       {reinterpret_cast<const unsigned long long&>(numbers), params.launch_id});
  }

  // Adds what the `count` clusters before the last one have left. Each of 16 lanes waits for the
  // maximum and sum of one cluster, which are written last, so that the rest is read once. The id
  // in memory needs no initial value, since no stale content is this launch's random one, and is
  // cleared for a replay of the launch in a CUDA graph.
  __device__ __forceinline__ void add_clusters(int count, int row, int vec, bool exists,
                                               Sum& whole) const {
    const int lane = threadIdx.x % kLanes;
    ptx::B128& own = partial(min(lane, count - 1), row).max_sum;
    ptx::B128 max_sum;
    do {
      max_sum = ptx::load_relaxed(&own);
    } while (__any_sync(~0u, max_sum.high != params.launch_id));
    if (exists) own.high = 0;  // all lanes that read it are of this warp
    float2 its = floats(max_sum);
    if (lane >= count) its = {tile::negative_infinity(), 0.0f};
    float new_max = its.x;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2)
      new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, distance));
    whole.rescale(fmaxf(whole.max, new_max));
    const float factor =
        Sum::power(its.x - (whole.max == tile::negative_infinity() ? 0.0f : whole.max));
    float sum = factor * its.y;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2)
      sum += __shfl_xor_sync(~0u, sum, distance);
    whole.sum += sum;
#pragma unroll 1
    for (int first = 0; first < count; first += kBatch) {
      ptx::B128 o[kBatch][2];
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          // What does not exist is read as the last is, and its factor is 0.
          const ClusterPartial& part = partial(min(first + i, count - 1), row);
          o[i][0] = ptx::load_relaxed(&part.o[vec][0]);
          o[i][1] = ptx::load_relaxed(&part.o[vec][1]);
          missing |= o[i][0].high != params.launch_id || o[i][1].high != params.launch_id;
        }
      } while (__any_sync(~0u, missing));
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float weight = __shfl_sync(~0u, factor, first + i, kLanes);
        const float2 low = floats(o[i][0]), high = floats(o[i][1]);
        const float columns[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
        for (int e = 0; e < 4; ++e) whole.o.x[e] = fmaf(weight, columns[e], whole.o.x[e]);
        ClusterPartial& part = partial(min(first + i, count - 1), row);
        if (exists) part.o[vec][0].high = part.o[vec][1].high = 0;
      }
    }
  }
  __device__ __forceinline__ static float2 floats(const ptx::B128& packet) {
    return reinterpret_cast<const float2&>(packet.low);
  }
};

}  // namespace mla
