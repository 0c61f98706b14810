// How a warp goes on: which of its lanes run, and until when.
#include "warp.h"

#include <algorithm>

#include "text.h"

namespace emulator {
namespace {

// The next place where the running group has to look around: where another group waits to be joined
// or, if that group can run, where the other group is first.
const Instr* next_event(const Warp& warp) {
  const Instr* event = reinterpret_cast<const Instr*>(UINTPTR_MAX);
  for (const Group& other : warp.others) {
    if (other.turn == Turn::kNow || other.next > warp.next) event = std::min(event, other.next);
  }
  return event;
}

void put_aside(Warp& warp, Turn turn) {
  warp.others.push_back(Group{warp.group, warp.next, nullptr, turn});
  warp.group = 0;
}

// Makes the group with the smallest program counter of those that may run the running one, and
// joins all groups that are at its place. False: none may run.
bool choose_group(Warp& warp) {
  if (warp.group) put_aside(warp, Turn::kNow);
  const Group* best = nullptr;
  for (const Group& group : warp.others) {
    if (group.turn == Turn::kNow && (!best || group.next < best->next)) best = &group;
  }
  if (!best) return false;
  warp.next = best->next;
  std::erase_if(warp.others, [&](const Group& group) {
    if (group.next != warp.next) return false;
    warp.group |= group.lanes;
    return true;
  });
  warp.event = next_event(warp);
  return true;
}

// After an instruction at which something happened. False: the slice is over.
bool look_around(Warp& warp, const Instr& now) {
  if (warp.stays) {
    warp.stays = false;
    warp.others.push_back(Group{warp.active, &now, warp.waits_for, Turn::kNextSlice});
    warp.group &= ~warp.active;
  }
  if (warp.yielded) {
    warp.yielded = false;
    if (warp.group) put_aside(warp, Turn::kAfterNextSlice);
    return false;
  }
  return choose_group(warp);
}

}  // namespace

uint32_t run(Warp& warp, uint32_t slice) {
  for (Group& group : warp.others) {
    if (group.turn == Turn::kNextSlice) group.turn = Turn::kNow;
  }
  if (!choose_group(warp)) {
    for (Group& group : warp.others) group.turn = Turn::kNow;
    if (!choose_group(warp)) return 0;
  }
  uint32_t done = 0;
  const Instr* now = warp.next;
  try {
    while (true) {
      now = warp.next++;
      warp.active = warp.group & warp.predicate(now->guard);
      if (warp.active) now->run(warp, *now);
      ++done;
      if (warp.next >= warp.event) [[unlikely]] {
        done -= warp.stays;
        if (!look_around(warp, *now)) break;
      }
      if (done >= slice) [[unlikely]]
        break;
    }
  } catch (const Failure& failure) {
    const Statement& statement = *now->statement;
    throw Failure(std::string(failure.what()) + "\n  " + place(statement));
  }
  bool any_can_run = false;
  for (Group& group : warp.others) {
    if (group.turn == Turn::kAfterNextSlice) group.turn = Turn::kNextSlice;
    any_can_run |= !group.waits_for;
  }
  if (warp.group) {
    // The slice was over before the work. If it spins until other lanes of the warp have done
    // something, they need a slice without it.
    put_aside(warp, warp.others.empty() ? Turn::kNextSlice : Turn::kAfterNextSlice);
    any_can_run = true;
  }
  return done ? done : any_can_run;
}

}  // namespace emulator
