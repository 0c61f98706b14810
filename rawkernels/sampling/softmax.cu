// Probabilities of the tokens: logits (rows, vocab) -> probabilities (rows, vocab) float32, over a
// temperature; or log-probabilities of chosen tokens (rows, num_tokens), at temperature 1.
//
// A cluster of Config::cluster blocks shares a row and holds it in registers, so that it is read
// once and written once (online softmax, Milakov & Gimelshein, 2018). Each warp sends its largest
// logit and its sum to all blocks through distributed shared memory, and each block waits only for
// these, on an mbarrier. A part of a row that does not fit into registers is read twice, in chunks.
// Grid: (rows * cluster).
#include "ptx/mbarrier.cuh"
#include "sampling/params.cuh"
#include "sampling/row.cuh"
#include "sampling/vector_access.cuh"

constexpr int kValues = Config::values;  // of a thread
constexpr int kChunk = Config::threads * kValues;
constexpr int kPartials = Config::cluster * kWarps;
constexpr int kUnit = 64;  // tokens: whole lines of L2, whatever their type
static_assert(kValues % 4 == 0, "a thread's tokens must be whole vectors");
static_assert(kChunk % kUnit == 0, "a chunk must be whole units, so that a full part fits into it");

struct SoftmaxParams {
  const void* logits;    // (rows, vocab), row_stride elements apart
  float* probabilities;  // (rows, vocab); null: not asked for
  const int* tokens;     // (rows, num_tokens)
  float* log_probabilities;
  long long row_stride;
  RowValue<float> temperature;
  int rows, vocab, num_tokens;
};

struct Partial {  // a sum of 2^((x - max) slope)
  float max, sum;
};

// The partial results of all warps of the cluster. Arrivals: one, by the block's first thread with
// the bytes to expect; each warp of the cluster sends its bytes.
struct ExchangeSmem {
  Partial partials[kPartials];
  ptx::Mbarrier arrived;
};

// By one thread of each block, before the first cluster barrier.
__device__ __forceinline__ void init_exchange(ExchangeSmem& smem) {
  if constexpr (Config::cluster > 1) {
    ptx::mbarrier_init(smem.arrived, 1);
    ptx::fence_mbarrier_init();
  }
}

// Sends a warp's partial result to all blocks of the cluster, and waits for those of all warps. A
// cluster barrier in its place would fence all memory, the writes of other rows included.
__device__ __forceinline__ void exchange(ExchangeSmem& smem, Partial own) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if constexpr (Config::cluster > 1) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(smem.arrived, sizeof(smem.partials));
    }
    if (lane < Config::cluster) {
      const int n = rank_in_cluster() * kWarps + warp;
      ptx::store_async(smem.partials[n], own.max, own.sum, smem.arrived, lane);
    }
    ptx::mbarrier_wait_cluster(smem.arrived, 0);
  } else {
    if (lane == 0) smem.partials[warp] = own;
    __syncthreads();
  }
}

