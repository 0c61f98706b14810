// Vectors of floats in GCC's vector extensions, of which the compiler makes what the host has, and
// how float16 and bfloat16 become floats, exactly.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace emulator {

using Floats = float __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));
constexpr int kWidth = 16;  // numbers in each of them

template <class Vector>
inline Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

inline void store(void* to, Floats floats) { std::memcpy(to, &floats, sizeof floats); }

enum class Element : uint8_t { kF16, kBf16 };

inline Element element_named(const std::string& name) {
  if (name == "f16") return Element::kF16;
  if (name == "bf16") return Element::kBf16;
  throw std::runtime_error("no products of elements ." + name);
}

// 16 elements as floats. Exponents of float16 are rebiased by a product, which normalises subnormal
// numbers.
inline Floats floats_of(Element element, Halves halves) {
  const Words bits = __builtin_convertvector(halves, Words);
  if (element == Element::kBf16) return std::bit_cast<Floats>(bits << 16);
  const Words magnitude = (bits & 0x7fffu) << 13;
  const Floats scaled = std::bit_cast<Floats>(magnitude) * 0x1p112f;
  const Words infinite = std::bit_cast<Words>(magnitude >= (0x7c00u << 13)) & 0x7f800000u;
  return std::bit_cast<Floats>(std::bit_cast<Words>(scaled) | infinite | (bits & 0x8000u) << 16);
}

// Operand A of mma.sync and of a warp's part of wgmma, 16 rows of 16 elements: from four registers,
// of which lane 4g + t holds columns 2t and 2t + 1 of row g in the first, row g + 8 in the second,
// and the same of the last eight columns in the others.
inline void floats_of_fragment(Element element, const uint32_t* const (&registers)[4],
                               float (&a)[16][16]) {
  for (int i = 0; i < 4; ++i) {
    const int row = 8 * (i % 2), column = 8 * (i / 2);
    for (int g = 0; g < 8; g += 2) {  // 16 elements are two rows
      alignas(64) float rows[2][8];
      store(rows, floats_of(element, load<Halves>(registers[i] + 4 * g)));
      std::memcpy(&a[row + g][column], rows[0], sizeof rows[0]);
      std::memcpy(&a[row + g + 1][column], rows[1], sizeof rows[1]);
    }
  }
}

}  // namespace emulator
