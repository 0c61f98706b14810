// Liveness of registers and linear scan.
#include "allocate.h"

#include <algorithm>
#include <array>
#include <map>

namespace emulator {
namespace {

bool ends_block(const Statement& statement) {
  const std::string& name = statement.parts[0];
  return name == "bra" || name == "brx" || name == "exit" || name == "ret" || name == "trap";
}

// Whether the first operand is written and not read.
bool has_result(const Statement& statement) {
  const std::string& name = statement.parts[0];
  if (statement.operands.empty()) return false;
  if (name == "bar" || name == "barrier") return statement.has("red");
  return name != "st" && name != "wgmma" && name != "brx" && name != "nanosleep";
}

// Basic blocks: [begin, end) of statements, and where they go on.
struct Region {
  size_t begin, end;
  std::vector<size_t> successors;
  std::vector<uint64_t> live_in, defined, used;  // bits by register
};

class Liveness {
 public:
  explicit Liveness(const Function& function)
      : function_(function), words_((function.registers.size() + 63) / 64) {
    find_regions();
    for (Region& region : regions_) summarise(region);
    propagate();
    find_intervals();
  }

  // The first and the last statement at which each register lives; first > last: never.
  struct Interval {
    size_t first = SIZE_MAX, last = 0;
  };
  const std::vector<Interval>& intervals() const { return intervals_; }

 private:
  void find_regions() {
    const size_t count = function_.statements.size();
    std::vector<bool> begins(count + 1);
    begins[0] = true;
    for (size_t label : function_.labels) begins[label] = true;
    for (size_t i = 0; i < count; ++i) {
      if (ends_block(function_.statements[i])) begins[i + 1] = true;
    }
    std::vector<size_t> region_at(count + 1);
    for (size_t i = 0; i < count; ++i) {
      if (begins[i])
        regions_.push_back(Region{i,
                                  i,
                                  {},
                                  std::vector<uint64_t>(words_),
                                  std::vector<uint64_t>(words_),
                                  std::vector<uint64_t>(words_)});
      regions_.back().end = i + 1;
      region_at[i] = regions_.size() - 1;
    }
    for (size_t r = 0; r < regions_.size(); ++r) {
      const Statement& last = function_.statements[regions_[r].end - 1];
      const bool guarded = last.guard.kind != Operand::Kind::kSink;
      const auto add = [&](size_t statement) {
        if (statement < count) regions_[r].successors.push_back(region_at[statement]);
      };
      if (last.parts[0] == "bra") add(function_.labels[last.operands[0].number]);
      if (last.parts[0] == "brx") {
        for (size_t label : function_.labels) add(label);
      }
      if (!ends_block(last) || guarded) add(regions_[r].end);
    }
  }

  template <class Visit>
  static void visit_registers(const Operand& operand, Visit visit) {
    if (operand.kind == Operand::Kind::kRegister) visit(operand.number);
    for (const Operand& part : operand.parts) visit_registers(part, visit);
  }

  void summarise(Region& region) const {
    for (size_t i = region.begin; i < region.end; ++i) {
      const Statement& statement = function_.statements[i];
      const bool result = has_result(statement);
      const auto use = [&](int n) {
        if (!(region.defined[n / 64] >> n % 64 & 1)) region.used[n / 64] |= 1ull << n % 64;
      };
      for (size_t k = 0; k < statement.operands.size(); ++k) {
        const Operand& operand = statement.operands[k];
        if (k > 0 || !result || operand.kind == Operand::Kind::kAddress)
          visit_registers(operand, use);
      }
      if (!result || statement.operands[0].kind == Operand::Kind::kAddress) continue;
      const bool guarded = statement.guard.kind != Operand::Kind::kSink;
      visit_registers(statement.operands[0], [&](int n) {
        // With a guard, lanes may keep what the register had.
        if (guarded) {
          use(n);
        } else {
          region.defined[n / 64] |= 1ull << n % 64;
        }
      });
    }
    region.live_in = region.used;
  }

  void propagate() {
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t r = regions_.size(); r-- > 0;) {
        Region& region = regions_[r];
        for (size_t s : region.successors) {
          for (size_t w = 0; w < words_; ++w) {
            const uint64_t more = regions_[s].live_in[w] & ~region.defined[w] & ~region.live_in[w];
            region.live_in[w] |= more;
            changed |= more != 0;
          }
        }
      }
    }
  }

  void lives(int number, size_t statement) {
    Interval& interval = intervals_[number];
    interval.first = std::min(interval.first, statement);
    interval.last = std::max(interval.last, statement);
  }

  void find_intervals() {
    intervals_.resize(function_.registers.size());
    const auto all = [&](const std::vector<uint64_t>& bits, size_t statement) {
      for (size_t w = 0; w < words_; ++w) {
        for (uint64_t left = bits[w]; left; left &= left - 1)
          lives(static_cast<int>(64 * w) + __builtin_ctzll(left), statement);
      }
    };
    for (const Region& region : regions_) {
      all(region.live_in, region.begin);
      for (size_t s : region.successors) all(regions_[s].live_in, region.end - 1);
    }
    size_t wait = function_.statements.size();
    for (size_t i = function_.statements.size(); i-- > 0;) {
      const Statement& statement = function_.statements[i];
      const bool asynchronous = statement.parts[0] == "wgmma";
      if (asynchronous && statement.has("wait_group")) wait = i;
      for (const Operand& operand : statement.operands) {
        visit_registers(operand, [&](int n) {
          lives(n, i);
          if (asynchronous && wait < function_.statements.size()) lives(n, wait);
        });
      }
    }
  }

  const Function& function_;
  size_t words_;
  std::vector<Region> regions_;
  std::vector<Interval> intervals_;
};

}  // namespace

Allocation allocate(const Function& function, uint32_t first, bool share) {
  Allocation allocation;
  allocation.places.resize(function.registers.size());
  allocation.predicates = kSinkPredicate + 1;
  std::vector<int> order;
  for (size_t n = 0; n < function.registers.size(); ++n) {
    if (function.registers[n].bytes) {
      order.push_back(static_cast<int>(n));
    } else {
      allocation.places[n] = allocation.predicates++;
    }
  }
  const Liveness liveness(function);
  const auto& intervals = liveness.intervals();
  std::sort(order.begin(), order.end(),
            [&](int a, int b) { return intervals[a].first < intervals[b].first; });

  uint32_t end = first;
  std::map<int, std::multimap<size_t, uint32_t>> taken;  // by width: the last statement, the place
  for (int n : order) {
    if (intervals[n].first > intervals[n].last) continue;  // not mentioned
    const int bytes = function.registers[n].bytes;
    auto& rows = taken[bytes];
    uint32_t place;
    if (share && !rows.empty() && rows.begin()->first < intervals[n].first) {
      place = rows.begin()->second;
      rows.erase(rows.begin());
    } else {
      place = end;
      end += (bytes * kLanes + 63) / 64 * 64;
    }
    rows.emplace(intervals[n].last, place);
    allocation.places[n] = place;
  }
  allocation.bytes = end;
  return allocation;
}

}  // namespace emulator
