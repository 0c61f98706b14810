// Logic, shifts and bit fields.
#include <bit>
#include <cstdint>

#include "lanes.h"
#include "types.h"

namespace emulator {
namespace {

constexpr auto bit_and = [](auto a, auto b) { return a & b; };
constexpr auto bit_or = [](auto a, auto b) { return a | b; };
constexpr auto bit_xor = [](auto a, auto b) { return a ^ b; };
constexpr auto bit_not = [](auto a) { return ~a; };
constexpr auto logical_not = [](auto a) { return a == 0; };

template <auto operation>
void predicates(Warp& warp, const Instr& in) {
  warp.set_predicate(in.p, operation(warp.predicate(in.q), warp.predicate(in.r)));
}

template <auto operation>
Handler logic(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_operands(statement, 3, 3);
  const Type type = type_of(statement);
  if (type.kind == Kind::kPredicate) {
    instr.p = decoding.target_predicate(statement.operands[0]);
    instr.q = decoding.predicate(statement.operands[1]);
    instr.r = decoding.predicate(statement.operands[2]);
    return predicates<operation>;
  }
  read_rows(statement, instr, decoding, type.bytes);
  if (type.bytes == 2) return binary<uint16_t, uint16_t, uint16_t, operation>;
  if (type.bytes == 4) return binary<uint32_t, uint32_t, uint32_t, operation>;
  return binary<uint64_t, uint64_t, uint64_t, operation>;
}

template <auto operation>
Handler one_operand(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_operands(statement, 2, 2);
  const Type type = type_of(statement);
  if (type.kind == Kind::kPredicate) {
    instr.p = decoding.target_predicate(statement.operands[0]);
    instr.q = instr.r = decoding.predicate(statement.operands[1]);
    return predicates<[](uint32_t a, uint32_t) { return ~a; }>;
  }
  read_rows(statement, instr, decoding, type.bytes);
  if (type.bytes == 2) return unary<uint16_t, uint16_t, operation>;
  if (type.bytes == 4) return unary<uint32_t, uint32_t, operation>;
  return unary<uint64_t, uint64_t, operation>;
}

// Shift counts beyond the width shift everything out.
template <class T>
constexpr auto shift_left = [](T a, uint32_t n) -> T {
  return n >= 8 * sizeof(T)
             ? T{0}
             : static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) << (n & (8 * sizeof(T) - 1)));
};
template <class T>
constexpr auto shift_right = [](T a, uint32_t n) -> T {
  const uint32_t most = 8 * sizeof(T) - 1;
  if (std::is_signed_v<T>) return static_cast<T>(a >> (n > most ? most : n));
  return n > most ? T{0} : static_cast<T>(a >> (n & most));
};

template <class T>
Handler shift_of(bool left) {
  return left ? binary<T, T, uint32_t, shift_left<T>> : binary<T, T, uint32_t, shift_right<T>>;
}

Handler decode_shift(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_operands(statement, 3, 3);
  const Type type = type_of(statement);
  const bool left = statement.parts[0] == "shl";
  instr.d = decoding.target_row(statement.operands[0], type.bytes);
  instr.a = decoding.row(statement.operands[1], type.bytes);
  instr.b = decoding.row(statement.operands[2], 4);
  if (type.is_signed()) {
    return type.bytes == 2   ? shift_of<int16_t>(left)
           : type.bytes == 4 ? shift_of<int32_t>(left)
                             : shift_of<int64_t>(left);
  }
  return type.bytes == 2   ? shift_of<uint16_t>(left)
         : type.bytes == 4 ? shift_of<uint32_t>(left)
                           : shift_of<uint64_t>(left);
}

// shf: 64 bits, b above a, shifted by n; .l gives the upper half, .r the lower.
template <bool left, bool clamp>
constexpr auto funnel = [](uint32_t a, uint32_t b, uint32_t n) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  n = clamp ? (n > 32 ? 32 : n) : n & 31;
  return left ? static_cast<uint32_t>(both << n >> 32) : static_cast<uint32_t>(both >> n);
};

Handler decode_funnel(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_modifiers(statement, {"l", "r", "wrap", "clamp"});
  expect_operands(statement, 4, 4);
  read_rows(statement, instr, decoding, 4);
  using U = uint32_t;
  if (statement.has("l"))
    return statement.has("clamp") ? ternary<U, U, U, U, funnel<true, true>>
                                  : ternary<U, U, U, U, funnel<true, false>>;
  return statement.has("clamp") ? ternary<U, U, U, U, funnel<false, true>>
                                : ternary<U, U, U, U, funnel<false, false>>;
}

