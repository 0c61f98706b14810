// Probabilities: logits (rows, vocab) -> probabilities (rows, vocab) float32, over a temperature;
// or log-probabilities of chosen tokens (rows, num_tokens), at temperature 1.
//
// A cluster of Config::cluster blocks shares a row, whose parts they hold in registers: it is read
// once and written once. The blocks meet once a row, to add up their largest logits and sums, and
// while they compute and write, their parts of their next row are on their way to shared memory. A
// part that does not fit is taken in turns and read twice. Grid: as many clusters as fit, or rows.
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "sampling/params.cuh"
#include "sampling/quads.cuh"
#include "sampling/row.cuh"

constexpr int kValues = Config::values;  // of a thread
constexpr int kTurn = Config::threads * kValues;
constexpr int kPartials = Config::cluster * kWarps;
static_assert(kValues % 4 == 0 && Config::smem_bytes == kTurn * sizeof(Config::dtype), "a turn");

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

extern __shared__ uint4 next_row[];

// A thread's quads of a row go to places of its own.
__device__ __forceinline__ Quad* own_quads() {
  return reinterpret_cast<Quad*>(next_row) + threadIdx.x;
}

__device__ __forceinline__ void prefetch(const Config::dtype* logits, Places places) {
  const auto* const from = logits + places.first;
#pragma unroll
  for (int q = 0; q < kValues / 4; ++q) {
    if (q >= places.count) continue;
    const unsigned to = ptx::shared_address(own_quads() + q * Config::threads);
    if constexpr (sizeof(Quad) == 16) {
      ptx::cp_async_16(to, from + q * Config::threads * 4);
    } else {
      ptx::cp_async_8(to, from + q * Config::threads * 4);
    }
  }
}

__device__ __forceinline__ void take(float (&x)[kValues], Places places) {
#pragma unroll
  for (int q = 0; q < kValues / 4; ++q) {
    const Quad quad = own_quads()[q * Config::threads];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x[4 * q + k] = q < places.count ? to_float(quad.values[k]) : -kInfinity;
    }
  }
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
  sync_cluster();  // the slots may be needed for the next row
}

extern "C" __global__ void
#if __CUDA_ARCH__ >= 900
__cluster_dims__(Config::cluster, 1, 1)
#endif
    __launch_bounds__(Config::threads, Config::blocks_per_sm) softmax(const SoftmaxParams params) {
  __shared__ Partial partials[2][kPartials];  // of each warp of the cluster; for two rows in turn
  __shared__ unsigned long long slots[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int clusters = gridDim.x / Config::cluster;
  const Segment segment = own_segment(params.vocab);
  const bool quads = has_quads(params.logits, params.row_stride, params.vocab);
  const bool fits = segment.end - segment.begin <= kTurn;
  Places places = {segment.begin, segment.end, quads};
  const auto logits_of = [&](int row) {
    return static_cast<const Config::dtype*>(params.logits) + row * params.row_stride;
  };

  // A fence before the first loads: 75.1 us with it and 76.2 without it at 256 rows of 128256, but
  // 173 and 170 at 512 of 151936.
  if constexpr (Config::cluster == 8 && Config::threads == 512) {
    ptx::cluster_arrive();
  } else {
    arrive_cluster();
  }
  int row = blockIdx.x / Config::cluster;
  if (quads && fits) prefetch(logits_of(row), places);
  wait_cluster();
  for (int turn = 0; row < params.rows; row += clusters, turn ^= 1) {
    const auto* const logits = logits_of(row);
    float* const out = params.probabilities + static_cast<long long>(row) * params.vocab;
    const float temperature = fminf(fmaxf(params.temperature[row], 0.0f), kMaxFloat);
    const float slope = log2_per_logit(temperature);
    places.count = ptx::opaque(places.count);  // or comparisons with it would be kept
    float x[kValues];
    float largest = -kMaxFloat;  // of the warp; finite, for the differences of an empty row
    float sum = 0.0f;
    bool bad = false;
    const auto exponentiate = [&] {
#pragma unroll
      for (int k = 0; k < kValues; ++k) x[k] = ptx::ex2((x[k] - largest) * slope);
    };
    const auto add = [&] {
      float top = x[0];
#pragma unroll
      for (int k = 1; k < kValues; ++k) top = ptx::max_nan(top, x[k]);
      bad |= !(top < kInfinity);
      top = fmaxf(largest, reduce_warp(top, Larger()));
      sum *= ptx::ex2((largest - top) * slope);
      largest = top;
      exponentiate();
      float sums[4] = {};
#pragma unroll
      for (int k = 0; k < kValues; ++k) sums[k % 4] += x[k];
      sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    };
    if (quads && fits) {
      ptx::cp_async_wait_all();
      take(x, places);
      if (row + clusters < params.rows) prefetch(logits_of(row + clusters), places);
      add();
    } else {
      for (int begin = segment.begin; begin < segment.end; begin += kTurn) {
        read(x, logits, {begin, segment.end, quads});
        add();
      }
    }
    if (temperature == 0.0f) {
      write_greedy(logits, out, segment, slots);
      continue;
    }
    sum = reduce_warp(sum, Add());
    if (__any_sync(0xffffffffu, bad)) sum = __int_as_float(0x7fc00000);

    if (lane < Config::cluster) {
      of_rank(partials[turn], lane)[rank_in_cluster() * kWarps + warp] = {largest, sum};
    }
    sync_cluster();
    float top = -kMaxFloat, total = 0.0f;
    for (int n = lane; n < kPartials; n += 32) top = fmaxf(top, partials[turn][n].max);
    top = reduce_warp(top, Larger());
    for (int n = lane; n < kPartials; n += 32) {
      const Partial part = partials[turn][n];
      total += part.sum * ptx::ex2((part.max - top) * slope);
    }
    total = reduce_warp(total, Add());
    const float factor = total == 0.0f ? 0.0f : ptx::ex2((largest - top) * slope) / total;

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
    if (!params.probabilities) continue;
    for (int begin = segment.begin; begin < segment.end; begin += kTurn) {
      if (!fits) {
        read(x, logits, {begin, segment.end, quads});
        exponentiate();
      }
      write(x, factor, out, {begin, segment.end, quads});
    }
  }
}
