// Attention and its derivative in a direction (its Jacobian-vector product) in one pass on
// mma.sync: float16 and bfloat16, on any GPU from Ampere on.
//
//   q, k, v, out and the direction's q', k', v' as in gradients/jvp_simt.cu, whose sums these are.
//
//   A block has kTileM queries of one head, 16 a warp, and kDimV columns of v, and walks over the
//   keys that its queries see, kTileN at a time. S, s' and the sums O and A stay in a warp's
//   registers; w and w s' are repacked accumulators, as P is in attention/forward_sm80.cu. Of the
//   six products two read the same keys and two the same values: a fragment of K serves q k^T and
//   q' k^T, one of V both O and A. cp.async brings the next keys meanwhile, or where shared memory
//   holds one stage, another block computes. Values of more than kDimV columns are shared between
//   blocks, of which each computes all scores.
//
//   w is rounded to the inputs' type before anything is computed from it, and so is w s' before mu
//   is: then out and dout are the value and the derivative of one average, and a constant in s',
//   which changes neither, leaves no rounding errors behind.
//
//   0 · NaN is NaN: where a result is not finite, the block walks over its keys again
//   (tile::Content), as attention/forward_sm80.cu does.
//
//   Not yet timed on a GPU.
#include "gradients/jvp_params.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/registers.cuh"
#include "tile/fragment.cuh"
#include "tile/score_mod.cuh"
#include "tile/softmax.cuh"
#include "tile/staged_rows.cuh"
#include "tile/swizzle.cuh"
#include "tile/visibility.cuh"

using T = Config::dtype;
constexpr int kDim = Config::head_dim, kDimV = Config::head_dim_v;
constexpr int kTileM = Config::tile_m, kTileN = Config::tile_n, kThreads = Config::threads;
constexpr int kStages = Config::stages;
constexpr bool kGeneral = Config::general;  // any call; else as forward_sm80's, without dropout

static_assert(kTileM == kThreads / 2, "16 rows a warp");
static_assert(kTileN % 16 == 0, "whole k16 steps of the last products");
static_assert(kDimV <= kDim, "a warp's results must fit where its queries were");
static_assert(kStages == 1 || kStages == 2,
              "columns are used where they are, or one after another");

using TileQ = tile::Swizzled<kDim / 8>;  // of q and k, and of the direction's
using TileV = tile::Swizzled<kDimV / 8>;
constexpr int kBytesQ = kTileM * TileQ::kRowBytes;
constexpr int kBytesK = kTileN * TileQ::kRowBytes, kBytesV = kTileN * TileV::kRowBytes;
constexpr int kStageBytes = 2 * (kBytesK + kBytesV);
static_assert(2 * kBytesQ + kStages * kStageBytes <= Config::smem_bytes, "all tiles");
static_assert(kBytesQ % 128 == 0 && kBytesK % 128 == 0 && kBytesV % 128 == 0,
              "the permutation counts rows from a multiple of 128 bytes");

using Scores = float[kTileN / 2];
using Weights = unsigned[kTileN / 4];  // in pairs
using Output = float[kDimV / 2];

extern __shared__ __align__(128) unsigned char smem[];

struct Block {
  tile::Visibility visibility;  // rows are counted from the sequence's first
  int batch, head, head_kv, first_row;
  int first_column, columns;  // of v
};

// Whether every row of a matrix starts at a multiple of 16 bytes.
__device__ __forceinline__ bool aligned(const void* first, const Strides& stride, int columns) {
  return reinterpret_cast<unsigned long long>(first) % 16 == 0 &&
         (stride.batch | stride.seq | stride.head | columns) % 8 == 0;
}

// Copies rows from `row` on of a head's matrix to a tile; zeros past the last of `rows`.
template <class Tile, int kRows>
__device__ __forceinline__ void load(unsigned target, const void* base, const Strides& stride,
                                     int batch, int head, int first_column, int columns, int row,
                                     int rows, int content = tile::kValues) {
  const T* const matrix = static_cast<const T*>(base) + batch * stride.batch + head * stride.head;
  const bool whole = !kGeneral || aligned(base, stride, columns);
  tile::TileLoader<T, Tile, kRows, kThreads>(matrix + first_column, stride.seq, columns, whole)
      .load(target, row, 0, rows, content);
}

