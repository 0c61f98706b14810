// Numbers that are stored as codes: x = unrotate(scale * code + minimum) + offset, in float, one
// rounding an operation, so that the bits are those of cuattn/reference/quantization.py.
#pragma once

#include "ptx/cvt.cuh"
#include "ptx/ieee.cuh"
#include "ptx/math.cuh"
#include "tile/accumulator.cuh"

namespace tile {

// As FORMATS in cuattn/_quantized.py.
enum Format : int { kPlain, kInt8, kInt4, kE4m3, kE5m2 };

// Signs of the rotation, a bit a channel, repeated every 256: ROTATION_SIGNS of
// cuattn/_quantized.py.
constexpr unsigned kRotationSigns[8] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344,
                                        0xa4093822, 0x299f31d0, 0x082efa98, 0xec4e6c89};

// The signs of channels `channel`, `channel` + 1, … up to the next multiple of 32, lowest first.
__device__ __forceinline__ unsigned rotation_signs(int channel) {
  return kRotationSigns[channel / 32 % 8] >> channel % 32;
}

// `x` with the sign of a channel.
__device__ __forceinline__ float with_rotation_sign(float x, int channel) {
  return __uint_as_float(__float_as_uint(x) ^ rotation_signs(channel) << 31);
}

// The number that a code stands for. Codes of 4 bits are 0 to 15 with a minimum, the number plus 8
// without one.
__device__ __forceinline__ float number_of_code(int format, unsigned code, bool has_minimum) {
  // Conversions of integers take several times as long as the bits of a float beyond 2^23.
  if (format == kInt4)
    return __uint_as_float(code | 0x4b000000) - (has_minimum ? 0x1p23f : 0x1p23f + 8.0f);
  if (format == kInt8) return __uint_as_float(code ^ 0x4b000080) - (0x1p23f + 128.0f);
  if (format == kE5m2) return __half2float(__ushort_as_half(code << 8));  // the upper half of one
  // Exponents of 4 bits, biased by 7, become those of a half, which are biased by 15.
  const unsigned bits = (code & 0x80) << 8 | (code & 0x7f) << 7;
  const float value = __half2float(__ushort_as_half(bits)) * 256.0f;
  return (code & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000) : value;
}

// The number in a column of a row of codes.
__device__ __forceinline__ float code_value(int format, const unsigned char* row, int column,
                                            bool has_minimum) {
  const unsigned code = format == kInt4 ? row[column / 2] >> column % 2 * 4 & 15 : row[column];
  return number_of_code(format, code, has_minimum);
}

// A scale or a minimum.
__device__ __forceinline__ float scale_value(const void* scales, long long at, bool is_float) {
  return is_float ? static_cast<const float*>(scales)[at]
                  : __bfloat162float(static_cast<const __nv_bfloat16*>(scales)[at]);
}

// Positive x to the nearest bfloat16 that is not less; infinity and NaN to NaN.
__device__ __forceinline__ float rounded_up(float x) {
  const unsigned bits = __float_as_uint(x) + 0xffff & 0xffff0000;
  return __float_as_uint(x) < 0x7f800000 ? __uint_as_float(bits) : __uint_as_float(0x7fc00000);
}

// x to the nearest bfloat16 that is not more; never -0.
__device__ __forceinline__ float rounded_down(float x) {
  const unsigned bits = __float_as_uint(ptx::add_rn(x, 0.0f));
  return __uint_as_float(bits + (bits >> 31 ? 0xffff : 0) & 0xffff0000);
}

// The largest code without a minimum.
__device__ __forceinline__ float largest_code(int format) {
  return format == kInt8 ? 127.0f : format == kInt4 ? 7.0f : format == kE4m3 ? 448.0f : 57344.0f;
}

// The scale of numbers whose largest magnitude, or distance from the least to the largest, is
// `extent`: in units of the largest code, `codes`, rounded up, so that no code saturates, with a
// finite inverse; 1 for 0, NaN for what is not finite.
__device__ __forceinline__ float scale_of(float extent, float codes) {
  // extent / codes, correctly rounded: the second correction of a quotient is (Markstein, 1990).
  // The instruction sequence of CUDA's own division calls a function where operands are extreme,
  // which costs registers; here such quotients are raised to the least scale.
  const float inverse = codes == 127.0f   ? 1.0f / 127.0f
                        : codes == 15.0f  ? 1.0f / 15.0f
                        : codes == 7.0f   ? 1.0f / 7.0f
                        : codes == 448.0f ? 1.0f / 448.0f
                                          : 1.0f / 57344.0f;
  float quotient = ptx::mul_rn(extent, inverse);
  quotient = ptx::fma_rn(ptx::fma_rn(-quotient, codes, extent), inverse, quotient);
  quotient = ptx::fma_rn(ptx::fma_rn(-quotient, codes, extent), inverse, quotient);
  const float scale = rounded_up(quotient);
  return __float_as_uint(extent) == 0 ? 1.0f : scale < 0x1p-126f ? 0x1p-126f : scale;
}

// 1 / scale, correctly rounded, of scales that are found.
__device__ __forceinline__ float inverse_of(float scale) {
  const float inverse = ptx::rcp(scale);
  return ptx::fma_rn(inverse, ptx::fma_rn(-scale, inverse, 1.0f), inverse);
}

