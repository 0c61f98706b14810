// Arithmetic on integers.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "lanes.h"
#include "types.h"

namespace emulator {
namespace {

// C++ promotes narrow integers to int; sums and products wrap in unsigned arithmetic.
template <class T>
using Unsigned = std::make_unsigned_t<T>;

template <class T>
struct Twice;
template <>
struct Twice<uint16_t> {
  using type = uint32_t;
};
template <>
struct Twice<int16_t> {
  using type = int32_t;
};
template <>
struct Twice<uint32_t> {
  using type = uint64_t;
};
template <>
struct Twice<int32_t> {
  using type = int64_t;
};
template <>
struct Twice<uint64_t> {
  using type = unsigned __int128;
};
template <>
struct Twice<int64_t> {
  using type = __int128;
};

template <class T>
constexpr auto add = [](T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
};
template <class T>
constexpr auto subtract = [](T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
};
template <class T>
constexpr auto product_low =
    [](T a, T b) { return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)); };
template <class T>
constexpr auto product_wide = [](T a, T b) {
  using W = typename Twice<T>::type;
  return static_cast<W>(static_cast<W>(a) * static_cast<W>(b));
};
template <class T>
constexpr auto product_high =
    [](T a, T b) { return static_cast<T>(product_wide<T>(a, b) >> 8 * sizeof(T)); };
template <class T>
constexpr auto least = [](T a, T b) { return a < b ? a : b; };
template <class T>
constexpr auto most = [](T a, T b) { return a > b ? a : b; };
// Division by zero gives all ones, as the hardware does.
template <class T>
constexpr auto quotient = [](T a, T b) -> T {
  if (b == 0) return static_cast<T>(-1);
  if (std::is_signed_v<T> && b == static_cast<T>(-1))
    return static_cast<T>(0 - static_cast<Unsigned<T>>(a));
  return static_cast<T>(a / b);
};
template <class T>
constexpr auto remainder = [](T a, T b) -> T {
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
  return static_cast<T>(a % b);
};
// With .relu a negative result becomes 0.
template <class T>
constexpr auto least_relu = [](T a, T b) { return most<T>(least<T>(a, b), 0); };
template <class T>
constexpr auto most_relu = [](T a, T b) { return most<T>(most<T>(a, b), 0); };
constexpr auto add_saturated = [](int32_t a, int32_t b) {
  const int64_t sum = int64_t{a} + b;
  return static_cast<int32_t>(std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX));
};
constexpr auto subtract_saturated = [](int32_t a, int32_t b) {
  const int64_t difference = int64_t{a} - b;
  return static_cast<int32_t>(std::clamp<int64_t>(difference, INT32_MIN, INT32_MAX));
};

// A handler for each type of integer, by a macro as templates cannot be given template lambdas.
#define EMULATOR_BY_TYPE(type, operation)                                             \
  [](Type t) -> Handler {                                                             \
    const bool is_signed = (t).is_signed();                                           \
    switch ((t).bytes) {                                                              \
      case 2:                                                                         \
        return is_signed ? binary<int16_t, int16_t, int16_t, operation<int16_t>>      \
                         : binary<uint16_t, uint16_t, uint16_t, operation<uint16_t>>; \
      case 4:                                                                         \
        return is_signed ? binary<int32_t, int32_t, int32_t, operation<int32_t>>      \
                         : binary<uint32_t, uint32_t, uint32_t, operation<uint32_t>>; \
      case 8:                                                                         \
        return is_signed ? binary<int64_t, int64_t, int64_t, operation<int64_t>>      \
                         : binary<uint64_t, uint64_t, uint64_t, operation<uint64_t>>; \
      default:                                                                        \
        return nullptr;                                                               \
    }                                                                                 \
  }(type)

