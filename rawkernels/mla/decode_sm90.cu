// Latent attention on Hopper with wgmma and TMA: tiles of 64 rows against blocks of 64 keys, O of
// 64 × 512 in the registers of two warpgroups.
//
//   q_latent, out (batch, seqlen_q, heads, latent) or (total, heads, latent), q_rope with rope_dim
//   in place of latent; pages of latents and of rotated parts; float16 or bfloat16, latents also
//   codes of 8 bits (Config::latent_format); latent a multiple of 64 up to 512, rope_dim a multiple
//   of 8 up to 64, pages of at least 8 keys unless Config::gather, everything 16-byte aligned,
//   scale > 0. DecodeParams and MlaParams have the rest. A tile's rows are query tokens times
//   heads; where there are several tiles of heads, params has a key head for each, all of the same
//   keys, so that thread blocks read them side by side.
//
// O of 64 rows takes half of a multiprocessor's registers. So each of two consumers holds 256
// columns of it, computes the scores of every second block of keys, and gives its probabilities to
// the other through shared memory, after FlashMLA. One's softmax runs beside the other's products.
// Row maxima lag (tile/softmax.cuh): what the two tell each other about them moves O in few rounds.
// Probabilities take the place of the keys' rotated panel, which is dead by then, so that two
// blocks of keys and Q fill shared memory. A third warpgroup finds splits and loads keys: each
// warp half of a buffer (mla/produce_sm90.cuh), or some keys of each block where they lie apart
// (gather_sm90.cuh) or are codes (expand_sm90.cuh).
#include "mla/expand_sm90.cuh"
#include "mla/gather_sm90.cuh"
#include "mla/operands_sm90.cuh"
#include "ptx/bar.cuh"
#include "ptx/registers.cuh"
#include "ptx/setmaxnreg.cuh"
#include "tile/softmax.cuh"

namespace mla {

// A consumer: the odd one has odd blocks and the right half of O.
struct Consumer {
  Smem& smem;
  const DecodeParams& params;
  const MlaParams& mla;
  const bool odd;
  const int first_panel = odd ? kLatentPanels / 2 : 0;  // of its values
  const float scale_log2 = static_cast<float>(params.scale) * tile::kLog2e;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int row = 16 * warp + tile::lane_row(lane);  // this lane's first; it has row + 8 too

  tile::PipelineState<kQueue> queue;
  unsigned parity = 0;  // of both buffers' present use
  const Work* work = nullptr;
  int first = 0;       // key of the pair of blocks
  tile::Range common;  // keys that all rows see
  tile::OnlineSoftmax softmax;
  float o[kLatent / 4];

  __device__ __forceinline__ void run() {
    while (true) {
      ptx::mbarrier_wait(smem.full_work[queue.index], queue.parity);
      work = &smem.queue[queue.index];
      const int pairs = work->pairs;
      if (pairs < 0) return;
      if (pairs > 0) load_queries(smem, params, mla, work->split);
      start();
      ptx::bar_sync(kBoth, kConsumers);
      if (pairs > 0) {
        if (odd)
          odd_rounds(pairs);
        else
          even_rounds(pairs);
      }
      finish();
      tile::arrive_warp(smem.empty_work[queue.index]);
      queue.advance();
    }
  }

  // Of a split.
  __device__ __forceinline__ void start() {
    const decoding::Split& split = work->split;
    first = split.origin;
    const tile::Range all = keys_of(split, kRows - 1), none_before = keys_of(split, 0);
    common = {all.begin, none_before.end};
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!odd) smem.visible[row + 8 * r] = keys_of(split, row + 8 * r);
        smem.row_max[odd][row + 8 * r] = tile::negative_infinity();
      }
    }
    softmax = tile::OnlineSoftmax();
