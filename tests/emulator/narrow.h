// Floating-point formats of 16 and 8 bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace emulator {

// Rounds so that a second rounding, to fewer bits, gives what one rounding would have given: an
// inexact result gets an odd last bit.
inline float to_odd_float(double x) {
  const auto rounded = static_cast<float>(x);
  const auto bits = std::bit_cast<uint32_t>(rounded);
  if (static_cast<double>(rounded) == x || x != x || bits & 1 || std::isinf(x)) return rounded;
  return std::bit_cast<float>(bits +
                              (std::abs(static_cast<double>(rounded)) > std::abs(x) ? -1u : 1u));
}

// a b + c likewise, for products that a double holds.
inline double to_odd_fma(double a, double b, double c) {
  const double p = a * b, s = p + c, q = s - p;
  const double error = (p - (s - q)) + (c - q);
  const auto bits = std::bit_cast<uint64_t>(s);
  if (error == 0.0 || error != error || bits & 1) return s;
  return std::bit_cast<double>(bits + ((error > 0) == (s > 0) ? uint64_t{1} : ~uint64_t{0}));
}

struct Float16 {
  static constexpr int kMantissaBits = 10;
  static float widen(uint16_t bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
  static uint16_t narrow(float x) {
    return x != x ? 0x7fff : std::bit_cast<uint16_t>(static_cast<_Float16>(x));
  }
  static constexpr uint16_t kLargest = 0x7bff, kInfinity = 0x7c00, kNan = 0x7fff;
};

struct Bfloat16 {
  static constexpr int kMantissaBits = 7;
  static float widen(uint16_t bits) {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
  static uint16_t narrow(float x) {
    const auto bits = std::bit_cast<uint32_t>(x);
    const auto rounded = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    return x != x ? 0x7fff : rounded;
  }
  static constexpr uint16_t kLargest = 0x7f7f, kInfinity = 0x7f80, kNan = 0x7fff;
};

template <class Half>
inline uint16_t narrow(double x) {
  return Half::narrow(to_odd_float(x));
}

// Towards zero.
template <class Half>
inline uint16_t narrow_down(double x) {
  const uint16_t rounded = narrow<Half>(x);
  const bool grew = std::abs(static_cast<double>(Half::widen(rounded))) > std::abs(x);
  return grew ? rounded - 1 : rounded;
}

// e4m3 (no infinity, one NaN, 448 the largest) and e5m2 (as float16, 57344 the largest).
struct E4m3 {
  static constexpr int kMantissaBits = 3, kBias = 7;
  static constexpr uint8_t kLargest = 0x7e, kNan = 0x7f, kInfinity = 0x7f;
  static constexpr float kMost = 448.0f;
};
struct E5m2 {
  static constexpr int kMantissaBits = 2, kBias = 15;
  static constexpr uint8_t kLargest = 0x7b, kNan = 0x7f, kInfinity = 0x7c;
  static constexpr float kMost = 57344.0f;
};

// To nearest; what is too large, infinity too, becomes the largest number.
template <class Format>
inline uint8_t narrow_saturated(float x) {
  constexpr int m = Format::kMantissaBits;
  const auto sign = static_cast<uint8_t>(std::signbit(x) << 7);
  if (x != x) return Format::kNan;
  const float size = std::abs(x);
  if (size >= Format::kMost) return sign | Format::kLargest;
  // Steps of this exponent, of subnormal numbers the least one's.
  int exponent = size > 0.0f ? std::ilogb(size) : 1 - Format::kBias;
  if (exponent < 1 - Format::kBias) exponent = 1 - Format::kBias;
  const float steps = std::nearbyint(std::scalbn(size, m - exponent));
  // A sum of the exponent's bits and the steps carries into the exponent where it has to.
  const int base = (exponent - 1 + Format::kBias) << m;
  const int bits = base + static_cast<int>(steps);
  return sign | static_cast<uint8_t>(bits > Format::kLargest ? Format::kLargest : bits);
}

template <class Format>
inline float widen8(uint8_t bits) {
  constexpr int m = Format::kMantissaBits;
  const int size = bits & 0x7f, exponent = size >> m, mantissa = size & ((1 << m) - 1);
  float x;
  if (size == Format::kNan || (Format::kInfinity != Format::kNan && size > Format::kInfinity)) {
    x = std::bit_cast<float>(0x7fc00000u);
  } else if (size == Format::kInfinity && Format::kInfinity != Format::kNan) {
    x = std::bit_cast<float>(0x7f800000u);
  } else if (exponent == 0) {
    x = std::scalbn(static_cast<float>(mantissa), 1 - Format::kBias - m);
  } else {
    x = std::scalbn(static_cast<float>(mantissa | 1 << m), exponent - Format::kBias - m);
  }
  return bits & 0x80 ? -x : x;
}

}  // namespace emulator
