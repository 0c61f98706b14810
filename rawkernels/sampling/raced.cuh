// The draw after top-p and min-p, in one pass for nearly every row: all tokens race as the row is
// read, the few that come first are listed, and mass is tallied in bins about the logit where the
// nucleus should end. The token is the first of the listed that the filters keep: min-p asks for
// the largest logit, top-p for the mass of the tokens that rank before, and the bins tell enough of
// it unless the token is in the very bin in which the nucleus ends. Then the row is read again.
//
// A survey of the row sets the stage. Whatever it made of the row, the draw is the same: a list
// that is too long or holds nothing that is kept is made anew by what is known of the row by then.
#pragma once

#include "sampling/listing.cuh"
#include "sampling/race.cuh"

// Sums that decide are taken by segment, whatever the cluster, so that it does not matter to their
// rounding. Those of bins are not, and decide only what they leave no doubt of.
constexpr int kSegments = 8;
constexpr float kDoubt = 1e-4f;  // of a row's mass, more than rounding can amount to
constexpr int kOwnSegments = kSegments / Config::cluster;
constexpr int kAtOnce = 2;  // groups whose random numbers are drawn together
constexpr int kMassBins = 24;
constexpr int kSurveyBins = 256;
constexpr float kSurveyBin = 24.0f / kSurveyBins;  // of log2 of a mass
constexpr float kWanted = 64.0f;                   // tokens on a list, about
static_assert(kSegments % Config::cluster == 0 && kMassBins % kWarps == 0, "work is even");

// What is asked of a row, and what is known of it or guessed.
constexpr Key kLowest = 0x00800000ull << 32;  // below those of all finite logits

struct Raced {
  float temperature, top_p, min_p;
  float ref, slope;            // the mass of a logit is 2^((logit - ref) slope)
  float bin_scale, bin_shift;  // from log2 of a mass to its bin
  float chance;                // a token is listed if E < mass * chance,
  float least;                 // its logit is at least this
  Key out;                     // and its key above this one
  bool surveyed;               // all this is from the survey, not yet from the row itself

  __device__ __forceinline__ bool has_nucleus() const { return top_p < 1.0f; }

  __device__ __forceinline__ float log_mass(float x) const { return (x - ref) * slope; }

  // 2^23 + the bin.
  __device__ __forceinline__ float bin(float log_mass) const {
    return fmaf(__saturatef(fmaf(log_mass, bin_scale, bin_shift)), kMassBins - 1.0f, 0x1p23f);
  }
};

struct RacedSmem {
  Raced row;
  union {
    float own[kMassBins][Config::threads];  // bins of each thread
    unsigned survey[kSurveyBins];
  };
  float bins[Config::cluster][kMassBins];
  float sums[kSegments][kWarps];
  float highs[Config::cluster][kWarps];
  float2 surveyed[kWarps];
  float survey_high[kWarps];
  float before[kMassBins], in[kMassBins], total;
  RaceSmem race;
  double target;  // mass of the nucleus; 0 if it has not been summed up yet
  Key first;      // of the tokens in question
};

__device__ __forceinline__ Segment segment_of(int vocab, int number) {
  const int groups = (vocab + kGroup - 1) / kGroup;
  const int part = (groups + kSegments - 1) / kSegments * kGroup;
  const int begin = min(number * part, vocab);
  return {begin, min(begin + part, vocab)};
}

template <class T, class Op>
__device__ __forceinline__ T reduce_block(T value, Op op, T neutral, T* slots) {
  value = reduce_warp(value, op);
  if (threadIdx.x % 32 == 31) slots[threadIdx.x / 32] = value;
  __syncthreads();
  return reduce_warp(threadIdx.x % 32 < kWarps ? slots[threadIdx.x % 32] : neutral, op);
}

