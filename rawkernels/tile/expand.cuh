// Codes of quantised keys and values -> float16 operands of mma.sync, exactly, in registers.
//
// A word of four bytes, as ldmatrix gives it to a lane, becomes pairs of float16. int4, and int8 as
// values, are subnormal numbers: the code is their bits, so that one instruction masks two of them
// out of a word, and an operand is 2^-24 times the code; mma.sync multiplies them exactly. int8 as
// keys is put into the last bits of 1024, whose float16 are apart by one. What operands then
// exceed codes by, which are counted from the middle, is one product more: of the queries with a
// constant (keys), or of the weights (values). Neither is a pair's order that of the channels:
//
//   keys    16 bytes of a key, of which lane t has four, are one step of 16 channels, or two of
//           int4. Slots 2t, 2t + 1 and 2t + 8, 2t + 9 of a step hold the channels that are cheapest
//           to unpack; the queries' channels are put in the same order, once for a split.
//   values  a lane has two bytes of each of two keys. Rows g and g + 8 of a block of 16 columns of
//   O
//           are channels that lie side by side in a byte, or in two, and O is written in order.
//
// int4: the even channel is in the low nibble, the odd one becomes 16 times its code, and the
// query's channel or O's column is divided by 16.
#pragma once

#include "ptx/cvt_float8.cuh"
#include "tile/quantized.cuh"
#include "tile/vec.cuh"

namespace tile {

__device__ __forceinline__ unsigned subtract_pair(unsigned pair, unsigned short constant) {
  const unsigned both = constant * 0x10001u;
  const __half2 difference =
      __hsub2(reinterpret_cast<const __half2&>(pair), reinterpret_cast<const __half2&>(both));
  return reinterpret_cast<const unsigned&>(difference);
}

// What 8-bit formats have in common.
struct ByteCodes {
  static constexpr int kBits = 8;
  static constexpr int kWordSteps = 1;   // of 16 channels of a key that lanes' words hold
  static constexpr int kWordBlocks = 1;  // of 16 channels of values
  static constexpr float kUnit = 1;      // what an operand of 1 is worth
  static constexpr float kKeyUnit = 1;   // the same of a key

  // Which slot of the queries' order a channel has, and what the query is multiplied by there.
  __device__ __forceinline__ static int slot(int channel) {
    return (channel & ~15) + channel % 4 / 2 * 8 + channel % 16 / 4 * 2 + channel % 2;
  }
  __device__ __forceinline__ static float query_factor(int) { return 1; }
  // Of values: what O's rows g, or g + 8, of a block are multiplied by at the end, and the bits of
  // what operands there exceed their codes by, twice.
  __device__ __forceinline__ static float column_factor(int) { return 1; }
  __device__ __forceinline__ static constexpr unsigned value_excess(int) { return 0; }
};

template <int kFormat>
struct Codes;

template <>
struct Codes<kInt8> : ByteCodes {
  // What a key's operand exceeds its code by, at a channel.
  __device__ __forceinline__ static float key_excess(int) { return 1152; }

  __device__ __forceinline__ static void expand_keys(unsigned (&pairs)[2], unsigned word) {
    const unsigned from_128 = word ^ 0x80808080;
    pairs[0] = __byte_perm(from_128, 0x64646464, 0x4140);
    pairs[1] = __byte_perm(from_128, 0x64646464, 0x4342);
  }
  __device__ __forceinline__ static void expand_values(unsigned (&pairs)[2], unsigned word) {
    const unsigned from_128 = word ^ 0x80808080;
    pairs[0] = from_128 & 0x00ff00ff;
    pairs[1] = __byte_perm(from_128, 0, 0x4341);
  }
  __device__ __forceinline__ static float column_factor(int) { return 0x1p24f; }
  __device__ __forceinline__ static constexpr unsigned value_excess(int) { return 0x00800080; }
};

template <>
struct Codes<kE4m3> : ByteCodes {
  __device__ __forceinline__ static float key_excess(int) { return 0; }

#if __CUDA_ARCH__ >= 890
  __device__ __forceinline__ static void expand_keys(unsigned (&pairs)[2], unsigned word) {
    pairs[0] = ptx::cvt_e4m3x2(word);
    pairs[1] = ptx::cvt_e4m3x2(word >> 16);
  }
  __device__ __forceinline__ static void expand_values(unsigned (&pairs)[2], unsigned word) {
    const unsigned by_channel = __byte_perm(word, 0, 0x3120);
    pairs[0] = ptx::cvt_e4m3x2(by_channel);
    pairs[1] = ptx::cvt_e4m3x2(by_channel >> 16);
  }
#else
  // No such instruction: sign and magnitude are shifted to where float16 has them, which divides by
  // 2^8, subnormals included. NaN becomes 480, which nothing writes.
  static constexpr float kUnit = 256;
  static constexpr float kKeyUnit = 256;

