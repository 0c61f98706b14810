// Attention and its derivative in a direction (its Jacobian-vector product) in one pass, in plain
// CUDA C++: every call of the contract, on any architecture.
//
//   q, k, v, out as in attention/forward_simt.cu; the direction's q', k' and v' of the shapes and
//   type of q, k and v; dout of out's, contiguous. float16, bfloat16, float32, float64; sums,
//   softmax and shared memory are float, or double for float64.
//
//   One block has kTileM queries of one head and walks over the keys that they see. Beside the
//   online softmax of the forward pass, with its running maximum m and sum l, it keeps the sums
//   that the derivative needs; a larger maximum rescales all of them alike:
//
//     s' = (q' k^T + q k'^T) * derivative of the score by q k^T, w = exp(s - m)
//     O = sum w z v, A = sum (w z v' + w s' z v), mu = sum w s'            (z: dropout)
//     out = O / l, dout = A / l - mu / l * out
//
//   That is six products, three for the scores and three for the values. A thread has scores and
//   results where attention/forward_simt.cu has them; S, then w, and s', then w s', lie in shared
//   memory.
#include "gradients/jvp_params.cuh"
#include "gradients/tile_simt.cuh"

constexpr int kHeadDimV = Config::head_dim;  // padded, of v
constexpr int kVecs = kHeadDimV / (kThreadCols * kVec);
constexpr int kSlab = 16384 / (kHeadDimV * static_cast<int>(sizeof(Acc)));
constexpr int kSlabRows = kSlab < kChain ? kChain : least(kSlab, kTileN);
// Two results of 256 doubles a row leave less for the chains of a product.
constexpr int kAtOnce = sizeof(Acc) == 8 && kHeadDimV == 256 ? kNumbers / 2 : kNumbers;

static_assert(!kKeysStationary, "rows are queries");
static_assert(kTileN % kSlabRows == 0, "whole slabs");

struct Smem {
  ScoreTile scores;
  union {
    Slabs slabs;
    alignas(16) Acc slab[kSlabRows][kHeadDimV];
  };
  Acc row_max[kTileM];
  Acc row_sum[kRows][Config::threads], mean[kRows][Config::threads];  // each thread's part of l, mu
  Work work;
  Matrix rows[2], cols[2], values[2];  // q, q'; k, k'; v, v'
};

static_assert(sizeof(Smem) <= 48 * 1024, "static shared memory that every architecture has");

// Scores and their derivatives in the direction, of what this thread has of the two products: -inf
// and anything where the query does not see the key.
__device__ __forceinline__ void apply_score_mod(ScoreTile& scores, const ForwardParams& params,
                                                const Work& work, int first_query, int first_key) {
  const tile::Sequence& seq = work.seq;
  const ScoreMod<T, false, false> score_mod = {
      score_inputs(params).of_head<T>(seq.index, work.head)};
  const Acc slope = score_mod.slope(seq.index, work.head);
#pragma unroll(sizeof(Acc) == 4 ? 4 : 2)
  for (int n = 0; n < kRows * kCols; ++n) {
    const int i = threadIdx.x / kThreadCols + n / kCols * kThreadRows;
    const int j = threadIdx.x % kThreadCols + n % kCols * kThreadCols;
    const int query = first_query + i, key = first_key + j;
    const tile::ScoreRow<Acc> row = {seq.index, work.head, query,
                                     query + seq.seqlen_k - seq.seqlen_q, slope};
    Acc score = scores.products[0][i][j], derivative = 1;
    score_mod.terms([&](const auto& term) {
      derivative *= term.derivative(score, row, key);
      score = term(score, row, key);
    });
    const tile::Range seen = work.visibility.keys(query);
    scores.products[0][i][j] =
        key >= seen.begin && key < seen.end ? score : tile::negative_infinity<Acc>();
    scores.products[1][i][j] *= derivative;
  }
}

