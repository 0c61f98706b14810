// Attention forward on tensor cores (mma.sync), for Ampere and newer: float16 and bfloat16.
//
// One block takes kTileM queries of one head of one sequence and iterates over the keys they see,
// kTileN at a time, from the last to the first. A warp has kRows of the queries: S = Q K^T, the
// online softmax and O += P V stay in its registers, and P is S's accumulators repacked. cp.async
// loads V of the same keys while S is computed, and K of the next keys while O is.
//
// 0 · NaN is NaN, so a value that is not finite would reach queries that do not see it. That is
// rare: where an output is not finite, the block makes three more passes over its keys
// (tile::Content): with V's finite values alone, then with ones where V is NaN or inf, and with
// ones where it is NaN or -inf. O of these passes tells which outputs are NaN, inf or -inf.
//
// H200, bfloat16, 2026-11-21, beside FlashAttention-2 in the same run, 8192 tokens: TFLOP/s at
// head_dim 64, 128, 256: 338, 384, 315 to its 306, 345, 325 (docs/notes/forward_sm80.md has all
// shapes).
//
// Config: dtype; head_dim, head_dim_v: of the tiles, a call's may be smaller; tile_m, tile_n,
// warps; general: with bias, mask, alibi_slopes, softcap, a scale of any sign, and rows that start
// anywhere. Without it scores are only scaled, rows are whole 16-byte chunks at multiples of 16
// bytes; dropout: after the sums of exponentials, P's entries are cleared where tile/dropout.cuh
// says so; cached: k and v lie in caches or pages (attention/cache_sm80.cuh).
#include "attention/cache_sm80.cuh"
#include "attention/params.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/registers.cuh"
#include "tile/dropout.cuh"
#include "tile/nonfinite.cuh"
#include "tile/ragged.cuh"
#include "tile/score_mod.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"
#include "tile/visibility.cuh"

using T = Config::dtype;
constexpr int kDim = Config::head_dim, kDimV = Config::head_dim_v;
constexpr int kTileM = Config::tile_m, kTileN = Config::tile_n;
constexpr int kThreads = Config::threads, kRows = kTileM / (kThreads / 32), kBlocks = kRows / 16;
static_assert(kRows % 16 == 0 && kBlocks > 0, "a warp's rows must be whole m16 blocks");
static_assert(kTileN % 16 == 0, "P·V must be whole k16 steps");
static_assert(kDimV <= kDim, "a warp's O must fit where its Q was");

using TileQ = tile::Swizzled<kDim / 8>;  // and K's
using TileV = tile::Swizzled<kDimV / 8>;
constexpr int kBytesQ = kTileM * TileQ::kRowBytes, kBytesK = kTileN * TileQ::kRowBytes;
constexpr int kBytesV = kTileN * TileV::kRowBytes;
static_assert(kBytesQ + kBytesK + kBytesV <= Config::smem_bytes,
              "Config::smem_bytes must hold a tile of each");
static_assert(kBytesQ % 128 == 0 && kBytesK % 128 == 0,
              "swizzled tiles must begin at multiples of 128 bytes");

template <bool kCached>
struct ParamsOf {
  using Type = tile::ParamsOf<ForwardParams, Config::dropout>::Type;
};
template <>
struct ParamsOf<true> {
  using Type = CachedForwardParams;
};
using Params = ParamsOf<Config::cached>::Type;
static_assert(!Config::cached || !Config::dropout, "a cache is for calls without dropout");

extern __shared__ __align__(128) unsigned char smem[];

// Where scores are more than scaled products they may be of any size.
using Softmax = tile::OnlineSoftmaxOf<Config::general>;
using Scores = float[kBlocks][kTileN / 2];
using Weights = unsigned[kBlocks][kTileN / 4];  // P, in pairs
using Output = float[kBlocks][kDimV / 2];

struct Problem {
  int batch, head, tile;  // tile < 0: nothing to do
  long long begin_q, begin_k;
  int seqlen_q, seqlen_k;
};

// Varlen: grid (slots, heads). Else grid (tiles * n, heads of all batches / n), the n heads of one
// y fastest. Either way the rightmost queries, which see most keys under a causal mask, come first.
__device__ __forceinline__ Problem find_problem(const Params& params) {
  if (params.cu_seqlens_q != nullptr) {
    const auto s = attention::sequence_of_slot<kTileM>(params, gridDim.x - 1 - blockIdx.x);
    const int head = blockIdx.y;
    return {s.index, head, s.tile, s.begin_q, s.begin_k, s.seqlen_q, s.seqlen_k};
  }
  const unsigned tiles = (params.seqlen_q + kTileM - 1u) / kTileM, heads = gridDim.x / tiles;
  const int head = blockIdx.y * heads + blockIdx.x % heads;
  const bool exists = head < params.batch * params.heads_q;
  const int tile = exists ? static_cast<int>(tiles - 1 - blockIdx.x / heads) : -1;
  const int batch = head / params.heads_q;
  const int seqlen_k = attention::count_keys(params, batch);
  return {batch, head - batch * params.heads_q, tile, 0, 0, params.seqlen_q, seqlen_k};
}