struct Larger {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

__device__ __forceinline__ float2 operator+(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }

__device__ __forceinline__ float2 shuffle_xor(float2 value, int lanes) {
  return {shuffle_xor(value.x, lanes), shuffle_xor(value.y, lanes)};
}

// 1/2 + u, or 2 u if that is more; of 24 bits, so not above. E is at least u, and 1/2 + E at least
// this.
__device__ __forceinline__ float half_plus(unsigned bits) {
  return __uint_as_float(__byte_perm(bits, 0x3f, 0x4321));
}

// The logit below which min-p keeps none, or somewhat less.
__device__ __forceinline__ float least_logit(float high, float slope, float min_p) {
  const float reach = ptx::lg2(min_p) / slope;  // 0 or less
  return high + reach - fmaf(fabsf(high), 1e-6f, fabsf(reach) * 1e-6f);
}

// Guesses from a part of the row how it will be.
template <class Load>
__device__ __forceinline__ void survey_masses(Load load, int vocab, float temperature, float top_p,
                                              float min_p, RacedSmem& smem) {
  float x[kTile];
  read_survey(load, vocab, x);
  for (int b = threadIdx.x; b < kSurveyBins; b += Config::threads) smem.survey[b] = 0;
  float high = -kInfinity;
#pragma unroll
  for (int j = 0; j < kTile; ++j) high = fmaxf(high, x[j]);
  high = reduce_block(high, Larger(), -kInfinity, smem.survey_high);

  Raced row;
  row.temperature = temperature;
  row.top_p = top_p;
  row.min_p = min_p;
  row.slope = log2_per_logit(temperature);
  row.ref = fabsf(high) < kInfinity ? high : 0.0f;
  row.out = kLowest;
  row.least = least_logit(row.ref, row.slope, min_p);
  row.surveyed = true;
  float2 sums = {0.0f, 0.0f};  // of what min-p keeps; of squares
#pragma unroll
  for (int j = 0; j < kTile; ++j) {
    const float log_mass = row.log_mass(x[j]);
    const float mass = ptx::ex2(log_mass);
    if (x[j] >= row.least) sums.x += mass;
    sums.y = fmaf(mass, mass, sums.y);
    if (top_p < 1.0f && x[j] > -kInfinity) {
      const int bin = min(int(log_mass * (-1.0f / kSurveyBin)), kSurveyBins - 1);
      atomicAdd(&smem.survey[max(bin, 0)], __float2uint_rn(mass * 0x1p19f));
    }
  }
  sums = reduce_block(sums, Add(), {0.0f, 0.0f}, smem.surveyed);
  // One token of the survey stands for several, but hardly the largest.
  const float each = fmaxf(1.0f, float(vocab) / kSurvey);
  row.chance = kWanted / fmaxf(fmaf(sums.x - 1.0f, each, 1.0f), 1.0f);
  row.bin_scale = row.bin_shift = 0.0f;
  if (top_p < 1.0f) {
    constexpr int kMine = kSurveyBins / 32;
    const int lane = threadIdx.x % 32;
    unsigned mine[kMine], before = 0;
#pragma unroll
    for (int b = 0; b < kMine; ++b) before += mine[b] = smem.survey[lane * kMine + b];
    float sum = float(before), total = reduce_warp(sum, Add());
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float left = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += left;
    }
    sum -= float(before);
    // The nucleus ends where the survey's does, give or take four standard deviations.
    const float mass = total * 0x1p-19f;
    const float error = 4.0f * sqrtf(top_p * (1.0f - top_p) * sums.y) / mass;
    const float upper = (top_p - error) * total;
    const float lower = fminf(top_p + error, 1.0f - 0.125f * (1.0f - top_p)) * total;
    int first = 0, last = 1;  // bins before the two
#pragma unroll
    for (int b = 0; b < kMine; ++b) {
      sum += float(mine[b]);
      first += sum < upper;
      last += sum < lower;
    }
    first = reduce_warp(first, Add());
    last = reduce_warp(last, Add()) - 31;
    const bool few = mass * mass < 50.0f * sums.y;
    const float top = few || first == 0 ? 8.0f : first * -kSurveyBin;
    const float step = (top + last * kSurveyBin) / (kMassBins - 2);
    row.bin_scale = -1.0f / (step * (kMassBins - 1));
    row.bin_shift = (top / step + 0.5f) / (kMassBins - 1);
  }
  if (threadIdx.x == 0) {
    smem.row = row;
    smem.total = 0.0f;
    smem.target = 0.0;
  }
  __syncthreads();
}

