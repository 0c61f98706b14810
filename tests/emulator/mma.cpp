// mma.sync of 16-bit elements: D (16 x 8, float) = A (16 x 16) B (16 x 8) + C by one warp.
// rawkernels/ptx/mma.cuh says which lane holds what. The products of a sum are added first, and C
// last, as tensor cores do.
#include <cstring>

#include "floats.h"
#include "machine.h"

namespace emulator {
namespace {

struct Mma {
  Element element;
  Row d[4], a[4], b[2], c[4];
};

void run_mma(Warp& warp, const Instr& instr) {
  if (!warp.converged()) return warp.wait("the warp's other lanes");
  const Mma& mma = *static_cast<const Mma*>(instr.detail);
  const uint32_t* registers[4];
  for (int i = 0; i < 4; ++i) registers[i] = warp.row<uint32_t>(mma.a[i]);
  alignas(64) float a[16][16];
  floats_of_fragment(mma.element, registers, a);

  // Lane 4g + t holds rows 2t and 2t + 1 of column g in the first register, of the last eight rows
  // in the second.
  alignas(64) float b[16][8];
  for (int i = 0; i < 2; ++i) {
    const uint32_t* lanes = warp.row<uint32_t>(mma.b[i]);
    for (int g = 0; g < 8; g += 2) {
      alignas(64) float columns[2][8];
      store(columns, floats_of(mma.element, load<Halves>(lanes + 4 * g)));
      for (int k = 0; k < 8; ++k) {
        b[8 * i + k][g] = columns[0][k];
        b[8 * i + k][g + 1] = columns[1][k];
      }
    }
  }

  alignas(64) float d[16][8] = {};
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];

  for (int i = 0; i < 4; ++i) {
    const float* from = warp.row<float>(mma.c[i]);
    float* to = warp.row<float>(mma.d[i]);
    for (int lane = 0; lane < kLanes; ++lane)
      to[lane] = d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2] + from[lane];
  }
}

template <int kCount>
void rows_of(const Operand& vector, Decoding& decoding, Row (&rows)[kCount], bool target = false) {
  if (vector.parts.size() != kCount) throw std::runtime_error("a fragment of another length");
  for (int i = 0; i < kCount; ++i)
    rows[i] = target ? decoding.target_row(vector.parts[i], 4) : decoding.row(vector.parts[i], 4);
}

Handler decode_mma(const Statement& statement, Instr& instr, Decoding& decoding) {
  if (!statement.opcode.starts_with("mma.sync.aligned.m16n8k16.row.col.f32."))
    throw std::runtime_error("mma of an unknown shape");
  Mma mma;
  mma.element = element_named(statement.parts[7]);
  rows_of(statement.operands.at(0), decoding, mma.d, true);
  rows_of(statement.operands.at(1), decoding, mma.a);
  rows_of(statement.operands.at(2), decoding, mma.b);
  rows_of(statement.operands.at(3), decoding, mma.c);
  instr.detail = decoding.keep(mma);
  return run_mma;
}

const Opcode mma{"mma", decode_mma};

}  // namespace
}  // namespace emulator
