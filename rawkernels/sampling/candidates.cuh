// The candidates of a row: a list of the few tokens that can matter, found while the row is read
// once and exchanged between the blocks of a cluster through distributed shared memory.
//
// All blocks first read the same pilot sample of the row, so that they agree on which tokens become
// candidates. After the exchange every block has the whole list and draws the same conclusions.
#pragma once

#include "ptx/registers.cuh"
#include "sampling/penalty_table.cuh"
#include "sampling/tiles.cuh"

using Key = unsigned long long;  // a rank_key; 0 is none

constexpr int kPilotSize = 4096;  // tokens in the pilot sample
constexpr int kPilotPerThread = kPilotSize / Config::threads;
constexpr int kMaxCandidates = 2048;
constexpr int kCandidatesPerBlock = kMaxCandidates / Config::cluster;
constexpr int kCandidatesPerThread = kMaxCandidates / Config::threads;

struct CandidateSmem {
  Key keys[kMaxCandidates];    // place p of the block of rank r at p * cluster + r
  int found[Config::cluster];  // tokens that each block found, whether or not there was a place
  int bad[Config::cluster];    // whether each block met a NaN or +inf
};

// x[j] by selection, so that x stays in registers.
__device__ __forceinline__ float select_register(const float (&x)[kTileTokens], int j) {
  float left[kTileTokens];
#pragma unroll
  for (int k = 0; k < kTileTokens; ++k) left[k] = x[k];
#pragma unroll
  for (int step = 1; step < kTileTokens; step *= 2) {
#pragma unroll
    for (int k = 0; k < kTileTokens; k += 2 * step) left[k] = j & step ? left[k + step] : left[k];
  }
  return left[0];
}

// The pilot sample is 32 groups of 128 tokens, spread evenly over the row. Returns the first token
// of one of a warp's groups, which is beyond the row if the row has fewer groups.
__device__ __forceinline__ int pilot_base(int vocab, int group) {
  constexpr int kSize = 128, kGroups = kPilotSize / kSize;
  const int groups = (vocab + kSize - 1) / kSize;
  const int warp = ptx::thread_index() / 32;  // read anew: it would be kept for the next pilot
  const int wanted = warp * (kPilotPerThread / 4) + group;
  return (groups <= kGroups ? wanted : wanted * groups / kGroups) * kSize;
}

__device__ __forceinline__ void read_pilot(const Row& logits, int vocab,
                                           float (&x)[kPilotPerThread]) {
#pragma unroll
  for (int group = 0; group < kPilotPerThread / 4; ++group) {
    const int base = pilot_base(vocab, group);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = tile_token(base, j);
      x[4 * group + j] = i < vocab ? logits(i) : -kInfinity;
    }
  }
}

__device__ __forceinline__ void clear_candidates(CandidateSmem& smem) {
  if (threadIdx.x == 0) smem.found[rank_in_cluster()] = smem.bad[rank_in_cluster()] = 0;
  __syncthreads();
}

__device__ __forceinline__ void add_candidate(Key key, CandidateSmem& smem) {
  const int rank = rank_in_cluster();
  const int place = atomicAdd(&smem.found[rank], 1);
  if (place < kCandidatesPerBlock) smem.keys[place * Config::cluster + rank] = key;
}

// Adds the tokens that reach `threshold` with their penalized logits, and whose own logits are
// below its logit: the others are met where the row is read, equal ones of a higher index among
// them.
__device__ __forceinline__ void add_penalized(const Row& logits, const PenalizedRow& penalized,
                                              Key threshold, CandidateSmem& smem) {
  if (!penalized.slots) return;
  const auto load = [&](int slot) { return penalized.slots[slot]; };
  for_each_ahead<4>(rank_in_cluster() * Config::threads + threadIdx.x, 1 << penalized.bits,
                    Config::cluster * Config::threads, load, [&](int, PenalizedLogit entry) {
                      if (entry.token < 0) return;
                      const float value = entry.logit + 0.0f;
                      if (!(value < kInfinity)) smem.bad[rank_in_cluster()] = 1;
                      const Key key = rank_key(value, entry.token);
                      if (key >= threshold && logits(entry.token) < key_score(threshold)) {
                        add_candidate(key, smem);
                      }
                    });
}

// Gives each block the candidates of all blocks.
__device__ __forceinline__ void exchange_candidates(CandidateSmem& smem) {
  if constexpr (Config::cluster > 1) {
    __syncthreads();
    const int rank = rank_in_cluster();
    const int to = threadIdx.x % Config::cluster;
    const int count = min(smem.found[rank], kCandidatesPerBlock);
    if (to != rank) {
      for (int p = threadIdx.x / Config::cluster; p < count;
           p += Config::threads / Config::cluster) {
        Key* const place = &smem.keys[p * Config::cluster + rank];
        *of_rank(place, to) = *place;
      }
      if (threadIdx.x < Config::cluster) {
        *of_rank(&smem.found[rank], to) = smem.found[rank];
        *of_rank(&smem.bad[rank], to) = smem.bad[rank];
      }
    }
  }
  sync_cluster();
}

// What is known of the row after the exchange.
struct Candidates {
  int total;      // tokens found, whether or not there was a place for them
  int places;     // of the list, up to the last that a block filled
  bool complete;  // whether there was a place for every token found
  bool bad;       // whether the row has a NaN or +inf

  __device__ __forceinline__ explicit Candidates(const CandidateSmem& smem) {
    int most = 0, bad_blocks = 0;
    total = 0;
#pragma unroll
    for (int rank = 0; rank < Config::cluster; ++rank) {
      most = max(most, smem.found[rank]);
      total += smem.found[rank];
      bad_blocks |= smem.bad[rank];
    }
    bad = bad_blocks != 0;
    complete = most <= kCandidatesPerBlock;
    places = min(most, kCandidatesPerBlock) * Config::cluster;
  }
};

// A thread's share of the candidates.
__device__ __forceinline__ void read_candidates(const CandidateSmem& smem,
                                                Key (&keys)[kCandidatesPerThread]) {
  const int end =
      min(smem.found[threadIdx.x % Config::cluster], kCandidatesPerBlock) * Config::cluster;
#pragma unroll
  for (int n = 0; n < kCandidatesPerThread; ++n) {
    const int place = threadIdx.x + n * Config::threads;
    keys[n] = place < end ? smem.keys[place] : 0;
  }
}

// A key that at least `least` of the block's keys reach and, if there is one, at most `most`, found
// by bisection of [low, high); `low` if fewer reach any. Keys differ from each other unless they
// are 0. No thread has more than `used` keys.
template <int n>
__device__ __forceinline__ Key find_threshold(const Key (&keys)[n], int used, int least, int most,
                                              Key low, Key high) {
  while (low + 1 < high) {
    const Key middle = low + (high - low) / 2;
    int count = 0;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      if (k < used) count += __syncthreads_count(keys[k] >= middle);
    }
    if (count < least) {
      high = middle;
    } else {
      low = middle;
      if (count <= most) break;
    }
  }
  return low;
}
