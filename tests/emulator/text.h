// A module's PTX text, parsed: variables, functions, statements.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "machine.h"

namespace emulator {

struct Variable {
  std::string name;
  Space space = Space::kGlobal;
  size_t bytes = 0;
  size_t alignment = 1;
  bool dynamic = false;          // `.extern .shared x[]`: its size is the launch's
  bool of_entry = false;         // a parameter of a kernel, as opposed to one of a function
  std::vector<uint8_t> initial;  // shorter than `bytes`: the rest is 0
  uint64_t address = 0;          // of shared and local variables: the offset
};

// A register that a function declares. Predicates have 0 bytes.
struct Register {
  int bytes = 0;
};

struct Function {
  std::string name;
  bool entry = false;
  bool defined = false;
  std::array<uint32_t, 3> cluster{1, 1, 1};
  bool has_cluster = false;  // by .reqnctapercluster
  std::vector<Register> registers;
  std::vector<Variable> variables;  // parameters (of functions: results first), .local, .shared
  std::vector<int> parameters;      // numbers of variables, results first
  std::vector<Statement> statements;
  // Operand::number of a label is an index of this, which holds an index of statements.
  std::vector<size_t> labels;
};

struct Text {
  std::map<std::string, Variable, std::less<>> variables;  // of the module
  std::map<std::string, Function, std::less<>> functions;
  std::map<int, std::string> files;  // by .file's numbers
};

// Throws Failure with the line.
Text parse(std::string_view ptx);

// Puts the body of every called function in place of the call.
void inline_calls(const Text& text, Function& function);

// A line of PTX as a person would write it, for messages.
std::string to_string(const Statement& statement);
// The line in the PTX text and in the source, with the instruction.
std::string place(const Statement& statement);

}  // namespace emulator
