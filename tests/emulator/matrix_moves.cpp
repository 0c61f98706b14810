// ldmatrix, stmatrix and movmatrix: 8 x 8 matrices of 16-bit elements between shared memory and the
// registers of a warp, in the layout of mma's fragments. Lane 4g + t holds row g, columns 2t and
// 2t + 1; with .trans rows 2t and 2t + 1 of column g.
#include <cstring>

#include "machine.h"
#include "races.h"

namespace emulator {
namespace {

struct Matrices {
  Row base;
  int address_bytes;
  int64_t offset;
  int count;
  bool transposed;
  Row registers[4];
};

using Matrix = uint16_t[8][8];

void transpose(const Matrix& from, Matrix& to) {
  for (int row = 0; row < 8; ++row)
    for (int column = 0; column < 8; ++column) to[column][row] = from[row][column];
}

// Where row g of matrix i is: lane 8i + g has its address.
uint8_t* row_of_matrix(Warp& warp, const Instr& instr, int i, int g, Touch touch) {
  const Matrices& matrices = *static_cast<const Matrices*>(instr.detail);
  const int lane = 8 * i + g;
  const uint64_t base = matrices.address_bytes == 8 ? warp.row<uint64_t>(matrices.base)[lane]
                                                    : warp.row<uint32_t>(matrices.base)[lane];
  uint8_t* row = warp.shared(static_cast<uint32_t>(base + matrices.offset), 16, 16);
  if (warp.races) races::touch_row(warp, instr, lane, row, 16, touch);
  return row;
}

void run_ldmatrix(Warp& warp, const Instr& instr) {
  if (!warp.converged()) return warp.wait("the warp's other lanes");
  const Matrices& matrices = *static_cast<const Matrices*>(instr.detail);
  Matrix read[4];
  for (int i = 0; i < matrices.count; ++i)
    for (int g = 0; g < 8; ++g)
      std::memcpy(read[i][g], row_of_matrix(warp, instr, i, g, Touch::kRead), 16);
  for (int i = 0; i < matrices.count; ++i) {
    Matrix transposed;
    if (matrices.transposed) transpose(read[i], transposed);
    std::memcpy(warp.row<uint32_t>(matrices.registers[i]),
                matrices.transposed ? transposed : read[i], sizeof(Matrix));
  }
}

void run_stmatrix(Warp& warp, const Instr& instr) {
  if (!warp.converged()) return warp.wait("the warp's other lanes");
  const Matrices& matrices = *static_cast<const Matrices*>(instr.detail);
  for (int i = 0; i < matrices.count; ++i) {
    Matrix held, transposed;
    std::memcpy(held, warp.row<uint32_t>(matrices.registers[i]), sizeof held);
    if (matrices.transposed) transpose(held, transposed);
    for (int g = 0; g < 8; ++g)
      std::memcpy(row_of_matrix(warp, instr, i, g, Touch::kWrite),
                  matrices.transposed ? transposed[g] : held[g], 16);
  }
}

void run_movmatrix(Warp& warp, const Instr& instr) {
  if (!warp.converged()) return warp.wait("the warp's other lanes");
  Matrix from, to;
  std::memcpy(from, warp.row<uint32_t>(instr.a), sizeof from);
  transpose(from, to);
  std::memcpy(warp.row<uint32_t>(instr.d), to, sizeof to);
}

void decode_matrices(const Statement& statement, Instr& instr, Decoding& decoding,
                     const Operand& address, const Operand& registers, bool target) {
  if (!statement.has("m8n8") || !statement.has("b16"))
    throw std::runtime_error("matrices of an unknown shape");
  Matrices matrices;
  const Decoding::Address at = decoding.address(address);
  matrices.base = at.base;
  matrices.address_bytes = at.bytes;
  matrices.offset = at.offset;
  matrices.transposed = statement.has("trans");
  matrices.count = statement.has("x4") ? 4 : statement.has("x2") ? 2 : 1;
  if (static_cast<int>(registers.parts.size()) != matrices.count)
    throw std::runtime_error("not a register for each matrix");
  for (int i = 0; i < matrices.count; ++i)
    matrices.registers[i] =
        target ? decoding.target_row(registers.parts[i], 4) : decoding.row(registers.parts[i], 4);
  instr.detail = decoding.keep(matrices);
}

Handler decode_ldmatrix(const Statement& statement, Instr& instr, Decoding& decoding) {
  decode_matrices(statement, instr, decoding, statement.operands.at(1), statement.operands.at(0),
                  true);
  return run_ldmatrix;
}

Handler decode_stmatrix(const Statement& statement, Instr& instr, Decoding& decoding) {
  decode_matrices(statement, instr, decoding, statement.operands.at(0), statement.operands.at(1),
                  false);
  return run_stmatrix;
}

Handler decode_movmatrix(const Statement& statement, Instr& instr, Decoding& decoding) {
  instr.d = decoding.target_row(statement.operands.at(0), 4);
  instr.a = decoding.row(statement.operands.at(1), 4);
  return run_movmatrix;
}

const Opcode ldmatrix{"ldmatrix", decode_ldmatrix};
const Opcode stmatrix{"stmatrix", decode_stmatrix};
const Opcode movmatrix{"movmatrix", decode_movmatrix};

}  // namespace
}  // namespace emulator