template <class T>
constexpr auto extract = [](T a, uint32_t position, uint32_t length) -> T {
  constexpr uint32_t most = 8 * sizeof(T) - 1;
  position &= 0xff;
  length &= 0xff;
  if (length == 0) return 0;
  // Bits above the number are its sign's.
  const uint32_t last = position + length - 1 > most ? most : position + length - 1;
  const bool sign = std::is_signed_v<T> && (static_cast<std::make_unsigned_t<T>>(a) >> last & 1);
  const auto shifted = position > most ? 0 : static_cast<std::make_unsigned_t<T>>(a) >> position;
  if (length > most)
    return static_cast<T>(sign && position ? shifted | ~(static_cast<std::make_unsigned_t<T>>(-1) >>
                                                         (position > most ? most : position))
                                           : shifted);
  const auto mask = (std::make_unsigned_t<T>{1} << length) - 1;
  const auto kept =
      position > most
          ? 0
          : (last - position >= most ? static_cast<std::make_unsigned_t<T>>(-1)
                                     : (std::make_unsigned_t<T>{1} << (last - position + 1)) - 1);
  return static_cast<T>((shifted & kept & mask) | (sign ? ~(kept & mask) : 0));
};

Handler decode_extract(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_operands(statement, 4, 4);
  const Type type = type_of(statement);
  instr.d = decoding.target_row(statement.operands[0], type.bytes);
  instr.a = decoding.row(statement.operands[1], type.bytes);
  instr.b = decoding.row(statement.operands[2], 4);
  instr.c = decoding.row(statement.operands[3], 4);
  using U = uint32_t;
  if (type.bytes == 4)
    return type.is_signed() ? ternary<int32_t, int32_t, U, U, extract<int32_t>>
                            : ternary<U, U, U, U, extract<U>>;
  return type.is_signed() ? ternary<int64_t, int64_t, U, U, extract<int64_t>>
                          : ternary<uint64_t, uint64_t, U, U, extract<uint64_t>>;
}

template <class T>
void insert(Warp& warp, const Instr& in) {
  constexpr uint32_t width = 8 * sizeof(T);
  const T* a = lanes<T>(warp, in.a);
  const T* b = lanes<T>(warp, in.b);
  const uint32_t* positions = lanes<uint32_t>(warp, in.c);
  const uint32_t* lengths = lanes<uint32_t>(warp, in.e);
  for_lanes<T>(warp, in.d, [&](int i) {
    const uint32_t position = positions[i] & 0xff, length = lengths[i] & 0xff;
    const T field =
        length >= width ? static_cast<T>(-1) : static_cast<T>((T{1} << (length & (width - 1))) - 1);
    const T mask = position >= width ? T{0} : static_cast<T>(field << (position & (width - 1)));
    return static_cast<T>((b[i] & ~mask) | ((a[i] << (position & (width - 1))) & mask));
  });
}

Handler decode_insert(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_operands(statement, 5, 5);
  const Type type = type_of(statement);
  instr.d = decoding.target_row(statement.operands[0], type.bytes);
  instr.a = decoding.row(statement.operands[1], type.bytes);
  instr.b = decoding.row(statement.operands[2], type.bytes);
  instr.c = decoding.row(statement.operands[3], 4);
  instr.e = decoding.row(statement.operands[4], 4);
  return type.bytes == 4 ? insert<uint32_t> : insert<uint64_t>;
}

// prmt: bytes of b:a chosen by four digits; digit 8 and above repeats the byte's sign.
constexpr auto permute = [](uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int k = 0; k < 4; ++k) {
    const uint32_t digit = selector >> 4 * k & 0xf;
    uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (digit & 7)) & 0xff;
    if (digit & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << 8 * k;
  }
  return result;
};

Handler decode_permute(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_modifiers(statement, {});
  expect_operands(statement, 4, 4);
  read_rows(statement, instr, decoding, 4);
  return ternary<uint32_t, uint32_t, uint32_t, uint32_t, permute>;
}

