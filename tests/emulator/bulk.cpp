// cp.async.bulk: copies of contiguous bytes and of boxes of a tensor (TMA) from global to shared
// memory, which complete an mbarrier's bytes; and copies from shared to global memory, or
// cp.reduce.async.bulk, sums of contiguous floats there, in groups that the lane commits and waits
// for.
#include <algorithm>
#include <functional>

#include "async.h"
#include "races.h"
#include "tensor_map.h"

namespace emulator {

// What a lane writes to global memory: `bytes` of shared memory once they are read, which a wait
// with .read takes.
struct BulkWrite {
  const uint8_t* from;
  uint32_t bytes;
  std::function<void(const uint8_t*)> write;
  std::vector<uint8_t> values;

  void read() {
    if (!from) return;
    values.assign(from, from + bytes);
    from = nullptr;
  }
  void finish() {
    read();
    if (write) write(values.data());
    write = nullptr;
  }
};

namespace {

constexpr uint32_t kChunkBytes = 16;  // what swizzles permute

// -- Contiguous bytes ----------------------------------------------------------------------------

struct BulkOperands {
  AddressOperand to, from;
  Row bytes;
  AddressOperand barrier;
  bool adds = false;
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

// Begins what a lane writes to global memory from `bytes` at `from`.
void begin_bulk_write(Warp& warp, const Instr& instr, int lane, const uint8_t* from, uint32_t bytes,
                      std::function<void(const uint8_t*)> write) {
  auto work = std::make_shared<BulkWrite>(BulkWrite{from, bytes, std::move(write), {}});
  if (warp.races) races::begin_bulk_read(warp, instr, lane, from, bytes);
  if (!warp.block->launch->late) return work->finish();
  async_of(warp).bulk[lane].add(work);
  warp.block->launch->deferred.push_back([work, block = warp.block] {
    if (work->from && block->live_warps == 0)
      fail("a bulk copy had not read its source when its block ended");
    work->finish();
  });
}

void run_bulk_write(Warp& warp, const Instr& instr) {
  const BulkOperands& operands = *static_cast<const BulkOperands*>(instr.detail);
  for_active(warp, [&](int lane) {
    const uint32_t bytes = bytes_of(warp, operands, lane);
    uint8_t* to = warp.global(operands.to.at(warp, lane), bytes, kChunkBytes);
    const uint8_t* from = warp.shared(operands.from.shared(warp, lane), bytes, kChunkBytes);
    begin_bulk_write(warp, instr, lane, from, bytes,
                     [to, bytes, adds = operands.adds](const uint8_t* values) {
                       if (!adds) {
                         std::memcpy(to, values, bytes);
                         return;
                       }
                       auto* sums = reinterpret_cast<float*>(to);
                       for (size_t i = 0; i < bytes / sizeof(float); ++i)
                         sums[i] += reinterpret_cast<const float*>(values)[i];
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
    for (const auto& work : bulk.take(bulk.before_latest(instr.imm))) work->finish();
  });
}

// -- Boxes of a tensor ---------------------------------------------------------------------------

struct TensorOperands {
  AddressOperand place, map, barrier;  // place: in shared memory
  int rank;
  Row coordinates[kMaxTensorRank];
};

// A row of a box in global memory, as far as it is inside of the tensor.
struct BoxRow {
  uint8_t* at;
  uint32_t skipped, bytes;  // what the box has before that is not there, and what is
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
      row.at = warp.global(address, row.bytes, element);
    }
    for (int axis = 1; axis < map.rank && ++index[axis] == map.box[axis]; ++axis) index[axis] = 0;
  }
  return rows;
}

// A lane's box: its rows, which lie in shared memory from `address` on, `pitch` bytes each.
struct Box {
  std::vector<BoxRow> rows;
  uint32_t address, pitch, bytes, swizzle;  // swizzle: the bits of an address that change

  Box(Warp& warp, const TensorOperands& operands, int lane) {
    const TensorMap& map = map_of(warp, operands.map, lane);
    if (map.rank != operands.rank) fail("a tensor map of another rank", lane);
    std::array<int64_t, kMaxTensorRank> at{};
    for (int axis = 0; axis < map.rank; ++axis)
      at[axis] = warp.row<int32_t>(operands.coordinates[axis])[lane];
    pitch = map.box[0] * tensor_element_bytes(map.dtype);
    const uint32_t span = map.swizzle ? 16u << map.swizzle : 0;
    if (pitch % kChunkBytes || (span && pitch != span))
      fail("a box whose rows have " + std::to_string(pitch) + " bytes", lane);
    rows = rows_of_box(warp, map, at, pitch);
    address = operands.place.shared(warp, lane);
    bytes = static_cast<uint32_t>(rows.size() * pitch);
    swizzle = span ? span - kChunkBytes : 0;
  }

  // Where a chunk of a row is, from `address` on.
  uint32_t offset(size_t row, uint32_t in_row) const {
    const auto place = static_cast<uint32_t>(address + row * pitch + in_row);
    return (place ^ (place >> 3 & swizzle)) - address;
  }

