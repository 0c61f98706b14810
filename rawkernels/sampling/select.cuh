// Selection from a ranked row: the cutoff of the shortest run of tokens, by descending score and
// then ascending index, whose weights reach a target. Weights are 1 (top-k) or probabilities in
// fixed point (top-p), so that sums are exact in any order.
//
// A histogram over kBins equal steps of the score shows in which step the run ends; if very many
// tokens fall into one step, further histograms narrow it down by eight bits of the rank key at a
// time. Once few enough tokens are left, they are sorted.
#pragma once

#include "sampling/row.cuh"

constexpr int kMaxSorted = Config::threads;  // tokens that are sorted in the end
constexpr int kSortBuffer = 512;             // the power of two that they are filled up to
constexpr int kBins = 2 * Config::threads;
static_assert(kMaxSorted <= kSortBuffer, "the tokens to be sorted must fit");
static_assert(kBins >= 256, "eight bits of a rank key must have a bin each");
static_assert(
    kBins % Config::cluster == 0 && Config::threads % Config::cluster == 0,
    "bins and threads must be multiples of the cluster size, so that blocks share evenly");

struct Cutoff {  // keeps what ranks at or before (score, index)
  float score;
  int index;

  __device__ __forceinline__ bool keeps(float value, int i) const {
    return (value > score) | ((value == score) & (i <= index));  // without branches
  }
};

struct SelectSmem {
  union {
    unsigned bins[kBins];                    // of this block, then of the cluster
    unsigned long long sorted[kSortBuffer];  // rank 0: the collected tokens of all blocks
  };
  unsigned long long collected[kMaxSorted];
  int count;  // of the collected tokens
  unsigned weights[kWarps];
  Cutoff cutoff;  // written by rank 0
  int bin;
  unsigned before;  // weight of the bins above `bin`
};

// f(i, logit) for each token of the segment, several loads ahead.
template <class Logits, class F>
__device__ __forceinline__ void for_each_token(Logits logit, Segment segment, F f) {
  constexpr int kAhead = 4;
  int i = segment.begin + threadIdx.x;
  for (; i + (kAhead - 1) * Config::threads < segment.end; i += kAhead * Config::threads) {
    float x[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) x[j] = logit(i + j * Config::threads);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) f(i + j * Config::threads, x[j]);
  }
  for (; i < segment.end; i += Config::threads) f(i, logit(i));
}

// The sum of the values of all threads before a thread's own, and of all threads.
__device__ __forceinline__ unsigned exclusive_sum_of_block(unsigned value, unsigned* warp_sums,
                                                           unsigned& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned sum = tile::prefix_sum_of_warp(value);
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  unsigned before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? warp_sums[w] : 0;
    total += warp_sums[w];
  }
  __syncthreads();
  return before + sum - value;
}

