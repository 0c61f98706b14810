// The gradient of a bias, summed over the axes along which the bias was broadcast, in plain CUDA
// C++.
//
//   dbias (bias_batch, bias_heads, bias_rows, bias_cols), each of the scores' length or 1. Other
//   arrays as in gradients/backward_simt.cu.
//
//   A block owns kTileM x kTileN numbers of dbias, or all along an axis of length 1, and computes
//   every tile of scores that adds to them, one after the other: q·k and dout·v once more, but no
//   atomic additions, and so the same bits in every run. Sums are double: there may be as many
//   terms as there are scores.
#include "gradients/tile_simt.cuh"

struct Smem {
  ScoreTile scores;
  Slabs slabs;
  Statistics statistics;
  Work work;
  Matrix rows[2], cols[2];  // q and dout; k and v
  double sums[kTileM][kTileN];
};

static_assert(!kKeysStationary, "rows are queries");
static_assert(sizeof(Smem) <= 48 * 1024, "static shared memory that every architecture has");

struct Tiles {
  int first, end;  // positions, of which every kTile-th begins a tile
};

// The tiles of scores along one axis that a block adds up: one, or all where bias has length 1.
__device__ __forceinline__ Tiles tiles(int bias_length, int length, int block, int tile) {
  if (bias_length == 1) return {0, length};
  return {block * tile, min(block * tile + tile, length)};
}

extern "C" __global__ void __launch_bounds__(Config::threads, Config::blocks_per_sm)
    bias_simt(const __grid_constant__ ForwardParams params,
              const __grid_constant__ BackwardParams backward,
              const __grid_constant__ DropoutParams dropout) {
  __shared__ Smem smem;
  // Along x: tiles of columns, then of rows, then heads, then the batch.
  const int tiles_n = (backward.bias_cols + kTileN - 1) / kTileN;
  const int tiles_m = (backward.bias_rows + kTileM - 1) / kTileM;
  int block = blockIdx.x;
  const int tile_n = block % tiles_n;
  block /= tiles_n;
  const int tile_m = block % tiles_m;
  block /= tiles_m;
  const int bias_head = block % backward.bias_heads, bias_batch = block / backward.bias_heads;

  const Tiles rows = tiles(backward.bias_rows, params.seqlen_q, tile_m, kTileM);
  const Tiles cols = tiles(backward.bias_cols, params.seqlen_k, tile_n, kTileN);
  const Tiles heads = tiles(backward.bias_heads, params.heads_q, bias_head, 1);
  const Tiles batches = tiles(backward.bias_batch, params.batch, bias_batch, 1);
  for (int n = threadIdx.x; n < kTileM * kTileN; n += Config::threads)
    smem.sums[n / kTileN][n % kTileN] = 0;

  for (int batch = batches.first; batch < batches.end; ++batch)
    for (int head = heads.first; head < heads.end; ++head) {
      __syncthreads();  // the head before this is done
      if (threadIdx.x == 0) {
        const tile::Sequence seq = {batch, 0, 0, params.seqlen_q, params.seqlen_k, 0};
        const int kv_head = head / (params.heads_q / params.heads_kv);
        smem.work = {seq, visibility(params, seq), head};
        smem.rows[0] =
            matrix(params.q, params.q_stride, batch, 0, head, seq.seqlen_q, params.head_dim);
        smem.cols[0] =
            matrix(params.k, params.k_stride, batch, 0, kv_head, seq.seqlen_k, params.head_dim);
        smem.cols[1] =
            matrix(params.v, params.v_stride, batch, 0, kv_head, seq.seqlen_k, params.head_dim_v);
        smem.rows[1] = matrix(backward.dout, backward.dout_stride, batch, 0, head, seq.seqlen_q,
                              params.head_dim_v);
      }
      __syncthreads();
      for (int row = rows.first; row < rows.end; row += kTileM) {
        const tile::Range seen =
            smem.work.visibility.keys_of_any(row, min(row + kTileM, params.seqlen_q) - 1);
        for (int col = cols.first; col < cols.end; col += kTileN) {
          if (!seen.overlaps(col, kTileN)) continue;
          load_statistics(smem.statistics, params, backward.delta, smem.work, row);
#pragma unroll 1
          for (int n = 0; n < 2; ++n) {
            Acc s[kRows][kCols] = {};
            multiply(s, smem.slabs, smem.rows[n], row, smem.cols[n], col);
            store(smem.scores.products[n], s);
          }
          __syncthreads();
          visit_scores(smem.scores, smem.statistics, params, dropout, smem.work, row, col,
                       [&](const Score& score, Acc&, Acc&) {
                         smem.sums[score.query][score.key] += score_gradient(score);
                       });
          __syncthreads();  // before other statistics
        }
      }
    }
  __syncthreads();

  const int rows_out = min(kTileM, backward.bias_rows - tile_m * kTileM);
  const int cols_out = min(kTileN, backward.bias_cols - tile_n * kTileN);
  const int rows_each = backward.bias_rows == 1 ? kTileM : 1;
  const int cols_each = backward.bias_cols == 1 ? kTileN : 1;
  for (int n = threadIdx.x; n < rows_out * cols_out; n += Config::threads) {
    const int row = n / cols_out, col = n % cols_out;
    double sum = 0;
    for (int i = 0; i < rows_each; ++i)
      for (int j = 0; j < cols_each; ++j) sum += smem.sums[row + i][col + j];
    const long long line = (static_cast<long long>(bias_batch) * backward.bias_heads + bias_head) *
                               backward.bias_rows +
                           tile_m * kTileM + row;
    static_cast<Acc*>(backward.dbias)[line * backward.bias_cols + tile_n * kTileN + col] =
        static_cast<Acc>(sum);
  }
}
