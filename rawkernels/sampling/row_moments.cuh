// Sums over a row whose rounding does not depend on the cluster, and the one for typical-p: the
// mean logit of a row by its probabilities. |-log p - entropy| is the distance from it, over
// temperature.
#pragma once

#include "sampling/tiles.cuh"

// Sums that decide are taken over these segments whatever the cluster, so that their rounding does
// not depend on it. Sums of bins do, and decide only what is clear by more than kTolerance.
constexpr int kSegments = 8;
constexpr int kOwnSegments = kSegments / Config::cluster;
constexpr int kSumWarps = 8;  // that sum a segment together, whatever Config::threads is
constexpr int kSumTokens =
    16;  // of a thread's tile, whatever Config::unroll is: it decides how sums round
static_assert(kSegments % Config::cluster == 0, "every block must own whole segments");
static_assert(kWarps % kSumWarps == 0, "every segment must have a whole team of warps");

// A row's largest logit, the sum of its probabilities relative to that one, and the sum of their
// products with the logits' distances from it.
struct RowMoments {
  float high, sum, moment;

  __device__ __forceinline__ float mean() const { return high + moment * ptx::rcp(sum); }
};

struct JoinMoments {
  float slope;

  __device__ __forceinline__ RowMoments operator()(RowMoments a, RowMoments b) const {
    const float high = fmaxf(a.high, b.high);
    const auto about = [&](RowMoments m) -> RowMoments {
      const float below = fmaxf(m.high - high, -kMaxFloat);
      const float sum = m.sum * ptx::ex2(below * slope);
      return {high, sum, fmaf(sum, below, m.moment * ptx::ex2(below * slope))};
    };
    a = about(a);
    b = about(b);
    return {high, a.sum + b.sum, a.moment + b.moment};
  }
};

__device__ __forceinline__ RowMoments shuffle_xor(RowMoments value, int lanes) {
  return {shuffle_xor(value.high, lanes), shuffle_xor(value.sum, lanes),
          shuffle_xor(value.moment, lanes)};
}

// Two neighbouring tokens' logits as they lie in memory, in as few registers.
struct HalfPair {
  unsigned bits;

  __device__ __forceinline__ HalfPair() {}
  __device__ __forceinline__ explicit HalfPair(__half2 x)
      : bits(reinterpret_cast<const unsigned&>(x)) {}
  __device__ __forceinline__ HalfPair(__half x, __half y) : HalfPair(__halves2half2(x, y)) {}
  __device__ __forceinline__ __half2 both() const { return reinterpret_cast<const __half2&>(bits); }
  __device__ __forceinline__ float first() const { return __low2float(both()); }
  __device__ __forceinline__ float second() const { return __high2float(both()); }
  __device__ __forceinline__ HalfPair larger(HalfPair other) const {
    return HalfPair(__hmax2(both(), other.both()));
  }
};
struct Bfloat16Pair {
  unsigned bits;

  __device__ __forceinline__ Bfloat16Pair() {}
  __device__ __forceinline__ explicit Bfloat16Pair(__nv_bfloat162 x)
      : bits(reinterpret_cast<const unsigned&>(x)) {}
  __device__ __forceinline__ Bfloat16Pair(__nv_bfloat16 x, __nv_bfloat16 y)
      : Bfloat16Pair(__halves2bfloat162(x, y)) {}
  __device__ __forceinline__ __nv_bfloat162 both() const {
    return reinterpret_cast<const __nv_bfloat162&>(bits);
  }
  __device__ __forceinline__ float first() const { return __uint_as_float(bits << 16); }
  __device__ __forceinline__ float second() const { return __uint_as_float(bits & 0xffff0000); }
  __device__ __forceinline__ Bfloat16Pair larger(Bfloat16Pair other) const {
    return Bfloat16Pair(__hmax2(both(), other.both()));
  }
};
struct alignas(8) FloatPair {
  float x, y;

  __device__ __forceinline__ FloatPair() {}
  __device__ __forceinline__ FloatPair(float x, float y) : x(x), y(y) {}
  __device__ __forceinline__ float first() const { return x; }
  __device__ __forceinline__ float second() const { return y; }
  __device__ __forceinline__ FloatPair larger(FloatPair other) const {
    return {fmaxf(x, other.x), fmaxf(y, other.y)};
  }
};
__device__ HalfPair pair_of(__half);
__device__ Bfloat16Pair pair_of(__nv_bfloat16);
__device__ FloatPair pair_of(float);
using LogitPair = decltype(pair_of(Config::dtype()));

// The tiles of one of kSumWarps warps in a segment: a lane has kPairs pairs of tokens of each.
// Which ones, and so how sums round, does not depend on where the row begins in memory.
struct MomentTiles {
  static constexpr int kPairs = 32 / sizeof(Config::dtype);  // of a lane
  static constexpr int kTokens = 64 * kPairs;
  using Pairs = LogitPair[kPairs];

