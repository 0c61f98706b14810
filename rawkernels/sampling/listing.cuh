// A list of the few tokens of a row that can matter, found while the row is read once.
//
// All blocks of a cluster look at the same survey of the row first, so they agree on which tokens
// to list; afterwards each of them knows the whole list, and they draw the same conclusions from
// it.
#pragma once

#include "ptx/prefetch.cuh"
#include "ptx/registers.cuh"
#include "sampling/row.cuh"

using Key = unsigned long long;  // a rank_key; 0 is none

constexpr int kUnroll = Config::unroll;                 // groups that a warp has in flight
constexpr int kTile = 8 * kUnroll;                      // tokens of a thread in them
constexpr int kSurvey = 4096;                           // tokens in the survey
constexpr int kSurveyTile = kSurvey / Config::threads;  // of a thread
constexpr int kList = 2048;
constexpr int kShare = kList / Config::cluster;  // of the list, for one block
constexpr int kEach = kList / Config::threads;   // of the list, for one thread

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

struct ListSmem {
  Key keys[kList];             // place p of rank r at p * cluster + r
  int found[Config::cluster];  // by each block, whether or not there was a place
  int bad[Config::cluster];    // a NaN or +inf was met
};

// Token j of a thread in the groups from `base` on.
__device__ __forceinline__ int tile_index(int base, int j) {
  return base + 32 * j + int(threadIdx.x % 32);
}

constexpr bool kAhead = Config::blocks_per_sm == 1;

// A thread's tokens in one tile of the segment after the other, kTokens in each; beyond the end a
// logit is -inf. The warps of a team take turns.
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
      for (int j = 0; j < kTokens; ++j) x[j] = logits(tile_index(base, j));
    } else {
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        const int i = tile_index(base, j);
        x[j] = i < segment.end ? logits(i) : -kInfinity;
      }
    }
  }

  __device__ __forceinline__ void load_ahead(float (&ahead)[kTokens]) const {
    if (kAhead) load(ahead);
  }
};

// f(base, logits) for each tile, while the next one is on its way if there are registers to hold
// it: `ahead`, which the first is asked for into by load_ahead().
template <int kTokens, class F>
__device__ __forceinline__ void for_each_tile(Tiles<kTokens> tiles, float (&ahead)[kTokens], F f) {
  float x[kTokens];
  while (tiles.any()) {
    const int base = tiles.base;
    if (kAhead) {
#pragma unroll
      for (int j = 0; j < kTokens; ++j) x[j] = ahead[j];
      tiles.next();
      if (tiles.any()) tiles.load(ahead);
    } else {
      tiles.load(x);
      tiles.next();
    }
    f(base, x);
    __syncwarp();  // lanes that went their own way would go on alone, each with its own loads
  }
}

// x[j], without a trip to memory.
__device__ __forceinline__ float pick(const float (&x)[kTile], int j) {
  float left[kTile];
#pragma unroll
  for (int k = 0; k < kTile; ++k) left[k] = x[k];
#pragma unroll
  for (int step = 1; step < kTile; step *= 2) {
#pragma unroll
    for (int k = 0; k < kTile; k += 2 * step) left[k] = j & step ? left[k + step] : left[k];
  }
  return left[0];
}

// Groups of 128 tokens spread evenly over the row: the first index of one of a warp's. Beyond the
// row if it has fewer.
__device__ __forceinline__ int survey_base(int vocab, int group) {
  constexpr int kSize = 128, kGroups = kSurvey / kSize;
  const int groups = (vocab + kSize - 1) / kSize;
  const int warp = ptx::thread_index() / 32;  // else kept in registers for another survey
  const int wanted = warp * (kSurveyTile / 4) + group;
  return (groups <= kGroups ? wanted : wanted * groups / kGroups) * kSize;
}