__device__ __forceinline__ void store_tokens(const float (&x)[kValues], float factor, float* out,
                                             ThreadTokens tokens) {
  float* const to = out + tokens.first;
  if (tokens.vectors) {
#pragma unroll
    for (int v = 0; v < kValues / 4; ++v) {
      const float* const y = x + 4 * v;
      if (v < tokens.count) {
        __stcg(reinterpret_cast<float4*>(to + v * Config::threads * 4),
               make_float4(y[0] * factor, y[1] * factor, y[2] * factor, y[3] * factor));
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < kValues; ++n) {
      if (n < tokens.count) to[n * Config::threads] = x[n] * factor;
    }
  }
}

// Temperature 0: the first of the largest logits has probability 1.
__device__ __forceinline__ void write_greedy(const Config::dtype* logits, float* out,
                                             Segment segment, unsigned long long* slots) {
  unsigned long long best = 0;
  for (int i = segment.begin + threadIdx.x; i < segment.end; i += Config::threads) {
    float x = to_float(logits[i]) + 0.0f;  // -0 becomes 0: they are equal
    x = x < kInfinity ? x : kInfinity;
    best = max(best, rank_key(x, i));
  }
  best = reduce_cluster(best, Larger(), 0ull, slots);
  const float top = key_score(best);
  const int first = top == -kInfinity ? -1 : key_token(best);
  const float other = top == kInfinity ? kNaN : 0.0f;
  for (int i = segment.begin + threadIdx.x; i < segment.end; i += Config::threads) {
    out[i] = i == first && top < kInfinity ? 1.0f : other;
  }
  sync_cluster();  // the slots are read by other blocks
}

ROW_KERNEL softmax(const SoftmaxParams params) {
  __shared__ ExchangeSmem smem;
  __shared__ unsigned long long slots[kWarps];
  const int lane = threadIdx.x % 32;
  const int row = blockIdx.x / Config::cluster;
  const Segment segment = part_of_row<kUnit, Config::cluster>(params.vocab, rank_in_cluster());
  const bool vectors = has_vectors(params.logits, params.row_stride, params.vocab);
  const auto* const logits =
      static_cast<const Config::dtype*>(params.logits) + row * params.row_stride;
  float* const out = params.probabilities + static_cast<long long>(row) * params.vocab;
  if (threadIdx.x == 0) init_exchange(smem);
  arrive_cluster();

  const float temperature = fminf(fmaxf(params.temperature[row], 0.0f), kMaxFloat);
  const float slope = log2_per_logit(temperature);
  float x[kValues];
  float largest = -kMaxFloat;  // of the thread; finite, for the differences of an empty row
  float sum = 0.0f;
  const auto exponentiate = [&] {
#pragma unroll
    for (int n = 0; n < kValues; ++n) x[n] = ptx::ex2((x[n] - largest) * slope);
  };
  for (int begin = segment.begin; begin < segment.end; begin += kChunk) {
    load_tokens(x, logits, {begin, segment.end, vectors});
    float top = x[0];
#pragma unroll
    for (int n = 1; n < kValues; ++n) top = ptx::max_nan(top, x[n]);
    const bool bad = !(top < kInfinity);
    top = fmaxf(largest, top);
    sum *= ptx::ex2((largest - top) * slope);
    largest = top;
    exponentiate();
    float sums[4] = {};
#pragma unroll
    for (int n = 0; n < kValues; ++n) sums[n % 4] += x[n];
    sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if (bad) sum = kNaN;
  }
  wait_cluster();
  if (temperature == 0.0f) {
    write_greedy(logits, out, segment, slots);
    return;
  }
  const float top_of_warp = largest_of_warp(largest);
  sum = reduce_warp(sum * ptx::ex2((largest - top_of_warp) * slope), Add());
  exchange(smem, {top_of_warp, sum});
  float top = -kMaxFloat, total = 0.0f;
#pragma unroll
  for (int n = lane; n < kPartials; n += 32) top = fmaxf(top, smem.partials[n].max);
  top = largest_of_warp(top);
#pragma unroll
  for (int n = lane; n < kPartials; n += 32) {
    const Partial part = smem.partials[n];
    total += part.sum * ptx::ex2((part.max - top) * slope);
  }
  total = reduce_warp(total, Add());

  for (int n = rank_in_cluster() * Config::threads + threadIdx.x; n < params.num_tokens;
       n += Config::cluster * Config::threads) {
    const long long place = static_cast<long long>(row) * params.num_tokens + n;
    const int token = params.tokens[place];
    float log_p = kNaN;
    if (token >= 0 && token < params.vocab) {
      log_p = total == 0.0f ? -kInfinity : to_float(logits[token]) - top - logf(total);
    }
    params.log_probabilities[place] = log_p;
  }
  if (!params.probabilities) return;
  const bool fits = segment.end - segment.begin <= kChunk;
  const float factor = total == 0.0f ? 0.0f : ptx::ex2((largest - top) * slope) / total;
  for (int begin = segment.begin; begin < segment.end; begin += kChunk) {
    if (!fits) {
      load_tokens(x, logits, {begin, segment.end, vectors});
      exponentiate();
    }
    store_tokens(x, factor, out, {begin, segment.end, vectors});
  }
}
