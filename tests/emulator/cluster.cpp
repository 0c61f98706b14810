// Clusters: the barrier of all their threads, addresses in other blocks' shared memory, and stores
// there that complete an mbarrier's bytes.
#include <algorithm>

#include "async.h"
#include "races.h"

namespace emulator {
namespace {

constexpr uint32_t kRelaxed = 1;

void run_arrive(Warp& warp, const Instr& instr) {
  if (!warp.converged()) return warp.wait("the warp's other lanes");
  WarpAsync& async = async_of(warp);
  if (async.cluster_arrivals > async_of(*warp.block->cluster).generation)
    fail("a warp arrives twice at the cluster's barrier");
  ++async.cluster_arrivals;
  if (warp.races) races::cluster_arrive(warp, instr.flags & kRelaxed);
}

// A phase is complete when all warps have arrived that have not exited.
bool all_arrived(const Cluster& cluster, uint64_t generation) {
  return std::all_of(cluster.blocks.begin(), cluster.blocks.end(), [&](const Block* block) {
    return std::all_of(block->warps.begin(), block->warps.end(), [&](const auto& warp) {
      return warp->alive == 0 || async_of(*warp).cluster_arrivals > generation;
    });
  });
}

void run_wait(Warp& warp, const Instr&) {
  if (!warp.converged()) return warp.wait("the warp's other lanes");
  Cluster& cluster = *warp.block->cluster;
  ClusterAsync& async = async_of(cluster);
  const uint64_t arrivals = async_of(warp).cluster_arrivals;
  if (arrivals > async.generation) {
    if (!all_arrived(cluster, async.generation)) return warp.wait("the cluster's barrier");
    ++async.generation;
    cluster.met = true;
    if (cluster.races) cluster.races->cluster_phase.reset();
  }
  if (warp.races) races::cluster_wait(warp);
}

uint32_t shared_of_rank(const Warp& warp, uint32_t address, uint32_t rank, int lane) {
  if (rank >= warp.block->cluster->blocks.size())
    fail("the cluster has no block of rank " + std::to_string(rank), lane);
  constexpr uint32_t kOffsetMask = (1u << kRankShift) - 1;
  return (rank + 1) << kRankShift | (address & kOffsetMask);
}

void run_mapa_generic(Warp& warp, const Instr& instr) {
  for_active(warp, [&](int lane) {
    const uint64_t address = warp.row<uint64_t>(instr.a)[lane];
    if ((address & kWindowMask) != kSharedWindow) fail("not an address of shared memory", lane);
    warp.row<uint64_t>(instr.d)[lane] =
        kSharedWindow + shared_of_rank(warp, static_cast<uint32_t>(address),
                                       warp.row<uint32_t>(instr.b)[lane], lane);
  });
}

void run_mapa_shared(Warp& warp, const Instr& instr) {
  for_active(warp, [&](int lane) {
    warp.row<uint32_t>(instr.d)[lane] = shared_of_rank(warp, warp.row<uint32_t>(instr.a)[lane],
                                                       warp.row<uint32_t>(instr.b)[lane], lane);
  });
}

struct StoreOperands {
  AddressOperand to, barrier;
  Row values[4];
};

template <int n>
void run_store(Warp& warp, const Instr& instr) {
  const StoreOperands& operands = *static_cast<const StoreOperands*>(instr.detail);
  ClusterAsync& async = async_of(*warp.block->cluster);
  for_active(warp, [&](int lane) {
    std::array<uint32_t, n> values;
    for (int i = 0; i < n; ++i) values[i] = warp.row<uint32_t>(operands.values[i])[lane];
    uint8_t* to = warp.shared(operands.to.shared(warp, lane), sizeof values, sizeof values);
    uint8_t* barrier = warp.shared(operands.barrier.shared(warp, lane), 8, 8);
    if (warp.races) races::begin_write(warp, instr, lane, to, sizeof values, barrier, false);
    perform(warp, to, [=, &async] {
      std::memcpy(to, values.data(), sizeof values);
      mbarrier_complete_tx(async, barrier, sizeof values);
    });
  });
}

Handler decode_arrive(const Statement& statement, Instr& instr, Decoding&) {
  if (statement.has("relaxed")) instr.flags |= kRelaxed;
  return run_arrive;
}

Handler decode_wait(const Statement&, Instr&, Decoding&) { return run_wait; }

Handler decode_mapa(const Statement& statement, Instr& instr, Decoding& decoding) {
  const bool generic = !statement.has("shared::cluster");
  if (generic != statement.has("u64")) throw std::runtime_error("mapa of an unknown type");
  const int bytes = generic ? 8 : 4;
  instr.d = decoding.target_row(statement.operands.at(0), bytes);
  instr.a = decoding.row(statement.operands.at(1), bytes);
  instr.b = decoding.row(statement.operands.at(2), 4);
  return generic ? run_mapa_generic : run_mapa_shared;
}

Handler decode_store(const Statement& statement, Instr& instr, Decoding& decoding) {
  if (!statement.opcode.ends_with("f32") || !statement.has("shared::cluster") ||
      !statement.has("mbarrier::complete_tx::bytes") || statement.has("v2") == statement.has("v4"))
    throw std::runtime_error("an unknown kind of st.async");
  const int count = statement.has("v4") ? 4 : 2;
  StoreOperands operands;
  operands.to = address_operand(decoding, statement.operands.at(0));
  for (int i = 0; i < count; ++i)
    operands.values[i] = decoding.row(statement.operands.at(1).parts.at(i), 4);
  operands.barrier = address_operand(decoding, statement.operands.at(2));
  instr.detail = decoding.keep(operands);
  return count == 4 ? run_store<4> : run_store<2>;
}

const Opcode arrive{"barrier.cluster.arrive", decode_arrive};
const Opcode wait{"barrier.cluster.wait", decode_wait};
const Opcode mapa{"mapa", decode_mapa};
const Opcode store{"st.async", decode_store};

}  // namespace
}  // namespace emulator
