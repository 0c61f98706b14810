// The cut of a ranked row: tokens are ranked by descending score, equals by ascending index, and
// the shortest run whose weights reach a target is kept. Weights are 1 (top-k) or mass in fixed
// point (top-p), so sums are exact in any order.
//
// Counting narrows down where the run ends: first by kBins equal steps of the score, then, only if
// very many tokens fall into one step, by eight bits of (score, index) at a time. Once few enough
// are left they are sorted.
#pragma once

#include "ptx/math.cuh"
#include "sampling/row.cuh"

constexpr int kList = Config::threads;
constexpr int kSorted = 512;  // the power of two that a list is filled up to
constexpr int kBins = 2 * Config::threads;
static_assert(kList <= kSorted && kBins >= 256, "a list fits, and so do eight bits");
static_assert(kBins % Config::cluster == 0 && Config::threads % Config::cluster == 0,
              "blocks share the work evenly");

struct Cut {  // keeps what ranks at or before (score, index)
  float score;
  int index;

  __device__ __forceinline__ bool keeps(float value, int i) const {
    return (value > score) | ((value == score) & (i <= index));  // without branches
  }
};

struct SelectSmem {
  union {
    unsigned bins[kBins];                // of this block, then of the cluster
    unsigned long long sorted[kSorted];  // rank 0: what the blocks listed
  };
  unsigned long long list[kList];
  int listed;
  unsigned weights[kWarps];
  Cut cut;  // written by rank 0
  int bin;
  unsigned before;  // weight of the bins above `bin`
};

// f(i, logit) for each token of the segment, whose logits are loaded several ahead.
template <class Row, class F>
__device__ __forceinline__ void sweep(Row logit, Segment segment, F f) {
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

// Exclusive prefix sum over the block, and the sum of all.
__device__ __forceinline__ unsigned prefix(unsigned value, unsigned* weights, unsigned& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned left = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += left;
  }
  if (lane == 31) weights[warp] = sum;
  __syncthreads();
  unsigned before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? weights[w] : 0;
    total += weights[w];
  }
  __syncthreads();
  return before + sum - value;
}

// smem.sorted[0, n) descending; n at most kList.
__device__ __forceinline__ void sort_list(unsigned long long* keys, int n) {
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

// Collects the tokens that wanted(i, logit) picks into rank 0's smem.sorted, descending by score.
// Returns how many, over the cluster; if they are more than kList, nothing is collected.
template <class Row, class Score, class Wanted>
__device__ __forceinline__ int collect(Row logit, Score score, Wanted wanted, Segment segment,
                                       SelectSmem& smem) {
  if (threadIdx.x == 0) smem.listed = 0;
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
      const int place = atomicAdd(&smem.listed, 1);
      if (place < kList) smem.list[place] = rank_key(score(logit(i)), i);
    }
  }
  sync_cluster();
  const int lane = threadIdx.x % 32;
  const int mine = lane < Config::cluster ? *of_rank(&smem.listed, lane) : 0;
  const int total = reduce_warp(mine, Add());
  if (total <= kList && rank_in_cluster() == 0) {
    constexpr int kEach = Config::threads / Config::cluster;  // threads that fetch a block's list
    const int rank = threadIdx.x / kEach;
    int place = 0;
#pragma unroll
    for (int r = 0; r < Config::cluster; ++r) {
      const int listed = __shfl_sync(0xffffffffu, mine, r);
      if (r < rank) place += listed;
    }
    const int listed = __shfl_sync(0xffffffffu, mine, rank);
    for (int i = threadIdx.x % kEach; i < listed; i += kEach)
      smem.sorted[place + i] = *of_rank(smem.list + i, rank);
    __syncthreads();
    sort_list(smem.sorted, total);
  }
  return total;
}

// Adds up weights by bin over the cluster, in smem.bins of each block. bin(i, logit) is negative
// for what does not count.
template <class Row, class Bin, class Weight>
__device__ __forceinline__ void tally(Row logit, Bin bin, Weight weight, Segment segment,
                                      SelectSmem& smem) {
  constexpr int kOwn = kBins / Config::cluster;  // bins that a block adds up over the cluster
  for (int b = threadIdx.x; b < kBins; b += Config::threads) smem.bins[b] = 0;
  __syncthreads();
  sweep(logit, segment, [&](int i, float x) {
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

// Finds the bin in which the weights reach target(their sum): smem.bin, and smem.before above it.
// Returns the target.
template <class Target>
__device__ __forceinline__ unsigned locate(Target target_of, SelectSmem& smem) {
  constexpr int kMine = kBins / Config::threads;
  unsigned mine = 0, total;
#pragma unroll
  for (int b = 0; b < kMine; ++b) mine += smem.bins[threadIdx.x * kMine + b];
  unsigned before = prefix(mine, smem.weights, total);
  const unsigned target = target_of(total);
  if (before < target && before + mine >= target) {
    int b = threadIdx.x * kMine;
    while (before + smem.bins[b] < target) before += smem.bins[b++];
    smem.bin = b;
    smem.before = before;
  }
  __syncthreads();
  return target;
}

// The cut at which the weights of the kept tokens, whose scores lie in [low, high], reach
// target(their sum), which is from 1 to that sum. anywhere(i) is the logit of a token of any
// block's segment.
template <class Row, class Anywhere, class Score, class Kept, class Weight, class Target>
__device__ __forceinline__ Cut select(Row logit, Anywhere anywhere, Score score, Kept kept,
                                      Weight weight, Target target_of, float low, float high,
                                      Segment segment, SelectSmem& smem) {
  const float scale =
      kBins * ptx::rcp(high - low);  // infinite or 0 for a range of 0 or past float: all in one bin
  const auto step = [&](float x) { return min(int((high - score(x)) * scale), kBins - 1); };

  const auto first = [&](int i, float x) {
    const int b = step(x);
    return kept(i, x) ? b : -1;
  };
  tally(logit, first, weight, segment, smem);
  unsigned target = locate(target_of, smem);
  target -= smem.before;
  const int first_bin = smem.bin;
  unsigned long long found = 0, known = 0;  // bits of rank_key, and which of them are known
  for (int shift = 56;; shift -= 8) {
    const auto here = [&](int i, float x) {
      const bool in_bin = (step(x) == first_bin) & kept(i, x);
      return known == 0 ? in_bin : in_bin && (rank_key(score(x), i) & known) == found;
    };
    const int listed = collect(logit, score, here, segment, smem);
    if (listed <= kList) {
      if (rank_in_cluster() == 0) {
        const unsigned long long key = threadIdx.x < listed ? smem.sorted[threadIdx.x] : 0;
        const int i = int(0xffffffffu - unsigned(key));
        unsigned own = 0, total;
        if (threadIdx.x < listed) own = weight(anywhere(i));
        const unsigned before = prefix(own, smem.weights, total);
        if (threadIdx.x < listed && before < target && before + own >= target) {
          const Cut cut = {from_ordered(unsigned(key >> 32)), i};
          for (int rank = 0; rank < Config::cluster; ++rank) *of_rank(&smem.cut, rank) = cut;
        }
      }
      sync_cluster();
      return smem.cut;
    }
    tally(
        logit,
        [&](int i, float x) {
          return here(i, x) ? 255 - int(rank_key(score(x), i) >> shift & 255) : -1;
        },
        weight, segment, smem);
    locate([&](unsigned) { return target; }, smem);
    found |= static_cast<unsigned long long>(255 - smem.bin) << shift;
    known |= 255ull << shift;
    target -= smem.before;
  }
}
