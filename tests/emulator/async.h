// What asynchronous instructions keep for a warp and for a cluster, and when their work happens.
//
// At once, or in a launch with `late`: wgmma and cp.async at the wait that they need; bulk copies
// (TMA) by turns at once and when no warp can go on before one of them has come, which the seed
// chooses. What is read before it was waited for, or overwritten while it was still to be read,
// then shows as a wrong result in one launch or the other.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "machine.h"

namespace emulator {

// A copy by cp.async: of `bytes_read` bytes, and zeros after them.
struct Copy {
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes, bytes_read;
};

// Work of one lane that begins in order and is waited for in groups.
template <class Work>
struct Groups {
  std::vector<Work> pending;
  uint64_t begun = 0;               // how many works there have been, pending ones included
  std::vector<uint64_t> committed;  // `begun` as it was at each commit

  void add(Work work) {
    pending.push_back(std::move(work));
    ++begun;
  }
  void commit() { committed.push_back(begun); }
  // Of all groups but the latest `count`: how many works had begun by their end.
  uint64_t before_latest(uint64_t count) const {
    return committed.size() > count ? committed[committed.size() - 1 - count] : 0;
  }
  // Takes those out of `pending` that are among the first `end` works ever, in order.
  std::vector<Work> take(uint64_t end) {
    const uint64_t first = begun - pending.size();
    if (end <= first) return {};
    const auto until = pending.begin() + static_cast<std::ptrdiff_t>(end - first);
    std::vector<Work> taken(std::make_move_iterator(pending.begin()),
                            std::make_move_iterator(until));
    pending.erase(pending.begin(), until);
    return taken;
  }
};

struct WgmmaWork;
struct BulkWrite;

struct WarpAsync {
  Groups<Copy> copies[kLanes];                      // cp.async
  Groups<std::shared_ptr<BulkWrite>> bulk[kLanes];  // from shared to global memory
  Groups<std::shared_ptr<WgmmaWork>> wgmma;         // of the whole warp
  uint64_t cluster_arrivals = 0;                    // at the cluster's barrier
  // Of a wait for an mbarrier (mbarrier.cpp): whether it is to give up soon, and whether it does.
  bool timeout_queued = false;
  bool timed_out = false;
  char waits_for[96] = {};
};

struct ClusterAsync {
  // The mbarriers that are initialised, by where they are in the host's memory, as they last were.
  std::unordered_map<const uint8_t*, uint64_t> mbarriers;
  uint64_t generation = 0;  // completed phases of the cluster's barrier
  ClusterRaces* races = nullptr;
  int timeouts = 0;  // of waits for an mbarrier, one after the other
};

WarpAsync& async_of(Warp& warp);
ClusterAsync& async_of(Cluster& cluster);

// Does `work`, which writes to shared memory at `to`, at once, or later as described above. Fails
// if that is after the block whose memory it is has ended.
void perform(Warp& warp, const uint8_t* to, std::function<void()> work);

// An address operand: [base + offset].
struct AddressOperand {
  Row base;
  int bytes;
  int64_t offset;

  uint64_t at(const Warp& warp, int lane) const {
    const uint64_t base_value =
        bytes == 8 ? warp.row<uint64_t>(base)[lane] : warp.row<uint32_t>(base)[lane];
    return base_value + static_cast<uint64_t>(offset);
  }
  uint32_t shared(const Warp& warp, int lane) const {
    return static_cast<uint32_t>(at(warp, lane));
  }
};

inline AddressOperand address_operand(Decoding& decoding, const Operand& operand) {
  const Decoding::Address address = decoding.address(operand);
  return {address.base, address.bytes, address.offset};
}

// Calls `each(lane)` for all active lanes.
template <class Each>
void for_active(const Warp& warp, Each each) {
  for (uint32_t lanes = warp.active; lanes; lanes &= lanes - 1) each(__builtin_ctz(lanes));
}

// mbarrier.cpp: what other instructions do to the mbarrier at a place in shared memory.
void mbarrier_complete_tx(ClusterAsync& async, uint8_t* barrier, int64_t bytes);
void mbarrier_arrive(ClusterAsync& async, uint8_t* barrier);

}  // namespace emulator