// Two numbers of 16 bits in a register.
template <class T, auto operation>
void pairs(Warp& warp, const Instr& in) {
  const uint32_t* a = lanes<uint32_t>(warp, in.a);
  const uint32_t* b = lanes<uint32_t>(warp, in.b);
  for_lanes<uint32_t>(warp, in.d, [&](int i) {
    const auto low = static_cast<uint16_t>(operation(static_cast<T>(a[i]), static_cast<T>(b[i])));
    const auto high =
        static_cast<uint16_t>(operation(static_cast<T>(a[i] >> 16), static_cast<T>(b[i] >> 16)));
    return low | static_cast<uint32_t>(high) << 16;
  });
}

Handler decode_binary(const Statement& statement, Instr& instr, Decoding& decoding) {
  const std::string& name = statement.parts[0];
  const Type type = type_of(statement);
  expect_modifiers(statement, {"sat", "relu"});
  expect_operands(statement, 3, 3);
  read_rows(statement, instr, decoding, type.bytes);
  if (statement.has("relu")) {
    const bool smaller = name == "min";
    if (type == type_named("s16x2")) {
      return smaller ? pairs<int16_t, least_relu<int16_t>> : pairs<int16_t, most_relu<int16_t>>;
    }
    if (type != type_named("s32")) return nullptr;
    return smaller ? binary<int32_t, int32_t, int32_t, least_relu<int32_t>>
                   : binary<int32_t, int32_t, int32_t, most_relu<int32_t>>;
  }
  if (type.parts == 2) {
    const bool s = type.is_signed();
    if (name == "add") return pairs<uint16_t, add<uint16_t>>;
    if (name == "sub") return pairs<uint16_t, subtract<uint16_t>>;
    if (name == "min") return s ? pairs<int16_t, least<int16_t>> : pairs<uint16_t, least<uint16_t>>;
    if (name == "max") return s ? pairs<int16_t, most<int16_t>> : pairs<uint16_t, most<uint16_t>>;
    return nullptr;
  }
  if (statement.has("sat")) {
    if (type != type_named("s32")) return nullptr;
    if (name == "add") return binary<int32_t, int32_t, int32_t, add_saturated>;
    if (name == "sub") return binary<int32_t, int32_t, int32_t, subtract_saturated>;
    return nullptr;
  }
  if (name == "add") return EMULATOR_BY_TYPE(type, add);
  if (name == "sub") return EMULATOR_BY_TYPE(type, subtract);
  if (name == "min") return EMULATOR_BY_TYPE(type, least);
  if (name == "max") return EMULATOR_BY_TYPE(type, most);
  if (name == "div") return EMULATOR_BY_TYPE(type, quotient);
  if (name == "rem") return EMULATOR_BY_TYPE(type, remainder);
  return nullptr;
}

template <class T>
Handler wide_product() {
  return binary<typename Twice<T>::type, T, T, product_wide<T>>;
}

Handler decode_multiply(const Statement& statement, Instr& instr, Decoding& decoding) {
  const Type type = type_of(statement);
  expect_modifiers(statement, {"lo", "hi", "wide"});
  expect_operands(statement, 3, 3);
  const bool wide = statement.has("wide"), s = type.is_signed();
  instr.d = decoding.target_row(statement.operands[0], wide ? 2 * type.bytes : type.bytes);
  instr.a = decoding.row(statement.operands[1], type.bytes);
  instr.b = decoding.row(statement.operands[2], type.bytes);
  if (wide) {
    if (type.bytes == 2) return s ? wide_product<int16_t>() : wide_product<uint16_t>();
    if (type.bytes == 4) return s ? wide_product<int32_t>() : wide_product<uint32_t>();
    return nullptr;
  }
  if (statement.has("hi")) return EMULATOR_BY_TYPE(type, product_high);
  return EMULATOR_BY_TYPE(type, product_low);
}

