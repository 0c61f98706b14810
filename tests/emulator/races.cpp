// Races in shared memory: threads, and how they come to know of each other.
#include "races.h"

#include "text.h"

namespace emulator {

uint32_t ClusterRaces::new_slots(uint32_t count, const std::string& name) {
  const auto first = static_cast<uint32_t>(names.size());
  for (uint32_t i = 0; i < count; ++i) names.push_back(count > 1 ? name + std::to_string(i) : name);
  return first;
}

BlockRaces* ClusterRaces::owner(const Warp& warp, const uint8_t* at) const {
  const auto has = [&](const BlockRaces& block) {
    const std::vector<uint8_t>& shared = block.block->shared;
    return at >= shared.data() && at < shared.data() + shared.size();
  };
  if (has(*warp.races->block)) return warp.races->block;
  for (const auto& block : blocks)
    if (has(*block)) return block.get();
  return nullptr;
}

void ClusterRaces::touch(Warp& warp, const uint8_t* at, uint32_t bytes, const Agent& agent,
                         Touch touch) {
  BlockRaces* of = owner(warp, at);
  if (!of) return;
  const auto address = static_cast<uint32_t>(at - of->block->shared.data());
  const bool elsewhere = of != warp.races->block;
  if (elsewhere && !agent.knows(of->begun_slot, 1))
    log->add(3, agent.place, 0,
             "shared memory of another block of the cluster, which may not have begun\n  " +
                 emulator::place(*log->code[agent.place].statement));
  // What nobody waits for may still happen when the block has ended.
  if (elsewhere || (agent.async && touch != Touch::kRead)) {
    of->outside.add(agent.slots + agent.lane, agent.clock);
    of->outside_places[agent.slots + agent.lane] = agent.place;
  }
  of->shadow.touch(address, bytes, agent, touch);
}

void ClusterRaces::end(BlockRaces& block) {
  for (size_t slot = 1; slot < block.outside.at.size(); ++slot) {
    const uint32_t clock = block.outside.at[slot];
    if (clock == 0 || block.known_at_end.has(static_cast<uint32_t>(slot), clock)) continue;
    const uint32_t at = block.outside_places[static_cast<uint32_t>(slot)];
    log->add(4, at, 0,
             "a block may end before this access of its shared memory, of " + names[slot] + "\n  " +
                 place(*log->code[at].statement));
  }
}

void follow_races(Cluster& cluster, RaceLog& log) {
  cluster.races = std::make_shared<ClusterRaces>();
  ClusterRaces& races = *cluster.races;
  races.log = &log;
  for (Block* block : cluster.blocks) {
    auto of_block = std::make_unique<BlockRaces>(*block, log, races);
    const auto& [x, y, z] = block->index;
    const std::string name =
        "block (" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
    of_block->begun_slot = races.new_slots(1, name);
    for (const auto& warp : block->warps) {
      auto of_warp = std::make_unique<WarpRaces>();
      of_warp->cluster = &races;
      of_warp->block = of_block.get();
      of_warp->slots =
          races.new_slots(kLanes, name + ", warp " + std::to_string(warp->index) + ", lane ");
      of_warp->common.seen.add(of_block->begun_slot, 1);
      warp->races = of_warp.get();
      races.warps.push_back(std::move(of_warp));
    }
    races.blocks.push_back(std::move(of_block));
  }
}

Knowledge WarpRaces::of_lane(int lane) const {
  Knowledge all = common;
  if (own[lane]) all.join(*own[lane]);
  all.seen.add(slots + lane, clock);
  for (const Kind kind : {kCopies, kBulk})
    if (sequence_slots[kind]) all.seen.add(sequence_slots[kind] + lane, sequences[kind][lane].done);
  return all;
}

void WarpRaces::release(uint32_t lanes, Knowledge& to) {
  to.join(common);
  each_lane(lanes, [&](int lane) {
    if (own[lane]) to.join(*own[lane]);
    to.seen.add(slots + lane, clock);
    for (const Kind kind : {kCopies, kBulk})
      if (sequence_slots[kind])
        to.seen.add(sequence_slots[kind] + lane, sequences[kind][lane].done);
  });
  ++clock;
}

void WarpRaces::acquire(const Warp& warp, uint32_t lanes, const Knowledge& from) {
  if (lanes == warp.alive) return common.join(from);
  std::shared_ptr<const Knowledge> before, after;
  each_lane(lanes, [&](int lane) {
    if (!after || own[lane] != before) {
      auto joined =
          own[lane] ? std::make_shared<Knowledge>(*own[lane]) : std::make_shared<Knowledge>();
      joined->join(from);
      before = own[lane];
      after = joined;
    }
    own[lane] = after;
  });
}

Agent WarpRaces::agent(const Instr& in, int lane) const {
  Agent agent{};
  agent.slots = agent.self_slots = slots;
  agent.lane = static_cast<uint32_t>(lane);
  agent.self_lanes = 1u << lane;
  agent.clock = clock;
  agent.reads_met = reads_met;
  agent.place = static_cast<uint32_t>(&in - cluster->log->code);
  agent.common = &common;
  agent.own = own[lane].get();
  for (const Kind kind : {kCopies, kBulk}) {
    if (!sequence_slots[kind]) continue;
    agent.waited_slots[kind] = sequence_slots[kind] + agent.lane;
    agent.waited_clocks[kind] = sequences[kind][lane].done;
  }
  return agent;
}

namespace races {
namespace {

// What a lane does to a variable by which threads may wait for each other.
void synchronise(Warp& warp, const Access& access, int lane, const uint8_t* at, Touch touch) {
  WarpRaces& races = *warp.races;
  auto& atomics = races.cluster->atomics;
  if (touch != Touch::kWrite) {
    if (const auto found = atomics.find(at); found != atomics.end()) {
      if (access.acquires) {
        races.acquire(warp, 1u << lane, found->second);
      } else {
        auto& acquired = races.acquired_by_fence[lane];
        if (!acquired) acquired = std::make_shared<Knowledge>();
        acquired->join(found->second);
      }
    }
  }
  if (touch == Touch::kRead) return;
  if (touch == Touch::kWrite) atomics.erase(at);
  if (access.releases) {
    races.release(1u << lane, atomics[at]);
  } else if (races.released_by_fence[lane]) {
    atomics[at].join(*races.released_by_fence[lane]);
  }
}

}  // namespace

void touch(Warp& warp, const Instr& in, const Access& access, const Pointers& at, Touch touch,
           uint32_t same) {
  if (access.space != Space::kShared && access.space != Space::kGeneric) return;
  const WarpRaces& races = *warp.races;
  const auto bytes = static_cast<uint32_t>(access.bytes * access.count);
  const uint64_t used = in.statement->used_bytes;
  each_lane(warp.active, [&](int lane) {
    if (access.space == Space::kGeneric && !races.cluster->owner(warp, at[lane])) return;
    Agent agent = races.agent(in, lane);
    agent.strong = access.strong;
    agent.same = same >> lane & 1;
    if (bytes == 16 && (used & 0xffff) != 0xffff) {
      for (uint32_t i = 0; i < bytes; ++i)
        if (used >> i & 1) races.cluster->touch(warp, at[lane] + i, 1, agent, touch);
    } else {
      races.cluster->touch(warp, at[lane], bytes, agent, touch);
    }
    if (access.strong) synchronise(warp, access, lane, at[lane], touch);
  });
}

void touch_row(Warp& warp, const Instr& in, int lane, const uint8_t* at, uint32_t bytes,
               Touch touch) {
  warp.races->cluster->touch(warp, at, bytes, warp.races->agent(in, lane), touch);
}

void meet(Warp& warp, uint32_t lanes) {
  WarpRaces& races = *warp.races;
  Knowledge together;
  const bool all = lanes == warp.alive;
  Knowledge& to = all ? races.common : together;
  const Knowledge* last = nullptr;
  each_lane(lanes, [&](int lane) {
    if (races.own[lane] && races.own[lane].get() != last) to.join(*races.own[lane]);
    last = races.own[lane].get();
    to.seen.add(races.slots + lane, races.clock);
    for (const auto kind : {WarpRaces::kCopies, WarpRaces::kBulk})
      if (races.sequence_slots[kind])
        to.seen.add(races.sequence_slots[kind] + lane, races.sequences[kind][lane].done);
  });
  ++races.clock;
  if (all) {
    for (auto& own : races.own) own.reset();
  } else {
    const auto shared = std::make_shared<const Knowledge>(std::move(together));
    each_lane(lanes, [&](int lane) { races.own[lane] = shared; });
  }
}

void exchange(Warp& warp, uint32_t lanes) {
  if (lanes == warp.alive) warp.races->reads_met = warp.races->clock++;
}

void leave(Warp& warp) {
  WarpRaces& races = *warp.races;
  each_lane(warp.active, [&](int lane) {
    races.block->known_at_end.join(races.of_lane(lane).seen);
    races.own[lane].reset();
    const Sequence& bulk = races.sequences[WarpRaces::kBulk][lane];
    if (bulk.done < bulk.begun)
      races.block->outside.add(races.sequence_slots[WarpRaces::kBulk] + lane, bulk.begun);
  });
  if (warp.active == warp.alive && warp.block->live_warps == 1) races.cluster->end(*races.block);
}

void fence_memory(Warp& warp) {
  WarpRaces& races = *warp.races;
  each_lane(warp.active, [&](int lane) {
    if (auto acquired = std::move(races.acquired_by_fence[lane]))
      races.acquire(warp, 1u << lane, *acquired);
    races.released_by_fence[lane] = std::make_shared<Knowledge>(races.of_lane(lane));
  });
  ++races.clock;
}

void fence_proxy(Warp& warp) {
  WarpRaces& races = *warp.races;
  const bool all = warp.active == warp.alive;
  if (all) races.common.fenced.join(races.common.seen);
  each_lane(warp.active, [&](int lane) {
    if (!all || races.own[lane]) {
      auto fenced = races.own[lane] ? std::make_shared<Knowledge>(*races.own[lane])
                                    : std::make_shared<Knowledge>();
      fenced->fenced.join(races.of_lane(lane).seen);
      races.own[lane] = std::move(fenced);
    } else {
      races.common.fenced.add(races.slots + lane, races.clock);
      if (const uint32_t slots = races.sequence_slots[WarpRaces::kCopies])
        races.common.fenced.add(slots + lane, races.sequences[WarpRaces::kCopies][lane].done);
    }
  });
  ++races.clock;
}

void fence_inits(Warp& warp) {
  WarpRaces& races = *warp.races;
  each_lane(warp.active,
            [&](int lane) { races.common.inits.add(races.slots + lane, races.clock); });
  ++races.clock;
}

void arrive(Warp& warp, Barrier& barrier) {
  if (!barrier.phase) barrier.phase = std::make_shared<Knowledge>();
  warp.races->barrier_phase = barrier.phase;
  warp.races->release(warp.active, *barrier.phase);
}

void depart(Warp& warp) { warp.races->acquire(warp, warp.active, *warp.races->barrier_phase); }

void cluster_arrive(Warp& warp, bool relaxed) {
  WarpRaces& races = *warp.races;
  auto& phase = races.cluster->cluster_phase;
  if (!phase) phase = std::make_shared<Knowledge>();
  races.cluster_phase = phase;
  phase->seen.add(races.block->begun_slot, 1);
  phase->inits.join(races.common.inits);
  if (!relaxed) races.release(warp.active, *phase);
}

void cluster_wait(Warp& warp) {
  if (warp.races->cluster_phase) warp.races->acquire(warp, warp.active, *warp.races->cluster_phase);
}

}  // namespace races
}  // namespace emulator
