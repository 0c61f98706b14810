// What the two consuming warpgroups of mla/decode_sm90.cu do with a split's keys: scores, softmax,
// and O, of which each holds half.
//
// O of 64 rows takes half of a multiprocessor's registers. So each of two consumers holds 256
// columns of it, computes the scores of every second block of keys, and gives its probabilities to
// the other through shared memory, after FlashMLA. One's softmax runs beside the other's products.
// Row maxima lag (tile/softmax.cuh): what the two tell each other about them moves O in few rounds.
// Probabilities take the place of the keys' rotated panel, which is dead by then, so that two
// blocks of keys and Q fill shared memory.
#pragma once

#include "mla/clear_row.cuh"
#include "mla/operands_sm90.cuh"
#include "ptx/bar.cuh"
#include "tile/softmax.cuh"

namespace mla {

// A consumer of a block's work: the odd one has odd blocks of keys and the right half of O. The
// last pair may be one block.
struct Consumer {
  Smem& smem;
  const DecodeParams& params;
  const MlaParams& mla;
  const bool odd;
  const int first_panel = odd ? kLatentPanels / 2 : 0;  // of its values
  const float scale_log2 = static_cast<float>(params.scale) * tile::kLog2e;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int row = 16 * warp + tile::lane_row(lane);  // this lane's first; it has row + 8 too

  unsigned parity = 0;  // of the present use of this consumer's buffer
  const Work* work = nullptr;
  int first = 0;           // key of the pair of blocks
  bool ends_even = false;  // the last pair has no odd block
  tile::Range common;      // keys that all rows see
  tile::OnlineSoftmax softmax;
  float o[kLatent / 4];

  // Of a split.
  __device__ __forceinline__ void start() {
    const decoding::Split& split = work->split;
    first = split.origin;
    const tile::Range all = keys_of_row<kRows>(params, split, kRows - 1),
                      none_before = keys_of_row<kRows>(params, split, 0);
    common = {all.begin, none_before.end};
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!odd) smem.visible[row + 8 * r] = keys_of_row<kRows>(params, split, row + 8 * r);
        smem.row_max[odd][row + 8 * r] = tile::negative_infinity();
      }
    }
    softmax = tile::OnlineSoftmax();
