// How the mass of a row lies: guessed from a survey, tallied in bins while the row is read, and
// summed where that leaves a doubt.
#pragma once

#include "sampling/listing.cuh"
#include "sampling/race.cuh"

// Sums that decide are taken by segment, whatever the cluster, so that it does not matter to their
// rounding. Those of bins are not, and decide only what they leave no doubt of.
constexpr int kSegments = 8;
constexpr float kDoubt = 1e-4f;  // of a row's mass, more than rounding can amount to
constexpr int kOwnSegments = kSegments / Config::cluster;
constexpr int kSumWarps = 8;  // that take a segment together, whatever Config::threads is
constexpr int kMassBins = Config::mass_bins;
constexpr int kSurveyBins = 256;
constexpr float kSurveyBin = 24.0f / kSurveyBins;  // of log2 of a mass
constexpr float kMassUnit = 0x1p19f;  // of the survey's sums, so that all of it comes to 2^31
constexpr float kWanted = 32.0f;      // tokens on a list, about; more for hard filters
static_assert(kSegments % Config::cluster == 0 && kWarps % kSumWarps == 0, "work is even");
static_assert(kMassBins <= 32, "one for each lane");

constexpr Key kLowest = 0x00800000ull << 32;  // below those of all finite logits

// What is asked of a row, and what is known of it or guessed.
struct Raced {
  float temperature, top_p, min_p;
  float ref, slope;            // the mass of a logit is 2^((logit - ref) slope)
  float bin_scale, bin_shift;  // from log2 of a mass to its bin
  float chance;                // a token is listed if E < mass * chance,
  float least;                 // its logit is at least this
  Key out;                     // and its key above this one
  bool sparse;                 // min-p keeps a token of one quad in sixteen at most
  bool surveyed;               // all this is from the survey, not yet from the row itself

  __device__ __forceinline__ bool has_nucleus() const { return top_p < 1.0f; }

  __device__ __forceinline__ float log_mass(float x) const { return (x - ref) * slope; }

  __device__ __forceinline__ float mass(float x) const { return ptx::ex2(log_mass(x)); }

  // 2^23 + the bin.
  __device__ __forceinline__ float bin(float log_mass) const {
    return fmaf(__saturatef(fmaf(log_mass, bin_scale, bin_shift)), kMassBins - 1.0f, 0x1p23f);
  }
};

extern __shared__ __align__(16) float own_bins[][Config::threads];  // each thread's

struct RacedSmem {
  Raced row;
  unsigned survey[kSurveyBins];
  float bins[Config::cluster][kMassBins];
  float2 sums[kSegments][kSumWarps];
  float highs[Config::cluster][kWarps], in_bin[Config::cluster][kWarps];
  uint2 surveyed[kWarps];
  float survey_high[kWarps];
  float before[kMassBins], in[kMassBins], total;
  RaceSmem race;
  Key first;  // of the tokens in question
};

__device__ __forceinline__ Segment segment_of(int vocab, int number) {
  const int groups = (vocab + kGroup - 1) / kGroup;
  const int part = (groups + kSegments - 1) / kSegments * kGroup;
  const int begin = min(number * part, vocab);
  return {begin, min(begin + part, vocab)};
}

__device__ __forceinline__ float2 operator+(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }

__device__ __forceinline__ float2 shuffle_xor(float2 value, int lanes) {
  return {shuffle_xor(value.x, lanes), shuffle_xor(value.y, lanes)};
}

// The logit below which min-p keeps none, or somewhat less.
__device__ __forceinline__ float least_logit(float high, float slope, float min_p) {
  const float reach = ptx::lg2(min_p) / slope;  // 0 or less
  return high + reach - fmaf(fabsf(high), 1e-6f, fabsf(reach) * 1e-6f);
}

// Spreads the bins over where the nucleus may end, by the surveyed masses and the sum of their
// squares. By one warp.
__device__ __forceinline__ void place_bins(Raced& row, float squares, const RacedSmem& smem) {
  constexpr int kMine = kSurveyBins / 32;
  const int lane = threadIdx.x;
  unsigned mine[kMine], own = 0;
#pragma unroll
  for (int b = 0; b < kMine; ++b) own += mine[b] = smem.survey[lane * kMine + b];
  float sum = float(own);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float left = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += left;
  }
  const float total = __shfl_sync(0xffffffffu, sum, 31), mass = total / kMassUnit;
  sum -= float(own);
  // The nucleus ends where the survey's does, give or take four standard deviations.
  const float error = 4.0f * sqrtf(row.top_p * (1.0f - row.top_p) * squares) / mass;
  const float upper = (row.top_p - error) * total;
  const float lower = fminf(row.top_p + error, 1.0f - 0.125f * (1.0f - row.top_p)) * total;
  int first = 0, last = 1;  // bins before the two
#pragma unroll
  for (int b = 0; b < kMine; ++b) {
    sum += float(mine[b]);
    first += sum < upper;
    last += sum < lower;
  }
  first = __reduce_add_sync(0xffffffffu, first);
  last = __reduce_add_sync(0xffffffffu, last) - 31;
  const bool few = mass * mass < 50.0f * squares;
  const float top = few || first == 0 ? 8.0f : first * -kSurveyBin;
  const float step = (top + last * kSurveyBin) / (kMassBins - 2);
  row.bin_scale = -1.0f / (step * (kMassBins - 1));
  row.bin_shift = (top / step + 0.5f) / (kMassBins - 1);
}