// Lists the tokens that come first, and finds the largest logit; kMass: and the mass of each bin.
template <bool kMass, class Load>
__device__ __forceinline__ void race_row(Load load, int vocab, PhiloxKey key, ListSmem& list,
                                         RacedSmem& smem) {
  const Raced row = smem.row;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float high = -kInfinity;
  if constexpr (kMass) {
#pragma unroll
    for (int b = 0; b < kMassBins; ++b) smem.own[b][threadIdx.x] = 0.0f;
  }
  clear_list(list);
  const Segment segment = own_segment(vocab);
  for_each_tile(load, segment, [&](int base, const float (&x)[kTile]) {
    unsigned close = 0;  // bit j: token j may come first
#pragma unroll
    for (int first = 0; first < kUnroll; first += kAtOnce) {
      uint4 words[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int i = tile_index(base, 4 * (first + n));
        words[n] = philox_counter(philox_block(i), kTokenStream, key);
      }
      philox4x32(words, key.seed);
#pragma unroll
      for (int j = 0; j < 4 * kAtOnce; ++j) {
        const float logit = x[4 * first + j];
        const float log_mass = row.log_mass(logit);
        const float mass = ptx::ex2(log_mass);
        high = fmaxf(high, logit);
        if constexpr (kMass) {
          // Each thread has a column: `own` is strided by threads, that is by 1 << 10 bytes.
          char* const column = reinterpret_cast<char*>(&smem.own[0][threadIdx.x]);
          static_assert(sizeof(smem.own[0]) == 1 << 10, "");
          const unsigned offset = __float_as_uint(row.bin(log_mass)) << 10;
          *reinterpret_cast<float*>(column + offset) += mass;
        }
        const uint4 word = words[j / 4];
        const unsigned bits = j % 4 == 0   ? word.x
                              : j % 4 == 1 ? word.y
                              : j % 4 == 2 ? word.z
                                           : word.w;
        if (!(half_plus(bits) > fmaf(mass, row.chance, 0.5f))) close |= 1u << (4 * first + j);
      }
    }
    for (; close != 0; close &= close - 1) {
      const int j = __ffs(close) - 1;
      const int i = tile_index(base, j);
      if (i >= segment.end) continue;
      const float value = pick(x, j) + 0.0f;  // -0 becomes 0: they are equal
      if (!(value < kInfinity)) list.bad[rank_in_cluster()] = 1;
      const Key token = rank_key(value, i);
      if (!(value < smem.row.least) && token > smem.row.out) add_to_list(token, list);
    }
  });
  if constexpr (kMass) {
    __syncthreads();
#pragma unroll 1
    for (int bin = warp; bin < kMassBins; bin += kWarps) {
      float sum = 0.0f;
#pragma unroll
      for (int t = lane; t < Config::threads; t += 32) sum += smem.own[bin][t];
      sum = reduce_warp(sum, Add());
      if (lane < Config::cluster) *of_rank(&smem.bins[rank_in_cluster()][bin], lane) = sum;
    }
  }
  high = reduce_warp(high, Larger());
  if (lane < Config::cluster) *of_rank(&smem.highs[rank_in_cluster()][warp], lane) = high;
  share_list(list);
}

