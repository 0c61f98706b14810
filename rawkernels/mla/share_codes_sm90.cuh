// The two warpgroups of mla/decode_codes_sm90.cu where tiles have 64 rows: O takes half of a
// multiprocessor's registers, so each has half of its columns, makes the probabilities of every
// second block, and gives them to the other through shared memory.
//
// One's softmax runs beside the other's products. Both add all blocks to O in their order: a round
// adds the values of a warpgroup's last block, computes the scores of its next one, and adds the
// values of the other's block between them.
#pragma once

#include "mla/soften_codes_sm90.cuh"

namespace mla {

struct SharedValues : Warpgroup {
  unsigned evens = 0;  // even blocks of the splits before

  __device__ __forceinline__ void run() {
    while (start()) {
#pragma unroll 1
      for (int next = number; next - 2 < blocks; next += 2) round(next);
      merge_sums();
      put_values();
      evens += (blocks + 1) / 2;
    }
  }

  // With block `next` of this warpgroup. At the beginning and at the end of a split some of a
  // round's blocks do not exist.
  __device__ __forceinline__ void round(int next) {
    const int last = next - 2, others = next - 1;
    if (next < blocks) {
      Scores s;
      if (last >= 0)
        multiply_round<true, true>(s, next);
      else if (others >= 0)
        multiply_round<false, true>(s, next);
      else
        multiply_round<false, false>(s, next);
      hide_keys(s, stage_of(next), next);
      soften(s, next);
      return;
    }
    if (last >= 0) add_values(last);
    if (others < 0 || others >= blocks) return;
    if (await_probabilities(others)) go_along();
    add_values(others);
  }

  // Values of its last block and codes of its next one; then what is rotated of that one, and the
  // other's values, whose probabilities have come meanwhile.
  template <bool kHasLast, bool kHasOthers>
  __device__ __forceinline__ void multiply_round(Scores& s, int next) {
    const Stage& stage = await_stage(next);
    const Keys keys = keys_in(stage);
    if constexpr (kHasLast)
      multiply(values_of(next - 2), s, keys);
    else
      multiply(Nothing{}, s, keys);
    bool moves = false;
    if (kHasOthers) moves = await_probabilities(next - 1);
    finish<kHasLast, true>(s);
    scale(s, stage);
    if (moves) go_along();
    unsigned rotated[4][4];
    multiply_rotated(s, rotated, keys);
    if (kHasOthers) add_values(next - 1);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_keep(s);
  }

  // The parity of the use that a block of this split makes of its probabilities' place.
  __device__ __forceinline__ unsigned parity_of_p(int block) const {
    return ((block % 2 == 0 ? evens : tiles - evens) + block / 2) % 2;
  }
  __device__ __forceinline__ Values values_of(int block) const {
    return values_in(stage_of(block), first_column, smem.p[block % 2][0][0], empty_of(block));
  }
  __device__ __forceinline__ void add_values(int block) {
    Scores none;
    multiply(values_of(block), none, Nothing{});
    finish<true, false>(none);
  }

  // The probabilities of a block of its own, for both, as WholeValues has them. All blocks before
  // are in O, and in the other's when that has come to wait for these.
  __device__ __forceinline__ void soften(const Scores& s, int block) {
    const Stage& stage = stage_of(block);
    Scale scales[2];
    scales_of(scales, stage);
    sync_own();  // all its warps have used its probabilities of the block before
    float sum[kSums], largest[2];
    unsigned char* const p = smem.p[number][0][0];
    put_probabilities(s, scales, stage, p, sum, largest);
    const unsigned id = tiles + block + 1;
    unsigned& raised = smem.raised[number][0];
    if (has_grown(largest, scales) && lane == 0) raised = id;
    tile::arrive_warp(smem.full_p[number]);
    add_up(sum);
    sync_own();
    if (raised == id) {
      put_largest(s, scales);
      follow();
      put_probabilities(s, scales, stage, p, sum, largest);
      add_up(sum);
      sync_warpgroups();
    }
    add_sums(sum);
  }

  // Waits for the other's; returns whether a maximum moves with them. To be followed by
  // go_along() then, when nothing is being added to O.
  __device__ __forceinline__ bool await_probabilities(int block) {
    ptx::mbarrier_wait(smem.full_p[!number], parity_of_p(block));
    return smem.raised[!number][0] == tiles + block + 1;
  }
  __device__ __forceinline__ void go_along() {
    follow();
    sync_warpgroups();
  }
  // By both, when one has put the largest scores of a block.
  __device__ __forceinline__ void follow() {
    sync_warpgroups();
    if (threadIdx.x < kRows) raise_row(threadIdx.x);
    sync_warpgroups();
    move_sums();
    move_values();
  }
};

}  // namespace mla