#pragma unroll
    for (int i = 0; i < kLatent / 4; ++i) o[i] = 0.0f;
  }

  // The keys of a split that a row of its tile sees; rows that do not exist do as the last one
  // does.
  __device__ __forceinline__ tile::Range keys_of(const decoding::Split& split, int row) const {
    const int last = split.seq.seqlen_q * params.group - 1;
    const int token = divided_by_group(params, min(split.row_tile * kRows + row, last));
    const int position = split.seq.seqlen_k - split.seq.seqlen_q + token;
    const tile::Range keys = decoding::visibility(params, split.end).keys(position);
    return {max(keys.begin, split.begin), keys.end};
  }

  // S = Q Kᵀ of this consumer's block, panel by panel as they arrive: issued, not waited for.
  template <bool kOdd>
  __device__ __forceinline__ void multiply_keys(float (&s)[kBlockKeys / 2]) {
    const unsigned q = uniform_base(smem.q), k = uniform_base(smem.k[kOdd]);
    ptx::wgmma_keep(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      const int panel = panel_in_order(kOdd, i);
      ptx::mbarrier_wait(smem.full_k[kOdd][panel], parity);
      if (kCopies) ptx::fence_proxy_async();  // copies by cp.async need it
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
      const bool raises = soften(s, p, first, correction);
      finish_values(smem.empty_first[1]);
      if (raises) tile::scale_rows(o, correction);
    }
    add_other_block(first + kBlockKeys);
    finish_values(smem.empty_first[1]);
    parity ^= 1;
  }

  __device__ __forceinline__ void odd_rounds(int pairs) {
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair) {
      float s[kBlockKeys / 2], correction[2];
      unsigned p[kBlockKeys / 4];
      add_other_block(first);
      finish_values(smem.empty_second[0]);
      multiply_keys<true>(s);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_keep(s);
      if (soften(s, p, first + kBlockKeys, correction)) tile::scale_rows(o, correction);
      clear_values(1, first + kBlockKeys);
      multiply_own_values(p);
      finish_values(smem.empty_second[1]);
      first += 2 * kBlockKeys;
      parity ^= 1;
    }
  }

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
    const unsigned (&exist)[4] = smem.exist[odd];
    if ((exist[0] & exist[1] & exist[2] & exist[3]) == 0xffff) return;
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; ++i) {
      const int column = tile::fragment_column(i);
      const unsigned bit = exist[column / 16] >> (column % 16 + tile::lane_column(lane)) & 1;
      s[i] = bit ? s[i] : tile::negative_infinity();
    }
  }

  // Zeros for the values of keys outside of the split, which may be NaN: 0 · NaN is NaN. TMA gives
  // zeros for whole blocks of them.
  __device__ __forceinline__ void clear_values(int buffer, int key) {
    if (Config::gather) return;  // there are zeros
    const int begin = work->split.begin - key, end = work->split.end - key;
    if ((begin <= 0 && end >= kBlockKeys) || end <= 0) return;
#pragma unroll 1
    for (int i = ptx::thread_index() % 128; i < kBlockKeys * kLatentPanels / 2 * 8; i += 128) {
      const int key_row = i / 8 % kBlockKeys;
      if (key_row < begin || key_row >= end)
        *reinterpret_cast<uint4*>(smem.k[buffer][first_panel + i / 8 / kBlockKeys] +
                                  Panel::at(key_row, i % 8)) = {};
    }
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

  // The end of a split: sums of both consumers, then the result or a partial one.
  __device__ __forceinline__ void finish() {
    float sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = tile::quad_sum(softmax.row_sum[r]);
      if (lane % 4 == 0) smem.row_sum[odd][row + 8 * r] = sum[r];
    }
    ptx::bar_sync(kBoth, kConsumers);
    const decoding::Split& split = work->split;
    const int rows = split.seq.seqlen_q * params.group - split.row_tile * kRows;
    const int column = first_panel * 64 + tile::lane_column(lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int its_row = row + 8 * r;
      sum[r] += smem.row_sum[!odd][its_row];
      if (its_row >= rows) continue;
      const float max = softmax.row_max[r] * scale_log2;
      if (work->place.count > 1) {
        auto& part = static_cast<PartialTile<kRows, kLatent>*>(
            mla.parts)[work->place.slot(work->place.index)];
        if (!odd && lane % 4 == 0) part.max_sum[its_row] = {max, sum[r]};
        float* const to = part.o[its_row] + column;
#pragma unroll
        for (int i = 0; i < kLatent / 4; i += 4)
          *reinterpret_cast<float2*>(to + tile::fragment_column(i)) = {o[i + 2 * r],
                                                                       o[i + 2 * r + 1]};
      } else {
        put_result(output_row<T, kRows>(params, split, its_row, max, sum[r]), column, r);
      }
    }
    if (threadIdx.x == 0 && work->place.index + 1 == work->place.count)
      put_task<kRows>(params, mla, split, work->place);
  }

  __device__ __forceinline__ void put_result(const OutputRow& result, int column, int r) const {
    T* const target = static_cast<T*>(params.out) + result.at + column;
#pragma unroll
    for (int i = 0; i < kLatent / 4; i += 4)
      if (column + tile::fragment_column(i) < params.head_dim_v)
        *reinterpret_cast<unsigned*>(target + tile::fragment_column(i)) =
            tile::pack<T>(o[i + 2 * r] * result.factor, o[i + 2 * r + 1] * result.factor);
    if (!odd && lane % 4 == 0) put_lse(params, result);
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
  if (threadIdx.x == 0) mla::prepare(smem, maps);
  __syncthreads();
  if (warpgroup < 2) {
    ptx::setmaxnreg_inc<Config::consumer_registers>();
    mla::Consumer{smem, params, mla_params, warpgroup == 1}.run();
  } else {
    ptx::setmaxnreg_dec<Config::producer_registers>();
    if constexpr (Config::latent_format != tile::kPlain)
      mla::expand<Config::latent_format>(smem, params, mla_params);
    else if (Config::gather)
      mla::gather(smem, params, mla_params);
    else
      mla::produce(smem, params, maps);
  }
}
