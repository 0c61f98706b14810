// The types that an instruction names.
#include "types.h"

#include <algorithm>
#include <unordered_map>

namespace emulator {

Type type_named(std::string_view name) {
  static const std::unordered_map<std::string_view, Type> types{
      {"u8", {Kind::kUnsigned, 1}},      {"u16", {Kind::kUnsigned, 2}},
      {"u32", {Kind::kUnsigned, 4}},     {"u64", {Kind::kUnsigned, 8}},
      {"s8", {Kind::kSigned, 1}},        {"s16", {Kind::kSigned, 2}},
      {"s32", {Kind::kSigned, 4}},       {"s64", {Kind::kSigned, 8}},
      {"b8", {Kind::kBits, 1}},          {"b16", {Kind::kBits, 2}},
      {"b32", {Kind::kBits, 4}},         {"b64", {Kind::kBits, 8}},
      {"b128", {Kind::kBits, 16}},       {"f16", {Kind::kFloat, 2}},
      {"f32", {Kind::kFloat, 4}},        {"f64", {Kind::kFloat, 8}},
      {"f16x2", {Kind::kFloat, 4, 2}},   {"bf16", {Kind::kBfloat, 2}},
      {"bf16x2", {Kind::kBfloat, 4, 2}}, {"u16x2", {Kind::kUnsigned, 4, 2}},
      {"s16x2", {Kind::kSigned, 4, 2}},  {"e4m3x2", {Kind::kFloat8, 2, 2}},
      {"e5m2x2", {Kind::kFloat8, 2, 2}}, {"pred", {Kind::kPredicate, 0}}};
  const auto found = types.find(name);
  return found == types.end() ? Type{} : found->second;
}

Type type_of(const Statement& statement) {
  for (size_t i = statement.parts.size(); i-- > 1;) {
    const Type type = type_named(statement.parts[i]);
    if (type.kind != Kind::kNone) return type;
  }
  throw std::runtime_error("no type");
}

void expect_modifiers(const Statement& statement, std::initializer_list<std::string_view> known) {
  for (size_t i = 1; i < statement.parts.size(); ++i) {
    const std::string& part = statement.parts[i];
    if (type_named(part).kind != Kind::kNone ||
        std::find(known.begin(), known.end(), part) != known.end())
      continue;
    throw std::runtime_error("the modifier '." + part + "' is not known to the emulator here");
  }
}

void expect_operands(const Statement& statement, size_t least, size_t most) {
  if (statement.operands.size() < least || statement.operands.size() > most) {
    throw std::runtime_error(std::to_string(statement.operands.size()) +
                             " operands are not what the emulator knows here");
  }
}

void read_rows(const Statement& statement, Instr& instr, Decoding& decoding, int bytes) {
  const auto& operands = statement.operands;
  instr.d = decoding.target_row(operands[0], bytes);
  if (operands.size() > 1) instr.a = decoding.row(operands[1], bytes);
  if (operands.size() > 2) instr.b = decoding.row(operands[2], bytes);
  if (operands.size() > 3) instr.c = decoding.row(operands[3], bytes);
}

}  // namespace emulator
