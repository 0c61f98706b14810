// One row of logits, shared by the blocks of a cluster: which part is whose, and what they reduce
// together.
#pragma once

#include "ptx/cluster.cuh"

constexpr int kGroup = 256;  // indices that a warp takes together: eight a lane, 32 apart, as
                             // tile/philox.cuh numbers them
constexpr int kWarps = Config::threads / 32;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kMaxFloat = 3.402823466e38f;
#define kInfinity __int_as_float(0x7f800000)

struct Segment {  // indices [begin, end)
  int begin, end;
};

__device__ __forceinline__ int rank_in_cluster() {
  return Config::cluster > 1 ? ptx::cluster_ctarank() : 0;
}

__device__ __forceinline__ Segment own_segment(int vocab) {
  const int groups = (vocab + kGroup - 1) / kGroup;
  const int part = (groups + Config::cluster - 1) / Config::cluster * kGroup;
  const int begin = min(rank_in_cluster() * part, vocab);
  return {begin, min(begin + part, vocab)};
}

// The two halves of a first meeting before blocks write to each other: all are there, no more.
__device__ __forceinline__ void arrive_cluster() {
#if __CUDA_ARCH__ >= 900
  if constexpr (Config::cluster > 1) ptx::cluster_arrive_relaxed();
#endif
}

__device__ __forceinline__ void wait_cluster() {
#if __CUDA_ARCH__ >= 900
  if constexpr (Config::cluster > 1) ptx::cluster_wait();
#endif
}

__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  if constexpr (Config::cluster > 1) {
    ptx::cluster_barrier();
    return;
  }
#endif
  __syncthreads();
}

template <class T>
__device__ __forceinline__ T* of_rank(T* pointer, int rank) {
#if __CUDA_ARCH__ >= 900
  if constexpr (Config::cluster > 1) return ptx::mapa(pointer, rank);
#endif
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

// In the order of ranks: by descending score, equals by ascending index.
__device__ __forceinline__ unsigned long long rank_key(float score, int i) {
  return static_cast<unsigned long long>(ordered(score)) << 32 | (0xffffffffu - unsigned(i));
}

__device__ __forceinline__ float key_score(unsigned long long key) {
  return from_ordered(unsigned(key >> 32));
}

__device__ __forceinline__ int key_index(unsigned long long key) {
  return int(0xffffffffu - unsigned(key));
}

// Clamped to [0, 1]; NaN is 0.
__device__ __forceinline__ float unit(float share) { return fminf(fmaxf(share, 0.0f), 1.0f); }

// What log2(p) grows by for each unit of a logit. Finite, since 0 times it must be 0.
__device__ __forceinline__ float log2_per_logit(float temperature) {
  return fminf(kLog2e / temperature, kMaxFloat);
}

struct Add {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

struct Range {
  float high, low;
};

struct Widen {
  __device__ __forceinline__ Range operator()(Range a, Range b) const {
    return {fmaxf(a.high, b.high), fminf(a.low, b.low)};
  }
};

template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int lanes) {
  return __shfl_xor_sync(0xffffffffu, value, lanes);
}

__device__ __forceinline__ Range shuffle_xor(Range value, int lanes) {
  return {shuffle_xor(value.high, lanes), shuffle_xor(value.low, lanes)};
}

template <class T, class Op>
__device__ __forceinline__ T reduce_warp(T value, Op op) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = op(value, shuffle_xor(value, lanes));
  return value;
}

// Of floats that are not NaN.
__device__ __forceinline__ float largest_of_warp(float value) {
  return from_ordered(__reduce_max_sync(0xffffffffu, ordered(value)));
}

// Reduces one value a thread over the cluster, in an order that nothing but the shape of the kernel
// decides. `slots` holds kWarps values, its own for each reduction of a launch, since other blocks
// may read it until they meet again.
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
