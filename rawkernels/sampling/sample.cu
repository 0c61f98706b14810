// A token a row, by temperature alone: logits (rows, vocab) -> tokens (rows,). Temperature 0 takes
// the largest logit.
//
// The row is read once, through its penalties if there are any, and kept nowhere. A cluster of
// Config::cluster blocks shares a row; grid (rows * cluster).
#include "ptx/math.cuh"
#include "ptx/prefetch.cuh"
#include "sampling/params.cuh"
#include "sampling/penalties.cuh"
#include "sampling/quads.cuh"
#include "sampling/race.cuh"

constexpr int kLoads = 8 * Config::unroll;  // of a thread, in flight together

struct Claim {  // what a block knows of the winner
  float bar;    // log2(e) times its best key, or a little less
  int listed;   // how many tokens reached the bar of their time
  int bad;
};

struct Smem {
  unsigned bar;  // ordered(): the largest yet
  int listed, bad;
  int close[kClose];   // tokens that reached the bar of their time,
  float keys[kClose];  // and log2(e) times their keys, nearly
  Claim claims[Config::cluster];
  Draw warp_best[kWarps], block_best[Config::cluster];
};

__device__ __forceinline__ Draw best_of_warp(Draw best) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const Draw other = {shuffle_xor(best.key, lanes), shuffle_xor(best.token, lanes)};
    if (beats(other, best)) best = other;
  }
  return best;
}

// The best draw of the block, known to its first warp.
__device__ __forceinline__ Draw best_of_block(Draw best, Smem& smem) {
  best = best_of_warp(best);
  if (threadIdx.x % 32 == 0) smem.warp_best[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return best;
  return best_of_warp(smem.warp_best[min(int(threadIdx.x), kWarps - 1)]);
}

// The best draw of the cluster, known to the first thread of its first block, from each block's,
// known to its first thread.
__device__ __forceinline__ Draw best_of_blocks(Draw best, Smem& smem) {
  if (Config::cluster == 1) return best;
  if (threadIdx.x == 0) of_rank(smem.block_best, 0)[rank_in_cluster()] = best;
  sync_cluster();
  if (threadIdx.x == 0 && rank_in_cluster() == 0) {
#pragma unroll
    for (int rank = 1; rank < Config::cluster; ++rank) {
      if (beats(smem.block_best[rank], best)) best = smem.block_best[rank];
    }
  }
  return best;
}

// The first of the largest logits, as a draw whose key is the logit; +inf for a bad row.
template <class Penalised>
__device__ __forceinline__ Draw argmax(const Config::dtype* logits, Segment segment, bool quads,
                                       const Penalised& penalised) {
  constexpr int kCount = 2 * kLoads;
  Draw best = {-kInfinity, -1};
  for (int begin = segment.begin; begin < segment.end; begin += kCount * Config::threads) {
    const Places places = {begin, segment.end, quads};
    float x[kCount];
    read(x, logits, places);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (places.has(k)) x[k] = penalised.of_all(places.token(k), x[k]);
    }
    float top = x[0];
#pragma unroll
    for (int k = 1; k < kCount; ++k) top = ptx::max_nan(top, x[k]);
    if (!(top <= float(best.key))) {
      best = {top < kInfinity ? top : kInfinity, places.first};
#pragma unroll
      for (int k = kCount - 1; k >= 0; --k) {
        if (x[k] == top) best.token = places.token(k);
      }
    }
    __syncwarp();  // or lanes would go on by themselves, each with loads of its own
  }
  penalised.each_listed([&](int i) {
    const float x = penalised.of(i, to_float(logits[i]));
    const Draw other = {x < kInfinity ? x : kInfinity, i};
    if (x != -kInfinity && beats(other, best)) best = other;
  });
  return best;
}

