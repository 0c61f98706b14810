// Attention backward in plain CUDA C++ in one pass: dk and dv, and dq by atomic additions, of calls
// without dropout; float32 and float64.
//
//   Arrays as in gradients/backward_simt.cu. dq holds zeros when this kernel begins.
//
//   A block owns kTileM keys of one head, whose K and V stay in shared memory, and walks over the
//   queries that see them, kTileN at a time, of all heads that share them. For a tile:
//
//     P = exp(score(K Q^T) - lse), dS = score' * P * (V dout^T - delta)
//     dv += P dout, dk += dS Q, dq += dS^T K
//
//   That is five products where two passes have seven. Only dq depends on the order in which
//   blocks run, by its rounding; dk and dv are the same bits in every run.
//
//   P and dS are computed in the registers that hold the products, in shared memory they are for
//   the next products. A thread has kRows keys and every sixteenth query, or vector of features.
#include "gradients/tile_simt.cuh"

constexpr bool kGeneral = Config::general;  // scores are more than scaled
constexpr int kHeadDim = Config::head_dim;  // padded: of q and k, or of v, if that is more
constexpr int kVecs = kHeadDim / (kThreadCols * kVec);
constexpr int kTilePitch = kHeadDim + kVec;  // 8 consecutive rows lie in different banks
// Half warps write two rows of floats to different banks; a row of doubles takes all of them.
constexpr int kScorePitch = kTileN + (sizeof(Acc) == 4 ? 16 : kVec);
constexpr int kDqVec = least(kVec, kTileN / kThreadRows);  // queries that a thread has together
constexpr int kDqGroups = kTileN / (kThreadRows * kDqVec);

static_assert(kKeysStationary, "rows are keys");
static_assert(kHeadDim % (kThreadCols * kVec) == 0, "threads cover the results evenly");
static_assert(kTileN % (kThreadRows * kDqVec) == 0, "threads cover the rows of dq evenly");
static_assert(kTileM % kChain == 0 && kTileN % kChain == 0, "chains end with a tile");

struct Tiles {
  Acc k[kTileM][kTilePitch], v[kTileM][kTilePitch];
  Acc q[kTileN][kTilePitch], dout[kTileN][kTilePitch];
  Acc p[kTileM][kScorePitch], ds[kTileM][kScorePitch];
};

static_assert(sizeof(Tiles) == Config::smem_bytes, "the host knows the size");

extern __shared__ __align__(16) unsigned char smem[];

struct Smem {
  Statistics statistics;
  Work work;
  Matrix keys[2], queries[2];  // k and v, q and dout
  int head;                    // of k and v
};

// What tile::varlen_sequence wants to know, of keys as its queries.
struct Lengths {
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  int batch, seqlen_q, seqlen_k;
};

// dq of the tile's queries += dS^T K. kNonfinite: K holds infinities or NaN, which a 0 in dS must
// not pass on.
template <bool kNonfinite>
__device__ __forceinline__ void add_dq(Acc* dq, long long row_stride, const Tiles& tiles,
                                       int queries, int columns) {
  const int row = threadIdx.x / kThreadCols, col = threadIdx.x % kThreadCols;
#pragma unroll 1
  for (int n = 0; n < kVecs * kDqGroups; ++n) {
    const int column = (col + n / kDqGroups * kThreadCols) * kVec;
    const int first = (row + n % kDqGroups * kThreadRows) * kDqVec;
    Acc x[kDqVec][kVec] = {};
#pragma unroll 1
    for (int begin = 0; begin < kTileM; begin += kChain) {
      Acc chain[kDqVec][kVec] = {};
#pragma unroll(kNonfinite ? 1 : kChain)
      for (int key = begin; key < begin + kChain; ++key) {
        const auto left = reinterpret_cast<const tile::Vec<Acc, kDqVec>&>(tiles.ds[key][first]);
        const Vec right = vec(tiles.k[key][column]);
#pragma unroll
        for (int e = 0; e < kDqVec; ++e)
#pragma unroll
          for (int f = 0; f < kVec; ++f)
            if (!kNonfinite || left.x[e] != 0)
              chain[e][f] = fma(left.x[e], right.x[f], chain[e][f]);
      }
#pragma unroll
      for (int e = 0; e < kDqVec; ++e)
#pragma unroll
        for (int f = 0; f < kVec; ++f) x[e][f] += chain[e][f];
    }
#pragma unroll
    for (int e = 0; e < kDqVec; ++e)
#pragma unroll
      for (int f = 0; f < kVec; ++f)
        if (first + e < queries && column + f < columns)
          atomicAdd(dq + (first + e) * row_stride + column + f, x[e][f]);
  }
}

