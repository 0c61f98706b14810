// Gumbel-max: the token with the largest key  logit / temperature - log(-log1p(-u)),  u uniform, is
// a draw from the softmax (Gumbel, 1954). Here are the keys, and the search for the largest one.
//
// The winner is decided in float64, as in NumPy, but few tokens need that. With E = -log1p(-u), a
// token beats a threshold only if  E < 2^(log2(e) (logit / temperature - threshold)),  and E > u:
// one exp2 and the upper 16 bits of u reject nearly every token. Those that pass are contenders,
// with keys of float32; float64 decides only between contenders whose float32 keys are closer than
// their error. All tests are conservative by more than the rounding error: a false contender costs
// time, and a winner is never lost. A NaN or +inf passes every test, since each rejects only by a
// true comparison.
#pragma once

#include "sampling/row.cuh"
#include "tile/philox.cuh"

constexpr unsigned kTokenStream = 0, kAcceptStream = 1;

struct Draw {
  double key;
  int token;  // -1: none
};

__device__ __forceinline__ bool beats(const Draw& a, const Draw& b) {
  return a.token >= 0 && (b.token < 0 || a.key > b.key || (a.key == b.key && a.token < b.token));
}

// A token's key as NumPy computes it. Rarely needed: not inlined, so that there is one copy.
__device__ __noinline__ double exact_key(float x, float temperature, float u) {
  return double(x) / double(temperature) - log(-log1p(-double(u)));
}

constexpr float kMaxApproxKey = 3e38f;

// log2(e) times a token's key in float32: within approx_error(), or beyond kMaxApproxKey.
// log2(E), E = -log1p(-u), is subtracted from log2 of the token's probability, in any unit.
__device__ __forceinline__ float approx_key(float log2_p, float u) {
  const float series = u * fmaf(u, fmaf(u, fmaf(u, fmaf(u, 0.2f, 0.25f), 1 / 3.0f), 0.5f), 1.0f);
  const float e = u < 0x1p-4f ? series : -0.6931472f * ptx::lg2(1.0f - u);
  return fminf(fmaxf(log2_p - ptx::lg2(e), -kMaxApproxKey), kMaxApproxKey);
}

__device__ __forceinline__ float approx_error(float key) { return fmaf(fabsf(key), 2e-6f, 5e-4f); }

// The words of which a tile's uniform numbers have their upper halves, those of a lane's tokens in
// kGroups groups; `block` is the philox_block() of the lane's first token.
template <int kGroups>
__device__ __forceinline__ void draw_upper_halves(uint4 (&words)[kGroups], unsigned block,
                                                  PhiloxKey key) {
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    words[n] = philox_counter(block + 32 * n, kTokenStream, kUpper, key);
  }
  philox4x32(words, key.seed);
}

// 1/2 + u, or 2 u if that is more, from 16 bits of a word: the upper half of u's bits. So it is at
// most 1/2 + E.
__device__ __forceinline__ float half_plus_uniform(unsigned word, int side) {
  return __uint_as_float(__byte_perm(word, 0x3f, side ? 0x4325 : 0x4105));
}

// The smallest of the lower halves of four words, and of their upper halves.
__device__ __forceinline__ unsigned least_halves(uint4 words) {
  return __vminu2(__vminu2(words.x, words.y), __vminu2(words.z, words.w));
}

// Whether one of four tokens may pass: whether the largest of their logits would with the smallest
// of their uniform numbers. A token with logit x is rejected if 1/2 + u > limit(x).
template <class Limit>
__device__ __forceinline__ bool any_may_pass(float top, uint4 words, int side, Limit limit) {
  return !(half_plus_uniform(least_halves(words), side) > limit(top));
}

// Which of four tokens may pass; bit j is token j.
template <class Limit>
__device__ __forceinline__ unsigned which_may_pass(const float* x, uint4 words, int side,
                                                   Limit limit) {
  const unsigned bits[4] = {words.x, words.y, words.z, words.w};
  unsigned which = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (!(half_plus_uniform(bits[j], side) > limit(x[j]))) which |= 1u << j;
  }
  return which;
}

// Which tokens of kGroups groups may pass; bit j is token j of a thread. Nearly always none does:
// that costs one branch.
template <int kGroups, class Limit>
__device__ __forceinline__ unsigned which_of_tile(const float* x, const uint4 (&words)[kGroups],
                                                  Limit limit) {
  bool may[2 * kGroups], any = false;
#pragma unroll
  for (int four = 0; four < 2 * kGroups; ++four) {
    may[four] = any_may_pass(largest_of_four(x + 4 * four), words[four / 2], four % 2, limit);
    any |= may[four];
  }
  if (!any) return 0;
  unsigned which = 0;
#pragma unroll
  for (int four = 0; four < 2 * kGroups; ++four) {
    if (may[four])
      which |= which_may_pass(x + 4 * four, words[four / 2], four % 2, limit) << 4 * four;
  }
  return which;
}

