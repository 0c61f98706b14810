// A row of logits that the blocks of a cluster share: which segment each block reads, how logits
// become sortable keys, and reductions over a warp, a block or the cluster.
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/math.cuh"
#include "tile/prefix_sum.cuh"

constexpr int kGroup = 256;  // tokens that a warp takes together: eight a lane, 32 apart, as
                             // tile/philox.cuh numbers them
constexpr int kWarps = Config::threads / 32;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kMaxFloat = 3.402823466e38f;
#define kInfinity __int_as_float(0x7f800000)
#define kNaN __int_as_float(0x7fc00000)

// A kernel whose clusters of Config::cluster blocks share a row.
#if __CUDA_ARCH__ >= 900
#define CLUSTER_DIMS __cluster_dims__(Config::cluster, 1, 1)
#else
#define CLUSTER_DIMS
#endif
#define ROW_KERNEL \
  extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(Config::threads, Config::blocks_per_sm)

struct Segment {  // tokens [begin, end)
  int begin, end;
};

__device__ __forceinline__ int rank_in_cluster() {
  return Config::cluster > 1 ? ptx::cluster_ctarank() : 0;
}

// Part `number` of a row in kParts parts, each of the same number of units of kUnit tokens.
template <int kUnit, int kParts>
__device__ __forceinline__ Segment part_of_row(int vocab, int number) {
  const int part = (vocab + kParts * kUnit - 1) / (kParts * kUnit) * kUnit;
  const int begin = min(number * part, vocab);
  return {begin, min(begin + part, vocab)};
}

__device__ __forceinline__ Segment own_segment(int vocab) {
  return part_of_row<kGroup, Config::cluster>(vocab, rank_in_cluster());
}

// The two halves of a first cluster barrier, before blocks write to each other's shared memory: it
// says that all blocks run, and orders no memory.
__device__ __forceinline__ void arrive_cluster() {
  if constexpr (Config::cluster > 1) ptx::cluster_arrive_relaxed();
}

__device__ __forceinline__ void wait_cluster() {
  if constexpr (Config::cluster > 1) ptx::cluster_wait();
}

__device__ __forceinline__ void sync_cluster() {
  if constexpr (Config::cluster > 1)
    ptx::cluster_barrier();
  else
    __syncthreads();
}

// The address, through distributed shared memory, of the same variable in the block of that rank.
template <class T>
__device__ __forceinline__ T* of_rank(T* pointer, int rank) {
  if constexpr (Config::cluster > 1)
    return ptx::mapa(pointer, rank);
  else
    return pointer;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Unsigned integers in the order of the floats.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// A token's rank key: a larger one ranks first, by score, and among equal scores by lower index.
__device__ __forceinline__ unsigned long long rank_key(float score, int token) {
  return static_cast<unsigned long long>(ordered(score)) << 32 | (0xffffffffu - unsigned(token));
}

__device__ __forceinline__ float key_score(unsigned long long key) {
  return from_ordered(unsigned(key >> 32));
}

__device__ __forceinline__ int key_token(unsigned long long key) {
  return int(0xffffffffu - unsigned(key));
}

// Clamped to [0, 1]; NaN becomes 0.
__device__ __forceinline__ float clamp_to_unit(float p) { return fminf(fmaxf(p, 0.0f), 1.0f); }

// What log2(p) grows by for each unit of a logit. Finite, since 0 times it must be 0.
__device__ __forceinline__ float log2_per_logit(float temperature) {
  return fminf(kLog2e / temperature, kMaxFloat);
}

// The largest of four, NaN if one of them is.
__device__ __forceinline__ float largest_of_four(const float* x) {
  return ptx::max_nan(ptx::max_nan(x[0], x[1]), ptx::max_nan(x[2], x[3]));
}

// use(i, load(i)) for i = first, first + step, … below `end`; kAhead loads are in flight together.
template <int kAhead, class Load, class Use>
__device__ __forceinline__ void for_each_ahead(int first, int end, int step, Load load, Use use) {
  for (; first < end; first += kAhead * step) {
    decltype(load(first)) loaded[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) loaded[k] = load(min(first + k * step, end - 1));
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (first + k * step < end) use(first + k * step, loaded[k]);
    }
  }
}

struct Add {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

struct Larger {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return max(a, b);
  }
};

template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int lanes) {
  return __shfl_xor_sync(0xffffffffu, value, lanes);
}

template <class T, class Op>
__device__ __forceinline__ T reduce_warp(T value, Op op) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = op(value, shuffle_xor(value, lanes));
  return value;
}

// The largest of a warp's floats, none of which is NaN.
__device__ __forceinline__ float largest_of_warp(float value) {
  return from_ordered(__reduce_max_sync(0xffffffffu, ordered(value)));
}

// The largest of a block's floats, none of which is NaN. `slots` has kWarps values.
__device__ __forceinline__ float largest_of_block(float value, float* slots) {
  value = largest_of_warp(value);
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = value;
  __syncthreads();
  return largest_of_warp(slots[threadIdx.x % kWarps]);
}

// Reduces one value a thread over the cluster, in an order that only the kernel's shape decides.
// `slots` has kWarps values, and other blocks may read it until the next cluster barrier: each
// reduction of a launch needs slots of its own, or a barrier between.
template <class T, class Op>
__device__ __forceinline__ T reduce_cluster(T value, Op op, T neutral, T* slots) {
  value = reduce_warp(value, op);
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = value;
  sync_cluster();
  value = neutral;
#pragma unroll
  for (int slot = threadIdx.x % 32; slot < Config::cluster * kWarps; slot += 32) {
    value = op(value, *of_rank(slots + slot % kWarps, slot / kWarps));
  }
  return reduce_warp(value, op);
}
