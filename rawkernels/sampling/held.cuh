// The largest tokens of a row that the threads of a cluster can read at once. The threads make
// Config::threads groups, and what k of their largest logits reach, k tokens of the row reach, but
// hardly more do: those are listed. So the row is read once, and the blocks meet twice.
#pragma once

#include "ptx/math.cuh"
#include "ptx/registers.cuh"
#include "sampling/listing.cuh"
#include "sampling/quads.cuh"

// Tokens of a thread, at most; what registers there are.
constexpr int kHeld = Config::cluster == 8 ? 80 : 32;
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

// Lists what ranks among the k largest, and some more; nothing below `lowest`, an ordered() logit.
// The first time that the blocks meet.
__device__ __forceinline__ void list_held(const Row& logits, Segment segment, int vocab, int k,
                                          unsigned lowest, ListSmem& list,
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
  const float bar = from_ordered(max(reached_by_groups(tops, k), lowest));
  if (top >= bar) {
    unsigned near = 0;
#pragma unroll
    for (int q = 0; q < kHeld / 4; ++q) near |= unsigned(quad_tops[q] >= bar) << q;
    for (; near != 0; near &= near - 1) {
      const int first = 4 * (__ffs(near) - 1);
#pragma unroll
      for (int value = first; value < first + 4; ++value) {
        const int i = places.token(value);
        if (i >= segment.end) continue;
        const float x = logits(i) + 0.0f;
        if (x >= bar) add_to_list(rank_key(x, i), list);
      }
    }
  }
  share_list(list);
}
