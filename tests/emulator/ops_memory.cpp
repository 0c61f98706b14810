// Loads and stores.
#include <algorithm>
#include <cstdint>
#include <iterator>

#include "addresses.h"
#include "races.h"
#include "types.h"

namespace emulator {
namespace {

using Wide = unsigned __int128;

// Elements of type Memory become registers of type Register, extended by Memory's sign.
template <class Memory, class Register>
void load(Warp& warp, const Instr& in) {
  const Access& access = access_of(in);
  const Pointers from = pointers(warp, in, access);
  if (warp.races) races::touch(warp, in, access, from, Touch::kRead);
  for (int k = 0; k < access.count; ++k) {
    for_lanes<Register>(warp, in.rows[k], [&](int i) {
      Memory value;
      std::memcpy(&value, from[i] + k * sizeof(Memory), sizeof value);
      return static_cast<Register>(value);
    });
  }
}

// The lanes whose stores change nothing.
template <class Memory, class Register>
uint32_t unchanged(const Warp& warp, const Instr& in, const Pointers& to) {
  uint32_t same = 0;
  each_lane(warp.active, [&](int lane) {
    bool equal = true;
    for (int k = 0; k < access_of(in).count; ++k) {
      const auto value = static_cast<Memory>(lanes<Register>(warp, in.rows[k])[lane]);
      equal = equal && std::memcmp(to[lane] + k * sizeof(Memory), &value, sizeof value) == 0;
    }
    same |= static_cast<uint32_t>(equal) << lane;
  });
  return same;
}

template <class Memory, class Register>
void store(Warp& warp, const Instr& in) {
  const Access& access = access_of(in);
  const Pointers to = pointers(warp, in, access);
  if (warp.races)
    races::touch(warp, in, access, to, Touch::kWrite, unchanged<Memory, Register>(warp, in, to));
  for (int k = 0; k < access.count; ++k) {
    const Register* values = lanes<Register>(warp, in.rows[k]);
    each_lane(warp.active, [&](int lane) {
      const auto value = static_cast<Memory>(values[lane]);
      std::memcpy(to[lane] + k * sizeof(Memory), &value, sizeof value);
    });
  }
}

template <class Memory, class Register>
Handler transfer(bool loads) {
  return loads ? load<Memory, Register> : store<Memory, Register>;
}

template <class Memory>
Handler transfer_to(int register_bytes, bool loads) {
  constexpr bool s = std::is_signed_v<Memory>;
  switch (register_bytes) {
    case 1:
      return transfer<Memory, uint8_t>(loads);
    case 2:
      return s ? transfer<Memory, int16_t>(loads) : transfer<Memory, uint16_t>(loads);
    case 4:
      return s ? transfer<Memory, int32_t>(loads) : transfer<Memory, uint32_t>(loads);
    case 8:
      return s ? transfer<Memory, int64_t>(loads) : transfer<Memory, uint64_t>(loads);
    default:
      return nullptr;
  }
}

Handler transfer_of(const Access& access, bool loads) {
  const bool s = access.is_signed;
  switch (access.bytes) {
    case 1:
      return s ? transfer_to<int8_t>(access.register_bytes, loads)
               : transfer_to<uint8_t>(access.register_bytes, loads);
    case 2:
      return s ? transfer_to<int16_t>(access.register_bytes, loads)
               : transfer_to<uint16_t>(access.register_bytes, loads);
    case 4:
      return s ? transfer_to<int32_t>(access.register_bytes, loads)
               : transfer_to<uint32_t>(access.register_bytes, loads);
    case 8:
      return transfer_to<uint64_t>(access.register_bytes, loads);
    case 16:
      return transfer<Wide, Wide>(loads);
    default:
      return nullptr;
  }
}

// Modifiers about caches and the order of accesses, which say nothing of the result here.
void expect_memory_modifiers(const Statement& statement) {
  static const char* const known[] = {"ca",           "cg",          "cs",
                                      "lu",           "cv",          "wb",
                                      "wt",           "nc",          "volatile",
                                      "relaxed",      "acquire",     "release",
                                      "weak",         "gpu",         "cta",
                                      "cluster",      "sys",         "global",
                                      "shared",       "shared::cta", "shared::cluster",
                                      "local",        "const",       "param",
                                      "param::entry", "param::func", "v2",
                                      "v4",           "unified"};
  for (size_t i = 1; i < statement.parts.size(); ++i) {
    const std::string& part = statement.parts[i];
    if (part.starts_with("L1::") || part.starts_with("L2::") ||
        type_named(part).kind != Kind::kNone)
      continue;
    if (std::find(std::begin(known), std::end(known), part) == std::end(known)) {
      throw std::runtime_error("the modifier '." + part + "' is not known to the emulator here");
    }
  }
}

Handler decode_transfer(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_memory_modifiers(statement);
  expect_operands(statement, 2, 3);  // the third is a cache policy
  const bool loads = statement.parts[0] != "st";
  const Operand& registers = statement.operands[loads ? 0 : 1];
  const Type type = type_of(statement);
  Access access;
  read_address(statement, statement.operands[loads ? 1 : 0], instr, decoding, access);
  access.bytes = type.bytes;
  access.is_signed = type.is_signed();
  std::vector<Operand> elements{registers};
  if (registers.kind == Operand::Kind::kVector) elements = registers.parts;
  access.count = static_cast<int>(elements.size());
  if (access.count != (statement.has("v2") ? 2 : statement.has("v4") ? 4 : 1))
    throw std::runtime_error("the vector's length is not the modifier's");
  access.register_bytes = type.bytes;
  for (const Operand& element : elements) {
    if (element.kind == Operand::Kind::kRegister) access.register_bytes = element.bytes;
  }
  std::vector<Row> rows;
  for (const Operand& element : elements) {
    rows.push_back(loads ? decoding.target_row(element, access.register_bytes)
                         : decoding.row(element, access.register_bytes));
  }
  instr.rows = decoding.keep(rows);
  instr.detail = decoding.keep(access);
  return transfer_of(access, loads);
}

const Opcode ld{"ld", decode_transfer};
const Opcode ldu{"ldu", decode_transfer};
const Opcode st{"st", decode_transfer};

}  // namespace
}  // namespace emulator
