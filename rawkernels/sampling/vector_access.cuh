// Loads and stores of the logits that each thread of a block keeps in registers: four neighbouring
// tokens in one access where rows are aligned for it (16 bytes of float32), else one by one.
#pragma once

#include "sampling/row.cuh"

union Vec4 {  // of Config::dtype, in memory
  unsigned long long bits[sizeof(Config::dtype) / 2];
  Config::dtype values[4];
  __device__ Vec4() {}
};

// Whether rows consist of whole, aligned vectors.
__device__ __forceinline__ bool has_vectors(const void* rows, long long row_stride, int vocab) {
  return reinterpret_cast<unsigned long long>(rows) % sizeof(Vec4) == 0 && row_stride % 4 == 0 &&
         vocab % 4 == 0;
}

// Which tokens of [begin, end) are a thread's: vectors that lie a block's width apart, or single
// tokens that do, so that a warp's accesses are neighbours in either case.
struct ThreadTokens {
  int first, count;  // the first token, and the number of vectors or of tokens
  bool vectors;

  __device__ __forceinline__ ThreadTokens(int begin, int end, bool vectors)
      : first(begin + int(threadIdx.x) * (vectors ? 4 : 1)), vectors(vectors) {
    const int step = Config::threads * (vectors ? 4 : 1);
    count = max(end - first + step - 1, 0) / step;
  }

  __device__ __forceinline__ bool has(int value) const {
    return (vectors ? value / 4 : value) < count;
  }
  __device__ __forceinline__ int token(int value) const {
    return first +
           (vectors ? value / 4 * 4 * Config::threads + value % 4 : value * Config::threads);
  }
};

// x[n] becomes the logit of the thread's token n, -inf beyond its last.
template <int kValues>
__device__ __forceinline__ void load_tokens(float (&x)[kValues], const Config::dtype* logits,
                                            ThreadTokens tokens) {
  const auto* const from = logits + tokens.first;
  if (tokens.vectors) {
    Vec4 vectors[kValues / 4];
#pragma unroll
    for (int v = 0; v < kValues / 4; ++v) {
#pragma unroll
      for (int n = 0; n < 4; ++n) vectors[v].values[n] = Config::dtype(-kInfinity);
      if (v < tokens.count) {
        vectors[v] = *reinterpret_cast<const Vec4*>(from + v * Config::threads * 4);
      }
    }
#pragma unroll
    for (int n = 0; n < kValues; ++n) x[n] = to_float(vectors[n / 4].values[n % 4]);
  } else {
#pragma unroll
    for (int n = 0; n < kValues; ++n) {
      x[n] = n < tokens.count ? to_float(from[n * Config::threads]) : -kInfinity;
    }
  }
}