__device__ __forceinline__ long long first_element(const ForwardParams& params,
                                                   const Strides& stride, const Problem& p,
                                                   int head, long long row, bool paged = false) {
  const int batch = params.cu_seqlens_q != nullptr || paged ? 0 : p.batch;
  return batch * stride.batch + head * stride.head + row * stride.seq;
}

// Whether every row of a matrix starts at a multiple of 16 bytes.
__device__ __forceinline__ bool aligned(const void* matrix, const Strides& stride, int cols) {
  const auto first = reinterpret_cast<unsigned long long>(matrix);
  return first % 16 == 0 && (stride.batch | stride.seq | stride.head | cols) % 8 == 0;
}

// From products to scores, for a warp whose first query is row `warp_row` of the tile.
__device__ __forceinline__ void apply_score_mod(Scores& s, const ForwardParams& params,
                                                const Problem& p, int warp_row, int key) {
  const int lane = ptx::thread_index() % 32, batch = p.batch, head = p.head;
  const ScoreMod<T, true, false> score_mod = {score_inputs(params).of_head<T>(batch, head)};
  const int first_query = p.tile * kTileM + warp_row + tile::lane_row(lane);
  const int first_position = first_query + p.seqlen_k - p.seqlen_q;
  const int first_key = key + tile::lane_column(lane);
  const float slope = score_mod.slope(batch, head);
#pragma unroll
  for (int m = 0; m < kBlocks; ++m)
    score_mod.terms([&](const auto& term) {
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i) {
        const int r = 16 * m + tile::fragment_row(i);
        const tile::ScoreRow<float> row = {batch, head, first_query + r, first_position + r, slope};
        s[m][i] = term(s[m][i], row, first_key + tile::fragment_column(i));
      }
    });
}

// What the softmax still has to multiply scores by.
__device__ __forceinline__ float score_scale(const ForwardParams& params) {
  return Config::general ? 1.0f : static_cast<float>(params.scale);
}

__device__ __forceinline__ void multiply_qk(Scores& s, unsigned q, unsigned k) {
#pragma unroll
  for (int m = 0; m < kBlocks; ++m)
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) s[m][i] = 0.0f;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    unsigned frag_q[kBlocks][4];
#pragma unroll
    for (int m = 0; m < kBlocks; ++m)
      ptx::ldmatrix_x4(frag_q[m], TileQ::at_chunks(q, step) + m * 16 * TileQ::kRowBytes);
#pragma unroll
    for (int n = 0; n < kTileN / 16; ++n) {
      unsigned frag_k[4];
      ptx::ldmatrix_x4(frag_k, TileQ::at_chunks(k, step) + n * 16 * TileQ::kRowBytes);
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        ptx::mma_m16n8k16<T>(&s[m][8 * n], frag_q[m], frag_k[0], frag_k[1]);
        ptx::mma_m16n8k16<T>(&s[m][8 * n + 4], frag_q[m], frag_k[2], frag_k[3]);
      }
    }
  }
}

__device__ __forceinline__ void multiply_pv(Output& o, const Weights& p, unsigned v) {
#pragma unroll
  for (int step = 0; step < kTileN / 16; ++step) {
#pragma unroll
    for (int n = 0; n < kDimV / 16; ++n) {
      unsigned frag_v[4];
      ptx::ldmatrix_x4_trans(frag_v, TileV::at_chunks(v, n) + step * 16 * TileV::kRowBytes);
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        const unsigned frag_p[4] = {p[m][4 * step], p[m][4 * step + 1], p[m][4 * step + 2],
                                    p[m][4 * step + 3]};
        ptx::mma_m16n8k16<T>(&o[m][8 * n], frag_p, frag_v[0], frag_v[1]);
        ptx::mma_m16n8k16<T>(&o[m][8 * n + 4], frag_p, frag_v[2], frag_v[3]);
      }
    }
  }
}

// Clears the probabilities that dropout removes, of a warp whose first query is row `warp_row` of
// the tile.
__device__ __forceinline__ void drop(Weights& p, const DropoutParams& dropout,
                                     const ForwardParams& params, const Problem& problem,
                                     int warp_row, int key) {
  const int lane = ptx::thread_index() % 32, head = problem.batch * params.heads_q + problem.head;
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    const tile::DropoutRow row(dropout.seed, (problem.tile * kTileM + warp_row) / 16 + m, lane,
                               head);
#pragma unroll
    for (int step = 0; step < kTileN / 32; ++step) {
      uint4 kept[1];
      row.kept_signs(kept, dropout, key / 32 + step);
      tile::clear_dropped(p[m] + 8 * step, kept[0]);
    }
  }
}

