// The emulator as a shared library: what tests/emulator/cupy calls through ctypes.
//
// int results are 0 for success; otherwise `error` holds a text that ends within `error_size`
// bytes.
#include <cstring>
#include <memory>
#include <string>

#include "decode.h"
#include "launch.h"
#include "memory.h"
#include "text.h"

namespace emulator {
namespace {

struct Module {
  Text text;
  ModuleMemory memory;
  std::map<std::string, std::unique_ptr<Program>> programs;  // decoded at their first launch

  explicit Module(std::string_view ptx) : text(parse(ptx)) {
    for (const auto& [name, variable] : text.variables) {
      if (variable.space == Space::kShared) continue;
      AlignedBytes bytes(variable.bytes);
      std::memcpy(bytes.data(), variable.initial.data(),
                  std::min(variable.initial.size(), variable.bytes));
      module_memory.add(reinterpret_cast<uint64_t>(bytes.data()),
                        std::max<size_t>(variable.bytes, 1));
      memory.emplace(name, std::move(bytes));
    }
  }

  ~Module() {
    for (const auto& [name, bytes] : memory)
      module_memory.remove(reinterpret_cast<uint64_t>(bytes.data()));
    for (const auto& [name, program] : programs)
      module_memory.remove(reinterpret_cast<uint64_t>(program->parameters.data()));
  }

  Program& program(const std::string& entry) {
    std::unique_ptr<Program>& program = programs[entry];
    if (program) return *program;
    const auto found = text.functions.find(entry);
    if (found == text.functions.end() || !found->second.entry)
      throw Failure("there is no kernel '" + entry + "'");
    program = decode(text, memory, found->second);
    module_memory.add(reinterpret_cast<uint64_t>(program->parameters.data()),
                      program->parameters.size());
    return *program;
  }
};

void copy_text(const std::string& text, char* to, size_t size) {
  if (size == 0) return;
  const size_t length = std::min(text.size(), size - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

// Calls `body`; what it throws becomes the text of the error.
template <class Body>
int guarded(char* error, size_t error_size, Body body) {
  try {
    body();
    return 0;
  } catch (const std::exception& failure) {
    copy_text(failure.what(), error, error_size);
    return 1;
  }
}

}  // namespace
}  // namespace emulator

#define EMULATOR_EXPORT __attribute__((visibility("default")))

extern "C" {

// A module of a PTX text, or null.
EMULATOR_EXPORT void* emu_load(const char* ptx, char* error, size_t error_size) {
  void* module = nullptr;
  emulator::guarded(error, error_size, [&] { module = new emulator::Module(ptx); });
  return module;
}

// Decodes a kernel without running it, so that instructions that are not known show at once.
EMULATOR_EXPORT int emu_check(void* module, const char* entry, char* error, size_t error_size) {
  return emulator::guarded(error, error_size,
                           [&] { static_cast<emulator::Module*>(module)->program(entry); });
}

// Runs a kernel to its end. `arguments` is a table of the addresses of its arguments' values.
EMULATOR_EXPORT int emu_launch(void* module, const char* entry, const unsigned grid[3],
                               const unsigned block[3], unsigned dynamic_smem,
                               void* const* arguments, unsigned multiprocessors,
                               const char* options, char* error, size_t error_size) {
  return emulator::guarded(error, error_size, [&] {
    try {
      emulator::Program& program = static_cast<emulator::Module*>(module)->program(entry);
      emulator::launch(program, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]},
                       dynamic_smem, arguments, multiprocessors,
                       emulator::read_options(options ? options : ""));
    } catch (const emulator::Failure& failure) {
      throw emulator::Failure(std::string(entry) + ": " + failure.what());
    }
  });
}

// Adds a range of device memory, or removes it. Once there is one, accesses outside of all fail.
EMULATOR_EXPORT void emu_memory(const void* begin, size_t bytes, int add) {
  const auto address = reinterpret_cast<uint64_t>(begin);
  if (add) {
    emulator::device_memory.add(address, bytes);
  } else {
    emulator::device_memory.remove(address);
  }
}

EMULATOR_EXPORT void emu_unload(void* module) { delete static_cast<emulator::Module*>(module); }

}  // extern "C"
