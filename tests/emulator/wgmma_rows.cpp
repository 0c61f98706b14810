#include "wgmma_rows.h"

#ifdef __AVX__
#include <immintrin.h>
#endif

#include "machine.h"

// Products of 16-bit numbers are exact: a sum that is contracted with one is the same and faster.
#pragma GCC optimize("fp-contract=fast")

namespace emulator {
namespace {

// Where a descriptor's numbers are: addresses and offsets count 16 bytes.
constexpr int kLeadingBit = 16, kStrideBit = 32, kBaseOffsetBit = 49, kSwizzleBit = 62;
constexpr uint32_t kFieldMask = 0x3fff;
constexpr int kSwizzleBytes[] = {16, 128, 64, 32};  // 16: none

uint32_t field(uint64_t descriptor, int bit) { return (descriptor >> bit & kFieldMask) * 16; }

// As many lanes as a register of the host holds, and four neighbouring floats in each four lanes.
using Four = float __attribute__((vector_size(16)));
#if defined(__AVX512F__)
using Lanes = Floats;
Lanes repeat(const float* four) { return _mm512_broadcast_f32x4(_mm_loadu_ps(four)); }
#elif defined(__AVX__)
using Lanes = float __attribute__((vector_size(32)));
Lanes repeat(const float* four) {
  return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(four));
}
#else
using Lanes = Four;
Lanes repeat(const float* four) { return load<Lanes>(four); }
#endif
constexpr int kPart = sizeof(Lanes) / sizeof(float), kParts = kLanes / kPart;

// `a[k][r][h]`: element k of A in the rows that part h of the lanes has of a register of D: row 8r
// + lane / 4.
using Rows = Lanes[kWgmmaDepth][2][kParts];

void transpose(Four (&rows)[4]) {
  using Order = int __attribute__((vector_size(16)));
  const Four low01 = __builtin_shuffle(rows[0], rows[1], Order{0, 4, 1, 5});
  const Four high01 = __builtin_shuffle(rows[0], rows[1], Order{2, 6, 3, 7});
  const Four low23 = __builtin_shuffle(rows[2], rows[3], Order{0, 4, 1, 5});
  const Four high23 = __builtin_shuffle(rows[2], rows[3], Order{2, 6, 3, 7});
  rows[0] = __builtin_shuffle(low01, low23, Order{0, 1, 4, 5});
  rows[1] = __builtin_shuffle(low01, low23, Order{2, 3, 6, 7});
  rows[2] = __builtin_shuffle(high01, high23, Order{0, 1, 4, 5});
  rows[3] = __builtin_shuffle(high01, high23, Order{2, 3, 6, 7});
}

// The sums of `kQuads` quads of a panel from `first` on, as many as the host has registers for.
template <int kQuads>
void multiply_quads(const Rows& a, const float (*panel)[16], int first, bool accumulate,
                    float* const* d) {
  Lanes sums[kQuads][2][kParts] = {};
  for (int k = 0; k < kWgmmaDepth; ++k)
    for (int quad = 0; quad < kQuads; ++quad) {
      const Lanes b = repeat(&panel[k][4 * (first + quad)]);
      for (int r = 0; r < 2; ++r)
        for (int h = 0; h < kParts; ++h) sums[quad][r][h] += a[k][r][h] * b;
    }
  for (int quad = 0; quad < kQuads; ++quad)
    for (int r = 0; r < 2; ++r)
      for (int h = 0; h < kParts; ++h) {
        float* to = d[(first + quad) / 2 * 4 + 2 * r + (first + quad) % 2] + kPart * h;
        Lanes sum = sums[quad][r][h];
        if (accumulate) sum += load<Lanes>(to);
        std::memcpy(to, &sum, sizeof sum);
      }
}

}  // namespace

void SharedOperand::read(SharedBytes shared, int first, int count, uint16_t (*to)[kWgmmaDepth],
                         std::vector<uint32_t>* addresses) const {
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
    if (addresses) addresses->push_back(address);
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

void WgmmaColumns::set_panel(Element element, int i, const uint16_t (&columns)[16][kWgmmaDepth]) {
  alignas(64) float floats[16][kWgmmaDepth];
  for (int column = 0; column < 16; ++column)
    store(floats[column], floats_of(element, load<Halves>(columns[column])));
  for (int quad = 0; quad < 4; ++quad)
    for (int k = 0; k < kWgmmaDepth; k += 4) {
      Four block[4];
      for (int t = 0; t < 4; ++t)
        block[t] = load<Four>(&floats[quad / 2 * 8 + 2 * t + quad % 2][k]);
      transpose(block);
      for (int t = 0; t < 4; ++t) std::memcpy(&panels[i][k + t][4 * quad], &block[t], sizeof(Four));
    }
}

void multiply_rows(const float (&a)[16][kWgmmaDepth], const WgmmaColumns& b, int columns,
                   bool accumulate, float* const* d) {
  alignas(64) Rows rows;
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < kWgmmaDepth; ++k) {
      float* lanes = reinterpret_cast<float*>(rows[k][row / 8]) + row % 8 * 4;
      for (int t = 0; t < 4; ++t) lanes[t] = a[row][k];
    }
  constexpr int kQuads = sizeof(Lanes) == 64 ? 4 : 1;  // at a time
  for (int i = 0; i < columns / 16; ++i)
    for (int quad = 0; quad < 4; quad += kQuads)
      multiply_quads<kQuads>(rows, b.panels[i], quad, accumulate, d + 8 * i);
  for (int quad = 0; quad < columns % 16 / 4; ++quad)
    multiply_quads<1>(rows, b.panels[columns / 16], quad, accumulate, d + columns / 16 * 8);
}

}  // namespace emulator
