// Names that integers and floating-point numbers share: the type decides.
#include "types.h"

namespace emulator {

Handler decode_integer(const Statement& statement, Instr& instr, Decoding& decoding);
Handler decode_floating(const Statement& statement, Instr& instr, Decoding& decoding);
Handler decode_half(const Statement& statement, Instr& instr, Decoding& decoding);

namespace {

Handler decode_arithmetic(const Statement& statement, Instr& instr, Decoding& decoding) {
  const Type type = type_of(statement);
  if (!type.floating()) return decode_integer(statement, instr, decoding);
  const bool half = type.bytes == 2 || type.parts == 2;
  return half ? decode_half(statement, instr, decoding)
              : decode_floating(statement, instr, decoding);
}

const Opcode add{"add", decode_arithmetic};
const Opcode sub{"sub", decode_arithmetic};
const Opcode mul{"mul", decode_arithmetic};
const Opcode mad{"mad", decode_arithmetic};
const Opcode fma{"fma", decode_arithmetic};
const Opcode div_{"div", decode_arithmetic};
const Opcode min{"min", decode_arithmetic};
const Opcode max{"max", decode_arithmetic};
const Opcode neg{"neg", decode_arithmetic};
const Opcode abs_{"abs", decode_arithmetic};
const Opcode sqrt_{"sqrt", decode_floating};
const Opcode rsqrt{"rsqrt", decode_floating};
const Opcode rcp{"rcp", decode_floating};
const Opcode copysign_{"copysign", decode_floating};
const Opcode ex2{"ex2", decode_arithmetic};
const Opcode lg2{"lg2", decode_floating};
const Opcode sin_{"sin", decode_floating};
const Opcode cos_{"cos", decode_floating};
const Opcode tanh_{"tanh", decode_arithmetic};

}  // namespace
}  // namespace emulator
