// From statements to instructions with handlers.
#include "decode.h"

#include <bit>
#include <cstdlib>
#include <new>
#include <set>
#include <unordered_map>

namespace emulator {
namespace {

constexpr uint32_t kConstantBit = 0x80000000u;
constexpr size_t kMaxConstants = size_t{16} << 20;

std::map<std::string, Decoder, std::less<>>& opcodes() {
  static std::map<std::string, Decoder, std::less<>> table;
  return table;
}

// The decoder of the longest name that the opcode begins with.
Decoder find_decoder(const std::string& opcode) {
  std::string_view name = opcode;
  while (true) {
    const auto found = opcodes().find(name);
    if (found != opcodes().end()) return found->second;
    const size_t dot = name.rfind('.');
    if (dot == std::string_view::npos) return nullptr;
    name = name.substr(0, dot);
  }
}

size_t align(size_t offset, size_t alignment) {
  return (offset + alignment - 1) / alignment * alignment;
}

class ProgramDecoder : public Decoding {
 public:
  ProgramDecoder(const Text& text, const ModuleMemory& memory, Program& program)
      : text_(text), memory_(memory), program_(program) {}

  void decode() {
    lay_out_variables();
    find_specials();
    program_.allocation = allocate(
        program_.function, static_cast<uint32_t>(kLanes * 4 * program_.specials.size()), true);
    sink_ = program_.allocation.bytes;
    program_.allocation.bytes += kLanes * 16;
    const auto& statements = program_.function.statements;
    program_.code.resize(statements.size() + 1);
    for (size_t i = 0; i < statements.size(); ++i) decode(statements[i], program_.code[i]);
    end_.opcode = "exit";
    end_.parts = {"exit"};
    held_end_ = keep(Statement(end_));
    decode(*held_end_, program_.code.back());
    program_.constants = AlignedBytes(constants_.size());
    std::memcpy(program_.constants.data(), constants_.data(), constants_.size());
  }

  Row row(const Operand& operand, int bytes) override {
    switch (operand.kind) {
      case Operand::Kind::kRegister:
        if (operand.bytes != bytes) {
          throw std::runtime_error("'" + operand.text + "' has " + std::to_string(operand.bytes) +
                                   " bytes, the instruction takes " + std::to_string(bytes));
        }
        return {program_.allocation.places[operand.number]};
      case Operand::Kind::kImmediate:
        return constant(immediate(operand, bytes), bytes);
      case Operand::Kind::kSymbol:
        return constant(symbol(operand), bytes, find_variable(operand).space == Space::kShared);
      case Operand::Kind::kSpecial:
        if (bytes != 4) throw std::runtime_error("'" + operand.text + "' is not of this width");
        return {special(operand.text)};
      default:
        throw std::runtime_error("'" + operand.text + "' is neither a register nor a value");
    }
  }

  Row any_row(const Operand& operand) override {
    if (operand.kind == Operand::Kind::kRegister)
      return {program_.allocation.places[operand.number]};
    return row(operand, operand.kind == Operand::Kind::kSpecial ? 4 : 8);
  }

  Row target_row(const Operand& operand, int bytes) override {
    if (operand.kind == Operand::Kind::kSink) return {sink_};
    if (operand.kind != Operand::Kind::kRegister)
      throw std::runtime_error("the result is not a register");
    return row(operand, bytes);
  }

  Predicate predicate(const Operand& operand) override {
    const uint32_t flip = operand.negated ? kAllLanes : 0;
    if (operand.kind == Operand::Kind::kPredicate)
      return {program_.allocation.places[operand.number], flip};
    if (operand.kind == Operand::Kind::kImmediate)
      return {kTruePredicate, operand.immediate ? 0 : kAllLanes};
    throw std::runtime_error("'" + operand.text + "' is not a predicate");
  }

  Predicate target_predicate(const Operand& operand) override {
    if (operand.kind == Operand::Kind::kSink) return {kSinkPredicate, 0};
    if (operand.kind != Operand::Kind::kPredicate)
      throw std::runtime_error("the result is not a predicate");
    return predicate(operand);
  }

