// A row's probability histogram, from which the end of the nucleus is found: estimated from a pilot
// sample, accumulated exactly enough while the row is read, and read again for a sum only if the
// nucleus may end inside the bin of the token in question.
//
// Probabilities here are not normalised: a logit x has 2^((x - reference) slope).
#pragma once

#include "sampling/candidates.cuh"
#include "sampling/gumbel_max.cuh"
#include "sampling/min_p.cuh"
#include "sampling/nucleus_state.cuh"
#include "sampling/row_moments.cuh"

constexpr int kPilotBins = 256;
constexpr float kPilotBinWidth = 24.0f / kPilotBins;  // of log2 of a probability
constexpr float kPilotUnit = 0x1p19f;       // of fixed-point sums: 4096 probabilities of 1 are 2^31
constexpr float kTargetCandidates = 32.0f;  // about; more where filters keep little

// Each thread's own bins, a column; or groups of four tokens that wait (nucleus_gumbel.cuh).
extern __shared__ __align__(16) float thread_bins[][Config::threads];

struct NucleusSmem {
  NucleusState state;
  unsigned pilot_bins[kPilotBins];
  float bins[Config::cluster][kHistogramBins];
  union {
    float2 sums[kSegments][kSumWarps];
    RowMoments moments[Config::ranked ? kSegments * kSumWarps : 1];
  };
  float highs[Config::cluster][kWarps], in_bin[Config::cluster][kWarps];
  uint2 pilot_sums[kWarps];
  float pilot_high[kWarps];
  float before[kHistogramBins], in[kHistogramBins], total;
  ArgmaxSmem argmax;
  float key_bounds[kWarps];
  Key best;  // of the candidates
};

__device__ __forceinline__ float2 operator+(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }

__device__ __forceinline__ float2 shuffle_xor(float2 value, int lanes) {
  return {shuffle_xor(value.x, lanes), shuffle_xor(value.y, lanes)};
}

// The logit below which min-p keeps no token, or somewhat less.
__device__ __forceinline__ float min_kept_logit(float high, float slope, float min_p) {
  const float reach = ptx::lg2(min_p) / slope;  // 0 or less
  return high + reach - fmaf(fabsf(high), 1e-6f, fabsf(reach) * 1e-6f);
}

// Spreads the histogram's bins over the scores at which the nucleus may end, by the pilot's bins
// and its sum of squared probabilities. For top-k the tokens that reach the last bin but one become
// candidates; returns their probability in the pilot sample. Called by one warp.
__device__ __forceinline__ float place_bins(NucleusState& state, int vocab, float squares,
                                            const NucleusSmem& smem) {
  constexpr int kBinsPerLane = kPilotBins / 32;
  const int lane = threadIdx.x;
  unsigned bins[kBinsPerLane], own = 0;
#pragma unroll
  for (int b = 0; b < kBinsPerLane; ++b) own += bins[b] = smem.pilot_bins[lane * kBinsPerLane + b];
  float sum = tile::prefix_sum_of_warp(float(own));
  const float total = __shfl_sync(0xffffffffu, sum, 31), probability = total / kPilotUnit;
  sum -= float(own);
  // The nucleus ends where the pilot's does, give or take four standard deviations.
  const float error = 4.0f * sqrtf(state.top_p * (1.0f - state.top_p) * squares) / probability;
  float upper = (state.top_p - error) * total;
  float lower = fminf(state.top_p + error, 1.0f - 0.125f * (1.0f - state.top_p)) * total;
  if (state.counts()) {
    const float expected = state.top_p * fminf(1.0f, float(kPilotSize) / float(vocab));
    const float reach = 4.0f * sqrtf(expected) + 4.0f;
    upper = expected - reach;
    lower = expected + reach;
  }
  int first = 0, last = 1;  // pilot bins before each of the two
#pragma unroll
  for (int b = 0; b < kBinsPerLane; ++b) {
    sum += float(bins[b]);
    first += sum < upper;
    last += sum < lower;
  }
  first = __reduce_add_sync(0xffffffffu, first);
  last = __reduce_add_sync(0xffffffffu, last) - 31;
  const bool few = probability * probability < 50.0f * squares;
  const bool beyond = !Config::ranked && (few || first == 0);  // scores may be above the sample's
  const float top = beyond ? 8.0f : first * -kPilotBinWidth;
  const float step = (top + last * kPilotBinWidth) / (kHistogramBins - 2);
  state.bin_scale = -1.0f / (step * (kHistogramBins - 1));
  state.bin_shift = (top / step + 0.5f) / (kHistogramBins - 1);
  if (!state.counts()) return 0.0f;
  float kept = 0.0f;
#pragma unroll
  for (int b = 0; b < kBinsPerLane; ++b) {
    const int bin = lane * kBinsPerLane + b;
    if (bin < last) kept = fmaf(float(bins[b]), ptx::ex2(bin * -kPilotBinWidth), kept);
  }
  if (last < kPilotBins) {
    const float log2_p = top - (kHistogramBins - 1) * step;  // in the last bin
    state.set_center(state.reference + log2_p / state.slope);
    state.min_logit = fmaxf(state.min_logit, state.center);
  }
  return reduce_warp(kept, Add());
}

