// The candidates of a row: a list of the few tokens that can matter, found while the row is read
// once and exchanged between the blocks of a cluster through distributed shared memory.
//
// All blocks first read the same pilot sample of the row, so that they agree on which tokens become
// candidates. After the exchange every block has the whole list and draws the same conclusions.
#pragma once

#include "ptx/prefetch.cuh"
#include "ptx/registers.cuh"
#include "sampling/penalty_table.cuh"
#include "sampling/row.cuh"

using Key = unsigned long long;  // a rank_key; 0 is none

constexpr int kUnroll = Config::unroll;   // groups that a warp has in flight
constexpr int kTileTokens = 8 * kUnroll;  // tokens of a thread in them
constexpr int kPilotSize = 4096;          // tokens in the pilot sample
constexpr int kPilotPerThread = kPilotSize / Config::threads;
constexpr int kMaxCandidates = 2048;
constexpr int kCandidatesPerBlock = kMaxCandidates / Config::cluster;
constexpr int kCandidatesPerThread = kMaxCandidates / Config::threads;

struct Row {
  const Config::dtype* logits;

  __device__ __forceinline__ float operator()(int i) const { return to_float(logits[i]); }

  // Asks L2 for a segment ahead of its use.
  __device__ __forceinline__ void prefetch(Segment segment) const {
    constexpr int kLine = 128 / sizeof(Config::dtype);
    for (int i = segment.begin + threadIdx.x * kLine; i < segment.end; i += Config::threads * kLine)
      ptx::prefetch_l2(logits + i);
  }
};

struct CandidateSmem {
  Key keys[kMaxCandidates];    // place p of the block of rank r at p * cluster + r
  int found[Config::cluster];  // tokens that each block found, whether or not there was a place
  int bad[Config::cluster];    // whether each block met a NaN or +inf
};

// Token j of a thread in the groups from `base` on.
__device__ __forceinline__ int tile_token(int base, int j) {
  return base + 32 * j + int(threadIdx.x % 32);
}

// Whether there are registers to hold the next tile while one is worked on.
constexpr bool kDoubleBuffer = Config::blocks_per_sm == 1;

// A warp's tiles of a segment, each of kTokens tokens of each thread; beyond the segment's end a
// logit is -inf. Tiles go to kTeam warps in turn.
template <int kTokens, int kTeam = kWarps>
struct Tiles {
  const Row& logits;
  const Segment segment;
  int base;

  __device__ __forceinline__ Tiles(const Row& logits, Segment segment)
      : logits(logits),
        segment(segment),
        base(segment.begin + int(threadIdx.x / 32) % kTeam * 32 * kTokens) {}

  __device__ __forceinline__ bool any() const { return base < segment.end; }

  __device__ __forceinline__ void next() { base += kTeam * 32 * kTokens; }

  __device__ __forceinline__ void load(float (&x)[kTokens]) const {
    if (base + 32 * kTokens <= segment.end) {
#pragma unroll
      for (int j = 0; j < kTokens; ++j) x[j] = logits(tile_token(base, j));
    } else {
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        const int i = tile_token(base, j);
        x[j] = i < segment.end ? logits(i) : -kInfinity;
      }
    }
  }

  __device__ __forceinline__ void load_ahead(float (&ahead)[kTokens]) const {
    if (kDoubleBuffer) load(ahead);
  }
};

// f(base, logits) for each tile. With kDoubleBuffer, `ahead` holds the first tile, from
// load_ahead(), and then each tile that follows, which is loaded while f runs.
template <int kTokens, class F>
__device__ __forceinline__ void for_each_tile(Tiles<kTokens> tiles, float (&ahead)[kTokens], F f) {
  float x[kTokens];
  while (tiles.any()) {
    const int base = tiles.base;
    if (kDoubleBuffer) {
#pragma unroll
      for (int j = 0; j < kTokens; ++j) x[j] = ahead[j];
      tiles.next();
      if (tiles.any()) tiles.load(ahead);
    } else {
      tiles.load(x);
      tiles.next();
    }
    f(base, x);
    __syncwarp();  // diverged lanes would go on alone, each with loads of its own
  }
}

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

// Adds the tokens that reach `threshold` only with their penalized logits.
__device__ __forceinline__ void add_penalized(const Row& logits, const PenalizedRow& penalized,
                                              Key threshold, CandidateSmem& smem) {
  if (!penalized.slots) return;
  constexpr int kAhead = 4, kStep = Config::cluster * Config::threads;
  const int slots = 1 << penalized.bits;
#pragma unroll 1
  for (int first = rank_in_cluster() * Config::threads + threadIdx.x; first < slots;
       first += kAhead * kStep) {
    PenalizedLogit entries[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int slot = first + n * kStep;
      entries[n] = slot < slots ? penalized.slots[slot] : PenalizedLogit{-1, 0.0f};
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int token = entries[n].token;
      const float value = entries[n].logit + 0.0f;
      if (token < 0) continue;
      if (!(value < kInfinity)) smem.bad[rank_in_cluster()] = 1;
      const Key key = rank_key(value, token);
      if (key >= threshold && rank_key(logits(token) + 0.0f, token) < threshold) {
        add_candidate(key, smem);
      }
    }
  }
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