// Turns this thread's products, which lie in P's place, into probabilities, and leaves the scores'
// derivatives in the place of dS. From shared memory, where a loop can index them: a copy of this
// code for each score would not fit in registers.
__device__ __forceinline__ void apply_score_mod(Tiles& tiles, const Smem& shared,
                                                const ForwardParams& params,
                                                const tile::Visibility& visibility, int first_key,
                                                int first_query) {
  const int row = threadIdx.x / kThreadCols, col = threadIdx.x % kThreadCols;
  const tile::Sequence& seq = shared.work.seq;
  const int head = shared.work.head;
  const ScoreMod<T, false, false> score_mod = {score_inputs(params).of_head<T>(seq.index, head)};
  const Acc slope = score_mod.slope(seq.index, head);
#pragma unroll(kHeadDim * sizeof(Acc) > 512 ? 1 : 2)
  for (int n = 0; n < kRows * kCols; ++n) {
    const int i = row + n / kCols * kThreadRows, j = col + n % kCols * kThreadCols;
    const int key = first_key + i, query = first_query + j;
    const tile::ScoreRow<Acc> score_row = {seq.index, head, query,
                                           query + seq.seqlen_k - seq.seqlen_q, slope};
    Acc score = tiles.p[i][j], derivative = 1;
    score_mod.terms([&](const auto& term) {
      derivative *= term.derivative(score, score_row, key);
      score = term(score, score_row, key);
    });
    const Acc lse = shared.statistics.lse[j];
    const bool counts =
        visibility.keys(query).contains(key, 1) && lse != tile::negative_infinity<Acc>();
    tiles.p[i][j] = counts ? exp(score - lse) : 0;
    tiles.ds[i][j] = derivative;
  }
}

