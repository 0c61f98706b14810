#include "wgmma_rows.h"

#include <array>
#include <utility>

namespace emulator {
namespace {

// Where a descriptor's numbers are: addresses and offsets count 16 bytes.
constexpr int kLeadingBit = 16, kStrideBit = 32, kBaseOffsetBit = 49, kSwizzleBit = 62;
constexpr uint32_t kFieldMask = 0x3fff;
constexpr int kSwizzleBytes[] = {16, 128, 64, 32};  // 16: none

uint32_t field(uint64_t descriptor, int bit) { return (descriptor >> bit & kFieldMask) * 16; }

// The position of a column of 16 in a panel: that of the column's element in a register of D, which
// has columns 2t (even registers) or 2t + 1 (odd ones) of 8.
constexpr int place_in_panel(int column) {
  return column / 8 * 8 + column % 2 * 4 + column % 8 / 2;
}

template <int kDistance, int... kLane>
void exchange(Floats& low, Floats& high, std::integer_sequence<int, kLane...>) {
  const Words from_low = {
      (kLane & kDistance ? kWidth + kLane - kDistance : static_cast<uint32_t>(kLane))...};
  const Words from_high = {
      (kLane & kDistance ? kWidth + kLane : static_cast<uint32_t>(kLane + kDistance))...};
  const Floats both = __builtin_shuffle(low, high, from_low);
  high = __builtin_shuffle(low, high, from_high);
  low = both;
}

template <int kDistance>
void transpose_blocks(Floats (&rows)[kWidth]) {
  for (int i = 0; i < kWidth; ++i)
    if ((i & kDistance) == 0)
      exchange<kDistance>(rows[i], rows[i + kDistance], std::make_integer_sequence<int, kWidth>());
}

void transpose(Floats (&rows)[kWidth]) {
  transpose_blocks<1>(rows);
  transpose_blocks<2>(rows);
  transpose_blocks<4>(rows);
  transpose_blocks<8>(rows);
}

// Four neighbouring floats of 16, four times.
template <int kFirst>
Floats repeat(Floats row) {
  constexpr int i = kFirst;
  return __builtin_shufflevector(row, row, i, i + 1, i + 2, i + 3, i, i + 1, i + 2, i + 3, i, i + 1,
                                 i + 2, i + 3, i, i + 1, i + 2, i + 3);
}

// `a[k][r][h]`: element k of rows 8r + 4h to 8r + 4h + 3, each four times: as the lanes 16h to 16h
// + 15 of a register have them.
using Rows = Floats[kWgmmaDepth][2][2];

// The sums of `kGroups` groups of 8 columns.
template <int kGroups>
void multiply_groups(const Rows& a, const Floats* panel, bool accumulate, float* const* d) {
  Floats sums[kGroups][2][2][2] = {};  // group of columns, parity of the column, r, h
  for (int k = 0; k < kWgmmaDepth; ++k) {
    const Floats b[2][2] = {{repeat<0>(panel[k]), repeat<4>(panel[k])},
                            {repeat<8>(panel[k]), repeat<12>(panel[k])}};
    for (int j = 0; j < kGroups; ++j)
      for (int parity = 0; parity < 2; ++parity)
        for (int r = 0; r < 2; ++r)
          for (int h = 0; h < 2; ++h) sums[j][parity][r][h] += a[k][r][h] * b[j][parity];
  }
  for (int j = 0; j < kGroups; ++j)
    for (int parity = 0; parity < 2; ++parity)
      for (int r = 0; r < 2; ++r)
        for (int h = 0; h < 2; ++h) {
          float* to = d[4 * j + 2 * r + parity] + kWidth * h;
          Floats sum = sums[j][parity][r][h];
          if (accumulate) sum += load<Floats>(to);
          store(to, sum);
        }
}

}  // namespace

void SharedOperand::read(SharedBytes shared, int first, int count,
                         uint16_t (*to)[kWgmmaDepth]) const {
  const int span = kSwizzleBytes[descriptor >> kSwizzleBit];
  if (span == 16) throw std::runtime_error("a wgmma operand without a swizzle");
  if (descriptor >> kBaseOffsetBit & 7)
    throw std::runtime_error("a matrix descriptor with a base offset");
  const uint32_t start = field(descriptor, 0), leading = field(descriptor, kLeadingBit),
                 stride = field(descriptor, kStrideBit);
  const uint32_t swizzle = span - 16;  // the bits of an address that change
  const auto chunk = [&](uint32_t address) {
    address ^= address >> 3 & swizzle;
    if (address < shared.base || address + 16 > shared.end)
      throw std::runtime_error("a matrix descriptor leads out of shared memory, to " +
                               std::to_string(address));
    return shared.bytes + (address - shared.base);
  };
  if (!mn_major) {
    for (int row = first; row < first + count; ++row) {
      const uint32_t address = start + row / 8 * stride + row % 8 * span;
      std::memcpy(to[row - first], chunk(address), 16);
      std::memcpy(to[row - first] + 8, chunk(address + 16), 16);
    }
    return;
  }
  const int chunks = span / 16;  // of 8 elements each, in a line of the pattern
  for (int row = first; row < first + count; row += 8) {
    const int panel = row / 8 / chunks, in_line = row / 8 % chunks;
    for (int k = 0; k < kWgmmaDepth; ++k) {
      uint16_t elements[8];
      std::memcpy(elements,
                  chunk(start + panel * leading + in_line * 16 + k / 8 * stride + k % 8 * span),
                  16);
      for (int i = 0; i < 8; ++i) to[row - first + i][k] = elements[i];
    }
  }
}

void WgmmaColumns::set_panel(Element element, int i,
                             const uint16_t (&columns)[kWidth][kWgmmaDepth]) {
  Floats(&panel)[kWgmmaDepth] = panels[i];
  for (int column = 0; column < kWidth; ++column)
    panel[place_in_panel(column)] = floats_of(element, load<Halves>(columns[column]));
  transpose(panel);
}

void multiply_rows(const float (&a)[16][kWgmmaDepth], const WgmmaColumns& b, int columns,
                   bool accumulate, float* const* d) {
  alignas(64) Rows rows;
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < kWgmmaDepth; ++k) {
      float* four = reinterpret_cast<float*>(&rows[k][row / 8][row % 8 / 4]) + row % 4 * 4;
      for (int t = 0; t < 4; ++t) four[t] = a[row][k];
    }
  for (int i = 0; i < columns / 16; ++i)
    multiply_groups<2>(rows, b.panels[i], accumulate, d + 8 * i);
  if (columns % 16)
    multiply_groups<1>(rows, b.panels[columns / 16], accumulate, d + columns / 2 - 4);
}

}  // namespace emulator