#pragma unroll
    for (int i = 0; i < kLatent / 4; ++i) o[i] = 0.0f;
  }

  // S = Q Kᵀ of this consumer's block, panel by panel as they arrive: issued, not waited for.
  template <bool kOdd>
  __device__ __forceinline__ void multiply_keys(float (&s)[kBlockKeys / 2]) {
    const unsigned q = uniform_base(smem.q), k = uniform_base(smem.k[kOdd]);
    ptx::wgmma_keep(s);
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      const int panel = panel_in_order(kOdd, i);
      if (says_full(kOdd, i)) {
        ptx::mbarrier_wait(smem.full_k[kOdd][panel], parity);
        if (Config::gather) ptx::fence_proxy_async();  // what is not written by TMA needs it
        ptx::wgmma_fence();
      }
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int bytes = panel * kPanelBytes + step * 32;
        ptx::Wgmma<kBlockKeys, T>::shared_shared<false, false>(
            s, descriptor(q, bytes, 0), descriptor(k, bytes, 0), i + step > 0);
      }
    }
    ptx::wgmma_commit_group();
  }

  // O += P V of this consumer's half of the values, for its own block's probabilities: issued.
  __device__ __forceinline__ void multiply_own_values(const unsigned (&p)[kBlockKeys / 4]) {
    const unsigned v = uniform_base(smem.k[odd][first_panel]);
    ptx::wgmma_keep(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockKeys / 16; ++step)
      ptx::Wgmma<kLatent / 2, T>::register_shared<true>(
          o, p + 4 * step, descriptor(v, step * 16 * 128, kPanelBytes), true);
    ptx::wgmma_commit_group();
  }

  // The same for the other's.
  __device__ __forceinline__ void multiply_other_values() {
    const unsigned v = uniform_base(smem.k[!odd][first_panel]);
    const unsigned a = uniform_base(smem.k[!odd][kRopePanel]);
    ptx::wgmma_keep(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockKeys / 16; ++step)
      ptx::Wgmma<kLatent / 2, T>::shared_shared<false, true>(
          o, descriptor(a, step * 32, 0), descriptor(v, step * 16 * 128, kPanelBytes), true);
    ptx::wgmma_commit_group();
  }

  // The softmax of a block: probabilities, for this consumer and the other. Whether O is to be
  // multiplied by `correction`.
  __device__ __forceinline__ bool soften(float (&s)[kBlockKeys / 2], unsigned (&p)[kBlockKeys / 4],
                                         int key, float (&correction)[2]) {
    hide_keys(s, key);
    float block_max[2];
    const bool raises = __any_sync(~0u, softmax.needs_rescale(s, scale_log2, block_max));
    if (raises) raise(block_max, correction);
    softmax.exponentiate(s, scale_log2);
    tile::pack_fragment<T>(p, s);
    ptx::bar_sync(kOwn + odd, 128);  // all warps have their scores: P may overwrite keys
    put_probabilities(p);
    ptx::bar_arrive(odd ? kProbabilitiesOdd : kProbabilitiesEven, kConsumers);
    return raises;
  }

  // Adds a block's values to O when the other consumer's probabilities are there: issued.
  __device__ __forceinline__ void add_other_block(int key) {
    ptx::bar_sync(odd ? kProbabilitiesEven : kProbabilitiesOdd, kConsumers);
    float correction[2];
    if (follow(correction)) tile::scale_rows(o, correction);
    clear_values(!odd, key);
    multiply_other_values();
  }
  __device__ __forceinline__ void finish_values(ptx::Mbarrier& empty) {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_keep(o);
    tile::arrive_warp(empty);
  }

  // A round for each pair of blocks. Both consumers add the even block's values to O, then the odd
  // block's, and move O's scale when either has raised a maximum. The even one computes the scores
  // of its next block before it adds the odd block's values, so that its softmax runs beside them,
  // and the odd one's beside those scores.
  __device__ __forceinline__ void even_rounds(int pairs) {
    unsigned p[kBlockKeys / 4];
    float correction[2];
    {
      float s[kBlockKeys / 2];
      multiply_keys<false>(s);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_keep(s);
      if (pairs == 1) leave_queries();
      soften(s, p, first, correction);  // there is nothing in O yet
    }
    while (true) {
      clear_values(0, first);
      multiply_own_values(p);
      finish_values(smem.empty_first[0]);
      if (--pairs == 0) break;
      first += 2 * kBlockKeys;
      parity ^= 1;
      float s[kBlockKeys / 2];  // nothing of one round is kept for the next
      multiply_keys<false>(s);
      add_other_block(first - kBlockKeys);
      ptx::wgmma_wait_group<1>();
      ptx::wgmma_keep(s);
      if (pairs == 1) leave_queries();
      const bool raises = soften(s, p, first, correction);
      finish_values(smem.empty_first[1]);
      if (raises) tile::scale_rows(o, correction);
    }
    if (!ends_even) {
      add_other_block(first + kBlockKeys);
      finish_values(smem.empty_first[1]);
    }
    parity ^= 1;
  }

  __device__ __forceinline__ void odd_rounds(int pairs) {
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair) {
      float s[kBlockKeys / 2], correction[2];
      unsigned p[kBlockKeys / 4];
      const bool last = pair + 1 == pairs;
      if (last && ends_even) {
        leave_queries();
        add_other_block(first);
        finish_values(smem.empty_second[0]);
        break;
      }
      add_other_block(first);
      finish_values(smem.empty_second[0]);
      multiply_keys<true>(s);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_keep(s);
      if (last) leave_queries();
      const bool raises = soften(s, p, first + kBlockKeys, correction);
      if (raises) tile::scale_rows(o, correction);
      clear_values(1, first + kBlockKeys);
      multiply_own_values(p);
      finish_values(smem.empty_second[1]);
      first += 2 * kBlockKeys;
      parity ^= 1;
    }
  }

  // After this consumer's last scores: TMA may write the next split's Q.
  __device__ __forceinline__ void leave_queries() const { tile::arrive_warp(smem.empty_q); }

  // Scores of keys that a row does not see become -inf.
  __device__ __forceinline__ void hide_keys(float (&s)[kBlockKeys / 2], int key) {
    if (Config::gather) hide_missing(s);
    if (common.contains(key, kBlockKeys)) return;
    const tile::Range visible[2] = {smem.visible[row], smem.visible[row + 8]};
    const int column = key + tile::lane_column(lane);
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; ++i) {
      const tile::Range& keys = visible[i / 2 % 2];
      const int at = column + tile::fragment_column(i);
      s[i] = at >= keys.begin && at < keys.end ? s[i] : tile::negative_infinity();
    }
  }

  // The same of keys that a list of tokens has not.
  __device__ __forceinline__ void hide_missing(float (&s)[kBlockKeys / 2]) const {
    unsigned long long exist = *reinterpret_cast<const unsigned long long*>(smem.exist[odd]);
    if (exist == ~0ull) return;
    exist >>= tile::lane_column(lane);
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; ++i)
      s[i] = exist >> tile::fragment_column(i) & 1 ? s[i] : tile::negative_infinity();
  }

  // Zeros for the values of keys outside of the split, which may be NaN: 0 · NaN is NaN. TMA gives
  // zeros for whole blocks of them.
  __device__ __forceinline__ void clear_values(int buffer, int key) {
    if (Config::gather) return;  // there are zeros
    const int begin = work->split.begin - key, end = work->split.end - key;
    if ((begin <= 0 && end >= kBlockKeys) || end <= 0) return;
    const int key_row = ptx::thread_index() % kBlockKeys;
    if (key_row < begin || key_row >= end)
      clear_half_row<kLatentPanels / 2, kPanelBytes>(smem.k[buffer][first_panel], key_row,
                                                     ptx::thread_index() / kBlockKeys % 2);
    ptx::fence_proxy_async();
    ptx::bar_sync(kOwn + odd, 128);
  }

  // Moves maxima that scores have left behind, and tells the other consumer.
  __device__ __forceinline__ void raise(const float (&block_max)[2], float (&correction)[2]) {
    softmax.rescale(block_max, scale_log2, correction);
    if (lane % 4 == 0) {
      smem.row_max[odd][row] = softmax.row_max[0];
      smem.row_max[odd][row + 8] = softmax.row_max[1];
    }
  }

  // Takes maxima that the other consumer has moved: whether O has to be scaled.
  __device__ __forceinline__ bool follow(float (&correction)[2]) {
    bool moved = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float other = fmaxf(smem.row_max[!odd][row + 8 * r], softmax.row_max[r]);
      moved |= other > softmax.row_max[r];
      correction[r] = ptx::ex2(tile::OnlineSoftmax::offset(softmax.row_max[r], scale_log2) -
                               tile::OnlineSoftmax::offset(other, scale_log2));
      // A row without a key so far has nothing in O: any finite factor will do.
      if (softmax.row_max[r] == tile::negative_infinity()) correction[r] = 1.0f;
      softmax.row_sum[r] *= correction[r];
      softmax.row_max[r] = other;
    }
    return __any_sync(~0u, moved);
  }

  // P to where the rotated panel of its keys was, as wgmma reads A.
  __device__ __forceinline__ void put_probabilities(const unsigned (&p)[kBlockKeys / 4]) {
    const unsigned panel = ptx::shared_address(smem.k[odd][kRopePanel]) + Panel::lane_row_major() +
                           warp * 16 * Panel::kRowBytes;
#pragma unroll
    for (int step = 0; step < kBlockKeys / 16; ++step)
      ptx::stmatrix_x4(Panel::at_chunks(panel, step), p + 4 * step);
    ptx::fence_proxy_async();
  }
};

}  // namespace mla