  Segment segment;
  int base;

  __device__ __forceinline__ explicit MomentTiles(Segment segment)
      : segment(segment), base(segment.begin + int(threadIdx.x / 32) % kSumWarps * kTokens) {}

  // Goes on to the next tile; false where there is none.
  __device__ __forceinline__ bool next() {
    base += kSumWarps * kTokens;
    return base < segment.end;
  }
  // Loads the tile; -inf beyond the segment's end.
  __device__ __forceinline__ void load(const Config::dtype* row, Pairs& pairs) const {
    const int first = base + int(threadIdx.x) % 32 * 2;
    const bool aligned = reinterpret_cast<unsigned long long>(row) % sizeof(LogitPair) == 0;
    if (aligned && base + kTokens <= segment.end) {
#pragma unroll
      for (int j = 0; j < kPairs; ++j)
        pairs[j] = *reinterpret_cast<const LogitPair*>(row + first + 64 * j);
    } else {
      const auto logit = [&](int i) {
        return i < segment.end ? row[i] : Config::dtype(-kInfinity);
      };
#pragma unroll
      for (int j = 0; j < kPairs; ++j)
        pairs[j] = LogitPair(logit(first + 64 * j), logit(first + 64 * j + 1));
    }
  }
};

// A lane's share of the sums, relative to a logit that is moved only where another has more than
// 2^kMostAbove times its probability: what is asked of each token is then little.
struct LaneMoments {
  static constexpr float kMostAbove = 64.0f;

  float high = -kMaxFloat, reference = -kInfinity, sum = 0.0f, moment = 0.0f;

  __device__ __forceinline__ void add(const MomentTiles::Pairs& pairs, float slope) {
    LogitPair largest = pairs[0];
#pragma unroll
    for (int j = 1; j < MomentTiles::kPairs; ++j) largest = largest.larger(pairs[j]);
    const float most = fmaxf(largest.first(), largest.second());
    high = fmaxf(high, most);
    if (!((most - reference) * slope <= kMostAbove)) move(fmaxf(most, -kMaxFloat), slope);
#pragma unroll
    for (int j = 0; j < MomentTiles::kPairs; ++j)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float x = n == 0 ? pairs[j].first() : pairs[j].second();
        const float below = fmaxf(x - reference, -kMaxFloat);
        const float p = ptx::ex2(below * slope);
        sum += p;
        moment = fmaf(p, below, moment);
      }
  }

  // The sums of all lanes, relative to the largest logit.
  __device__ __forceinline__ RowMoments of_warp(float slope) {
    high = largest_of_warp(high);
    move(high, slope);
    return {high, reduce_warp(sum, Add()), reduce_warp(moment, Add())};
  }

 private:
  __device__ __forceinline__ void move(float to, float slope) {
    const float distance = fmaxf(reference - to, -kMaxFloat);
    const float factor = ptx::ex2(distance * slope);
    sum *= factor;
    moment = fmaf(sum, distance, moment * factor);
    reference = to;
  }
};

// Reads a row for its moments, in an order that does not depend on the cluster; each tile is loaded
// while the one before it is added, be it of the same segment or of the next. Contains the wait of
// the kernel's first cluster barrier.
__device__ __forceinline__ RowMoments moments_of_row(const Row& logits, int vocab, float slope,
                                                     RowMoments* sums) {
  constexpr int kTeams = kWarps / kSumWarps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kSumWarps;
  const int first = rank_in_cluster() * kOwnSegments, end = first + kOwnSegments;
  int number = first + threadIdx.x / 32 / kSumWarps;
  const auto tiles_of = [&](int number) {
    return MomentTiles(part_of_row<kGroup, kSegments>(vocab, number));
  };
  wait_cluster();
  MomentTiles tiles = tiles_of(number);
  MomentTiles::Pairs ahead;
  tiles.load(logits.logits, ahead);
  LaneMoments own;
#pragma unroll 1
  while (number < end) {
    MomentTiles::Pairs pairs;
#pragma unroll
    for (int j = 0; j < MomentTiles::kPairs; ++j) pairs[j] = ahead[j];
    const int current = number;
    if (!tiles.next()) {
      number += kTeams;
      tiles = tiles_of(number);
    }
    if (number < end) tiles.load(logits.logits, ahead);
    own.add(pairs, slope);
    if (number == current) continue;
    const RowMoments sum = own.of_warp(slope);
    if (lane < Config::cluster) *of_rank(&sums[current * kSumWarps + warp], lane) = sum;
    own = LaneMoments();
  }
  sync_cluster();
  RowMoments sum = {-kMaxFloat, 0.0f, 0.0f};
  const JoinMoments join = {slope};
  for (int slot = lane; slot < kSegments * kSumWarps; slot += 32) sum = join(sum, sums[slot]);
  return reduce_warp(sum, join);
}
