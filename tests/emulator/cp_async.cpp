// cp.async: copies of 4, 8 or 16 bytes by each lane, in groups that the lane commits and waits for.
// In a launch with `late` they happen when they are waited for.
#include "async.h"
#include "races.h"

namespace emulator {
namespace {

struct CopyOperands {
  AddressOperand to, from;
  uint32_t bytes;
  // What is read at most, zeros being written for the rest: everything, nothing where a predicate
  // holds, or a number of bytes.
  enum class Limit : uint8_t { kNone, kUnlessPredicate, kBytes } limit = Limit::kNone;
  Predicate zero;
  Row bytes_read;
};

void copy(const Copy& work) {
  if (work.bytes_read) std::memcpy(work.to, work.from, work.bytes_read);
  std::memset(work.to + work.bytes_read, 0, work.bytes - work.bytes_read);
}

void run_copy(Warp& warp, const Instr& instr) {
  using Limit = CopyOperands::Limit;
  const CopyOperands& operands = *static_cast<const CopyOperands*>(instr.detail);
  const uint32_t zero =
      operands.limit == Limit::kUnlessPredicate ? warp.predicate(operands.zero) : 0;
  for_active(warp, [&](int lane) {
    Copy work{};
    work.bytes = operands.bytes;
    work.bytes_read = zero >> lane & 1 ? 0 : operands.bytes;
    if (operands.limit == Limit::kBytes)
      work.bytes_read = warp.row<uint32_t>(operands.bytes_read)[lane];
    if (work.bytes_read > work.bytes) fail("more bytes to read than to write", lane);
    work.to = warp.shared(operands.to.shared(warp, lane), work.bytes, work.bytes);
    if (work.bytes_read) work.from = warp.global(operands.from.at(warp, lane), work.bytes_read, 1);
    if (work.bytes_read && reinterpret_cast<uint64_t>(work.from) % work.bytes)
      fail("cp.async of " + std::to_string(work.bytes) +
               " bytes from an address that is no multiple",
           lane);
    if (warp.races) races::begin_copy(warp, instr, lane, work.to, work.bytes);
    if (warp.block->launch->late)
      async_of(warp).copies[lane].add(work);
    else
      copy(work);
  });
}

void run_commit(Warp& warp, const Instr&) {
  if (warp.races) races::commit(warp, WarpRaces::kCopies);
  for_active(warp, [&](int lane) { async_of(warp).copies[lane].commit(); });
}

void run_wait_group(Warp& warp, const Instr& instr) {
  if (warp.races) races::wait(warp, WarpRaces::kCopies, instr.imm);
  for_active(warp, [&](int lane) {
    Groups<Copy>& copies = async_of(warp).copies[lane];
    for (const Copy& work : copies.take(copies.before_latest(instr.imm))) copy(work);
  });
}

void run_wait_all(Warp& warp, const Instr&) {
  if (warp.races) races::wait_for_all_copies(warp);
  for_active(warp, [&](int lane) {
    Groups<Copy>& copies = async_of(warp).copies[lane];
    for (const Copy& work : copies.take(copies.begun)) copy(work);
  });
}

// cp.async.mbarrier.arrive.noinc: the lane's copies until now arrive at a barrier when they are
// done.
void run_arrive(Warp& warp, const Instr& instr) {
  const AddressOperand& address = *static_cast<const AddressOperand*>(instr.detail);
  for_active(warp, [&](int lane) {
    uint8_t* barrier = warp.shared(address.shared(warp, lane), 8, 8);
    if (warp.races) races::arrive_after_copies(warp, instr, lane, barrier);
    WarpAsync& async = async_of(warp);
    ClusterAsync& cluster = async_of(*warp.block->cluster);
    const uint64_t end = async.copies[lane].begun;
    perform(warp, barrier, [&async, &cluster, lane, end, barrier] {
      for (const Copy& work : async.copies[lane].take(end)) copy(work);
      mbarrier_arrive(cluster, barrier);
    });
  });
}

Handler decode_copy(const Statement& statement, Instr& instr, Decoding& decoding) {
  CopyOperands operands;
  operands.to = address_operand(decoding, statement.operands.at(0));
  operands.from = address_operand(decoding, statement.operands.at(1));
  operands.bytes = static_cast<uint32_t>(decoding.integer(statement.operands.at(2)));
  const size_t without_policy = statement.operands.size() - statement.has("L2::cache_hint");
  if (without_policy > 3) {
    const Operand& limit = statement.operands[3];
    if (limit.kind == Operand::Kind::kPredicate) {
      operands.limit = CopyOperands::Limit::kUnlessPredicate;
      operands.zero = decoding.predicate(limit);
    } else {
      operands.limit = CopyOperands::Limit::kBytes;
      operands.bytes_read = decoding.row(limit, 4);
    }
  }
  instr.detail = decoding.keep(operands);
  return run_copy;
}

Handler decode_commit(const Statement&, Instr&, Decoding&) { return run_commit; }

Handler decode_wait_group(const Statement& statement, Instr& instr, Decoding& decoding) {
  instr.imm = decoding.integer(statement.operands.at(0));
  return run_wait_group;
}

Handler decode_wait_all(const Statement&, Instr&, Decoding&) { return run_wait_all; }

Handler decode_arrive(const Statement& statement, Instr& instr, Decoding& decoding) {
  if (!statement.has("noinc")) throw std::runtime_error("only with .noinc");
  instr.detail = decoding.keep(address_operand(decoding, statement.operands.at(0)));
  return run_arrive;
}

const Opcode copy_through_l1{"cp.async.ca", decode_copy};
const Opcode copy_past_l1{"cp.async.cg", decode_copy};
const Opcode commit{"cp.async.commit_group", decode_commit};
const Opcode wait_group{"cp.async.wait_group", decode_wait_group};
const Opcode wait_all{"cp.async.wait_all", decode_wait_all};
const Opcode arrive{"cp.async.mbarrier.arrive", decode_arrive};

}  // namespace
}  // namespace emulator