template <class T>
constexpr auto multiply_add = [](T a, T b, T c) {
  return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b) +
                        static_cast<uint64_t>(c));
};
template <class T>
constexpr auto multiply_high_add = [](T a, T b, T c) { return add<T>(product_high<T>(a, b), c); };
template <class T>
constexpr auto multiply_wide_add = [](T a, T b, typename Twice<T>::type c) {
  using W = typename Twice<T>::type;
  return add<W>(product_wide<T>(a, b), c);
};

template <class T>
Handler multiply_add_of(bool wide, bool high) {
  using W = typename Twice<T>::type;
  if constexpr (sizeof(T) < 8) {
    if (wide) return ternary<W, T, T, W, multiply_wide_add<T>>;
  }
  return high ? ternary<T, T, T, T, multiply_high_add<T>> : ternary<T, T, T, T, multiply_add<T>>;
}

Handler decode_multiply_add(const Statement& statement, Instr& instr, Decoding& decoding) {
  const Type type = type_of(statement);
  expect_modifiers(statement, {"lo", "hi", "wide"});
  expect_operands(statement, 4, 4);
  const bool wide = statement.has("wide"), high = statement.has("hi"), s = type.is_signed();
  const int result = wide ? 2 * type.bytes : type.bytes;
  instr.d = decoding.target_row(statement.operands[0], result);
  instr.a = decoding.row(statement.operands[1], type.bytes);
  instr.b = decoding.row(statement.operands[2], type.bytes);
  instr.c = decoding.row(statement.operands[3], result);
  if (type.bytes == 2)
    return s ? multiply_add_of<int16_t>(wide, high) : multiply_add_of<uint16_t>(wide, high);
  if (type.bytes == 4)
    return s ? multiply_add_of<int32_t>(wide, high) : multiply_add_of<uint32_t>(wide, high);
  return s ? multiply_add_of<int64_t>(wide, high) : multiply_add_of<uint64_t>(wide, high);
}

template <class T>
constexpr auto negate = [](T a) { return static_cast<T>(0 - static_cast<uint64_t>(a)); };
template <class T>
constexpr auto magnitude = [](T a) { return a < 0 ? negate<T>(a) : a; };

Handler decode_negate(const Statement& statement, Instr& instr, Decoding& decoding) {
  const Type type = type_of(statement);
  expect_modifiers(statement, {});
  expect_operands(statement, 2, 2);
  read_rows(statement, instr, decoding, type.bytes);
  const bool absolute = statement.parts[0] == "abs";
  if (type.parts != 1) return nullptr;
  if (type.bytes == 2)
    return absolute ? unary<int16_t, int16_t, magnitude<int16_t>>
                    : unary<int16_t, int16_t, negate<int16_t>>;
  if (type.bytes == 4)
    return absolute ? unary<int32_t, int32_t, magnitude<int32_t>>
                    : unary<int32_t, int32_t, negate<int32_t>>;
  return absolute ? unary<int64_t, int64_t, magnitude<int64_t>>
                  : unary<int64_t, int64_t, negate<int64_t>>;
}

template <class T>
constexpr auto difference_add =
    [](T a, T b, T c) { return static_cast<T>((a < b ? b - a : a - b) + c); };

Handler decode_difference(const Statement& statement, Instr& instr, Decoding& decoding) {
  const Type type = type_of(statement);
  expect_operands(statement, 4, 4);
  read_rows(statement, instr, decoding, type.bytes);
  if (type == type_named("u32"))
    return ternary<uint32_t, uint32_t, uint32_t, uint32_t, difference_add<uint32_t>>;
  if (type == type_named("s32"))
    return ternary<int32_t, int32_t, int32_t, int32_t, difference_add<int32_t>>;
  return nullptr;
}

// Dot products of four bytes.
template <class A, class B>
constexpr auto dot4 = [](uint32_t a, uint32_t b, uint32_t c) {
  for (int k = 0; k < 4; ++k)
    c += static_cast<uint32_t>(static_cast<A>(a >> 8 * k) * static_cast<B>(b >> 8 * k));
  return c;
};

