// Vector clocks: what a thread knows to have happened before.
//
// Whoever accesses memory has a slot, and a clock that goes on whenever it releases: a lane of a
// warp, a lane's copies, a warp's products, the phases of an mbarrier. An access is known as its
// slot and its clock.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulator {

// By slot: the latest clock that is known; slots beyond the end: none.
struct Clocks {
  std::vector<uint32_t> at;

  bool has(uint32_t slot, uint32_t clock) const { return slot < at.size() && clock <= at[slot]; }
  void add(uint32_t slot, uint32_t clock) {
    if (slot >= at.size()) at.resize(slot + 1);
    at[slot] = std::max(at[slot], clock);
  }
  void join(const Clocks& other) {
    if (at.size() < other.at.size()) at.resize(other.at.size());
    for (size_t i = 0; i < other.at.size(); ++i) at[i] = std::max(at[i], other.at[i]);
  }
};

struct Knowledge {
  Clocks seen;    // accesses that happened before
  Clocks fenced;  // those of them with a fence.proxy.async between them and now
  Clocks inits;   // those before a fence.mbarrier_init: only what they initialised is known

  void join(const Knowledge& other) {
    seen.join(other.seen);
    fenced.join(other.fenced);
    inits.join(other.inits);
  }
};

}  // namespace emulator
