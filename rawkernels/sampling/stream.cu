// What can be told of a row by reading it once: the k largest, and a draw after top-k, top-p and
// min-p.
//
// logits (rows, vocab) -> tokens (rows,), or top values and indices (rows, top_count), where k is
// at most kMaxRanked, or for a draw all of the row; grid (rows * cluster). A cluster of
// Config::cluster blocks shares a row. 512 rows of 128256 float32 take 74 us by top-k 50, 78 to 87
// by min-p, 121 to 123 by top-p; one read takes 62 (H200, 2026-11-22).
#include "sampling/params.cuh"
#include "sampling/race.cuh"
#include "sampling/raced.cuh"
#include "sampling/ranked.cuh"

struct Smem {
  ListSmem list;
  union {
    struct {
      RankedSmem ranked;
      RaceSmem race;
      float mass[kMaxRanked];
    };
    RacedSmem raced;
  };
};

extern "C" __global__ void
#if __CUDA_ARCH__ >= 900
__cluster_dims__(Config::cluster, 1, 1)
#endif
    __launch_bounds__(Config::threads, Config::blocks_per_sm) stream(const SampleParams params) {
  __shared__ Smem smem;
  const int row = blockIdx.x / Config::cluster;
  const Segment segment = own_segment(params.vocab);
  const Row logits = {static_cast<const Config::dtype*>(params.logits) + row * params.row_stride};
  arrive_cluster();
  if (Config::cluster == 8) logits.prefetch(segment);  // few rows: there is bandwidth to spare

  const float heat = fmaxf(params.temperature[row], 0.0f);
  const float temperature = heat > 0.0f ? heat : 1.0f;
  const float top_p = unit(params.top_p[row]), min_p = unit(params.min_p[row]);
  int top_k = params.top_count;
  if (params.tokens) {
    top_k = min(max(params.top_k[row], 1), params.vocab);
    if (heat == 0.0f || top_p == 0.0f) top_k = 1;
    const bool many = top_k > kMaxRanked && top_k < params.vocab;
    if (many || (unit(params.typical_p[row]) < 1.0f && top_k > 1)) {  // left to filter.cu
      if (threadIdx.x == 0 && rank_in_cluster() == 0) params.tokens[row] = kLater;
      wait_cluster();
      return;
    }
  }
  const PhiloxKey philox = {params.seed[row], params.offset[row]};
  if (top_k > kMaxRanked) {
    const int token = race_filtered(logits, params.vocab, temperature, top_p, min_p, philox,
                                    smem.list, smem.raced);
    if (threadIdx.x == 0 && rank_in_cluster() == 0) params.tokens[row] = token;
    return;
  }

  // -inf has a rank as well, if no probability.
  const Key lowest = static_cast<Key>(ordered(params.top_indices ? -kInfinity : -kMaxFloat)) << 32;
  AmendedRow amended = {nullptr, params.amended_bits};
  if (params.amended) {
    amended.slots = params.amended + (static_cast<long long>(row) << params.amended_bits);
  }
  bool bad;
  const Key key = kth_largest(logits, segment, params.vocab, top_k, lowest, amended, smem.list,
                              smem.ranked, bad);
  if (rank_in_cluster() != 0) return;

  const float x = key_score(key);
  const int i = key_index(key);
  if (params.top_indices) {
    if (threadIdx.x < params.top_count) {
      const long long place = static_cast<long long>(row) * params.top_count + threadIdx.x;
      static_cast<Config::dtype*>(params.top_values)[place] =
          Config::dtype(bad ? __int_as_float(0x7fc00000) : x);
      params.top_indices[place] = bad ? -1 : i;
    }
    return;
  }

  bool keeps = key != 0;
  const float high = key_score(smem.ranked.sorted[0]);
  if (top_p < 1.0f) {
    if (threadIdx.x < kMaxRanked)
      smem.mass[threadIdx.x] = keeps ? ptx::ex2((x - high) * log2_per_logit(temperature)) : 0.0f;
    __syncthreads();
    float before = 0.0f, sum = 0.0f;
#pragma unroll 8
    for (int rank = 0; rank < top_k; ++rank) {
      if (rank == threadIdx.x) before = sum;
      sum += smem.mass[rank];
    }
    keeps &= double(before) < double(top_p) * double(sum) || threadIdx.x == 0;
  }
  if (min_p > 0.0f) keeps &= (double(x) - double(high)) / double(temperature) >= log(double(min_p));
  const float u = philox_uniform(philox, kTokenStream, max(i, 0));
  const float log_mass = (x - high) * log2_per_logit(temperature);
  bool may;
  const int rivals = near_first(keeps ? near_key(log_mass, u) : -kInfinity, may, smem.race);
  if (rivals < 2) {
    if (rivals == 1 ? may : threadIdx.x == 0) params.tokens[row] = may ? i : -1;
    return;
  }
  Draw best = {0.0, -1};
  if (may) best = {exact_key(x, temperature, u), i};
  best_of_block(best, bad, smem.race);
  if (threadIdx.x == 0) params.tokens[row] = best.token;
}
