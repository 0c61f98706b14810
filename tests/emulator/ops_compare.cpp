// Comparisons and selections.
#include <cstdint>

#include "lanes.h"
#include "narrow.h"
#include "types.h"

namespace emulator {
namespace {

enum class Comparison : uint8_t {
  kEq,
  kNe,
  kLt,
  kLe,
  kGt,
  kGe,
  kEqu,
  kNeu,
  kLtu,
  kLeu,
  kGtu,
  kGeu,
  kNum,
  kNan,
  kUnknown
};

Comparison comparison_named(const std::string& name) {
  static const char* const names[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                      "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};
  static const char* const unsigned_names[] = {"", "", "lo", "ls", "hi", "hs"};
  for (int i = 0; i < static_cast<int>(Comparison::kUnknown); ++i) {
    if (name == names[i] || (i < 6 && name == unsigned_names[i])) return static_cast<Comparison>(i);
  }
  return Comparison::kUnknown;
}

// Comparisons that end in u hold for NaN, the others do not. In C++ only != holds.
template <Comparison comparison, class T>
inline bool compare(T a, T b) {
  switch (comparison) {
    case Comparison::kEq:
      return a == b;
    case Comparison::kNe:
      return a < b || a > b;
    case Comparison::kLt:
      return a < b;
    case Comparison::kLe:
      return a <= b;
    case Comparison::kGt:
      return a > b;
    case Comparison::kGe:
      return a >= b;
    case Comparison::kEqu:
      return !(a < b || a > b);
    case Comparison::kNeu:
      return a != b;
    case Comparison::kLtu:
      return !(a >= b);
    case Comparison::kLeu:
      return !(a > b);
    case Comparison::kGtu:
      return !(a <= b);
    case Comparison::kGeu:
      return !(a < b);
    case Comparison::kNum:
      return a == a && b == b;
    default:
      return a != a || b != b;
  }
}

// How a row's elements are read: T itself, or a half, two of which may be in an element.
template <class T>
struct Plain {
  using Stored = T;
  static T value(T x) { return x; }
};
template <class Half>
struct Narrow {
  using Stored = uint16_t;
  static float value(uint16_t x) { return Half::widen(x); }
};
struct Flushed {
  using Stored = float;
  static float value(float x) { return std::bit_cast<uint32_t>(x) & 0x7f800000u ? x : 0.0f; }
};

// What happens to the comparison's result: instr.flags.
enum Combination : uint32_t { kNone, kAnd, kOr, kXor };

inline uint32_t combine(uint32_t mask, const Warp& warp, const Instr& in) {
  switch (in.flags & 3) {
    case kAnd:
      return mask & warp.predicate(in.r);
    case kOr:
      return mask | warp.predicate(in.r);
    case kXor:
      return mask ^ warp.predicate(in.r);
    default:
      return mask;
  }
}

// The comparison of element `part` of the lanes' `parts` elements.
template <Comparison comparison, class Reading, int parts>
uint32_t compared(const Warp& warp, const Instr& in, int part) {
  using Stored = typename Reading::Stored;
  const Stored* a = lanes<Stored>(warp, in.a);
  const Stored* b = lanes<Stored>(warp, in.b);
  return mask_of([&](int i) {
    return compare<comparison>(Reading::value(a[parts * i + part]),
                               Reading::value(b[parts * i + part]));
  });
}

template <Comparison comparison, class Reading, int parts>
void set_predicates(Warp& warp, const Instr& in) {
  const uint32_t first = compared<comparison, Reading, parts>(warp, in, 0);
  if constexpr (parts == 2) {
    const uint32_t second = compared<comparison, Reading, parts>(warp, in, 1);
    const uint32_t low = combine(first, warp, in), high = combine(second, warp, in);
    warp.set_predicate(in.p, low);
    warp.set_predicate(in.q, high);
  } else {
    const uint32_t positive = combine(first, warp, in), negative = combine(~first, warp, in);
    warp.set_predicate(in.p, positive);
    warp.set_predicate(in.q, negative);
  }
}

// set: instr.imm is what true is; the result has parts of instr.n bytes.
template <Comparison comparison, class Reading, int parts>
void set_values(Warp& warp, const Instr& in) {
  const uint32_t first = combine(compared<comparison, Reading, parts>(warp, in, 0), warp, in);
  const uint32_t second =
      parts == 2 ? combine(compared<comparison, Reading, parts>(warp, in, parts - 1), warp, in) : 0;
  const auto truth = static_cast<uint32_t>(in.imm);
  if (in.n == 2) {
    for_lanes<uint16_t>(warp, in.d,
                        [&](int i) { return static_cast<uint16_t>(first >> i & 1 ? truth : 0); });
  } else if (parts == 2) {
    for_lanes<uint32_t>(warp, in.d, [&](int i) {
      return (first >> i & 1 ? truth & 0xffff : 0) | (second >> i & 1 ? truth << 16 : 0);
    });
  } else {
    for_lanes<uint32_t>(warp, in.d, [&](int i) { return first >> i & 1 ? truth : 0; });
  }
}

template <class Reading, int parts>
Handler handler(Comparison comparison, bool values) {
  switch (comparison) {
#define EMULATOR_CASE(name)                                               \
  case Comparison::name:                                                  \
    return values ? Handler(set_values<Comparison::name, Reading, parts>) \
                  : Handler(set_predicates<Comparison::name, Reading, parts>);
    EMULATOR_CASE(kEq)
    EMULATOR_CASE(kNe)
    EMULATOR_CASE(kLt)
    EMULATOR_CASE(kLe)
    EMULATOR_CASE(kGt)
    EMULATOR_CASE(kGe)
    EMULATOR_CASE(kEqu)
    EMULATOR_CASE(kNeu)
    EMULATOR_CASE(kLtu)
    EMULATOR_CASE(kLeu)
    EMULATOR_CASE(kGtu)
    EMULATOR_CASE(kGeu)
    EMULATOR_CASE(kNum)
    EMULATOR_CASE(kNan)
#undef EMULATOR_CASE
    default:
      return nullptr;
  }
}

Handler typed_handler(Type type, bool flush, Comparison comparison, bool values) {
  if (type.kind == Kind::kFloat) {
    if (type.parts == 2) return handler<Narrow<Float16>, 2>(comparison, values);
    if (type.bytes == 2) return handler<Narrow<Float16>, 1>(comparison, values);
    if (type.bytes == 8) return handler<Plain<double>, 1>(comparison, values);
    return flush ? handler<Flushed, 1>(comparison, values)
                 : handler<Plain<float>, 1>(comparison, values);
  }
  if (type.kind == Kind::kBfloat)
    return type.parts == 2 ? handler<Narrow<Bfloat16>, 2>(comparison, values)
                           : handler<Narrow<Bfloat16>, 1>(comparison, values);
  if (type.is_signed()) {
    if (type.bytes == 2) return handler<Plain<int16_t>, 1>(comparison, values);
    return type.bytes == 4 ? handler<Plain<int32_t>, 1>(comparison, values)
                           : handler<Plain<int64_t>, 1>(comparison, values);
  }
  if (type.bytes == 2) return handler<Plain<uint16_t>, 1>(comparison, values);
  return type.bytes == 4 ? handler<Plain<uint32_t>, 1>(comparison, values)
                         : handler<Plain<uint64_t>, 1>(comparison, values);
}

void read_operands(const Statement& statement, Instr& instr, Decoding& decoding, Type type) {
  expect_modifiers(statement, {statement.parts.at(1), "and", "or", "xor", "ftz"});
  expect_operands(statement, 3, 4);
  instr.a = decoding.row(statement.operands[1], type.bytes);
  instr.b = decoding.row(statement.operands[2], type.bytes);
  instr.flags = statement.has("and")   ? kAnd
                : statement.has("or")  ? kOr
                : statement.has("xor") ? kXor
                                       : kNone;
  if (statement.operands.size() == 4) instr.r = decoding.predicate(statement.operands[3]);
}

Handler decode_setp(const Statement& statement, Instr& instr, Decoding& decoding) {
  const Type type = type_of(statement);
  read_operands(statement, instr, decoding, type);
  const Operand& result = statement.operands[0];
  const bool pair = result.kind == Operand::Kind::kPair;
  instr.p = decoding.target_predicate(pair ? result.parts[0] : result);
  instr.q = decoding.target_predicate(pair ? result.parts[1] : Operand{});
  return typed_handler(type, statement.has("ftz"), comparison_named(statement.parts[1]), false);
}

Handler decode_set(const Statement& statement, Instr& instr, Decoding& decoding) {
  const Type type = type_of(statement),
             result = type_named(statement.parts.at(statement.parts.size() - 2));
  read_operands(statement, instr, decoding, type);
  instr.d = decoding.target_row(statement.operands[0], result.bytes);
  instr.n = result.bytes;
  if (result == type_named("f32")) {
    instr.imm = 0x3f800000;
  } else if (result.floating()) {
    instr.imm = result.kind == Kind::kFloat ? 0x3c00 : 0x3f80;
  } else {
    instr.imm = 0xffffffff;
  }
  return typed_handler(type, statement.has("ftz"), comparison_named(statement.parts[1]), true);
}

template <class T>
void select(Warp& warp, const Instr& in) {
  const T* a = lanes<T>(warp, in.a);
  const T* b = lanes<T>(warp, in.b);
  const uint32_t mask = warp.predicate(in.p);
  for_lanes<T>(warp, in.d, [&](int i) { return mask >> i & 1 ? a[i] : b[i]; });
}

Handler decode_selp(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_operands(statement, 4, 4);
  const int bytes = type_of(statement).bytes;
  instr.d = decoding.target_row(statement.operands[0], bytes);
  instr.a = decoding.row(statement.operands[1], bytes);
  instr.b = decoding.row(statement.operands[2], bytes);
  instr.p = decoding.predicate(statement.operands[3]);
  return bytes == 2 ? select<uint16_t> : bytes == 4 ? select<uint32_t> : select<uint64_t>;
}

// slct: a where c >= 0, else b.
template <class T, class C>
Handler select_by_sign() {
  return ternary<T, T, T, C, [](T a, T b, C c) { return c >= C{0} ? a : b; }>;
}

Handler decode_slct(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_operands(statement, 4, 4);
  const Type by = type_of(statement);
  const int bytes = type_named(statement.parts.at(statement.parts.size() - 2)).bytes;
  instr.d = decoding.target_row(statement.operands[0], bytes);
  instr.a = decoding.row(statement.operands[1], bytes);
  instr.b = decoding.row(statement.operands[2], bytes);
  instr.c = decoding.row(statement.operands[3], 4);
  if (by.floating())
    return bytes == 2   ? select_by_sign<uint16_t, float>()
           : bytes == 4 ? select_by_sign<uint32_t, float>()
                        : select_by_sign<uint64_t, float>();
  return bytes == 2   ? select_by_sign<uint16_t, int32_t>()
         : bytes == 4 ? select_by_sign<uint32_t, int32_t>()
                      : select_by_sign<uint64_t, int32_t>();
}

// testp: properties of a number's bits.
Handler decode_testp(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_operands(statement, 2, 2);
  instr.p = decoding.target_predicate(statement.operands[0]);
  if (type_of(statement).bytes != 4) return nullptr;
  instr.a = decoding.row(statement.operands[1], 4);
#define EMULATOR_TEST(condition)                               \
  [](Warp& warp, const Instr& in) {                            \
    const uint32_t* a = lanes<uint32_t>(warp, in.a);           \
    warp.set_predicate(in.p, mask_of([&](int i) {              \
                         const uint32_t x = a[i] & 0x7fffffff; \
                         return condition;                     \
                       }));                                    \
  }
  if (statement.has("finite")) return EMULATOR_TEST(x < 0x7f800000);
  if (statement.has("infinite")) return EMULATOR_TEST(x == 0x7f800000);
  if (statement.has("number")) return EMULATOR_TEST(x <= 0x7f800000);
  if (statement.has("notanumber")) return EMULATOR_TEST(x > 0x7f800000);
  if (statement.has("normal")) return EMULATOR_TEST(x >= 0x00800000 && x < 0x7f800000);
  if (statement.has("subnormal")) return EMULATOR_TEST(x != 0 && x < 0x00800000);
#undef EMULATOR_TEST
  return nullptr;
}

const Opcode setp{"setp", decode_setp};
const Opcode set{"set", decode_set};
const Opcode selp{"selp", decode_selp};
const Opcode slct{"slct", decode_slct};
const Opcode testp{"testp", decode_testp};

}  // namespace
}  // namespace emulator
