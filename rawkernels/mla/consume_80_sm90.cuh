// A consuming warpgroup of mla/decode_80_sm90.cu: it has the scores of every second block of keys,
// and O of half of the columns.
#pragma once

#include "mla/clear_row.cuh"
#include "mla/descriptors_sm90.cuh"
#include "mla/layout_80_sm90.cuh"
#include "mla/query_columns_sm90.cuh"
#include "ptx/bar.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/registers.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "tile/packed_extent.cuh"
#include "tile/pipeline.cuh"
#include "tile/softmax.cuh"

namespace mla {

struct Warpgroup : QueryColumns<kRows> {
  // How large a probability may be until what exponents are relative to is raised.
  static constexpr float kMost = 256.0f;
  // What they are relative to where a row has seen no key: any score is above it.
  static constexpr float kNone = -1e38f;

  using Pair = typename tile::PairOf<T>::type;
  // Of a block: the warpgroup's first panel of values, as A.
  using FirstValues = unsigned[kKeys / 16][4];

  Smem& smem;
  const DecodeParams& params;
  const MlaParams& mla;
  const int number;
  const float scale_log2 = static_cast<float>(params.scale) * tile::kLog2e;

  const Work* work = nullptr;
  int whole_begin = 0, whole_end = 0;  // blocks of which all rows see all keys
  float row_sum = 0.0f;  // of a row's probabilities in the own blocks, by one of the first threads
  float o[kHalfPanels][kScores];

  // All blocks of a split.
  __device__ __forceinline__ void run() {
    const int before = smem.visible[kRows - 1].begin - work->split.origin;
    const int until = smem.visible[0].end - work->split.origin;
    whole_begin = work->first + (before + kKeys - 1) / kKeys;
    whole_end = work->first + until / kKeys;
    row_sum = 0.0f;
#pragma unroll
    for (auto& panel : o)
#pragma unroll
      for (float& x : panel) x = 0.0f;
    const int end = work->end;
#pragma unroll 1
    for (int any_block = work->first; any_block < end; ++any_block) {
      const int block = uniform(any_block);
      const bool own = block % 2 == number;
      bool raised;
      if (own) {
        float s[kScores];
        multiply_keys(s, block);
        raised = soften(s, block);
      }
      FirstValues first_values;
      take_first_values(first_values, block);
      if (!own) {
        raised = ptx::bar_sync_or(kProbabilities + (number ^ 1), kConsumers, false);
        if (raised) ptx::bar_sync(kProbabilities + (number ^ 1), kConsumers);
      }
      if (raised) move(block % 2);
      add_values(first_values, block);
    }
  }

  // Sᵀ of the warpgroup's block, panel by panel as they come.
  __device__ __forceinline__ void multiply_keys(float (&s)[kScores], int block) const {
    const unsigned q = base(smem.q);
    ptx::wgmma_keep(s);
    ptx::mbarrier_wait(smem.full_rope[number], block / 2 % 2);
    ptx::wgmma_fence();
    multiply_panel(s, base(smem.rope[number]), q + kRopePanel * (kRows * 128 >> 4), false);
#pragma unroll
    for (int panel = 0; panel < kHalfPanels; ++panel) {
      const Place place = Place::of(block, panel);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // The other one's, which comes last, is last.
        const int half = number ^ i;
        ptx::mbarrier_wait(smem.full_k[half][place.index()], place.parity());
        ptx::wgmma_fence();
        multiply_panel(s, base(smem.k[half][place.index()]),
                       q + (half * kHalfPanels + panel) * (kRows * 128 >> 4), true);
      }
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_keep(s);
    __syncwarp();
    if (lane < 2 * kHalfPanels)
      ptx::mbarrier_arrive(smem.empty_k[lane % 2][Place::of(block, lane / 2).index()]);
  }
  __device__ __forceinline__ static void multiply_panel(float (&s)[kScores], unsigned k, unsigned q,
                                                        bool adds) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::Wgmma<kRows, T>::template shared_shared<false, false>(
          s, descriptor(k, step * 32), descriptor(q, step * 32), adds || step > 0);
  }