// The Gumbel race, in which any token may win. Four tokens at a time are told that they have lost:
// if the largest logit of them would with the smallest number of them. What stands out is listed
// with a key of float32; only where two are closer than these tell apart, float64 decides. Gives
// the winner to one thread of the cluster, which is asked to write it.
template <class Penalised>
__device__ __forceinline__ bool race_all(const Config::dtype* logits, Segment segment,
                                         float temperature, PhiloxKey key,
                                         const Penalised& penalised, Smem& smem, int& winner) {
  constexpr int kUnroll = Config::unroll;
  constexpr int kTile = kGroup * kUnroll;  // of a warp
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float slope = log2_per_logit(temperature);
  const auto load = [&](int i) { return penalised.of(i, to_float(logits[i])); };
  int base = segment.begin + warp * kTile;
  float ahead[kLoads];  // of the next tile
  const auto load_tile = [&] {
    if (base + kTile <= segment.end) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) ahead[j] = to_float(logits[base + 32 * j + lane]);
    } else {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int i = base + 32 * j + lane;
        ahead[j] = i < segment.end ? to_float(logits[i]) : -kInfinity;
      }
    }
  };
  float x[kLoads];
  uint4 words[kUnroll];
  const auto take_tile = [&] {
    const unsigned block = philox_block(base + lane);
#pragma unroll
    for (int group = 0; group < kUnroll; ++group) {
      words[group] = philox_counter(block + 32 * group, kTokenStream, kUpper, key);
    }
    philox4x32(words, key.seed);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int i = min(base + 32 * j + lane, segment.end - 1);
      x[j] = penalised.of_all(i, ahead[j]);
    }
  };
  const auto prefetch_next = [&] {
    if (Config::cluster == 1) return;  // many rows: 73.0 us without it and 75.4 with it at 512
    constexpr int kLine = 64 / sizeof(Config::dtype);
    const int next = base + Config::threads * kLoads + lane * kLine;
    if (lane * kLine < kTile && next < segment.end) ptx::prefetch_l2(logits + next);
  };
  load_tile();
  prefetch_next();
  take_tile();
  const auto consider = [&](int i, float y) {
    if (!(y < kInfinity)) smem.bad = 1;
    if (!(y > -kInfinity)) return;
    const float near = near_key(y * slope, philox_uniform(key, kTokenStream, i));
    if (near == -kMostNear) return;  // there may be better ones that do not stand out
    const int place = atomicAdd(&smem.listed, 1);
    if (place < kClose) {
      smem.close[place] = i;
      smem.keys[place] = near;
    }
    atomicMax(&smem.bar, ordered(near - slack(near)));
  };

  // A first bar from four tokens a thread.
  float start = -kMaxFloat;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const unsigned above = philox_half(words[0], 32 * j) + 1;  // u is at most so many 2^-16
    const float near = near_key(x[j] * slope, above * 0x1p-16f);
    start = fmaxf(start, near - slack(near));
  }
  start = reduce_warp(start, [](float a, float b) { return fmaxf(a, b); });
  if (lane == 0) atomicMax(&smem.bar, ordered(start));
  __syncthreads();

  while (true) {
    const int here = base;
    base += Config::threads * kLoads;
    load_tile();
    prefetch_next();
    const float bar = from_ordered(*static_cast<volatile unsigned*>(&smem.bar));
    bool stands_out[2 * kUnroll], any = false;
#pragma unroll
    for (int quad = 0; quad < 2 * kUnroll; ++quad) {
      const float top = largest_of_four(x + 4 * quad);
      const float least = half_plus(least_halves(words[quad / 2]), quad % 2);
      stands_out[quad] = !(least > 0.5f + ptx::ex2(fmaf(top, slope, -bar)));
      any |= stands_out[quad];
    }
    if (any) {
      unsigned close = 0;  // bit j: token j stands out
#pragma unroll
      for (int quad = 0; quad < 2 * kUnroll; ++quad) {
        const uint4 four = words[quad / 2];
        const unsigned bits[4] = {four.x, four.y, four.z, four.w};
        if (!stands_out[quad]) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float limit = 0.5f + ptx::ex2(fmaf(x[4 * quad + j], slope, -bar));
          if (!(half_plus(bits[j], quad % 2) > limit)) close |= 1u << (4 * quad + j);
        }
      }
      for (; close != 0; close &= close - 1) {
        const int i = here + 32 * (__ffs(close) - 1) + lane;
        if (i < segment.end) consider(i, load(i));
      }
    }
    if (base >= segment.end) break;
    __syncwarp();  // or lanes that listed a token would draw numbers by themselves
    take_tile();
  }
  penalised.each_listed([&](int i) {
    const float y = load(i), u = philox_uniform(key, kTokenStream, i);
    const float bar = from_ordered(*static_cast<volatile unsigned*>(&smem.bar));
    if (!(u > ptx::ex2(fmaf(y, slope, -bar)) + 0x1p-22f)) consider(i, y);
  });
  __syncthreads();

  wait_cluster();
  if (threadIdx.x < Config::cluster) {
    of_rank(smem.claims, threadIdx.x)[rank_in_cluster()] = {from_ordered(smem.bar), smem.listed,
                                                            smem.bad};
  }
  sync_cluster();
  float bar = -kMaxFloat;
  bool bad = false, none = true;
