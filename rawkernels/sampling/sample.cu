// A token a row, by temperature alone: logits (rows, vocab) -> tokens (rows,). Temperature 0 takes
// the largest logit.
//
// The row is read once and kept nowhere. A cluster of Config::cluster blocks shares a row; grid
// (rows * cluster). Needs only shared memory for the merge.
#include "sampling/params.cuh"
#include "sampling/race.cuh"

// The first of the largest logits, as a draw whose key is the logit.
template <class Load>
__device__ __forceinline__ Draw argmax(Load load, Segment segment, bool& bad) {
  constexpr int kUnroll = 16;
  float best = -kInfinity;
  int token = -1;
  for (int base = segment.begin + threadIdx.x; base < segment.end;
       base += kUnroll * Config::threads) {
    float logit[kUnroll];
    if (base - int(threadIdx.x) + kUnroll * Config::threads <= segment.end) {
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) logit[j] = load(base + j * Config::threads);
    } else {
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        const int i = base + j * Config::threads;
        logit[j] = i < segment.end ? load(i) : -kInfinity;
      }
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      bad |= !(logit[j] < kInfinity);
      if (logit[j] > best) {
        best = logit[j];
        token = base + j * Config::threads;
      }
    }
  }
  return {best, token};
}

extern "C" __global__ void
#if __CUDA_ARCH__ >= 900
__cluster_dims__(Config::cluster, 1, 1)
#endif
    __launch_bounds__(Config::threads, Config::blocks_per_sm) sample(const SampleParams params) {
  __shared__ RaceSmem smem;
  const int row = blockIdx.x / Config::cluster;
  const Segment segment = own_segment(params.vocab);
  const auto* logits = static_cast<const Config::dtype*>(params.logits) + row * params.row_stride;
  const auto load = [&](int i) { return to_float(logits[i]); };
  const float temperature = fmaxf(params.temperature[row], 0.0f);

  bool bad = false;
  const auto exact = [&](int, float x) { return double(x) / double(params.temperature[row]); };
  const PhiloxKey key = {params.seed[row], params.offset[row]};
  const Draw best = temperature == 0.0f ? argmax(load, segment, bad)
                                        : race<false>(load, exact, segment,
                                                      log2_per_logit(temperature), key, smem, bad);
  const Draw winner = best_of_cluster(best, bad, smem);
  if (threadIdx.x == 0 && rank_in_cluster() == 0) params.tokens[row] = winner.token;
}
