// Which tokens of a segment a thread holds in registers, and how it gets them: four neighbours at
// a time where rows allow it, so that accesses are wide, of 16 bytes for float32.
#pragma once

#include "sampling/row.cuh"

// Of Config::dtype, in memory.
union Quad {
  unsigned long long bits[sizeof(Config::dtype) / 2];
  Config::dtype values[4];
  __device__ Quad() {}
};

// Whether rows consist of whole, aligned quads.
__device__ __forceinline__ bool has_quads(const void* rows, long long row_stride, int vocab) {
  return reinterpret_cast<unsigned long long>(rows) % sizeof(Quad) == 0 && row_stride % 4 == 0 &&
         vocab % 4 == 0;
}

// The places of a thread's values among [begin, end): quads, each a block's width after the one
// before, or, where there are no quads, values, so that a warp's are neighbours again.
struct Places {
  int first, count;  // a token, and how many quads or values there are
  bool quads;

  __device__ __forceinline__ Places(int begin, int end, bool quads)
      : first(begin + int(threadIdx.x) * (quads ? 4 : 1)), quads(quads) {
    const int step = Config::threads * (quads ? 4 : 1);
    count = max(end - first + step - 1, 0) / step;
  }

  __device__ __forceinline__ bool has(int value) const {
    return (quads ? value / 4 : value) < count;
  }
  __device__ __forceinline__ int token(int value) const {
    return first + (quads ? value / 4 * 4 * Config::threads + value % 4 : value * Config::threads);
  }
};

// The values at a thread's places, -inf beyond them.
template <int kValues>
__device__ __forceinline__ void read(float (&x)[kValues], const Config::dtype* logits,
                                     Places places) {
  const auto* const from = logits + places.first;
  if (places.quads) {
    Quad quad[kValues / 4];
#pragma unroll
    for (int q = 0; q < kValues / 4; ++q) {
#pragma unroll
      for (int k = 0; k < 4; ++k) quad[q].values[k] = Config::dtype(-kInfinity);
      if (q < places.count) {
        quad[q] = *reinterpret_cast<const Quad*>(from + q * Config::threads * 4);
      }
    }
#pragma unroll
    for (int k = 0; k < kValues; ++k) x[k] = to_float(quad[k / 4].values[k % 4]);
  } else {
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      x[k] = k < places.count ? to_float(from[k * Config::threads]) : -kInfinity;
    }
  }
}

__device__ __forceinline__ void write4(float* out, float a, float b, float c, float d) {
  __stcg(reinterpret_cast<float4*>(out), make_float4(a, b, c, d));
}
