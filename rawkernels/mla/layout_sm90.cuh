// Shared memory of mla/decode_sm90.cu, and what its warps tell each other there.
#pragma once

#include "decoding/combine.cuh"
#include "mla/panels_sm90.cuh"
#include "mla/partial.cuh"
#include "mla/schedule.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"

namespace mla {

using T = Config::dtype;

constexpr int kRows = 64;        // of a tile: heads times query tokens
constexpr int kBlockKeys = 64;   // of a block
constexpr int kConsumers = 256;  // threads
constexpr int kProducers = 4;    // warps
// Of a block whose keys lie apart, which all of them share.
constexpr int kWarpKeys = kBlockKeys / kProducers;
constexpr int kQueue = 2;

// Who says that keys are there: of each panel the lane that asked TMA for it, beside its bytes; or
// the producing warps, each lane's copies by cp.async and one arrival each, of half of a buffer.
constexpr int kFullArrivals = Config::gather ? kProducers * 33 : 1;
// Partial results are float16, and thread blocks may merge them; where keys are gathered there are
// no registers for that.
constexpr bool kHalfParts = !Config::gather;

// Where 64 heads fill a tile, its queries and its result take as long as four blocks of keys.
using Schedule = PieceSchedule<kRows, kBlockKeys, 4, 6>;

// A split, as the producer finds it and consumers work on it.
struct Work {
  decoding::Split split;
  decoding::SplitPlace place;
  int blocks;  // -1: there are no more splits
};

struct Smem {
  unsigned char q[kPanels][kPanelBytes];
  // Blocks of keys, even ones and odd ones. When the scores of a block are computed, its rotated
  // panel gives place to its probabilities.
  unsigned char k[2][kPanels][kPanelBytes];
  float row_max[2][kRows];     // as raised by each consumer
  float row_sum[2][kRows];     // of each consumer's blocks
  tile::Range visible[kRows];  // the split's keys that each row sees
  // Which keys of a buffer exist, where they are gathered: a bit each.
  alignas(8) unsigned char exist[2][kBlockKeys / 8];
  Work queue[kQueue];
  bool merges;  // this thread block merges partial results
  ptx::Mbarrier full_k[2][kPanels];
  // The halves of a buffer are free: the left values, which the even consumer reads last, and the
  // right ones, which the odd one does.
  ptx::Mbarrier empty_first[2], empty_second[2];
  ptx::Mbarrier full_work[kQueue], empty_work[kQueue];
  // Q is there, where TMA loads it; both consumers have their last scores of the split.
  ptx::Mbarrier full_q, empty_q;
  float largest[2][kRows];  // of each consumer's |O|, where it becomes a partial result
};
static_assert(sizeof(Smem) <= Config::smem_bytes, "Config has to ask for all of it");

// Panel i of a buffer in the order in which they become free and are loaded, and how many of them
// the first half has: the left values, with the probabilities where the even consumer reads them.
// Where the same warps copy both halves, an odd block's right values come first: the even consumer
// is done with the left ones, and the probabilities, behind the scores of its next block.
__device__ __forceinline__ constexpr int panel_in_order(int buffer, int i) {
  if (Config::gather) return buffer == 0 || i == kRopePanel ? i : i ^ 4;
  return buffer == 0 || i < 4 ? i : i == 4 ? kRopePanel : i - 1;
}
__device__ __forceinline__ constexpr int first_panels(int buffer) {
  return buffer == 0 || Config::gather ? 4 : 5;
}
// Whether panel i in this order has a barrier of its own, which is that of those that follow too.
__device__ __forceinline__ constexpr bool says_full(int buffer, int i) {
  return !Config::gather || i == 0 || i == first_panels(buffer);
}

// Named barriers. Of a pair of a consumer that arrives and one that waits: 256 threads.
enum Barrier {
  kProbabilitiesEven = 1,  // consumer 0's are in shared memory, and its rows' maxima
  kProbabilitiesOdd,       // consumer 1's
  kBoth,                   // both consumers wait for each other
  kOwn,                    // and kOwn + 1: the warps of a consumer, 128 threads
  // Mbarriers are there: the warp that has made them arrives, the producing warps wait.
  kReady = kOwn + 2
};
constexpr int kReadyThreads = 32 * (kProducers + 1);

}  // namespace mla
