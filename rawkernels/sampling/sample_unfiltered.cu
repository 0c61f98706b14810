// A token drawn from each row by temperature alone: logits (rows, vocab) -> tokens (rows,).
// Temperature 0 takes the largest logit.
//
// The row is read once, with its penalties applied if there are any, and nothing of it is stored. A
// cluster of Config::cluster blocks shares a row; grid (rows * cluster).
#include "ptx/registers.cuh"
#include "sampling/gumbel_max.cuh"
#include "sampling/params.cuh"
#include "sampling/penalties.cuh"
#include "sampling/tiles.cuh"
#include "sampling/vector_access.cuh"

// The first of the largest logits, as a draw whose key is the logit; +inf for a bad row.
template <class AnyPenalties>
__device__ __forceinline__ Draw argmax(const Row& logits, Segment segment, bool vectors,
                                       const AnyPenalties& penalties) {
  constexpr int kCount = 2 * kTileTokens;
  Draw best = {-kInfinity, -1};
  for (int begin = segment.begin; begin < segment.end; begin += kCount * Config::threads) {
    const ThreadTokens tokens = {begin, segment.end, vectors};
    float x[kCount];
    load_tokens(x, logits.logits, tokens);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      if (tokens.has(n)) x[n] = penalties.dense(tokens.token(n), x[n]);
    }
    float top = x[0];
#pragma unroll
    for (int n = 1; n < kCount; ++n) top = ptx::max_nan(top, x[n]);
    if (!(top <= float(best.key))) {
      best = {top < kInfinity ? top : kInfinity, tokens.first};
#pragma unroll
      for (int n = kCount - 1; n >= 0; --n) {
        if (x[n] == top) best.token = tokens.token(n);
      }
    }
    __syncwarp();  // diverged lanes would go on with loads of their own
  }
  penalties.each_listed([&](int i) {
    const float x = penalties.of(i, logits(i));
    const Draw other = {x < kInfinity ? x : kInfinity, i};
    if (x != -kInfinity && beats(other, best)) best = other;
  });
  return best;
}

// Gumbel-max over a row in which any token may win. Four tokens at a time are rejected if the
// largest of their logits with the smallest of their uniform numbers would be. Gives the winner to
// the thread of the cluster that returns true.
template <class AnyPenalties>
__device__ __forceinline__ bool gumbel_max_dense(const Row& logits, Segment segment,
                                                 float temperature, PhiloxKey key,
                                                 const AnyPenalties& penalties, GumbelSmem& smem,
                                                 int& winner) {
  const int lane = threadIdx.x % 32;
  const float slope = log2_per_logit(temperature);
  const auto load = [&](int i) { return penalties.of(i, logits(i)); };
  Tiles<kTileTokens> tiles(logits, segment);
  float ahead[kTileTokens], x[kTileTokens];  // of the next tile, and of this one
  uint4 words[kUnroll];
  const auto load_ahead = [&] {
    tiles.load(ahead);
    if (Config::cluster == 1) return;  // a prefetch costs more than it gains with many rows
    constexpr int kLine = 64 / sizeof(Config::dtype);
    const int next = tiles.base + Config::threads * kTileTokens + lane * kLine;
    if (lane * kLine < kGroup * kUnroll && next < segment.end)
      ptx::prefetch_l2(logits.logits + next);
  };
  const auto start_tile = [&] {
    draw_upper_halves(words, philox_block(tile_token(tiles.base, 0)), key);
#pragma unroll
    for (int j = 0; j < kTileTokens; ++j) {
      x[j] = penalties.dense(min(tile_token(tiles.base, j), segment.end - 1), ahead[j]);
    }
  };
  load_ahead();
  start_tile();

  float start = -kMaxFloat;  // a first threshold from four tokens a thread
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const unsigned above = philox_half(words[0], 32 * j) + 1;  // u is at most so many 2^-16
    const float near = approx_key(x[j] * slope, above * 0x1p-16f);
    start = fmaxf(start, near - approx_error(near));
  }
  init_threshold(start, smem);

  while (true) {
    const int here = tiles.base;
    tiles.next();
    load_ahead();
    const float threshold = read_threshold(smem);
    const auto limit = [&](float y) { return 0.5f + ptx::ex2(fmaf(y, slope, -threshold)); };
    unsigned contenders = which_of_tile(x, words, limit);
    for (; contenders != 0; contenders &= contenders - 1) {
      const int i = tile_token(here, __ffs(contenders) - 1);
      if (i < segment.end) add_contender(i, load(i), slope, key, smem);
    }
    if (!tiles.any()) break;
    __syncwarp();  // lanes that added a token would compute Philox by themselves
    start_tile();
  }
  penalties.each_listed([&](int i) {
    const float y = load(i), u = philox_uniform(key, kTokenStream, i);
    const float threshold = read_threshold(smem);
    if (!(u > ptx::ex2(fmaf(y, slope, -threshold)) + 0x1p-22f)) {
      add_contender(i, y, slope, key, smem);
    }
  });
  __syncthreads();
  wait_cluster();
  const auto scaled = [&](int, float y) { return double(y) / double(temperature); };
  return decide(load, scaled, segment, key, smem, winner);
}

// Whether this thread is to write the row's token, and the token.
template <class AnyPenalties>
__device__ __forceinline__ bool draw(const SampleParams& params, int row, const Row& logits,
                                     Segment segment, const AnyPenalties& penalties,
                                     GumbelSmem& smem, int& token) {
  const float temperature = fmaxf(params.temperature[row], 0.0f);
  if (temperature > 0.0f) {
    const PhiloxKey key = {params.seed[row], params.offset[row]};
    return gumbel_max_dense(logits, segment, temperature, key, penalties, smem, token);
  }
  const bool vectors = has_vectors(params.logits, params.row_stride, params.vocab);
  Draw best = best_of_block(argmax(logits, segment, vectors, penalties), smem.argmax);
  wait_cluster();
  best = best_of_cluster(best, smem.argmax);
  token = best.key < kInfinity ? best.token : -1;
  return threadIdx.x == 0 && rank_in_cluster() == 0;
}

ROW_KERNEL sample_unfiltered(const SampleParams params, const PenaltyParams penalty_params) {
  __shared__ GumbelSmem smem;
  arrive_cluster();
  init_contenders(smem);
  const int row = ptx::opaque(blockIdx.x / Config::cluster);  // computed once, or it would spill
  const Segment segment = own_segment(params.vocab);
  const Row logits = {static_cast<const Config::dtype*>(params.logits) + row * params.row_stride};
  int token;
  bool writes;
  bool plain = true;
  if constexpr (Config::penalized) {
    if (penalty_params.any) {
      const Penalties penalties(penalty_params, row, segment, logits.logits);
      writes = draw(params, row, logits, segment, penalties, smem, token);
      plain = false;
    }
  }
  if (plain) writes = draw(params, row, logits, segment, NoPenalties(), smem, token);
  if (writes) params.tokens[row] = token;
}
