// The parts of the emulated GPU: instructions as they are decoded, lanes and warps, blocks and
// clusters, and what a handler of an instruction may ask of them.
//
// A launch runs in one thread of the host. Each instruction is decoded once into an Instr, whose
// handler then runs it for all lanes of a warp that are active. Lanes have program counters of
// their own: lanes at the same place form a group, and of a warp's groups the one with the
// smallest program counter goes first, so that structured code comes together again.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace emulator {

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

struct Instr;
struct Warp;
struct Block;
struct Launch;
class Decoding;
struct WarpRaces;
struct ClusterRaces;
struct Knowledge;

using Handler = void (*)(Warp&, const Instr&);

// ---------------------------------------------------------------------------------------------
// Addresses. Global, constant and parameter addresses are the host's own. A shared address has 32
// bits: the offset in the block's shared memory in the lower 24, and above them 0 for the own block
// or else the rank in the cluster plus one, which mapa makes and, in a launch of clusters, the name
// of a variable. A generic address of shared memory is kSharedWindow + the shared address; one of
// local memory is kLocalWindow + the offset.

constexpr uint64_t kSharedWindow = 0x1000'0000'0000'0000u;
constexpr uint64_t kLocalWindow = 0x2000'0000'0000'0000u;
constexpr uint64_t kWindowMask = 0xf000'0000'0000'0000u;
constexpr int kRankShift = 24;
// The first byte of a block's variables: what lies below is not mapped, so that a null pointer
// fails, and 1024 is the largest alignment that TMA's swizzles need.
constexpr uint32_t kSharedBase = 1024;

enum class Space : uint8_t { kGeneric, kGlobal, kShared, kLocal, kConst, kParam };

// ---------------------------------------------------------------------------------------------
// Registers. A row is a register of 1, 2, 4, 8 or 16 bytes in all 32 lanes: an array T[32]. A
// predicate register is one mask of 32 bits.

// Where a row lies: in the warp's registers, or among the module's constants (immediates, copied to
// all lanes). Handlers turn it into a pointer by Warp::row.
struct Row {
  uint32_t bits = 0;  // bit 31: a constant; below: the offset in bytes
};

// A predicate register as an operand, with the `!` before it.
struct Predicate {
  uint32_t index = 0;  // register 0 is true in all lanes
  uint32_t flip = 0;   // kAllLanes with `!`
};

// ---------------------------------------------------------------------------------------------
// Text. What parse.cpp makes of a statement.

struct Operand {
  enum class Kind : uint8_t {
    kRegister,   // %r1; `bytes` is its width
    kPredicate,  // %p1, or !%p1 with `negated`
    kImmediate,  // 16, -1, 0x10, 0f3F800000, 0d…: `immediate`, `literal`
    kVector,     // {a, b, c}: `parts`
    kAddress,    // [base+immediate, …]: parts[0] is the base, parts[1…] what follows the commas
    kPair,       // a|b: parts[0] and parts[1]
    kSymbol,     // a variable, whose address is meant: `text`
    kLabel,      // a place in the code: `text`
    kSpecial,    // %tid.x: `text`
    kSink,       // _
  };
  enum class Literal : uint8_t { kInteger, kFloat32, kFloat64 };

  Kind kind = Kind::kSink;
  bool negated = false;
  Literal literal = Literal::kInteger;
  int bytes = 0;           // of a register: 1, 2, 4, 8 or 16
  int number = -1;         // of a register or predicate: its number in the function
  uint64_t immediate = 0;  // the bits; of an address: the offset, as a signed number
  std::vector<Operand> parts;
  std::string text;
};

struct Statement {
  std::string opcode;              // "ld.global.v2.f32"
  std::vector<std::string> parts;  // {"ld", "global", "v2", "f32"}
  Operand guard;                   // a predicate, or kSink
  std::vector<Operand> operands;
  int line = 0;                         // in the PTX text
  const std::string* source = nullptr;  // the file that .loc names, if any
  int source_line = 0;
  uint64_t used_bytes = ~uint64_t{0};  // of a load: those whose values are used, as a .pragma says

  // Whether one of the parts after the first is `modifier`.
  bool has(std::string_view modifier) const;
};

// ---------------------------------------------------------------------------------------------
// Decoded instructions.

