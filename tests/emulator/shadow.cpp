#include "shadow.h"

#include "lanes.h"

namespace emulator {
namespace {

// Whether all of an access came before the agent's.
bool knows(const Agent& agent, const Touched& access) {
  for (uint32_t lanes = access.lanes; lanes; lanes &= lanes - 1)
    if (!agent.knows(access.slots + __builtin_ctz(lanes), access.clock)) return false;
  return true;
}

bool has_fenced(const Agent& agent, const Touched& access) {
  for (uint32_t lanes = access.lanes; lanes; lanes &= lanes - 1)
    if (!agent.has_fenced(access.slots + __builtin_ctz(lanes), access.clock)) return false;
  return true;
}

Touched kept(const Agent& agent, Touch touch) {
  uint32_t flags = 0;
  if (agent.strong) flags |= Touched::kStrong;
  if (agent.async) flags |= Touched::kAsync;
  if (touch != Touch::kRead) flags |= Touched::kUpdates;
  return {agent.slots, 1u << agent.lane, agent.clock, agent.place | flags};
}

}  // namespace

bool Agent::knows_otherwise(uint32_t slot, uint32_t at) const {
  if (is_self(slot) || (own && own->seen.has(slot, at))) return true;
  for (size_t i = 0; i < waited_slots.size(); ++i)
    if (slot == waited_slots[i] && at <= waited_clocks[i]) return true;
  return false;
}

void Shadow::touch(uint32_t address, uint32_t bytes, const Agent& agent, Touch how) {
  for (const uint32_t end = address + bytes; address < end;) {
    Cell& cell = cells_[address / 4];
    const uint32_t until = std::min(end, address / 4 * 4 + 4);
    const bool whole = until - address == 4;
    if (whole && cell.written.slots != kSplit) {
      touch(cell, address, agent, how);
    } else {
      if (cell.written.slots != kSplit) split(cell);
      for (uint32_t i = address; i < until; ++i) touch(bytes_[cell.more][i % 4], i, agent, how);
    }
    address = until;
  }
}

void Shadow::check(const Touched& before, uint32_t address, const Agent& agent, Touch touch) {
  const bool conflicts = touch != Touch::kRead || before.is(Touched::kUpdates);
  if (!conflicts) return;
  // Lanes of one instruction may write the same to one place.
  const bool together = touch == Touch::kWrite && before.slots == agent.slots &&
                        before.clock == agent.clock &&
                        (before.place & ~Touched::kFlags) == agent.place;
  const bool was_read = !before.is(Touched::kUpdates) && before.slots == agent.self_slots &&
                        before.clock <= agent.reads_met;
  if (together || was_read) return;
  if (!knows(agent, before)) {
    // A store of what is there already changes nothing for other writers and for its own warp.
    const bool equal =
        agent.same && (before.is(Touched::kUpdates) || before.slots == agent.self_slots);
    if (!equal && (!agent.strong || !before.is(Touched::kStrong)))
      listener_->wrong(Wrong::kUnordered, *this, address, agent, touch, before);
  } else if (agent.async && before.is(Touched::kUpdates) && !before.is(Touched::kAsync) &&
             !has_fenced(agent, before)) {
    listener_->wrong(Wrong::kUnfenced, *this, address, agent, touch, before);
  }
}

void Shadow::touch(Cell& cell, uint32_t address, const Agent& agent, Touch touch) {
  if (cell.written.slots) {
    check(cell.written, address, agent, touch);
  } else if (initialised_ && touch != Touch::kWrite && !cell.read.is(Touched::kUpdates)) {
    listener_->wrong(Wrong::kUninitialised, *this, address, agent, touch, cell.written);
  }
  const Touched access = kept(agent, touch);
  if (touch == Touch::kRead && cell.read.slots == access.slots && cell.read.clock == access.clock &&
      (cell.read.place ^ access.place) < Touched::kUpdates) {
    cell.read.lanes |= access.lanes;
    if (!cell.more) return;
  }
  if (cell.read.slots) check(cell.read, address, agent, touch);
  for (const Touched& before : lists_[cell.more]) check(before, address, agent, touch);

  // A write that is not ordered after others, and is no race, is kept beside them.
  bool last = touch != Touch::kRead;
  if (last && (agent.strong || agent.same)) {
    last = !cell.read.slots || knows(agent, cell.read);
    for (const Touched& before : lists_[cell.more]) last = last && knows(agent, before);
    last = last && (!cell.written.slots || knows(agent, cell.written));
  }
  if (last) {
    cell.written = access;
    cell.read = {};
    clear_list(cell);
  } else {
    add_read(cell, agent, access);
  }
}

// Accesses that came before this one need not be kept: what comes after this one comes after them.
void Shadow::add_read(Cell& cell, const Agent& agent, const Touched& access) {
  const auto replaces = [&](const Touched& before) {
    constexpr uint32_t kWeaker = Touched::kStrong | Touched::kAsync;
    return (!before.is(Touched::kUpdates) || access.is(Touched::kUpdates)) &&
           (access.place & ~before.place & kWeaker) == 0 && knows(agent, before);
  };
  const auto joins = [&](Touched& before) {
    const bool equal = before.slots == access.slots && before.clock == access.clock &&
                       (before.place ^ access.place) < Touched::kUpdates;
    if (equal) before.lanes |= access.lanes;
    return equal;
  };
  if (cell.more) {
    std::vector<Touched>& list = lists_[cell.more];
    std::erase_if(list, replaces);
    if (cell.read.slots && !replaces(cell.read)) {
      if (joins(cell.read)) return;
    } else {
      cell.read = {};
    }
    for (Touched& before : list)
      if (joins(before)) return;
    if (!cell.read.slots)
      cell.read = access;
    else
      list.push_back(access);
    if (list.empty()) clear_list(cell);
    return;
  }
  if (!cell.read.slots || replaces(cell.read)) {
    cell.read = access;
  } else if (!joins(cell.read)) {
    if (unused_lists_.empty()) {
      unused_lists_.push_back(static_cast<uint32_t>(lists_.size()));
      lists_.emplace_back();
    }
    cell.more = unused_lists_.back();
    unused_lists_.pop_back();
    lists_[cell.more] = {access};
  }
}

void Shadow::split(Cell& cell) {
  std::array<Cell, 4> bytes;
  for (Cell& byte : bytes) {
    byte = cell;
    byte.more = 0;
    // Each byte needs a list of its own.
    if (cell.more) {
      const std::vector<Touched> list = lists_[cell.more];
      byte.more = static_cast<uint32_t>(lists_.size());
      lists_.push_back(list);
    }
  }
  clear_list(cell);
  cell.written.slots = kSplit;
  cell.more = static_cast<uint32_t>(bytes_.size());
  bytes_.push_back(bytes);
}

void Shadow::clear_list(Cell& cell) {
  if (!cell.more) return;
  lists_[cell.more].clear();
  unused_lists_.push_back(cell.more);
  cell.more = 0;
}

}  // namespace emulator
