// The ranges of host memory that kernels may access.
#pragma once

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
    last_begin_ = last_end_ = 0;
  }
  bool empty() const { return ranges_.empty(); }
  bool contains(uint64_t address, size_t bytes) {
    return (address >= last_begin_ && address + bytes <= last_end_) || find(address, bytes);
  }
  // What lies nearest, for a message.
  std::string describe(uint64_t address) const;

 private:
  bool find(uint64_t address, size_t bytes);

  std::map<uint64_t, uint64_t> ranges_;
  uint64_t last_begin_ = 0, last_end_ = 0;
};

// What emu_memory announced: nothing is checked while it is empty.
KnownMemory& device_memory();
// Variables and parameters of modules.
KnownMemory& module_memory();

}  // namespace emulator
