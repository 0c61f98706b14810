// The ranges of host memory that kernels may access.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace emulator {

class KnownMemory {
 public:
  void add(uint64_t begin, size_t bytes) { ranges_[begin] = begin + bytes; }
  void remove(uint64_t begin) {
    ranges_.erase(begin);
    recent_ = {};
  }
  bool empty() const { return ranges_.empty(); }
  bool contains(uint64_t address, size_t bytes) {
    const Range& recent = recent_[place(address)];
    return (address >= recent.begin && address + bytes <= recent.end) || find(address, bytes);
  }
  // What lies nearest, for a message.
  std::string describe(uint64_t address) const;

 private:
  struct Range {
    uint64_t begin = 0, end = 0;
  };
  static constexpr int kPageBits = 14, kRecent = 256;

  static size_t place(uint64_t address) { return address >> kPageBits & (kRecent - 1); }
  bool find(uint64_t address, size_t bytes);

  std::map<uint64_t, uint64_t> ranges_;
  std::array<Range, kRecent> recent_;  // what was found last, by a few bits of the address
};

// What emu_memory announced: nothing is checked while it is empty.
inline KnownMemory device_memory;
// Variables and parameters of modules.
inline KnownMemory module_memory;

}  // namespace emulator
