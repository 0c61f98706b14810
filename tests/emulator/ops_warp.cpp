// Instructions by which the lanes of a warp exchange values or wait for each other.
#include <cstdint>

#include "lanes.h"
#include "races.h"
#include "types.h"

namespace emulator {
namespace {

// Runs body() for those active lanes whose partners have all come here, as `warp.active`; the
// others wait. A lane's partners are the lanes of its mask, a row, that have not exited.
template <class Body>
void with_partners(Warp& warp, Row masks, Body body) {
  const uint32_t* mask = lanes<uint32_t>(warp, masks);
  const uint32_t all = warp.active;
  const uint32_t first = mask[first_lane(all)];
  uint32_t ready = 0;
  if ((first & warp.alive & ~all) == 0 && (all & ~first) == 0) {
    ready = all;
  } else {
    each_lane(all, [&](int lane) {
      if (!(mask[lane] >> lane & 1)) fail("a lane is not in its own mask of lanes", lane);
      if ((mask[lane] & warp.alive & ~all) == 0) ready |= 1u << lane;
    });
  }
  if (ready) {
    warp.active = ready;
    if (warp.races) races::exchange(warp, ready);
    body();
  }
  if (ready != all) {
    warp.active = all & ~ready;
    warp.wait("the other lanes of its mask");
  }
}

void synchronise(Warp& warp, const Instr& in) {
  with_partners(warp, in.a, [&] {
    if (!warp.races) return;
    const uint32_t* mask = lanes<uint32_t>(warp, in.a);
    for (uint32_t rest = warp.active; rest;) {
      const uint32_t together = mask[first_lane(rest)] & warp.alive;
      races::meet(warp, together);
      rest &= ~together;
    }
  });
}

Handler decode_warp_barrier(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_operands(statement, 1, 1);
  instr.a = decoding.row(statement.operands[0], 4);
  return synchronise;
}

enum class Shuffle : uint8_t { kUp, kDown, kXor, kIndex };

template <Shuffle shuffle>
void exchange(Warp& warp, const Instr& in) {
  with_partners(warp, in.e, [&] {
    const uint32_t* a = lanes<uint32_t>(warp, in.a);
    const uint32_t* b = lanes<uint32_t>(warp, in.b);
    const uint32_t* c = lanes<uint32_t>(warp, in.c);
    alignas(64) uint32_t values[kLanes], valid[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int distance = static_cast<int>(b[i] & 31), clamp = static_cast<int>(c[i] & 31),
                segment = static_cast<int>(c[i] >> 8 & 31);
      const int last = (i & segment) | (clamp & ~segment), first = i & segment;
      int from = shuffle == Shuffle::kUp     ? i - distance
                 : shuffle == Shuffle::kDown ? i + distance
                 : shuffle == Shuffle::kXor  ? i ^ distance
                                             : first | (distance & ~segment);
      const bool inside = shuffle == Shuffle::kUp ? from >= last : from <= last;
      from = inside ? from & 31 : i;
      values[i] = a[from];
      valid[i] = inside;
    }
    const uint32_t inside = mask_of([&](int i) { return valid[i] != 0; });
    write(warp, lanes<uint32_t>(warp, in.d), values);
    warp.set_predicate(in.p, inside);
  });
}

Handler decode_shuffle(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_modifiers(statement, {"sync", "up", "down", "bfly", "idx"});
  expect_operands(statement, 5, 5);
  const auto& operands = statement.operands;
  const bool pair = operands[0].kind == Operand::Kind::kPair;
  instr.d = decoding.target_row(pair ? operands[0].parts[0] : operands[0], 4);
  instr.p = decoding.target_predicate(pair ? operands[0].parts[1] : Operand{});
  instr.a = decoding.row(operands[1], 4);
  instr.b = decoding.row(operands[2], 4);
  instr.c = decoding.row(operands[3], 4);
  instr.e = decoding.row(operands[4], 4);
  if (statement.has("up")) return exchange<Shuffle::kUp>;
  if (statement.has("down")) return exchange<Shuffle::kDown>;
  if (statement.has("bfly")) return exchange<Shuffle::kXor>;
  return exchange<Shuffle::kIndex>;
}

enum class Vote : uint8_t { kAll, kAny, kUniform, kBallot };

// What the lanes with a mask say together; lanes of one call may have different masks.
template <Vote vote>
void count_votes(Warp& warp, const Instr& in) {
  with_partners(warp, in.e, [&] {
    const uint32_t* mask = lanes<uint32_t>(warp, in.e);
    const uint32_t ready = warp.active, yes = warp.predicate(in.q) & ready;
    uint32_t holds = 0;
    alignas(64) uint32_t ballots[kLanes] = {};
    each_lane(ready, [&](int lane) {
      const uint32_t voters = mask[lane] & ready, said = yes & voters;
      ballots[lane] = said;
      const bool result = vote == Vote::kAll   ? said == voters
                          : vote == Vote::kAny ? said != 0
                                               : said == 0 || said == voters;
      holds |= static_cast<uint32_t>(result) << lane;
    });
    if constexpr (vote == Vote::kBallot) {
      write(warp, lanes<uint32_t>(warp, in.d), ballots);
    } else {
      warp.set_predicate(in.p, holds);
    }
  });
}

Handler decode_vote(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_modifiers(statement, {"sync", "all", "any", "uni", "ballot"});
  expect_operands(statement, 3, 3);
  instr.q = decoding.predicate(statement.operands[1]);
  instr.e = decoding.row(statement.operands[2], 4);
  if (statement.has("ballot")) {
    instr.d = decoding.target_row(statement.operands[0], 4);
    return count_votes<Vote::kBallot>;
  }
  instr.p = decoding.target_predicate(statement.operands[0]);
  if (statement.has("all")) return count_votes<Vote::kAll>;
  return statement.has("any") ? count_votes<Vote::kAny> : count_votes<Vote::kUniform>;
}

// match: which lanes hold the same value.
template <class T, bool all>
void match(Warp& warp, const Instr& in) {
  with_partners(warp, in.e, [&] {
    const T* a = lanes<T>(warp, in.a);
    const uint32_t* mask = lanes<uint32_t>(warp, in.e);
    const uint32_t ready = warp.active;
    alignas(64) uint32_t same[kLanes] = {};
    uint32_t agreed = 0;
    each_lane(ready, [&](int lane) {
      const uint32_t partners = mask[lane] & ready;
      const uint32_t equal = mask_of([&](int i) { return a[i] == a[lane]; }) & partners;
      same[lane] = !all || equal == partners ? equal : 0;
      agreed |= static_cast<uint32_t>(equal == partners) << lane;
    });
    write(warp, lanes<uint32_t>(warp, in.d), same);
    if (all) warp.set_predicate(in.p, agreed);
  });
}

Handler decode_match(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_modifiers(statement, {"sync", "all", "any"});
  expect_operands(statement, 3, 3);
  const Operand& result = statement.operands[0];
  const bool pair = result.kind == Operand::Kind::kPair, all = statement.has("all");
  const int bytes = type_of(statement).bytes;
  instr.d = decoding.target_row(pair ? result.parts[0] : result, 4);
  instr.p = decoding.target_predicate(pair ? result.parts[1] : Operand{});
  instr.a = decoding.row(statement.operands[1], bytes);
  instr.e = decoding.row(statement.operands[2], 4);
  if (bytes == 8) return all ? match<uint64_t, true> : match<uint64_t, false>;
  return all ? match<uint32_t, true> : match<uint32_t, false>;
}

template <class T, auto operation>
void reduce(Warp& warp, const Instr& in) {
  with_partners(warp, in.e, [&] {
    const T* a = lanes<T>(warp, in.a);
    const uint32_t* mask = lanes<uint32_t>(warp, in.e);
    const uint32_t ready = warp.active;
    alignas(64) T values[kLanes] = {};
    each_lane(ready, [&](int lane) {
      uint32_t partners = mask[lane] & ready;
      T value = a[first_lane(partners)];
      each_lane(partners & (partners - 1), [&](int other) { value = operation(value, a[other]); });
      values[lane] = value;
    });
    write(warp, lanes<T>(warp, in.d), values);
  });
}

Handler decode_reduce(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_modifiers(statement, {"sync", "add", "min", "max", "and", "or", "xor"});
  expect_operands(statement, 3, 3);
  instr.d = decoding.target_row(statement.operands[0], 4);
  instr.a = decoding.row(statement.operands[1], 4);
  instr.e = decoding.row(statement.operands[2], 4);
  const Type type = type_of(statement);
  if (type.floating()) return nullptr;
  const bool s = type.is_signed();
  constexpr auto least = [](auto a, auto b) { return a < b ? a : b; };
  constexpr auto most = [](auto a, auto b) { return a > b ? a : b; };
  if (statement.has("min")) return s ? reduce<int32_t, least> : reduce<uint32_t, least>;
  if (statement.has("max")) return s ? reduce<int32_t, most> : reduce<uint32_t, most>;
  if (statement.has("add")) return reduce<uint32_t, [](uint32_t a, uint32_t b) { return a + b; }>;
  if (statement.has("and")) return reduce<uint32_t, [](uint32_t a, uint32_t b) { return a & b; }>;
  if (statement.has("or")) return reduce<uint32_t, [](uint32_t a, uint32_t b) { return a | b; }>;
  return reduce<uint32_t, [](uint32_t a, uint32_t b) { return a ^ b; }>;
}

// The lanes that happen to be here.
Handler decode_activemask(const Statement& statement, Instr& instr, Decoding& decoding) {
  instr.d = decoding.target_row(statement.operands.at(0), 4);
  return [](Warp& warp, const Instr& in) {
    for_lanes<uint32_t>(warp, in.d, [&](int) { return warp.active; });
  };
}

// The first lane of the mask is the elected one.
Handler decode_elect(const Statement& statement, Instr& instr, Decoding& decoding) {
  expect_operands(statement, 2, 2);
  const Operand& result = statement.operands[0];
  instr.d = decoding.target_row(result.parts.at(0), 4);
  instr.p = decoding.target_predicate(result.parts.at(1));
  instr.e = decoding.row(statement.operands[1], 4);
  return [](Warp& warp, const Instr& in) {
    with_partners(warp, in.e, [&] {
      const int elected = first_lane(warp.active);
      for_lanes<uint32_t>(warp, in.d, [&](int) { return static_cast<uint32_t>(elected); });
      warp.set_predicate(in.p, 1u << elected);
    });
  };
}

const Opcode bar_warp{"bar.warp.sync", decode_warp_barrier};
const Opcode shfl{"shfl", decode_shuffle};
const Opcode vote{"vote", decode_vote};
const Opcode match_{"match", decode_match};
const Opcode redux{"redux", decode_reduce};
const Opcode activemask{"activemask", decode_activemask};
const Opcode elect{"elect", decode_elect};

}  // namespace
}  // namespace emulator
