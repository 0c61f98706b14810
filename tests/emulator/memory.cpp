// Addresses: from what a kernel computes to the host's memory.
#include "memory.h"

#include <cstdio>
#include <iterator>

#include "machine.h"

namespace emulator {
namespace {

std::string hexadecimal(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

[[noreturn]] void misaligned(const char* space, uint64_t address, size_t alignment, int lane) {
  fail(std::string(space) + " address " + hexadecimal(address) + " is not a multiple of " +
           std::to_string(alignment),
       lane);
}

}  // namespace

bool KnownMemory::find(uint64_t address, size_t bytes) {
  auto next = ranges_.upper_bound(address);
  if (next == ranges_.begin()) return false;
  --next;
  if (address + bytes > next->second) return false;
  recent_[place(address)] = {next->first, next->second};
  return true;
}

std::string KnownMemory::describe(uint64_t address) const {
  const auto next = ranges_.upper_bound(address);
  std::string text;
  if (next != ranges_.begin()) {
    const auto [begin, end] = *std::prev(next);
    if (address < end) {
      text = std::to_string(end - address) + " bytes before the end of an allocation of " +
             std::to_string(end - begin);
    } else {
      text = std::to_string(address - end) + " bytes behind an allocation of " +
             std::to_string(end - begin);
    }
  }
  if (next != ranges_.end()) {
    if (!text.empty()) text += ", ";
    text += std::to_string(next->first - address) + " bytes before an allocation of " +
            std::to_string(next->second - next->first);
  }
  return text;
}

uint8_t* Warp::shared(uint32_t address, size_t bytes, size_t alignment) {
  const uint32_t rank = address >> kRankShift, offset = address & ((1u << kRankShift) - 1);
  Block* owner = block;
  if (rank) {
    if (rank > block->cluster->blocks.size())
      fail("shared address " + hexadecimal(address) + " names a block outside of the cluster");
    owner = block->cluster->blocks[rank - 1];
  }
  if (owner != block && !block->cluster->met)
    fail(
        "shared memory of another block, which may not have begun: no phase of the cluster's "
        "barrier is complete");
  if (owner->live_warps == 0) fail("shared memory of another block, which has ended");
  if (offset < kSharedBase || offset + bytes > owner->shared.size()) {
    fail("shared address " + hexadecimal(address) + ": " + std::to_string(bytes) +
         " bytes there are outside of the block's [" + hexadecimal(kSharedBase) + ", " +
         hexadecimal(owner->shared.size()) + ")");
  }
  if (offset % alignment) misaligned("shared", address, alignment, -1);
  return owner->shared.data() + offset;
}

uint8_t* Warp::global(uint64_t address, size_t bytes, size_t alignment) {
  if (address % alignment) misaligned("global", address, alignment, -1);
  if (!device_memory.empty() && !device_memory.contains(address, bytes) &&
      !module_memory.contains(address, bytes)) {
    fail("global address " + hexadecimal(address) + ": " + std::to_string(bytes) +
         " bytes there are outside of all allocations (" + device_memory.describe(address) + ")");
  }
  return reinterpret_cast<uint8_t*>(address);
}

uint8_t* Warp::local_memory(uint32_t offset, size_t bytes, size_t alignment, int lane) {
  if (offset + bytes > local_bytes)
    fail("local address " + hexadecimal(offset) + " is outside of the thread's " +
             std::to_string(local_bytes) + " bytes",
         lane);
  if (offset % alignment) misaligned("local", offset, alignment, lane);
  return local + static_cast<size_t>(lane) * local_bytes + offset;
}

uint8_t* Warp::generic(uint64_t address, size_t bytes, size_t alignment, int lane) {
  switch (address & kWindowMask) {
    case kSharedWindow:
      return shared(static_cast<uint32_t>(address), bytes, alignment);
    case kLocalWindow:
      return local_memory(static_cast<uint32_t>(address), bytes, alignment, lane);
    default:
      return global(address, bytes, alignment);
  }
}

void fail(const std::string& text, int lane) {
  throw Failure(lane < 0 ? text : text + " (lane " + std::to_string(lane) + ")");
}

}  // namespace emulator
