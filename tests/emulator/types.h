// The types that an instruction names, and how decoders read operands of them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "machine.h"

namespace emulator {

enum class Kind : uint8_t {
  kUnsigned,
  kSigned,
  kBits,
  kFloat,
  kBfloat,
  kFloat8,
  kPredicate,
  kNone
};

struct Type {
  Kind kind = Kind::kNone;
  int bytes = 0;  // of all its parts
  int parts = 1;  // 2: f16x2

  bool floating() const { return kind == Kind::kFloat || kind == Kind::kBfloat; }
  bool is_signed() const { return kind == Kind::kSigned; }
  bool operator==(const Type&) const = default;
};

// "s32", "bf16x2", "pred" …; kNone for what is no type.
Type type_named(std::string_view name);
// The last modifier that is a type.
Type type_of(const Statement& statement);

// Whether a statement has any modifier but its types and those in `known`; decoders refuse what
// they do not know, as it may change the result.
void expect_modifiers(const Statement& statement, std::initializer_list<std::string_view> known);
void expect_operands(const Statement& statement, size_t least, size_t most);

// d, a, b, c of an instruction whose operands are all `bytes` wide.
void read_rows(const Statement& statement, Instr& instr, Decoding& decoding, int bytes);

}  // namespace emulator