  // The first panel of the warpgroup's values of a block to registers, so that its place is free
  // before there are probabilities. Keys outside of the split, which may be NaN, become zeros.
  __device__ __forceinline__ void take_first_values(FirstValues& first_values, int block) const {
    const Place place = Place::of(block, 0);
    ptx::mbarrier_wait(smem.full_k[number][place.index()], place.parity());
    const unsigned from = Panel::at_chunks(
        ptx::shared_address(smem.k[number][place.index()]) + Panel::lane_column_major(), warp);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      ptx::ldmatrix_x4_trans(first_values[step], from + step * 16 * Panel::kRowBytes);
    tile::arrive_warp(smem.empty_k[number][place.index()]);
    if (is_whole(block)) return;
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      const int key = i / 4 * 16 + i / 2 % 2 * 8 + lane % 4 * 2;
      unsigned& pair = first_values[i / 4][i % 4];
      if (!work->has(block, key)) pair &= 0xFFFF0000;
      if (!work->has(block, key + 1)) pair &= 0x0000FFFF;
    }
  }

  // Oᵀ += Vᵀ Pᵀ of the warpgroup's columns for a block.
  __device__ __forceinline__ void add_values(FirstValues& first_values, int block) {
    const unsigned p = base(smem.rope[block % 2]);
    if (!is_whole(block)) clear_values(block);
#pragma unroll
    for (auto& panel : o) ptx::wgmma_keep(panel);
#pragma unroll
    for (auto& step : first_values) ptx::wgmma_keep(step);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      ptx::Wgmma<kRows, T>::template register_shared<false>(o[0], first_values[step],
                                                            descriptor(p, step * 32), true);
#pragma unroll
    for (int panel = 1; panel < kHalfPanels; ++panel) {
      const unsigned v = base(smem.k[number][Place::of(block, panel).index()]);
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step)
        ptx::Wgmma<kRows, T>::template shared_shared<true, false>(
            o[panel], descriptor(v, step * 16 * 128), descriptor(p, step * 32), true);
      ptx::wgmma_commit_group();
    }
    if (block % 2 == number) add_probabilities();
    free_panel<1>(block);
    free_panel<2>(block);
    free_panel<3>(block);
    tile::arrive_warp(smem.empty_rope[block % 2]);
