// The k largest of a row, in one pass: a survey of the row says which logit some hundreds of its
// tokens reach, those are listed as the row is read, and the rest is done with the list. Rows that
// the threads of a cluster can hold need no survey.
#pragma once

#include "sampling/held.cuh"

constexpr int kMaxRanked = 256;
static_assert(kMaxRanked <= Config::threads, "one for each of the first threads");
static_assert(kMaxRanked <= kShare, "the k largest may all be in one block's segment");

struct RankedSmem {
  unsigned top;
  int kept;
  Key unsorted[kMaxRanked];
  union {
    Key sorted[kMaxRanked];
    unsigned tops[Config::threads];  // the largest of each group, until tokens are listed
  };
};

// Above every key of the block.
__device__ __forceinline__ Key above(Key largest, unsigned* top) {
  const unsigned high = __reduce_max_sync(0xffffffffu, unsigned(largest >> 32));
  if (threadIdx.x == 0) *top = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicMax(top, high);
  __syncthreads();
  return static_cast<Key>(*top + 1ull) << 32;
}

// A key that somewhat more than k tokens of the row reach, by all probability.
template <class Meanwhile>
__device__ __forceinline__ Key survey_key(const Row& logits, int vocab, int k, Key lowest,
                                          unsigned* top, Meanwhile meanwhile) {
  float x[kSurveyTile];
  read_survey(logits, vocab, x);
  meanwhile();
  float best = -kInfinity;
  int place = -1;
#pragma unroll
  for (int j = 0; j < kSurveyTile; ++j) {
    place = x[j] > best ? j : place;
    best = x[j] > best ? x[j] : best;
  }
  const int where = tile_index(survey_base(vocab, place / 4), place % 4);
  const Key largest[1] = {place < 0 ? 0 : rank_key(best + 0.0f, where)};
  const float expected = k * fminf(1.0f, float(kSurvey) / float(vocab));  // in the survey
  // Beyond four standard deviations: one row in a million has to be read again.
  const int wanted = min(int(expected + 4.0f * sqrtf(expected) + 4.0f), Config::threads * 3 / 4);
  return reached_by(largest, 1, wanted, wanted + wanted / 4, lowest, above(largest[0], top));
}

// Lists the tokens whose keys reach `bar`.
__device__ __forceinline__ void list_reaching(const Tiles<kTile>& tiles, float (&ahead)[kTile],
                                              const AmendedRow& amended, Key bar, ListSmem& smem) {
  const float least = key_score(bar);
  clear_list(smem);
  for_each_tile(tiles, ahead, [&](int base, const float (&x)[kTile]) {
    unsigned near = 0;
#pragma unroll
    for (int j = 0; j < kTile; ++j) {
      if (!(x[j] < least)) near |= 1u << j;  // so is a NaN
    }
    for (; near != 0; near &= near - 1) {
      const int j = __ffs(near) - 1;
      const int i = tile_index(base, j);
      if (i >= tiles.segment.end) continue;
      const float value = amended.of(i, pick(x, j)) + 0.0f;  // -0 becomes 0: they are equal
      if (!(value < kInfinity)) smem.bad[rank_in_cluster()] = 1;
      const Key key = rank_key(value, i);
      if (key >= bar) add_to_list(key, smem);
    }
  });
  list_amended(tiles.logits, amended, bar, smem);
  share_list(smem);
}

// Lists what ranks among the k largest of the tokens that reach `lowest`, and some more, unless the
// row is bad. Returns what they all reach.
__device__ __forceinline__ Key list_surveyed(const Row& logits, Segment segment, int vocab, int k,
                                             Key lowest, const AmendedRow& amended, ListSmem& list,
                                             unsigned* top) {
  const Tiles<kTile> tiles(logits, segment);
  float ahead[kTile];
  Key bar = survey_key(logits, vocab, k, lowest, top, [&] { tiles.load_ahead(ahead); });
  Key least = lowest,
      beyond = ~0ull;  // k tokens reach the one, if so many there are; not the other
  for (;;) {
    list_reaching(tiles, ahead, amended, bar, list);
    const Listed listed(list);
    if (listed.bad || (listed.whole && (listed.total >= k || bar == lowest))) return bar;
    if (listed.total < k) {
      beyond = bar;
    } else {
      Key keys[kEach];
      read_list(list, keys);
      least = reached_by(keys, kEach, k, 2 * k, bar, beyond);
    }
    bar = least + (beyond - least) / 2;
    tiles.load_ahead(ahead);
    sync_cluster();  // the list is no longer looked at
  }
}

// The keys of the k largest of the tokens that reach `lowest`, fewer if there are fewer, in
// descending order: one for each of the first threads of the cluster's first block, 0 for the
// others. In other blocks all get 0. Sets `bad` if the row has a NaN or +inf.
__device__ __forceinline__ Key kth_largest(const Row& logits, Segment segment, int vocab, int k,
                                           Key lowest, const AmendedRow& amended, ListSmem& list,
                                           RankedSmem& smem, bool& bad) {
  Key bar = lowest;
  bool complete = false;
  if (is_held(vocab, k)) {
    const int before = amended.slots ? max(k, min(4 * k, kMaxHeldRanks)) : k;  // some will be less
    bar =
        list_held(logits, segment, vocab, before, unsigned(lowest >> 32), amended, list, smem.tops);
    const Listed listed(list);
    complete = listed.whole && (listed.total >= k || bar == lowest);  // or very many are equal
    if (!complete) sync_cluster();
  } else {
    wait_cluster();
  }
  if (!complete) bar = list_surveyed(logits, segment, vocab, k, lowest, amended, list, &smem.top);
  const Listed listed(list);
  bad = listed.bad;
  if (rank_in_cluster() != 0 || bad) return 0;

  Key keys[kEach];
  read_list(list, keys);
  Key cut = 1;
  const int most = min(k + 32, kMaxRanked);  // to be sorted
  if (listed.total > most) {
    Key largest = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) largest = max(largest, keys[e]);
    const int used = (listed.places + Config::threads - 1) / Config::threads;
    cut = reached_by(keys, used, k, most, bar, above(largest, &smem.top));
  }
  if (threadIdx.x == 0) smem.kept = 0;
  if (threadIdx.x < kMaxRanked) smem.sorted[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (keys[e] >= cut) smem.unsorted[atomicAdd(&smem.kept, 1)] = keys[e];
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
  return threadIdx.x < kMaxRanked ? smem.sorted[threadIdx.x] : 0;
}
