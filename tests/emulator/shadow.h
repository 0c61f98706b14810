// What was last done to each byte of a block's shared memory, and by whom.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "clocks.h"
#include "machine.h"

namespace emulator {

enum class Touch : uint8_t { kRead, kWrite, kUpdate };  // kUpdate: an atomic operation

// Who accesses memory, what it knows, and how its access is kept.
struct Agent {
  // The access as it is kept: lane `lane` of `slots`, which are one slot or a warp's 32.
  uint32_t slots, lane, clock;
  uint32_t place;  // the instruction's place in the code
  bool strong;     // atomic, volatile, relaxed and stronger: no race with others of its kind
  bool async;      // by the async proxy
  bool same;       // writes what is there already

  // What it knows: what all lanes of its warp know, and what its lane alone knows, if anything.
  const Knowledge* common;
  const Knowledge* own;
  // Its own thread's accesses, which come before in program order: some of the 32 slots of a warp.
  uint32_t self_slots, self_lanes;
  // What the lanes of its warp read until this clock has been read.
  uint32_t reads_met;
  // Its own thread's copies that it has waited for: a slot and a clock of each kind.
  std::array<uint32_t, 2> waited_slots, waited_clocks;

  bool knows(uint32_t slot, uint32_t at) const {
    return common->seen.has(slot, at) || knows_otherwise(slot, at);
  }
  bool has_fenced(uint32_t slot, uint32_t at) const {
    return common->fenced.has(slot, at) || (own && own->fenced.has(slot, at));
  }
  bool is_self(uint32_t slot) const {
    return slot - self_slots < kLanes && self_lanes >> (slot - self_slots) & 1;
  }

 private:
  bool knows_otherwise(uint32_t slot, uint32_t at) const;
};

// An access of a byte or of a word, or equal ones by several lanes of a warp.
struct Touched {
  uint32_t slots = 0, lanes = 0, clock = 0;  // slots 0: none
  uint32_t place = 0;                        // with the flags below

  static constexpr uint32_t kStrong = 1u << 31, kAsync = 1u << 30, kUpdates = 1u << 29;
  static constexpr uint32_t kFlags = kStrong | kAsync | kUpdates;
  bool is(uint32_t flag) const { return place & flag; }
};

// What is wrong with two accesses.
enum class Wrong : uint8_t {
  kUnordered,      // neither happens before the other
  kUnfenced,       // an ordinary write and the async proxy, without fence.proxy.async
  kUninitialised,  // a read of what nobody has written
};

class Shadow {
 public:
  // Told of what is wrong at an address: the access, and the one before it.
  struct Listener {
    virtual void wrong(Wrong what, const Shadow& where, uint32_t address, const Agent& agent,
                       Touch touch, const Touched& before) = 0;

   protected:
    ~Listener() = default;
  };

  Shadow(size_t bytes, bool initialised, Listener& listener)
      : cells_((bytes + 3) / 4), initialised_(initialised), listener_(&listener) {}

  void touch(uint32_t address, uint32_t bytes, const Agent& agent, Touch touch);

 private:
  // A word, or one of its bytes where accesses were of parts of the word.
  struct Cell {
    Touched written;  // the last write that all later accesses came after
    Touched read;     // an access since then,
    uint32_t more;    // and further ones: a number of lists_; of a split word one of bytes_
  };
  static constexpr uint32_t kSplit = ~0u;  // written.slots of a split word

  void touch(Cell& cell, uint32_t address, const Agent& agent, Touch touch);
  void check(const Touched& before, uint32_t address, const Agent& agent, Touch touch);
  void add_read(Cell& cell, const Agent& agent, const Touched& access);
  void split(Cell& cell);
  void clear_list(Cell& cell);

  std::vector<Cell> cells_;
  bool initialised_;  // whether to tell of reads of what nobody has written
  Listener* listener_;
  std::vector<std::vector<Touched>> lists_{1};  // number 0: none
  std::vector<uint32_t> unused_lists_;
  std::vector<std::array<Cell, 4>> bytes_;
};

}  // namespace emulator
