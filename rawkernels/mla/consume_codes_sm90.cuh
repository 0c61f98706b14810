// The warpgroups of mla/decode_codes_sm90.cu where tiles have up to 32 rows: each takes every
// kWarpgroups-th block of keys, and has all of O for these, so that they meet at the end of a split
// only.
#pragma once

#include "mla/soften_codes_sm90.cuh"

namespace mla {

struct WholeValues : Warpgroup {
  __device__ __forceinline__ void run() {
    while (start()) {
#pragma unroll 1
      for (int block = number; block < blocks; block += kWarpgroups) {
        Stage& stage = await_stage(block);
        const int turn = block / kWarpgroups % 2;
        unsigned char* const p = smem.p[number][turn % kTurns][0];
        make_probabilities(stage, block, turn, p);
        Scores none;
        multiply(values_in(stage, 0, p, empty_of(block)), none, Nothing{});
        finish<true, false>(none);
      }
      merge_sums();
      move_values();
      collect();
      if (number == 0) put_values();
    }
  }

  // Sᵀ of a block.
  __device__ __forceinline__ void multiply_keys(Scores& s, const Stage& stage) {
    const Keys keys = keys_in(stage);
    if constexpr (kByQuarter) {
      multiply_quarters(s, keys);
      return;
    }
    multiply(Nothing{}, s, keys);
    finish<false, true>(s);
    scale(s, stage);
    unsigned rotated[4][4];
    multiply_rotated(s, rotated, keys);
    finish<false, true>(s);
  }

  // Probabilities of a block. Times their tokens' scales they become float16: the maximum follows
  // that product, which may lag behind (tile/softmax.cuh). Not farther than 2^96 from the
  // probabilities, whose sum has to be a float, too. Few blocks move a maximum: so it is tried
  // without, and done again where any warp finds that one has to.
  __device__ __forceinline__ void make_probabilities(Stage& stage, int block, int turn,
                                                     unsigned char* p) {
    Scores s;
    Scale scales[2];
    if (!kByQuarter) scales_of(scales, stage);
    multiply_keys(s, stage);
    if (kByQuarter) scales_of(scales, stage);  // there were no registers for them before
    hide_keys(s, stage, block);
    float sum[kSums], largest[2];
    if (kTurns == 1) sync_own();  // all its warps have used its probabilities of the block before
    put_probabilities(s, scales, stage, p, sum, largest);
    const unsigned id = tiles + block + 1;
    unsigned& raised = smem.raised[number][turn];
    if (has_grown(largest, scales) && lane == 0) raised = id;
    sync_own();
    if (raised == id) {
      put_largest(s, scales);
      sync_own();
      if (threadIdx.x % 128 < kRows) raise_row(threadIdx.x % 128);
      sync_own();
      move_sums();
      move_values();
      put_probabilities(s, scales, stage, p, sum, largest);
      sync_own();
    }
    add_up(sum);
    add_sums(sum);
  }

  // The first warpgroup adds the others' O to its own, 64 columns after 64, by way of the queries'
  // place.
  __device__ __forceinline__ void collect() {
    constexpr int kVecs = kScores / 4;
    using Lanes = float4[128];
    auto* const sent = reinterpret_cast<Lanes(*)[kWarpgroups - 1][kVecs]>(smem.q);
    static_assert(2 * (kWarpgroups - 1) * kVecs * sizeof(Lanes) <= sizeof(smem.q),
                  "two products of all");
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      if (number > 0) {
#pragma unroll
        for (int j = 0; j < kVecs; ++j)
          sent[i % 2][number - 1][j][thread] = {o[i][4 * j], o[i][4 * j + 1], o[i][4 * j + 2],
                                                o[i][4 * j + 3]};
      }
      sync_warpgroups();
      if (number > 0) continue;
#pragma unroll
      for (int from = 0; from < kWarpgroups - 1; ++from)
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
          const float4 its = sent[i % 2][from][j][thread];
          o[i][4 * j] += its.x;
          o[i][4 * j + 1] += its.y;
          o[i][4 * j + 2] += its.z;
          o[i][4 * j + 3] += its.w;
        }
    }
  }
};

}  // namespace mla