// Guesses from a part of the row how it will be.
template <class Meanwhile>
__device__ __forceinline__ void survey_masses(const Row& logits, int vocab, float temperature,
                                              float top_p, float min_p, RacedSmem& smem,
                                              Meanwhile meanwhile) {
  float x[kSurveyTile];
  read_survey(logits, vocab, x);
  meanwhile();
  for (int b = threadIdx.x; b < kSurveyBins; b += Config::threads) smem.survey[b] = 0;
  float high = -kInfinity;
#pragma unroll
  for (int j = 0; j < kSurveyTile; ++j) high = fmaxf(high, x[j]);
  high = largest_of_warp(high);
  if (threadIdx.x % 32 == 0) smem.survey_high[threadIdx.x / 32] = high;
  __syncthreads();
  high = largest_of_warp(smem.survey_high[threadIdx.x % kWarps]);

  Raced row;
  row.temperature = temperature;
  row.top_p = top_p;
  row.min_p = min_p;
  row.slope = log2_per_logit(temperature);
  row.ref = fabsf(high) < kInfinity ? high : 0.0f;
  row.out = kLowest;
  row.least = least_logit(row.ref, row.slope, min_p);
  row.surveyed = true;
  float kept = 0.0f, squares = 0.0f;  // sums of masses, which are 1 at most
#pragma unroll
  for (int j = 0; j < kSurveyTile; ++j) {
    const float log_mass = row.log_mass(x[j]);
    const float mass = ptx::ex2(log_mass);
    if (x[j] >= row.least) kept += mass;
    squares = fmaf(mass, mass, squares);
    if (top_p < 1.0f && x[j] > -kInfinity) {
      const int bin = min(int(log_mass * (-1.0f / kSurveyBin)), kSurveyBins - 1);
      atomicAdd(&smem.survey[max(bin, 0)], __float2uint_rn(mass * kMassUnit));
    }
  }
  uint2 sums = {__reduce_add_sync(0xffffffffu, __float2uint_rn(kept * kMassUnit)),
                __reduce_add_sync(0xffffffffu, __float2uint_rn(squares * kMassUnit))};
  if (threadIdx.x % 32 == 0) smem.surveyed[threadIdx.x / 32] = sums;
  const float top = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  row.sparse = __syncthreads_count(top >= row.least) <= Config::threads / 16;
  if (threadIdx.x < 32) {
    if (threadIdx.x >= kWarps) sums = {0, 0};
    if (threadIdx.x < kWarps) sums = smem.surveyed[threadIdx.x];
    kept = float(__reduce_add_sync(0xffffffffu, sums.x)) / kMassUnit;
    squares = float(__reduce_add_sync(0xffffffffu, sums.y)) / kMassUnit;
    // One token of the survey stands for several, but hardly the largest.
    const float each = fmaxf(1.0f, float(vocab) / kSurvey);
    // Of what is listed, min-p keeps little where the row is far above its survey.
    const float more = min_p == 0.0f ? 1.0f : row.sparse ? 2.0f : 1.5f;
    const float wanted = kWanted * more / fmaxf(top_p, 0.25f);
    row.chance = wanted / fmaxf(fmaf(kept - 1.0f, each, 1.0f), 1.0f);
    row.bin_scale = row.bin_shift = 0.0f;
    if (top_p < 1.0f) place_bins(row, squares, smem);
    if (threadIdx.x == 0) {
      smem.row = row;
      smem.total = 0.0f;
    }
  }
  __syncthreads();
}

// Whether min-p keeps a logit.
__device__ __forceinline__ bool keeps(const Raced& row, float x, float high) {
  if (row.min_p == 0.0f) return true;
  const float log_share = (x - high) * row.slope;
  const float gap = log_share - ptx::lg2(row.min_p);
  if (log_share > -126.0f && fabsf(gap) > 1e-4f) return gap > 0.0f;
  return (double(x) - double(high)) / double(row.temperature) >= log(double(row.min_p));
}

// The mass of the tokens whose keys are above `key`, and of all.
__device__ __forceinline__ float2 mass_above(const Row& logits, int vocab, Key key,
                                             RacedSmem& smem) {
  const Raced row = smem.row;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kSumWarps;
  const float bound = key_score(key);
  const int index = key_index(key);
  constexpr int kTokens = 16;  // whatever Config::unroll is: it decides how sums round
  constexpr int kTeams = kWarps / kSumWarps;
  sync_cluster();  // what was summed before is no longer looked at
  const int first = rank_in_cluster() * kOwnSegments;
#pragma unroll 1
  for (int own = threadIdx.x / 32 / kSumWarps; own < kOwnSegments; own += kTeams) {
    const int number = first + own;
    float2 sum = {0.0f, 0.0f};
    for (Tiles<kTokens, kSumWarps> tiles(logits, segment_of(vocab, number)); tiles.any();
         tiles.next()) {
      float x[kTokens];
      tiles.load(x);
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        const float mass = x[j] > -kInfinity ? row.mass(x[j]) : 0.0f;
        const bool before =
            (x[j] > bound) | ((x[j] == bound) & (tile_index(tiles.base, j) < index));
        sum.x += before ? mass : 0.0f;
        sum.y += mass;
      }
    }
    sum = reduce_warp(sum, Add());
    if (lane < Config::cluster) *of_rank(&smem.sums[number][warp], lane) = sum;
  }
  sync_cluster();
  float2 sum = {0.0f, 0.0f};
  for (int slot = lane; slot < kSegments * kSumWarps; slot += 32)
    sum = sum + (&smem.sums[0][0])[slot];
  return reduce_warp(sum, Add());
}