// Divides by the sums, writes lse, and writes O in whole chunks by way of the shared memory of the
// warp's Q. The last passes change what the finite one left.
__device__ __forceinline__ void finish(const Params& params, const Problem& p, Output& o,
                                       const Softmax (&softmax)[kBlocks], unsigned char* staged,
                                       int pass) {
  const int lane = threadIdx.x % 32;
  const int warp_row = p.tile * kTileM + threadIdx.x / 32 * kRows;
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + lane / 4 + 16 * m + 8 * half;
      float sum = tile::quad_sum(softmax[m].row_sum[half]);
      float largest = softmax[m].row_max[half] * score_scale(params);
      float weight = 1.0f;
      if (params.sinks != nullptr) {
        const float sink = static_cast<const float*>(params.sinks)[p.head];
        const float keys = largest;
        largest = fmaxf(keys, sink);
        const float shift = largest == tile::negative_infinity() ? 0.0f : largest;
        weight = ptx::ex2((keys - shift) * tile::kLog2e);
        sum = sum * weight + ptx::ex2((sink - shift) * tile::kLog2e);
      }
      factor[half] = sum == 0.0f ? 0.0f : weight / sum;
      if constexpr (Config::dropout)
        factor[half] *= static_cast<float>(tile::dropout_of(params).scale);
      if (params.lse != nullptr && lane % 4 == 0 && row < p.seqlen_q) {
        const long long heads =
            params.cu_seqlens_q != nullptr ? 0 : static_cast<long long>(p.batch) * params.heads_q;
        static_cast<float*>(params.lse)[(heads + p.head) * params.seqlen_q + p.begin_q + row] =
            sum == 0.0f ? tile::negative_infinity() : largest + ptx::lg2(sum) * tile::kLn2;
      }
    }
    tile::scale_rows(o[m], factor);
    if (pass >= tile::kPositive) {  // any weight counts, also one that 16 bits would lose
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) o[m][i] = o[m][i] == 0.0f ? 0.0f : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kDimV / 4; ++i) {
      const int at = TileV::at(16 * m + lane / 4 + i % 2 * 8, i / 2) + lane % 4 * 4;
      *reinterpret_cast<unsigned*>(staged + at) = tile::pack<T>(o[m][2 * i], o[m][2 * i + 1]);
    }
  }
  __syncwarp();
  T* out = static_cast<T*>(params.out) +
           first_element(params, params.out_stride, p, p.head, p.begin_q + warp_row);
  const bool whole = !Config::general || aligned(params.out, params.out_stride, params.head_dim_v);