// Estimates smem.state from the pilot sample. meanwhile() is called while that is being loaded.
// `row` is for typical-p.
template <class Meanwhile>
__device__ __forceinline__ void estimate_state(const Row& logits, int vocab, float temperature,
                                               float top_p, float min_p, RowMoments row,
                                               NucleusSmem& smem, Meanwhile meanwhile) {
  float x[kPilotPerThread];
  read_pilot(logits, vocab, x);
  meanwhile();
  for (int b = threadIdx.x; b < kPilotBins; b += Config::threads) smem.pilot_bins[b] = 0;
  float high = -kInfinity;
#pragma unroll
  for (int j = 0; j < kPilotPerThread; ++j) high = fmaxf(high, x[j]);
  high = largest_of_block(high, smem.pilot_high);

  NucleusState state;
  state.temperature = temperature;
  state.top_p = top_p;
  state.min_p = min_p;
  state.set_center(state.counts() ? -kInfinity : row.mean());
  state.slope = log2_per_logit(temperature);
  state.reference = fabsf(high) < kInfinity ? high : 0.0f;
  state.rejected = kBelowFinite;
  state.min_logit = min_kept_logit(state.reference, state.slope, min_p);
  state.estimated = true;
  float kept = 0.0f, squares = 0.0f;  // sums over probabilities, each of which is 1 at most
#pragma unroll
  for (int j = 0; j < kPilotPerThread; ++j) {
    const float log2_p = state.log2_probability(x[j]);
    const float p = ptx::ex2(log2_p);
    if (x[j] >= state.min_logit) kept += p;
    squares = fmaf(p, p, squares);
    if ((Config::ranked || top_p < 1.0f) && x[j] > -kInfinity) {
      const float score = state.typical() ? state.log2_score(state.score(x[j])) : log2_p;
      const int bin = min(int(score * (-1.0f / kPilotBinWidth)), kPilotBins - 1);
      atomicAdd(&smem.pilot_bins[max(bin, 0)],
                state.counts() ? 1u : __float2uint_rn(p * kPilotUnit));
    }
  }
  uint2 sums = {__reduce_add_sync(0xffffffffu, __float2uint_rn(kept * kPilotUnit)),
                __reduce_add_sync(0xffffffffu, __float2uint_rn(squares * kPilotUnit))};
  if (threadIdx.x % 32 == 0) smem.pilot_sums[threadIdx.x / 32] = sums;
  const float top = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  state.sparse = __syncthreads_count(top >= state.min_logit) <= Config::threads / 16;
  if (threadIdx.x < 32) {
    if (threadIdx.x >= kWarps) sums = {0, 0};
    if (threadIdx.x < kWarps) sums = smem.pilot_sums[threadIdx.x];
    kept = float(__reduce_add_sync(0xffffffffu, sums.x)) / kPilotUnit;
    squares = float(__reduce_add_sync(0xffffffffu, sums.y)) / kPilotUnit;
    // Each token of the sample stands for several of the row, but the largest hardly does.
    const float each = fmaxf(1.0f, float(vocab) / kPilotSize);
    // Min-p keeps few of the candidates where the row's largest logit is far above the sample's.
    const float more = min_p == 0.0f ? 1.0f : state.sparse ? 2.0f : 1.5f;
    const float wanted = kTargetCandidates * more / fmaxf(top_p, 0.25f);
    state.candidate_scale = wanted / fmaxf(fmaf(kept - 1.0f, each, 1.0f), 1.0f);
    state.bin_scale = state.bin_shift = 0.0f;
    if (state.has_nucleus()) {
      const float reached = place_bins(state, vocab, squares, smem);
      if (state.counts())
        state.candidate_scale = top_p == 1.0f ? kInfinity  // all that reach state.min_logit
                                              : 2.0f * kTargetCandidates /
                                                    fmaxf(fmaf(reached - 1.0f, each, 1.0f), 1.0f);
    }
    if (state.typical()) {
      state.reference = fabsf(row.high) < kInfinity ? row.high : 0.0f;
      state.candidate_scale = wanted / fmaxf(row.sum, 1.0f);
    }
    if (threadIdx.x == 0) {
      smem.state = state;
      smem.total = 0.0f;
    }
  }
  __syncthreads();
}

