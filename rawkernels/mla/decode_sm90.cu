// Latent attention on Hopper with wgmma and TMA: tiles of 64 rows against blocks of 64 keys, O of
// 64 × 512 in the registers of two warpgroups.
//
//   q_latent, out (batch, seqlen_q, heads, latent) or (total, heads, latent), q_rope with rope_dim
//   in place of latent; pages of latents and of rotated parts; float16 or bfloat16; latent a
//   multiple of 64 up to 512, rope_dim a multiple of 8 up to 64, pages of at least 8 keys unless
//   Config::gather, everything 16-byte aligned, scale > 0. DecodeParams and MlaParams have the
//   rest. A tile's rows are query tokens times heads; where there are several tiles of heads,
//   params has a key head for each, all of the same keys, so that thread blocks read them side by
//   side.
//
// Two warpgroups compute (consumer_sm90.cuh). A third one finds splits, the first of them before it
// knows that mbarriers are there, and loads keys: each warp half of a buffer (produce_sm90.cuh), or
// some keys of each block where they lie apart (gather_sm90.cuh).
#include "mla/consumer_sm90.cuh"
#include "mla/gather_sm90.cuh"
#include "mla/merge_parts.cuh"
#include "ptx/registers.cuh"
#include "ptx/setmaxnreg.cuh"

namespace mla {

// Takes splits from the producer, and puts their results, or partial ones.
struct SplitConsumer : Consumer {
  using HalfPart = PartialTile<kRows, kLatent, true>;
  using Part = PartialTile<kRows, kLatent, kHalfParts>;
  static_assert(sizeof(Part) == kRows * (kLatent * (kHalfParts ? 2 : 4) + 8),
                "part_bytes of the Config must have room for it");
  tile::PipelineCounter<kQueue> queue;

  __device__ __forceinline__ void run() {
    const bool by_tma = mla.query_rows > 0;
    if (by_tma) clear_missing_queries<kRows, kConsumers>(smem.q, mla);
    while (true) {
      const tile::PipelineState<kQueue> place = queue.state();
      ptx::mbarrier_wait(smem.full_work[place.index], place.parity);
      work = &smem.queue[place.index];
      const int blocks = work->blocks, pairs = (blocks + 1) / 2;
      if (blocks < 0) return;
      ends_even = blocks % 2 == 1;
      if (!by_tma && pairs > 0) load_queries(smem, params, mla, work->split);
      start();
      if (by_tma) ptx::mbarrier_wait(smem.full_q, queue.count % 2);
      ptx::bar_sync(kBoth, kConsumers);
      if (pairs == 0)
        leave_queries();
      else if (odd)
        odd_rounds(pairs);
      else
        even_rounds(pairs);
      finish();
      tile::arrive_warp(smem.empty_work[queue.state().index]);
      queue.advance();
    }
  }

  // The end of a split: sums of both consumers, then the result or a partial one. Where that is the
  // last one of its tile, all of them are added up here, and are the result, or a partial one
  // again.
  __device__ __forceinline__ void finish() {
    const decoding::Split& split = work->split;
    const int rows = rows_from<kRows>(params, split);
    PartMerger<Part> merger = {params, work->place};
    unsigned slot = merger.place.slot(merger.place.index);
    bool is_part = merger.place.count > 1, is_sum = false;
    float max[2], sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = softmax.row_max[r] * scale_log2;
      sum[r] = tile::quad_sum(softmax.row_sum[r]);
      if (lane % 4 == 0) smem.row_sum[odd][row + 8 * r] = sum[r];
    }
#pragma unroll 1
    while (true) {
      if (kHalfParts && is_part) put_largest();
      ptx::bar_sync(kBoth, kConsumers);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int its_row = row + 8 * r;
        if (!is_sum) sum[r] += smem.row_sum[!odd][its_row];
        if (kHalfParts && is_part) fit_part(its_row, max[r], sum[r], r);
        if (is_part) put_part(slot, its_row, its_row < rows, max[r], sum[r], r);
      }
      if (!is_part) {
        OutputRow results[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
          results[r] = output_row<T, kRows>(params, split, row + 8 * r, max[r], sum[r]);
#pragma unroll
        for (int r = 0; r < 2; ++r) put_result(results[r], row + 8 * r < rows, r);
      }
      if (!kHalfParts || !is_part || !mla.merges_parts) break;
      ptx::bar_sync(kBoth, kConsumers);
      if (threadIdx.x == 0) smem.merges = merger.claim(slot);
      ptx::bar_sync(kBoth, kConsumers);
      if (!smem.merges) return;
      add_parts(parts_of<HalfPart>(params, mla), merger.list(), rows, max, sum);
      is_part = !merger.ends();
      is_sum = true;
      slot = merger.advance();
    }
    if (threadIdx.x == 0 && work->place.index + 1 == work->place.count)
      put_task<kRows>(params, mla, split, work->place);
  }

