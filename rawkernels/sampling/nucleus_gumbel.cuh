// A draw after top-p and min-p, in one pass for nearly every row: Gumbel-max over all tokens makes
// candidates of those with the largest keys while the row is read, and a histogram of the
// probabilities is accumulated. The token drawn is the candidate with the largest key that the
// filters keep: min-p needs the row's largest logit, top-p the probability of the tokens that rank
// before, which the histogram tells unless the nucleus ends in the very bin of the token.
//
// A pilot sample decides where the bins lie and how many tokens become candidates. The draw does
// not depend on it: if there are too many candidates, or none that is kept, the row is read again
// with what is known of it by then.
#pragma once

#include "sampling/nucleus_histogram.cuh"

constexpr int kGroupsAtOnce = 2;  // groups whose random numbers are computed together
constexpr int kFours = kTileTokens / 4;

// Candidates that are wanted of a row that is read for the third time or later. All of them may be
// one block's: more than it has places for would be as many again in the next reading.
constexpr float kTargetLater = 16 * int(kTargetCandidates) < kCandidatesPerBlock / 2
                                   ? 16 * int(kTargetCandidates)
                                   : kCandidatesPerBlock / 2;

// Where min-p keeps few tokens, a warp collects the groups of four that may have one until each
// lane has a group to compute random numbers for.
constexpr int kMaxWaiting = 32 * (kFours + 1);  // a tile's, and fewer than 32 from before

struct Waiting {
  float4 fours[kMaxWaiting];
  int tokens[kMaxWaiting];  // the first token of each group of four
};
constexpr bool kCanWait = sizeof(Waiting) * kWarps <= Config::smem_bytes;  // in place of the bins

// Reads the row, makes candidates of the tokens with the largest keys, and finds the largest logit.
// kHistogram: accumulates the bins as well. kSparse: for rows of which min-p keeps little.
template <bool kHistogram, bool kSparse>
__device__ __forceinline__ void find_candidates(const Tiles<kTileTokens>& tiles,
                                                float (&ahead)[kTileTokens], PhiloxKey key,
                                                CandidateSmem& candidates, NucleusSmem& smem) {
  const NucleusState state = smem.state;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Waiting& waiting = reinterpret_cast<Waiting*>(thread_bins)[warp];
  int num_waiting = 0;
  float high = -kInfinity;
  if constexpr (kHistogram) {
#pragma unroll
    for (int b = 0; b < kHistogramBins; ++b) thread_bins[b][threadIdx.x] = 0.0f;
  }
  clear_candidates(candidates);
  const auto add = [&](int i, float x) {
    const float value = x + 0.0f;  // -0 becomes 0: they are equal
    if (!(value < kInfinity)) candidates.bad[rank_in_cluster()] = 1;
    const Key token = rank_key(state.score(value), i);
    if (!(value < smem.state.min_logit) && token > smem.state.rejected) {
      add_candidate(token, candidates);
    }
  };
  const auto limit = [&](float x) {
    return fmaf(state.probability(x), state.candidate_scale, 0.5f);
  };
  for_each_tile(tiles, ahead, [&](int base, const float (&x)[kTileTokens]) {
    float tops[kFours];
#pragma unroll
    for (int n = 0; n < kFours; ++n) {
      tops[n] = largest_of_four(x + 4 * n);
      high = fmaxf(high, tops[n]);
    }
    if constexpr (kSparse) {
#pragma unroll
      for (int n = 0; n < kFours; ++n) {
        const bool may = !(tops[n] < state.min_logit);
        const unsigned all = __ballot_sync(0xffffffffu, may);
        if (may) {
          const int place = num_waiting + __popc(all & ((1u << lane) - 1));
          waiting.fours[place] = make_float4(x[4 * n], x[4 * n + 1], x[4 * n + 2], x[4 * n + 3]);
          waiting.tokens[place] = tile_token(base, 4 * n);
        }
        num_waiting += __popc(all);
      }
      const bool last = base + 32 * kTileTokens * kWarps >= tiles.segment.end;
#pragma unroll 1
      while (num_waiting >= (last ? 1 : 32)) {
        __syncwarp();
        const int taken = min(num_waiting, 32);
        num_waiting -= taken;
        if (lane >= taken) continue;
        const int first = waiting.tokens[num_waiting + lane];
        const float4 four = waiting.fours[num_waiting + lane];
        const float own[4] = {four.x, four.y, four.z, four.w};
        uint4 words[1];
        draw_upper_halves(words, philox_block(first), key);
        const int side = philox_side(first);
        if (!any_may_pass(largest_of_four(own), words[0], side, limit)) continue;
        const unsigned which = which_may_pass(own, words[0], side, limit);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (which >> j & 1) add(first + 32 * j, own[j]);
        }
      }
      return;
    }
    const unsigned block = philox_block(tile_token(base, 0));  // 32 more for each group
    unsigned which = 0;                                        // bit j: token j may be a candidate
#pragma unroll
    for (int first = 0; first < kUnroll; first += kGroupsAtOnce) {
      uint4 words[kGroupsAtOnce];
      draw_upper_halves(words, block + 32 * first, key);
      if constexpr (kHistogram) {
#pragma unroll
        for (int j = 8 * first; j < 8 * (first + kGroupsAtOnce); ++j) {
          const float log2_p = state.log2_probability(x[j]);
          const float score = state.typical() ? state.log2_score(state.score(x[j])) : log2_p;
          char* const column = reinterpret_cast<char*>(&thread_bins[0][threadIdx.x]);
          const unsigned offset = __float_as_uint(state.bin(score)) * sizeof(thread_bins[0]);
          *reinterpret_cast<float*>(column + offset) += state.weight(log2_p);
        }
      }
      which |= which_of_tile(x + 8 * first, words, limit) << 8 * first;
    }
    for (; which != 0; which &= which - 1) {
      const int j = __ffs(which) - 1;
      const int i = tile_token(base, j);
      if (i < tiles.segment.end) add(i, select_register(x, j));
    }
  });
  if constexpr (kHistogram) {
    __syncthreads();
#pragma unroll 1
    for (int bin = warp; bin < kHistogramBins; bin += 2 * kWarps) {
      const int other = min(bin + kWarps, kHistogramBins - 1);
      float2 sum = {0.0f, 0.0f};
#pragma unroll
      for (int t = lane; t < Config::threads; t += 32) {
        sum = sum + float2{thread_bins[bin][t], thread_bins[other][t]};
      }
      sum = reduce_warp(sum, Add());
      if (lane < Config::cluster) {
        float* const bins = of_rank(smem.bins[rank_in_cluster()], lane);
        bins[bin] = sum.x;
        if (bin + kWarps < kHistogramBins) bins[other] = sum.y;
      }
    }
  }
  high = largest_of_warp(high);
  if (lane < Config::cluster) *of_rank(&smem.highs[rank_in_cluster()][warp], lane) = high;
  exchange_candidates(candidates);
}

