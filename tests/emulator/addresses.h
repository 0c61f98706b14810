// The addresses of a warp's lanes, checked all at once where they lie together.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "machine.h"
#include "memory.h"

namespace emulator {

// What an instruction on memory keeps in Instr::detail.
struct Access {
  Space space = Space::kGeneric;
  int base_bytes = 8;  // of the address's register
  int64_t offset = 0;
  int bytes = 0;  // of an element in memory
  int register_bytes = 0;
  bool is_signed = false;
  int count = 1;  // of elements
  // Of the memory consistency model: atomic, volatile, relaxed or stronger; and what is stronger.
  bool strong = false, acquires = false, releases = false;
};

inline const Access& access_of(const Instr& in) { return *static_cast<const Access*>(in.detail); }

// Host addresses of a warp's lanes; those of inactive lanes are some active lane's.
struct Pointers {
  alignas(64) uint64_t address[kLanes];

  uint8_t* operator[](int lane) const { return reinterpret_cast<uint8_t*>(address[lane]); }
};

// `warp.active` must not be 0. Fails for an address outside of memory or not aligned to an access.
Pointers pointers(Warp& warp, const Instr& in, const Access& access);

// Reads space, base and offset of an address operand: `in.a` and what Access says of addresses.
// The modifiers name the space; without one addresses are generic.
void read_address(const Statement& statement, const Operand& operand, Instr& instr,
                  Decoding& decoding, Access& access);

}  // namespace emulator
