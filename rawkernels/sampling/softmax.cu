// Probabilities: logits (rows, vocab) -> probabilities (rows, vocab) float32, over a temperature;
// or log-probabilities of chosen tokens (rows, num_tokens), at temperature 1.
//
// A cluster of Config::cluster blocks shares a row, whose parts they hold in registers: it is read
// once and written once. The blocks meet once: each warp sends its largest logit and its sum to all
// of them and waits for no more than what it is sent. A part that does not fit is taken in turns
// and read twice. Grid: Config::cluster blocks a row.
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "sampling/params.cuh"
#include "sampling/quads.cuh"
#include "sampling/row.cuh"

constexpr int kValues = Config::values;  // of a thread
constexpr int kTurn = Config::threads * kValues;
constexpr int kPartials = Config::cluster * kWarps;
constexpr int kUnit = 64;  // tokens: whole lines of L2, whatever their type
static_assert(kValues % 4 == 0 && kTurn % kUnit == 0, "whole quads, and parts that fit");

struct SoftmaxParams {
  const void* logits;    // (rows, vocab), row_stride elements apart
  float* probabilities;  // (rows, vocab); null: not wanted
  const int* tokens;     // (rows, num_tokens)
  float* log_probabilities;
  long long row_stride;
  RowValue<float> temperature;
  int rows, vocab, num_tokens;
};

struct Partial {  // of 2^((x - max) slope)
  float max, sum;
};

struct Larger {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return max(a, b);
  }
};

// A block's part of the row.
__device__ __forceinline__ Segment own_part(int vocab) {
  constexpr int kUnits = Config::cluster * kUnit;
  const int part = (vocab + kUnits - 1) / kUnits * kUnit;
  const int begin = min(rank_in_cluster() * part, vocab);
  return {begin, min(begin + part, vocab)};
}

// Where the partial results of all warps of the cluster arrive.
struct Meeting {
  Partial partials[kPartials];
  ptx::Mbarrier arrived;
};

// By one thread of each block, before it arrives at the first meeting.
__device__ __forceinline__ void prepare(Meeting& meeting) {
#if __CUDA_ARCH__ >= 900
  if constexpr (Config::cluster > 1) {
    ptx::mbarrier_init(meeting.arrived, 1);
    ptx::fence_mbarrier_init();
  }
#endif
}

// Tells all blocks of the cluster what a warp has found, and waits until all warps have been heard.
// (A barrier of the cluster takes a fence of all memory along: 172 us in place of 154 at 512 rows
// of 151936.)
__device__ __forceinline__ void exchange(Meeting& meeting, Partial found) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if __CUDA_ARCH__ >= 900
  if constexpr (Config::cluster > 1) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(meeting.arrived, sizeof(meeting.partials));
    }
    if (lane < Config::cluster) {
      const int n = rank_in_cluster() * kWarps + warp;
      ptx::store_async(meeting.partials[n], found.max, found.sum, meeting.arrived, lane);
    }
    ptx::mbarrier_wait_cluster(meeting.arrived, 0);
    return;
  }
#endif
  if (lane == 0) meeting.partials[warp] = found;
  __syncthreads();
}

