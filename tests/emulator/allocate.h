// Where a function's registers lie.
#pragma once

#include <cstdint>
#include <vector>

#include "text.h"

namespace emulator {

struct Allocation {
  std::vector<uint32_t>
      places;  // of each register: the byte in the warp's storage; of a predicate: its index
  uint32_t bytes = 0;  // of a warp's storage
  uint32_t predicates = 0;
};

// The first predicates: true in all lanes, and one that is only written.
constexpr uint32_t kTruePredicate = 0;
constexpr uint32_t kSinkPredicate = 1;

// Registers that never live at the same time share a row, beginning at byte `first` of the storage:
// the compiler gives every value a register of its own, thousands of them, which would not fit the
// host's caches. With `share` false each has a row of its own.
//
// An instruction's results never share a row with its operands, so that handlers may write results
// before they have read all operands.
Allocation allocate(const Function& function, uint32_t first, bool share);

}  // namespace emulator
