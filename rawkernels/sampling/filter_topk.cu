// Logits after top-k, top-p and min-p, where the k largest of each row are known: logits (rows,
// vocab), top_values and top_indices (rows, top_count) in order -> filtered (rows, vocab).
// Memory-bound.
//
// The filters keep a run of the largest, so one cutoff stands for all three. Each thread block
// finds its row's, a thread for each of the largest, by the arithmetic of sample_filtered.cu, and
// compares kSegment tokens with it. Grid (rows * ceil(vocab / kSegment)).
#include "ptx/math.cuh"
#include "sampling/min_p.cuh"
#include "sampling/params.cuh"
#include "sampling/row.cuh"

constexpr int kSegment = 4096;

extern "C" __global__ void __launch_bounds__(Config::threads)
    filter_topk(const SampleParams params) {
  __shared__ float probability[Config::threads];
  const int segments = (params.vocab + kSegment - 1) / kSegment;
  const int row = blockIdx.x / segments, begin = (blockIdx.x - row * segments) * kSegment;
  const long long first = static_cast<long long>(row) * params.top_count;
  const auto* const values = static_cast<const Config::dtype*>(params.top_values) + first;
  const int* const indices = params.top_indices + first;
  const float raw_temperature = fmaxf(params.temperature[row], 0.0f);
  const float temperature = raw_temperature > 0.0f ? raw_temperature : 1.0f;
  const float top_p = clamp_to_unit(params.top_p[row]), min_p = clamp_to_unit(params.min_p[row]);
  const int top_k = raw_temperature == 0.0f || top_p == 0.0f ? 1 : params.top_count;

  const int rank = threadIdx.x;
  const float x = rank < top_k ? to_float(values[rank]) : -kInfinity, high = to_float(values[0]);
  const bool bad = indices[0] < 0;
  bool keeps = x > -kInfinity;
  if (top_p < 1.0f) {
    probability[rank] = keeps ? ptx::ex2((x - high) * log2_per_logit(temperature)) : 0.0f;
    __syncthreads();
    float before = 0.0f, sum = 0.0f;
#pragma unroll 8
    for (int other = 0; other < top_k; ++other) {
      if (other == rank) before = sum;
      sum += probability[other];
    }
    keeps &= double(before) < double(top_p) * double(sum) || rank == 0;
  }
  if (min_p > 0.0f) keeps &= reaches_min_p(x, high, temperature, min_p);
  const int kept = __syncthreads_count(keeps);

  const float last = kept > 0 ? to_float(values[kept - 1]) : kInfinity;
  const int last_token = kept > 0 ? indices[kept - 1] : -1;
  const auto* const logits =
      static_cast<const Config::dtype*>(params.logits) + row * params.row_stride;
  float* const filtered = params.filtered + static_cast<long long>(row) * params.vocab;
  // In float64 a product rounds to the float32 number that a quotient would give.
  const double per_temperature = 1.0 / double(temperature);
  const float absent = bad ? kNaN : -kInfinity;
  for_each_ahead<8>(
      begin + rank, min(begin + kSegment, params.vocab), Config::threads,
      [&](int i) { return to_float(logits[i]) + 0.0f; },  // -0 becomes 0
      [&](int i, float x) {
        const bool stays = (x > last) | ((x == last) & (i <= last_token));
        __stcs(filtered + i, stays & !bad ? __double2float_rn(x * per_temperature) : absent);
      });
}
