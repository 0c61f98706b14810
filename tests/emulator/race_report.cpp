// Races in shared memory: what is said of them.
#include "races.h"
#include "text.h"

namespace emulator {
namespace {

const char* verb(bool reads, bool updates) {
  return updates ? reads ? "updates" : "writes" : "reads";
}

// Where an instruction is; a wgmma has its accumulator's registers, of which a few are enough.
std::string shown(const Instr& instr) {
  constexpr size_t kMost = 120;
  std::string text = place(*instr.statement);
  const size_t line = std::min(text.find('\n'), text.size());
  if (line > kMost) text.replace(kMost, line - kMost, " …");
  return "\n  " + text;
}

}  // namespace

void RaceLog::add(uint32_t kind, uint32_t place, uint32_t before, const std::string& what) {
  constexpr size_t kMost = 12;
  if (!known.insert({kind, place, before}).second || known.size() > kMost) return;
  text += "\n" + what;
}

void ClusterRaces::wrong(Wrong what, const Shadow& where, uint32_t address, const Agent& agent,
                         Touch touch, const Touched& before) {
  const uint32_t before_place = before.place & ~Touched::kFlags;
  if (log->known.contains({static_cast<uint32_t>(what), agent.place, before_place})) return;
  std::string text = "shared address " + std::to_string(address) + " of ";
  for (const auto& block : blocks)
    if (&block->shadow == &where) text += names[block->begun_slot];
  const std::string now = names[agent.slots + agent.lane] + " " +
                          verb(touch != Touch::kWrite, touch != Touch::kRead) + " it" +
                          shown(log->code[agent.place]);
  if (what == Wrong::kUninitialised) {
    log->add(2, agent.place, before_place, text + " was never written: " + now);
    return;
  }
  uint32_t lane = static_cast<uint32_t>(__builtin_ctz(before.lanes));
  for (uint32_t lanes = before.lanes; lanes; lanes &= lanes - 1) {
    const auto one = static_cast<uint32_t>(__builtin_ctz(lanes));
    const uint32_t slot = before.slots + one;
    if (what == Wrong::kUnordered ? !agent.knows(slot, before.clock)
                                  : !agent.has_fenced(slot, before.clock)) {
      lane = one;
      break;
    }
  }
  const std::string earlier = names[before.slots + lane] + " " +
                              verb(false, before.is(Touched::kUpdates)) + " it, too" +
                              shown(log->code[before_place]);
  log->add(static_cast<uint32_t>(what), agent.place, before_place,
           text +
               (what == Wrong::kUnordered
                    ? ": a race: "
                    : ": no fence.proxy.async between these, of which one is asynchronous: ") +
               now + "\n " + earlier);
}

}  // namespace emulator