Handler decode_dot4(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_operands(statement, 4, 4);
  read_rows(statement, instr, decoding, 4);
  const bool a = statement.parts.at(1) == "s32", b = statement.parts.at(2) == "s32";
  using U = uint32_t;
  if (a)
    return b ? ternary<U, U, U, U, dot4<int8_t, int8_t>>
             : ternary<U, U, U, U, dot4<int8_t, uint8_t>>;
  return b ? ternary<U, U, U, U, dot4<uint8_t, int8_t>>
           : ternary<U, U, U, U, dot4<uint8_t, uint8_t>>;
}

// Sums with the carry of the lanes' previous sum: flags bit 0 reads it, bit 1 writes it. Products
// are those of mad. A subtraction adds the complement, and its carry says that nothing is borrowed.
constexpr uint32_t kReadsCarry = 1, kWritesCarry = 2, kSubtracts = 4, kLow = 8, kHigh = 16;

template <class T>
void carry_chain(Warp& warp, const Instr& in) {
  const T* a = lanes<T>(warp, in.a);
  const T* b = lanes<T>(warp, in.b);
  const T* c = lanes<T>(warp, in.c);
  const bool reads = in.flags & kReadsCarry, subtracts = in.flags & kSubtracts;
  uint32_t carries = 0;
  for_lanes<T>(warp, in.d, [&](int i) {
    T x = a[i], y = b[i];
    if (in.flags & (kLow | kHigh)) {
      x = in.flags & kLow ? product_low<T>(a[i], b[i]) : product_high<T>(a[i], b[i]);
      y = c[i];
    }
    T carry = reads ? warp.carry >> i & 1 : 0;
    if (subtracts) {
      y = ~y;
      carry = reads ? 1 - carry : 1;
    }
    const auto sum = static_cast<typename Twice<T>::type>(x) + y + carry;
    const bool out = sum >> 8 * sizeof(T);
    carries |= static_cast<uint32_t>(out != subtracts) << i;
    return static_cast<T>(sum);
  });
  if (in.flags & kWritesCarry) warp.carry = (warp.carry & ~warp.active) | (carries & warp.active);
}

Handler decode_carry(const Statement& statement, Instr& instr, Decoding& decoding) {
  const std::string& name = statement.parts[0];
  const Type type = type_of(statement);
  expect_modifiers(statement, {"cc", "lo", "hi"});
  read_rows(statement, instr, decoding, type.bytes);
  if (name.back() == 'c') instr.flags |= kReadsCarry;
  if (statement.has("cc")) instr.flags |= kWritesCarry;
  if (name.starts_with("sub")) instr.flags |= kSubtracts;
  if (name.starts_with("mad")) {
    instr.flags |= statement.has("hi") ? kHigh : kLow;
  } else {
    instr.c = instr.b;
  }
  if (statement.has("hi") && type.is_signed()) return nullptr;
  return type.bytes == 4 ? carry_chain<uint32_t> : carry_chain<uint64_t>;
}

}  // namespace

// The names that integers share with floating-point numbers are decoded in ops_arithmetic.cpp.
Handler decode_integer(const Statement& statement, Instr& instr, Decoding& decoding) {
  const std::string& name = statement.parts[0];
  if (statement.has("cc")) return decode_carry(statement, instr, decoding);
  if (name == "mul") return decode_multiply(statement, instr, decoding);
  if (name == "mad") return decode_multiply_add(statement, instr, decoding);
  if (name == "neg" || name == "abs") return decode_negate(statement, instr, decoding);
  return decode_binary(statement, instr, decoding);
}

static const Opcode sad{"sad", decode_difference};
static const Opcode dp4a{"dp4a", decode_dot4};
static const Opcode addc{"addc", decode_carry};
static const Opcode subc{"subc", decode_carry};
static const Opcode madc{"madc", decode_carry};
static const Opcode rem{"rem", decode_binary};

}  // namespace emulator
