// The scale of a row that has one, and codes by it.
#pragma once

#include "ptx/prmt.cuh"
#include "tile/code_row.cuh"

namespace tile {

struct FoundScale {
  float scale, inverse, minimum;
};

// Of numbers from `least` to `most`, for which codes go from 0 to `codes`.
__device__ __forceinline__ FoundScale found_scale_above(float least, float most, float codes) {
  FoundScale found;
  found.scale = finite_scale_of(distance_of(least, most), codes, least);
  found.inverse = inverse_of(found.scale);
  found.minimum = found.scale == found.scale ? least : 0.0f;
  return found;
}

// The scale of a row of which `most` and `least` are known; both are magnitudes' where codes have
// no minimum.
template <int kFormat>
__device__ __forceinline__ FoundScale found_scale(float most, float least) {
  if constexpr (kFormat == kInt4) {
    return found_scale_above(rounded_down(least), most, 15.0f);
  } else {
    const float scale = finite_scale_of(most, largest_code(kFormat), 0.0f);
    return {scale, inverse_of(scale), 0.0f};
  }
}

// Of two rows, the second's where `second`; formats may differ.
template <int kFirst, int kSecond>
__device__ __forceinline__ FoundScale found_scale_of_either(bool second, float first_most,
                                                            float first_least, float second_most,
                                                            float second_least) {
  const float most = second ? second_most : first_most;
  if constexpr (kFirst == kSecond) {
    return found_scale<kFirst>(most, second ? second_least : first_least);
  } else {
    static_assert(kFirst != kInt4 && kSecond == kInt4, "the second alone may have a minimum");
    return found_scale_above(second ? rounded_down(second_least) : 0.0f, most,
                             second ? 15.0f : largest_code(kFirst));
  }
}

// Eight codes of 4 bits, of integers from 0 to 15 with a fraction that is rounded off.
__device__ __forceinline__ unsigned eight_whole_nibbles(const float (&x)[8]) {
  constexpr float kUnit = 0x1.8p23f;  // beyond it the lowest bit of a float is 1
  float four[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = ptx::add_rn(x[4 * half + 3], kUnit);
#pragma unroll
    for (int e = 2; e >= 0; --e)
      sum = ptx::add_rn(x[4 * half + e], ptx::fma_rn(sum, 16.0f, -15 * kUnit));
    four[half] = sum;
  }
  return ptx::prmt(__float_as_uint(four[0]), __float_as_uint(four[1]), 0x5410);
}

// The codes of eight numbers by what has been found for their row: a word of 4 bits each, or two.
template <int kFormat>
__device__ __forceinline__ auto eight_codes(float (&x)[8], float inverse, float minimum) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (kFormat == kInt4) x[e] = ptx::sub_rn(x[e], minimum);
    x[e] = ptx::mul_rn(x[e], inverse);
  }
  if constexpr (kFormat == kInt4) {
    return eight_whole_nibbles(x);
  } else {
    const float low[4] = {x[0], x[1], x[2], x[3]}, high[4] = {x[4], x[5], x[6], x[7]};
    return make_uint2(four_codes(kFormat, low), four_codes(kFormat, high));
  }
}

}  // namespace tile
