// Eight neighbouring features of a row of codes with one scale, as 16-bit numbers in four words:
// what quantization/dequantize.cu makes of them, bit for bit.
#pragma once

#include "ptx/prmt.cuh"
#include "tile/eight.cuh"
#include "tile/softmax.cuh"

namespace tile {

// Codes of 4 bits have a minimum. A scale is bfloat16, in a lower half; a minimum in the upper one.
// `kShort`: in fewer instructions, where `is_short` says of the scale that these give the same.
template <class T, int kFormat, bool kShort = false>
struct EightNumbers {
  static constexpr bool kHasMinimum = kFormat == kInt4;

  // What a row's scale is given as.
  __device__ __forceinline__ static unsigned prepared(unsigned scale) {
    return kHasMinimum ? scale : scale << 16;
  }

  __device__ __forceinline__ uint4 operator()(const unsigned (&words)[2], unsigned scale) const {
    float x[8];
    expand_eight<kFormat>(x, words, kHasMinimum);
    const float factor = __uint_as_float(kHasMinimum ? scale << 16 : scale);
    const float minimum = __uint_as_float(scale & 0xffff0000);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      x[e] = ptx::mul_rn(factor, x[e]);
      if (kHasMinimum) x[e] = ptx::add_rn(x[e], minimum);
    }
    return make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]),
                      pack<T>(x[6], x[7]));
  }
};

// In pairs of bfloat16: a code and a scale have eight bits each, so that their product is rounded
// once, to what a product of floats would be rounded to.
template <>
struct EightNumbers<__nv_bfloat16, kInt8, false> {
  __device__ __forceinline__ static unsigned prepared(unsigned scale) {
    return ptx::prmt(scale, 0, 0x1010);
  }

  // Of two codes in the bytes that `selector` picks. Behind the upper byte of 128, the lower seven
  // bits of a code are 128 more than they; so its eighth, the last of the exponent, makes 256 of
  // 128, which a negative code exceeds itself by.
  __device__ __forceinline__ static unsigned pair(unsigned word, unsigned selector,
                                                  unsigned scale) {
    const unsigned both = ptx::prmt(word, 0x43434343, selector);
    const unsigned excess = both & 0xff80ff80, sum = both & 0xff7fff7f;
    const auto of = [](unsigned x) { return reinterpret_cast<const __nv_bfloat162&>(x); };
    const __nv_bfloat162 number = __hmul2(__hsub2(of(sum), of(excess)), of(scale));
    return reinterpret_cast<const unsigned&>(number);
  }

  __device__ __forceinline__ uint4 operator()(const unsigned (&words)[2], unsigned scale) const {
    return make_uint4(pair(words[0], 0x4140, scale), pair(words[0], 0x4342, scale),
                      pair(words[1], 0x4140, scale), pair(words[1], 0x4342, scale));
  }
};

// In pairs of bfloat16: a code of 4 bits times a scale has 12 bits. Where the minimum's exponent is
// so near to the scale's that a float holds their sum, both ways round the exact sum, once.
template <>
struct EightNumbers<__nv_bfloat16, kInt4, true> {
  __device__ __forceinline__ static unsigned prepared(unsigned scale) { return scale; }

  // The sum's highest bit is that of 2^(scale + 5) or 2^(minimum + 1) at most, its lowest that of
  // 2^(scale - 7) or 2^(minimum - 7) at least, by the exponents of both: 24 bits from -11 to 14. Of
  // 2^124 and more, 15 scales would overflow before the minimum is added.
  __device__ __forceinline__ static bool is_short(unsigned scale) {
    const unsigned minimum = scale >> 16;
    const int exponent = scale >> 7 & 0xff, more = static_cast<int>(minimum >> 7 & 0xff) - exponent;
    const bool is_near = more >= -11 && more <= 14, is_zero = (minimum & 0x7fff) == 0;
    return exponent < 127 + 124 && (is_near || is_zero);
  }

  __device__ __forceinline__ uint4 operator()(const unsigned (&words)[2], unsigned scale) const {
    const auto of = [](unsigned x) { return reinterpret_cast<const __nv_bfloat162&>(x); };
    const __nv_bfloat162 factor = of(ptx::prmt(scale, 0, 0x1010)),
                         minimum = of(ptx::prmt(scale, 0, 0x3232)), middle = of(0x43004300);
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The even feature's code in the lower half, the odd one's in the upper, behind 128.
      const unsigned both = ptx::prmt(words[0], words[0] >> 4, 0x0400 + 0x1111 * i);
      const __nv_bfloat162 number =
          __hfma2(__hsub2(of((both & 0x000f000f) | 0x43004300), middle), factor, minimum);
      pairs[i] = reinterpret_cast<const unsigned&>(number);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};

// Whether there is a short way.
template <class T, int kFormat>
constexpr bool kHasShortNumbers = false;
template <>
constexpr bool kHasShortNumbers<__nv_bfloat16, kInt4> = true;

}  // namespace tile
