// Branches, ends of threads, barriers of a block, and instructions without an effect here.
#include <cstdint>

#include "lanes.h"
#include "races.h"
#include "types.h"

namespace emulator {
namespace {

void branch(Warp& warp, const Instr& in) {
  const uint32_t stay = warp.group & ~warp.active;
  if (stay) {
    warp.others.push_back(Group{stay, warp.next});
    warp.group = warp.active;
    warp.event = nullptr;
  } else if (!warp.others.empty()) {
    warp.event = nullptr;
  }
  warp.next = in.target;
}

Handler decode_branch(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_modifiers(statement, {"uni"});
  expect_operands(statement, 1, 1);
  instr.target = decoding.label(statement.operands[0]);
  return branch;
}

void leave(Warp& warp, const Instr&) {
  if (warp.races) races::leave(warp);
  warp.alive &= ~warp.active;
  warp.group &= ~warp.active;
  warp.event = nullptr;
  if (!warp.alive) --warp.block->live_warps;
}

Handler decode_exit(const Statement& statement, Instr&, Decoding&) {
  expect_operands(statement, 0, 0);
  return leave;
}

Handler decode_trap(const Statement&, Instr&, Decoding&) {
  return [](Warp& warp, const Instr&) {
    fail("the kernel stopped itself by a trap", first_lane(warp.active));
  };
}

Handler decode_nothing(const Statement&, Instr&, Decoding&) {
  return [](Warp&, const Instr&) {};
}

Handler decode_nanosleep(const Statement&, Instr&, Decoding&) {
  return [](Warp& warp, const Instr&) { warp.yield(); };
}

// A cache policy: nobody reads it.
Handler decode_createpolicy(const Statement& statement, Instr& instr, Decoding& decoding) {
  instr.d = decoding.target_row(statement.operands.at(0), 8);
  return [](Warp& warp, const Instr& in) {
    for_lanes<uint64_t>(warp, in.d, [](int) { return uint64_t{0}; });
  };
}

// bar.sync, bar.arrive, bar.red. A warp arrives once, with 32 threads however many it has, and
// waits until the phase has completed.
enum Reduction : uint32_t { kNoReduction, kAnd, kOr, kCount };
constexpr uint32_t kArrives = 16, kCounted = 32;

void complete_if_full(Block& block, Barrier& barrier) {
  const uint32_t expected = barrier.expected ? barrier.expected : kLanes * block.live_warps;
  if (barrier.arrived < expected) return;
  if (barrier.arrived > expected)
    fail("more threads arrived at a barrier than it counts: " + std::to_string(barrier.arrived) +
         " of " + std::to_string(expected));
  barrier.last_and = barrier.reduction_and;
  barrier.last_or = barrier.reduction_or;
  barrier.last_count = barrier.reduction_count;
  barrier.arrived = barrier.expected = barrier.reduction_or = barrier.reduction_count = 0;
  barrier.reduction_and = 1;
  ++barrier.generation;
  barrier.phase.reset();
}

void arrive(Warp& warp, const Instr& in, Barrier& barrier) {
  const int lane = first_lane(warp.active);
  const uint32_t count = in.flags & kCounted ? warp.row<uint32_t>(in.b)[lane] : 0;
  if (count % kLanes) fail("a barrier's number of threads is not a multiple of 32");
  if (barrier.arrived && barrier.expected != count) {
    fail("warps name different numbers of threads for a barrier: " +
         std::to_string(barrier.expected) + " and " + std::to_string(count));
  }
  barrier.expected = count;
  barrier.arrived += kLanes;
  const uint32_t values = warp.predicate(in.q) & warp.active;
  barrier.reduction_and &= values == warp.active;
  barrier.reduction_or |= values != 0;
  barrier.reduction_count += __builtin_popcount(values);
}

void barrier(Warp& warp, const Instr& in) {
  if (!warp.converged()) return warp.wait("the warp's other lanes");
  const uint32_t number = warp.row<uint32_t>(in.a)[first_lane(warp.active)];
  if (number >= warp.block->barriers.size()) fail("there is no barrier " + std::to_string(number));
  Barrier& barrier = warp.block->barriers[number];
  if (!warp.at_barrier) {
    warp.barrier_generation = barrier.generation;
    arrive(warp, in, barrier);
    if (warp.races) races::arrive(warp, barrier);
  }
  complete_if_full(*warp.block, barrier);
  if (in.flags & kArrives) return;
  warp.at_barrier = barrier.generation == warp.barrier_generation;
  if (warp.at_barrier) return warp.wait("the block's other warps");
  if (warp.races) races::depart(warp);
  switch (in.flags & 3) {
    case kAnd:
      return warp.set_predicate(in.p, barrier.last_and ? kAllLanes : 0);
    case kOr:
      return warp.set_predicate(in.p, barrier.last_or ? kAllLanes : 0);
    case kCount:
      return for_lanes<uint32_t>(warp, in.d, [&](int) { return barrier.last_count; });
    default:
      return;
  }
}

Handler decode_barrier(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_modifiers(statement, {"sync", "arrive", "red", "aligned", "cta", "popc", "and", "or"});
  const auto& operands = statement.operands;
  const bool reduces = statement.has("red");
  size_t next = 0;
  if (reduces) {
    const bool counts = statement.has("popc");
    instr.flags |= counts ? kCount : statement.has("and") ? kAnd : kOr;
    if (counts) {
      instr.d = decoding.target_row(operands.at(next++), 4);
    } else {
      instr.p = decoding.target_predicate(operands.at(next++));
    }
  }
  if (statement.has("arrive")) instr.flags |= kArrives;
  instr.a = decoding.row(operands.at(next++), 4);
  if (operands.size() > next + (reduces ? 1 : 0)) {
    instr.b = decoding.row(operands.at(next++), 4);
    instr.flags |= kCounted;
  }
  if (reduces) instr.q = decoding.predicate(operands.at(next++));
  return barrier;
}

// Fences have no effect but on what is known of races.
Handler decode_fence(const Statement& statement, Instr&, Decoding&) {
  if (statement.has("mbarrier_init"))
    return [](Warp& warp, const Instr&) {
      if (warp.races) races::fence_inits(warp);
    };
  if (statement.opcode.starts_with("fence.proxy.async"))
    return [](Warp& warp, const Instr&) {
      if (warp.races) races::fence_proxy(warp);
    };
  if (statement.has("proxy")) return [](Warp&, const Instr&) {};
  return [](Warp& warp, const Instr&) {
    if (warp.races) races::fence_memory(warp);
  };
}

// setmaxnreg: a warp gives registers back, or waits until others have given as many. Blocks with it
// have a multiprocessor to themselves, and threads begin with even shares of its registers.
void change_registers(Warp& warp, const Instr& in) {
  if (!warp.converged()) return warp.wait("the warp's other lanes");
  constexpr uint32_t kOfMultiprocessor = 65536, kUnit = 8, kMost = 256;
  Block& block = *warp.block;
  const auto& [x, y, z] = block.launch->block;
  const uint32_t at_launch = std::min(kOfMultiprocessor / (x * y * z) / kUnit * kUnit, kMost);
  const uint32_t had = warp.registers ? warp.registers : at_launch;
  const uint32_t now = static_cast<uint32_t>(in.imm);
  if (now > had && now - had > block.free_registers)
    return warp.wait("registers that other warps give back");
  block.free_registers += had - now;
  warp.registers = now;
}

Handler decode_setmaxnreg(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_modifiers(statement, {"inc", "dec", "sync", "aligned", "u32"});
  instr.imm = decoding.integer(statement.operands.at(0));
  return change_registers;
}

const Opcode bra{"bra", decode_branch};
const Opcode exit_{"exit", decode_exit};
const Opcode ret{"ret", decode_exit};
const Opcode trap{"trap", decode_trap};
const Opcode bar{"bar", decode_barrier};
const Opcode barrier_{"barrier", decode_barrier};
const Opcode nanosleep_{"nanosleep", decode_nanosleep};
const Opcode createpolicy{"createpolicy", decode_createpolicy};
const Opcode fence{"fence", decode_fence};
const Opcode membar{"membar", decode_fence};
const Opcode setmaxnreg{"setmaxnreg", decode_setmaxnreg};
const Opcode griddepcontrol{"griddepcontrol", decode_nothing};
const Opcode prefetch{"prefetch", decode_nothing};
const Opcode prefetchu{"prefetchu", decode_nothing};
const Opcode prefetch_bulk{"cp.async.bulk.prefetch", decode_nothing};
const Opcode discard{"discard", decode_nothing};
const Opcode applypriority{"applypriority", decode_nothing};
const Opcode pmevent{"pmevent", decode_nothing};
const Opcode brkpt{"brkpt", decode_nothing};

}  // namespace
}  // namespace emulator
