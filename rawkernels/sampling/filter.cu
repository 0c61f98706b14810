// Filtered logits, or a token drawn from them, by several passes over each row: logits (rows,
// vocab)
// -> filtered (rows, vocab) or tokens (rows,). It serves every filter: top-k of any k, top-p, min-p
// and typical-p.
//
// With Config::resident, the blocks of a cluster hold the row in shared memory as float32, so that
// it is read from device memory once; else each pass reads the logits again. A cluster of
// Config::cluster blocks shares a row; grid (rows * cluster).
#include "ptx/registers.cuh"
#include "sampling/gumbel_max.cuh"
#include "sampling/min_p.cuh"
#include "sampling/params.cuh"
#include "sampling/select.cuh"

// Units of fixed point in a row's probability: 32 bits, less what rounding up may add.
constexpr float kProbabilityUnits = 4.0e9f;

struct Range {
  float high, low;
};

struct Widen {
  __device__ __forceinline__ Range operator()(Range a, Range b) const {
    return {fmaxf(a.high, b.high), fminf(a.low, b.low)};
  }
};

__device__ __forceinline__ Range shuffle_xor(Range value, int lanes) {
  return {shuffle_xor(value.high, lanes), shuffle_xor(value.low, lanes)};
}

struct Smem {
  GumbelSmem gumbel;
  SelectSmem select;
  Range range[kWarps];
  float sums[2][kWarps], moments[kWarps];
  Cutoff typical;
  float center;
};

extern __shared__ float resident_row[];

// Logits of the type that SampleParams names: one variant serves all types.
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

ROW_KERNEL filter(const SampleParams params) {
  __shared__ Smem smem;
  const int row = ptx::opaque(blockIdx.x / Config::cluster);  // computed once, or it would spill
  if (params.only_fallback && params.tokens[row] != kNeedsFallback) return;
  const Segment segment = own_segment(params.vocab);
  const AnyRow read(params, row);
  const auto logit = [&](int i) {
    if constexpr (Config::resident) return resident_row[i - segment.begin];
    return read(i);
  };

  // The row, and its largest and smallest finite logit. A largest of +inf marks a bad row.
  Range range = {-kInfinity, kInfinity};
  const int first = segment.begin + threadIdx.x;
  for_each_ahead<8>(first, segment.end, Config::threads, read, [&](int i, float x) {
    if (Config::resident) resident_row[i - segment.begin] = x;
    range.high = fmaxf(range.high, x < kInfinity ? x : kInfinity);
    range.low = fminf(range.low, x > -kInfinity ? x : kInfinity);
  });
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

  // Top-k, top-p and min-p each keep a run of the ranked row, so one cutoff stands for all three.
  // Typical-p keeps a run of another ranking, by the distance from smem.center: smem.typical.
  Cutoff cutoff = {-kMaxFloat, 0x7fffffff};  // at first, all tokens
  bool has_typical = false;
  const float slope = log2_per_logit(temperature);
  const auto probability = [&](float x) { return ptx::ex2((x - high) * slope); };
  const auto kept = [&](int i, float x) { return cutoff.keeps(x, i); };
  const auto left = [&](int i, float x) {
    bool keeps = kept(i, x);
    if (has_typical) keeps &= smem.typical.keeps(-fabsf(x - smem.center), i);
    return keeps;
  };
  float moment;  // first moment of the probability that is left, about `high`
  const auto sum_probability = [&](float* slots) {
    float sum = 0.0f;
    moment = 0.0f;
    for_each_token(logit, segment, [&](int i, float x) {
      const bool there = left(i, x);
      const float below = there ? x - high : 0.0f;
      const float p = there ? ptx::ex2(below * slope) : 0.0f;
      sum += p;
      if (p > 0.0f) moment = fmaf(p, below, moment);  // `below` may be -inf where p is 0
    });
    return reduce_cluster(sum, Add(), 0.0f, slots);
  };

  enum { kTopK, kTopP, kTypical };
#pragma unroll 1
  for (int filter = kTopK; filter <= kTypical && !empty; ++filter) {
    const float min_p = clamp_to_unit(params.min_p[row]);
    if (filter == kTypical && min_p > 0.0f) {
      const float bound = min_p_logit(high, temperature, min_p);
      if (bound > cutoff.score) cutoff = {bound, 0x7fffffff};
    }
    const float p = clamp_to_unit(filter == kTopP ? params.top_p[row] : params.typical_p[row]);
    if (filter == kTopK ? top_k >= params.vocab : p >= 1.0f || top_k == 1) continue;
    float units = 0.0f, center = 0.0f, top = high, bottom = low;
    if (filter != kTopK) {
      const float sum = sum_probability(smem.sums[filter - kTopP]);
      units = kProbabilityUnits * ptx::rcp(sum);
      if (filter == kTypical) {  // |-log p - entropy| is the distance from the mean logit
        center = high + reduce_cluster(moment, Add(), 0.0f, smem.moments) * ptx::rcp(sum);
        bottom = -fmaxf(high - center, center - low);
        top = 0.0f;
      }
    }
    const auto score = [&](float x) { return filter == kTypical ? -fabsf(x - center) : x; };
    const auto weight = [&](float x) {
      return filter == kTopK ? 1u : __float2uint_rn(probability(x) * units);
    };
    const auto target = [&](unsigned total) {
      return filter == kTopK ? min(unsigned(top_k), total)
                             : max(1u, static_cast<unsigned>(ceil(double(p) * total)));
    };
    const Cutoff run =
        select(logit, read, score, kept, weight, target, bottom, top, segment, smem.select);
    if (filter == kTypical) {
      if (threadIdx.x == 0) {
        smem.typical = run;
        smem.center = center;
      }
      __syncthreads();
      has_typical = true;
    } else {
      cutoff = run;
    }
  }

  if (params.filtered) {
    float* const out = params.filtered + static_cast<long long>(row) * params.vocab;
    // In float64 a product rounds to the float32 number that a quotient would give.
    const double per_temperature = 1.0 / double(temperature);
    const float absent = bad ? kNaN : -kInfinity;
    for_each_token(logit, segment, [&](int i, float x) {
      out[i] = left(i, x) & !empty ? __double2float_rn(x * per_temperature) : absent;
    });
  }
  if (params.tokens) {
    const auto survivor = [&](int i) {
      const float x = logit(i);
      return left(i, x) ? x : -kInfinity;
    };
    const PhiloxKey key = {params.seed[row], params.offset[row]};
    const auto scaled = [&](int, float x) { return double(x) / double(temperature); };
    int token;
    if (gumbel_max(survivor, scaled, segment, slope, key, smem.gumbel, token)) {
      params.tokens[row] = empty ? -1 : token;
    }
  }
  sync_cluster();  // no block leaves while its shared memory may be read
}
