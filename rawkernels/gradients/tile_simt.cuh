// A tile of scores in the simt gradient kernels: two products in shared memory, and what becomes of
// each score.
//
// Rows of a tile are queries, or keys in the pass for dk and dv (kKeysStationary): rows stay with a
// block while columns stream by. The first product is q·k, in whose place probabilities come; the
// second dout·v, or that of a tangent, in whose place gradients of scores come.
//
// Scores are visited as they lie in the accumulators of mma.sync: a warp has a block of 16 queries
// and 16 keys, of which a lane has eight. So one Philox counter serves the dropout of all eight.
#pragma once

#include "attention/product_simt.cuh"
#include "gradients/params.cuh"
#include "tile/fragment.cuh"
#include "tile/ragged.cuh"
#include "tile/visibility.cuh"

constexpr int kTileM = Config::tile_m;
constexpr int kTileN = Config::tile_n;
constexpr bool kKeysStationary = Config::keys_stationary;
constexpr int kQueries = kKeysStationary ? kTileN : kTileM;  // of a tile
constexpr int kThreadRows = Config::thread_rows;
constexpr int kRows = kTileM / kThreadRows;
constexpr int kCols = kTileN / kThreadCols;
constexpr int kDepth = sizeof(Acc) == 4 ? 32 : 16;  // columns in a slab of two factors
// Lanes 4g + t read columns 2t of row g, or, with keys stationary, rows 2t of column g: from 32
// banks with these pitches.
constexpr int kPitch = kTileN + (kKeysStationary ? kVec : 8);

// Two results in registers leave less for the chains of a product.
constexpr int kNumbers = kKeysStationary && sizeof(Acc) == 8 ? 2 * kRows * kVec : 32;
constexpr int kKeysAtOnce = kKeysStationary ? kVec / 2 : kVec;

static_assert(kTileM % 16 == 0 && kTileN % 16 == 0, "tiles are whole blocks of the dropout mask");
static_assert(kTileM % kThreadRows == 0, "threads cover the scores evenly");
static_assert(Config::threads == kThreadRows * kThreadCols, "a thread for each place");
static_assert(kDepth % kChain == 0, "chains end with a slab");

struct ScoreTile {
  alignas(16) Acc products[2][kTileM][kPitch];

  __device__ __forceinline__ Acc& at(int n, int query, int key) {
    return kKeysStationary ? products[n][key][query] : products[n][query][key];
  }
};

struct Slabs {  // a vector more: 8 consecutive rows lie in different banks
  alignas(16) Acc rows[kTileM][kDepth + kVec];
  alignas(16) Acc cols[kTileN][kDepth + kVec];
};

// One query head against one sequence.
struct Work {
  tile::Sequence seq;
  tile::Visibility visibility;  // rows are counted from the sequence's first
  int head;
};

// Of the queries of a tile; -inf as the lse of those past the last.
struct Statistics {
  Acc lse[kQueries];
  Acc delta[kQueries];
};

__device__ __forceinline__ tile::Visibility visibility(const ForwardParams& params,
                                                       const tile::Sequence& seq) {
  return tile::Visibility::from_row(0, seq.seqlen_q, params.window_left, params.window_right,
                                    seq.seqlen_q, seq.seqlen_k);
}

// Where a query head's rows begin in arrays such as lse.
__device__ __forceinline__ long long statistics_row(const ForwardParams& params,
                                                    const tile::Sequence& seq, int head) {
  const bool ragged = params.cu_seqlens_q != nullptr;
  const long long row = ragged ? head : static_cast<long long>(seq.index) * params.heads_q + head;
  return row * params.seqlen_q + seq.begin_q;
}

__device__ __forceinline__ void load_statistics(Statistics& statistics, const ForwardParams& params,
                                                const void* delta, const Work& work,
                                                int first_query) {
  const long long begin = statistics_row(params, work.seq, work.head) + first_query;
  for (int i = threadIdx.x; i < kQueries; i += Config::threads) {
    const bool exists = first_query + i < work.seq.seqlen_q;
    statistics.lse[i] =
        exists ? static_cast<const Acc*>(params.lse)[begin + i] : tile::negative_infinity<Acc>();
    statistics.delta[i] =
        exists && delta != nullptr ? static_cast<const Acc*>(delta)[begin + i] : 0;
  }
}

// S += A B^T of rows `row` on of A and rows `col` on of B.
__device__ __forceinline__ void multiply(Acc (&s)[kRows][kCols], Slabs& slabs, const Matrix& a,
                                         int row, const Matrix& b, int col) {
  for (int d = 0; d < a.columns; d += kDepth) {
    __syncthreads();  // the slabs before these have been used
    load_slab<kDepth>(slabs.rows, a, row, d);
    load_slab<kDepth>(slabs.cols, b, col, d);
    __syncthreads();
    multiply_scores(s, slabs.rows, slabs.cols, least(kDepth, a.columns - d));
  }
}

__device__ __forceinline__ void store(Acc (&tile)[kTileM][kPitch], const Acc (&s)[kRows][kCols]) {
  const int row = threadIdx.x / kThreadCols, col = threadIdx.x % kThreadCols;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kCols; ++j) tile[row + i * kThreadRows][col + j * kThreadCols] = s[i][j];
}

