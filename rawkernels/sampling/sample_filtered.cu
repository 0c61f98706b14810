// The k largest logits of each row, or a token drawn after top-k, top-p and min-p, by reading the
// row once: logits (rows, vocab) -> tokens (rows,), or top values and indices (rows, top_count).
// k is at most kMaxTopK, or for a draw all of the row; filter.cu serves the other rows. With
// Config::ranked, tokens alone, after a longer top-k (and min-p) or after typical-p.
//
// With top-k, the k largest are found and sorted (topk.cuh), and one thread for each takes part in
// top-p, min-p and Gumbel-max. Without, nucleus_gumbel.cuh draws from the whole row. A cluster of
// Config::cluster blocks shares a row; grid (rows * cluster).
#include "sampling/gumbel_max.cuh"
#include "sampling/min_p.cuh"
#include "sampling/nucleus_gumbel.cuh"
#include "sampling/params.cuh"
#include "sampling/topk.cuh"

struct Smem {
  CandidateSmem candidates;
  union {
    struct {
      TopKSmem top_k;
      ArgmaxSmem argmax;
      float key_bounds[kWarps];
      float probability[kMaxTopK];
    };
    NucleusSmem nucleus;
  };
};

ROW_KERNEL sample_filtered(const SampleParams params) {
  __shared__ Smem smem;
  const int row = blockIdx.x / Config::cluster;
  const Segment segment = own_segment(params.vocab);
  const Row logits = {static_cast<const Config::dtype*>(params.logits) + row * params.row_stride};
  arrive_cluster();
  if (Config::cluster == 8) logits.prefetch(segment);  // few rows: there is bandwidth to spare

  const float raw_temperature = fmaxf(params.temperature[row], 0.0f);
  const float temperature = raw_temperature > 0.0f ? raw_temperature : 1.0f;
  const float top_p = clamp_to_unit(params.top_p[row]), min_p = clamp_to_unit(params.min_p[row]);
  if constexpr (Config::ranked) {
    const PhiloxKey philox = {params.seed[row], params.offset[row]};
    const float typical_p = clamp_to_unit(params.typical_p[row]);
    const float top_k = raw_temperature == 0.0f ? 1.0f : float(params.top_k[row]);
    const float end = raw_temperature > 0.0f && typical_p < 1.0f ? typical_p : top_k;
    const int token = sample_nucleus(logits, params.vocab, temperature, end, min_p, philox,
                                     smem.candidates, smem.nucleus);
    if (threadIdx.x == 0 && rank_in_cluster() == 0) params.tokens[row] = token;
    return;
  }
  int top_k = params.top_count;
  if (params.tokens) {
    top_k = min(max(params.top_k[row], 1), params.vocab);
    if (raw_temperature == 0.0f || top_p == 0.0f) top_k = 1;
    const bool many = top_k > kMaxTopK && top_k < params.vocab;
    if (many || (clamp_to_unit(params.typical_p[row]) < 1.0f && top_k > 1)) {
      if (threadIdx.x == 0 && rank_in_cluster() == 0) params.tokens[row] = kNeedsFallback;
      wait_cluster();
      return;
    }
  }
  const PhiloxKey philox = {params.seed[row], params.offset[row]};
  if (top_k > kMaxTopK) {
    const int token = sample_nucleus(logits, params.vocab, temperature, top_p, min_p, philox,
                                     smem.candidates, smem.nucleus);
    if (threadIdx.x == 0 && rank_in_cluster() == 0) params.tokens[row] = token;
    return;
  }

  // Top-k lists a logit of -inf too; a draw never takes one.
  const Key lowest = static_cast<Key>(ordered(params.top_indices ? -kInfinity : -kMaxFloat)) << 32;
  PenalizedRow penalized = {nullptr, params.table_bits};
  if (params.penalty_table) {
    penalized.slots = params.penalty_table + (static_cast<long long>(row) << params.table_bits);
  }
  bool bad;
  const Key key = top_k_keys(logits, segment, params.vocab, top_k, lowest, penalized,
                             smem.candidates, smem.top_k, bad);
  if (rank_in_cluster() != 0) return;

  const float x = key_score(key);
  const int i = key_token(key);
  if (params.top_indices) {
    if (threadIdx.x < params.top_count) {
      const long long place = static_cast<long long>(row) * params.top_count + threadIdx.x;
      static_cast<Config::dtype*>(params.top_values)[place] = Config::dtype(bad ? kNaN : x);
      params.top_indices[place] = bad ? -1 : i;
    }
    return;
  }

  bool keeps = key != 0;
  const float high = key_score(smem.top_k.sorted[0]);
  if (top_p < 1.0f) {
    if (threadIdx.x < kMaxTopK) {
      smem.probability[threadIdx.x] =
          keeps ? ptx::ex2((x - high) * log2_per_logit(temperature)) : 0.0f;
    }
    __syncthreads();
    float before = 0.0f, sum = 0.0f;
#pragma unroll 8
    for (int rank = 0; rank < top_k; ++rank) {
      if (rank == threadIdx.x) before = sum;
      sum += smem.probability[rank];
    }
    keeps &= double(before) < double(top_p) * double(sum) || threadIdx.x == 0;
  }
  if (min_p > 0.0f) keeps &= reaches_min_p(x, high, temperature, min_p);
  const float u = philox_uniform(philox, kTokenStream, max(i, 0));
  const float log2_p = (x - high) * log2_per_logit(temperature);
  bool may_win;
  const int winners =
      count_possible_winners(keeps ? approx_key(log2_p, u) : -kInfinity, may_win, smem.key_bounds);
  if (winners < 2) {
    if (winners == 1 ? may_win : threadIdx.x == 0) params.tokens[row] = may_win ? i : -1;
    return;
  }
  Draw best = {0.0, -1};
  if (may_win) best = {exact_key(x, temperature, u), i};
  best = best_of_block(best, smem.argmax);
  if (threadIdx.x == 0) params.tokens[row] = best.token;
}