#pragma unroll
  for (int rank = 0; rank < Config::cluster; ++rank) {
    const Claim claim = smem.claims[rank];
    if (claim.listed > 0) bar = fmaxf(bar, claim.bar);
    none &= claim.listed == 0;
    bad |= claim.bad != 0;
  }
  winner = -1;
  const bool first = threadIdx.x == 0 && rank_in_cluster() == 0;
  if (bad) return first;
  int rivals = 0;  // blocks that may hold the winner
  bool rival = false;
#pragma unroll
  for (int rank = 0; rank < Config::cluster; ++rank) {
    const Claim claim = smem.claims[rank];
    const bool may = none || claim.listed > kClose ||
                     (claim.listed > 0 && claim.bar + 3.0f * slack(claim.bar) >= bar);
    rivals += may;
    if (rank == rank_in_cluster()) rival = may;
  }
  if (rivals == 1 && !rival) return false;

  // Rows in ascending order list too many; of one that is empty, or out of float32's range, nothing
  // stands out: then all are looked at.
  const bool all = none || smem.listed > kClose;
  int contenders = 0;
#pragma unroll 1  // unrolled it would spill
  for (int n = threadIdx.x; n < smem.listed && !all; n += Config::threads) {
    if (smem.keys[n] + slack(smem.keys[n]) < bar) continue;
    ++contenders;
    winner = smem.close[n];
  }
  const bool alone = __syncthreads_count(contenders == 1) == 1 && !__syncthreads_or(contenders > 1);
  if (rivals == 1 && !all && alone) return contenders == 1;

  Draw best = {0.0, -1};
  for (int n = threadIdx.x; rival && n < (all ? segment.end - segment.begin : smem.listed);
       n += Config::threads) {
    const int i = all ? segment.begin + n : smem.close[n];
    const float y = load(i);
    if (!(y > -kInfinity) || (!all && smem.keys[n] + slack(smem.keys[n]) < bar)) continue;
    const double u = philox_uniform(key, kTokenStream, i);
    const Draw draw = {double(y) / double(temperature) - log(-log1p(-u)), i};
    if (beats(draw, best)) best = draw;
  }
  best = best_of_block(best, smem);
  if (rivals > 1) best = best_of_blocks(best, smem);
  winner = best.token;
  return rivals > 1 ? first : threadIdx.x == 0;
}

// Whether this thread is to write the row's token, and the token.
template <class Penalised>
__device__ __forceinline__ bool draw(const SampleParams& params, int row, Segment segment,
                                     const Penalised& penalised, Smem& smem, int& token) {
  const auto* logits = static_cast<const Config::dtype*>(params.logits) + row * params.row_stride;
  const float temperature = fmaxf(params.temperature[row], 0.0f);
  if (temperature > 0.0f) {
    const PhiloxKey key = {params.seed[row], params.offset[row]};
    return race_all(logits, segment, temperature, key, penalised, smem, token);
  }
  const bool quads = has_quads(params.logits, params.row_stride, params.vocab);
  Draw best = best_of_block(argmax(logits, segment, quads, penalised), smem);
  wait_cluster();
  best = best_of_blocks(best, smem);
  token = best.key < kInfinity ? best.token : -1;
  return threadIdx.x == 0 && rank_in_cluster() == 0;
}

extern "C" __global__ void
#if __CUDA_ARCH__ >= 900
__cluster_dims__(Config::cluster, 1, 1)
#endif
    __launch_bounds__(Config::threads, Config::blocks_per_sm)
        sample(const SampleParams params, const PenaltyParams penalties) {
  __shared__ Smem smem;
  arrive_cluster();
  if (threadIdx.x == 0) {
    smem.bar = 0;
    smem.listed = 0;
    smem.bad = 0;
  }
  __syncthreads();
  const int row = blockIdx.x / Config::cluster;
  const Segment segment = own_segment(params.vocab);
  const auto* logits = static_cast<const Config::dtype*>(params.logits) + row * params.row_stride;
  int token;
  bool writes;
  bool plain = true;
  if constexpr (Config::penalised) {
    if (penalties.any) {
      const Penalties penalised(penalties, row, segment, logits);
      writes = draw(params, row, segment, penalised, smem, token);
      plain = false;
    }
  }
  if (plain) writes = draw(params, row, segment, NoPenalties(), smem, token);
  if (writes) params.tokens[row] = token;
}
