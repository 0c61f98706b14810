// Rotates pairs of features by their token's position (RoPE): reads x once, writes out once.
// Memory-bound.
//
//   x, out (batch, seqlen, heads, head_dim), strides free but for contiguous features; positions
//   (batch, seqlen), int or long long, strides free. Of each head's features the first 2 * pairs
//   are rotated, pair i by turns[i] / 2^64 full turns a position; the others are copied. Pairs are
//   features (i, i + pairs), or (2i, 2i + 1) if interleaved.
//
// Angles are fixed-point fractions of a turn: their product with a position wraps around as angles
// do, so that no position is too large for an exact angle (Su et al., 2021, have the rotation).
//
// A unit is two vectors: kVec pairs, or up to 2 * kVec features that are copied, so that all
// threads have as much to do. 1 << lanes_shift neighbouring threads have the units of a token; each
// computes its sines once and applies them to heads_per_block heads. out may be x: a thread has
// read what it writes, and nobody else reads it.
#include "tile/accumulator.cuh"
#include "tile/vec.cuh"

using T = Config::dtype;
constexpr int kVec = Config::vec_bytes / sizeof(T);
constexpr int kMaxPairs = 256;
constexpr int kHeadsInFlight = 2;  // whose loads a thread issues before its first store

using Acc = tile::Accumulator<T>;
using Vec = tile::Vec<T, kVec>;

struct RopeParams {
  const void* x;
  void* out;
  const void* positions;
  long long x_batch, x_seq, x_head, out_batch, out_seq, out_head;  // strides
  long long position_batch, position_seq;
  double scale;  // of sines and cosines
  int tokens, seqlen, heads, head_dim;
  int pairs;
  int heads_per_block;
  int lanes_shift;
  int interleaved;
  int wide;  // positions are long long
  unsigned long long turns[kMaxPairs];
};

// Half turns: the signed fraction is in [-1/2, 1/2) of a turn.
__device__ __forceinline__ void sine_and_cosine(unsigned long long fraction, float* sine,
                                                float* cosine) {
  sincospif(static_cast<float>(static_cast<long long>(fraction)) * 0x1p-63f, sine, cosine);
}
__device__ __forceinline__ void sine_and_cosine(unsigned long long fraction, double* sine,
                                                double* cosine) {
  sincospi(static_cast<double>(static_cast<long long>(fraction)) * 0x1p-63, sine, cosine);
}

__device__ __forceinline__ void rotate_pair(T& a, T& b, Acc cosine, Acc sine) {
  const Acc x = static_cast<Acc>(a), y = static_cast<Acc>(b);
  a = static_cast<T>(x * cosine - y * sine);
  b = static_cast<T>(y * cosine + x * sine);
}

__device__ __forceinline__ void rotate_unit(Vec& a, Vec& b, const Acc (&cosine)[kVec],
                                            const Acc (&sine)[kVec], bool neighbours) {
  if (kVec > 1 && neighbours) {
    constexpr int kHalf = kVec / 2;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      rotate_pair(a.x[2 * i], a.x[2 * i + 1], cosine[i], sine[i]);
      rotate_pair(b.x[2 * i], b.x[2 * i + 1], cosine[kHalf + i], sine[kHalf + i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) rotate_pair(a.x[i], b.x[i], cosine[i], sine[i]);
  }
}

// 16-bit vectors as what they are to the memory, and streaming: 0.94 of a copy's speed instead of
// 0.75. float32 is faster without (0.96 and 0.94; H200, 4 x 8192 tokens, 2026-11-22).
constexpr bool kStreams = sizeof(T) == 2 && sizeof(Vec) == 16;

__device__ __forceinline__ Vec load(const T* source) {
  if constexpr (kStreams) {
    const uint4 x = __ldcs(reinterpret_cast<const uint4*>(source));
    return reinterpret_cast<const Vec&>(x);
  } else {
    return *reinterpret_cast<const Vec*>(source);
  }
}
__device__ __forceinline__ void store(T* target, const Vec& x) {
  if constexpr (kStreams)
    __stcs(reinterpret_cast<uint4*>(target), reinterpret_cast<const uint4&>(x));
  else
    *reinterpret_cast<Vec*>(target) = x;
}

// Two blocks a multiprocessor leave registers for the sines and the heads in flight: with more,
// some variants spill.
extern "C" __global__ void __launch_bounds__(Config::threads, 2)
    rope(const __grid_constant__ RopeParams params) {
  // Threads index the fractions differently, which the constant bank of arguments serves one after
  // the other: once a block.
  __shared__ unsigned long long turns[kMaxPairs];
  for (int i = threadIdx.x; i < params.pairs; i += Config::threads) turns[i] = params.turns[i];
  __syncthreads();

  const int lanes = 1 << params.lanes_shift;
  const int token =
      blockIdx.x * (Config::threads >> params.lanes_shift) + (threadIdx.x >> params.lanes_shift);
  if (token >= params.tokens) return;
  const int batch = token / params.seqlen, seq = token - batch * params.seqlen;
  const long long at = batch * params.position_batch + seq * params.position_seq;
  const unsigned long long position = params.wide
                                          ? static_cast<const long long*>(params.positions)[at]
                                          : static_cast<const int*>(params.positions)[at];
  const int head = blockIdx.y * params.heads_per_block;
  const int count = min(params.heads_per_block, params.heads - head);
  const T* const x = static_cast<const T*>(params.x) + batch * params.x_batch + seq * params.x_seq +
                     head * params.x_head;
  T* const out = static_cast<T*>(params.out) + batch * params.out_batch + seq * params.out_seq +
                 head * params.out_head;

  const int rotated = params.pairs / kVec;
  const int copied = (params.head_dim - 2 * params.pairs) / kVec;  // vectors
  const int units = rotated + (copied + 1) / 2;
  for (int unit = threadIdx.x & (lanes - 1); unit < units; unit += lanes) {
    const bool rotates = unit < rotated;
    int first = 2 * params.pairs + 2 * kVec * (unit - rotated), second = first + kVec;
    if (rotates) {
      first = params.interleaved ? 2 * kVec * unit : kVec * unit;
      second = first + (params.interleaved ? kVec : params.pairs);
    }
    const bool has_second = second < params.head_dim;
    Vec a[kHeadsInFlight], b[kHeadsInFlight];
    const auto load_heads = [&](int begin) {
#pragma unroll
      for (int i = 0; i < kHeadsInFlight; ++i) {
        if (begin + i >= count) break;
        a[i] = load(x + (begin + i) * params.x_head + first);
        if (has_second) b[i] = load(x + (begin + i) * params.x_head + second);
      }
    };
    load_heads(0);  // on their way while the sines are computed
    Acc cosine[kVec], sine[kVec];
    if (rotates) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        sine_and_cosine(position * turns[unit * kVec + i], &sine[i], &cosine[i]);
        sine[i] *= static_cast<Acc>(params.scale);
        cosine[i] *= static_cast<Acc>(params.scale);
      }
    }
    for (int begin = 0; begin < count; begin += kHeadsInFlight) {
      if (begin > 0) load_heads(begin);
#pragma unroll
      for (int i = 0; i < kHeadsInFlight; ++i) {
        if (begin + i >= count) break;
        if (rotates) rotate_unit(a[i], b[i], cosine, sine, params.interleaved);
        store(out + (begin + i) * params.out_head + first, a[i]);
        if (has_second) store(out + (begin + i) * params.out_head + second, b[i]);
      }
    }
  }
}