  __device__ __forceinline__ static unsigned shifted(unsigned upper_bytes) {
    return upper_bytes & 0x80008000 | upper_bytes >> 1 & 0x3f803f80;
  }
  __device__ __forceinline__ static void expand_keys(unsigned (&pairs)[2], unsigned word) {
    pairs[0] = shifted(__byte_perm(word, 0, 0x1404));
    pairs[1] = shifted(__byte_perm(word, 0, 0x3424));
  }
  __device__ __forceinline__ static void expand_values(unsigned (&pairs)[2], unsigned word) {
    pairs[0] = shifted(word << 8 & 0xff00ff00);
    pairs[1] = shifted(word & 0xff00ff00);
  }
#endif
};

template <>
struct Codes<kE5m2> : ByteCodes {
  __device__ __forceinline__ static float key_excess(int) { return 0; }

  // A code is the upper half of a float16.
  __device__ __forceinline__ static void expand_keys(unsigned (&pairs)[2], unsigned word) {
    pairs[0] = __byte_perm(word, 0, 0x1404);
    pairs[1] = __byte_perm(word, 0, 0x3424);
  }
  __device__ __forceinline__ static void expand_values(unsigned (&pairs)[2], unsigned word) {
    pairs[0] = __byte_perm(word, 0, 0x2404);
    pairs[1] = word & 0xff00ff00;
  }
};

template <>
struct Codes<kInt4> {
  static constexpr int kBits = 4;
  static constexpr int kWordSteps = 2;
  static constexpr int kWordBlocks = 2;
  static constexpr float kUnit = 1;  // of values: column_factor has it
  static constexpr float kKeyUnit = 0x1p24f;

  __device__ __forceinline__ static int slot(int channel) {
    return (channel & ~31) + channel % 2 * 16 + channel / 2 % 2 * 8 + channel % 32 / 8 * 2 +
           channel / 4 % 2;
  }
  __device__ __forceinline__ static float query_factor(int channel) {
    return channel % 2 == 0 ? 1.0f : 0.0625f;
  }
  __device__ __forceinline__ static float key_excess(int channel) {
    return channel % 2 == 0 ? 0x1p-21f : 0x1p-17f;
  }
  __device__ __forceinline__ static float column_factor(int row) {
    return row == 0 ? 0x1p24f : 0x1p20f;
  }
  __device__ __forceinline__ static constexpr unsigned value_excess(int row) {
    return row == 0 ? 0x00080008 : 0x00800080;
  }

  // Even and odd channels of two steps, two pairs each.
  __device__ __forceinline__ static void expand_keys(unsigned (&pairs)[4], unsigned word) {
    const unsigned upper = word >> 8;
    pairs[0] = word & 0x000f000f;
    pairs[1] = upper & 0x000f000f;
    pairs[2] = word & 0x00f000f0;
    pairs[3] = upper & 0x00f000f0;
  }
  // Four channels, in order, of two keys.
  __device__ __forceinline__ static void expand_values(unsigned (&pairs)[4], unsigned word) {
    const unsigned upper = word >> 8;
    pairs[0] = word & 0x000f000f;
    pairs[1] = word & 0x00f000f0;
    pairs[2] = upper & 0x000f000f;
    pairs[3] = upper & 0x00f000f0;
  }
};

// Eight codes that are floats of 8 bits.
template <int kFormat>
__device__ __forceinline__ void expand_floats(float (&x)[8], const unsigned (&words)[2]) {
#if __CUDA_ARCH__ >= 890
  constexpr bool kInPairs = true;
#else
  constexpr bool kInPairs = kFormat == kE5m2;  // e4m3 by shifts has no NaN
#endif
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    unsigned pairs[2] = {};
    if (kInPairs) Codes<kFormat>::expand_keys(pairs, words[i]);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      x[4 * i + e] =
          kInPairs ? __half2float(reinterpret_cast<const Vec<__half, 2>&>(pairs[e / 2]).x[e % 2])
                   : number_of_code(kFormat, words[i] >> 8 * e & 0xff, false);
  }
}

}  // namespace tile