// The mass of the tokens whose keys are above `key`.
template <class Load>
__device__ __forceinline__ float mass_above(Load load, int vocab, Key key, RacedSmem& smem) {
  const Raced row = smem.row;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float bound = key_score(key);
  const int index = key_index(key);
  sync_cluster();  // what was summed before is no longer looked at
#pragma unroll 1
  for (int own = 0; own < kOwnSegments; ++own) {
    const int number = rank_in_cluster() * kOwnSegments + own;
    float sum = 0.0f;
    for_each_tile(load, segment_of(vocab, number), [&](int base, const float (&x)[kTile]) {
#pragma unroll
      for (int j = 0; j < kTile; ++j) {
        const bool before = (x[j] > bound) | ((x[j] == bound) & (tile_index(base, j) < index));
        sum += before ? ptx::ex2(row.log_mass(x[j])) : 0.0f;
      }
    });
    sum = reduce_warp(sum, Add());
    if (lane < Config::cluster) *of_rank(&smem.sums[number][warp], lane) = sum;
  }
  sync_cluster();
  float sum = 0.0f;
  for (int slot = lane; slot < kSegments * kWarps; slot += 32) sum += (&smem.sums[0][0])[slot];
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

// The first of the list that min-p keeps and that ranks before row.out; 0 if there is none, or if a
// token that is not listed might come before. Known to all threads.
__device__ __forceinline__ Key first_listed(const ListSmem& list, int places, float high,
                                            PhiloxKey key, RacedSmem& smem) {
  const Raced& row = smem.row;
  const double bound = log(double(row.min_p));
  Draw best = {0.0, -1};
  Key token = 0;
#pragma unroll 1
  for (int place = threadIdx.x; place < places; place += Config::threads) {
    if (place / Config::cluster >= list.found[place % Config::cluster]) continue;
    const Key candidate = list.keys[place];
    const double x = key_score(candidate);
    if (candidate <= row.out || !((x - double(high)) / double(row.temperature) >= bound)) continue;
    const int i = key_index(candidate);
    const double noise = -log(-log1p(-double(philox_uniform(key, kTokenStream, i))));
    const float log_mass = row.log_mass(float(x));
    const bool sure = log_mass + kLog2e * float(noise) >
                      fmaf(fabsf(log_mass), 1e-6f, 1e-3f) - ptx::lg2(row.chance);
    const Draw draw = {x / double(row.temperature) + noise, i};
    if (sure && beats(draw, best)) {
      best = draw;
      token = candidate;
    }
  }
  const int own = best.token;
  bool bad = false;
  best_of_block(best, bad, smem.race);
  if (threadIdx.x == 0) {
    smem.race.block_best = best;
    smem.first = 0;
  }
  __syncthreads();
  if (own >= 0 && own == smem.race.block_best.token) smem.first = token;
  __syncthreads();
  return smem.first;
}

// Whether the nucleus ends before a token.
template <class Load>
__device__ __forceinline__ bool ends_before(Load load, int vocab, Key token, RacedSmem& smem) {
  const double share = smem.row.top_p;
  if (smem.row.surveyed) {
    const float log_mass = smem.row.log_mass(key_score(token));
    const int bin = __float_as_uint(smem.row.bin(log_mass)) & 0xff;
    const float before = smem.before[bin], others = smem.in[bin] - ptx::ex2(log_mass);
    const double target = share * smem.total, doubt = kDoubt * smem.total;
    if (before > target + doubt) return true;
    if (before + others < target - doubt) return false;
  }
  if (smem.target == 0.0) {
    const double all = mass_above(load, vocab, kLowest, smem);
    if (threadIdx.x == 0) smem.target = share * all;
  }
  const float before = mass_above(load, vocab, token, smem);
  return !(before < smem.target) && before > 0.0f;  // the first of all is always in
}

// A draw from what top-p and min-p leave of the row, known to all threads; -1 for a bad row or one
// that has nothing to draw.
template <class Load>
__device__ __forceinline__ int race_filtered(Load load, int vocab, float temperature, float top_p,
                                             float min_p, PhiloxKey key, ListSmem& list,
                                             RacedSmem& smem) {
  survey_masses(load, vocab, temperature, top_p, min_p, smem);
  wait_cluster();
  for (;;) {
    if (smem.row.has_nucleus() && smem.row.surveyed) {
      race_row<true>(load, vocab, key, list, smem);
      add_up_bins(smem);
    } else {
      race_row<false>(load, vocab, key, list, smem);
    }
    float high = -kInfinity;
    for (int slot = threadIdx.x % 32; slot < Config::cluster * kWarps; slot += 32)
      high = fmaxf(high, (&smem.highs[0][0])[slot]);
    high = reduce_warp(high, Larger());
    const Listed listed(list);
    if (listed.bad || high == -kInfinity) return -1;
    // Where the sum is none, masses are out of range, and the list lacks tokens.
    while (listed.whole && smem.total < kInfinity) {
      const Key first = first_listed(list, listed.places, high, key, smem);
      if (first == 0) break;
      if (!smem.row.has_nucleus() || !ends_before(load, vocab, first, smem))
        return key_index(first);
      if (threadIdx.x == 0) smem.row.out = first;
      __syncthreads();
    }
    // Another list, of what is certain now.
    sync_cluster();
    float wanted = 8.0f * kWanted;
    if (smem.row.surveyed) {
      wanted = kWanted;
      __syncthreads();
      if (threadIdx.x == 0) {
        smem.row.surveyed = false;
        smem.row.ref = high;
        smem.total = 0.0f;
        smem.target = 0.0;
        smem.row.least = least_logit(high, smem.row.slope, smem.row.min_p);
      }
      __syncthreads();
    }
    const Key least = rank_key(fmaxf(smem.row.least, -kMaxFloat), 0x7fffffff);
    const float left = mass_above(load, vocab, max(smem.row.out, least), smem);
    if (threadIdx.x == 0) smem.row.chance = wanted / left;
    __syncthreads();
  }
}