// S = Q K^T and s' = Q' K^T + Q K'^T of a warp's 16 queries; `keys` is where K lies, K' behind it.
__device__ __forceinline__ void multiply_scores(Scores& s, Scores& ds, unsigned queries,
                                                unsigned keys) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    unsigned q[4], dq[4];
    ptx::ldmatrix_x4(q, TileQ::at_chunks(queries, step));
    ptx::ldmatrix_x4(dq, TileQ::at_chunks(queries, step) + kBytesQ);
#pragma unroll
    for (int n = 0; n < kTileN / 16; ++n) {
      const unsigned at = TileQ::at_chunks(keys, step) + n * 16 * TileQ::kRowBytes;
      unsigned k[4];
      ptx::ldmatrix_x4(k, at);
      ptx::mma_m16n8k16<T>(&s[8 * n], q, k[0], k[1]);
      ptx::mma_m16n8k16<T>(&s[8 * n + 4], q, k[2], k[3]);
      ptx::mma_m16n8k16<T>(&ds[8 * n], dq, k[0], k[1]);
      ptx::mma_m16n8k16<T>(&ds[8 * n + 4], dq, k[2], k[3]);
      ptx::ldmatrix_x4(k, at + kBytesK);
      ptx::mma_m16n8k16<T>(&ds[8 * n], q, k[0], k[1]);
      ptx::mma_m16n8k16<T>(&ds[8 * n + 4], q, k[2], k[3]);
    }
  }
}

// O += W V and A += W V' + W' V; `values` is where V lies, V' behind it.
__device__ __forceinline__ void multiply_values(Output& o, Output& a, const Weights& w,
                                                const Weights& dw, unsigned values) {
#pragma unroll
  for (int step = 0; step < kTileN / 16; ++step) {
    const unsigned p[4] = {w[4 * step], w[4 * step + 1], w[4 * step + 2], w[4 * step + 3]};
    const unsigned dp[4] = {dw[4 * step], dw[4 * step + 1], dw[4 * step + 2], dw[4 * step + 3]};
#pragma unroll
    for (int n = 0; n < kDimV / 16; ++n) {
      const unsigned at = TileV::at_chunks(values, n) + step * 16 * TileV::kRowBytes;
      unsigned v[4];
      ptx::ldmatrix_x4_trans(v, at);
      ptx::mma_m16n8k16<T>(&o[8 * n], p, v[0], v[1]);
      ptx::mma_m16n8k16<T>(&o[8 * n + 4], p, v[2], v[3]);
      ptx::mma_m16n8k16<T>(&a[8 * n], dp, v[0], v[1]);
      ptx::mma_m16n8k16<T>(&a[8 * n + 4], dp, v[2], v[3]);
      ptx::ldmatrix_x4_trans(v, at + kBytesV);
      ptx::mma_m16n8k16<T>(&a[8 * n], p, v[0], v[1]);
      ptx::mma_m16n8k16<T>(&a[8 * n + 4], p, v[2], v[3]);
    }
  }
}

// From products to scores and their derivatives in the direction, from the warp's `row` and `key`.
__device__ __forceinline__ void apply_score_mod(Scores& s, Scores& ds, const ForwardParams& params,
                                                const Block& block, int row, int key) {
  const int lane = ptx::thread_index() % 32;
  const ScoreMod<T, true, false> score_mod = {
      score_inputs(params).of_head<T>(block.batch, block.head)};
  const float slope = score_mod.slope(block.batch, block.head);
  row += tile::lane_row(lane);
  key += tile::lane_column(lane);
  score_mod.terms([&](const auto& term) {
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) {
      const int query = row + tile::fragment_row(i), column = key + tile::fragment_column(i);
      const tile::ScoreRow<float> score_row = {block.batch, block.head, query,
                                               query + params.seqlen_k - params.seqlen_q, slope};
      ds[i] *= term.derivative(s[i], score_row, column);
      s[i] = term(s[i], score_row, column);
    }
  });
}

// What the softmax still has to multiply scores by.
__device__ __forceinline__ float score_scale(const ForwardParams& params) {
  return kGeneral ? 1.0f : static_cast<float>(params.scale);
}