// Dropout of a tile of w and of w s': a warp takes a block of the mask, a lane eight of its
// entries.
__device__ __forceinline__ void drop(ScoreTile& scores, const DropoutParams& dropout, int head,
                                     int first_query, int first_key) {
  const int lane = threadIdx.x % 32;
  constexpr int kBlocks = kTileN / 16;
#pragma unroll 1
  for (int n = threadIdx.x / 32; n < kTileM / 16 * kBlocks; n += Config::threads / 32) {
    const int row = n / kBlocks * 16, column = n % kBlocks * 16;
    const tile::DropoutBits bits(dropout, (first_query + row) / 16, (first_key + column) / 16, lane,
                                 head);
#pragma unroll sizeof(Acc) == 8 ? 1 : 8  // sums of doubles leave no registers for more
    for (int e = 0; e < 8; ++e) {
      const int i = row + tile::lane_row(lane) + tile::fragment_row(e);
      const int j = column + tile::lane_column(lane) + tile::fragment_column(e);
      const bool dropped = bits.drops(e);
#pragma unroll
      for (Acc(&products)[kTileM][kPitch] : scores.products)
        products[i][j] = dropped ? 0 : products[i][j] * static_cast<Acc>(dropout.scale);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::threads, Config::blocks_per_sm)
    jvp_simt(const __grid_constant__ ForwardParams params, const __grid_constant__ JvpParams jvp,
             const __grid_constant__ DropoutParams dropout) {
  __shared__ Smem smem;
  const int slots = gridDim.x / params.heads_q;
  const int head = blockIdx.x / slots, slot = blockIdx.x % slots;
  const int batch = blockIdx.z * gridDim.y + blockIdx.y;
  if (batch >= params.batch) return;
  // The last queries first: with a causal mask theirs is the most work.
  const int first_row = (slots - 1 - slot) * kTileM;
  if (threadIdx.x == 0) {
    const tile::Sequence seq = {batch, 0, 0, params.seqlen_q, params.seqlen_k, 0};
    const int kv_head = head / (params.heads_q / params.heads_kv);
    smem.work = {seq, visibility(params, seq), head};
    smem.rows[0] = matrix(params.q, params.q_stride, batch, 0, head, seq.seqlen_q, params.head_dim);
    smem.cols[0] =
        matrix(params.k, params.k_stride, batch, 0, kv_head, seq.seqlen_k, params.head_dim);
    smem.values[0] =
        matrix(params.v, params.v_stride, batch, 0, kv_head, seq.seqlen_k, params.head_dim_v);
    smem.rows[1] =
        matrix(jvp.tangent_q, jvp.tangent_q_stride, batch, 0, head, seq.seqlen_q, params.head_dim);
    smem.cols[1] = matrix(jvp.tangent_k, jvp.tangent_k_stride, batch, 0, kv_head, seq.seqlen_k,
                          params.head_dim);
    smem.values[1] = matrix(jvp.tangent_v, jvp.tangent_v_stride, batch, 0, kv_head, seq.seqlen_k,
                            params.head_dim_v);
  }
  __syncthreads();
  const int row = threadIdx.x / kThreadCols, col = threadIdx.x % kThreadCols;
  const int rows = min(kTileM, params.seqlen_q - first_row);
  const tile::Range keys = smem.work.visibility.keys_of_any(first_row, first_row + rows - 1);

  const Acc sink = params.sinks != nullptr ? static_cast<const Acc*>(params.sinks)[head]
                                           : tile::negative_infinity<Acc>();
// A sink is a key that comes before all others, has no value and does not move.
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (col == 0) smem.row_max[row + i * kThreadRows] = sink;
    smem.row_sum[i][threadIdx.x] = sink > tile::negative_infinity<Acc>() && col == 0 ? 1 : 0;
    smem.mean[i][threadIdx.x] = 0;
  }

  Acc o[kRows][kVecs][kVec] = {}, a[kRows][kVecs][kVec] = {};
#pragma unroll 1
  for (int key = max(keys.begin, 0) / kTileN * kTileN; key < keys.end; key += kTileN) {
    {
      // q k^T; then q k'^T and q' k^T, which are added.
      Acc s[kRows][kCols] = {};
#pragma unroll 1
      for (int n = 0; n < 3; ++n) {
        multiply(s, smem.slabs, smem.rows[n / 2], first_row, smem.cols[n % 2], key);
        if (n == 1) continue;
        // A slab's barriers stand between this and the last reads of the tile before.
        store(smem.scores.products[n / 2], s);
#pragma unroll
        for (int i = 0; i < kRows * kCols; ++i) s[i / kCols][i % kCols] = 0;
      }
    }
    // Until the barrier of the first slab of values a thread reads no scores but its own.
    apply_score_mod(smem.scores, params, smem.work, first_row, key);

#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int r = row + i * kThreadRows;
      Acc s[kCols];
      const Acc old_max = smem.row_max[r];
      Acc new_max = old_max;
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        s[j] = smem.scores.products[0][r][col + j * kThreadCols];
        new_max = fmax(new_max, s[j]);
      }
#pragma unroll
      for (int distance = kThreadCols / 2; distance > 0; distance /= 2)
        new_max = fmax(new_max, __shfl_xor_sync(~0u, new_max, distance));
      const Acc shift =
          new_max == tile::negative_infinity<Acc>() ? 0 : new_max;  // or -inf - -inf would be NaN
      const Acc rescale = exp(old_max - shift);
      __syncwarp();  // all threads of the row have read the old one
      if (col == 0) smem.row_max[r] = new_max;
      Acc sum = smem.row_sum[i][threadIdx.x] * rescale, mean = smem.mean[i][threadIdx.x] * rescale;
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        Acc& first = smem.scores.products[0][r][col + j * kThreadCols];
        Acc& second = smem.scores.products[1][r][col + j * kThreadCols];
        const Acc w = exp(s[j] - shift);
        const Acc product = w == 0 ? 0 : w * second;  // hidden keys may hold NaN
        sum += w;
        mean += product;
        first = w;
        second = product;
      }
      smem.row_sum[i][threadIdx.x] = sum;
      smem.mean[i][threadIdx.x] = mean;
#pragma unroll
      for (int c = 0; c < kVecs; ++c)
#pragma unroll
        for (int f = 0; f < kVec; ++f) {
          o[i][c][f] *= rescale;
          a[i][c][f] *= rescale;
        }
    }
    if (dropout.threshold != 0) {
      __syncthreads();  // all weights are there
      drop(smem.scores, dropout, batch * params.heads_q + head, first_row, key);
    }
    multiply_tile<kAtOnce>(o, smem.scores.products[0], smem.slab, smem.values[0], key);
    multiply_tile<kAtOnce>(a, smem.scores.products[1], smem.slab, smem.values[0], key);
    multiply_tile<kAtOnce>(a, smem.scores.products[0], smem.slab, smem.values[1], key);
  }

#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    Acc sum = smem.row_sum[i][threadIdx.x], mean = smem.mean[i][threadIdx.x];
#pragma unroll
    for (int distance = kThreadCols / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
      mean += __shfl_xor_sync(~0u, mean, distance);
    }
    if (sum == 0) sum = 1;  // no key was seen, and all sums are 0
    mean /= sum;
#pragma unroll
    for (int c = 0; c < kVecs; ++c)
#pragma unroll
      for (int f = 0; f < kVec; ++f) {
        o[i][c][f] /= sum;
        a[i][c][f] = fma(-mean, o[i][c][f], a[i][c][f] / sum);
      }
  }
  const long long first = static_cast<long long>(batch) * params.seqlen_q + first_row;
  write_rows(params.out, o, first, rows, params.heads_q, head, params.head_dim_v);
  write_rows(jvp.dout, a, first, rows, params.heads_q, head, params.head_dim_v);
}