// Whether min-p keeps a logit.
__device__ __forceinline__ bool passes_min_p(const NucleusState& state, float x, float high) {
  if (state.min_p == 0.0f) return true;
  const float log2_ratio = (x - high) * state.slope;
  const float gap = log2_ratio - ptx::lg2(state.min_p);
  if (log2_ratio > -126.0f && fabsf(gap) > 1e-4f) return gap > 0.0f;
  return (double(x) - double(high)) / double(state.temperature) >= log(double(state.min_p));
}

// The weight of the tokens whose keys are above `key`, and of all tokens; weight_of() takes log2 of
// a token's probability.
template <class Weight>
__device__ __forceinline__ float2 weight_above(const Row& logits, int vocab, Key key,
                                               Weight weight_of, NucleusSmem& smem) {
  const NucleusState state = smem.state;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kSumWarps;
  const float bound = key_score(key);
  const int token = key_token(key);
  constexpr int kTeams = kWarps / kSumWarps;
  sync_cluster();  // no block reads the previous sums any more
  const int first = rank_in_cluster() * kOwnSegments;
#pragma unroll 1
  for (int own = threadIdx.x / 32 / kSumWarps; own < kOwnSegments; own += kTeams) {
    const int number = first + own;
    float2 sum = {0.0f, 0.0f};
    for (Tiles<kSumTokens, kSumWarps> tiles(logits, part_of_row<kGroup, kSegments>(vocab, number));
         tiles.any(); tiles.next()) {
      float x[kSumTokens];
      tiles.load(x);
#pragma unroll
      for (int j = 0; j < kSumTokens; ++j) {
        const float p = x[j] > -kInfinity ? weight_of(state.log2_probability(x[j])) : 0.0f;
        const float score = state.score(x[j]);
        const bool before =
            (score > bound) | ((score == bound) & (tile_token(tiles.base, j) < token));
        sum.x += before ? p : 0.0f;
        sum.y += p;
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

// The probability in each bin, and in the bins above it.
__device__ __forceinline__ void sum_bins(NucleusSmem& smem) {
  if (threadIdx.x < 32) {
    const int bin = threadIdx.x;
    float in = 0.0f;
    if (bin < kHistogramBins) {
#pragma unroll
      for (int rank = 0; rank < Config::cluster; ++rank) in += smem.bins[rank][bin];
    }
    const float sum = tile::prefix_sum_of_warp(in);
    const float above = __shfl_up_sync(0xffffffffu, sum, 1);
    if (bin < kHistogramBins) {
      smem.in[bin] = in;
      smem.before[bin] = bin == 0 ? 0.0f : above;
    }
    if (bin == 31) smem.total = sum;
  }
  __syncthreads();
}

// The bin of a key's score; the number is in the low bits.
__device__ __forceinline__ float bin_of(float score, const NucleusState& state) {
  return state.bin(state.log2_score(score));
}

// The logit of a key's token.
__device__ __forceinline__ float logit_of(const Row& logits, Key token, const NucleusState& state) {
  return state.typical() ? logits(key_token(token)) : key_score(token);
}

// The least and the greatest weight, by the bins, of the tokens that rank before a token.
__device__ __forceinline__ float2 bounds_before(const Row& logits, Key token,
                                                const NucleusSmem& smem) {
  const int bin = __float_as_uint(bin_of(key_score(token), smem.state)) & 0xff;
  const float before = smem.before[bin];
  const float log2_p = smem.state.log2_probability(logit_of(logits, token, smem.state));
  return {before, before + (smem.in[bin] - smem.state.weight(log2_p))};
}

// Whether the bins prove that a token is outside of the nucleus.
__device__ __forceinline__ bool surely_outside(const Row& logits, Key token,
                                               const NucleusSmem& smem) {
  if (!smem.state.has_nucleus() || !smem.state.estimated) return false;
  const double end = smem.state.end(smem.total);
  return bounds_before(logits, token, smem).x > end + smem.state.tolerance(smem.total);
}

// Whether the bins prove that a token is inside of the nucleus.
__device__ __forceinline__ bool surely_inside(const Row& logits, Key token,
                                              const NucleusSmem& smem) {
  if (!smem.state.has_nucleus() || !smem.state.estimated) return !smem.state.has_nucleus();
  const double end = smem.state.end(smem.total);
  return bounds_before(logits, token, smem).y < end - smem.state.tolerance(smem.total);
}

// The largest score of four tokens.
__device__ __forceinline__ float largest_score(const NucleusState& state, const float* x) {
  return fmaxf(fmaxf(state.score(x[0]), state.score(x[1])),
               fmaxf(state.score(x[2]), state.score(x[3])));
}

// The weight of the tokens in a token's bin that rank before it: reads the row again.
__device__ __forceinline__ float in_bin_before(const Row& logits, int vocab, Key key,
                                               NucleusSmem& smem) {
  const NucleusState state = smem.state;
  const float bound = key_score(key);
  const int token = key_token(key);
  const float bin = bin_of(bound, state);
  constexpr int kTokens = 32;  // as many as there are registers for
  float sum = 0.0f;
  const Tiles<kTokens> tiles(logits, own_segment(vocab));
  float ahead[kTokens];
  tiles.load_ahead(ahead);
  for_each_tile(tiles, ahead, [&](int base, const float (&x)[kTokens]) {
#pragma unroll
    for (int first = 0; first < kTokens; first += 4) {
      if (largest_score(state, x + first) < bound) continue;
#pragma unroll
      for (int j = first; j < first + 4; ++j) {
        const float log2_p = state.log2_probability(x[j]), score = state.score(x[j]);
        const bool before = (score > bound) | ((score == bound) & (tile_token(base, j) < token));
        if (before & (bin_of(score, state) == bin)) sum += state.weight(log2_p);
      }
    }
  });
  sum = reduce_warp(sum, Add());
  sync_cluster();  // no block reads the previous sums any more
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane < Config::cluster) *of_rank(&smem.in_bin[rank_in_cluster()][warp], lane) = sum;
  sync_cluster();
  sum = 0.0f;
  for (int slot = lane; slot < Config::cluster * kWarps; slot += 32)
    sum += (&smem.in_bin[0][0])[slot];
  return reduce_warp(sum, Add());
}

// Whether the nucleus ends before a token, by reading the row once more, or twice.
__device__ __forceinline__ bool ends_before(const Row& logits, int vocab, Key token,
                                            NucleusSmem& smem) {
  if (smem.state.estimated) {
    const float before =
        bounds_before(logits, token, smem).x + in_bin_before(logits, vocab, token, smem);
    const double beyond = before - smem.state.end(smem.total);
    if (fabs(beyond) > smem.state.tolerance(smem.total)) return beyond > 0.0;
  }
  const NucleusState state = smem.state;
  const auto weight = [&](float log2_p) { return state.weight(log2_p); };
  const float2 sums = weight_above(logits, vocab, token, weight, smem);
  // The first token is always in the nucleus.
  return !(sums.x < smem.state.end(sums.y)) && sums.x > 0.0f;
}
