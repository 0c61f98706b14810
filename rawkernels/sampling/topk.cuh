// The k largest logits of a row, sorted, in one pass: a pilot sample gives a threshold that some
// hundreds of the row's tokens reach, those become candidates as the row is read, and the
// candidates are sorted. Rows that fit into registers (topk_registers.cuh) need no pilot sample.
#pragma once

#include "sampling/topk_registers.cuh"

constexpr int kMaxTopK = 256;
static_assert(kMaxTopK <= Config::threads, "each of the k largest must have a thread");
static_assert(kMaxTopK <= kCandidatesPerBlock, "one block's segment may hold all k largest");

struct TopKSmem {
  unsigned top;
  int kept;
  Key unsorted[kMaxTopK];
  union {
    Key sorted[kMaxTopK];
    unsigned tops[Config::threads];  // the largest of each group, until there are candidates
  };
};

// A key above every thread's `largest`.
__device__ __forceinline__ Key key_above(Key largest, unsigned* top) {
  const unsigned high = __reduce_max_sync(0xffffffffu, unsigned(largest >> 32));
  if (threadIdx.x == 0) *top = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicMax(top, high);
  __syncthreads();
  return static_cast<Key>(*top + 1ull) << 32;
}

// A key that, with high probability, somewhat more than k tokens of the row reach. meanwhile() is
// called while the pilot sample is being loaded.
template <class Meanwhile>
__device__ __forceinline__ Key pilot_threshold(const Row& logits, int vocab, int k, Key lowest,
                                               unsigned* top, Meanwhile meanwhile) {
  float x[kPilotPerThread];
  read_pilot(logits, vocab, x);
  meanwhile();
  float best = -kInfinity;
  int place = -1;
#pragma unroll
  for (int j = 0; j < kPilotPerThread; ++j) {
    place = x[j] > best ? j : place;
    best = x[j] > best ? x[j] : best;
  }
  const int token = tile_token(pilot_base(vocab, place / 4), place % 4);
  const Key largest[1] = {place < 0 ? 0 : rank_key(best + 0.0f, token)};
  const float expected = k * fminf(1.0f, float(kPilotSize) / float(vocab));  // in the pilot sample
  // Four standard deviations more: one row in a million has to be read again.
  const int wanted = min(int(expected + 4.0f * sqrtf(expected) + 4.0f), Config::threads * 3 / 4);
  return find_threshold(largest, 1, wanted, wanted + wanted / 4, lowest,
                        key_above(largest[0], top));
}

// Makes candidates of the tokens whose keys reach `threshold`.
__device__ __forceinline__ void candidates_reaching(const Tiles<kTileTokens>& tiles,
                                                    float (&ahead)[kTileTokens],
                                                    const PenalizedRow& penalized, Key threshold,
                                                    CandidateSmem& smem) {
  const float least = key_score(threshold);
  clear_candidates(smem);
  for_each_tile(tiles, ahead, [&](int base, const float (&x)[kTileTokens]) {
    unsigned reaching = 0;  // bit j: token j
#pragma unroll
    for (int j = 0; j < kTileTokens; ++j) {
      if (!(x[j] < least)) reaching |= 1u << j;  // a NaN too
    }
    for (; reaching != 0; reaching &= reaching - 1) {
      const int j = __ffs(reaching) - 1;
      const int i = tile_token(base, j);
      if (i >= tiles.segment.end) continue;
      const float value = penalized.of(i, select_register(x, j)) + 0.0f;  // -0 becomes 0
      if (!(value < kInfinity)) smem.bad[rank_in_cluster()] = 1;
      const Key key = rank_key(value, i);
      if (key >= threshold) add_candidate(key, smem);
    }
  });
  add_penalized(tiles.logits, penalized, threshold, smem);
  exchange_candidates(smem);
}

