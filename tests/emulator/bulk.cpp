// cp.async.bulk: copies of contiguous bytes and of boxes of a tensor (TMA) from global to shared
// memory, which complete an mbarrier's bytes; and copies from shared to global memory, or
// cp.reduce.async.bulk, sums of contiguous floats there, in groups that the lane commits and waits
// for.
#include <algorithm>

#include "async.h"
#include "races.h"
#include "tensor_map.h"

namespace emulator {

// A lane's copy or sums: those of float `values` once they are read, which a wait with .read takes.
struct BulkReduction {
  float* to;
  const uint8_t* from;
  uint32_t bytes;
  bool copies;
  std::vector<float> values;

  void read() {
    if (!values.empty() || !from) return;
    values.resize(bytes / sizeof(float));
    std::memcpy(values.data(), from, bytes);
    from = nullptr;
  }
  void add() {
    read();
    for (size_t i = 0; i < values.size(); ++i) to[i] = copies ? values[i] : to[i] + values[i];
    values.clear();
  }
};

namespace {

constexpr uint32_t kChunkBytes = 16;  // what swizzles permute

// -- Contiguous bytes ----------------------------------------------------------------------------

struct BulkOperands {
  AddressOperand to, from;
  Row bytes;
  AddressOperand barrier;
  bool copies = false;
};

uint32_t bytes_of(const Warp& warp, const BulkOperands& operands, int lane) {
  const uint32_t bytes = warp.row<uint32_t>(operands.bytes)[lane];
  if (bytes % kChunkBytes) fail("a bulk copy of " + std::to_string(bytes) + " bytes", lane);
  return bytes;
}

void run_bulk_load(Warp& warp, const Instr& instr) {
  const BulkOperands& operands = *static_cast<const BulkOperands*>(instr.detail);
  ClusterAsync& async = async_of(*warp.block->cluster);
  for_active(warp, [&](int lane) {
    const uint32_t bytes = bytes_of(warp, operands, lane);
    uint8_t* to = warp.shared(operands.to.shared(warp, lane), bytes, kChunkBytes);
    const uint8_t* from = warp.global(operands.from.at(warp, lane), bytes, kChunkBytes);
    uint8_t* barrier = warp.shared(operands.barrier.shared(warp, lane), 8, 8);
    if (warp.races) races::begin_write(warp, instr, lane, to, bytes, barrier, true);
    perform(warp, to, [=, &async] {
      std::memcpy(to, from, bytes);
      mbarrier_complete_tx(async, barrier, bytes);
    });
  });
}

void run_bulk_reduce(Warp& warp, const Instr& instr) {
  const BulkOperands& operands = *static_cast<const BulkOperands*>(instr.detail);
  for_active(warp, [&](int lane) {
    const uint32_t bytes = bytes_of(warp, operands, lane);
    auto work = std::make_shared<BulkReduction>();
    work->to =
        reinterpret_cast<float*>(warp.global(operands.to.at(warp, lane), bytes, kChunkBytes));
    work->from = warp.shared(operands.from.shared(warp, lane), bytes, kChunkBytes);
    work->bytes = bytes;
    work->copies = operands.copies;
    if (warp.races) races::begin_bulk_read(warp, instr, lane, work->from, bytes);
    if (!warp.block->launch->late) {
      work->add();
      return;
    }
    async_of(warp).bulk[lane].add(work);
    warp.block->launch->deferred.push_back([work, block = warp.block] {
      if (work->from && block->live_warps == 0)
        fail("a bulk reduction had not read its source when its block ended");
      work->add();
    });
  });
}

void run_commit(Warp& warp, const Instr&) {
  if (warp.races) races::commit(warp, WarpRaces::kBulk);
  for_active(warp, [&](int lane) { async_of(warp).bulk[lane].commit(); });
}

// Sums that were read stay among the pending ones until a wait without .read.
void run_wait_read(Warp& warp, const Instr& instr) {
  if (warp.races) races::wait(warp, WarpRaces::kBulk, instr.imm);
  for_active(warp, [&](int lane) {
    auto& bulk = async_of(warp).bulk[lane];
    const uint64_t first = bulk.begun - bulk.pending.size();
    const uint64_t end = bulk.before_latest(instr.imm);
    for (uint64_t i = first; i < end; ++i) bulk.pending[i - first]->read();
  });
}

void run_wait(Warp& warp, const Instr& instr) {
  if (warp.races) races::wait(warp, WarpRaces::kBulk, instr.imm);
  for_active(warp, [&](int lane) {
    auto& bulk = async_of(warp).bulk[lane];
    for (const auto& work : bulk.take(bulk.before_latest(instr.imm))) work->add();
  });
}

// -- Boxes of a tensor ---------------------------------------------------------------------------

struct TensorOperands {
  AddressOperand to, map, barrier;
  int rank;
  Row coordinates[kMaxTensorRank];
};

// A row of a box: zeros where it is outside of the tensor.
struct BoxRow {
  const uint8_t* from;
  uint32_t skipped, bytes;  // zeros before what is there, and what is
};

const TensorMap& map_of(Warp& warp, const AddressOperand& address, int lane) {
  const auto& map = *reinterpret_cast<const TensorMap*>(
      warp.generic(address.at(warp, lane), sizeof(TensorMap), 64, lane));
  if (map.magic != kTensorMapMagic) fail("no tensor map is there", lane);
  return map;
}

// The rows of the box at `at`, of `pitch` bytes each, the innermost axes first.
std::vector<BoxRow> rows_of_box(Warp& warp, const TensorMap& map,
                                const std::array<int64_t, kMaxTensorRank>& at, uint32_t pitch) {
  const int64_t element = tensor_element_bytes(map.dtype);
  const int64_t length = map.box[0];
  const int64_t begin = std::clamp<int64_t>(-at[0], 0, length);
  const int64_t end =
      std::clamp<int64_t>(static_cast<int64_t>(map.shape[0]) - at[0], begin, length);
  size_t count = 1;
  for (int axis = 1; axis < map.rank; ++axis) count *= map.box[axis];
  std::vector<BoxRow> rows(count);
  std::array<uint32_t, kMaxTensorRank> index{};  // in the box
  for (BoxRow& row : rows) {
    row = {nullptr, pitch, 0};
    bool inside = end > begin;
    // Addresses go round at 2^64: cuattn's maps of ragged rows count on it.
    uint64_t address = map.address + static_cast<uint64_t>((at[0] + begin) * element);
    for (int axis = 1; axis < map.rank; ++axis) {
      const int64_t coordinate = at[axis] + index[axis];
      inside = inside && coordinate >= 0 && static_cast<uint64_t>(coordinate) < map.shape[axis];
      address += static_cast<uint64_t>(coordinate) * map.strides[axis - 1];
    }
    if (inside) {
      row.skipped = static_cast<uint32_t>(begin * element);
      row.bytes = static_cast<uint32_t>((end - begin) * element);
      row.from = warp.global(address, row.bytes, element);
    }
    for (int axis = 1; axis < map.rank && ++index[axis] == map.box[axis]; ++axis) index[axis] = 0;
  }
  return rows;
}

void run_tensor_load(Warp& warp, const Instr& instr) {
  const TensorOperands& operands = *static_cast<const TensorOperands*>(instr.detail);
  ClusterAsync& async = async_of(*warp.block->cluster);
  for_active(warp, [&](int lane) {
    const TensorMap& map = map_of(warp, operands.map, lane);
    if (map.rank != operands.rank) fail("a tensor map of another rank", lane);
    std::array<int64_t, kMaxTensorRank> at{};
    for (int axis = 0; axis < map.rank; ++axis)
      at[axis] = warp.row<int32_t>(operands.coordinates[axis])[lane];
    const uint32_t pitch = map.box[0] * tensor_element_bytes(map.dtype);
    const uint32_t span = map.swizzle ? 16u << map.swizzle : 0;
    if (pitch % kChunkBytes || (span && pitch != span))
      fail("a box whose rows have " + std::to_string(pitch) + " bytes", lane);
    std::vector<BoxRow> rows = rows_of_box(warp, map, at, pitch);

    const uint32_t address = operands.to.shared(warp, lane);
    const auto bytes = static_cast<uint32_t>(rows.size() * pitch);
    uint8_t* to = warp.shared(address, bytes, 128);
    uint8_t* barrier = warp.shared(operands.barrier.shared(warp, lane), 8, 8);
    if (warp.races) races::begin_write(warp, instr, lane, to, bytes, barrier, true);
    const uint32_t swizzle = span ? span - kChunkBytes : 0;  // the bits of an address that change
    perform(warp, to, [=, &async, rows = std::move(rows)] {
      std::vector<uint8_t> line(pitch);
      uint32_t place = address;
      for (const BoxRow& row : rows) {
        std::fill(line.begin(), line.end(), 0);
        if (row.bytes) std::memcpy(&line[row.skipped], row.from, row.bytes);
        for (uint32_t i = 0; i < pitch; i += kChunkBytes, place += kChunkBytes)
          std::memcpy(to + ((place ^ (place >> 3 & swizzle)) - address), &line[i], kChunkBytes);
      }
      mbarrier_complete_tx(async, barrier, bytes);
    });
  });
}

// Kernels prefetch maps that they do not use, too: these may be all zeros.
void run_prefetch_map(Warp& warp, const Instr& instr) {
  const AddressOperand& address = *static_cast<const AddressOperand*>(instr.detail);
  for_active(warp,
             [&](int lane) { warp.generic(address.at(warp, lane), sizeof(TensorMap), 64, lane); });
}

// -- Decoding ------------------------------------------------------------------------------------

void require_mbarrier(const Statement& statement) {
  if (!statement.has("global") || !statement.has("mbarrier::complete_tx::bytes") ||
      statement.has("multicast::cluster"))
    throw std::runtime_error("an unknown kind of bulk copy");
}

Handler decode_bulk_reduce(const Statement& statement, Instr& instr, Decoding& decoding) {
  const bool copies = statement.opcode == "cp.async.bulk.global.shared::cta.bulk_group";
  if (!copies && statement.opcode != "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32")
    throw std::runtime_error("an unknown kind of bulk reduction");
  BulkOperands operands;
  operands.copies = copies;
  operands.to = address_operand(decoding, statement.operands.at(0));
  operands.from = address_operand(decoding, statement.operands.at(1));
  operands.bytes = decoding.row(statement.operands.at(2), 4);
  instr.detail = decoding.keep(operands);
  return run_bulk_reduce;
}

Handler decode_bulk_load(const Statement& statement, Instr& instr, Decoding& decoding) {
  if (statement.has("bulk_group")) return decode_bulk_reduce(statement, instr, decoding);
  require_mbarrier(statement);
  BulkOperands operands;
  operands.to = address_operand(decoding, statement.operands.at(0));
  operands.from = address_operand(decoding, statement.operands.at(1));
  operands.bytes = decoding.row(statement.operands.at(2), 4);
  operands.barrier = address_operand(decoding, statement.operands.at(3));
  instr.detail = decoding.keep(operands);
  return run_bulk_load;
}

Handler decode_commit(const Statement&, Instr&, Decoding&) { return run_commit; }

Handler decode_wait(const Statement& statement, Instr& instr, Decoding& decoding) {
  instr.imm = decoding.integer(statement.operands.at(0));
  return statement.has("read") ? run_wait_read : run_wait;
}

Handler decode_tensor_load(const Statement& statement, Instr& instr, Decoding& decoding) {
  require_mbarrier(statement);
  TensorOperands operands;
  operands.to = address_operand(decoding, statement.operands.at(0));
  const Operand& source = statement.operands.at(1);
  operands.map = address_operand(decoding, source);
  const std::vector<Operand>& coordinates = source.parts.at(1).parts;
  operands.rank = static_cast<int>(coordinates.size());
  if (operands.rank > kMaxTensorRank) throw std::runtime_error("too many coordinates");
  for (int axis = 0; axis < operands.rank; ++axis)
    operands.coordinates[axis] = decoding.row(coordinates[axis], 4);
  operands.barrier = address_operand(decoding, statement.operands.at(2));
  instr.detail = decoding.keep(operands);
  return run_tensor_load;
}

Handler decode_prefetch_map(const Statement& statement, Instr& instr, Decoding& decoding) {
  instr.detail = decoding.keep(address_operand(decoding, statement.operands.at(0)));
  return run_prefetch_map;
}

const Opcode bulk_load{"cp.async.bulk", decode_bulk_load};
const Opcode bulk_reduce{"cp.reduce.async.bulk", decode_bulk_reduce};
const Opcode commit{"cp.async.bulk.commit_group", decode_commit};
const Opcode wait{"cp.async.bulk.wait_group", decode_wait};
const Opcode tensor_load{"cp.async.bulk.tensor", decode_tensor_load};
const Opcode prefetch_map{"prefetch.tensormap", decode_prefetch_map};

}  // namespace
}  // namespace emulator
