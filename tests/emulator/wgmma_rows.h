// A warp's part of wgmma.mma_async: 16 of the 64 rows of D = A B + C, on plain data. The warps of a
// warpgroup need not meet: each computes its rows when it gets there.
#pragma once

#include <cstdint>
#include <vector>

#include "floats.h"

namespace emulator {

constexpr int kWgmmaDepth = 16;  // columns of A and rows of B
constexpr int kMaxWgmmaColumns = 256;

// Shared memory as wgmma reads it: the byte of an address is bytes[address - base].
struct SharedBytes {
  const uint8_t* bytes;
  uint32_t base, end;
};

// An operand in shared memory: what its matrix descriptor says.
struct SharedOperand {
  uint64_t descriptor;
  bool mn_major;  // rows of A or columns of B are contiguous, not those of the sum

  // Reads `count` rows of A (columns of B) from `first` on, 16 elements each. Both are multiples of
  // 8. Throws std::runtime_error with what the descriptor cannot mean. `addresses`, if it is not
  // null, gets that of each 16 bytes that are read.
  void read(SharedBytes shared, int first, int count, uint16_t (*to)[kWgmmaDepth],
            std::vector<uint32_t>* addresses = nullptr) const;
};

// B as `multiply_rows` takes it: 16 columns make a panel, of which row k has the 16 floats of k. A
// register of D has even columns of 8 or odd ones: a panel's floats are four quads, which are the
// even columns of the first 8, the odd ones, and those of the next 8.
struct WgmmaColumns {
  alignas(64) float panels[kMaxWgmmaColumns / 16][kWgmmaDepth][16];

  // From the elements of columns 16 i to 16 i + 15, where the last 8 may be left out.
  void set_panel(Element element, int i, const uint16_t (&columns)[16][kWgmmaDepth]);
};

// d[i] are registers of D, in the layout of rawkernels/ptx/wgmma.cuh, for 8 columns in each 4.
void multiply_rows(const float (&a)[16][kWgmmaDepth], const WgmmaColumns& b, int columns,
                   bool accumulate, float* const* d);

}  // namespace emulator
