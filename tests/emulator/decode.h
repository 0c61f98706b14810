// A kernel as it runs: instructions with their handlers, constants, and the layout of memory.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "allocate.h"
#include "machine.h"
#include "text.h"

namespace emulator {

// Memory at an address that is a multiple of 128.
class AlignedBytes {
 public:
  explicit AlignedBytes(size_t bytes = 0);
  uint8_t* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(uint8_t* memory) const;
  };
  std::unique_ptr<uint8_t[], Free> data_;
  size_t size_;
};

// A module's variables in global and constant memory, at the addresses that kernels see.
using ModuleMemory = std::map<std::string, AlignedBytes, std::less<>>;

struct Program {
  std::string name;
  Function function;
  std::vector<Instr> code;
  Allocation allocation;
  std::vector<std::pair<std::string, uint32_t>> specials;  // special registers and their rows
  AlignedBytes constants;
  std::vector<std::pair<size_t, int>> shared_addresses;     // among the constants: place, bytes
  AlignedBytes parameters;                                  // as ld.param reads them
  std::vector<std::pair<size_t, size_t>> parameter_places;  // offset and size of each
  uint32_t static_shared_end = kSharedBase;
  uint32_t dynamic_shared = kSharedBase;  // where the launch's dynamic shared memory begins
  uint32_t local_bytes = 0;               // of a thread
  std::vector<std::shared_ptr<void>> held;
};

std::unique_ptr<Program> decode(const Text& text, const ModuleMemory& memory,
                                const Function& entry);

}  // namespace emulator
