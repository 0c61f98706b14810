// A launch of a kernel: its blocks, and who runs when.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "decode.h"

namespace emulator {

struct Options {
  uint64_t seed = 0;       // 0: warps take turns in their order
  bool late = false;       // see Launch::late
  bool races = false;      // look for races in shared memory
  bool initcheck = false;  // and for reads of what was never written there
  uint64_t limit = 0;      // of instructions of warps; 0: none
  uint32_t resident = 2;   // clusters that run at once, at first
  uint32_t slice = 1000;   // instructions until it is the next warp's turn
};

// Throws Failure for a text that is not like "seed=1 late=1".
Options read_options(const std::string& text);

// Runs the kernel to its end. Throws Failure.
void launch(Program& program, const std::array<uint32_t, 3>& grid,
            const std::array<uint32_t, 3>& block, uint32_t dynamic_shared, void* const* arguments,
            uint32_t multiprocessors, const Options& options);

}  // namespace emulator