// Sorts keys[0, n) descending, n at most kMaxSorted; bitonic.
__device__ __forceinline__ void sort_descending(unsigned long long* keys, int n) {
  int size = 1;
  while (size < n) size *= 2;
  for (int i = n + threadIdx.x; i < size; i += Config::threads) keys[i] = 0;
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {
    for (int step = run / 2; step > 0; step /= 2) {
      for (int pair = threadIdx.x; pair < size / 2; pair += Config::threads) {
        const int low = 2 * pair - (pair & (step - 1)), high = low + step;
        const unsigned long long a = keys[low], b = keys[high];
        if ((a < b) == ((low & run) == 0)) {
          keys[low] = b;
          keys[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

// Collects the tokens for which wanted(i, logit) holds into rank 0's smem.sorted, by descending
// rank key. Returns how many there are in the cluster; if more than kMaxSorted, none is collected.
template <class Logits, class Score, class Wanted>
__device__ __forceinline__ int collect_sorted(Logits logit, Score score, Wanted wanted,
                                              Segment segment, SelectSmem& smem) {
  if (threadIdx.x == 0) smem.count = 0;
  __syncthreads();
  constexpr int kAhead = 8;
  for (int base = segment.begin + threadIdx.x; base < segment.end;
       base += kAhead * Config::threads) {
    unsigned found = 0;  // bit j: token j is wanted; few are
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = base + j * Config::threads;
      if (i < segment.end && wanted(i, logit(i))) found |= 1u << j;
    }
    for (; found != 0; found &= found - 1) {
      const int i = base + (__ffs(found) - 1) * Config::threads;
      const int place = atomicAdd(&smem.count, 1);
      if (place < kMaxSorted) smem.collected[place] = rank_key(score(logit(i)), i);
    }
  }
  sync_cluster();
  const int lane = threadIdx.x % 32;
  const int own = lane < Config::cluster ? *of_rank(&smem.count, lane) : 0;
  const int total = reduce_warp(own, Add());
  if (total <= kMaxSorted && rank_in_cluster() == 0) {
    constexpr int kFetchers = Config::threads / Config::cluster;  // threads for each block's tokens
    const int rank = threadIdx.x / kFetchers;
    int place = 0;
#pragma unroll
    for (int r = 0; r < Config::cluster; ++r) {
      const int count = __shfl_sync(0xffffffffu, own, r);
      if (r < rank) place += count;
    }
    const int count = __shfl_sync(0xffffffffu, own, rank);
    for (int i = threadIdx.x % kFetchers; i < count; i += kFetchers)
      smem.sorted[place + i] = *of_rank(smem.collected + i, rank);
    __syncthreads();
    sort_descending(smem.sorted, total);
  }
  return total;
}

// Accumulates the weights of the cluster's tokens by bin, in smem.bins of each block. bin(i, logit)
// is negative for a token that does not count.
template <class Logits, class Bin, class Weight>
__device__ __forceinline__ void accumulate_histogram(Logits logit, Bin bin, Weight weight,
                                                     Segment segment, SelectSmem& smem) {
  constexpr int kOwn = kBins / Config::cluster;  // bins that a block sums over the cluster
  for (int b = threadIdx.x; b < kBins; b += Config::threads) smem.bins[b] = 0;
  __syncthreads();
  for_each_token(logit, segment, [&](int i, float x) {
    const int b = bin(i, x);
    if (b >= 0) atomicAdd(&smem.bins[b], weight(x));
  });
  sync_cluster();
  if constexpr (Config::cluster > 1) {
    for (int own = threadIdx.x; own < kOwn; own += Config::threads) {
      unsigned* const place = smem.bins + rank_in_cluster() * kOwn + own;
      unsigned sum = 0;
#pragma unroll 2  // more would spill
      for (int rank = 0; rank < Config::cluster; ++rank) sum += *of_rank(place, rank);
#pragma unroll
      for (int rank = 0; rank < Config::cluster; ++rank) *of_rank(place, rank) = sum;
    }
    sync_cluster();
  }
}

// Finds the bin in which the weights reach target_of(their sum): smem.bin, with smem.before above
// it. Returns the target.
template <class Target>
__device__ __forceinline__ unsigned find_bin(Target target_of, SelectSmem& smem) {
  constexpr int kBinsPerThread = kBins / Config::threads;
  unsigned own = 0, total;
#pragma unroll
  for (int b = 0; b < kBinsPerThread; ++b) own += smem.bins[threadIdx.x * kBinsPerThread + b];
  unsigned before = exclusive_sum_of_block(own, smem.weights, total);
  const unsigned target = target_of(total);
  if (before < target && before + own >= target) {
    int b = threadIdx.x * kBinsPerThread;
    while (before + smem.bins[b] < target) before += smem.bins[b++];
    smem.bin = b;
    smem.before = before;
  }
  __syncthreads();
  return target;
}

// The cutoff at which the weights of the kept tokens, whose scores lie in [low, high], reach
// target_of(their sum), which is from 1 to that sum. logit(i) is the logit of a token of the
// segment, any_logit(i) that of any token of the row.
template <class Logits, class AnyLogits, class Score, class Kept, class Weight, class Target>
__device__ __forceinline__ Cutoff select(Logits logit, AnyLogits any_logit, Score score, Kept kept,
                                         Weight weight, Target target_of, float low, float high,
                                         Segment segment, SelectSmem& smem) {
  // Where the range is 0 or past float32, the scale is infinite or 0, and one bin has all tokens.
  const float scale = kBins * ptx::rcp(high - low);
  const auto step = [&](float x) { return min(int((high - score(x)) * scale), kBins - 1); };

  const auto first = [&](int i, float x) {
    const int b = step(x);
    return kept(i, x) ? b : -1;
  };
  accumulate_histogram(logit, first, weight, segment, smem);
  unsigned target = find_bin(target_of, smem);
  target -= smem.before;
  const int first_bin = smem.bin;
  unsigned long long found = 0,
                     known = 0;  // bits of the last token's rank key, and which are known
  for (int shift = 56;; shift -= 8) {
    const auto here = [&](int i, float x) {
      const bool in_bin = (step(x) == first_bin) & kept(i, x);
      return known == 0 ? in_bin : in_bin && (rank_key(score(x), i) & known) == found;
    };
    const int count = collect_sorted(logit, score, here, segment, smem);
    if (count <= kMaxSorted) {
      if (rank_in_cluster() == 0) {
        const unsigned long long key = threadIdx.x < count ? smem.sorted[threadIdx.x] : 0;
        const int i = key_token(key);
        unsigned own = 0, total;
        if (threadIdx.x < count) own = weight(any_logit(i));
        const unsigned before = exclusive_sum_of_block(own, smem.weights, total);
        if (threadIdx.x < count && before < target && before + own >= target) {
          const Cutoff cutoff = {key_score(key), i};
          for (int rank = 0; rank < Config::cluster; ++rank) *of_rank(&smem.cutoff, rank) = cutoff;
        }
      }
      sync_cluster();
      return smem.cutoff;
    }
    accumulate_histogram(
        logit,
        [&](int i, float x) {
          return here(i, x) ? 255 - int(rank_key(score(x), i) >> shift & 255) : -1;
        },
        weight, segment, smem);
    find_bin([&](unsigned) { return target; }, smem);
    found |= static_cast<unsigned long long>(255 - smem.bin) << shift;
    known |= 255ull << shift;
    target -= smem.before;
  }
}