// What bins hold, and what those above hold.
__device__ __forceinline__ void add_up_bins(RacedSmem& smem) {
  if (threadIdx.x < 32) {
    const int bin = threadIdx.x;
    float in = 0.0f;
    if (bin < kMassBins) {
#pragma unroll
      for (int rank = 0; rank < Config::cluster; ++rank) in += smem.bins[rank][bin];
    }
    float sum = in;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float left = __shfl_up_sync(0xffffffffu, sum, step);
      if (bin >= step) sum += left;
    }
    const float above = __shfl_up_sync(0xffffffffu, sum, 1);
    if (bin < kMassBins) {
      smem.in[bin] = in;
      smem.before[bin] = bin == 0 ? 0.0f : above;
    }
    if (bin == 31) smem.total = sum;
  }
  __syncthreads();
}

// By the bins, the mass of the tokens that rank before one: at least, at most.
__device__ __forceinline__ float2 mass_before(Key token, const RacedSmem& smem) {
  const float log_mass = smem.row.log_mass(key_score(token));
  const int bin = __float_as_uint(smem.row.bin(log_mass)) & 0xff;
  const float before = smem.before[bin];
  return {before, before + (smem.in[bin] - ptx::ex2(log_mass))};
}

// Whether the nucleus is known to end before a token, or not to.
__device__ __forceinline__ bool out_of_nucleus(Key token, const RacedSmem& smem) {
  if (!smem.row.has_nucleus() || !smem.row.surveyed) return false;
  const double end = double(smem.row.top_p) * smem.total;
  return mass_before(token, smem).x > end + kDoubt * smem.total;
}

__device__ __forceinline__ bool in_nucleus(Key token, const RacedSmem& smem) {
  if (!smem.row.has_nucleus() || !smem.row.surveyed) return !smem.row.has_nucleus();
  const double end = double(smem.row.top_p) * smem.total;
  return mass_before(token, smem).y < end - kDoubt * smem.total;
}

// The mass of the tokens of one's bin that rank before it.
__device__ __forceinline__ float mass_in_bin_before(const Row& logits, int vocab, Key token,
                                                    RacedSmem& smem) {
  const Raced row = smem.row;
  const float bound = key_score(token);
  const int index = key_index(token);
  const float bin = row.bin(row.log_mass(bound));
  constexpr int kTokens = 32;  // as many as there are registers for
  float sum = 0.0f;
  const Tiles<kTokens> tiles(logits, own_segment(vocab));
  float ahead[kTokens];
  tiles.load_ahead(ahead);
  for_each_tile(tiles, ahead, [&](int base, const float (&x)[kTokens]) {
#pragma unroll
    for (int first = 0; first < kTokens; first += 4) {
      if (fmaxf(fmaxf(x[first], x[first + 1]), fmaxf(x[first + 2], x[first + 3])) < bound) continue;
#pragma unroll
      for (int j = first; j < first + 4; ++j) {
        const float log_mass = row.log_mass(x[j]);
        const bool before = (x[j] > bound) | ((x[j] == bound) & (tile_index(base, j) < index));
        if (before & (row.bin(log_mass) == bin)) sum += ptx::ex2(log_mass);
      }
    }
  });
  sum = reduce_warp(sum, Add());
  sync_cluster();  // what was summed before is no longer looked at
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane < Config::cluster) *of_rank(&smem.in_bin[rank_in_cluster()][warp], lane) = sum;
  sync_cluster();
  sum = 0.0f;
  for (int slot = lane; slot < Config::cluster * kWarps; slot += 32)
    sum += (&smem.in_bin[0][0])[slot];
  return reduce_warp(sum, Add());
}

// Whether the nucleus ends before a token, by another look at the row, or two.
__device__ __forceinline__ bool ends_before(const Row& logits, int vocab, Key token,
                                            RacedSmem& smem) {
  if (smem.row.surveyed) {
    const float before =
        mass_before(token, smem).x + mass_in_bin_before(logits, vocab, token, smem);
    const double beyond = before - double(smem.row.top_p) * smem.total;
    if (fabs(beyond) > kDoubt * smem.total) return beyond > 0.0;
  }
  const float2 sums = mass_above(logits, vocab, token, smem);
  return !(sums.x < double(smem.row.top_p) * sums.y) && sums.x > 0.0f;  // the first is always in
}
