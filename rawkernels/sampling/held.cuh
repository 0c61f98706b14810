// The largest tokens of a row that the threads of a cluster can read at once. The threads make
// Config::threads groups, and what k of their largest logits reach, k tokens of the row reach, but
// hardly more do: those are listed. So the row is read once, and the blocks meet twice.
#pragma once

#include "ptx/math.cuh"
#include "ptx/registers.cuh"
#include "sampling/listing.cuh"
#include "sampling/quads.cuh"

// Tokens of a thread, at most; what registers there are.
constexpr int kHeld = Config::threads * Config::blocks_per_sm <= 512 ? 80 : 32;
constexpr int kMaxHeldRanks = Config::threads / 2;  // beyond, too many tokens would be listed

__device__ __forceinline__ bool is_held(int vocab, int k) {
  return vocab <= kHeld * Config::threads * Config::cluster && k <= kMaxHeldRanks;
}

// The ordered() logit that k groups reach, and somewhat more than k at most, if there is one.
// Every warp finds it by itself.
__device__ __forceinline__ unsigned reached_by_groups(const unsigned (&tops)[Config::threads],
                                                      int k) {
  const int lane = ptx::thread_index() % 32;  // nothing of this is kept for the rest of the kernel
  unsigned own[kWarps];
  unsigned low = ~0u, high = 0;
#pragma unroll
  for (int n = 0; n < kWarps; ++n) {
    own[n] = tops[32 * n + lane];
    low = min(low, own[n]);
    high = max(high, own[n]);
  }
  low = __reduce_min_sync(0xffffffffu, low);
  high = __reduce_max_sync(0xffffffffu, high);
  while (low < high) {
    const unsigned middle = low + (high - low) / 2 + 1;
    int count = 0;
#pragma unroll
    for (int n = 0; n < kWarps; ++n) count += own[n] >= middle;
    count = __reduce_add_sync(0xffffffffu, count);
    if (count < k) {
      high = middle - 1;
    } else {
      low = middle;
      if (count <= k + k / 4) break;
    }
  }
  return low;
}

// Lists what reaches a logit that k tokens of the row do, before some are amended, or at least
// `lowest`, an ordered() logit. Returns what is reached. The first time that the blocks meet.
__device__ __forceinline__ Key list_held(const Row& logits, Segment segment, int vocab, int k,
                                         unsigned lowest, const AmendedRow& amended, ListSmem& list,
                                         unsigned (&tops)[Config::threads]) {
  const Places places = {segment.begin, segment.end, has_quads(logits.logits, 0, vocab)};
  float x[kHeld];
  read(x, logits.logits, places);
  clear_list(list);
  float quad_tops[kHeld / 4], top = -kInfinity;
#pragma unroll
  for (int q = 0; q < kHeld / 4; ++q) {
    quad_tops[q] = ptx::max_nan(ptx::max_nan(x[4 * q], x[4 * q + 1]),
                                ptx::max_nan(x[4 * q + 2], x[4 * q + 3]));
    top = ptx::max_nan(top, quad_tops[q]);
  }
  if (!(top < kInfinity)) list.bad[rank_in_cluster()] = 1;
  unsigned group_top = ordered(top + 0.0f);  // -0 becomes 0: they are equal
#pragma unroll
  for (int lanes = 1; lanes < Config::cluster; lanes *= 2) {
    group_top = max(group_top, shuffle_xor(group_top, lanes));
  }
  wait_cluster();
  // A block's groups are of as many threads as there are blocks: each sends it to another.
  const int group = (rank_in_cluster() * Config::threads + int(threadIdx.x)) / Config::cluster;
  of_rank(tops, threadIdx.x % Config::cluster)[group] = group_top;
  sync_cluster();
  const unsigned least = max(reached_by_groups(tops, k), lowest);
  const float bar = from_ordered(least);
  if (top >= bar) {
    unsigned near = 0;
#pragma unroll
    for (int q = 0; q < kHeld / 4; ++q) near |= unsigned(quad_tops[q] >= bar) << q;
    for (; near != 0; near &= near - 1) {
      const int first = 4 * (__ffs(near) - 1);
      float x[4];
      unsigned hits = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int i = places.token(first + k);
        x[k] = i < segment.end ? logits(i) : -kInfinity;
        hits |= unsigned(x[k] >= bar) << k;
      }
      for (; hits != 0; hits &= hits - 1) {
        const int k = __ffs(hits) - 1, i = places.token(first + k);
        const float before = k < 2 ? (k == 0 ? x[0] : x[1]) : (k == 2 ? x[2] : x[3]);
        const float value = amended.of(i, before) + 0.0f;
        if (value >= bar && i < segment.end) add_to_list(rank_key(value, i), list);
      }
    }
  }
  const Key reached = static_cast<Key>(least) << 32;
  list_amended(logits, amended, reached, list);
  share_list(list);
  return reached;
}