// The candidate with the largest key, of those that may be kept and rank before state.rejected; 0
// if there is none, or if a token that is no candidate might have a larger key. Known to all
// threads.
__device__ __forceinline__ Key best_candidate(const Row& logits, const CandidateSmem& candidates,
                                              int places, float high, PhiloxKey key,
                                              NucleusSmem& smem) {
  const NucleusState& state = smem.state;
  const auto at = [&](int place) -> Key {
    const bool filled =
        place < places && place / Config::cluster < candidates.found[place % Config::cluster];
    const Key token = filled ? candidates.keys[place] : 0;
    const bool may =
        token > state.rejected && passes_min_p(state, logit_of(logits, token, state), high);
    return may && !surely_outside(logits, token, smem) ? token : 0;
  };
  const auto uniform = [&](Key token) {
    return philox_uniform(key, kTokenStream, key_token(token));
  };
  const auto approximate = [&](Key token) {
    return approx_key(state.log2_probability(logit_of(logits, token, state)), uniform(token));
  };
  if (threadIdx.x == 0) smem.best = 0;
  int winners = 2;  // possible ones
  bool may_win;
  Key token = 0;
  float near = -kInfinity;
  if (places <= Config::threads) {
    token = at(threadIdx.x);
    if (token != 0) near = approximate(token);
    winners = count_possible_winners(near, may_win, smem.key_bounds);
  }
  if (winners > 1) {  // too close for float32, or more candidates than threads
    Draw best = {0.0, -1};
#pragma unroll 1
    for (int place = threadIdx.x; place < places; place += Config::threads) {
      const Key other = at(place);
      if (other == 0) continue;
      const float x = logit_of(logits, other, state);
      const Draw draw = {exact_key(x, state.temperature, uniform(other)), key_token(other)};
      if (!beats(draw, best)) continue;
      best = draw;
      token = other;
    }
    const int own = best.token;
    best = best_of_block(best, smem.argmax);
    if (threadIdx.x == 0) smem.argmax.block_best[0] = best;
    __syncthreads();
    may_win = own >= 0 && own == smem.argmax.block_best[0].token;
    if (may_win) near = approximate(token);
  }
  if (may_win) {
    // Above the keys of all other tokens; finite, since there are none if the scale is infinite.
    const float others = fmaxf(-ptx::lg2(state.candidate_scale), -kMaxFloat);
    if (near - approx_error(near) > others + approx_error(others)) smem.best = token;
  }
  __syncthreads();
  return smem.best;
}