// Of scales that are given, which may be of any size, 0, or no number.
__device__ __forceinline__ float inverse_of_any(float scale) {
  const float factor = fabsf(scale) < 0x1p-100f ? 0x1p24f : fabsf(scale) > 0x1p100f ? 0x1p-24f : 1;
  const float scaled = ptx::mul_rn(scale, factor), approximate = ptx::rcp(scaled);
  const bool extreme = scaled == 0 || fabsf(scaled) == infinity();
  return ptx::mul_rn(extreme ? approximate : inverse_of(scaled), factor);
}

// The bits of a bfloat16 that a float holds; those of NumPy's NaN for any NaN.
__device__ __forceinline__ unsigned short bfloat16_bits(float x) {
  return x == x ? __float_as_uint(x) >> 16 : 0x7fc0;
}

// x / scale within the range of a format's codes; NaN gives 0.
__device__ __forceinline__ float clipped(float x, float inverse_scale, float least, float largest) {
  const float scaled = ptx::mul_rn(x, inverse_scale);
  return scaled == scaled ? fminf(fmaxf(scaled, least), largest) : 0.0f;
}

// Integers of |x| < 2^22, rounded to even, as the low bits of what is returned, with `offset`
// added.
__device__ __forceinline__ unsigned rounded_bits(float x, float offset) {
  return __float_as_uint(ptx::add_rn(x, 0x1.8p23f + offset));
}

// A number to a float of 8 bits: kMantissa explicit bits, exponents from kLeastExponent.
template <int kMantissa, int kLeastExponent>
__device__ __forceinline__ unsigned float8_bits(float x) {
  const unsigned sign = __float_as_uint(x) >> 24 & 0x80;
  const float magnitude = fabsf(x);
  // Below the least normal number codes count multiples of the least subnormal one.
  constexpr float kSteps = kMantissa == 3 ? 0x1p9f : 0x1p16f;
  static_assert(kLeastExponent == (kMantissa == 3 ? -6 : -14), "steps are for these formats");
  if (magnitude < (kMantissa == 3 ? 0x1p-6f : 0x1p-14f))
    return sign | rounded_bits(magnitude * kSteps, 0) & 0xff;
  constexpr int kShift = 23 - kMantissa;
  const unsigned bits = __float_as_uint(magnitude);
  const unsigned even = bits + (1u << (kShift - 1)) - 1 + (bits >> kShift & 1);
  return sign | (even >> kShift) - (127 + kLeastExponent - 1 << kMantissa);
}

// Four codes of 8 bits, the first lowest, of numbers within the format's range.
__device__ __forceinline__ unsigned four_codes(int format, const float (&x)[4]) {
  unsigned codes[4];
  if (format == kInt8) {
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = rounded_bits(x[i], 0);
  } else if (format == kE4m3) {
#if __CUDA_ARCH__ >= 890
    return ptx::cvt_e4m3x2(x[0], x[1]) | ptx::cvt_e4m3x2(x[2], x[3]) << 16;
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = float8_bits<3, -6>(x[i]);
#endif
  } else {
#if __CUDA_ARCH__ >= 890
    return ptx::cvt_e5m2x2(x[0], x[1]) | ptx::cvt_e5m2x2(x[2], x[3]) << 16;
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = float8_bits<2, -14>(x[i]);
#endif
  }
  return __byte_perm(__byte_perm(codes[0], codes[1], 0x0040),
                     __byte_perm(codes[2], codes[3], 0x0040), 0x5410);
}

// Eight codes of 4 bits, the first lowest, of integers from 0 to 15 with a minimum, else of -7
// to 7.
__device__ __forceinline__ unsigned eight_nibbles(const float (&x)[8], bool has_minimum) {
  // Each is what it is above the bits of 1.5 * 2^23, whose multiples are taken off at the end.
  unsigned word = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) word = word * 16 + rounded_bits(x[i], has_minimum ? 0 : 8);
  return word - 0x4b400000u * 0x11111111u;
}

// The largest power of two that divides `head_dim`: how many channels are rotated together.
__device__ __forceinline__ int rotation_block(int head_dim) { return head_dim & -head_dim; }

// What a Hadamard matrix of n columns is multiplied by: 1 / sqrt(n).
__device__ __forceinline__ float hadamard_scale(int n) {
  const int log2 = __popc(n - 1);
  return __int_as_float(127 - log2 / 2 << 23) * (log2 % 2 ? 0x1.6a09e6p-1f : 1.0f);
}

// Hadamard transform of a row of a warp, which has column 32 i + lane in x[i], in blocks of `block`
// columns.
template <int n>
__device__ __forceinline__ void hadamard(float (&x)[n], int block) {
  for (int distance = 1; distance < 32 && distance < block; distance *= 2) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], distance);
      x[i] = threadIdx.x & distance ? ptx::sub_rn(other, x[i]) : ptx::add_rn(x[i], other);
    }
  }
#pragma unroll
  for (int distance = 1; distance < n; distance *= 2) {
    if (32 * distance >= block) break;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (i & distance || i + distance >= n) continue;
      const float a = x[i], b = x[i + distance];
      x[i] = ptx::add_rn(a, b);
      x[i + distance] = ptx::sub_rn(a, b);
    }
  }
  const float scale = hadamard_scale(block);
#pragma unroll
  for (int i = 0; i < n; ++i) x[i] = ptx::mul_rn(x[i], scale);
}

}  // namespace tile
