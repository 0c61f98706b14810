// Everything that must know a whole row before it can say something about a token of it: softmax, top-k, top-p, min-p and
// typical-p, the draw after them, and the k largest.
//
// logits (rows, vocab) -> tokens (rows,), filtered (rows, vocab) or top values and indices (rows, top_count); grid
// (rows * cluster). With Config::resident the blocks of a cluster hold the row in their shared memory as float32, so that
// it is read from device memory once, however many passes the filters make; else each pass reads the logits again.
#include "sampling/params.cuh"
#include "sampling/race.cuh"
#include "sampling/select.cuh"

static_assert(Config::threads >= kList, "a thread for each listed token");
static_assert(kBins % Config::threads == 0 && kBins % Config::cluster == 0, "bins are shared out evenly");

constexpr float kMassUnits = 4.0e9f;  // that the mass of a row is cut into: 32 bits less rounding up

struct Smem {
  RaceSmem race;
  SelectSmem select;
  float high[kWarps + 1], low[kWarps + 1], bad[kWarps + 1];
  float mass[3][kWarps + 1], moment[kWarps + 1];
};

extern __shared__ float resident_row[];

// The smallest logit whose probability is at least min_p times that of `high`, as float64 decides it.
__device__ __noinline__ float min_p_logit(float high, float temperature, float min_p) {
  const double bound = log(double(min_p));
  const auto keeps = [&](unsigned key) { return (double(from_ordered(key)) - double(high)) / double(temperature) >= bound; };
  const double guess = double(high) + bound * double(temperature);
  unsigned key = ordered(fmaxf(__double2float_rn(guess), -kMaxFloat));
  while (key < ordered(high) && !keeps(key)) ++key;
  while (key > ordered(-kMaxFloat) && keeps(key - 1)) --key;
  return from_ordered(key);
}

extern "C" __global__ void
#if __CUDA_ARCH__ >= 900
__cluster_dims__(Config::cluster, 1, 1)
#endif
__launch_bounds__(Config::threads, Config::blocks_per_sm) filter(const SampleParams params) {
  __shared__ Smem smem;
  const int row = blockIdx.x / Config::cluster;
  const Segment segment = own_segment(params.vocab);
  const auto* logits = static_cast<const Config::dtype*>(params.logits) + row * params.row_stride;
  const auto read = [&](int i) { return to_float(logits[i]) + 0.0f; };  // -0 becomes 0: they are equal
  const auto logit = [&](int i) {
    if constexpr (Config::resident) return resident_row[i - segment.begin];
    return read(i);
  };

  // The row, its largest and smallest finite logit, and whether it is bad.
  float high = -kInfinity, low = kInfinity, bad = 0.0f;
  constexpr int kUnroll = 8;
  for (int base = segment.begin + threadIdx.x; base < segment.end; base += kUnroll * Config::threads) {
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
      high = fmaxf(high, x[j]);
      if (x[j] > -kInfinity) low = fminf(low, x[j]);
      if (!(x[j] < kInfinity)) bad = 1.0f;
    }
  }
  bad = reduce_cluster(bad, Max(), smem.bad);
  high = reduce_cluster(high, Max(), smem.high);
  low = -reduce_cluster(-low, Max(), smem.low);
  const bool ranks_all = params.top_indices != nullptr;  // -inf has a rank as well, if no probability
  const bool empty = bad != 0.0f || (high == -kInfinity && !ranks_all);

  float temperature = fmaxf(params.temperature[row], 0.0f);
  int top_k = min(max(params.top_k[row], 1), params.vocab);
  const float top_p = fminf(fmaxf(params.top_p[row], 0.0f), 1.0f);
  const float min_p = fminf(fmaxf(params.min_p[row], 0.0f), 1.0f);
  const float typical_p = fminf(fmaxf(params.typical_p[row], 0.0f), 1.0f);
  if (temperature == 0.0f) {
    temperature = 1.0f;
    top_k = 1;
  }
  if (ranks_all) top_k = params.top_count;

  // Three filters keep a run of the ranked row, so one cut stands for them; typical-p keeps a run of another ranking.
  Cut cut = {ordered(ranks_all ? -kInfinity : -kMaxFloat), 0xffffffffu};  // at first, all
  Cut typical = {0, 0xffffffffu};
  const float slope = log2_per_logit(temperature);
  float center = 0.0f;
  const auto mass = [&](float x) { return ptx::ex2((x - high) * slope); };
  const auto left = [&](int i) {
    const float x = logit(i);
    return !empty && cut.keeps(x, i) && typical.keeps(-fabsf(x - center), i);
  };
  float moment;  // of the mass that is left, about `high`
  const auto mass_left = [&](int slot) {
    float sum = 0.0f;
    moment = 0.0f;
    for (int i = segment.begin + threadIdx.x; i < segment.end; i += Config::threads) {
      if (!left(i)) continue;
      const float x = logit(i), m = mass(x);
      sum += m;
      moment += m > 0.0f ? m * (x - high) : 0.0f;
    }
    return reduce_cluster(sum, Add(), smem.mass[slot]);
  };

  enum { kTopK, kTopP, kTypical };
