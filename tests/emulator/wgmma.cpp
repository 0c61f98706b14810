// wgmma.mma_async. Each warp computes its own 16 rows. In a launch with `late` it reads operands in
// shared memory and adds to the accumulators when it waits for them.
#include "async.h"
#include "races.h"
#include "wgmma_rows.h"

namespace emulator {
namespace {

struct Wgmma {
  Element element;
  int columns;
  bool rows_in_registers;
  Row a[4];  // the rows, or the descriptor of A in a[0]
  Row b;     // the descriptor
  bool a_mn_major = false, b_mn_major;
  Predicate accumulate;
  const Row* d;
};

}  // namespace

// A product whose operands in registers have been read.
struct WgmmaWork {
  const Wgmma* wgmma;
  alignas(64) uint32_t rows[4][kLanes];
  uint64_t a, b;
  bool accumulate;
};

namespace {

uint64_t uniform(const Warp& warp, Row row) {
  const uint64_t* lanes = warp.row<uint64_t>(row);
  for (int lane = 1; lane < kLanes; ++lane)
    if (lanes[lane] != lanes[0]) fail("a matrix descriptor that differs between lanes", lane);
  return lanes[0];
}

SharedBytes shared_of(const Warp& warp) {
  const std::vector<uint8_t>& bytes = warp.block->shared;
  return {bytes.data() + kSharedBase, kSharedBase, static_cast<uint32_t>(bytes.size())};
}

// Where a warp's part of the product reads shared memory.
std::vector<uint32_t> addresses_of(const Warp& warp, const WgmmaWork& work) {
  const Wgmma& wgmma = *work.wgmma;
  std::vector<uint32_t> addresses;
  uint16_t elements[kMaxWgmmaColumns][kWgmmaDepth];
  if (!wgmma.rows_in_registers)
    SharedOperand{work.a, wgmma.a_mn_major}.read(shared_of(warp), warp.index % 4 * 16, 16, elements,
                                                 &addresses);
  SharedOperand{work.b, wgmma.b_mn_major}.read(shared_of(warp), 0, wgmma.columns, elements,
                                               &addresses);
  return addresses;
}

void multiply(Warp& warp, const WgmmaWork& work) {
  const Wgmma& wgmma = *work.wgmma;
  const SharedBytes shared = shared_of(warp);
  uint16_t elements[16][kWgmmaDepth];
  alignas(64) float a[16][kWgmmaDepth];
  static WgmmaColumns b;  // a launch is a single thread
  if (wgmma.rows_in_registers) {
    floats_of_fragment(wgmma.element, {work.rows[0], work.rows[1], work.rows[2], work.rows[3]}, a);
  } else {
    SharedOperand{work.a, wgmma.a_mn_major}.read(shared, warp.index % 4 * 16, 16, elements);
    for (int row = 0; row < 16; ++row)
      store(a[row], floats_of(wgmma.element, load<Halves>(elements[row])));
  }
  const SharedOperand operand{work.b, wgmma.b_mn_major};
  for (int first = 0; first < wgmma.columns; first += 16) {
    operand.read(shared, first, std::min(16, wgmma.columns - first), elements);
    b.set_panel(wgmma.element, first / 16, elements);
  }
  float* d[kMaxWgmmaColumns / 2];
  for (int i = 0; i < wgmma.columns / 2; ++i) d[i] = warp.row<float>(wgmma.d[i]);
  multiply_rows(a, b, wgmma.columns, work.accumulate, d);
}

void run_wgmma(Warp& warp, const Instr& instr) {
  if (!warp.converged()) return warp.wait("the warp's other lanes");
  const Wgmma& wgmma = *static_cast<const Wgmma*>(instr.detail);
  auto work = std::make_shared<WgmmaWork>();
  work->wgmma = &wgmma;
  if (wgmma.rows_in_registers) {
    for (int i = 0; i < 4; ++i)
      std::memcpy(work->rows[i], warp.row<uint32_t>(wgmma.a[i]), sizeof work->rows[i]);
  } else {
    work->a = uniform(warp, wgmma.a[0]);
  }
  work->b = uniform(warp, wgmma.b);
  const uint32_t accumulate = warp.predicate(wgmma.accumulate);
  if (accumulate != 0 && accumulate != kAllLanes) fail("scale-d differs between lanes");
  work->accumulate = accumulate != 0;
  if (warp.races) races::begin_wgmma(warp, instr, addresses_of(warp, *work));
  if (warp.block->launch->late)
    async_of(warp).wgmma.add(std::move(work));
  else
    multiply(warp, *work);
}

void run_fence(Warp& warp, const Instr&) {
  if (!warp.converged()) warp.wait("the warp's other lanes");
}

void run_commit(Warp& warp, const Instr&) {
  if (!warp.converged()) return warp.wait("the warp's other lanes");
  async_of(warp).wgmma.commit();
  if (warp.races) races::commit_wgmma(warp);
}

void run_wait(Warp& warp, const Instr& instr) {
  if (!warp.converged()) return warp.wait("the warp's other lanes");
  if (warp.races) races::wait_for_wgmma(warp, instr.imm);
  auto& groups = async_of(warp).wgmma;
  for (const auto& work : groups.take(groups.before_latest(instr.imm))) multiply(warp, *work);
}

// m64n128k16 -> 128.
int columns_of(const std::string& shape) {
  if (!shape.starts_with("m64n") || !shape.ends_with("k16"))
    throw std::runtime_error("wgmma of an unknown shape");
  return std::stoi(shape.substr(4));
}

Handler decode_wgmma(const Statement& statement, Instr& instr, Decoding& decoding) {
  const auto& parts = statement.parts;  // wgmma mma_async sync aligned m64nNk16 f32 type type
  const auto& operands = statement.operands;
  if (parts.size() != 8 || parts[5] != "f32" || parts[6] != parts[7])
    throw std::runtime_error("wgmma of unknown types");
  Wgmma wgmma;
  wgmma.columns = columns_of(parts[4]);
  wgmma.element = element_named(parts[6]);
  const std::vector<Operand>& registers = operands.at(0).parts;
  if (static_cast<int>(registers.size()) != wgmma.columns / 2)
    throw std::runtime_error("an accumulator of another size");
  std::vector<Row> d;
  for (const Operand& operand : registers) d.push_back(decoding.target_row(operand, 4));
  wgmma.d = decoding.keep(d);
  wgmma.rows_in_registers = operands.at(1).kind == Operand::Kind::kVector;
  if (wgmma.rows_in_registers)
    for (int i = 0; i < 4; ++i) wgmma.a[i] = decoding.row(operands[1].parts.at(i), 4);
  else
    wgmma.a[0] = decoding.row(operands[1], 8);
  wgmma.b = decoding.row(operands.at(2), 8);
  wgmma.accumulate = decoding.predicate(operands.at(3));
  if (decoding.integer(operands.at(4)) != 1 || decoding.integer(operands.at(5)) != 1)
    throw std::runtime_error("wgmma of negated operands");
  if (!wgmma.rows_in_registers) wgmma.a_mn_major = decoding.integer(operands.at(6)) != 0;
  wgmma.b_mn_major = decoding.integer(operands.back()) != 0;
  instr.detail = decoding.keep(wgmma);
  return run_wgmma;
}

Handler decode_fence(const Statement&, Instr&, Decoding&) { return run_fence; }

Handler decode_commit(const Statement&, Instr&, Decoding&) { return run_commit; }

Handler decode_wait(const Statement& statement, Instr& instr, Decoding& decoding) {
  instr.imm = decoding.integer(statement.operands.at(0));
  return run_wait;
}

const Opcode product{"wgmma.mma_async", decode_wgmma};
const Opcode fence{"wgmma.fence", decode_fence};
const Opcode commit{"wgmma.commit_group", decode_commit};
const Opcode wait{"wgmma.wait_group", decode_wait};

}  // namespace
}  // namespace emulator
