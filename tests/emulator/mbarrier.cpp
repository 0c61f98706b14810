// mbarrier: a barrier in shared memory that counts arrivals and bytes. A phase is complete when no
// arrivals are pending and as many bytes have come as are expected; the next one begins at once.
#include <bit>
#include <cstdio>

#include "async.h"
#include "races.h"

namespace emulator {
namespace {

constexpr int64_t kMaxCount = (1 << 20) - 1;  // of arrivals, and of bytes to come
// Waits that gave up one after the other, while no phase was completed: then nothing comes any
// more.
constexpr int kMaxTimeouts = 100;

// What the 8 bytes hold.
struct Mbarrier {
  uint64_t phase : 1;      // the parity of the phase that is not complete
  uint64_t expected : 20;  // arrivals of a phase
  uint64_t pending : 20;
  int64_t bytes : 22;  // yet to come; less than 0 where they came before they were expected
  uint64_t valid : 1;
};
static_assert(sizeof(Mbarrier) == 8);

std::string described(const Mbarrier& state) {
  return "pending arrivals " + std::to_string(state.pending) + " of " +
         std::to_string(state.expected) + ", bytes to come " +
         std::to_string(static_cast<int64_t>(state.bytes));
}

Mbarrier read(ClusterAsync& async, const uint8_t* barrier) {
  const auto found = async.mbarriers.find(barrier);
  uint64_t word;
  std::memcpy(&word, barrier, sizeof word);
  if (found == async.mbarriers.end()) fail("an mbarrier that is not initialised");
  if (found->second != word) fail("an mbarrier that was overwritten by something else");
  return std::bit_cast<Mbarrier>(word);
}

// Writes the state, after the phase has been completed if that is due.
void write(ClusterAsync& async, uint8_t* barrier, Mbarrier state) {
  if (state.pending == 0 && state.bytes == 0) {
    state.phase ^= 1;
    state.pending = state.expected;
    async.timeouts = 0;
    if (async.races) races::complete_phase(*async.races, barrier);
  }
  const auto word = std::bit_cast<uint64_t>(state);
  std::memcpy(barrier, &word, sizeof word);
  async.mbarriers[barrier] = word;
}

void expect(Mbarrier& state, int64_t bytes) {
  const int64_t sum = state.bytes + bytes;
  if (sum > kMaxCount || sum < -kMaxCount)
    fail("an mbarrier's count of bytes overflows: " + described(state) + ", and " +
         std::to_string(bytes) + " more");
  state.bytes = sum;
}

void arrive(Mbarrier& state, uint32_t count) {
  if (count < 1 || count > state.pending)
    fail("an mbarrier has too many arrivals: " + described(state) + ", and " +
         std::to_string(count) + " arrive");
  state.pending -= count;
}

// How the operands of the instructions below are kept.
struct Operands {
  AddressOperand address;
  Row count;  // arrivals, bytes, a parity or a state, if there is one
  bool has_count = false;
  Row state;  // where arrive writes the state, if anywhere
  bool has_state = false;
  bool expects = false;  // arrive: the count is of bytes
  bool parity = false;   // wait: the count is the parity, not a state
  Predicate done;
  bool relaxed = false, cluster = false;  // of the memory consistency model
};

uint8_t* barrier_of(Warp& warp, const Operands& operands, int lane) {
  return warp.shared(operands.address.shared(warp, lane), 8, 8);
}

uint32_t count_of(const Warp& warp, const Operands& operands, int lane) {
  return operands.has_count ? warp.row<uint32_t>(operands.count)[lane] : 1;
}

void run_init(Warp& warp, const Instr& instr) {
  const Operands& operands = *static_cast<const Operands*>(instr.detail);
  ClusterAsync& async = async_of(*warp.block->cluster);
  for_active(warp, [&](int lane) {
    const uint32_t count = count_of(warp, operands, lane);
    if (count < 1 || count > kMaxCount)
      fail("an mbarrier of " + std::to_string(count) + " arrivals", lane);
    Mbarrier state{};
    state.expected = state.pending = count;
    state.valid = 1;
    uint8_t* barrier = barrier_of(warp, operands, lane);
    write(async, barrier, state);
    if (warp.races) races::init_mbarrier(warp, instr, lane, barrier);
  });
}

void run_inval(Warp& warp, const Instr& instr) {
  const Operands& operands = *static_cast<const Operands*>(instr.detail);
  ClusterAsync& async = async_of(*warp.block->cluster);
  for_active(warp, [&](int lane) {
    uint8_t* barrier = barrier_of(warp, operands, lane);
    read(async, barrier);
    async.mbarriers.erase(barrier);
  });
}

void run_arrive(Warp& warp, const Instr& instr) {
  const Operands& operands = *static_cast<const Operands*>(instr.detail);
  ClusterAsync& async = async_of(*warp.block->cluster);
  for_active(warp, [&](int lane) {
    uint8_t* barrier = barrier_of(warp, operands, lane);
    Mbarrier state = read(async, barrier);
    if (operands.has_state)
      warp.row<uint64_t>(operands.state)[lane] = std::bit_cast<uint64_t>(state);
    const uint32_t count = count_of(warp, operands, lane);
    if (warp.races) races::arrive(warp, instr, lane, barrier, operands.relaxed);
    if (operands.expects) expect(state, count);
    arrive(state, operands.expects ? 1 : count);
    write(async, barrier, state);
  });
}

void run_expect_tx(Warp& warp, const Instr& instr) {
  const Operands& operands = *static_cast<const Operands*>(instr.detail);
  ClusterAsync& async = async_of(*warp.block->cluster);
  for_active(warp, [&](int lane) {
    uint8_t* barrier = barrier_of(warp, operands, lane);
    Mbarrier state = read(async, barrier);
    expect(state, count_of(warp, operands, lane));
    write(async, barrier, state);
  });
}

// Lets the warp's wait give up when nobody can go on, as try_wait does after some time: a kernel
// may do something else then.
void queue_timeout(Warp& warp) {
  WarpAsync& async = async_of(warp);
  async.timeout_queued = true;
  warp.block->launch->deferred.push_back(
      [alive = std::weak_ptr<void>(warp.async),
       of_cluster = std::weak_ptr<void>(warp.block->cluster->async)] {
        const auto held = alive.lock();
        const auto cluster = of_cluster.lock();
        if (!held || !cluster) return;
        static_cast<WarpAsync*>(held.get())->timed_out = true;
        ++static_cast<ClusterAsync*>(cluster.get())->timeouts;
      });
}

void run_wait(Warp& warp, const Instr& instr) {
  const Operands& operands = *static_cast<const Operands*>(instr.detail);
  ClusterAsync& cluster = async_of(*warp.block->cluster);
  WarpAsync& async = async_of(warp);
  uint32_t done = 0;
  for_active(warp, [&](int lane) {
    const uint64_t awaited =
        operands.parity ? warp.row<uint32_t>(operands.count)[lane] & 1
                        : std::bit_cast<Mbarrier>(warp.row<uint64_t>(operands.count)[lane]).phase;
    const Mbarrier state = read(cluster, barrier_of(warp, operands, lane));
    if (state.phase != awaited) {
      done |= 1u << lane;
    } else if (!async.timeout_queued) {
      std::snprintf(async.waits_for, sizeof async.waits_for,
                    "phase %d of the mbarrier at %u (%u of %u arrivals, %d bytes to come)",
                    static_cast<int>(awaited), operands.address.shared(warp, lane),
                    static_cast<unsigned>(state.pending), static_cast<unsigned>(state.expected),
                    static_cast<int>(state.bytes));
    }
  });
  const bool gives_up = async.timed_out;
  if (done != warp.active && !gives_up) {
    if (!async.timeout_queued && cluster.timeouts < kMaxTimeouts) queue_timeout(warp);
    return warp.wait(async.waits_for);
  }
  if (gives_up) async.timed_out = async.timeout_queued = false;
  if (warp.races) {
    for (uint32_t lanes = done; lanes;) {
      const uint8_t* barrier = barrier_of(warp, operands, __builtin_ctz(lanes));
      uint32_t together = 0;
      for_active(warp, [&](int lane) {
        if (done >> lane & 1 && barrier_of(warp, operands, lane) == barrier) together |= 1u << lane;
      });
      if (!operands.relaxed) races::wait(warp, instr, together, barrier, operands.cluster);
      lanes &= ~together;
    }
  }
  warp.set_predicate(operands.done, done);
}

Operands operands_at(const Statement& statement, Decoding& decoding, size_t address,
                     int count_bytes) {
  Operands operands;
  operands.address = address_operand(decoding, statement.operands.at(address));
  operands.has_count = statement.operands.size() > address + 1;
  if (operands.has_count)
    operands.count = decoding.row(statement.operands[address + 1], count_bytes);
  return operands;
}

Handler decode_init(const Statement& statement, Instr& instr, Decoding& decoding) {
  instr.detail = decoding.keep(operands_at(statement, decoding, 0, 4));
  return run_init;
}

Handler decode_inval(const Statement& statement, Instr& instr, Decoding& decoding) {
  instr.detail = decoding.keep(operands_at(statement, decoding, 0, 4));
  return run_inval;
}

Handler decode_expect_tx(const Statement& statement, Instr& instr, Decoding& decoding) {
  instr.detail = decoding.keep(operands_at(statement, decoding, 0, 4));
  return run_expect_tx;
}

Handler decode_arrive(const Statement& statement, Instr& instr, Decoding& decoding) {
  Operands operands = operands_at(statement, decoding, 1, 4);
  operands.expects = statement.has("expect_tx");
  operands.relaxed = statement.has("relaxed");
  operands.has_state = statement.operands[0].kind != Operand::Kind::kSink;
  if (operands.has_state) operands.state = decoding.target_row(statement.operands[0], 8);
  instr.detail = decoding.keep(operands);
  return run_arrive;
}

Handler decode_wait(const Statement& statement, Instr& instr, Decoding& decoding) {
  const bool parity = statement.has("parity");
  Operands operands = operands_at(statement, decoding, 1, parity ? 4 : 8);
  operands.parity = parity;
  operands.relaxed = statement.has("relaxed");
  operands.cluster = statement.has("cluster");
  operands.done = decoding.target_predicate(statement.operands[0]);
  instr.detail = decoding.keep(operands);
  return run_wait;
}

const Opcode init{"mbarrier.init", decode_init};
const Opcode inval{"mbarrier.inval", decode_inval};
const Opcode expect_tx{"mbarrier.expect_tx", decode_expect_tx};
const Opcode arrive_opcode{"mbarrier.arrive", decode_arrive};
const Opcode test_wait{"mbarrier.test_wait", decode_wait};
const Opcode try_wait{"mbarrier.try_wait", decode_wait};

}  // namespace

void mbarrier_complete_tx(ClusterAsync& async, uint8_t* barrier, int64_t bytes) {
  Mbarrier state = read(async, barrier);
  expect(state, -bytes);
  write(async, barrier, state);
}

void mbarrier_arrive(ClusterAsync& async, uint8_t* barrier) {
  Mbarrier state = read(async, barrier);
  arrive(state, 1);
  write(async, barrier, state);
}

}  // namespace emulator