#pragma unroll 1
  for (int filter = kTopK; filter <= kTypical && !empty; ++filter) {
    if (filter == kTypical && min_p > 0.0f) {
      const unsigned bound = ordered(min_p_logit(high, temperature, min_p));
      if (bound > cut.score) cut = {bound, 0xffffffffu};
    }
    const float share = filter == kTopP ? top_p : typical_p;
    if (filter == kTopK ? top_k >= params.vocab : share >= 1.0f || top_k == 1) continue;
    float units = 0.0f, top = high, bottom = low;
    if (filter != kTopK) {
      const float sum = mass_left(filter - kTopP);
      units = kMassUnits / sum;
      if (filter == kTypical) {  // |-log p - entropy| is the distance from the mean logit
        center = high + reduce_cluster(moment, Add(), smem.moment) / sum;
        bottom = -fmaxf(high - center, center - low);
        top = 0.0f;
      }
    }
    const auto score = [&](int i) { return filter == kTypical ? -fabsf(logit(i) - center) : logit(i); };
    const auto weight = [&](int i, bool anywhere = false) {
      return filter == kTopK ? 1u : __float2uint_rn(mass(anywhere ? read(i) : logit(i)) * units);
    };
    const auto target = [&](unsigned total) {
      return filter == kTopK ? min(unsigned(top_k), total) : max(1u, static_cast<unsigned>(ceil(double(share) * total)));
    };
    const Cut run = select(score, left, weight, target, bottom, top, segment, smem.select);
    if (filter == kTypical) {
      typical = run;
    } else {
      cut = run;
    }
  }

  if (ranks_all) {
    const int listed = collect(logit, left, segment, smem.select);
    if (rank_in_cluster() == 0 && threadIdx.x < params.top_count) {
      const long long place = static_cast<long long>(row) * params.top_count + threadIdx.x;
      const unsigned long long key = smem.select.sorted[threadIdx.x];
      const bool there = threadIdx.x < listed;
      const unsigned index = there ? 0xffffffffu - unsigned(key) : 0xffffffffu;
      static_cast<Config::dtype*>(params.top_values)[place] =
          there ? logits[index] : Config::dtype(__int_as_float(0x7fc00000));
      params.top_indices[place] = int(index);
    }
  }
  if (params.filtered) {
    float* const out = params.filtered + static_cast<long long>(row) * params.vocab;
    const float per_mass = params.normalise && !empty ? 1.0f / mass_left(2) : 0.0f;
    const float absent = bad != 0.0f ? __int_as_float(0x7fc00000) : params.normalise ? 0.0f : -kInfinity;
    for (int i = segment.begin + threadIdx.x; i < segment.end; i += Config::threads) {
      const float x = logit(i);
      out[i] = !left(i) ? absent : params.normalise ? mass(x) * per_mass : __fdiv_rn(x, temperature);
    }
  }
  if (params.tokens) {
    bool stray = false;
    const auto survivor = [&](int i) { return left(i) ? logit(i) : -kInfinity; };
    const PhiloxKey key = {params.seed[row], params.offset[row]};
    const auto exact = [&](int, float x) { return double(x) / double(temperature); };
    const Draw best = race(survivor, exact, segment, slope, key, smem.race, stray);
    const Draw winner = best_of_cluster(best, empty, smem.race);
    if (threadIdx.x == 0 && rank_in_cluster() == 0) params.tokens[row] = winner.token;
  }
  sync_cluster();  // no block leaves while its shared memory may be read
}
