// The addresses of a warp's lanes.
#include "addresses.h"

#include <algorithm>

namespace emulator {
namespace {

uint8_t* pointer_of(Warp& warp, const Access& access, uint64_t address, int lane) {
  const size_t bytes = static_cast<size_t>(access.bytes) * access.count;
  try {
    switch (access.space) {
      case Space::kShared:
        return warp.shared(static_cast<uint32_t>(address), bytes, bytes);
      case Space::kLocal:
        return warp.local_memory(static_cast<uint32_t>(address), bytes, bytes, lane);
      case Space::kGeneric:
        return warp.generic(address, bytes, bytes, lane);
      default:
        return warp.global(address, bytes, bytes);
    }
  } catch (const Failure& failure) {
    fail(failure.what(), lane);
  }
}

}  // namespace

Pointers pointers(Warp& warp, const Instr& in, const Access& access) {
  Pointers result;
  const auto offset = static_cast<uint64_t>(access.offset);
  if (access.base_bytes == 8) {
    const uint64_t* base = lanes<uint64_t>(warp, in.a);
    for (int i = 0; i < kLanes; ++i) result.address[i] = base[i] + offset;
  } else {
    const uint32_t* base = lanes<uint32_t>(warp, in.a);
    for (int i = 0; i < kLanes; ++i) result.address[i] = base[i] + static_cast<uint32_t>(offset);
  }
  const uint32_t active = warp.active;
  if (active != kAllLanes) {
    const uint64_t known = result.address[first_lane(active)];
    for (int i = 0; i < kLanes; ++i)
      result.address[i] = active >> i & 1 ? result.address[i] : known;
  }

  uint64_t lowest = ~uint64_t{0}, highest = 0, all_bits = 0;
  for (int i = 0; i < kLanes; ++i) {
    lowest = std::min(lowest, result.address[i]);
    highest = std::max(highest, result.address[i]);
    all_bits |= result.address[i];
  }
  const uint64_t bytes = static_cast<uint64_t>(access.bytes) * access.count;
  Space space = access.space;
  uint64_t window = 0;
  if (space == Space::kGeneric) {
    if ((lowest & kWindowMask) == kSharedWindow) {
      space = Space::kShared;
      window = kSharedWindow;
    } else if (highest < kSharedWindow) {
      space = Space::kGlobal;
    }
  }
  const bool aligned = (all_bits & (bytes - 1)) == 0;
  if (aligned && space == Space::kShared && lowest >= window + kSharedBase &&
      highest + bytes <= window + warp.block->shared.size()) {
    const uint64_t base = reinterpret_cast<uint64_t>(warp.block->shared.data()) - window;
    for (int i = 0; i < kLanes; ++i) result.address[i] += base;
    return result;
  }
  if (aligned && (space == Space::kGlobal || space == Space::kConst || space == Space::kParam)) {
    KnownMemory& known = device_memory;
    if (known.empty() || known.contains(lowest, highest - lowest + bytes)) return result;
  }
  // Not all in one place, or an error: one at a time.
  uint8_t* some = nullptr;
  each_lane(active, [&](int lane) {
    some = pointer_of(warp, access, result.address[lane], lane);
    result.address[lane] = reinterpret_cast<uint64_t>(some);
  });
  each_lane(~active, [&](int lane) { result.address[lane] = reinterpret_cast<uint64_t>(some); });
  return result;
}

void read_address(const Statement& statement, const Operand& operand, Instr& instr,
                  Decoding& decoding, Access& access) {
  for (const std::string& part : statement.parts) {
    if (part == "atom" || part == "red" || part == "volatile" || part == "relaxed")
      access.strong = true;
    if (part == "acquire" || part == "acq_rel") access.strong = access.acquires = true;
    if (part == "release" || part == "acq_rel") access.strong = access.releases = true;
    if (part == "global") access.space = Space::kGlobal;
    if (part.starts_with("shared")) access.space = Space::kShared;
    if (part == "local") access.space = Space::kLocal;
    if (part == "const") access.space = Space::kConst;
    if (part.starts_with("param"))
      access.space = decoding.space_of(operand) == Space::kLocal ? Space::kLocal : Space::kParam;
  }
  const Decoding::Address address = decoding.address(operand);
  instr.a = address.base;
  access.base_bytes = address.bytes;
  access.offset = address.offset;
}

}  // namespace emulator