// O += P V over the tile's columns, of which V has rows `col` on. kAtOnce: numbers of chains that
// are summed at a time.
template <int kAtOnce = kNumbers, int kVecs, int kSlabRows, int kColumns>
__device__ __forceinline__ void multiply_tile(Acc (&o)[kRows][kVecs][kVec],
                                              const Acc (&p)[kTileM][kPitch],
                                              Acc (&slab)[kSlabRows][kColumns], const Matrix& v,
                                              int col) {
#pragma unroll 1
  for (int n = 0; n < kTileN; n += kSlabRows) {
    __syncthreads();  // P is complete, and the slab before this has been used
    const bool nonfinite = load_slab<kColumns>(slab, v, col + n, 0);
    if (__syncthreads_or(nonfinite))
      multiply_values<true, kAtOnce, 1>(o, p, slab, n);  // rare: less at a time will do
    else
      multiply_values<false, kAtOnce, kKeysAtOnce>(o, p, slab, n);
  }
}

// What is known of a score when it is visited.
struct Score {
  Acc p;           // exp(score - lse): 0 where the query does not see the key
  Acc z;           // what dropout multiplies it by
  Acc derivative;  // of the score by q·k
  Acc second;      // the other product
  Acc delta;       // of the query
  int query, key;  // in the tile
};

// Calls visit(score, first, second) for every score of the tile: `first` and `second` are where it
// lies in shared memory. All threads together, between two barriers.
template <class Visit>
__device__ __forceinline__ void visit_scores(ScoreTile& scores, const Statistics& statistics,
                                             const ForwardParams& params,
                                             const DropoutParams& dropout, const Work& work,
                                             int first_query, int first_key, const Visit& visit) {
  const int lane = threadIdx.x % 32;
  const tile::Sequence& seq = work.seq;
  const ScoreMod<T, false, false> score_mod = {
      score_inputs(params).of_head<T>(seq.index, work.head)};
  const Acc slope = score_mod.slope(seq.index, work.head);
  constexpr int kBlocks = kTileN / 16;  // in a row of blocks
#pragma unroll 1
  for (int n = threadIdx.x / 32; n < kTileM / 16 * kBlocks; n += Config::threads / 32) {
    const int block_row = n / kBlocks * 16, block_col = n % kBlocks * 16;
    const int block_query = kKeysStationary ? block_col : block_row;
    const int block_key = kKeysStationary ? block_row : block_col;
    const int query = block_query + tile::lane_row(lane);
    const int key = block_key + tile::lane_column(lane);

    Acc score[8], derivative[8];
    tile::ScoreRow<Acc> rows[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = first_query + query + 8 * r;
      rows[r] = {seq.index, work.head, i, i + seq.seqlen_k - seq.seqlen_q, slope};
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int q = query + tile::fragment_row(i), k = key + tile::fragment_column(i);
      score[i] = scores.at(0, q, k);
      derivative[i] = 1;
    }
    score_mod.terms([&](const auto& term) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int k = first_key + key + tile::fragment_column(i);
        derivative[i] *= term.derivative(score[i], rows[i / 2 % 2], k);
        score[i] = term(score[i], rows[i / 2 % 2], k);
      }
    });

    Acc z[8];
    if (dropout.threshold != 0) {
      const tile::DropoutBits bits(dropout, (first_query + block_query) / 16,
                                   (first_key + block_key) / 16, lane,
                                   seq.index * params.heads_q + work.head);
#pragma unroll
      for (int i = 0; i < 8; ++i) z[i] = bits.drops(i) ? 0 : static_cast<Acc>(dropout.scale);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) z[i] = 1;
    }

#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int q = query + tile::fragment_row(i), k = key + tile::fragment_column(i);
      const tile::Range seen = work.visibility.keys(first_query + q);
      const Acc lse = statistics.lse[q];
      // A row that sees no key has lse -inf, and -inf - -inf would be NaN.
      const bool counts = first_key + k >= seen.begin && first_key + k < seen.end &&
                          lse != tile::negative_infinity<Acc>();
      Acc& first = scores.at(0, q, k);
      Acc& second = scores.at(1, q, k);
      const Score known = {
          counts ? exp(score[i] - lse) : 0, z[i], derivative[i], second, statistics.delta[q], q, k};
      visit(known, first, second);
    }
  }
}

// p * (z * dP - delta): the gradient of a score after all its terms. Where p is 0 the others may be
// NaN.
__device__ __forceinline__ Acc score_gradient(const Score& score) {
  return score.p == 0 ? 0 : score.p * fma(score.z, score.second, -score.delta);
}

// Writes a block's rows of a contiguous result (…, rows, heads, columns): `row` is the first one's
// number in the array.
template <int kVecs>
__device__ __forceinline__ void write_rows(void* result, const Acc (&o)[kRows][kVecs][kVec],
                                           long long row, int rows, int heads, int head,
                                           int columns) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = threadIdx.x / kThreadCols + i * kThreadRows;
    if (r >= rows) continue;
    T* out = static_cast<T*>(result) + ((row + r) * heads + head) * columns;
#pragma unroll
    for (int c = 0; c < kVecs; ++c)
#pragma unroll
      for (int f = 0; f < kVec; ++f) {
        const int column = (threadIdx.x % kThreadCols + c * kThreadCols) * kVec + f;
        if (column < columns) out[column] = static_cast<T>(o[i][c][f]);
      }
  }
}