struct Instr {
  Handler run = nullptr;
  Predicate guard;
  // What follows is the handler's own to fill and to read.
  Row d, a, b, c, e;
  Predicate p, q, r;
  int64_t imm = 0;
  uint32_t n = 0;
  uint32_t flags = 0;
  const Row* rows = nullptr;      // as many as the handler knows: see Decoding::keep
  const void* detail = nullptr;   // a struct of the handler's own: see Decoding::keep
  const Instr* target = nullptr;  // of a branch
  const Statement* statement = nullptr;
};

// What a decoder sees of the module. Decoders throw std::runtime_error with what they do not know;
// the caller adds the line.
class Decoding {
 public:
  virtual ~Decoding() = default;
  // The row of a register, or a constant row of an immediate, a symbol's address or a special
  // register, with elements of `bytes` bytes. A register has to be of that width.
  virtual Row row(const Operand& operand, int bytes) = 0;
  // The same for a register of another width than the instruction's type, which ld, st and cvt
  // allow: operand.bytes says which.
  virtual Row any_row(const Operand& operand) = 0;
  // A row to write to. `_` gives a row that nobody reads.
  virtual Row target_row(const Operand& operand, int bytes) = 0;
  // A predicate to read or to write to (`_`: one that nobody reads).
  virtual Predicate predicate(const Operand& operand) = 0;
  virtual Predicate target_predicate(const Operand& operand) = 0;
  // The base of [base+offset] as a row of 4 or 8 bytes (`bytes` says which), and the offset.
  struct Address {
    Row base;
    int bytes;
    int64_t offset;
  };
  virtual Address address(const Operand& operand) = 0;
  // Where the variable lies that an operand, or an address's base, names; kGeneric: no variable.
  virtual Space space_of(const Operand& operand) = 0;
  virtual const Instr* label(const Operand& operand) = 0;
  // The value of an immediate.
  virtual int64_t integer(const Operand& operand) = 0;
  // Memory that lives as long as the module: for Instr::rows and Instr::detail.
  virtual const Row* keep(const std::vector<Row>& rows) = 0;
  template <class T>
  T* keep(T value) {
    auto held = std::make_shared<T>(std::move(value));
    hold(held);
    return held.get();
  }

 private:
  virtual void hold(std::shared_ptr<void> memory) = 0;
};

// Reads a statement, fills `instr` (all but run, guard and statement) and returns the handler.
using Decoder = Handler (*)(const Statement& statement, Instr& instr, Decoding& decoding);

// Registers a decoder for all opcodes that begin with `name`, parts taken whole: "cp.async.bulk"
// before "cp.async" before "cp". As a static object:
//   static const Opcode mma{"mma", decode_mma};
struct Opcode {
  Opcode(std::string name, Decoder decoder);
};

// ---------------------------------------------------------------------------------------------
// Execution.

// What a launch throws. The launch adds kernel, block, warp and the instruction's line.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// When a group of lanes that does not run now may run again.
enum class Turn : uint8_t { kNow, kNextSlice, kAfterNextSlice };

// Lanes of a warp that are at the same place.
struct Group {
  uint32_t lanes = 0;
  const Instr* next = nullptr;
  const char* waits_for = nullptr;  // why the last try to go on did not succeed
  Turn turn = Turn::kNow;
};

struct Warp {
  // The group that runs now, and where the next event is (another group to join, or at once).
  const Instr* next = nullptr;
  const Instr* event = nullptr;
  uint32_t group = 0;   // its lanes
  uint32_t active = 0;  // those for which the instruction's guard holds: handlers write no others
  const char* waits_for = nullptr;
  bool stays = false;    // the handler asked for wait()
  bool yielded = false;  // the slice ends here

  std::array<uint8_t*, 2> base{};  // the warp's registers, the module's constants
  uint32_t* predicates = nullptr;
  Block* block = nullptr;
  int index = 0;             // in the block
  uint32_t alive = 0;        // lanes that have not exited
  uint8_t* local = nullptr;  // local memory: each lane's bytes in turn
  uint32_t local_bytes = 0;  // of a lane
  std::vector<Group> others;
  uint32_t carry = 0;               // of add.cc and the like
  uint32_t registers = 0;           // of a thread, as setmaxnreg left them; 0: as at launch
  bool at_barrier = false;          // arrived at a bar.sync whose phase is not complete,
  uint32_t barrier_generation = 0;  // which is this one
  std::shared_ptr<void> async;      // what asynchronous instructions keep for this warp
  WarpRaces* races = nullptr;       // of a launch that looks for races (races.h)

