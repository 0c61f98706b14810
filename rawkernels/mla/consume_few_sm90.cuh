// A warpgroup of mla/decode_few_sm90.cu: it loads its blocks of keys, has all of O for them, and in
// the end adds half of O's columns to the other warpgroup's.
#pragma once

#include "mla/clear_row.cuh"
#include "mla/descriptors_sm90.cuh"
#include "mla/key_boxes_sm90.cuh"
#include "mla/merge_few_sm90.cuh"
#include "mla/query_columns_sm90.cuh"
#include "ptx/bar.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "tile/softmax.cuh"

namespace mla {

// Loads a warpgroup's blocks of keys, by its first warp, of which a lane has the pages: one, or
// those that a block consists of.
struct Loader : KeyBoxes {
  const int* const row = table.entry(blockIdx.z, 0);  // of the page table

  __device__ __forceinline__ int page_of_lane(int first, int end) const {
    return KeyBoxes::page_of_lane(row, first, end);
  }
  // Half of the panels of a block, in a warpgroup's order.
  template <int kHalf>
  __device__ __forceinline__ void load(Smem& smem, int warpgroup, int first, int page) const {
    constexpr int kBegin = kHalf * kHalfPanels, kEnd = kHalf == 0 ? kHalfPanels : kPanels;
    const int first_panel = (warpgroup ^ kHalf) * kHalfPanels;
    for_each_box(first, page, [&](int its_page, int slot, int box) {
#pragma unroll
      for (int i = kBegin; i < kEnd; ++i) {
        const bool rotated = i == kRopePanel;
        const int panel = rotated ? kRopePanel : first_panel + i - kBegin;
        ptx::Mbarrier& full = smem.full[warpgroup][full_of(i)];
        if (box == 0 && begins_full(i))
          ptx::mbarrier_arrive_expect_tx(full, (full_of(i) + 1 == kFulls ? 3 : 2) * kPanelBytes);
        copy_panel(smem.k[warpgroup][panel], panel, rotated, its_page, slot, box, full);
      }
    });
  }
};

// A warpgroup: scores, softmax and O of its blocks of keys.
struct Warpgroup : QueryColumns<kRows> {
  Smem& smem;
  const DecodeParams& params;
  const decoding::Split& split;
  const Loader& loader;
  const int number;
  const Deal deal;
  const float scale_log2 = static_cast<float>(params.scale) * tile::kLog2e;

  float row_max[kOwnRows], row_sum[kOwnRows];  // sums are of the lane's own keys
  float o[2][kHalfPanels][kScores];            // the warpgroup's own columns, then the other's

  // The first block's loads have been issued, and `next_page` is of the second block's.
  __device__ __forceinline__ void run(int next_page) {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      row_max[i] = tile::negative_infinity();
      row_sum[i] = 0.0f;
    }
#pragma unroll
    for (auto& half : o)
#pragma unroll
      for (auto& panel : half)
#pragma unroll
        for (float& x : panel) x = 0.0f;
    unsigned parity = 0;
#pragma unroll 1
    for (int block = Deal::first(number); block < deal.count; block += Deal::step()) {
      const int first = split.origin + block * kKeys, next = first + Deal::step() * kKeys;
      float s[kScores];
      multiply_keys(s, parity);
      hide_keys(s, first);
      soften(s);
      multiply_values<0>();
      multiply_values<1>();
      const bool more = block + Deal::step() < deal.count;
      ptx::wgmma_wait_group<1>();
      if (more) {
        sync();  // no warp's products read the first half of the panels any more
        if (warp == 0) loader.load<0>(smem, number, next, next_page);
      }
      ptx::wgmma_wait_group<0>();
#pragma unroll
      for (auto& half : o)
#pragma unroll
        for (auto& panel : half) ptx::wgmma_keep(panel);
      if (more) {
        sync();
        if (warp == 0) {
          loader.load<1>(smem, number, next, next_page);
          next_page = loader.page_of_lane(next + Deal::step() * kKeys, split.end);
        }
      }
      parity ^= 1;
    }
  }