extern "C" __global__ void __launch_bounds__(Config::threads, Config::blocks_per_sm)
    backward_fused_simt(const __grid_constant__ ForwardParams params,
                        const __grid_constant__ BackwardParams backward) {
  __shared__ Smem shared;
  Tiles& tiles = *reinterpret_cast<Tiles*>(smem);
  const int slots = gridDim.x / params.heads_kv;
  const int head = blockIdx.x / slots, slot = blockIdx.x % slots;
  tile::Sequence seq;
  if (params.cu_seqlens_q != nullptr) {
    const Lengths lengths = {params.cu_seqlens_k, params.cu_seqlens_q, params.batch,
                             params.seqlen_k, params.seqlen_q};
    seq = tile::varlen_sequence<kTileM>(lengths, slot);
    seq = {seq.index, seq.begin_k, seq.begin_q, seq.seqlen_k, seq.seqlen_q, seq.tile};
  } else {
    // With a causal mask the first keys are the most work.
    const int batch = blockIdx.z * gridDim.y + blockIdx.y;
    seq = {batch, 0, 0, params.seqlen_q, params.seqlen_k, slot};
  }
  if (seq.index >= params.batch || seq.tile < 0) return;

  const int group = params.heads_q / params.heads_kv;
  const int first_key = seq.tile * kTileM;
  const int last_key = min(first_key + kTileM, seq.seqlen_k) - 1;
  const tile::Visibility visibility = ::visibility(params, seq);
  const tile::Range all = visibility.rows_of_all(first_key, first_key + kTileM - 1);
  tile::Range columns = visibility.rows_of_any(first_key, last_key);
  columns.begin = max(columns.begin, 0) / kTileN * kTileN;
  columns.end = min(columns.end, seq.seqlen_q);
  if (threadIdx.x == 0) {
    shared.work = {seq, visibility, head};
    shared.head = head;
    shared.keys[0] = matrix(params.k, params.k_stride, seq.index, seq.begin_k, head, seq.seqlen_k,
                            params.head_dim);
    shared.keys[1] = matrix(params.v, params.v_stride, seq.index, seq.begin_k, head, seq.seqlen_k,
                            params.head_dim_v);
  }
  __syncthreads();
  const bool nonfinite_k =
      __syncthreads_or(load_slab<kHeadDim>(tiles.k, shared.keys[0], first_key, 0));
  load_slab<kHeadDim>(tiles.v, shared.keys[1], first_key, 0);

  const int row = threadIdx.x / kThreadCols, col = threadIdx.x % kThreadCols;
  const Acc scale = static_cast<Acc>(params.scale);
  const long long index = params.cu_seqlens_q != nullptr ? 0 : seq.index;
  const long long row_stride = static_cast<long long>(params.heads_q) * params.head_dim;
  Acc dk[kRows][kVecs][kVec] = {}, dv[kRows][kVecs][kVec] = {};
#pragma unroll 1
  for (int h = 0; h < group; ++h) {
    const int head_q = head * group + h;
    Acc* const dq = static_cast<Acc*>(backward.dq) +
                    (index * params.seqlen_q + seq.begin_q) * row_stride +
                    static_cast<long long>(head_q) * params.head_dim;
    __syncthreads();  // the head before this is done
    if (threadIdx.x == 0) {
      shared.work.head = head_q;
      shared.queries[0] = matrix(params.q, params.q_stride, seq.index, seq.begin_q, head_q,
                                 seq.seqlen_q, params.head_dim);
      shared.queries[1] = matrix(backward.dout, backward.dout_stride, seq.index, seq.begin_q,
                                 head_q, seq.seqlen_q, params.head_dim_v);
    }
#pragma unroll 1
    for (int column = columns.begin; column < columns.end; column += kTileN) {
      __syncthreads();  // the queries before these have been used
      load_statistics(shared.statistics, params, backward.delta, shared.work, column);
      bool nonfinite = load_slab<kHeadDim>(tiles.q, shared.queries[0], column, 0);
      nonfinite |= load_slab<kHeadDim>(tiles.dout, shared.queries[1], column, 0);
      nonfinite = __syncthreads_or(nonfinite);

      Acc s[kRows][kCols] = {};
      multiply_scores(s, tiles.k, tiles.q, params.head_dim);
      const bool whole = all.contains(column, kTileN) && first_key + kTileM <= seq.seqlen_k;
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        const int query = col + j * kThreadCols;
        const Acc lse = shared.statistics.lse[query];
        const tile::Range seen = visibility.keys(column + query);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int key = row + i * kThreadRows;
          if (kGeneral) {
            tiles.p[key][query] = s[i][j];
            continue;
          }
          // A row that sees no key has lse -inf, and -inf - -inf would be NaN.
          bool counts = lse != tile::negative_infinity<Acc>();
          if (!whole) counts = counts && seen.contains(first_key + key, 1);
          tiles.p[key][query] = counts ? exp(fma(s[i][j], scale, -lse)) : 0;
        }
      }
      if (kGeneral) apply_score_mod(tiles, shared, params, visibility, first_key, column);
      Acc dp[kRows][kCols] = {};
      multiply_scores(dp, tiles.v, tiles.dout, params.head_dim_v);
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        const int query = col + j * kThreadCols;
        const Acc delta = shared.statistics.delta[query];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int key = row + i * kThreadRows;
          const Acc p = tiles.p[key][query];  // this thread's own
          const Acc derivative = kGeneral ? tiles.ds[key][query] : scale;
          tiles.ds[key][query] = p == 0 ? 0 : p * (dp[i][j] - delta) * derivative;
        }
      }
      __syncthreads();  // P and dS are complete
      if (nonfinite) {
        multiply_values<true, 32, 1>(dv, tiles.p, tiles.dout, 0);  // rare: less at a time will do
        multiply_values<true, 32, 1>(dk, tiles.ds, tiles.q, 0);
      } else {
        multiply_values<false, kNumbers>(dv, tiles.p, tiles.dout, 0);
        multiply_values<false, kNumbers>(dk, tiles.ds, tiles.q, 0);
      }
      const int queries = seq.seqlen_q - column;
      if (nonfinite_k)
        add_dq<true>(dq + column * row_stride, row_stride, tiles, queries, params.head_dim);
      else
        add_dq<false>(dq + column * row_stride, row_stride, tiles, queries, params.head_dim);
    }
  }

  const int rows = min(kTileM, seq.seqlen_k - first_key);
  const long long out_row = index * params.seqlen_k + seq.begin_k + first_key;
  write_rows(backward.dk, dk, out_row, rows, params.heads_kv, head, params.head_dim);
  write_rows(backward.dv, dv, out_row, rows, params.heads_kv, head, params.head_dim_v);
}
