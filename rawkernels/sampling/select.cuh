// The cut of a ranked row: tokens are ranked by descending score, equals by ascending index, and the shortest run whose
// weights reach a target is kept. Weights are 1 (top-k) or mass in fixed point (top-p), so sums are exact in any order.
//
// Counting narrows down where the run ends: first by kBins equal steps of the score, then, only if very many tokens fall
// into one step, by eight bits of (score, index) at a time. Once few enough are left they are sorted.
#pragma once

#include "sampling/row.cuh"

constexpr int kBins = 1024;
constexpr int kList = 512;

struct Cut {  // keeps what ranks at or before (score, index)
  unsigned score;
  unsigned index;

  __device__ __forceinline__ bool keeps(float value, int i) const {
    const unsigned key = ordered(value);
    return key > score || (key == score && unsigned(i) <= index);
  }
};

struct SelectSmem {
  union {
    unsigned bins[kBins];             // of this block, then of the cluster
    unsigned long long sorted[kList];  // rank 0: what the blocks listed
  };
  unsigned long long list[kList];
  int listed;
  unsigned weights[kWarps];
  Cut cut;  // written by rank 0
  int bin;
  unsigned before;  // weight of the bins above `bin`
};

__device__ __forceinline__ unsigned long long rank_key(float score, int i) {
  return static_cast<unsigned long long>(ordered(score)) << 32 | (0xffffffffu - unsigned(i));
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
        const int low = pair / step * step * 2 + pair % step, high = low + step;
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

// Collects the tokens that `wanted(i)` picks into rank 0's smem.sorted, descending. Returns how many, over the cluster;
// if they are more than kList, nothing is collected.
template <class Score, class Wanted>
__device__ __forceinline__ int collect(Score score, Wanted wanted, Segment segment, SelectSmem& smem) {
  if (threadIdx.x == 0) smem.listed = 0;
  __syncthreads();
  for (int i = segment.begin + threadIdx.x; i < segment.end; i += Config::threads) {
    if (wanted(i)) {
      const int place = atomicAdd(&smem.listed, 1);
      if (place < kList) smem.list[place] = rank_key(score(i), i);
    }
  }
  sync_cluster();
  int total = 0;
  for (int rank = 0; rank < Config::cluster; ++rank) total += *of_rank(&smem.listed, rank);
  if (total <= kList && rank_in_cluster() == 0) {
    int place = 0;
    for (int rank = 0; rank < Config::cluster; ++rank) {
      const int listed = *of_rank(&smem.listed, rank);
      for (int i = threadIdx.x; i < listed; i += Config::threads) smem.sorted[place + i] = *of_rank(smem.list + i, rank);
      place += listed;
    }
    __syncthreads();
    sort_list(smem.sorted, total);
  }
  return total;
}

// Adds up weights by bin over the cluster, in smem.bins of each block. bin(i) is negative for a token that does not count.
template <class Bin, class Weight>
__device__ __forceinline__ void tally(Bin bin, Weight weight, Segment segment, SelectSmem& smem) {
  constexpr int kOwn = kBins / Config::cluster;  // bins that a block adds up over the cluster
  for (int b = threadIdx.x; b < kBins; b += Config::threads) smem.bins[b] = 0;
  __syncthreads();
  for (int i = segment.begin + threadIdx.x; i < segment.end; i += Config::threads) {
    const int b = bin(i);
    if (b >= 0) atomicAdd(&smem.bins[b], weight(i));
  }
  sync_cluster();
  if constexpr (Config::cluster > 1) {
    for (int own = threadIdx.x; own < kOwn; own += Config::threads) {
      unsigned* const place = smem.bins + rank_in_cluster() * kOwn + own;
      unsigned sum = 0;
#pragma unroll
      for (int rank = 0; rank < Config::cluster; ++rank) sum += *of_rank(place, rank);
#pragma unroll
      for (int rank = 0; rank < Config::cluster; ++rank) *of_rank(place, rank) = sum;
    }
    sync_cluster();
  }
}

// Finds the bin in which the weights reach target(their sum): smem.bin, and smem.before above it. Returns the target.
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

// The cut at which the weights of the kept tokens, whose scores lie in [low, high], reach target(their sum), which is
// from 1 to that sum. weight(i, true) is asked for tokens of any block's segment.
template <class Score, class Kept, class Weight, class Target>
__device__ __forceinline__ Cut select(Score score, Kept kept, Weight weight, Target target_of, float low, float high,
                                      Segment segment, SelectSmem& smem) {
  const float scale = kBins / (high - low);  // infinite or 0 for a range of 0 or past float: all in one bin
  const auto step = [&](int i) { return min(max(int((high - score(i)) * scale), 0), kBins - 1); };

  tally([&](int i) { return kept(i) ? step(i) : -1; }, weight, segment, smem);
  unsigned target = locate(target_of, smem);
  target -= smem.before;
  const int first_bin = smem.bin;
  unsigned long long found = 0, known = 0;  // bits of rank_key, and which of them are known
  for (int shift = 56;; shift -= 8) {
    const auto here = [&](int i) {
      return kept(i) && step(i) == first_bin && (rank_key(score(i), i) & known) == found;
    };
    const int listed = collect(score, here, segment, smem);
    if (listed <= kList) {
      if (rank_in_cluster() == 0) {
        const unsigned long long key = threadIdx.x < listed ? smem.sorted[threadIdx.x] : 0;
        const unsigned index = 0xffffffffu - unsigned(key);
        unsigned own = 0, total;
        if (threadIdx.x < listed) own = weight(int(index), true);
        const unsigned before = prefix(own, smem.weights, total);
        if (threadIdx.x < listed && before < target && before + own >= target) {
          for (int rank = 0; rank < Config::cluster; ++rank) *of_rank(&smem.cut, rank) = {unsigned(key >> 32), index};
        }
      }
      sync_cluster();
      return smem.cut;
    }
    tally([&](int i) { return here(i) ? 255 - int(rank_key(score(i), i) >> shift & 255) : -1; }, weight, segment, smem);
    locate([&](unsigned) { return target; }, smem);
    found |= static_cast<unsigned long long>(255 - smem.bin) << shift;
    known |= 255ull << shift;
    target -= smem.before;
  }
}