struct ArgmaxSmem {
  Draw warp_best[kWarps], block_best[Config::cluster];
};

__device__ __forceinline__ Draw best_of_warp(Draw best) {
#pragma unroll 1  // it runs once a row
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const Draw other = {shuffle_xor(best.key, lanes), shuffle_xor(best.token, lanes)};
    if (beats(other, best)) best = other;
  }
  return best;
}

// The best draw of the block, known to its first warp.
__device__ __forceinline__ Draw best_of_block(Draw best, ArgmaxSmem& smem) {
  best = best_of_warp(best);
  if (threadIdx.x % 32 == 0) smem.warp_best[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return best;
  return best_of_warp(smem.warp_best[min(int(threadIdx.x), kWarps - 1)]);
}

// The best draw of the cluster, known to the first thread of its first block, from each block's,
// known to its first thread.
__device__ __forceinline__ Draw best_of_cluster(Draw best, ArgmaxSmem& smem) {
  if (Config::cluster == 1) return best;
  if (threadIdx.x == 0) of_rank(smem.block_best, 0)[rank_in_cluster()] = best;
  sync_cluster();
  if (threadIdx.x == 0 && rank_in_cluster() == 0) {
#pragma unroll
    for (int rank = 1; rank < Config::cluster; ++rank) {
      if (beats(smem.block_best[rank], best)) best = smem.block_best[rank];
    }
  }
  return best;
}

// How many of the block's threads have a token that may have the largest key, by their approximate
// keys, -inf for none. `may_win` says whether the thread's own may. `slots` has kWarps values.
__device__ __forceinline__ int count_possible_winners(float key, bool& may_win, float* slots) {
  const float least = key > -kInfinity ? key - approx_error(key) : key;
  const float threshold = largest_of_block(least, slots);
  may_win = key > -kInfinity && !(key + approx_error(key) < threshold);
  return __syncthreads_count(may_win);
}

constexpr int kMaxContenders = 512;

struct BlockResult {  // of a block's contenders, known to the whole cluster
  float threshold;
  int count, bad;
};

struct GumbelSmem {
  unsigned threshold;  // ordered(): log2(e) times the largest key so far, or a little less
  int count, bad;      // contenders; whether a NaN or +inf was met
  int tokens[kMaxContenders];
  float keys[kMaxContenders];  // approximate
  BlockResult results[Config::cluster];
  ArgmaxSmem argmax;
};

__device__ __forceinline__ void init_contenders(GumbelSmem& smem) {
  if (threadIdx.x == 0) {
    smem.threshold = 0;
    smem.count = 0;
    smem.bad = 0;
  }
  __syncthreads();
}

// Lifts the threshold to the largest of `keys`, one a thread, which must not be above the tokens'.
__device__ __forceinline__ void init_threshold(float key, GumbelSmem& smem) {
  key = reduce_warp(key, [](float a, float b) { return fmaxf(a, b); });
  if (threadIdx.x % 32 == 0) atomicMax(&smem.threshold, ordered(key));
  __syncthreads();
}

__device__ __forceinline__ float read_threshold(const GumbelSmem& smem) {
  return from_ordered(*static_cast<const volatile unsigned*>(&smem.threshold));
}

// Adds a token whose logit is x to the block's contenders.
__device__ __forceinline__ void add_contender(int token, float x, float slope, PhiloxKey key,
                                              GumbelSmem& smem) {
  if (!(x < kInfinity)) smem.bad = 1;
  if (!(x > -kInfinity)) return;
  const float near = approx_key(x * slope, philox_uniform(key, kTokenStream, token));
  if (near == -kMaxApproxKey) return;  // tokens that are no contenders may have better keys
  const int place = atomicAdd(&smem.count, 1);
  if (place < kMaxContenders) {
    smem.tokens[place] = token;
    smem.keys[place] = near;
  }
  atomicMax(&smem.threshold, ordered(near - approx_error(near)));
}

// The winner among the contenders of the cluster's blocks. Returns true in the one thread that is
// to write it; -1 for a row without a finite logit, or with a NaN or +inf. load(i) gives token i's
// logit, -inf for one that must not win, and scaled(i, load(i)) the logit over temperature in
// float64. All blocks must be known to run, and all threads must call this.
template <class Load, class Scaled>
__device__ __forceinline__ bool decide(Load load, Scaled scaled, Segment segment, PhiloxKey key,
                                       GumbelSmem& smem, int& winner) {
  if (threadIdx.x < Config::cluster) {
    of_rank(smem.results, threadIdx.x)[rank_in_cluster()] = {from_ordered(smem.threshold),
                                                             smem.count, smem.bad};
  }
  sync_cluster();
  float threshold = -kMaxFloat;
  bool bad = false, none = true;
#pragma unroll
  for (int rank = 0; rank < Config::cluster; ++rank) {
    const BlockResult result = smem.results[rank];
    if (result.count > 0) threshold = fmaxf(threshold, result.threshold);
    none &= result.count == 0;
    bad |= result.bad != 0;
  }
  winner = -1;
  const bool first = threadIdx.x == 0 && rank_in_cluster() == 0;
  if (bad) return first;
  int blocks = 0;  // that may hold the winner
  bool own = false;
#pragma unroll
  for (int rank = 0; rank < Config::cluster; ++rank) {
    const BlockResult result = smem.results[rank];
    const bool may =
        none || result.count > kMaxContenders ||
        (result.count > 0 && result.threshold + 3.0f * approx_error(result.threshold) >= threshold);
    blocks += may;
    if (rank == rank_in_cluster()) own = may;
  }
  if (blocks == 1 && !own) return false;

  // Rows in ascending order have too many contenders; a row that is empty, or out of float32's
  // range, has none. Then float64 decides between all tokens.
  const bool all = none || smem.count > kMaxContenders;
  int left = 0;
#pragma unroll 1  // unrolled it would spill
  for (int n = threadIdx.x; n < smem.count && !all; n += Config::threads) {
    if (smem.keys[n] + approx_error(smem.keys[n]) < threshold) continue;
    ++left;
    winner = smem.tokens[n];
  }
  const bool alone = __syncthreads_count(left == 1) == 1 && !__syncthreads_or(left > 1);
  if (blocks == 1 && !all && alone) return left == 1;

  Draw best = {0.0, -1};
  for (int n = threadIdx.x; own && n < (all ? segment.end - segment.begin : smem.count);
       n += Config::threads) {
    const int i = all ? segment.begin + n : smem.tokens[n];
    const float x = load(i);
    if (!(x > -kInfinity) || (!all && smem.keys[n] + approx_error(smem.keys[n]) < threshold))
      continue;
    const double u = philox_uniform(key, kTokenStream, i);
    const Draw draw = {scaled(i, x) - log(-log1p(-u)), i};
    if (beats(draw, best)) best = draw;
  }
  best = best_of_block(best, smem.argmax);
  if (blocks > 1) best = best_of_cluster(best, smem.argmax);
  winner = best.token;
  return blocks > 1 ? first : threadIdx.x == 0;
}

// Draws a token of a row of which few tokens may win: a warp whose tokens are all -inf is passed
// over. Arguments and result are those of decide(); slope is log2(e) / temperature.
template <class Load, class Scaled>
__device__ __forceinline__ bool gumbel_max(Load load, Scaled scaled, Segment segment, float slope,
                                           PhiloxKey key, GumbelSmem& smem, int& winner) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  init_contenders(smem);
  float start = -kMaxFloat;  // a first threshold from one token a thread
  const int sample = segment.begin + threadIdx.x;
  if (sample < segment.end) {
    start = approx_key(load(sample) * slope, philox_uniform(key, kTokenStream, sample));
    start -= approx_error(start);
  }
  init_threshold(start, smem);

  constexpr int kTokens = 4;  // of a thread, whose numbers are from one counter
  for (int base = segment.begin + warp * 32 * kTokens; base < segment.end;
       base += Config::threads * kTokens) {
    float x[kTokens];
    bool any = false;
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      const int i = base + 32 * j + lane;
      x[j] = i < segment.end ? load(i) : -kInfinity;
      any |= !(x[j] == -kInfinity);
    }
    if (!__any_sync(0xffffffffu, any)) continue;
    const float threshold = read_threshold(smem);
    uint4 words[1];
    draw_upper_halves(words, philox_block(base + lane), key);
    const auto limit = [&](float y) { return 0.5f + ptx::ex2(fmaf(y, slope, -threshold)); };
    unsigned contenders = which_may_pass(x, words[0], philox_side(base), limit);
    for (; contenders != 0; contenders &= contenders - 1) {
      const int i = base + 32 * (__ffs(contenders) - 1) + lane;
      if (i < segment.end) add_contender(i, load(i), slope, key, smem);
    }
  }
  __syncthreads();
  return decide(load, scaled, segment, key, smem, winner);
}
