// Merges partial results over the blocks of a cluster, through distributed shared memory, and over
// the clusters of a sequence and key head, through global memory.
#pragma once

#include "decoding/combine.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

namespace decoding {

// What the blocks of a cluster send a block: their partial results of the columns of O that it
// merges. To wait for `received` is to wait for these alone, where a barrier of the cluster would
// also wait until all blocks' writes have been acknowledged.
template <int kRows, int kHeadDim, int kCluster>
struct Inbox {
  static constexpr int kColumns = kHeadDim / kCluster;
  static constexpr int kBytes = kCluster * kRows * (kColumns * 4 + 8);

  FourColumns<float> o[kCluster][kRows][kColumns / 4];
  float2 max_sum[kCluster][kRows];
  ptx::Mbarrier received;

  // By one thread, before the block arrives at the barrier of the cluster that the others await
  // before they send.
  __device__ __forceinline__ void open() {
    ptx::mbarrier_init(received, 1);
    ptx::mbarrier_arrive_expect_tx(received, kBytes);
  }

  // Sends four columns of a row, of all of O, to the block that merges them. The first kCluster
  // threads of a row also send the row's maximum and sum to a block each.
  template <class T>
  __device__ __forceinline__ void send(int rank, int row, int vec, const Partial<T>& partial) {
    const int owner = vec / (kColumns / 4), own_vec = vec % (kColumns / 4);
    ptx::store_async(o[rank][row][own_vec], partial.o.x, received, owner);
    if (vec < kCluster)
      ptx::store_async(max_sum[rank][row], partial.max, partial.sum, received, vec);
  }

  // Four of this block's columns of a row, merged over the cluster's blocks: each of kCluster lanes
  // has one block's partial result, and all get the whole.
  template <class T>
  __device__ __forceinline__ Partial<T> merged(int row, int vec, int peer) const {
    const float2 its_max_sum = max_sum[peer][row];
    Partial<T> whole;
    whole.max = its_max_sum.x;
#pragma unroll
    for (int distance = 1; distance < kCluster; distance *= 2)
      whole.max = fmaxf(whole.max, __shfl_xor_sync(~0u, whole.max, distance));
    whole.add(o[peer][row][vec], its_max_sum.x, its_max_sum.y);
#pragma unroll
    for (int distance = 1; distance < kCluster; distance *= 2) {
      whole.sum += __shfl_xor_sync(~0u, whole.sum, distance);
#pragma unroll
      for (int e = 0; e < 4; ++e) whole.o.x[e] += __shfl_xor_sync(~0u, whole.o.x[e], distance);
    }
    return whole;
  }
};

template <int kRows, int kHeadDim>
struct Inbox<kRows, kHeadDim, 1> {};

// What a block of one of several clusters leaves of its kColumns columns of a row, in packets of 16
// bytes that each hold the launch's id, as combine.cuh's do.
template <int kColumns>
struct ClusterPartial {
  ptx::B128 max_sum;
  ptx::B128 o[kColumns / 4][2];
};

// Those of a pair of a sequence and a key head, whose blocks are blockIdx.x: kCluster of each of
// its clusters.
template <class T, int kRows, int kHeadDim, int kCluster>
struct ClusterPartials {
  using Row = ClusterPartial<kHeadDim / kCluster>;
  static constexpr int kBatch = 8 / kCluster;  // of a lane's that are requested together

  const DecodeParams& params;

  __device__ __forceinline__ Row& at(int cluster, int row) const {
    const unsigned pair = blockIdx.z * gridDim.y + blockIdx.y;
    const unsigned block = pair * gridDim.x + cluster * kCluster + blockIdx.x % kCluster;
    return static_cast<Row*>(params.workspace)[block * kRows + row];
  }

  // Leaves a result that kCluster lanes have; each writes a packet.
  __device__ __forceinline__ void put(int row, int vec, int lane, const Partial<T>& whole) const {
    Row& partial = at(blockIdx.x / kCluster, row);
    const auto put_packet = [&](ptx::B128& packet, float x, float y) {
      const float2 numbers = {x, y};
      ptx::store_relaxed(&packet,
                         {reinterpret_cast<const unsigned long long&>(numbers), params.launch_id});
    };
    if (lane == 0) put_packet(partial.o[vec][0], whole.o.x[0], whole.o.x[1]);
    if (lane == 1) put_packet(partial.o[vec][1], whole.o.x[2], whole.o.x[3]);
    if (lane == 2 % kCluster && vec == 0) put_packet(partial.max_sum, whole.max, whole.sum);
  }

  // Four columns of a row, merged over the pair's clusters, of which each of kCluster lanes takes
  // every kCluster-th. Waits for their partial results, of eight clusters at a time.
  __device__ __forceinline__ Partial<T> merged(int row, int vec, int lane) const {
    const int clusters = gridDim.x / kCluster;
    Partial<T> whole;
#pragma unroll 1
    for (int first = 0; first < clusters; first += kBatch * kCluster) {
      ptx::B128 max_sum[kBatch], o[kBatch][2];
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const Row& partial = at(min(first + i * kCluster + lane, clusters - 1), row);
          max_sum[i] = ptx::load_relaxed(&partial.max_sum);
          o[i][0] = ptx::load_relaxed(&partial.o[vec][0]);
          o[i][1] = ptx::load_relaxed(&partial.o[vec][1]);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          missing |= max_sum[i].high != params.launch_id || o[i][0].high != params.launch_id ||
                     o[i][1].high != params.launch_id;
      } while (__any_sync(~0u, missing));
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        Row& partial = at(min(first + i * kCluster + lane, clusters - 1), row);
        partial.o[vec][0].high = partial.o[vec][1].high = 0;
        if (vec == 0) partial.max_sum.high = 0;  // all lanes have read it
        if (first + i * kCluster + lane < clusters) {
          const float2 x = reinterpret_cast<const float2&>(max_sum[i].low);
          whole.rescale(fmaxf(whole.max, x.x));
          const float2 columns[2] = {reinterpret_cast<const float2&>(o[i][0].low),
                                     reinterpret_cast<const float2&>(o[i][1].low)};
          whole.add({columns[0].x, columns[0].y, columns[1].x, columns[1].y}, x.x, x.y);
        }
      }
    }
#pragma unroll
    for (int distance = 1; distance < kCluster; distance *= 2) whole.add_lane(distance);
    return whole;
  }
};

}  // namespace decoding