  template <class T>
  T* row(Row row) const {
    return reinterpret_cast<T*>(base[row.bits >> 31] + (row.bits & 0x7fffffffu));
  }
  uint32_t predicate(Predicate p) const { return predicates[p.index] ^ p.flip; }
  // Writes the active lanes' bits.
  void set_predicate(Predicate p, uint32_t value) {
    uint32_t& to = predicates[p.index];
    to = (to & ~active) | ((value ^ p.flip) & active);
  }

  // The active lanes try this instruction again later; the handler returns at once afterwards. They
  // wait for other lanes, warps or asynchronous work: if nobody can go on, the launch fails with
  // `why` (a literal, such as "an mbarrier").
  void wait(const char* why) {
    stays = true;
    waits_for = why;
    event = nullptr;
  }
  // Whether all lanes that have not exited are here. Handlers of .aligned instructions begin with
  //   if (!warp.converged()) return warp.wait("the warp's other lanes");
  bool converged() const { return active == alive; }
  // The other warps go first.
  void yield() {
    yielded = true;
    event = nullptr;
  }

  // Host memory of a shared address (of the own block or of the cluster), checked against the size
  // of shared memory and for alignment to `alignment` bytes.
  uint8_t* shared(uint32_t address, size_t bytes, size_t alignment);
  // Host memory of a global address: checked against the known ranges, if there are any.
  uint8_t* global(uint64_t address, size_t bytes, size_t alignment);
  // Host memory of a generic address, in any window.
  uint8_t* generic(uint64_t address, size_t bytes, size_t alignment, int lane);
  uint8_t* local_memory(uint32_t offset, size_t bytes, size_t alignment, int lane);
};

// Fails with a text; `lane` -1 where no single lane is meant.
[[noreturn]] void fail(const std::string& text, int lane = -1);

// A named barrier of a block.
struct Barrier {
  uint32_t arrived = 0;     // threads, in whole warps
  uint32_t expected = 0;    // threads; 0: all that have not exited
  uint32_t generation = 0;  // completed phases
  uint32_t reduction_and = 1, reduction_or = 0, reduction_count = 0;
  uint32_t last_and = 0, last_or = 0, last_count = 0;  // of the phase before
  std::shared_ptr<Knowledge> phase;                    // of those that arrived (races.h)
};

struct Cluster {
  std::vector<Block*> blocks;       // by rank
  bool met = false;                 // in a phase of its barrier: all blocks have begun
  std::array<uint32_t, 3> first{};  // ctaid of rank 0
  std::shared_ptr<void> async;      // what cluster instructions keep
  std::shared_ptr<ClusterRaces> races;
};

struct Block {
  Launch* launch = nullptr;
  Cluster* cluster = nullptr;
  uint32_t rank = 0;  // in the cluster
  std::array<uint32_t, 3> index{};
  std::vector<uint8_t> shared;  // its bytes from address 0 on
  std::vector<std::unique_ptr<Warp>> warps;
  std::array<Barrier, 16> barriers;
  uint32_t live_warps = 0;
  uint32_t free_registers = 0;  // which setmaxnreg gave back: of a thread, summed over warps
  std::shared_ptr<void> async;  // what asynchronous instructions keep for this block
};

struct Launch {
  std::array<uint32_t, 3> grid{}, block{}, cluster{1, 1, 1};
  uint32_t multiprocessors = 1;
  bool late = false;  // asynchronous work happens as late as waits allow, instead of at once
  uint64_t seed = 0;
  std::mt19937_64 random;
  uint64_t instructions = 0;  // of warps, so far
  uint64_t limit = 0;         // of instructions; 0: none

  // Work that runs when no warp can go on, in an order that the seed chooses. Each entry returns
  // nothing and runs once. With `late` this is where copies go that no instruction waits for by
  // name, such as those that complete an mbarrier.
  std::vector<std::function<void()>> deferred;
};

}  // namespace emulator