__device__ __forceinline__ void read_survey(const Row& logits, int vocab, float (&x)[kSurveyTile]) {
#pragma unroll
  for (int group = 0; group < kSurveyTile / 4; ++group) {
    const int base = survey_base(vocab, group);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = tile_index(base, j);
      x[4 * group + j] = i < vocab ? logits(i) : -kInfinity;
    }
  }
}

__device__ __forceinline__ void clear_list(ListSmem& smem) {
  if (threadIdx.x == 0) smem.found[rank_in_cluster()] = smem.bad[rank_in_cluster()] = 0;
  __syncthreads();
}

__device__ __forceinline__ void add_to_list(Key key, ListSmem& smem) {
  const int rank = rank_in_cluster();
  const int place = atomicAdd(&smem.found[rank], 1);
  if (place < kShare) smem.keys[place * Config::cluster + rank] = key;
}

// Lists the tokens of the row that reach `bar` only as amended.
__device__ __forceinline__ void list_amended(const Row& logits, const AmendedRow& amended, Key bar,
                                             ListSmem& smem) {
  if (!amended.slots) return;
  constexpr int kAhead = 4, kStep = Config::cluster * Config::threads;
  const int slots = 1 << amended.bits;
#pragma unroll 1
  for (int first = rank_in_cluster() * Config::threads + threadIdx.x; first < slots;
       first += kAhead * kStep) {
    Amended changed[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int slot = first + n * kStep;
      changed[n] = slot < slots ? amended.slots[slot] : Amended{-1, 0.0f};
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int token = changed[n].token;
      const float value = changed[n].logit + 0.0f;
      if (token < 0) continue;
      if (!(value < kInfinity)) smem.bad[rank_in_cluster()] = 1;
      const Key key = rank_key(value, token);
      if (key >= bar && rank_key(logits(token) + 0.0f, token) < bar) add_to_list(key, smem);
    }
  }
}

// Gives each block what all of them listed.
__device__ __forceinline__ void share_list(ListSmem& smem) {
  if constexpr (Config::cluster > 1) {
    __syncthreads();
    const int rank = rank_in_cluster();
    const int to = threadIdx.x % Config::cluster;
    const int listed = min(smem.found[rank], kShare);
    if (to != rank) {
      for (int p = threadIdx.x / Config::cluster; p < listed;
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

// What became of a list.
struct Listed {
  int total;        // tokens found, listed or not
  int places;       // of the list, up to the last that a block filled
  bool whole, bad;  // all that were found are listed; the row has a NaN or +inf

  __device__ __forceinline__ explicit Listed(const ListSmem& smem) {
    int most = 0, bad_blocks = 0;
    total = 0;
#pragma unroll
    for (int rank = 0; rank < Config::cluster; ++rank) {
      most = max(most, smem.found[rank]);
      total += smem.found[rank];
      bad_blocks |= smem.bad[rank];
    }
    bad = bad_blocks != 0;
    whole = most <= kShare;
    places = min(most, kShare) * Config::cluster;
  }
};

// A thread's part of a list.
__device__ __forceinline__ void read_list(const ListSmem& smem, Key (&keys)[kEach]) {
  const int end = min(smem.found[threadIdx.x % Config::cluster], kShare) * Config::cluster;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int place = threadIdx.x + e * Config::threads;
    keys[e] = place < end ? smem.keys[place] : 0;
  }
}

// A key that at least `least` of the block's keys reach and, if there is one, at most `most`; they
// differ from each other unless they are 0. It is from `low`, which is returned where fewer reach
// it, up to `high`. No thread has more than `used` keys.
template <int n>
__device__ __forceinline__ Key reached_by(const Key (&keys)[n], int used, int least, int most,
                                          Key low, Key high) {
  while (low + 1 < high) {
    const Key middle = low + (high - low) / 2;
    int count = 0;
#pragma unroll
    for (int e = 0; e < n; ++e) {
      if (e < used) count += __syncthreads_count(keys[e] >= middle);
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