// Both numbers of a pair.
template <class Pair>
__device__ __forceinline__ float2 unpack(unsigned pair);
template <>
__device__ __forceinline__ float2 unpack<__half>(unsigned pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(unsigned pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

struct Sums {
  // Where scores are more than scaled products they may be of any size.
  using Softmax = tile::OnlineSoftmaxOf<kGeneral>;
  Softmax softmax;
  float mean[2] = {};  // mu of this lane's columns; quad_sum gives the row's

  // W and W' of a block of keys. `passes_on`: whether NaN in s' of a weight 0 may go on.
  __device__ __forceinline__ void weigh(Weights& w, Weights& dw, const Scores& s, const Scores& ds,
                                        float scale, bool passes_on) {
    const float scale_log2 = scale * tile::kLog2e;
    // Of any size, differences come first: they are exact where they count.
    const float offsets[2] = {Softmax::offset(softmax.row_max[0], kGeneral ? 1.0f : scale_log2),
                              Softmax::offset(softmax.row_max[1], kGeneral ? 1.0f : scale_log2)};
    const auto exponential = [&](float score, float offset) {
      return ptx::ex2(kGeneral ? (score - offset) * scale_log2 : fmaf(score, scale_log2, -offset));
    };
#pragma unroll
    for (int i = 0; i < kTileN / 2; i += 2) {
      const int half = i / 2 % 2;
      const unsigned pair =
          tile::pack<T>(exponential(s[i], offsets[half]), exponential(s[i + 1], offsets[half]));
      const float2 weight = unpack<T>(pair);
      softmax.row_sum[half] += weight.x + weight.y;
      const float factor = kGeneral ? 1.0f : scale;
      float2 product = {weight.x * (ds[i] * factor), weight.y * (ds[i + 1] * factor)};
      if (!passes_on) {
        if (weight.x == 0.0f) product.x = 0.0f;
        if (weight.y == 0.0f) product.y = 0.0f;
      }
      const unsigned products = tile::pack<T>(product.x, product.y);
      product = unpack<T>(products);
      mean[half] += product.x + product.y;
      w[i / 2] = pair;
      dw[i / 2] = products;
    }
  }
};

// Clears the weights that dropout removes; `row` and `key` are the warp's first.
__device__ __forceinline__ void drop(Weights& w, Weights& dw, const DropoutParams& dropout,
                                     const ForwardParams& params, const Block& block, int row,
                                     int key) {
  const tile::DropoutRow of_row(dropout.seed, row / 16, ptx::thread_index() % 32,
                                block.batch * params.heads_q + block.head);
#pragma unroll
  for (int step = 0; step < kTileN / 32; ++step) {
    uint4 kept[1];
    of_row.kept_signs(kept, dropout, key / 32 + step);
    tile::clear_dropped(w + 8 * step, kept[0]);
    tile::clear_dropped(dw + 8 * step, kept[0]);
  }
}

// Divides by the sums and writes out and dout.
__device__ __forceinline__ void finish(const ForwardParams& params, const JvpParams& jvp,
                                       const DropoutParams& dropout, const Block& block,
                                       const Sums& sums, Output& o, Output& a, int pass) {
  __shared__ float means[kTileM];
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  const float kept = kGeneral && dropout.threshold != 0 ? static_cast<float>(dropout.scale) : 1.0f;
  float factor[2], mean[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = tile::quad_sum(sums.softmax.row_sum[half]), weight = 1.0f;
    if (params.sinks != nullptr) {
      const float sink = static_cast<const float*>(params.sinks)[block.head];
      const float keys = sums.softmax.row_max[half] * score_scale(params);
      const float largest = fmaxf(keys, sink);
      const float shift = largest == tile::negative_infinity() ? 0.0f : largest;
      weight = ptx::ex2((keys - shift) * tile::kLog2e);
      sum = sum * weight + ptx::ex2((sink - shift) * tile::kLog2e);
    }
    factor[half] = sum == 0.0f ? 0.0f : weight / sum;
    mean[half] = tile::quad_sum(sums.mean[half]) * factor[half];
    factor[half] *= kept;
    if (lane % 4 == 0) means[warp_row + lane / 4 + 8 * half] = mean[half];
  }
#pragma unroll
  for (int i = 0; i < kDimV / 2; ++i) {
    const int half = i / 2 % 2;
    if (pass >= tile::kPositive) {  // any weight counts, also one that 16 bits would lose
      o[i] = o[i] == 0.0f ? 0.0f : 1.0f;
      a[i] = a[i] == 0.0f ? 0.0f : 1.0f;
    } else {
      o[i] *= factor[half];
      a[i] = fmaf(-mean[half], o[i], a[i] * factor[half]);
    }
  }
  const int first_row = block.first_row + warp_row, rows = params.seqlen_q - first_row;
  const long long stride = static_cast<long long>(params.heads_q) * params.head_dim_v;
  const long long first =
      (static_cast<long long>(block.batch) * params.seqlen_q + first_row) * stride +
      block.head * params.head_dim_v + block.first_column;
  const bool whole = !kGeneral || params.head_dim_v % 8 == 0;
  unsigned char* const staged = smem + warp_row * TileQ::kRowBytes;  // the warp's queries
  T* const out = static_cast<T*>(params.out) + first;
  T* const dout = static_cast<T*>(jvp.dout) + first;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    tile::stage_rows<T, TileV>(staged, n == 0 ? o : a, 0);
    __syncwarp();
    tile::write_staged<TileV, 16, kDimV>(n == 0 ? out : dout, stride, staged, rows, block.columns,
                                         whole, pass);
    __syncwarp();
  }
  if (pass != tile::kNegative) return;
  // Now out is complete.
  for (int i = lane; i < 16 * block.columns; i += 32) {
    const int row = i / block.columns;
    const long long at = row * stride + i % block.columns;
    if (row >= rows) break;
    const float value = static_cast<float>(out[at]);
    if (value * 0.0f != 0.0f)
      dout[at] = static_cast<T>(static_cast<float>(dout[at]) - means[warp_row + row] * value);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, Config::blocks_per_sm)
    jvp_sm80(const __grid_constant__ ForwardParams params, const __grid_constant__ JvpParams jvp,
             const __grid_constant__ DropoutParams dropout) {
  __shared__ Block block;
  {
    const int parts = (params.head_dim_v + kDimV - 1) / kDimV, x = blockIdx.x / parts;
    const int slots = (params.seqlen_q + kTileM - 1) / kTileM;
    const int batch = blockIdx.z * gridDim.y + blockIdx.y, head = x / slots;
    if (batch >= params.batch) return;
    if (threadIdx.x == 0) {
      const int column = blockIdx.x % parts * kDimV;
      // The last queries first: with a causal mask theirs is the most work.
      block = {tile::Visibility::from_row(0, params.seqlen_q, params.window_left,
                                          params.window_right, params.seqlen_q, params.seqlen_k),
               batch,
               head,
               head / (params.heads_q / params.heads_kv),
               (slots - 1 - x % slots) * kTileM,
               column,
               min(kDimV, params.head_dim_v - column)};
    }
    __syncthreads();
  }
  const unsigned queries = ptx::shared_address(smem), stages = queries + 2 * kBytesQ;
  const int warp_row = threadIdx.x / 32 * 16;  // within the tile
  const unsigned lane_q = queries + warp_row * TileQ::kRowBytes + TileQ::lane_row_major();
  const int row = block.first_row + warp_row;
  const int last_row = min(block.first_row + kTileM, params.seqlen_q) - 1;
  const tile::Range keys = block.visibility.keys_of_any(block.first_row, last_row);
  const int first_key = max(keys.begin, 0) / kTileN * kTileN;

  const auto load_keys = [&](int key, int pass) {
    const unsigned k = stages + (kStages == 2 ? key / kTileN % 2 * kStageBytes : 0);
    const unsigned v = k + 2 * kBytesK;
    const auto load_k = [&](unsigned target, const void* base, const Strides& stride) {
      load<TileQ, kTileN>(target, base, stride, block.batch, block.head_kv, 0, params.head_dim, key,
                          params.seqlen_k);
    };
    const auto load_v = [&](unsigned target, const void* base, const Strides& stride) {
      load<TileV, kTileN>(target, base, stride, block.batch, block.head_kv, block.first_column,
                          block.columns, key, params.seqlen_k, pass);
    };
    load_k(k, params.k, params.k_stride);
    load_k(k + kBytesK, jvp.tangent_k, jvp.tangent_k_stride);
    load_v(v, params.v, params.v_stride);
    load_v(v + kBytesV, jvp.tangent_v, jvp.tangent_v_stride);
  };

  // More passes, with what is not finite set apart, where a result is not.
#pragma unroll 1
  for (int pass = tile::kValues; pass <= tile::kNegative; ++pass) {
    load<TileQ, kTileM>(queries, params.q, params.q_stride, block.batch, block.head, 0,
                        params.head_dim, block.first_row, params.seqlen_q);
    load<TileQ, kTileM>(queries + kBytesQ, jvp.tangent_q, jvp.tangent_q_stride, block.batch,
                        block.head, 0, params.head_dim, block.first_row, params.seqlen_q);
    if (first_key < keys.end) load_keys(first_key, pass);
    Output o = {}, a = {};
    Sums sums;

#pragma unroll 1
    for (int key = first_key; key < keys.end; key += kTileN) {
      ptx::cp_async_wait_all();
      __syncthreads();  // these keys are there, and those before have been used
      if (kStages == 2 && key + kTileN < keys.end) load_keys(key + kTileN, pass);
      const unsigned stage = stages + (kStages == 2 ? key / kTileN % 2 * kStageBytes : 0);
      if (row < params.seqlen_q &&
          block.visibility.keys_of_any(row, row + 15).overlaps(key, kTileN)) {
        Scores s = {}, ds = {};
        // Addresses of single steps are computed anew: kept, they would spill on sm_120.
        multiply_scores(s, ds, ptx::opaque(lane_q), stage + TileQ::lane_column_major());
        if (kGeneral) apply_score_mod(s, ds, params, block, row, key);
        if (!block.visibility.keys_of_all(row, row + 15).contains(key, kTileN)) {
          const int lane = ptx::thread_index() % 32;
          tile::hide_keys(s, block.visibility, row + tile::lane_row(lane),
                          key + tile::lane_column(lane));
        }
        const float scale = score_scale(params), scale_log2 = scale * tile::kLog2e;
        float block_max[2];
        // A maximum that lags behind would let weights and products with them leave float16.
        constexpr float kThreshold = 0.0f;
        const auto same = [](float max, int) { return max; };
        if (__any_sync(~0u,
                       sums.softmax.needs_rescale(s, scale_log2, block_max, same, kThreshold))) {
          float correction[2];
          sums.softmax.rescale(block_max, scale_log2, correction, kThreshold);
          tile::scale_rows(o, correction);
          tile::scale_rows(a, correction);
          sums.mean[0] *= correction[0];
          sums.mean[1] *= correction[1];
        }
        Weights w, dw;
        sums.weigh(w, dw, s, ds, scale, pass == tile::kValues);
        if (pass >= tile::kPositive) {
#pragma unroll
          for (int i = 0; i < kTileN / 4; ++i) dw[i] = 0;
        }
        if (kGeneral && dropout.threshold != 0) drop(w, dw, dropout, params, block, row, key);
        multiply_values(o, a, w, dw, stage + 2 * kBytesK + TileV::lane_row_major());
      }
      if (kStages == 1 && key + kTileN < keys.end) {
        __syncthreads();  // these keys have been used
        load_keys(key + kTileN, pass);
      }
    }

    ptx::cp_async_wait_all();  // for the queries, where there was no key
    float zeros[4] = {};       // NaN where a result is not finite; four short chains of sums
#pragma unroll
    for (int i = 0; i < kDimV / 2; ++i)
      zeros[i % 4] = fmaf(a[i], 0.0f, fmaf(o[i], 0.0f, zeros[i % 4]));
    const bool done = !__syncthreads_or(zeros[0] + zeros[1] + zeros[2] + zeros[3] != 0.0f);
    if (pass != tile::kValues || done) finish(params, jvp, dropout, block, sums, o, a, pass);
    if (pass == tile::kValues && done) break;
    __syncthreads();
  }
}