// Makes candidates of the k largest among the tokens that reach `lowest`, and of some more, unless
// the row is bad. Returns what they all reach. Reads the row again, with a better threshold, if the
// pilot sample misled.
__device__ __forceinline__ Key candidates_from_pilot(const Row& logits, Segment segment, int vocab,
                                                     int k, Key lowest,
                                                     const PenalizedRow& penalized,
                                                     CandidateSmem& smem, unsigned* top) {
  const Tiles<kTileTokens> tiles(logits, segment);
  float ahead[kTileTokens];
  Key threshold = pilot_threshold(logits, vocab, k, lowest, top, [&] { tiles.load_ahead(ahead); });
  Key least = lowest,
      beyond = ~0ull;  // k tokens reach `least`, if there are so many; fewer reach `beyond`
  for (;;) {
    candidates_reaching(tiles, ahead, penalized, threshold, smem);
    const Candidates candidates(smem);
    if (candidates.bad || (candidates.complete && (candidates.total >= k || threshold == lowest))) {
      return threshold;
    }
    if (candidates.total < k) {
      beyond = threshold;
    } else {
      Key keys[kCandidatesPerThread];
      read_candidates(smem, keys);
      least = find_threshold(keys, kCandidatesPerThread, k, 2 * k, threshold, beyond);
    }
    threshold = least + (beyond - least) / 2;
    tiles.load_ahead(ahead);
    sync_cluster();  // no block reads the old candidates any more
  }
}

// The keys of the k largest of the tokens that reach `lowest`, fewer if there are fewer, in
// descending order: one for each of the first threads of the cluster's first block, 0 for all other
// threads. Sets `bad` if the row has a NaN or +inf.
__device__ __forceinline__ Key top_k_keys(const Row& logits, Segment segment, int vocab, int k,
                                          Key lowest, const PenalizedRow& penalized,
                                          CandidateSmem& candidate_smem, TopKSmem& smem,
                                          bool& bad) {
  Key threshold = lowest;
  bool complete = false;
  if (fits_registers(vocab, k)) {
    // Penalties lower some of the largest, so more are asked for.
    const int wanted = penalized.slots ? max(k, min(4 * k, kMaxGroupRank)) : k;
    threshold = candidates_from_registers(logits, segment, vocab, wanted, unsigned(lowest >> 32),
                                          penalized, candidate_smem, smem.tops);
    const Candidates candidates(candidate_smem);
    complete = candidates.complete &&
               (candidates.total >= k || threshold == lowest);  // not if very many are equal
    if (!complete) sync_cluster();
  } else {
    wait_cluster();
  }
  if (!complete) {
    threshold = candidates_from_pilot(logits, segment, vocab, k, lowest, penalized, candidate_smem,
                                      &smem.top);
  }
  const Candidates candidates(candidate_smem);
  bad = candidates.bad;
  if (rank_in_cluster() != 0 || bad) return 0;

  Key keys[kCandidatesPerThread];
  read_candidates(candidate_smem, keys);
  Key cut = 1;
  const int most = min(k + 32, kMaxTopK);  // keys that are sorted
  if (candidates.total > most) {
    Key largest = 0;
#pragma unroll
    for (int n = 0; n < kCandidatesPerThread; ++n) largest = max(largest, keys[n]);
    const int used = (candidates.places + Config::threads - 1) / Config::threads;
    cut = find_threshold(keys, used, k, most, threshold, key_above(largest, &smem.top));
  }
  if (threadIdx.x == 0) smem.kept = 0;
  if (threadIdx.x < kMaxTopK) smem.sorted[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kCandidatesPerThread; ++n) {
    if (keys[n] >= cut) smem.unsorted[atomicAdd(&smem.kept, 1)] = keys[n];
  }
  __syncthreads();
  const int kept = smem.kept;
  if (threadIdx.x < kept) {
    const Key own = smem.unsorted[threadIdx.x];
    int rank = 0;
#pragma unroll 8
    for (int other = 0; other < kept; ++other) rank += smem.unsorted[other] > own;
    if (rank < k) smem.sorted[rank] = own;
  }
  __syncthreads();
  return threadIdx.x < kMaxTopK ? smem.sorted[threadIdx.x] : 0;
}
