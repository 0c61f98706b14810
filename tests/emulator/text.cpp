// Statements as text, for messages.
#include "text.h"

#include <cstdio>

namespace emulator {
namespace {

std::string to_string(const Operand& operand) {
  using Kind = Operand::Kind;
  const auto list = [](const std::vector<Operand>& parts, size_t from) {
    std::string text;
    for (size_t i = from; i < parts.size(); ++i)
      text += (i > from ? ", " : "") + to_string(parts[i]);
    return text;
  };
  switch (operand.kind) {
    case Kind::kImmediate: {
      if (operand.literal == Operand::Literal::kInteger)
        return std::to_string(static_cast<int64_t>(operand.immediate));
      char text[32];
      const bool wide = operand.literal == Operand::Literal::kFloat64;
      std::snprintf(text, sizeof text, wide ? "0d%016llX" : "0f%08llX",
                    static_cast<unsigned long long>(operand.immediate));
      return text;
    }
    case Kind::kVector:
      return "{" + list(operand.parts, 0) + "}";
    case Kind::kPair:
      return to_string(operand.parts[0]) + "|" + to_string(operand.parts[1]);
    case Kind::kAddress: {
      const auto offset = static_cast<int64_t>(operand.immediate);
      std::string text = "[" + to_string(operand.parts[0]);
      if (offset) text += (offset > 0 ? "+" : "") + std::to_string(offset);
      if (operand.parts.size() > 1) text += ", " + list(operand.parts, 1);
      return text + "]";
    }
    case Kind::kSink:
      return "_";
    default:
      return (operand.negated ? "!" : "") + operand.text;
  }
}

}  // namespace

bool Statement::has(std::string_view modifier) const {
  for (size_t i = 1; i < parts.size(); ++i) {
    if (parts[i] == modifier) return true;
  }
  return false;
}

std::string to_string(const Statement& statement) {
  std::string text;
  if (statement.guard.kind != Operand::Kind::kSink) text = "@" + to_string(statement.guard) + " ";
  text += statement.opcode;
  for (size_t i = 0; i < statement.operands.size(); ++i)
    text += (i ? ", " : " ") + to_string(statement.operands[i]);
  return text;
}

std::string place(const Statement& statement) {
  std::string text = "PTX line " + std::to_string(statement.line) + ": " + to_string(statement);
  if (!statement.source) return text;
  return text + "\n  " + *statement.source + " line " + std::to_string(statement.source_line);
}

}  // namespace emulator