  // Sᵀ of a block, panels in the order in which they come.
  __device__ __forceinline__ void multiply_keys(float (&s)[kScores], unsigned parity) const {
    const unsigned q = reduced_base(smem.q), k = reduced_base(smem.k[number]);
    const unsigned halves[2] = {number, number ^ 1u};  // in units of kHalfPanels
    ptx::wgmma_keep(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      if (begins_full(i)) {
        ptx::mbarrier_wait(smem.full[number][full_of(i)], parity);
        ptx::wgmma_fence();
      }
      const int half = i == kRopePanel ? 2 : halves[i / kHalfPanels], panel = i % kHalfPanels;
#pragma unroll
      for (int step = 0; step < 4; ++step)
        ptx::Wgmma<kRows, T>::template shared_shared<false, false>(
            s,
            descriptor(k + half * (kHalfPanels * kPanelBytes / 16),
                       panel * kPanelBytes + step * 32),
            descriptor(q + half * (kHalfPanels * kRows * 128 / 16),
                       panel * kRows * 128 + step * 32),
            i + step > 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_keep(s);
  }

  // Oᵀ += Vᵀ Pᵀ of half of the columns, the warpgroup's own first: issued.
  template <int kHalf>
  __device__ __forceinline__ void multiply_values() {
    const unsigned k = reduced_base(smem.k[number][(number ^ kHalf) * kHalfPanels]);
    const unsigned p = reduced_base(smem.p[number]);
#pragma unroll
    for (int i = 0; i < kHalfPanels; ++i) ptx::wgmma_keep(o[kHalf][i]);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHalfPanels; ++i)
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step)
        ptx::Wgmma<kRows, T>::template shared_shared<true, false>(
            o[kHalf][i], descriptor(k, i * kPanelBytes + step * 16 * 128), descriptor(p, step * 32),
            true);
    ptx::wgmma_commit_group();
  }

  // Scores of keys that a row does not see become -inf. The values of keys that are not the
  // split's, which may be NaN, become zeros: 0 · NaN is NaN. The warp has read them as keys.
  __device__ __forceinline__ void hide_keys(float (&s)[kScores], int first) const {
    const tile::Range common = {smem.visible[kRows - 1].begin, smem.visible[0].end};
    if (common.contains(first, kKeys)) return;
    hide(s, smem.visible, first);
    const int own = warp * 16 + lane % 16;
    if (first + own >= split.begin && first + own < split.end) return;
    clear_half_row<kLatentPanels, kPanelBytes>(smem.k[number][0], own, lane / 16);
    ptx::fence_proxy_async();
  }

  // Probabilities of a block to shared memory, relative to the rows' largest scores so far.
  __device__ __forceinline__ void soften(float (&s)[kScores]) {
    put_largest(s, smem.warp_max[number][warp]);
    sync();  // maxima are there, and no warp's products read probabilities any more
    float correction[kOwnRows];
    bool moved = false;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      float max = row_max[i];
#pragma unroll
      for (int other = 0; other < 4; ++other)
        max = fmaxf(max, smem.warp_max[number][other][own_row(i)]);
      const float offset = tile::OnlineSoftmax::offset(max, scale_log2);
      correction[i] = ptx::ex2(fmaf(row_max[i], scale_log2, -offset));
      moved |= max > row_max[i] && row_max[i] != tile::negative_infinity();
      row_max[i] = max;
      float& x = s[at(i, 0)];
      float& y = s[at(i, 1)];
      x = ptx::ex2(fmaf(x, scale_log2, -offset));
      y = ptx::ex2(fmaf(y, scale_log2, -offset));
      row_sum[i] = fmaf(row_sum[i], correction[i], x + y);
    }
    if (__any_sync(~0u, moved)) {
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i)
#pragma unroll
        for (auto& half : o)
#pragma unroll
          for (auto& panel : half)
#pragma unroll
            for (int h = 0; h < 2; ++h) panel[at(i, h)] *= correction[i];
    }
    const unsigned to = probabilities_at(smem.p[number]);
