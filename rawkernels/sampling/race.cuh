// The Gumbel race: the token with the largest  logit / temperature - log(-log1p(-u)),  u uniform,
// is a draw from softmax.
//
// The winner is decided in float64, as NumPy decides it, but hardly any token gets that far. With E
// = -log1p(-u) a token beats the best key so far only if  E < 2^(log2(e) (logit / temperature -
// key)),  and E > u: one exp2 and 16 bits of u tell nearly every token that it has lost. Rounding
// is met by a margin, which costs a few needless looks and no answer. A NaN passes every such test,
// since each is written so that only a true comparison rejects; so does +inf.
#pragma once

#include "ptx/math.cuh"
#include "sampling/row.cuh"
#include "tile/philox.cuh"

constexpr unsigned kTokenStream = 0, kAcceptStream = 1;

struct Draw {
  double key;
  int token;  // -1: none
};

constexpr int kClose = 512;

struct RaceSmem {
  unsigned bar;  // ordered(): what log2(e) times a key must reach to be looked at
  int num_close;
  int close[kClose];  // tokens to be looked at
  float bars[kWarps];
  Draw best[kWarps];
  int bad[kWarps];
  Draw block_best;
  int block_bad;
};

__device__ __forceinline__ bool beats(const Draw& a, const Draw& b) {
  return a.token >= 0 && (b.token < 0 || a.key > b.key || (a.key == b.key && a.token < b.token));
}

// A token's key, as NumPy has it. Hardly ever asked for, so that one copy will do.
__device__ __noinline__ double exact_key(float x, float temperature, float u) {
  return double(x) / double(temperature) - log(-log1p(-double(u)));
}

constexpr float kMostNear = 3e38f;

// log2(e) times a token's key, nearly: less than slack() off, or else beyond kMostNear. With E =
// -log1p(-u) it is log2 of the token's mass, in any unit that all have in common, less log2(E).
__device__ __forceinline__ float near_key(float log_mass, float u) {
  const float series = u * fmaf(u, fmaf(u, fmaf(u, fmaf(u, 0.2f, 0.25f), 1 / 3.0f), 0.5f), 1.0f);
  const float e = u < 0x1p-4f ? series : -0.6931472f * ptx::lg2(1.0f - u);
  return fminf(fmaxf(log_mass - ptx::lg2(e), -kMostNear), kMostNear);
}

__device__ __forceinline__ float slack(float key) { return fmaf(fabsf(key), 2e-6f, 5e-4f); }

// NaN if one of four is.
__device__ __forceinline__ float largest_of_four(const float* x) {
  return ptx::max_nan(ptx::max_nan(x[0], x[1]), ptx::max_nan(x[2], x[3]));
}

// 1/2 + u, or 2 u if that is more, of the upper half of u's bits; so not above. E is at least u,
// and 1/2 + E at least this.
__device__ __forceinline__ float half_plus(unsigned word, int half) {
  return __uint_as_float(__byte_perm(word, 0x3f, half ? 0x4325 : 0x4105));
}

// The least of a counter's upper halves, and of its lower ones.
__device__ __forceinline__ unsigned least_halves(uint4 words) {
  return __vminu2(__vminu2(words.x, words.y), __vminu2(words.z, words.w));
}

// log2(e) times a token's key, or a little less: -log E >= log((1 - u) / u).
__device__ __forceinline__ float key_bound(float logit, float slope, PhiloxKey key, int i) {
  const float u = philox_uniform(key, kTokenStream, i);
  const float bound = fmaf(logit, slope, ptx::lg2(1.0f - u) - ptx::lg2(u));
  return fminf(fmaxf(bound - fmaf(fabsf(bound), 1e-6f, 1e-3f), -kMaxFloat), kMaxFloat);
}

// The best draw of the segment by each thread's share of it. load(i) gives the logit, -inf for one
// that may not win, and exact(i, load(i)) the logit over temperature in float64; slope is log2(e) /
// temperature. Sets `bad` if a NaN or +inf was met. All threads of the block must come. Where few
// tokens may win, whole warps are passed over.
template <class Load, class Exact>
__device__ __forceinline__ Draw race(Load load, Exact exact, Segment segment, float slope,
                                     PhiloxKey key, RaceSmem& smem, bool& bad) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Draw best = {0.0, -1};

  // A first bar from one token a thread.
  float start = -kMaxFloat;
  const int sample = segment.begin + threadIdx.x;
  if (sample < segment.end) start = key_bound(load(sample), slope, key, sample);
  if (threadIdx.x == 0) {
    smem.bar = 0;
    smem.num_close = 0;
  }
  __syncthreads();
  start = reduce_warp(start, [](float a, float b) { return fmaxf(a, b); });
  if (lane == 0) atomicMax(&smem.bar, ordered(start));
  __syncthreads();

  constexpr int kTokens = 4;  // of a thread, which have halves alike of a counter's numbers
  for (int base = segment.begin + warp * 32 * kTokens; base < segment.end;
       base += Config::threads * kTokens) {
    float logit[kTokens];
    if (base + 32 * kTokens <= segment.end) {
#pragma unroll
      for (int j = 0; j < kTokens; ++j) logit[j] = load(base + 32 * j + lane);
    } else {
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        const int i = base + 32 * j + lane;
        logit[j] = i < segment.end ? load(i) : -kInfinity;
      }
    }
    bool any = false;