void lookup(Warp& warp, const Instr& in) {
  const uint32_t* a = lanes<uint32_t>(warp, in.a);
  const uint32_t* b = lanes<uint32_t>(warp, in.b);
  const uint32_t* c = lanes<uint32_t>(warp, in.c);
  uint32_t minterms[8];
  for (int k = 0; k < 8; ++k) minterms[k] = in.imm >> k & 1 ? ~0u : 0u;
  for_lanes<uint32_t>(warp, in.d, [&](int i) {
    uint32_t result = 0;
    for (int k = 0; k < 8; ++k) {
      result |=
          minterms[k] & (k & 4 ? a[i] : ~a[i]) & (k & 2 ? b[i] : ~b[i]) & (k & 1 ? c[i] : ~c[i]);
    }
    return result;
  });
}

Handler decode_lookup(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_modifiers(statement, {});
  expect_operands(statement, 5, 5);
  read_rows(statement, instr, decoding, 4);
  instr.imm = decoding.integer(statement.operands[4]);
  return lookup;
}

constexpr auto population = [](auto a) { return static_cast<uint32_t>(std::popcount(a)); };
constexpr auto leading_zeros = [](auto a) { return static_cast<uint32_t>(std::countl_zero(a)); };
template <class T>
constexpr auto reverse = [](T a) {
  T result = 0;
  for (size_t k = 0; k < 8 * sizeof(T); ++k)
    result |= static_cast<T>(a >> k & 1) << (8 * sizeof(T) - 1 - k);
  return result;
};
// The highest bit that differs from the sign; as a shift: how far it is from the top.
template <class T, bool as_shift>
constexpr auto highest = [](T a) -> uint32_t {
  const auto bits = static_cast<std::make_unsigned_t<T>>(a < 0 ? ~a : a);
  if (bits == 0) return ~0u;
  const auto zeros = static_cast<uint32_t>(std::countl_zero(bits));
  return as_shift ? zeros : static_cast<uint32_t>(8 * sizeof(T) - 1) - zeros;
};

Handler decode_count(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_modifiers(statement, {"shiftamt"});
  expect_operands(statement, 2, 2);
  const std::string& name = statement.parts[0];
  const Type type = type_of(statement);
  const bool wide = type.bytes == 8;
  instr.d = decoding.target_row(statement.operands[0], name == "brev" ? type.bytes : 4);
  instr.a = decoding.row(statement.operands[1], type.bytes);
  if (name == "popc")
    return wide ? unary<uint32_t, uint64_t, population> : unary<uint32_t, uint32_t, population>;
  if (name == "clz")
    return wide ? unary<uint32_t, uint64_t, leading_zeros>
                : unary<uint32_t, uint32_t, leading_zeros>;
  if (name == "brev")
    return wide ? unary<uint64_t, uint64_t, reverse<uint64_t>>
                : unary<uint32_t, uint32_t, reverse<uint32_t>>;
  if (statement.has("shiftamt")) {
    if (type.is_signed())
      return wide ? unary<uint32_t, int64_t, highest<int64_t, true>>
                  : unary<uint32_t, int32_t, highest<int32_t, true>>;
    return wide ? unary<uint32_t, uint64_t, highest<uint64_t, true>>
                : unary<uint32_t, uint32_t, highest<uint32_t, true>>;
  }
  if (type.is_signed())
    return wide ? unary<uint32_t, int64_t, highest<int64_t, false>>
                : unary<uint32_t, int32_t, highest<int32_t, false>>;
  return wide ? unary<uint32_t, uint64_t, highest<uint64_t, false>>
              : unary<uint32_t, uint32_t, highest<uint32_t, false>>;
}

const Opcode bits_and{"and", logic<bit_and>};
const Opcode bits_or{"or", logic<bit_or>};
const Opcode bits_xor{"xor", logic<bit_xor>};
const Opcode bits_not{"not", one_operand<bit_not>};
const Opcode bits_cnot{"cnot", one_operand<logical_not>};
const Opcode shl{"shl", decode_shift};
const Opcode shr{"shr", decode_shift};
const Opcode shf{"shf", decode_funnel};
const Opcode bfe{"bfe", decode_extract};
const Opcode bfi{"bfi", decode_insert};
const Opcode prmt{"prmt", decode_permute};
const Opcode lop3{"lop3", decode_lookup};
const Opcode popc{"popc", decode_count};
const Opcode clz{"clz", decode_count};
const Opcode brev{"brev", decode_count};
const Opcode bfind{"bfind", decode_count};

}  // namespace
}  // namespace emulator
