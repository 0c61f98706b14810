// cvt: from one type to another.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "lanes.h"
#include "narrow.h"
#include "types.h"

namespace emulator {
namespace {

enum class Rounding : uint8_t {
  kNone,
  kNearest,
  kZero,
  kDown,
  kUp,
  kIntNearest,
  kIntZero,
  kIntDown,
  kIntUp
};

// What the conversions that have no handler of their own need to know.
struct Conversion {
  Type from, to;
  int from_bytes = 0, to_bytes = 0;  // of the registers
  Rounding rounding = Rounding::kNone;
  bool flush = false, saturate = false, relu = false, finite = false;
};

const Conversion& conversion(const Instr& in) { return *static_cast<const Conversion*>(in.detail); }

Rounding rounding_of(const Statement& statement) {
  static const std::pair<const char*, Rounding> names[] = {
      {"rn", Rounding::kNearest},  {"rz", Rounding::kZero},        {"rm", Rounding::kDown},
      {"rp", Rounding::kUp},       {"rni", Rounding::kIntNearest}, {"rzi", Rounding::kIntZero},
      {"rmi", Rounding::kIntDown}, {"rpi", Rounding::kIntUp}};
  for (const auto& [name, rounding] : names) {
    if (statement.has(name)) return rounding;
  }
  return Rounding::kNone;
}

double rounded_to_integer(double x, Rounding rounding) {
  switch (rounding) {
    case Rounding::kIntNearest:
      return std::nearbyint(x);
    case Rounding::kIntZero:
      return std::trunc(x);
    case Rounding::kIntDown:
      return std::floor(x);
    case Rounding::kIntUp:
      return std::ceil(x);
    default:
      return x;
  }
}

// The low bytes of an element, extended by the type's sign.
int64_t integer_at(const uint8_t* element, Type type) {
  uint64_t bits = 0;
  std::memcpy(&bits, element, type.bytes);
  const int unused = 64 - 8 * type.bytes;
  return type.is_signed() ? static_cast<int64_t>(bits << unused) >> unused
                          : static_cast<int64_t>(bits);
}

double number_at(const uint8_t* element, Type type, bool flush) {
  if (type.bytes == 8) {
    double x;
    std::memcpy(&x, element, sizeof x);
    return x;
  }
  if (type.bytes == 4) {
    float x;
    std::memcpy(&x, element, sizeof x);
    return flush && std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
  }
  uint16_t bits;
  std::memcpy(&bits, element, sizeof bits);
  return type.kind == Kind::kBfloat ? Bfloat16::widen(bits) : Float16::widen(bits);
}

// Out of range becomes the nearest number, NaN becomes 0.
uint64_t to_integer(double x, Type type) {
  if (x != x) return 0;
  const int bits = 8 * type.bytes;
  if (type.is_signed()) {
    const double limit = std::ldexp(1.0, bits - 1);
    if (x >= limit) return (uint64_t{1} << (bits - 1)) - 1;
    return static_cast<uint64_t>(x < -limit ? std::numeric_limits<int64_t>::min() >> (64 - bits)
                                            : static_cast<int64_t>(x));
  }
  if (x >= std::ldexp(1.0, bits)) return ~uint64_t{0} >> (64 - bits);
  return x <= 0.0 ? 0 : static_cast<uint64_t>(x);
}

// An integer within the limits of another type.
int64_t clamped(int64_t x, Type from, Type to) {
  const int bits = 8 * to.bytes;
  const bool huge = !from.is_signed() && x < 0;  // beyond int64_t
  if (to.is_signed()) {
    const int64_t most = std::numeric_limits<int64_t>::max() >> (64 - bits);
    return huge ? most : std::clamp(x, -most - 1, most);
  }
  if (!huge && x < 0) return 0;
  const uint64_t most = ~uint64_t{0} >> (64 - bits);
  return static_cast<int64_t>(std::min(static_cast<uint64_t>(x), most));
}

float float_of(double x, Rounding rounding) {
  const auto nearest = static_cast<float>(x);
  const auto value = static_cast<double>(nearest);
  const bool too_high = value > x, too_low = value < x;
  const bool down = rounding == Rounding::kDown || (rounding == Rounding::kZero && x > 0),
             up = rounding == Rounding::kUp || (rounding == Rounding::kZero && x < 0);
  if (too_high && down) return std::nextafter(nearest, -INFINITY);
  if (too_low && up) return std::nextafter(nearest, INFINITY);
  return nearest;
}

uint64_t bits_of(double x, const Conversion& by) {
  if (by.saturate) x = x > 0.0 ? std::min(x, 1.0) : 0.0;
  if (by.relu && !(x > 0.0) && x == x) x = 0.0;
  if (by.to.bytes == 8) return std::bit_cast<uint64_t>(x);
  if (by.to.bytes == 4) {
    float value = float_of(x, by.rounding);
    if (by.flush && std::fpclassify(value) == FP_SUBNORMAL) value = std::copysign(0.0f, value);
    return std::bit_cast<uint32_t>(value != value ? std::bit_cast<float>(0x7fffffffu) : value);
  }
  const bool down = by.rounding == Rounding::kZero;
  if (by.to.kind == Kind::kBfloat) return down ? narrow_down<Bfloat16>(x) : narrow<Bfloat16>(x);
  return down ? narrow_down<Float16>(x) : narrow<Float16>(x);
}

uint64_t converted(const uint8_t* element, const Conversion& by) {
  if (by.from.floating()) {
    const double x = rounded_to_integer(number_at(element, by.from, by.flush), by.rounding);
    return by.to.floating() ? bits_of(x, by) : to_integer(x, by.to);
  }
  const int64_t x = integer_at(element, by.from);
  if (!by.to.floating()) return static_cast<uint64_t>(by.saturate ? clamped(x, by.from, by.to) : x);
  const bool huge = !by.from.is_signed() && x < 0;
  if (by.to.bytes == 4 && (by.rounding == Rounding::kNearest || by.rounding == Rounding::kNone)) {
    return std::bit_cast<uint32_t>(huge ? static_cast<float>(static_cast<uint64_t>(x))
                                        : static_cast<float>(x));
  }
  return bits_of(huge ? static_cast<double>(static_cast<uint64_t>(x)) : static_cast<double>(x), by);
}

// Any conversion of one number.
void convert(Warp& warp, const Instr& in) {
  const Conversion& by = conversion(in);
  const uint8_t* from = warp.row<uint8_t>(in.a);
  uint8_t* to = warp.row<uint8_t>(in.d);
  // A result narrower than its register is extended by its sign.
  const int unused = 64 - 8 * by.to.bytes;
  each_lane(warp.active, [&](int lane) {
    uint64_t bits = converted(from + lane * by.from_bytes, by) << unused;
    bits = by.to.is_signed() ? static_cast<uint64_t>(static_cast<int64_t>(bits) >> unused)
                             : bits >> unused;
    std::memcpy(to + lane * by.to_bytes, &bits, by.to_bytes);
  });
}

// The frequent ones.
template <class D, class A>
Handler plain() {
  return unary<D, A, [](A a) { return static_cast<D>(a); }>;
}

Handler frequent(const Conversion& by) {
  if (by.from_bytes != by.from.bytes || by.to_bytes != by.to.bytes || by.flush || by.saturate ||
      by.relu || by.from.parts != 1 || by.to.parts != 1)
    return nullptr;
  const auto is = [&](const char* to, const char* from) {
    return by.to == type_named(to) && by.from == type_named(from);
  };
  if (is("s64", "s32")) return plain<int64_t, int32_t>();
  if (is("u64", "u32")) return plain<uint64_t, uint32_t>();
  if (is("u32", "u64") || is("s32", "s64")) return plain<uint32_t, uint64_t>();
  if (is("u16", "u32")) return plain<uint16_t, uint32_t>();
  if (is("u32", "u16")) return plain<uint32_t, uint16_t>();
  if (is("f32", "f16")) return unary<float, uint16_t, [](uint16_t a) { return Float16::widen(a); }>;
  if (is("f32", "bf16"))
    return unary<float, uint16_t, [](uint16_t a) { return Bfloat16::widen(a); }>;
  if (is("f64", "f32")) return plain<double, float>();
  if (by.rounding == Rounding::kNearest) {
    if (is("f32", "s32")) return plain<float, int32_t>();
    if (is("f32", "u32")) return plain<float, uint32_t>();
    if (is("f64", "s32")) return plain<double, int32_t>();
    if (is("f32", "f64")) return plain<float, double>();
    if (is("f16", "f32")) return unary<uint16_t, float, [](float a) { return Float16::narrow(a); }>;
    if (is("bf16", "f32"))
      return unary<uint16_t, float, [](float a) { return Bfloat16::narrow(a); }>;
  }
  return nullptr;
}

// d = {a above, b below}.
template <class Half>
void two_halves(Warp& warp, const Instr& in) {
  const float* a = lanes<float>(warp, in.a);
  const float* b = lanes<float>(warp, in.b);
  for_lanes<uint32_t>(warp, in.d, [&](int i) {
    return static_cast<uint32_t>(Half::narrow(a[i])) << 16 | Half::narrow(b[i]);
  });
}

template <class Half>
void two_halves_of_any_kind(Warp& warp, const Instr& in) {
  const Conversion& by = conversion(in);
  const float* a = lanes<float>(warp, in.a);
  const float* b = lanes<float>(warp, in.b);
  const auto half = [&](float x) -> uint16_t {
    if (by.relu && x < 0.0f) x = 0.0f;
    const uint16_t bits = by.rounding == Rounding::kZero ? narrow_down<Half>(x) : Half::narrow(x);
    return by.finite && (bits & 0x7fff) == Half::kInfinity ? (bits & 0x8000) | Half::kLargest
                                                           : bits;
  };
  for_lanes<uint32_t>(warp, in.d,
                      [&](int i) { return static_cast<uint32_t>(half(a[i])) << 16 | half(b[i]); });
}

template <class Format>
void two_bytes(Warp& warp, const Instr& in) {
  const float* a = lanes<float>(warp, in.a);
  const float* b = lanes<float>(warp, in.b);
  const bool relu = conversion(in).relu;
  const auto byte = [&](float x) { return narrow_saturated<Format>(relu && x < 0.0f ? 0.0f : x); };
  for_lanes<uint16_t>(warp, in.d,
                      [&](int i) { return static_cast<uint16_t>(byte(a[i]) << 8 | byte(b[i])); });
}

template <class Format>
void bytes_of_halves(Warp& warp, const Instr& in) {
  const uint32_t* a = lanes<uint32_t>(warp, in.a);
  const bool relu = conversion(in).relu;
  const auto byte = [&](uint32_t half) {
    const float x = Float16::widen(static_cast<uint16_t>(half));
    return narrow_saturated<Format>(relu && x < 0.0f ? 0.0f : x);
  };
  for_lanes<uint16_t>(
      warp, in.d, [&](int i) { return static_cast<uint16_t>(byte(a[i] >> 16) << 8 | byte(a[i])); });
}

template <class Format>
void halves_of_bytes(Warp& warp, const Instr& in) {
  const uint16_t* a = lanes<uint16_t>(warp, in.a);
  const auto half = [](int byte) {
    return Float16::narrow(widen8<Format>(static_cast<uint8_t>(byte)));
  };
  for_lanes<uint32_t>(warp, in.d, [&](int i) {
    return static_cast<uint32_t>(half(a[i] >> 8)) << 16 | half(a[i] & 0xff);
  });
}

Handler decode_pair(const Statement& statement, Instr& instr, Decoding& decoding,
                    const Conversion& by) {
  const bool from_bytes = by.from.kind == Kind::kFloat8, to_bytes = by.to.kind == Kind::kFloat8;
  const std::string& to = statement.parts[statement.parts.size() - 2];
  const std::string& from = statement.parts.back();
  if (from_bytes) {
    if (to != "f16x2") return nullptr;
    instr.d = decoding.target_row(statement.operands[0], 4);
    instr.a = decoding.row(statement.operands[1], 2);
    return from == "e4m3x2" ? halves_of_bytes<E4m3> : halves_of_bytes<E5m2>;
  }
  if (to_bytes) {
    instr.d = decoding.target_row(statement.operands[0], 2);
    instr.a = decoding.row(statement.operands[1], 4);
    if (from == "f16x2") return to == "e4m3x2" ? bytes_of_halves<E4m3> : bytes_of_halves<E5m2>;
    if (from != "f32") return nullptr;
    expect_operands(statement, 3, 3);
    instr.b = decoding.row(statement.operands[2], 4);
    return to == "e4m3x2" ? two_bytes<E4m3> : two_bytes<E5m2>;
  }
  if (from != "f32") return nullptr;
  expect_operands(statement, 3, 3);
  read_rows(statement, instr, decoding, 4);
  if (by.rounding == Rounding::kNearest && !by.relu && !by.finite)
    return to == "f16x2" ? two_halves<Float16> : two_halves<Bfloat16>;
  return to == "f16x2" ? two_halves_of_any_kind<Float16> : two_halves_of_any_kind<Bfloat16>;
}

Handler decode_cvt(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_modifiers(statement, {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat",
                               "relu", "satfinite"});
  expect_operands(statement, 2, 3);
  Conversion by;
  by.from = type_named(statement.parts.back());
  by.to = type_named(statement.parts.at(statement.parts.size() - 2));
  by.rounding = rounding_of(statement);
  by.flush = statement.has("ftz");
  by.saturate = statement.has("sat");
  by.relu = statement.has("relu");
  by.finite = statement.has("satfinite");
  const Operand &to = statement.operands[0], &from = statement.operands[1];
  by.to_bytes = to.kind == Operand::Kind::kRegister ? to.bytes : by.to.bytes;
  by.from_bytes = from.kind == Operand::Kind::kImmediate || from.kind == Operand::Kind::kSymbol
                      ? 8
                      : from.bytes;
  instr.detail = decoding.keep(by);
  if (by.to.parts == 2) return decode_pair(statement, instr, decoding, by);
  expect_operands(statement, 2, 2);
  if (by.from.kind == Kind::kNone || by.to.kind == Kind::kNone) return nullptr;
  instr.d = decoding.target_row(to, by.to_bytes);
  instr.a = decoding.any_row(from);
  const Handler handler = frequent(by);
  return handler ? handler : convert;
}

const Opcode cvt{"cvt", decode_cvt};

}  // namespace
}  // namespace emulator
