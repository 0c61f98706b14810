// mov, and conversions of addresses.
#include <chrono>
#include <cstdint>

#include "lanes.h"
#include "types.h"

namespace emulator {
namespace {

template <class T>
Handler copy() {
  return unary<T, T, [](T a) { return a; }>;
}

Handler copy_of(int bytes) {
  switch (bytes) {
    case 1:
      return copy<uint8_t>();
    case 2:
      return copy<uint16_t>();
    case 4:
      return copy<uint32_t>();
    case 8:
      return copy<uint64_t>();
    case 16:
      return copy<unsigned __int128>();
    default:
      return nullptr;
  }
}

// Numbers of `Part` in a register of `Whole`, the first lowest.
template <class Whole, class Part>
void pack(Warp& warp, const Instr& in) {
  alignas(64) Part values[kLanes][sizeof(Whole) / sizeof(Part)];
  for (size_t k = 0; k < sizeof(Whole) / sizeof(Part); ++k) {
    const Part* part = lanes<Part>(warp, in.rows[k]);
    for (int i = 0; i < kLanes; ++i) values[i][k] = part[i];
  }
  for_lanes<Whole>(warp, in.d, [&](int i) {
    Whole whole;
    std::memcpy(&whole, values[i], sizeof whole);
    return whole;
  });
}

template <class Whole, class Part>
void unpack(Warp& warp, const Instr& in) {
  alignas(64) Part values[kLanes][sizeof(Whole) / sizeof(Part)];
  std::memcpy(values, lanes<Whole>(warp, in.a), sizeof values);
  for (size_t k = 0; k < sizeof(Whole) / sizeof(Part); ++k) {
    for_lanes<Part>(warp, in.rows[k], [&](int i) { return values[i][k]; });
  }
}

template <class Whole, class Part>
Handler packing(bool packs) {
  return packs ? pack<Whole, Part> : unpack<Whole, Part>;
}

Handler packing_of(int whole, size_t parts, bool packs) {
  if (whole == 2 && parts == 2) return packing<uint16_t, uint8_t>(packs);
  if (whole == 4 && parts == 2) return packing<uint32_t, uint16_t>(packs);
  if (whole == 4 && parts == 4) return packing<uint32_t, uint8_t>(packs);
  if (whole == 8 && parts == 2) return packing<uint64_t, uint32_t>(packs);
  if (whole == 8 && parts == 4) return packing<uint64_t, uint16_t>(packs);
  if (whole == 16 && parts == 2) return packing<unsigned __int128, uint64_t>(packs);
  if (whole == 16 && parts == 4) return packing<unsigned __int128, uint32_t>(packs);
  return nullptr;
}

// Clocks: nanoseconds, and as cycles too.
template <class T>
void read_clock(Warp& warp, const Instr& in) {
  const auto now =
      static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  for_lanes<T>(warp, in.d, [&](int) { return static_cast<T>(now >> in.imm); });
}

Handler decode_mov(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_modifiers(statement, {});
  expect_operands(statement, 2, 2);
  const Type type = type_of(statement);
  const Operand &to = statement.operands[0], &from = statement.operands[1];
  if (type.kind == Kind::kPredicate) {
    instr.p = decoding.target_predicate(to);
    instr.q = decoding.predicate(from);
    return [](Warp& warp, const Instr& in) { warp.set_predicate(in.p, warp.predicate(in.q)); };
  }
  if (from.kind == Operand::Kind::kSpecial &&
      (from.text.starts_with("%clock") || from.text.starts_with("%globaltimer"))) {
    instr.d = decoding.target_row(to, type.bytes);
    instr.imm = from.text.ends_with("_hi") ? 32 : 0;
    return type.bytes == 8 ? read_clock<uint64_t> : read_clock<uint32_t>;
  }
  if (from.kind == Operand::Kind::kVector || to.kind == Operand::Kind::kVector) {
    const bool packs = from.kind == Operand::Kind::kVector;
    const auto& parts = (packs ? from : to).parts;
    const int part = type.bytes / static_cast<int>(parts.size());
    std::vector<Row> rows;
    for (const Operand& operand : parts)
      rows.push_back(packs ? decoding.row(operand, part) : decoding.target_row(operand, part));
    instr.rows = decoding.keep(rows);
    if (packs) {
      instr.d = decoding.target_row(to, type.bytes);
    } else {
      instr.a = decoding.row(from, type.bytes);
    }
    return packing_of(type.bytes, parts.size(), packs);
  }
  read_rows(statement, instr, decoding, type.bytes);
  return copy_of(type.bytes);
}

// cvta: a window's start is added or taken away; global, constant and parameter addresses are
// generic ones as they are.
Handler decode_cvta(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_modifiers(statement, {"to", "global", "shared", "shared::cta", "shared::cluster", "local",
                               "const", "param", "param::entry"});
  expect_operands(statement, 2, 2);
  const int bytes = type_of(statement).bytes;
  if (bytes != 8) return nullptr;
  read_rows(statement, instr, decoding, bytes);
  const bool shared =
      statement.has("shared") || statement.has("shared::cta") || statement.has("shared::cluster");
  if (!shared && !statement.has("local")) return copy<uint64_t>();
  instr.imm = static_cast<int64_t>(shared ? kSharedWindow : kLocalWindow);
  if (statement.has("to")) {
    return [](Warp& warp, const Instr& in) {
      const uint64_t* a = lanes<uint64_t>(warp, in.a);
      for_lanes<uint64_t>(warp, in.d, [&](int i) { return a[i] - static_cast<uint64_t>(in.imm); });
    };
  }
  return [](Warp& warp, const Instr& in) {
    const uint64_t* a = lanes<uint64_t>(warp, in.a);
    for_lanes<uint64_t>(warp, in.d, [&](int i) { return a[i] + static_cast<uint64_t>(in.imm); });
  };
}

Handler decode_isspacep(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_operands(statement, 2, 2);
  instr.p = decoding.target_predicate(statement.operands[0]);
  instr.a = decoding.row(statement.operands[1], 8);
  if (statement.parts.at(1).starts_with("shared")) {
    instr.imm = static_cast<int64_t>(kSharedWindow);
  } else if (statement.has("local")) {
    instr.imm = static_cast<int64_t>(kLocalWindow);
  } else if (!statement.has("global")) {
    return nullptr;
  }
  return [](Warp& warp, const Instr& in) {
    const uint64_t* a = lanes<uint64_t>(warp, in.a);
    warp.set_predicate(in.p, mask_of([&](int i) {
                         return (a[i] & kWindowMask) == static_cast<uint64_t>(in.imm);
                       }));
  };
}

const Opcode mov{"mov", decode_mov};
const Opcode cvta{"cvta", decode_cvta};
const Opcode isspacep{"isspacep", decode_isspacep};

}  // namespace
}  // namespace emulator
