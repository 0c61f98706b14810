// Candidates for the k largest logits of a row that fits into the registers of a cluster's threads.
//
// The threads form Config::threads groups. If k groups have a largest logit of at least t, then k
// tokens of the row reach t, and seldom many more: those are the candidates. So the row is read
// once, and the cluster needs two barriers.
#pragma once

#include "ptx/registers.cuh"
#include "sampling/candidates.cuh"
#include "sampling/vector_access.cuh"

// Tokens of a thread, at most; what registers there are.
constexpr int kTokensPerThread = Config::threads * Config::blocks_per_sm <= 512 ? 80 : 32;
constexpr int kMaxGroupRank = Config::threads / 2;  // for a larger k, too many tokens would reach t

__device__ __forceinline__ bool fits_registers(int vocab, int k) {
  return vocab <= kTokensPerThread * Config::threads * Config::cluster && k <= kMaxGroupRank;
}

// The ordered() logit that the largest of k groups reach and, if there is one, of at most a quarter
// more. Every warp finds it by itself, by bisection.
__device__ __forceinline__ unsigned threshold_of_groups(const unsigned (&tops)[Config::threads],
                                                        int k) {
  const int lane = ptx::thread_index() % 32;  // read anew: it would be kept to the kernel's end
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

// Finds the tokens that reach a threshold which k tokens of the row reach before penalties, or
// `lowest`, an ordered() logit, if that is more. Returns the threshold. Contains the wait of the
// kernel's first cluster barrier.
__device__ __forceinline__ Key candidates_from_registers(const Row& logits, Segment segment,
                                                         int vocab, int k, unsigned lowest,
                                                         const PenalizedRow& penalized,
                                                         CandidateSmem& smem,
                                                         unsigned (&tops)[Config::threads]) {
  const ThreadTokens tokens = {segment.begin, segment.end, has_vectors(logits.logits, 0, vocab)};
  float x[kTokensPerThread];
  load_tokens(x, logits.logits, tokens);
  clear_candidates(smem);
  float tops_of_four[kTokensPerThread / 4], top = -kInfinity;
#pragma unroll
  for (int four = 0; four < kTokensPerThread / 4; ++four) {
    tops_of_four[four] = largest_of_four(x + 4 * four);
    top = ptx::max_nan(top, tops_of_four[four]);
  }
  if (!(top < kInfinity)) smem.bad[rank_in_cluster()] = 1;
  unsigned group_top = ordered(top + 0.0f);  // -0 becomes 0: they are equal
#pragma unroll
  for (int lanes = 1; lanes < Config::cluster; lanes *= 2) {
    group_top = max(group_top, shuffle_xor(group_top, lanes));
  }
  wait_cluster();
  // As many threads of a block as there are blocks form a group; each sends its top to one block.
  const int group = (rank_in_cluster() * Config::threads + int(threadIdx.x)) / Config::cluster;
  of_rank(tops, threadIdx.x % Config::cluster)[group] = group_top;
  sync_cluster();
  const unsigned least = max(threshold_of_groups(tops, k), lowest);
  const float threshold = from_ordered(least);
  if (top >= threshold) {
    unsigned reaching = 0;  // bit n: one of the thread's tokens 4n to 4n + 3 reaches it
#pragma unroll
    for (int four = 0; four < kTokensPerThread / 4; ++four) {
      reaching |= unsigned(tops_of_four[four] >= threshold) << four;
    }
    for (; reaching != 0; reaching &= reaching - 1) {
      const int first = 4 * (__ffs(reaching) - 1);
      float x[4];
      unsigned hits = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int i = tokens.token(first + k);
        x[k] = i < segment.end ? logits(i) : -kInfinity;
        hits |= unsigned(x[k] >= threshold) << k;
      }
      for (; hits != 0; hits &= hits - 1) {
        const int k = __ffs(hits) - 1, i = tokens.token(first + k);
        const float before = k < 2 ? (k == 0 ? x[0] : x[1]) : (k == 2 ? x[2] : x[3]);
        const float value = penalized.of(i, before) + 0.0f;
        if (value >= threshold && i < segment.end) add_candidate(rank_key(value, i), smem);
      }
    }
  }
  const Key reached = static_cast<Key>(least) << 32;
  add_penalized(logits, penalized, reached, smem);
  exchange_candidates(smem);
  return reached;
}
