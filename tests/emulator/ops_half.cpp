// Arithmetic on float16 and bfloat16, one or two in a register.
#include <algorithm>
#include <cstdint>

#include "lanes.h"
#include "narrow.h"
#include "types.h"

namespace emulator {
namespace {

constexpr uint32_t kFlush = 1, kSaturate = 2, kRelu = 4, kNan = 8;

// Applies what the modifiers ask for to a result.
template <class Half>
uint16_t finished(uint16_t x, uint32_t flags) {
  if (flags == 0) return x;
  const float value = Half::widen(x);
  if (flags & kFlush && (x & Half::kInfinity) == 0) x &= 0x8000;
  if (flags & kSaturate) x = Half::narrow(value > 0.0f ? std::min(value, 1.0f) : 0.0f);
  if (flags & kRelu && value < 0.0f) x = 0;
  return x;
}

template <class Half>
float operand(uint16_t x, uint32_t flags) {
  if (flags & kFlush && (x & Half::kInfinity) == 0) x &= 0x8000;
  return Half::widen(x);
}

// Calls apply(j) for the lanes' numbers, of which each lane has `parts`.
template <int parts, class Apply>
void for_halves(const Warp& warp, Row d, Apply apply) {
  alignas(64) uint16_t values[kLanes * parts];
  for (int j = 0; j < kLanes * parts; ++j) values[j] = apply(j);
  if constexpr (parts == 1) {
    write(warp, lanes<uint16_t>(warp, d), values);
  } else {
    alignas(64) uint32_t words[kLanes];
    std::memcpy(words, values, sizeof words);
    write(warp, lanes<uint32_t>(warp, d), words);
  }
}

template <class Half, int parts, auto operation>
void two(Warp& warp, const Instr& in) {
  const uint16_t* a = lanes<uint16_t>(warp, in.a);
  const uint16_t* b = lanes<uint16_t>(warp, in.b);
  const uint32_t flags = in.flags;
  for_halves<parts>(warp, in.d, [&](int j) {
    return finished<Half>(
        Half::narrow(operation(operand<Half>(a[j], flags), operand<Half>(b[j], flags))), flags);
  });
}

template <class Half, int parts, auto operation>
void one(Warp& warp, const Instr& in) {
  const uint16_t* a = lanes<uint16_t>(warp, in.a);
  for_halves<parts>(warp, in.d, [&](int j) {
    return finished<Half>(Half::narrow(operation(operand<Half>(a[j], in.flags))), in.flags);
  });
}

template <class Half, int parts>
void fused(Warp& warp, const Instr& in) {
  const uint16_t* a = lanes<uint16_t>(warp, in.a);
  const uint16_t* b = lanes<uint16_t>(warp, in.b);
  const uint16_t* c = lanes<uint16_t>(warp, in.c);
  for_halves<parts>(warp, in.d, [&](int j) {
    const double sum = to_odd_fma(operand<Half>(a[j], in.flags), operand<Half>(b[j], in.flags),
                                  operand<Half>(c[j], in.flags));
    return finished<Half>(narrow<Half>(sum), in.flags);
  });
}

// Signs alone, so that NaN keeps its bits.
template <int parts, bool absolute>
void sign(Warp& warp, const Instr& in) {
  const uint16_t* a = lanes<uint16_t>(warp, in.a);
  for_halves<parts>(warp, in.d, [&](int j) {
    return static_cast<uint16_t>(absolute ? a[j] & 0x7fff : a[j] ^ 0x8000);
  });
}

template <class Half, int parts, bool larger>
void extreme(Warp& warp, const Instr& in) {
  const uint16_t* a = lanes<uint16_t>(warp, in.a);
  const uint16_t* b = lanes<uint16_t>(warp, in.b);
  for_halves<parts>(warp, in.d, [&](int j) -> uint16_t {
    const float x = operand<Half>(a[j], in.flags), y = operand<Half>(b[j], in.flags);
    if (x != x || y != y)
      return (x != x && y != y) || in.flags & kNan ? Half::kNan : (x != x ? b[j] : a[j]);
    const bool x_first = x == y ? (a[j] >> 15 != 0) != larger : (x > y) == larger;
    return finished<Half>(x_first ? a[j] : b[j], in.flags & ~kSaturate);
  });
}

constexpr auto sum = [](float a, float b) { return a + b; };
constexpr auto difference = [](float a, float b) { return a - b; };
constexpr auto product = [](float a, float b) { return a * b; };
constexpr auto exponential = [](float a) {
  return to_odd_float(std::exp2(static_cast<double>(a)));
};
constexpr auto tangent_hyperbolic = [](float a) {
  return to_odd_float(std::tanh(static_cast<double>(a)));
};

template <class Half, int parts>
Handler handler(const Statement& statement) {
  const std::string& name = statement.parts[0];
  if (name == "add") return two<Half, parts, sum>;
  if (name == "sub") return two<Half, parts, difference>;
  if (name == "mul") return two<Half, parts, product>;
  if (name == "fma") return fused<Half, parts>;
  if (name == "neg") return sign<parts, false>;
  if (name == "abs") return sign<parts, true>;
  if (name == "min") return extreme<Half, parts, false>;
  if (name == "max") return extreme<Half, parts, true>;
  if (name == "ex2") return one<Half, parts, exponential>;
  if (name == "tanh") return one<Half, parts, tangent_hyperbolic>;
  return nullptr;
}

}  // namespace

Handler decode_half(const Statement& statement, Instr& instr, Decoding& decoding) {
  const Type type = type_of(statement);
  expect_modifiers(statement, {"rn", "ftz", "sat", "relu", "NaN", "approx"});
  read_rows(statement, instr, decoding, type.bytes);
  if (statement.has("ftz")) instr.flags |= kFlush;
  if (statement.has("sat")) instr.flags |= kSaturate;
  if (statement.has("relu")) instr.flags |= kRelu;
  if (statement.has("NaN")) instr.flags |= kNan;
  if (type.kind == Kind::kFloat)
    return type.parts == 2 ? handler<Float16, 2>(statement) : handler<Float16, 1>(statement);
  return type.parts == 2 ? handler<Bfloat16, 2>(statement) : handler<Bfloat16, 1>(statement);
}

}  // namespace emulator
