// Everything that must know a whole row before it can say something about a token of it:
// top-k of any k, top-p, min-p and typical-p, and the draw after them.
//
// logits (rows, vocab) -> tokens (rows,) or filtered (rows, vocab); grid (rows * cluster).
// With Config::resident the blocks of a cluster hold the row in their shared memory as float32, so
// that it is read from device memory once, however many passes the filters make; else each pass
// reads the logits again.
#include "sampling/params.cuh"
#include "sampling/race.cuh"
#include "sampling/select.cuh"

constexpr float kMassUnits =
    4.0e9f;  // that the mass of a row is cut into: 32 bits less rounding up

struct Smem {
  RaceSmem race;
  SelectSmem select;
  Range range[kWarps];
  float mass[2][kWarps], moment[kWarps];
  Cut typical;
  float center;
};

extern __shared__ float resident_row[];

// The smallest logit whose probability is at least min_p times that of `high`, as float64 decides
// it.
__device__ __forceinline__ float min_p_logit(float high, float temperature, float min_p) {
  const double bound = log(double(min_p));
  const auto keeps = [&](unsigned key) {
    return (double(from_ordered(key)) - double(high)) / double(temperature) >= bound;
  };
  const double guess = double(high) + bound * double(temperature);
  unsigned key = ordered(fmaxf(__double2float_rn(guess), -kMaxFloat));
  while (key < ordered(high) && !keeps(key)) ++key;
  while (key > ordered(-kMaxFloat) && keeps(key - 1)) --key;
  return from_ordered(key);
}

// Logits of the type that SampleParams names.
struct AnyRow {
  const char* logits;
  int kind;

  __device__ __forceinline__ AnyRow(const SampleParams& params, int row)
      : logits(static_cast<const char*>(params.logits) +
               row * params.row_stride * (params.kind == 0 ? 4 : 2)),
        kind(params.kind) {}

  __device__ __forceinline__ float operator()(int i) const {
    if (kind == 0) return reinterpret_cast<const float*>(logits)[i] + 0.0f;
    const unsigned short bits = reinterpret_cast<const unsigned short*>(logits)[i];
    const float x = kind == 1 ? __half2float(__ushort_as_half(bits))
                              : __uint_as_float(static_cast<unsigned>(bits) << 16);
    return x + 0.0f;  // -0 becomes 0: they are equal
  }
};

