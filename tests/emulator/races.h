// Races in shared memory, found by happens-before: README.md says what is reported.
//
// A warp's `races` is null unless the launch has the option; handlers tell of what they do only
// then. What is found does not depend on when warps run, nor on `late`: an access is kept when its
// instruction is issued, and is unordered with all that did not wait for it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "addresses.h"
#include "shadow.h"

namespace emulator {

// What is found in a launch.
struct RaceLog {
  const Instr* code = nullptr;  // of the program: Agent::place counts from here
  bool initialised = false;     // whether to tell of reads of what nobody has written
  std::string text;
  std::set<std::array<uint32_t, 3>> known;  // each pair of instructions is told of once

  void add(uint32_t kind, uint32_t place, uint32_t before, const std::string& what);
};

// Asynchronous work of a lane or a warp, which is waited for in groups.
struct Sequence {
  uint32_t begun = 0, done = 0;
  std::vector<uint32_t> committed;

  // Waits for all groups but the latest `count`.
  void wait(uint64_t count) {
    if (committed.size() > count) done = std::max(done, committed[committed.size() - 1 - count]);
  }
};

struct BlockRaces {
  BlockRaces(Block& of, const RaceLog& log, Shadow::Listener& listener)
      : block(&of), shadow(of.shared.size(), log.initialised, listener) {}

  Block* block;
  Shadow shadow;
  uint32_t begun_slot = 0;  // whoever knows it knows that the block runs
  // Accesses that the block's end has to come after, with the places of their instructions, and
  // what its threads knew at their ends.
  Clocks outside;
  std::unordered_map<uint32_t, uint32_t> outside_places;
  Clocks known_at_end;
};

struct ClusterRaces;

struct WarpRaces {
  ClusterRaces* cluster = nullptr;
  BlockRaces* block = nullptr;
  uint32_t slots = 0;  // of its lanes
  uint32_t clock = 1;
  uint32_t reads_met = 0;  // the clock as its lanes last exchanged values
  // What all lanes know, and what a lane has come to know since all of them met, if anything.
  Knowledge common;
  std::array<std::shared_ptr<const Knowledge>, kLanes> own;
  // What each lane releases by a relaxed atomic operation after a fence, and acquires by a fence
  // after one.
  std::array<std::shared_ptr<const Knowledge>, kLanes> released_by_fence;
  std::array<std::shared_ptr<Knowledge>, kLanes> acquired_by_fence;
  // Copies by cp.async and bulk copies from shared memory, by lane, and products.
  enum Kind { kCopies, kBulk };
  std::array<uint32_t, 2> sequence_slots{};
  std::array<std::array<Sequence, kLanes>, 2> sequences;
  uint32_t wgmma_slot = 0;
  Sequence wgmma;
  // The phases at which it has arrived last.
  std::shared_ptr<Knowledge> barrier_phase, cluster_phase;

  // What a lane knows.
  Knowledge of_lane(int lane) const;
  // What some lanes have done until now is to be known to those who acquire `to`.
  void release(uint32_t lanes, Knowledge& to);
  void acquire(const Warp& warp, uint32_t lanes, const Knowledge& from);
  // An agent for an access by a lane.
  Agent agent(const Instr& in, int lane) const;
};

// An mbarrier's phases.
struct MbarrierRaces {
  struct Side {
    uint32_t slot = 0;  // its clock: how many phases are complete
    Knowledge arriving, completed;
  };
  // What the own block has done, and what other blocks have, which waits with .cluster acquire.
  std::array<Side, 2> sides;
  uint32_t phases = 0;
  uint32_t init_slot = 0, init_clock = 0;
  uint32_t address = 0;
};

struct ClusterRaces final : Shadow::Listener {
  RaceLog* log = nullptr;
  std::vector<std::unique_ptr<BlockRaces>> blocks;
  std::vector<std::unique_ptr<WarpRaces>> warps;
  std::unordered_map<const uint8_t*, MbarrierRaces> mbarriers;
  std::unordered_map<const uint8_t*, Knowledge> atomics;  // what releases left there
  std::shared_ptr<Knowledge> cluster_phase;
  std::vector<std::string> names{""};  // of slots

  // `count` slots in a row; of several, `name` gets the lane's number.
  uint32_t new_slots(uint32_t count, const std::string& name);
  // The block that has a place in its shared memory; null: none.
  BlockRaces* owner(const Warp& warp, const uint8_t* at) const;
  // An access by an agent of the warp.
  void touch(Warp& warp, const uint8_t* at, uint32_t bytes, const Agent& agent, Touch touch);
  void wrong(Wrong what, const Shadow& where, uint32_t address, const Agent& agent, Touch touch,
             const Touched& before) override;
  void end(BlockRaces& block);
};

// Begins to follow a cluster's blocks.
void follow_races(Cluster& cluster, RaceLog& log);

// What handlers tell, of active lanes.
namespace races {

// `same`: lanes that write what is there already.
void touch(Warp& warp, const Instr& in, const Access& access, const Pointers& at, Touch touch,
           uint32_t same = 0);
void touch_row(Warp& warp, const Instr& in, int lane, const uint8_t* at, uint32_t bytes,
               Touch touch);
// Lanes of a mask wait for each other.
void meet(Warp& warp, uint32_t lanes);
// They exchange values, which orders no memory; but what they read before has been read.
void exchange(Warp& warp, uint32_t lanes);
void leave(Warp& warp);
void fence_memory(Warp& warp);
void fence_proxy(Warp& warp);
void fence_inits(Warp& warp);

// A warp arrives at a barrier's phase, and leaves it.
void arrive(Warp& warp, Barrier& barrier);
void depart(Warp& warp);
void cluster_arrive(Warp& warp, bool relaxed);
void cluster_wait(Warp& warp);

void begin_copy(Warp& warp, const Instr& in, int lane, const uint8_t* to, uint32_t bytes);
void begin_bulk_read(Warp& warp, const Instr& in, int lane, const uint8_t* from, uint32_t bytes);
void begin_wgmma(Warp& warp, const Instr& in, const std::vector<uint32_t>& addresses);
// A write that completes bytes of an mbarrier.
void begin_write(Warp& warp, const Instr& in, int lane, const uint8_t* to, uint32_t bytes,
                 const uint8_t* barrier, bool async);
void commit(Warp& warp, WarpRaces::Kind kind);
void wait(Warp& warp, WarpRaces::Kind kind, uint64_t count);
void wait_for_all_copies(Warp& warp);
void commit_wgmma(Warp& warp);
void wait_for_wgmma(Warp& warp, uint64_t count);

void init_mbarrier(Warp& warp, const Instr& in, int lane, uint8_t* barrier);
// A lane arrives, or its copies will.
void arrive(Warp& warp, const Instr& in, int lane, const uint8_t* barrier, bool relaxed);
void arrive_after_copies(Warp& warp, const Instr& in, int lane, const uint8_t* barrier);
void complete_phase(ClusterRaces& cluster, const uint8_t* barrier);
// A lane has seen that a phase is complete; with `cluster` as to other blocks, too.
void wait(Warp& warp, const Instr& in, uint32_t lanes, const uint8_t* barrier, bool cluster);

}  // namespace races
}  // namespace emulator
