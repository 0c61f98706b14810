// Eight neighbouring features of a row: the numbers that their codes stand for, and numbers on
// their way to memory.
#pragma once

#include "tile/expand.cuh"
#include "tile/vec.cuh"

namespace tile {

template <int kFormat>
__device__ __forceinline__ void expand_eight(float (&x)[8], const unsigned (&words)[2],
                                             bool has_minimum) {
  if constexpr (kFormat == kE4m3 || kFormat == kE5m2) {
    expand_floats<kFormat>(x, words);
  } else {
    // As number_of_code: bits of a float beyond 2^23, of which a code is the lowest byte.
    const bool is_int4 = kFormat == kInt4;
    const unsigned low = is_int4 ? words[0] & 0x0f0f0f0f : words[0] ^ 0x80808080;
    const unsigned high = is_int4 ? words[0] >> 4 & 0x0f0f0f0f : words[1] ^ 0x80808080;
    const float middle = !is_int4 ? 128.0f : has_minimum ? 0.0f : 8.0f;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const bool is_high = is_int4 ? e % 2 != 0 : e >= 4;
      const int byte = is_int4 ? e / 2 : e % 4;
      x[e] = __uint_as_float(__byte_perm(is_high ? high : low, 0x4b000000, 0x7650 + byte)) -
             (0x1p23f + middle);
    }
  }
}
template <class T>
__device__ __forceinline__ void store_eight(T* to, const float (&x)[8]) {
  constexpr int kEach = 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < 8; i += kEach) {
    Vec<T, kEach> vec;
#pragma unroll
    for (int e = 0; e < kEach; ++e) vec.x[e] = static_cast<T>(x[i + e]);
    __stcs(reinterpret_cast<uint4*>(to + i), reinterpret_cast<const uint4&>(vec));
  }
}

// Of a row whose kLanes neighbouring lanes have a word of each quarter, x of a pair: four words
// that follow each other for each lane. All of the row's first words are the first lane's.
template <int kLanes>
__device__ __forceinline__ uint4 gathered(const uint2 (&words)[4]) {
  static_assert(kLanes == 2 || kLanes == 4, "lanes must get whole quarters, or halves of a row");
  const auto exchange = [](unsigned& low, unsigned& high, int distance) {
    const bool upper = (threadIdx.x & distance) != 0;
    const unsigned other = __shfl_xor_sync(~0u, upper ? low : high, distance);
    low = upper ? other : low;
    high = upper ? high : other;
  };
  unsigned x[4] = {words[0].x, words[1].x, words[2].x, words[3].x};
  if (kLanes == 4) {
    exchange(x[0], x[1], 1);
    exchange(x[2], x[3], 1);
    exchange(x[0], x[2], 2);
    exchange(x[1], x[3], 2);
    return make_uint4(x[0], x[1], x[2], x[3]);
  }
  exchange(x[0], x[2], 1);
  exchange(x[1], x[3], 1);
  return make_uint4(x[0], x[2], x[1], x[3]);
}

}  // namespace tile
