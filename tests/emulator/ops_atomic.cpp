// Atomic operations: lanes in turn.
#include <algorithm>
#include <bit>
#include <cstdint>

#include "addresses.h"
#include "narrow.h"
#include "races.h"
#include "types.h"

namespace emulator {
namespace {

enum class Update : uint8_t {
  kAdd,
  kMin,
  kMax,
  kAnd,
  kOr,
  kXor,
  kExchange,
  kCompareExchange,
  kIncrement,
  kDecrement,
  kUnknown
};

Update update_named(const Statement& statement) {
  static const char* const names[] = {"add", "min",  "max", "and", "or",
                                      "xor", "exch", "cas", "inc", "dec"};
  for (int i = 0; i < static_cast<int>(Update::kUnknown); ++i) {
    if (statement.has(names[i])) return static_cast<Update>(i);
  }
  return Update::kUnknown;
}

// The new value of memory that holds `old`.
template <class T>
T updated(Update update, T old, T b, T c) {
  switch (update) {
    case Update::kAdd:
      return static_cast<T>(old + b);
    case Update::kMin:
      return std::min(old, b);
    case Update::kMax:
      return std::max(old, b);
    case Update::kExchange:
      return b;
    case Update::kCompareExchange:
      return old == b ? c : old;
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (update) {
      case Update::kAnd:
        return old & b;
      case Update::kOr:
        return old | b;
      case Update::kXor:
        return old ^ b;
      case Update::kIncrement:
        return old >= b ? T{0} : static_cast<T>(old + 1);
      case Update::kDecrement:
        return old == 0 || old > b ? b : static_cast<T>(old - 1);
      default:
        break;
    }
  }
  fail("an atomic operation that the emulator does not know");
}

// Numbers of 16 bits: sums, minima and maxima are those of floats, rounded.
template <class Half>
struct Halves {
  static uint16_t update(Update update, uint16_t old, uint16_t b) {
    return Half::narrow(updated<float>(update, Half::widen(old), Half::widen(b), 0.0f));
  }
};

// Calls body(lane) for active lanes; with a seed the first may be any of them.
template <class Body>
void in_turn(Warp& warp, Body body) {
  uint32_t mask = warp.active;
  if (warp.block->launch->seed) {
    const int start = static_cast<int>(warp.block->launch->random() % kLanes);
    const uint32_t below = (1u << start) - 1;
    each_lane(mask & ~below, body);
    mask &= below;
  }
  each_lane(mask, body);
}

constexpr uint32_t kReturnsOld = 1;

template <class T>
void update_memory(Warp& warp, const Instr& in) {
  const Access& access = access_of(in);
  const Pointers to = pointers(warp, in, access);
  if (warp.races) races::touch(warp, in, access, to, Touch::kUpdate);
  const auto update = static_cast<Update>(in.imm);
  in_turn(warp, [&](int lane) {
    for (int k = 0; k < access.count; ++k) {
      T old;
      uint8_t* place = to[lane] + k * sizeof(T);
      std::memcpy(&old, place, sizeof old);
      const T b = warp.row<T>(in.rows[k])[lane];
      const T c = warp.row<T>(in.c)[lane];
      const T now = updated<T>(update, old, b, c);
      std::memcpy(place, &now, sizeof now);
      if (in.flags & kReturnsOld) warp.row<T>(in.rows[access.count + k])[lane] = old;
    }
  });
}

// Of 16-bit floats; `parts` of them in a register.
template <class Half, int parts>
void update_halves(Warp& warp, const Instr& in) {
  const Access& access = access_of(in);
  const Pointers to = pointers(warp, in, access);
  if (warp.races) races::touch(warp, in, access, to, Touch::kUpdate);
  const auto update = static_cast<Update>(in.imm);
  in_turn(warp, [&](int lane) {
    for (int k = 0; k < access.count; ++k) {
      uint16_t old[parts], now[parts];
      uint8_t* place = to[lane] + k * sizeof old;
      std::memcpy(old, place, sizeof old);
      const uint16_t* b = warp.row<uint16_t>(in.rows[k]) + parts * lane;
      for (int j = 0; j < parts; ++j) now[j] = Halves<Half>::update(update, old[j], b[j]);
      std::memcpy(place, now, sizeof now);
      if (in.flags & kReturnsOld)
        std::memcpy(warp.row<uint16_t>(in.rows[access.count + k]) + parts * lane, old, sizeof old);
    }
  });
}

Handler handler_of(Type type, Update update) {
  if (type.floating() && (type.bytes == 2 || type.parts == 2)) {
    if (update != Update::kAdd && update != Update::kMin && update != Update::kMax) return nullptr;
    if (type.kind == Kind::kFloat)
      return type.parts == 2 ? update_halves<Float16, 2> : update_halves<Float16, 1>;
    return type.parts == 2 ? update_halves<Bfloat16, 2> : update_halves<Bfloat16, 1>;
  }
  if (type.kind == Kind::kFloat)
    return type.bytes == 4 ? update_memory<float> : update_memory<double>;
  if (type.is_signed()) return type.bytes == 4 ? update_memory<int32_t> : update_memory<int64_t>;
  if (type.bytes == 2) return update_memory<uint16_t>;
  if (type.bytes == 16)
    return update == Update::kExchange || update == Update::kCompareExchange
               ? update_memory<unsigned __int128>
               : nullptr;
  return type.bytes == 4 ? update_memory<uint32_t> : update_memory<uint64_t>;
}

Handler decode_atomic(const Statement& statement, Instr& instr, Decoding& decoding) {
  const bool returns = statement.parts[0] == "atom";
  const Type type = type_of(statement);
  const Update update = update_named(statement);
  if (update == Update::kUnknown) return nullptr;
  const size_t first = returns ? 1 : 0;
  const size_t needed = first + (update == Update::kCompareExchange ? 3 : 2);
  expect_operands(statement, needed, needed + 1);  // a cache policy may follow
  Access access;
  read_address(statement, statement.operands[first], instr, decoding, access);
  const auto elements = [](const Operand& operand) {
    return operand.kind == Operand::Kind::kVector ? operand.parts : std::vector<Operand>{operand};
  };
  std::vector<Row> rows;
  for (const Operand& operand : elements(statement.operands[first + 1]))
    rows.push_back(decoding.row(operand, type.bytes));
  access.count = static_cast<int>(rows.size());
  access.bytes = type.bytes;
  if (returns) {
    instr.flags = kReturnsOld;
    for (const Operand& operand : elements(statement.operands[0]))
      rows.push_back(decoding.target_row(operand, type.bytes));
  }
  instr.c = update == Update::kCompareExchange
                ? decoding.row(statement.operands[first + 2], type.bytes)
                : rows[0];
  instr.rows = decoding.keep(rows);
  instr.detail = decoding.keep(access);
  instr.imm = static_cast<int64_t>(update);
  return handler_of(type, update);
}

const Opcode atom{"atom", decode_atomic};
const Opcode red{"red", decode_atomic};

}  // namespace
}  // namespace emulator