#pragma unroll
    for (int pair = 0; pair < kRows / 16; ++pair) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = tile::pack<T>(s[pair * 8 + 2 * i], s[pair * 8 + 2 * i + 1]);
      ptx::stmatrix_x4_trans(to + pair * 16 * Panel::kRowBytes, words);
    }
    ptx::fence_proxy_async();
    sync();
  }

  // The sum of both warpgroups' O, each of its own columns: the result, where no other thread block
  // has keys, or this one's part of it.
  __device__ __forceinline__ void put(const FewMerge& merge) {
    const unsigned long long begun = merge.load_begun();
    put_sums();
    sync();  // no warp's products read keys any more
    constexpr int kVecs = kScores / 4, kAll = kHalfPanels * kVecs;
    float4* const sent = reinterpret_cast<float4*>(smem.k[number]) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kAll; ++i)
      sent[i * 128] = reinterpret_cast<const float4&>(o[1][i / kVecs][i % kVecs * 4]);
    if (threadIdx.x == 0) smem.waits = begun == params.launch_id;
    __syncthreads();
    const float4* const got = reinterpret_cast<float4*>(smem.k[number ^ 1]) + threadIdx.x % 128;
    float4 others[kAll];
#pragma unroll
    for (int i = 0; i < kAll; ++i) others[i] = got[i * 128];
    // Of this lane's row, by warpgroup; then of the lane's queries, this warpgroup's own first.
    const float2 of_row = merge.add_sums(lane % kRows);
    const float own_factor = number == 0 ? of_row.x : of_row.y;
    const float other_factor = number == 0 ? of_row.y : of_row.x;
    float factors[2][kOwnRows];
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      factors[0][i] = __shfl_sync(~0u, own_factor, own_row(i));
      factors[1][i] = __shfl_sync(~0u, other_factor, own_row(i));
    }
#pragma unroll
    for (int i = 0; i < kAll; ++i) {
      const float4& x = others[i];
      float (&own)[4] = reinterpret_cast<float (&)[4]>(o[0][i / kVecs][i % kVecs * 4]);
      const int r = i % kVecs * 2;  // of two neighbouring rows, for two keys each
      own[0] = fmaf(factors[0][r], own[0], factors[1][r] * x.x);
      own[1] = fmaf(factors[0][r + 1], own[1], factors[1][r + 1] * x.y);
      own[2] = fmaf(factors[0][r], own[2], factors[1][r] * x.z);
      own[3] = fmaf(factors[0][r + 1], own[3], factors[1][r + 1] * x.w);
    }
    if (merge.blocks > 1)
      pack_own<__half>();
    else
      pack_own<T>();
    __syncthreads();
    merge.put_rows();
  }

  // Sums and maxima of the warp's keys and of |O|, of each row.
  __device__ __forceinline__ void put_sums() {
    float largest[kOwnRows];
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      largest[i] = 0.0f;
#pragma unroll
      for (const auto& half : o)
#pragma unroll
        for (const auto& panel : half)
          largest[i] = fmaxf(largest[i], fmaxf(fabsf(panel[at(i, 0)]), fabsf(panel[at(i, 1)])));
    }
    sum_of_lanes(row_sum);
    max_of_lanes(largest);
    if (lane >= 4) return;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      smem.warp_sum[number][warp][own_row(i)] = row_sum[i];
      smem.warp_max[number][warp][own_row(i)] = largest[i];
      if (warp == 0) smem.row_max[number][own_row(i)] = row_max[i] * scale_log2;
    }
  }

  // The warpgroup's own columns of O to shared memory, row by row.
  template <class To>
  __device__ __forceinline__ void pack_own() const {
    const unsigned to = ptx::shared_address(row_of_o(smem, lane / 16 * 8 + lane % 8)) +
                        number * kHalfPanels * 128 + warp * 32 + lane / 8 % 2 * 16;
#pragma unroll
    for (int panel = 0; panel < kHalfPanels; ++panel)
#pragma unroll
      for (int pair = 0; pair < kRows / 16; ++pair) {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          words[i] =
              tile::pack<To>(o[0][panel][pair * 8 + 2 * i], o[0][panel][pair * 8 + 2 * i + 1]);
        ptx::stmatrix_x4_trans(to + pair * 16 * kRowBytes + panel * 128, words);
      }
  }

  __device__ __forceinline__ void sync() const { ptx::bar_sync(1 + number, 128); }
};

}  // namespace mla