  // O, maxima and sums become those of a list of partial results. Lanes whose row does not exist
  // read all the same numbers, which costs little and needs no predicate.
  __device__ __forceinline__ void add_parts(const HalfPart* parts, const decoding::MergeList& list,
                                            int rows, float (&max)[2], float (&sum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = tile::negative_infinity();
      sum[r] = 0.0f;
    }
#pragma unroll 4
    for (int i = 0; i < list.count; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        max[r] = fmaxf(max[r], __ldcg(&parts[list.slot_of(i)].max_sum[row + 8 * r]).x);
#pragma unroll
    for (float& x : o) x = 0.0f;
#pragma unroll 1
    for (int i = 0; i < list.count; ++i) {
      const HalfPart& part = parts[list.slot_of(i)];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 max_sum = __ldcg(&part.max_sum[row + 8 * r]);
        const float factor = ptx::ex2(max_sum.x - tile::OnlineSoftmax::offset(max[r], 1.0f));
        sum[r] = fmaf(factor, max_sum.y, sum[r]);
        const int own = HalfPart::at(row + 8 * r, first_panel * 16 + lane % 4);
        const auto* const from = part.o + (row + 8 * r < rows ? own : 0);
#pragma unroll
        for (int j = 0; j < kLatent / 4; j += 16) {
          const uint4 its = __ldcg(reinterpret_cast<const uint4*>(from + HalfPart::at(0, j / 2)));
          const auto add = [&](int k, unsigned pair) {
            const float2 two = HalfPart::pair(pair);
            float* const to = o + j + 4 * k + 2 * r;
            to[0] = fmaf(factor, two.x, to[0]);
            to[1] = fmaf(factor, two.y, to[1]);
          };
          add(0, its.x);
          add(1, its.y);
          add(2, its.z);
          add(3, its.w);
        }
      }
    }
  }

  // The largest |O| of each row, of its columns.
  __device__ __forceinline__ void put_largest() const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 2 * r; i < kLatent / 4; i += 4)
        largest = fmaxf(largest, fmaxf(fabsf(o[i]), fabsf(o[i + 1])));
      largest = tile::quad_max(largest);
      if (lane % 4 == 0) smem.largest[odd][row + 8 * r] = largest;
    }
  }

  // Makes a row's numbers such as float16 has, by a larger maximum.
  __device__ __forceinline__ void fit_part(int its_row, float& max, float& sum, int r) {
    const int rise = HalfPart::rise_for(fmaxf(smem.largest[0][its_row], smem.largest[1][its_row]));
    const float factor = HalfPart::factor_for(rise);
    max += rise;
    sum *= factor;
#pragma unroll
    for (int i = 2 * r; i < kLatent / 4; i += 4) {
      o[i] *= factor;
      o[i + 1] *= factor;
    }
  }

  // Eight numbers of a row that lie side by side in a partial result.
  struct Eight {
    float x[8];
  };
  __device__ __forceinline__ Eight eight(int i, int r) const {
    const float* const own = o + i + 2 * r;
    return {own[0], own[1], own[4], own[5], own[8], own[9], own[12], own[13]};
  }

  // A row of a partial result, where it exists: numbers go where they are in the fragment.
  __device__ __forceinline__ void put_part(unsigned slot, int its_row, bool exists, float max,
                                           float sum, int r) const {
    if (!exists) return;
    Part& part = parts_of<Part>(params, mla)[slot];
    if (!odd && lane % 4 == 0) part.max_sum[its_row] = {max, sum};
    auto* const to = part.o + Part::at(its_row, first_panel * 16 + lane % 4);
    constexpr int kStep = kHalfParts ? 16 : 8;  // 16 bytes of a lane
#pragma unroll
    for (int i = 0; i < kLatent / 4; i += kStep) {
      auto& target = to[Part::at(0, i / 2)];
      if constexpr (kHalfParts)
        reinterpret_cast<uint4&>(target) = HalfPart::packed(eight(i, r).x);
      else
        reinterpret_cast<float4&>(target) = {o[i + 2 * r], o[i + 2 * r + 1], o[i + 4 + 2 * r],
                                             o[i + 4 + 2 * r + 1]};
    }
  }

  // A row of the result, where it exists, 16 bytes at a time: of four blocks of 8 columns, each
  // lane of a quad has one.
  __device__ __forceinline__ void put_result(const OutputRow& result, bool exists, int r) const {
    const int column = first_panel * 64 + lane % 4 * 8;
    T* const target = static_cast<T*>(params.out) + result.at + column;
#pragma unroll
    for (int i = 0; i < kLatent / 4; i += 16) {
      unsigned words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = tile::pack<T>(o[i + 4 * j + 2 * r] * result.factor,
                                 o[i + 4 * j + 2 * r + 1] * result.factor);
      tile::transpose_quad(words);
      if (exists && column + i * 2 < params.head_dim_v)
        *reinterpret_cast<uint4*>(target + i * 2) = {words[0], words[1], words[2], words[3]};
    }
    if (exists && !odd && lane % 4 == 0) put_lse(params, result);
  }
};

}  // namespace mla

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    mla_decode_sm90(const __grid_constant__ DecodeParams params,
                    const __grid_constant__ MlaParams mla_params,
                    const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  mla::Smem& smem = *reinterpret_cast<mla::Smem*>(dynamic_smem);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup < 2) {
    if (threadIdx.x == 0) {
      mla::prepare(smem, maps);
      if (mla_params.query_rows > 0) {
        ptx::prefetch_tensormap(maps.q);
        ptx::prefetch_tensormap(maps.q_rope);
      }
    }
    __syncwarp();
    if (threadIdx.x < 32) ptx::bar_arrive(mla::kReady, mla::kReadyThreads);
    ptx::bar_sync(mla::kBoth, mla::kConsumers);
    ptx::setmaxnreg_inc<Config::consumer_registers>();
    mla::SplitConsumer{{smem, params, mla_params, warpgroup == 1}}.run();
  } else {
    ptx::setmaxnreg_dec<Config::producer_registers>();
    if (Config::gather)
      mla::gather(smem, params, mla_params, maps);
    else
      mla::produce(smem, params, mla_params, maps);
  }
}
