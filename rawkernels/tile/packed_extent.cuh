// What decides about the scale of numbers of 16 bits that lie in words, two in each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx/prmt.cuh"
#include "tile/code_row.cuh"

namespace tile {

template <class T>
struct PairOf {
  using type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
};

// Each half: the larger, or NaN if either is.
template <class T>
__device__ __forceinline__ unsigned larger_halves(unsigned a, unsigned b) {
  using Pair = typename PairOf<T>::type;
  const Pair larger = __hmax2_nan(reinterpret_cast<Pair&>(a), reinterpret_cast<Pair&>(b));
  return reinterpret_cast<const unsigned&>(larger);
}
template <class T>
__device__ __forceinline__ unsigned smaller_halves(unsigned a, unsigned b) {
  using Pair = typename PairOf<T>::type;
  const Pair smaller = __hmin2_nan(reinterpret_cast<Pair&>(a), reinterpret_cast<Pair&>(b));
  return reinterpret_cast<const unsigned&>(smaller);
}

constexpr unsigned kBothSigns = 0x80008000;

// -x; the operator takes subnormal numbers for 0 (ptx/ieee.cuh).
__device__ __forceinline__ float negated(float x) {
  return __uint_as_float(__float_as_uint(x) ^ 0x80000000);
}

// Of some words of a row: the largest number in the lower half, in the upper one the least with the
// other sign. (The three-way instruction takes two more words at a time, in this order.)
template <class T, int n>
__device__ __forceinline__ unsigned packed_extent(const unsigned (&words)[n]) {
  static_assert(n % 2 == 0, "the last word is taken alone");
  unsigned most = words[0], least = words[0];
#pragma unroll
  for (int i = 1; i + 1 < n; i += 2) {
    most = larger_halves<T>(larger_halves<T>(words[i], words[i + 1]), most);
    least = smaller_halves<T>(smaller_halves<T>(words[i], words[i + 1]), least);
  }
  most = larger_halves<T>(most, words[n - 1]);
  least = smaller_halves<T>(least, words[n - 1]) ^ kBothSigns;
  return larger_halves<T>(ptx::prmt(most, least, 0x5410), ptx::prmt(most, least, 0x7632));
}

}  // namespace tile