#pragma unroll
    for (int j = 0; j < kTokens; ++j) any |= !(logit[j] == -kInfinity);
    if (!__any_sync(0xffffffffu, any)) continue;
    const float bar = from_ordered(*static_cast<volatile unsigned*>(&smem.bar));
    uint4 words[1] = {philox_counter(philox_block(base + lane), kTokenStream, kUpper, key)};
    philox4x32(words, key.seed);
    const unsigned bits[4] = {words[0].x, words[0].y, words[0].z, words[0].w};
    unsigned close = 0;  // bit j: token j may win
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      const float limit = 0.5f + ptx::ex2(fmaf(logit[j], slope, -bar));
      if (!(half_plus(bits[j], philox_side(base)) > limit)) close |= 1u << j;
    }
    for (; close != 0; close &= close - 1) {
      const int i = base + 32 * (__ffs(close) - 1) + lane;
      if (i >= segment.end) continue;
      const int place = atomicAdd(&smem.num_close, 1);
      if (place < kClose) smem.close[place] = i;
      atomicMax(&smem.bar, ordered(key_bound(load(i), slope, key, i)));
    }
  }
  __syncthreads();

  // Rows in ascending order, or far out of the usual range, may have too many: then all are looked
  // at.
  const bool all = smem.num_close > kClose;
  const int looks = all ? segment.end - segment.begin : smem.num_close;
  for (int look = threadIdx.x; look < looks; look += Config::threads) {
    const int i = all ? segment.begin + look : smem.close[look];
    const float x = load(i);
    bad |= !(x < kInfinity);
    if (!(x > -kInfinity)) continue;
    const Draw draw = {exact(i, x) - log(-log1p(-double(philox_uniform(key, kTokenStream, i)))), i};
    if (beats(draw, best)) best = draw;
  }
  return best;
}

// The best draw of the block, and whether the row is bad, known to its first thread.
__device__ __forceinline__ void best_of_block(Draw& best, bool& bad, RaceSmem& smem) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  bad = __any_sync(0xffffffffu, bad);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const Draw other = {__shfl_xor_sync(0xffffffffu, best.key, lanes),
                        __shfl_xor_sync(0xffffffffu, best.token, lanes)};
    if (beats(other, best)) best = other;
  }
  if (lane == 0) {
    smem.best[warp] = best;
    smem.bad[warp] = bad;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int w = 1; w < kWarps; ++w) {
      if (beats(smem.best[w], best)) best = smem.best[w];
      bad |= smem.bad[w];
    }
  }
}

// How many of the block's candidates may come first, one a thread, by near_key(); -inf is none.
// `may` says whether the thread's own is one of them.
__device__ __forceinline__ int near_first(float near, bool& may, RaceSmem& smem) {
  float bar = largest_of_warp(near > -kInfinity ? near - slack(near) : near);
  if (threadIdx.x % 32 == 0) smem.bars[threadIdx.x / 32] = bar;
  __syncthreads();
  bar = largest_of_warp(smem.bars[threadIdx.x % kWarps]);
  may = near > -kInfinity && !(near + slack(near) < bar);
  return __syncthreads_count(may);
}

// The best draw of the cluster, known to the first thread of its first block; token -1 for a bad
// row.
__device__ __forceinline__ Draw best_of_cluster(Draw best, bool bad, RaceSmem& smem) {
  best_of_block(best, bad, smem);
  if (threadIdx.x == 0) {
    smem.block_best = best;
    smem.block_bad = bad;
  }
  sync_cluster();
  if (threadIdx.x == 0 && rank_in_cluster() == 0) {
#pragma unroll
    for (int rank = 1; rank < Config::cluster; ++rank) {
      const Draw other = *of_rank(&smem.block_best, rank);
      if (beats(other, best)) best = other;
      bad |= *of_rank(&smem.block_bad, rank) != 0;
    }
  }
  sync_cluster();  // no block leaves while its shared memory may be read
  if (bad) best.token = -1;
  return best;
}