extern "C" __global__ void
#if __CUDA_ARCH__ >= 900
__cluster_dims__(Config::cluster, 1, 1)
#endif
    __launch_bounds__(Config::threads, Config::blocks_per_sm) filter(const SampleParams params) {
  __shared__ Smem smem;
  const int row = blockIdx.x / Config::cluster;
  if (params.rest && params.tokens[row] != kLater) return;
  const Segment segment = own_segment(params.vocab);
  const AnyRow read(params, row);
  const auto logit = [&](int i) {
    if constexpr (Config::resident) return resident_row[i - segment.begin];
    return read(i);
  };

  // The row, and its largest and smallest finite logit. A largest of +inf stands for a bad row.
  Range range = {-kInfinity, kInfinity};
  constexpr int kUnroll = 8;
  for (int base = segment.begin + threadIdx.x; base < segment.end;
       base += kUnroll * Config::threads) {
    float x[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int i = base + j * Config::threads;
      x[j] = i < segment.end ? read(i) : -kInfinity;
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int i = base + j * Config::threads;
      if (Config::resident && i < segment.end) resident_row[i - segment.begin] = x[j];
      range.high = fmaxf(range.high, x[j] < kInfinity ? x[j] : kInfinity);
      range.low = fminf(range.low, x[j] > -kInfinity ? x[j] : kInfinity);
    }
  }
  range = reduce_cluster(range, Widen(), {-kInfinity, kInfinity}, smem.range);
  const float high = range.high, low = range.low;
  const bool bad = high == kInfinity;
  const bool empty = bad || high == -kInfinity;

  float temperature = fmaxf(params.temperature[row], 0.0f);
  int top_k = min(max(params.top_k[row], 1), params.vocab);
  if (temperature == 0.0f) {
    temperature = 1.0f;
    top_k = 1;
  }

  // Three filters keep a run of the ranked row, so one cut stands for them; typical-p keeps a run
  // of another ranking.
  Cut cut = {-kMaxFloat, 0x7fffffff};  // at first, all
  bool has_typical =
      false;  // then smem.typical, about smem.center, cuts as well: memory, since it is rare
  const float slope = log2_per_logit(temperature);
  const auto mass = [&](float x) { return ptx::ex2((x - high) * slope); };
  const auto kept = [&](int i, float x) { return cut.keeps(x, i); };
  const auto left = [&](int i, float x) {
    bool keeps = kept(i, x);
    if (has_typical) keeps &= smem.typical.keeps(-fabsf(x - smem.center), i);
    return keeps;
  };
  float moment;  // of the mass that is left, about `high`
  const auto sum_mass = [&](float* slots) {
    float sum = 0.0f;
    moment = 0.0f;
    sweep(logit, segment, [&](int i, float x) {
      const bool there = left(i, x);
      const float below = there ? x - high : 0.0f;
      const float m = there ? ptx::ex2(below * slope) : 0.0f;
      sum += m;
      if (m > 0.0f) moment = fmaf(m, below, moment);  // or `below` may be -inf
    });
    return reduce_cluster(sum, Add(), 0.0f, slots);
  };

  enum { kTopK, kTopP, kTypical };
#pragma unroll 1
  for (int filter = kTopK; filter <= kTypical && !empty; ++filter) {
    const float min_p = unit(params.min_p[row]);
    if (filter == kTypical && min_p > 0.0f) {
      const float bound = min_p_logit(high, temperature, min_p);
      if (bound > cut.score) cut = {bound, 0x7fffffff};
    }
    const float share = unit(filter == kTopP ? params.top_p[row] : params.typical_p[row]);
    if (filter == kTopK ? top_k >= params.vocab : share >= 1.0f || top_k == 1) continue;
    float units = 0.0f, center = 0.0f, top = high, bottom = low;
    if (filter != kTopK) {
      const float sum = sum_mass(smem.mass[filter - kTopP]);
      units = kMassUnits * ptx::rcp(sum);
      if (filter == kTypical) {  // |-log p - entropy| is the distance from the mean logit
        center = high + reduce_cluster(moment, Add(), 0.0f, smem.moment) * ptx::rcp(sum);
        bottom = -fmaxf(high - center, center - low);
        top = 0.0f;
      }
    }
    const auto score = [&](float x) { return filter == kTypical ? -fabsf(x - center) : x; };
    const auto weight = [&](float x) {
      return filter == kTopK ? 1u : __float2uint_rn(mass(x) * units);
    };
    const auto target = [&](unsigned total) {
      return filter == kTopK ? min(unsigned(top_k), total)
                             : max(1u, static_cast<unsigned>(ceil(double(share) * total)));
    };
    const Cut run =
        select(logit, read, score, kept, weight, target, bottom, top, segment, smem.select);
    if (filter == kTypical) {
      if (threadIdx.x == 0) {
        smem.typical = run;
        smem.center = center;
      }
      __syncthreads();
      has_typical = true;
    } else {
      cut = run;
    }
  }

  if (params.filtered) {
    float* const out = params.filtered + static_cast<long long>(row) * params.vocab;
    const double per_temperature =
        1.0 / double(temperature);  // a product rounds to the float that a quotient would give
    const float absent = bad ? __int_as_float(0x7fc00000) : -kInfinity;
    sweep(logit, segment, [&](int i, float x) {
      out[i] = left(i, x) & !empty ? __double2float_rn(x * per_temperature) : absent;
    });
  }
  if (params.tokens) {
    bool stray = false;
    const auto survivor = [&](int i) {
      const float x = logit(i);
      return left(i, x) ? x : -kInfinity;
    };
    const PhiloxKey key = {params.seed[row], params.offset[row]};
    const auto exact = [&](int, float x) { return double(x) / double(temperature); };
    const Draw best = race(survivor, exact, segment, slope, key, smem.race, stray);
    const Draw winner = best_of_cluster(best, empty, smem.race);
    if (threadIdx.x == 0 && rank_in_cluster() == 0) params.tokens[row] = winner.token;
  }
  sync_cluster();  // no block leaves while its shared memory may be read
}
