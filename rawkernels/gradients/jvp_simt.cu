// The derivative of attention in a direction (its Jacobian-vector product) in plain CUDA C++.
//
//   q, k, v, out and lse as the forward kernel has read and written them; the direction's q, k and
//   v of the shapes and type of q, k and v; dout of out's, contiguous.
//
//   One block has kTileM queries of one head and walks over the keys that they see:
//
//     p = exp(score - lse), s' = (q' k^T + q k'^T) * derivative of the score by q k^T
//     mu = sum p * s', dout = (p * z) v' + (p * z * s') v - mu * out          (z: dropout)
#include "gradients/tile_simt.cuh"

constexpr int kHeadDimV = Config::head_dim;  // padded, of v
constexpr int kVecs = kHeadDimV / (kThreadCols * kVec);
constexpr int kSlab = 16384 / (kHeadDimV * static_cast<int>(sizeof(Acc)));
constexpr int kSlabRows = kSlab < kChain ? kChain : least(kSlab, kTileN);

static_assert(!kKeysStationary, "rows are queries");
static_assert(kTileN % kSlabRows == 0, "whole slabs");

struct JvpParams {
  const void* tangent_q;
  const void* tangent_k;
  const void* tangent_v;
  void* dout;
  Strides tangent_q_stride, tangent_k_stride, tangent_v_stride;
};

struct Smem {
  ScoreTile scores;
  union {
    Slabs slabs;
    alignas(16) Acc slab[kSlabRows][kHeadDimV];
  };
  Statistics statistics;
  Work work;
  Matrix rows[2], cols[2], values[2];  // q, q'; k, k'; v, v'
  Acc mean[kTileM][kTileN / 16];       // mu, of each block of 16 keys
};

static_assert(sizeof(Smem) <= 48 * 1024, "static shared memory that every architecture has");

extern "C" __global__ void __launch_bounds__(Config::threads, Config::blocks_per_sm)
    jvp_simt(const __grid_constant__ ForwardParams params, const __grid_constant__ JvpParams jvp,
             const __grid_constant__ DropoutParams dropout) {
  __shared__ Smem smem;
  const int slots = gridDim.x / params.heads_q;
  const int head = blockIdx.x / slots, slot = blockIdx.x % slots;
  const int batch = blockIdx.z * gridDim.y + blockIdx.y;
  if (batch >= params.batch) return;
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
  for (int n = threadIdx.x; n < kTileM * (kTileN / 16); n += Config::threads)
    smem.mean[n / (kTileN / 16)][n % (kTileN / 16)] = 0;
  __syncthreads();
  const int rows = min(kTileM, params.seqlen_q - first_row);
  load_statistics(smem.statistics, params, nullptr, smem.work, first_row);
  const tile::Range keys = smem.work.visibility.keys_of_any(first_row, first_row + rows - 1);

  Acc dout[kRows][kVecs][kVec] = {};
#pragma unroll 1
  for (int key = max(keys.begin, 0) / kTileN * kTileN; key < keys.end; key += kTileN) {
    // q k^T; then q k'^T and q' k^T, which are added.
    Acc s[kRows][kCols] = {};
#pragma unroll 1
    for (int n = 0; n < 3; ++n) {
      multiply(s, smem.slabs, smem.rows[n / 2], first_row, smem.cols[n % 2], key);
      if (n == 1) continue;
      store(smem.scores.products[n / 2], s);
#pragma unroll
      for (int i = 0; i < kRows * kCols; ++i) s[i / kCols][i % kCols] = 0;
    }
    __syncthreads();
    visit_scores(smem.scores, smem.statistics, params, dropout, smem.work, first_row, key,
                 [&](const Score& score, Acc& p, Acc& pds) {
                   const Acc product = score.p == 0 ? 0 : score.p * score.second * score.derivative;
                   p = score.p * score.z;
                   pds = product;
                 });
    __syncthreads();
    // mu takes the products as they are, O those that dropout leaves.
    for (int n = threadIdx.x; n < kTileM * (kTileN / 16); n += Config::threads) {
      const int row = n / (kTileN / 16), block = n % (kTileN / 16);
      Acc sum = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        Acc& product = smem.scores.products[1][row][block * 16 + i];
        sum += product;
        if (dropout.threshold != 0)
          product *= smem.scores.products[0][row][block * 16 + i] == 0
                         ? 0
                         : static_cast<Acc>(dropout.scale);
      }
      smem.mean[row][block] += sum;
    }
    multiply_tile(dout, smem.scores.products[0], smem.slab, smem.values[1], key);
    multiply_tile(dout, smem.scores.products[1], smem.slab, smem.values[0], key);
  }
  __syncthreads();

  const int col = threadIdx.x % kThreadCols;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = threadIdx.x / kThreadCols + i * kThreadRows;
    if (row >= rows) continue;
    Acc mean = 0;
    for (int block = 0; block < kTileN / 16; ++block) mean += smem.mean[row][block];
    const T* out = static_cast<const T*>(params.out) + batch * params.out_stride.batch +
                   (first_row + row) * params.out_stride.seq + head * params.out_stride.head;
#pragma unroll
    for (int c = 0; c < kVecs; ++c)
#pragma unroll
      for (int f = 0; f < kVec; ++f) {
        const int column = (col + c * kThreadCols) * kVec + f;
        if (column < params.head_dim_v)
          dout[i][c][f] = fma(-mean, static_cast<Acc>(out[column]), dout[i][c][f]);
      }
  }
  write_rows(jvp.dout, dout, static_cast<long long>(batch) * params.seqlen_q + first_row, rows,
             params.heads_q, head, params.head_dim_v);
}