  Address address(const Operand& operand) override {
    if (operand.kind != Operand::Kind::kAddress)
      throw std::runtime_error("'" + operand.text + "' is not an address");
    const Operand& base = operand.parts[0];
    const auto offset = static_cast<int64_t>(operand.immediate);
    if (base.kind == Operand::Kind::kRegister) return {any_row(base), base.bytes, offset};
    return {row(base, 8), 8, offset};
  }

  Space space_of(const Operand& operand) override {
    const Operand& base = operand.kind == Operand::Kind::kAddress ? operand.parts[0] : operand;
    if (base.kind != Operand::Kind::kSymbol) return Space::kGeneric;
    const Variable& variable = find_variable(base);
    if (variable.space == Space::kParam && !variable.of_entry) return Space::kLocal;
    return variable.space;
  }

  const Instr* label(const Operand& operand) override {
    if (operand.kind != Operand::Kind::kLabel)
      throw std::runtime_error("'" + operand.text + "' is not a label");
    return &program_.code[program_.function.labels[operand.number]];
  }

  int64_t integer(const Operand& operand) override {
    if (operand.kind != Operand::Kind::kImmediate)
      throw std::runtime_error("'" + operand.text + "' has to be a number");
    return static_cast<int64_t>(operand.immediate);
  }

  const Row* keep(const std::vector<Row>& rows) override {
    return Decoding::keep<std::vector<Row>>(rows)->data();
  }
  using Decoding::keep;

 private:
  void hold(std::shared_ptr<void> memory) override { program_.held.push_back(std::move(memory)); }

  void decode(const Statement& statement, Instr& instr) {
    const std::string where =
        "PTX line " + std::to_string(statement.line) + ": " + to_string(statement) + ": ";
    instr.statement = &statement;
    const Decoder decoder = find_decoder(statement.opcode);
    if (!decoder) throw Failure(where + "this instruction is not known to the emulator");
    try {
      if (statement.guard.kind != Operand::Kind::kSink) instr.guard = predicate(statement.guard);
      instr.run = decoder(statement, instr, *this);
    } catch (const std::exception& error) {
      throw Failure(where + error.what());
    }
    if (!instr.run) throw Failure(where + "these modifiers are not known to the emulator");
  }

  const Variable& find_variable(const Operand& operand) {
    if (operand.number >= 0) return program_.function.variables[operand.number];
    const auto found = text_.variables.find(operand.text);
    if (found == text_.variables.end())
      throw std::runtime_error("there is no variable '" + operand.text + "'");
    return found->second;
  }

  uint64_t symbol(const Operand& operand) {
    const Variable& variable = find_variable(operand);
    if (operand.number >= 0 || variable.space == Space::kShared) {
      if (variable.space == Space::kShared && variable.dynamic) return program_.dynamic_shared;
      if (operand.number < 0) return module_shared_.at(operand.text);
      return variable.address;
    }
    return reinterpret_cast<uint64_t>(memory_.find(operand.text)->second.data());
  }