  void load(uint8_t* to) const {
    std::vector<uint8_t> line(pitch);
    for (size_t n = 0; n < rows.size(); ++n) {
      std::fill(line.begin(), line.end(), 0);
      if (rows[n].bytes) std::memcpy(&line[rows[n].skipped], rows[n].at, rows[n].bytes);
      for (uint32_t i = 0; i < pitch; i += kChunkBytes)
        std::memcpy(to + offset(n, i), &line[i], kChunkBytes);
    }
  }
  void store(const uint8_t* from) const {
    std::vector<uint8_t> line(pitch);
    for (size_t n = 0; n < rows.size(); ++n) {
      for (uint32_t i = 0; i < pitch; i += kChunkBytes)
        std::memcpy(&line[i], from + offset(n, i), kChunkBytes);
      if (rows[n].bytes) std::memcpy(rows[n].at, &line[rows[n].skipped], rows[n].bytes);
    }
  }
};

void run_tensor_load(Warp& warp, const Instr& instr) {
  const TensorOperands& operands = *static_cast<const TensorOperands*>(instr.detail);
  ClusterAsync& async = async_of(*warp.block->cluster);
  for_active(warp, [&](int lane) {
    const Box box(warp, operands, lane);
    uint8_t* to = warp.shared(box.address, box.bytes, 128);
    uint8_t* barrier = warp.shared(operands.barrier.shared(warp, lane), 8, 8);
    if (warp.races) races::begin_write(warp, instr, lane, to, box.bytes, barrier, true);
    perform(warp, to, [=, &async] {
      box.load(to);
      mbarrier_complete_tx(async, barrier, box.bytes);
    });
  });
}

void run_tensor_store(Warp& warp, const Instr& instr) {
  const TensorOperands& operands = *static_cast<const TensorOperands*>(instr.detail);
  for_active(warp, [&](int lane) {
    const Box box(warp, operands, lane);
    begin_bulk_write(warp, instr, lane, warp.shared(box.address, box.bytes, 128), box.bytes,
                     [=](const uint8_t* values) { box.store(values); });
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

Handler decode_bulk_write(const Statement& statement, Instr& instr, Decoding& decoding) {
  BulkOperands operands;
  operands.adds = statement.opcode == "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32";
  if (!operands.adds && statement.opcode != "cp.async.bulk.global.shared::cta.bulk_group")
    throw std::runtime_error("an unknown kind of bulk copy to global memory");
  operands.to = address_operand(decoding, statement.operands.at(0));
  operands.from = address_operand(decoding, statement.operands.at(1));
  operands.bytes = decoding.row(statement.operands.at(2), 4);
  instr.detail = decoding.keep(operands);
  return run_bulk_write;
}

Handler decode_bulk_load(const Statement& statement, Instr& instr, Decoding& decoding) {
  if (statement.has("bulk_group")) return decode_bulk_write(statement, instr, decoding);
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

void decode_map(const Operand& source, TensorOperands& operands, Decoding& decoding) {
  operands.map = address_operand(decoding, source);
  const std::vector<Operand>& coordinates = source.parts.at(1).parts;
  operands.rank = static_cast<int>(coordinates.size());
  if (operands.rank > kMaxTensorRank) throw std::runtime_error("too many coordinates");
  for (int axis = 0; axis < operands.rank; ++axis)
    operands.coordinates[axis] = decoding.row(coordinates[axis], 4);
}

Handler decode_tensor_copy(const Statement& statement, Instr& instr, Decoding& decoding) {
  const bool stores = statement.has("bulk_group");
  TensorOperands operands;
  if (stores && !statement.opcode.ends_with("global.shared::cta.bulk_group"))
    throw std::runtime_error("an unknown kind of bulk copy");
  decode_map(statement.operands.at(!stores), operands, decoding);
  operands.place = address_operand(decoding, statement.operands.at(stores));
  if (!stores) {
    require_mbarrier(statement);
    operands.barrier = address_operand(decoding, statement.operands.at(2));
  }
  instr.detail = decoding.keep(operands);
  return stores ? run_tensor_store : run_tensor_load;
}

Handler decode_prefetch_map(const Statement& statement, Instr& instr, Decoding& decoding) {
  instr.detail = decoding.keep(address_operand(decoding, statement.operands.at(0)));
  return run_prefetch_map;
}

const Opcode bulk_load{"cp.async.bulk", decode_bulk_load};
const Opcode bulk_reduce{"cp.reduce.async.bulk", decode_bulk_write};
const Opcode commit{"cp.async.bulk.commit_group", decode_commit};
const Opcode wait{"cp.async.bulk.wait_group", decode_wait};
const Opcode tensor_load{"cp.async.bulk.tensor", decode_tensor_copy};
const Opcode prefetch_map{"prefetch.tensormap", decode_prefetch_map};

}  // namespace
}  // namespace emulator