#pragma unroll
    for (auto& panel : o) ptx::wgmma_keep(panel);
  }
  template <int kPanel>
  __device__ __forceinline__ void free_panel(int block) const {
    ptx::wgmma_wait_group<kHalfPanels - 1 - kPanel>();
    tile::arrive_warp(smem.empty_k[number][Place::of(block, kPanel).index()]);
  }

  // Probabilities of a block to shared memory, for both warpgroups: as if maxima need not be
  // raised, and again where they have to be, which the barrier tells both.
  __device__ __forceinline__ bool soften(float (&s)[kScores], int block) {
    if (!is_whole(block)) hide(s, smem.visible, work->first_key(block));
    const bool raises =
        ptx::bar_sync_or(kProbabilities + number, kConsumers, put_probabilities<true>(s) > kMost);
    if (raises) {
      raise(s);
      put_probabilities<false>(s);
      ptx::bar_sync(kProbabilities + number, kConsumers);
    }
    return raises;
  }
  // Relative to the rows' offsets; the lane's largest one.
  template <bool kFirst>
  __device__ __forceinline__ float put_probabilities(const float (&s)[kScores]) const {
    float offset[kOwnRows];
    get_rows(offset, smem.offset);
    const unsigned to = probabilities_at(smem.rope[number]);
    Pair largest = {};
#pragma unroll
    for (int pair = 0; pair < kRows / 16; ++pair) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = pair * 8 + 2 * i, row = pair * 4 + i / 2 * 2;
        words[i] = tile::pack<T>(ptx::ex2(fmaf(s[at], scale_log2, -offset[row])),
                                 ptx::ex2(fmaf(s[at + 1], scale_log2, -offset[row + 1])));
        largest = __hmax2(largest, reinterpret_cast<const Pair&>(words[i]));
      }
      // When all have their scores, what is rotated may be overwritten.
      if (kFirst && pair == 0) sync();
      ptx::stmatrix_x4_trans(to + pair * 16 * Panel::kRowBytes, words);
    }
    ptx::fence_proxy_async();
    return static_cast<float>(__hmax(largest.x, largest.y));
  }

  // Sums of the probabilities of the warpgroup's block, by a thread for each row.
  __device__ __forceinline__ void add_probabilities() {
    const int row = threadIdx.x % 128;
    if (row >= kRows) return;
    float sum[2] = {row_sum, 0.0f};
#pragma unroll
    for (int chunk = 0; chunk < kKeys / 8; ++chunk) {
      const auto eight =
          *reinterpret_cast<const tile::Vec<T, 8>*>(smem.rope[number] + Panel::at(row, chunk));
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i % 2] += static_cast<float>(eight.x[i]);
    }
    row_sum = sum[0] + sum[1];
  }

  // Raises what exponents are relative to, to the largest scores so far.
  __device__ __forceinline__ void raise(const float (&s)[kScores]) {
    put_largest(s, smem.warp_max[warp]);
    sync();
    const int row = threadIdx.x % 128;
    if (row < kRows) {
      const float before = smem.row_max[row];
      float max = before;
#pragma unroll
      for (const auto& of_warp : smem.warp_max) max = fmaxf(max, of_warp[row]);
      const bool none = max == tile::negative_infinity();
      const float offset = none ? kNone : max * scale_log2;
      // A row without a key so far has nothing in O: any finite factor will do.
      smem.correction[number][row] =
          before == tile::negative_infinity() ? 1.0f : ptx::ex2(smem.offset[row] - offset);
      smem.row_max[row] = max;
      smem.offset[row] = offset;
    }
    sync();
  }
  // Moves O and sums to maxima that a warpgroup has raised.
  __device__ __forceinline__ void move(int owner) {
    row_sum *= smem.correction[owner][min(static_cast<int>(threadIdx.x % 128), kRows - 1)];
#pragma unroll
    for (int i = 0; i < kOwnRows; i += 2) {  // two rows at a time: there are few registers
      const float2 correction =
          reinterpret_cast<const float2&>(smem.correction[owner][ptx::opaque(own_row(i))]);
#pragma unroll
      for (auto& panel : o)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          panel[at(i, h)] *= correction.x;
          panel[at(i + 1, h)] *= correction.y;
        }
    }
  }

  // Zeros for values of keys outside of the split in shared memory: 0 · NaN is NaN.
  __device__ __forceinline__ void clear_values(int block) const {
    const int thread = ptx::thread_index() % 128, key = thread % kKeys;
    if (!work->has(block, key)) {
#pragma unroll 1
      for (int panel = 1; panel < kHalfPanels; ++panel)
        clear_half_row<1, 0>(smem.k[number][Place::of(block, panel).index()], key, thread / kKeys);
    }
    ptx::fence_proxy_async();
    sync();
  }

  __device__ __forceinline__ bool is_whole(int block) const {
    return block >= whole_begin && block < whole_end;
  }
  // The same number, in a register that ptxas knows to be the same in all lanes.
  __device__ __forceinline__ static int uniform(int x) {
    return static_cast<int>(__reduce_or_sync(~0u, static_cast<unsigned>(x)));
  }
  // Where an operand lies, over 16.
  __device__ __forceinline__ static unsigned base(const void* operand) {
    return ptx::shared_address(operand) >> 4;
  }
  // What there is for each row, of the lane's rows.
  __device__ __forceinline__ void get_rows(float (&own)[kOwnRows],
                                           const float (&rows)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kOwnRows; i += 2) {
      const float2 two = reinterpret_cast<const float2&>(rows[own_row(i)]);
      own[i] = two.x;
      own[i + 1] = two.y;
    }
  }
  __device__ __forceinline__ void sync_both() const { ptx::bar_sync(kBoth, kConsumers); }
  __device__ __forceinline__ void sync() const { ptx::bar_sync(kOwn + number, 128); }
};

}  // namespace mla