// Whether as many tokens as top-k keeps reach the logit that the pilot sample gave for that.
__device__ __forceinline__ bool reaches_nucleus(const NucleusSmem& smem) {
  const NucleusState& state = smem.state;
  if (!state.counts() || !state.estimated || !(state.center > -kInfinity)) return true;
  const int bin = __float_as_uint(bin_of(state.center, state)) & 0xff;
  return smem.before[bin] >= state.top_p;
}

// A draw from what top-p and min-p leave of the row, known to all threads; -1 for a bad row or one
// that has nothing to draw. With Config::ranked: of what top-k and min-p leave, or typical-p; top_p
// is then the number of tokens, or the share.
__device__ __forceinline__ int sample_nucleus(const Row& logits, int vocab, float temperature,
                                              float top_p, float min_p, PhiloxKey key,
                                              CandidateSmem& candidate_smem, NucleusSmem& smem) {
  const Tiles<kTileTokens> tiles(logits, own_segment(vocab));
  float ahead[kTileTokens];
  RowMoments moments = {};
  const bool typical = Config::ranked && top_p < 1.0f;
  if (typical) moments = moments_of_row(logits, vocab, log2_per_logit(temperature), smem.moments);
  estimate_state(logits, vocab, temperature, top_p, min_p, moments, smem,
                 [&] { tiles.load_ahead(ahead); });
  if (!typical) wait_cluster();
  for (;;) {
    if (smem.state.has_nucleus() && smem.state.estimated) {
      find_candidates<true, false>(tiles, ahead, key, candidate_smem, smem);
      sum_bins(smem);
    } else if (kCanWait && smem.state.sparse) {
      find_candidates<false, kCanWait>(tiles, ahead, key, candidate_smem, smem);
    } else {
      find_candidates<false, false>(tiles, ahead, key, candidate_smem, smem);
    }
    float high = -kInfinity;
    for (int slot = threadIdx.x % 32; slot < Config::cluster * kWarps; slot += 32)
      high = fmaxf(high, (&smem.highs[0][0])[slot]);
    high = largest_of_warp(high);
    const Candidates candidates(candidate_smem);
    if (candidates.bad || high == -kInfinity) return -1;
    // An infinite sum says that probabilities are out of range, and that candidates are missing.
    while (candidates.complete && smem.total < kInfinity && reaches_nucleus(smem)) {
      const Key best = best_candidate(logits, candidate_smem, candidates.places, high, key, smem);
      if (best == 0) break;
      if (surely_inside(logits, best, smem) || !ends_before(logits, vocab, best, smem))
        return key_token(best);
      if (threadIdx.x == 0) smem.state.rejected = best;
      __syncthreads();
    }
    // Other candidates, by what is certain now.
    sync_cluster();
    float wanted = kTargetLater;
    // Min-p kept too few of candidates that should have sufficed: it keeps little of the row.
    const bool few = smem.state.estimated && candidates.complete && !smem.state.has_nucleus();
    if (smem.state.estimated) {
      wanted = 2.0f * kTargetCandidates;
      __syncthreads();
      if (threadIdx.x == 0) {
        smem.state.estimated = false;
        // 32 times as many, unless the probability is summed below; from here on relative to
        // `high`.
        smem.state.candidate_scale *=
            32.0f * ptx::ex2((high - smem.state.reference) * smem.state.slope);
        smem.state.sparse = smem.state.min_p > 0.0f;
        smem.state.reference = high;
        smem.total = 0.0f;
        // Exactly: tokens just below it, were they candidates, could be all there are.
        const float min_p = smem.state.min_p;
        smem.state.min_logit =
            min_p > 0.0f ? min_p_logit(high, smem.state.temperature, min_p) : -kInfinity;
      }
      __syncthreads();
    }
    if (!few) {
      const Key least = rank_key(fmaxf(smem.state.min_logit, -kMaxFloat), 0x7fffffff);
      const auto probability = [](float log2_p) { return ptx::ex2(log2_p); };
      const Key bound = max(smem.state.rejected, least);
      const float left = weight_above(logits, vocab, bound, probability, smem).x;
      if (!(left > 0.0f)) return -1;  // only where the mean logit is past float32
      if (threadIdx.x == 0) smem.state.candidate_scale = wanted / left;
    }
    tiles.load_ahead(ahead);
    __syncthreads();
  }
}