  static uint64_t immediate(const Operand& operand, int bytes) {
    uint64_t bits = operand.immediate;
    if (operand.literal == Operand::Literal::kFloat64 && bytes == 4) {
      bits = std::bit_cast<uint32_t>(static_cast<float>(std::bit_cast<double>(bits)));
    } else if (operand.literal == Operand::Literal::kFloat32 && bytes == 8) {
      bits = std::bit_cast<uint64_t>(
          static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bits))));
    }
    return bits;
  }

  Row constant(uint64_t bits, int bytes, bool shared = false) {
    if (bytes < 8) bits &= (uint64_t{1} << 8 * bytes) - 1;
    const auto [found, added] = constant_places_.try_emplace({bits, shared ? -bytes : bytes}, 0);
    if (added) {
      const size_t place = constants_.size();
      constants_.resize(align(place + static_cast<size_t>(kLanes) * bytes, 64));
      if (constants_.size() > kMaxConstants) throw std::runtime_error("too many constants");
      for (int lane = 0; lane < kLanes; ++lane)
        std::memcpy(&constants_[place + lane * bytes], &bits, std::min(bytes, 8));
      if (shared) program_.shared_addresses.emplace_back(place, bytes);
      found->second = static_cast<uint32_t>(place) | kConstantBit;
    }
    return {found->second};
  }

  uint32_t special(const std::string& name) {
    for (const auto& [known, place] : program_.specials) {
      if (known == name) return place;
    }
    throw std::runtime_error("the special register '" + name + "' is not known to the emulator");
  }

  void find_specials() {
    std::set<std::string> names;
    const auto visit = [&](const auto& self, const Operand& operand) -> void {
      if (operand.kind == Operand::Kind::kSpecial) names.insert(operand.text);
      for (const Operand& part : operand.parts) self(self, part);
    };
    for (const Statement& statement : program_.function.statements) {
      for (const Operand& operand : statement.operands) visit(visit, operand);
    }
    for (const std::string& name : names) {
      program_.specials.emplace_back(name,
                                     static_cast<uint32_t>(program_.specials.size() * kLanes * 4));
    }
  }

  void lay_out_variables() {
    size_t shared = kSharedBase, local = 0, parameters = 0, dynamic_alignment = 16;
    const auto place = [](size_t& end, const Variable& variable) {
      const size_t at = align(end, variable.alignment);
      end = at + variable.bytes;
      return at;
    };
    for (Variable& variable : program_.function.variables) {
      if (variable.space == Space::kShared) {
        variable.address = place(shared, variable);
      } else if (variable.space == Space::kLocal ||
                 (variable.space == Space::kParam && !variable.of_entry)) {
        variable.address = place(local, variable);
      } else if (variable.space == Space::kParam) {
        variable.address = place(parameters, variable);
        program_.parameter_places.emplace_back(variable.address, variable.bytes);
      }
    }
    const auto visit = [&](const auto& self, const Operand& operand) -> void {
      for (const Operand& part : operand.parts) self(self, part);
      if (operand.kind != Operand::Kind::kSymbol || operand.number >= 0) return;
      const auto found = text_.variables.find(operand.text);
      if (found == text_.variables.end() || found->second.space != Space::kShared) return;
      if (found->second.dynamic) {
        dynamic_alignment = std::max(dynamic_alignment, found->second.alignment);
      } else if (!module_shared_.contains(operand.text)) {
        module_shared_[operand.text] = place(shared, found->second);
      }
    };
    for (const Statement& statement : program_.function.statements) {
      for (const Operand& operand : statement.operands) visit(visit, operand);
    }
    program_.static_shared_end = static_cast<uint32_t>(shared);
    program_.dynamic_shared = static_cast<uint32_t>(align(shared, dynamic_alignment));
    program_.local_bytes = static_cast<uint32_t>(align(local, 16));
    program_.parameters = AlignedBytes(parameters);
    for (Variable& variable : program_.function.variables) {
      if (variable.of_entry)
        variable.address += reinterpret_cast<uint64_t>(program_.parameters.data());
    }
  }

  struct Hash {
    size_t operator()(const std::pair<uint64_t, int>& key) const {
      return std::hash<uint64_t>()(key.first * 31 + key.second);
    }
  };

  const Text& text_;
  const ModuleMemory& memory_;
  Program& program_;
  std::vector<uint8_t> constants_;
  std::unordered_map<std::pair<uint64_t, int>, uint32_t, Hash> constant_places_;
  std::map<std::string, size_t> module_shared_;
  uint32_t sink_ = 0;
  Statement end_;
  const Statement* held_end_ = nullptr;
};

}  // namespace

Opcode::Opcode(std::string name, Decoder decoder) { opcodes()[std::move(name)] = decoder; }

AlignedBytes::AlignedBytes(size_t bytes) : size_(bytes) {
  constexpr size_t kAlignment = 128;
  data_.reset(static_cast<uint8_t*>(std::aligned_alloc(kAlignment, align(bytes + 1, kAlignment))));
  if (!data_) throw std::bad_alloc();
  std::memset(data_.get(), 0, bytes);
}

void AlignedBytes::Free::operator()(uint8_t* memory) const { std::free(memory); }

std::unique_ptr<Program> decode(const Text& text, const ModuleMemory& memory,
                                const Function& entry) {
  auto program = std::make_unique<Program>();
  program->name = entry.name;
  program->function = entry;
  inline_calls(text, program->function);
  ProgramDecoder(text, memory, *program).decode();
  return program;
}

}  // namespace emulator
