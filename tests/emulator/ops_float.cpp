// Arithmetic on float and double.
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <limits>

#include "lanes.h"
#include "types.h"

namespace emulator {
namespace {

// Modifiers that change operands and results.
constexpr uint32_t kFlush = 1, kSaturate = 2;

inline float flushed(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return bits & 0x7f800000u ? x : std::bit_cast<float>(bits & 0x80000000u);
}
inline double flushed(double x) { return x; }

template <class T>
inline T saturated(T x) {
  // NaN becomes 0.
  return x > T{0} ? (x < T{1} ? x : T{1}) : T{0};
}

template <class T, uint32_t modifiers>
inline T input(T x) {
  return modifiers & kFlush ? flushed(x) : x;
}
template <class T, uint32_t modifiers>
inline T output(T x) {
  if (modifiers & kFlush) x = flushed(x);
  return modifiers & kSaturate ? saturated(x) : x;
}

template <class T, auto operation, uint32_t modifiers>
void one(Warp& warp, const Instr& in) {
  unary<T, T, [](T a) { return output<T, modifiers>(operation(input<T, modifiers>(a))); }>(warp,
                                                                                           in);
}
template <class T, auto operation, uint32_t modifiers>
void two(Warp& warp, const Instr& in) {
  binary<T, T, T, [](T a, T b) {
    return output<T, modifiers>(operation(input<T, modifiers>(a), input<T, modifiers>(b)));
  }>(warp, in);
}
template <class T, auto operation, uint32_t modifiers>
void three(Warp& warp, const Instr& in) {
  ternary<T, T, T, T, [](T a, T b, T c) {
    return output<T, modifiers>(
        operation(input<T, modifiers>(a), input<T, modifiers>(b), input<T, modifiers>(c)));
  }>(warp, in);
}

constexpr auto sum = [](auto a, auto b) { return a + b; };
constexpr auto difference = [](auto a, auto b) { return a - b; };
constexpr auto product = [](auto a, auto b) { return a * b; };
constexpr auto quotient = [](auto a, auto b) { return a / b; };
constexpr auto fused = [](auto a, auto b, auto c) { return std::fma(a, b, c); };
constexpr auto root = [](auto a) { return std::sqrt(a); };
constexpr auto reciprocal = [](auto a) { return decltype(a){1} / a; };
constexpr auto reciprocal_root = [](auto a) {
  return static_cast<decltype(a)>(1.0 / std::sqrt(static_cast<double>(a)));
};
constexpr auto sine = [](float a) { return static_cast<float>(std::sin(static_cast<double>(a))); };
constexpr auto cosine = [](float a) {
  return static_cast<float>(std::cos(static_cast<double>(a)));
};
constexpr auto tangent_hyperbolic = [](float a) {
  return static_cast<float>(std::tanh(static_cast<double>(a)));
};
constexpr auto logarithm = [](float a) {
  return static_cast<float>(std::log2(static_cast<double>(a)));
};

// 2^x, correct but for rare ties: 2^n times a Taylor series of 2^f, |f| <= 1/2, in double.
constexpr auto exponential = [](float x) {
  const float bounded = x > 160.0f ? 160.0f : (x > -160.0f ? x : -160.0f);
  constexpr double kRound = 0x1.8p52;
  const double shifted = static_cast<double>(bounded) + kRound;
  const double f = (static_cast<double>(bounded) - (shifted - kRound)) * 0.6931471805599453;
  double series = 1.0 / 479001600.0;
  constexpr double kInverseFactorials[] = {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                           1.0 / 5040,     1.0 / 720,     1.0 / 120,    1.0 / 24,
                                           1.0 / 6,        0.5,           1.0,          1.0};
  for (double coefficient : kInverseFactorials) series = series * f + coefficient;
  const double power = std::bit_cast<double>((std::bit_cast<uint64_t>(shifted) + 1023) << 52);
  const auto result = static_cast<float>(series * power);
  return x != x ? x : result;
};

// The larger magnitude with the product of both signs, or NaN.
constexpr auto larger_magnitude = [](float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<float>::quiet_NaN();
  const float larger = std::max(std::abs(a), std::abs(b));
  return std::signbit(a) != std::signbit(b) ? -larger : larger;
};

// Of a number and NaN the number; with .NaN the NaN. -0 is less than +0.
template <bool keeps_nan, bool larger>
constexpr auto extreme = []<class T>(T a, T b) -> T {
  const bool a_first =
      larger ? (a > b || (a == b && !std::signbit(a))) : (a < b || (a == b && std::signbit(a)));
  T result = a_first ? a : b;
  if (keeps_nan) {
    if (a != a || b != b) result = std::numeric_limits<T>::quiet_NaN();
  } else {
    if (a != a) result = b;
    if (b != b) result = a;
    if (a != a && b != b) result = std::numeric_limits<T>::quiet_NaN();
  }
  return result;
};

// A handler for each combination of modifiers.
#define EMULATOR_MODIFIED(shape, T, operation)                          \
  (instr.flags == 0           ? Handler(shape<T, operation, 0>)         \
   : instr.flags == kFlush    ? Handler(shape<T, operation, kFlush>)    \
   : instr.flags == kSaturate ? Handler(shape<T, operation, kSaturate>) \
                              : Handler(shape<T, operation, kFlush | kSaturate>))
#define EMULATOR_FLOATING(shape, operation)               \
  (type.bytes == 8 ? Handler(shape<double, operation, 0>) \
                   : EMULATOR_MODIFIED(shape, float, operation))

// Other roundings than to nearest: the host's rounding is set around the loop, which runs in a
// function of its own so that it stays between.
template <class T>
__attribute__((noinline)) void directed_loop(Warp& warp, const Instr& in) {
  const T* a = lanes<T>(warp, in.a);
  const T* b = lanes<T>(warp, in.b);
  const T* c = lanes<T>(warp, in.c);
  switch (in.imm >> 8) {
    case '+':
      return for_lanes<T>(warp, in.d, [&](int i) { return a[i] + b[i]; });
    case '-':
      return for_lanes<T>(warp, in.d, [&](int i) { return a[i] - b[i]; });
    case '*':
      return for_lanes<T>(warp, in.d, [&](int i) { return a[i] * b[i]; });
    case '/':
      return for_lanes<T>(warp, in.d, [&](int i) { return a[i] / b[i]; });
    case 'f':
      return for_lanes<T>(warp, in.d, [&](int i) { return std::fma(a[i], b[i], c[i]); });
    case 's':
      return for_lanes<T>(warp, in.d, [&](int i) { return std::sqrt(a[i]); });
    default:
      return for_lanes<T>(warp, in.d, [&](int i) { return T{1} / a[i]; });
  }
}

template <class T>
void directed(Warp& warp, const Instr& in) {
  constexpr int kModes[] = {FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  std::fesetround(kModes[in.imm & 0xff]);
  directed_loop<T>(warp, in);
  std::fesetround(FE_TONEAREST);
  if (in.flags == 0) return;
  for_lanes<T>(warp, in.d, [&, d = lanes<T>(warp, in.d)](int i) {
    return in.flags & kSaturate ? saturated(in.flags & kFlush ? flushed(d[i]) : d[i])
                                : flushed(d[i]);
  });
}

// Whether the statement rounds otherwise than to nearest; then instr.imm is filled.
bool is_directed(const Statement& statement, Instr& instr) {
  int mode = -1;
  if (statement.has("rz")) mode = 0;
  if (statement.has("rm")) mode = 1;
  if (statement.has("rp")) mode = 2;
  if (mode < 0) return false;
  const std::string& name = statement.parts[0];
  const char operation = name == "add"                    ? '+'
                         : name == "sub"                  ? '-'
                         : name == "mul"                  ? '*'
                         : name == "div"                  ? '/'
                         : name == "fma" || name == "mad" ? 'f'
                         : name == "sqrt"                 ? 's'
                                                          : 'r';
  instr.imm = operation << 8 | mode;
  return true;
}

// rcp.approx.ftz.f64 gives the upper half of the bits.
constexpr auto reciprocal_upper = [](double a) {
  const double result = 1.0 / (std::fpclassify(a) == FP_SUBNORMAL ? std::copysign(0.0, a) : a);
  return std::bit_cast<double>(std::bit_cast<uint64_t>(std::fpclassify(result) == FP_SUBNORMAL
                                                           ? std::copysign(0.0, result)
                                                           : result) &
                               ~uint64_t{0xffffffffu});
};

}  // namespace

Handler decode_floating(const Statement& statement, Instr& instr, Decoding& decoding) {
  const std::string& name = statement.parts[0];
  const Type type = type_of(statement);
  expect_modifiers(
      statement, {"rn", "rz", "rm", "rp", "ftz", "sat", "approx", "full", "NaN", "xorsign", "abs"});
  const size_t operands = name == "fma" || name == "mad" ? 4
                          : name == "add" || name == "sub" || name == "mul" || name == "div" ||
                                  name == "min" || name == "max" || name == "copysign"
                              ? 3
                              : 2;
  expect_operands(statement, operands, operands);
  read_rows(statement, instr, decoding, type.bytes);
  if (statement.has("ftz") && type.bytes == 4) instr.flags |= kFlush;
  if (statement.has("sat")) instr.flags |= kSaturate;
  if (is_directed(statement, instr))
    return type.bytes == 8 ? Handler(directed<double>) : Handler(directed<float>);
  if (type.bytes == 8 && statement.has("approx"))
    return name == "rcp" ? Handler(unary<double, double, reciprocal_upper>) : nullptr;
  if (name == "add") return EMULATOR_FLOATING(two, sum);
  if (name == "sub") return EMULATOR_FLOATING(two, difference);
  if (name == "mul") return EMULATOR_FLOATING(two, product);
  if (name == "div") return EMULATOR_FLOATING(two, quotient);
  if (name == "fma" || name == "mad") return EMULATOR_FLOATING(three, fused);
  if (name == "sqrt") return EMULATOR_FLOATING(one, root);
  if (name == "rcp") return EMULATOR_FLOATING(one, reciprocal);
  if (name == "rsqrt") return EMULATOR_FLOATING(one, reciprocal_root);
  if (name == "min")
    return statement.has("NaN") ? EMULATOR_FLOATING(two, (extreme<true, false>))
                                : EMULATOR_FLOATING(two, (extreme<false, false>));
  if (name == "max" && statement.has("xorsign"))
    return statement.has("NaN") && statement.has("abs") && type.bytes == 4
               ? EMULATOR_MODIFIED(two, float, larger_magnitude)
               : nullptr;
  if (name == "max")
    return statement.has("NaN") ? EMULATOR_FLOATING(two, (extreme<true, true>))
                                : EMULATOR_FLOATING(two, (extreme<false, true>));
  constexpr auto negate = [](auto a) { return -a; };
  constexpr auto magnitude = [](auto a) { return std::abs(a); };
  constexpr auto with_sign = [](auto sign, auto a) { return std::copysign(a, sign); };
  if (name == "neg") return EMULATOR_FLOATING(one, negate);
  if (name == "abs") return EMULATOR_FLOATING(one, magnitude);
  if (name == "copysign") return EMULATOR_FLOATING(two, with_sign);
  if (type.bytes != 4) return nullptr;
  if (name == "ex2") return EMULATOR_MODIFIED(one, float, exponential);
  if (name == "lg2") return EMULATOR_MODIFIED(one, float, logarithm);
  if (name == "sin") return EMULATOR_MODIFIED(one, float, sine);
  if (name == "cos") return EMULATOR_MODIFIED(one, float, cosine);
  if (name == "tanh") return EMULATOR_MODIFIED(one, float, tangent_hyperbolic);
  return nullptr;
}

}  // namespace emulator
