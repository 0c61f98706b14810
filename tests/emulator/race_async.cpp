// Races in shared memory: copies, products and mbarriers.
#include "lanes.h"
#include "races.h"
#include "text.h"

namespace emulator::races {
namespace {

uint32_t slots_of(WarpRaces& races, WarpRaces::Kind kind) {
  uint32_t& slots = races.sequence_slots[kind];
  if (!slots) {
    const std::string& lane = races.cluster->names[races.slots];  // "block …, warp 3, lane 0"
    slots = races.cluster->new_slots(
        kLanes, (kind == WarpRaces::kCopies ? "cp.async of " : "a bulk copy of ") +
                    lane.substr(0, lane.size() - 1));
  }
  return slots;
}

MbarrierRaces* mbarrier_at(ClusterRaces& cluster, const uint8_t* barrier) {
  const auto found = cluster.mbarriers.find(barrier);
  return found == cluster.mbarriers.end() ? nullptr : &found->second;
}

// Whoever uses an mbarrier has to come after its initialisation; the async proxy after a fence.
void check_init(ClusterRaces& cluster, const Agent& agent, const MbarrierRaces& mbarrier,
                bool async) {
  const uint32_t slot = mbarrier.init_slot, clock = mbarrier.init_clock;
  const auto has = [&](Clocks Knowledge::* clocks) {
    return (agent.common->*clocks).has(slot, clock) ||
           (agent.own && (agent.own->*clocks).has(slot, clock));
  };
  const bool fenced = has(&Knowledge::inits);
  const bool known = fenced || agent.knows(slot, clock);
  if (known && (!async || fenced || agent.has_fenced(slot, clock))) return;
  cluster.log->add(
      known ? 5 : 6, agent.place, 0,
      "the mbarrier at " + std::to_string(mbarrier.address) + ", initialised by " +
          cluster.names[slot] +
          (known ? ", is used by the async proxy without fence.mbarrier_init or fence.proxy.async"
                 : ", is used by " + cluster.names[agent.self_slots] +
                       "… without having waited for it") +
          "\n  " + place(*cluster.log->code[agent.place].statement));
}

}  // namespace

// -- Copies ---------------------------------------------------------------------------------------

void begin_copy(Warp& warp, const Instr& in, int lane, const uint8_t* to, uint32_t bytes) {
  WarpRaces& races = *warp.races;
  Agent agent = races.agent(in, lane);
  agent.slots = slots_of(races, WarpRaces::kCopies);
  agent.clock = ++races.sequences[WarpRaces::kCopies][lane].begun;
  races.cluster->touch(warp, to, bytes, agent, Touch::kWrite);
}

void begin_bulk_read(Warp& warp, const Instr& in, int lane, const uint8_t* from, uint32_t bytes) {
  WarpRaces& races = *warp.races;
  Agent agent = races.agent(in, lane);
  agent.slots = slots_of(races, WarpRaces::kBulk);
  agent.clock = ++races.sequences[WarpRaces::kBulk][lane].begun;
  agent.async = true;
  races.block->outside_places[agent.slots + agent.lane] = agent.place;
  races.cluster->touch(warp, from, bytes, agent, Touch::kRead);
}

void begin_wgmma(Warp& warp, const Instr& in, const std::vector<uint32_t>& addresses) {
  WarpRaces& races = *warp.races;
  if (!races.wgmma_slot) {
    const std::string& lane = races.cluster->names[races.slots];
    races.wgmma_slot = races.cluster->new_slots(1, "wgmma of " + lane.substr(0, lane.rfind(',')));
  }
  Agent agent = races.agent(in, 0);
  agent.slots = races.wgmma_slot;
  agent.self_lanes = warp.active;
  agent.clock = ++races.wgmma.begun;
  agent.async = true;
  for (const uint32_t address : addresses)
    races.block->shadow.touch(address, 16, agent, Touch::kRead);
}

void begin_write(Warp& warp, const Instr& in, int lane, const uint8_t* to, uint32_t bytes,
                 const uint8_t* barrier, bool async) {
  WarpRaces& races = *warp.races;
  MbarrierRaces* mbarrier = mbarrier_at(*races.cluster, barrier);
  if (!mbarrier) return;
  Agent agent = races.agent(in, lane);
  agent.async = async;
  check_init(*races.cluster, agent, *mbarrier, async);
  const bool elsewhere = races.cluster->owner(warp, barrier) != races.block;
  agent.slots = mbarrier->sides[elsewhere].slot;
  agent.lane = 0;
  agent.clock = mbarrier->phases + 1;
  races.cluster->touch(warp, to, bytes, agent, Touch::kWrite);
}

void commit(Warp& warp, WarpRaces::Kind kind) {
  each_lane(warp.active, [&](int lane) {
    Sequence& sequence = warp.races->sequences[kind][lane];
    sequence.committed.push_back(sequence.begun);
  });
}

void wait(Warp& warp, WarpRaces::Kind kind, uint64_t count) {
  each_lane(warp.active, [&](int lane) { warp.races->sequences[kind][lane].wait(count); });
}

void wait_for_all_copies(Warp& warp) {
  each_lane(warp.active, [&](int lane) {
    Sequence& sequence = warp.races->sequences[WarpRaces::kCopies][lane];
    sequence.done = sequence.begun;
  });
}

void commit_wgmma(Warp& warp) {
  Sequence& wgmma = warp.races->wgmma;
  wgmma.committed.push_back(wgmma.begun);
}

void wait_for_wgmma(Warp& warp, uint64_t count) {
  WarpRaces& races = *warp.races;
  races.wgmma.wait(count);
  if (races.wgmma_slot) races.common.seen.add(races.wgmma_slot, races.wgmma.done);
}

// -- Mbarriers ------------------------------------------------------------------------------------

void init_mbarrier(Warp& warp, const Instr& in, int lane, uint8_t* barrier) {
  WarpRaces& races = *warp.races;
  ClusterRaces& cluster = *races.cluster;
  const Agent agent = races.agent(in, lane);
  const BlockRaces& block = *cluster.owner(warp, barrier);
  cluster.touch(warp, barrier, 8, agent, Touch::kWrite);
  MbarrierRaces& mbarrier = cluster.mbarriers[barrier];
  mbarrier = {};
  mbarrier.address = static_cast<uint32_t>(barrier - block.block->shared.data());
  mbarrier.init_slot = agent.slots + agent.lane;
  mbarrier.init_clock = agent.clock;
  for (MbarrierRaces::Side& side : mbarrier.sides)
    side.slot = cluster.new_slots(1, "copies that complete the mbarrier at " +
                                         std::to_string(mbarrier.address) + " of " +
                                         cluster.names[block.begun_slot]);
}

void arrive(Warp& warp, const Instr& in, int lane, const uint8_t* barrier, bool relaxed) {
  WarpRaces& races = *warp.races;
  MbarrierRaces* mbarrier = mbarrier_at(*races.cluster, barrier);
  if (!mbarrier) return;
  check_init(*races.cluster, races.agent(in, lane), *mbarrier, false);
  if (relaxed) return;
  const bool elsewhere = races.cluster->owner(warp, barrier) != races.block;
  races.release(1u << lane, mbarrier->sides[elsewhere].arriving);
}

void arrive_after_copies(Warp& warp, const Instr& in, int lane, const uint8_t* barrier) {
  WarpRaces& races = *warp.races;
  MbarrierRaces* mbarrier = mbarrier_at(*races.cluster, barrier);
  if (!mbarrier) return;
  check_init(*races.cluster, races.agent(in, lane), *mbarrier, false);
  const uint32_t begun = races.sequences[WarpRaces::kCopies][lane].begun;
  if (begun)
    mbarrier->sides[0].arriving.seen.add(races.sequence_slots[WarpRaces::kCopies] + lane, begun);
}

void complete_phase(ClusterRaces& cluster, const uint8_t* barrier) {
  MbarrierRaces* mbarrier = mbarrier_at(cluster, barrier);
  if (!mbarrier) return;
  ++mbarrier->phases;
  for (MbarrierRaces::Side& side : mbarrier->sides) {
    side.completed.join(side.arriving);
    side.completed.seen.add(side.slot, mbarrier->phases);
    side.arriving = {};
  }
}

void wait(Warp& warp, const Instr& in, uint32_t lanes, const uint8_t* barrier, bool cluster) {
  WarpRaces& races = *warp.races;
  MbarrierRaces* mbarrier = mbarrier_at(*races.cluster, barrier);
  if (!mbarrier) return;
  check_init(*races.cluster, races.agent(in, first_lane(lanes)), *mbarrier, false);
  races.acquire(warp, lanes, mbarrier->sides[0].completed);
  if (cluster) races.acquire(warp, lanes, mbarrier->sides[1].completed);
}

}  // namespace emulator::races