#pragma unroll 1
  for (int i = lane; i < kRows * (kDimV / 8); i += 32) {
    const int row = i / (kDimV / 8), chunk = i % (kDimV / 8);
    if (warp_row + row >= p.seqlen_q || chunk * 8 >= params.head_dim_v) continue;
    const unsigned char* elements = staged + TileV::at(row, chunk);
    T* target = out + row * params.out_stride.seq + chunk * 8;
    if (whole && pass < tile::kPositive) {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(elements);
    } else {
      for (int e = 0; e < min(8, params.head_dim_v - chunk * 8); ++e) {
        const T element = reinterpret_cast<const T*>(elements)[e];
        target[e] =
            pass < tile::kPositive ? element : tile::with_nonfinite(target[e], element, pass);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 256 / kThreads)
    forward_sm80(const __grid_constant__ Params params) {
  __shared__ Problem stored;  // for the epilogue: registers are full
  const Problem p = find_problem(params);
  if (p.tile < 0) return;
  if (threadIdx.x == 0) stored = p;
  const int head_kv = p.head / (params.heads_q / params.heads_kv);
  const int first_row = p.tile * kTileM, rows = min(kTileM, p.seqlen_q - first_row);

  // The keys that some of the rows see, and the tiles that hold them.
  const auto visibility = tile::Visibility::from_row(first_row, kTileM, params.window_left,
                                                     params.window_right, p.seqlen_q, p.seqlen_k);
  const tile::Range keys = visibility.keys_of_any(0, rows - 1);
  const int key_begin = max(keys.begin, 0), key_end = keys.end;
  const int last_key = (key_end - 1) / kTileN * kTileN;
  const int first_key = key_begin < key_end ? key_begin / kTileN * kTileN : last_key + 1;
  const T* q = static_cast<const T*>(params.q) +
               first_element(params, params.q_stride, p, p.head, p.begin_q);
  const T* k = static_cast<const T*>(params.k) +
               first_element(params, params.k_stride, p, head_kv, p.begin_k, Config::cached);
  const T* v = static_cast<const T*>(params.v) +
               first_element(params, params.v_stride, p, head_kv, p.begin_k, Config::cached);
  const auto is_aligned = [](const void* matrix, const Strides& stride, int cols) {
    return !Config::general || aligned(matrix, stride, cols);
  };
  const tile::TileLoader<T, TileQ, kTileM, kThreads> load_q(
      q, params.q_stride.seq, params.head_dim,
      is_aligned(params.q, params.q_stride, params.head_dim));
  const attention::KeyLoader<Params, T, TileQ, kTileN, kThreads> load_k(
      params, p.batch, k, params.k_stride, params.head_dim,
      is_aligned(params.k, params.k_stride, params.head_dim));
  const attention::KeyLoader<Params, T, TileV, kTileN, kThreads> load_v(
      params, p.batch, v, params.v_stride, params.head_dim_v,
      is_aligned(params.v, params.v_stride, params.head_dim_v));

  const int warp_row = threadIdx.x / 32 * kRows;               // within the tile
  unsigned char* staged = smem + warp_row * TileQ::kRowBytes;  // the warp's Q, at last its O
  const unsigned smem_q = ptx::shared_address(smem);
  const unsigned smem_k = smem_q + kBytesQ, smem_v = smem_k + kBytesK;
  const unsigned lane_q = ptx::opaque(ptx::shared_address(staged) + TileQ::lane_row_major());
  const unsigned lane_k = smem_k + TileQ::lane_column_major();
  const unsigned lane_v = smem_v + TileV::lane_row_major();

  const float scale_log2 = score_scale(params) * tile::kLog2e;

  // More passes, with what is not finite set apart, where an output is not.
#pragma unroll 1
  for (int pass = tile::kValues; pass <= tile::kNegative; ++pass) {
    load_q.load(smem_q, first_row, 0, p.seqlen_q);
    if (first_key <= last_key) load_k.load(smem_k, last_key, key_begin, key_end);
    Output o = {};
    Softmax softmax[kBlocks];

#pragma unroll 1
    for (int key = last_key; key >= first_key; key -= kTileN) {
      const bool active =
          warp_row < rows &&
          visibility.keys_of_any(warp_row, warp_row + kRows - 1).overlaps(key, kTileN);
      Scores s;

      ptx::cp_async_wait_all();  // for K, and the first time Q
      __syncthreads();
      load_v.load(smem_v, key, key_begin, key_end, pass);
      if (active) multiply_qk(s, lane_q, lane_k);

      ptx::cp_async_wait_all();  // for V
      __syncthreads();
      if (key > first_key) load_k.load(smem_k, key - kTileN, key_begin, key_end);
      if (active) {
        if (Config::general) apply_score_mod(s, params, stored, warp_row, key);
        if (!visibility.keys_of_all(warp_row, warp_row + kRows - 1).contains(key, kTileN)) {
          const int lane = ptx::thread_index() % 32;
#pragma unroll
          for (int m = 0; m < kBlocks; ++m)
            tile::hide_keys(s[m], visibility, warp_row + 16 * m + tile::lane_row(lane),
                            key + tile::lane_column(lane));
        }
        float block_max[kBlocks][2];
        bool grown = false;
#pragma unroll
        for (int m = 0; m < kBlocks; ++m)
          grown |= softmax[m].needs_rescale(s[m], scale_log2, block_max[m]);
        if (__any_sync(~0u, grown)) {
#pragma unroll
          for (int m = 0; m < kBlocks; ++m) {
            float correction[2];
            softmax[m].rescale(block_max[m], scale_log2, correction);
            tile::scale_rows(o[m], correction);
          }
        }
        Weights weights;
        // No branch from here on: exponentials of later keys overlap with products of earlier ones.
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) {
          softmax[m].exponentiate(s[m], scale_log2);
          tile::pack_fragment<T>(weights[m], s[m]);
        }
        if constexpr (Config::dropout)
          drop(weights, tile::dropout_of(params), params, stored, warp_row, key);
        multiply_pv(o, weights, lane_v);
      }
    }

    ptx::cp_async_wait_all();  // for Q, where there was no key
    float zeros[4] = {};       // NaN where an output is not finite; four short chains of sums
#pragma unroll
    for (int m = 0; m < kBlocks; ++m)
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) zeros[i % 4] = fmaf(o[m][i], 0.0f, zeros[i % 4]);
    const bool done = !__syncthreads_or(zeros[0] + zeros[1] + zeros[2] + zeros[3] != 0.0f);
    if (pass != tile::kValues || done) finish(params, stored, o, softmax, staged, pass);
    if (pass == tile::kValues && done) break;
    __syncthreads();
  }
}