__device__ __forceinline__ void write(const float (&x)[kValues], float factor, float* out,
                                      Places places) {
  float* const to = out + places.first;
  if (places.quads) {
#pragma unroll
    for (int q = 0; q < kValues / 4; ++q) {
      const float* const y = x + 4 * q;
      if (q < places.count) {
        write4(to + q * Config::threads * 4, y[0] * factor, y[1] * factor, y[2] * factor,
               y[3] * factor);
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      if (k < places.count) to[k * Config::threads] = x[k] * factor;
    }
  }
}

// All of the mass on the first of the largest.
__device__ __forceinline__ void write_greedy(const Config::dtype* logits, float* out,
                                             Segment segment, unsigned long long* slots) {
  unsigned long long best = 0;
  for (int i = segment.begin + threadIdx.x; i < segment.end; i += Config::threads) {
    float x = to_float(logits[i]) + 0.0f;  // -0 becomes 0: they are equal
    x = x < kInfinity ? x : kInfinity;
    best =
        max(best, static_cast<unsigned long long>(ordered(x)) << 32 | (0xffffffffu - unsigned(i)));
  }
  best = reduce_cluster(best, Larger(), 0ull, slots);
  const float top = from_ordered(unsigned(best >> 32));
  const int first = top == -kInfinity ? -1 : int(0xffffffffu - unsigned(best));
  const float other = top == kInfinity ? __int_as_float(0x7fc00000) : 0.0f;
  for (int i = segment.begin + threadIdx.x; i < segment.end; i += Config::threads) {
    out[i] = i == first && top < kInfinity ? 1.0f : other;
  }
  sync_cluster();  // the slots are read by other blocks
}

extern "C" __global__ void
#if __CUDA_ARCH__ >= 900
__cluster_dims__(Config::cluster, 1, 1)
#endif
    __launch_bounds__(Config::threads, Config::blocks_per_sm) softmax(const SoftmaxParams params) {
  __shared__ Meeting meeting;
  __shared__ unsigned long long slots[kWarps];
  const int lane = threadIdx.x % 32;
  const int row = blockIdx.x / Config::cluster;
  const Segment segment = own_part(params.vocab);
  const bool quads = has_quads(params.logits, params.row_stride, params.vocab);
  const auto* const logits =
      static_cast<const Config::dtype*>(params.logits) + row * params.row_stride;
  float* const out = params.probabilities + static_cast<long long>(row) * params.vocab;
  if (threadIdx.x == 0) prepare(meeting);
  arrive_cluster();

  const float temperature = fminf(fmaxf(params.temperature[row], 0.0f), kMaxFloat);
  const float slope = log2_per_logit(temperature);
  float x[kValues];
  float largest = -kMaxFloat;  // of the thread; finite, for the differences of an empty row
  float sum = 0.0f;
  const auto exponentiate = [&] {
#pragma unroll
    for (int k = 0; k < kValues; ++k) x[k] = ptx::ex2((x[k] - largest) * slope);
  };
  for (int begin = segment.begin; begin < segment.end; begin += kTurn) {
    read(x, logits, {begin, segment.end, quads});
    float top = x[0];
#pragma unroll
    for (int k = 1; k < kValues; ++k) top = ptx::max_nan(top, x[k]);
    const bool bad = !(top < kInfinity);
    top = fmaxf(largest, top);
    sum *= ptx::ex2((largest - top) * slope);
    largest = top;
    exponentiate();
    float sums[4] = {};
#pragma unroll
    for (int k = 0; k < kValues; ++k) sums[k % 4] += x[k];
    sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if (bad) sum = __int_as_float(0x7fc00000);
  }
  wait_cluster();
  if (temperature == 0.0f) {
    write_greedy(logits, out, segment, slots);
    return;
  }
  const float top_of_warp = largest_of_warp(largest);
  sum = reduce_warp(sum * ptx::ex2((largest - top_of_warp) * slope), Add());
  exchange(meeting, {top_of_warp, sum});
  float top = -kMaxFloat, total = 0.0f;
#pragma unroll
  for (int n = lane; n < kPartials; n += 32) top = fmaxf(top, meeting.partials[n].max);
  top = largest_of_warp(top);
#pragma unroll
  for (int n = lane; n < kPartials; n += 32) {
    const Partial part = meeting.partials[n];
    total += part.sum * ptx::ex2((part.max - top) * slope);
  }
  total = reduce_warp(total, Add());

  for (int n = rank_in_cluster() * Config::threads + threadIdx.x; n < params.num_tokens;
       n += Config::cluster * Config::threads) {
    const long long place = static_cast<long long>(row) * params.num_tokens + n;
    const int token = params.tokens[place];
    float log_p = __int_as_float(0x7fc00000);
    if (token >= 0 && token < params.vocab) {
      log_p = total == 0.0f ? -kInfinity : to_float(logits[token]) - top - logf(total);
    }
    params.log_probabilities[place] = log_p;
  }
  if (!params.probabilities) return;
  const bool fits = segment.end - segment.begin <= kTurn;
  const float factor = total == 0.0f ? 0.0f : ptx::ex2((largest - top) * slope) / total;
  for (int begin = segment.begin; begin < segment.end; begin += kTurn) {
    if (!fits) {
      read(x, logits, {begin, segment.end, quads});
      exponentiate();
    }
    write(x, factor, out, {begin, segment.end, quads});
  }
}
