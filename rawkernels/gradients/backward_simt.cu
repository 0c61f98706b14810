// Attention backward in plain CUDA C++: dq, or dk and dv, of every call of the contract, on any
// architecture.
//
//   q, k, v, dout as in attention/forward_simt.cu; lse and delta = sum(dout * out) - dlse, (batch,
//   heads_q, seqlen_q) or (heads_q, total). float16, bfloat16, float32, float64; sums, softmax and
//   shared memory are float, or double for float64.
//
//   Two passes, of which each block computes what nobody else adds to (FlashAttention-2, algorithm
//   2, but for the two loops): results are the same bits in every run, and need no memory beside
//   them. A block of the first pass has kTileM queries of one head and walks over the keys that
//   they see; one of the second (keys_stationary) has kTileM keys, and walks over the queries that
//   see them, of all heads that share them. For a tile of scores:
//
//     p = exp(score - lse), dx = p * (z * (dout v^T) - delta), ds = dx * derivative of the score by
//     q k^T dq += ds k     or     dk += ds^T q, dv += (p * z)^T dout          (z: dropout)
//
//   That is seven products where one pass would do with five.
#include "gradients/tile_simt.cuh"

constexpr int kHeadDim = Config::head_dim;  // padded: of q and k, or of v, if that is more
constexpr int kVecs = kHeadDim / (kThreadCols * kVec);
// Rows of a slab of the second factor: 16 KiB, or a chain.
constexpr int kSlab = 16384 / (kHeadDim * static_cast<int>(sizeof(Acc)));
constexpr int kSlabRows = kSlab < kChain ? kChain : least(kSlab, kTileN);

static_assert(kHeadDim % (kThreadCols * kVec) == 0, "threads cover the results evenly");
static_assert(kTileN % kSlabRows == 0, "whole slabs");

struct Smem {
  ScoreTile scores;
  union {
    Slabs slabs;
    alignas(16) Acc slab[kSlabRows][kHeadDim];
  };
  Statistics statistics;
  Work work;
  // With keys stationary k, v, q, dout; else q, dout, k, v: S and dP are rows[0] cols[0]^T and
  // rows[1] cols[1]^T.
  Matrix rows[2], cols[2];
  int head, first_row;  // of the block
  tile::Range columns;  // that some row sees, the first rounded down to a tile
  double alibi[Config::threads / 32];
};

static_assert(sizeof(Smem) <= 48 * 1024, "static shared memory that every architecture has");

// What tile::varlen_sequence wants to know, of rows as its queries.
struct Lengths {
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  int batch, seqlen_q, seqlen_k;
};

__device__ __forceinline__ Lengths lengths_of_rows(const ForwardParams& params) {
  if (kKeysStationary)
    return {params.cu_seqlens_k, params.cu_seqlens_q, params.batch, params.seqlen_k,
            params.seqlen_q};
  return {params.cu_seqlens_q, params.cu_seqlens_k, params.batch, params.seqlen_q, params.seqlen_k};
}

// Of one query head: (q, dout) or (k, v).
__device__ __forceinline__ void set_queries(Matrix (&matrices)[2], const ForwardParams& params,
                                            const BackwardParams& backward,
                                            const tile::Sequence& seq, int head) {
  matrices[0] = matrix(params.q, params.q_stride, seq.index, seq.begin_q, head, seq.seqlen_q,
                       params.head_dim);
  matrices[1] = matrix(backward.dout, backward.dout_stride, seq.index, seq.begin_q, head,
                       seq.seqlen_q, params.head_dim_v);
}

__device__ __forceinline__ void set_keys(Matrix (&matrices)[2], const ForwardParams& params,
                                         const tile::Sequence& seq, int head) {
  matrices[0] = matrix(params.k, params.k_stride, seq.index, seq.begin_k, head, seq.seqlen_k,
                       params.head_dim);
  matrices[1] = matrix(params.v, params.v_stride, seq.index, seq.begin_k, head, seq.seqlen_k,
                       params.head_dim_v);
}

extern "C" __global__ void __launch_bounds__(Config::threads, Config::blocks_per_sm)
    backward_simt(const __grid_constant__ ForwardParams params,
                  const __grid_constant__ BackwardParams backward,
                  const __grid_constant__ DropoutParams dropout) {
  __shared__ Smem smem;
  const int heads = kKeysStationary ? params.heads_kv : params.heads_q;
  const int slots = gridDim.x / heads;
  const int head = blockIdx.x / slots, slot = blockIdx.x % slots;
  tile::Sequence found;
  if (params.cu_seqlens_q != nullptr) {
    found = tile::varlen_sequence<kTileM>(lengths_of_rows(params), slot);
    if (kKeysStationary)
      found = {found.index,    found.begin_k,  found.begin_q,
               found.seqlen_k, found.seqlen_q, found.tile};
  } else {
    const int batch = blockIdx.z * gridDim.y + blockIdx.y;
    // With a causal mask the last queries, and the first keys, are the most work.
    found = {
        batch, 0, 0, params.seqlen_q, params.seqlen_k, kKeysStationary ? slot : slots - 1 - slot};
  }
  if (found.index >= params.batch) return;
  const bool grad_alibi = !kKeysStationary && backward.alibi_parts != nullptr;
  if (found.tile < 0) {
    if (grad_alibi && threadIdx.x == 0) *alibi_part(params, backward, found.index) = 0;
    return;
  }

  const tile::Sequence& seq = smem.work.seq;  // where it takes no registers
  const int group = params.heads_q / params.heads_kv;
  const int first_row = found.tile * kTileM;
  if (threadIdx.x == 0) {
    smem.work = {found, visibility(params, found), head};
    if (kKeysStationary) {
      set_keys(smem.rows, params, seq, head);
    } else {
      set_queries(smem.rows, params, backward, seq, head);
      set_keys(smem.cols, params, seq, head / group);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const int rows = kKeysStationary ? seq.seqlen_k : seq.seqlen_q;
    const int last_row = min(first_row + kTileM, rows) - 1;
    tile::Range columns = kKeysStationary ? smem.work.visibility.rows_of_any(first_row, last_row)
                                          : smem.work.visibility.keys_of_any(first_row, last_row);
    if (kKeysStationary) columns.end = min(columns.end, seq.seqlen_q);
    columns.begin = max(columns.begin, 0) / kTileN * kTileN;
    smem.columns = columns;
    smem.head = head;
    smem.first_row = first_row;
  }
  if (!kKeysStationary)
    load_statistics(smem.statistics, params, backward.delta, smem.work, first_row);
  __syncthreads();

  Acc first[kRows][kVecs][kVec] = {};   // dq, or dk
  Acc second[kRows][kVecs][kVec] = {};  // dv
  double alibi = 0;
#pragma unroll 1
  for (int h = 0; h < (kKeysStationary ? group : 1); ++h) {
    if (kKeysStationary) {
      __syncthreads();  // the head before this is done
      if (threadIdx.x == 0) {
        smem.work.head = smem.head * group + h;
        set_queries(smem.cols, params, backward, seq, smem.work.head);
      }
      __syncthreads();
    }
#pragma unroll 1
    for (int column = smem.columns.begin; column < smem.columns.end; column += kTileN) {
      if (kKeysStationary)
        load_statistics(smem.statistics, params, backward.delta, smem.work, column);
#pragma unroll 1
      for (int n = 0; n < 2; ++n) {
        Acc s[kRows][kCols] = {};
        multiply(s, smem.slabs, smem.rows[n], smem.first_row, smem.cols[n], column);
        store(smem.scores.products[n], s);
      }
      __syncthreads();
      const int first_query = kKeysStationary ? column : smem.first_row;
      const int first_key = kKeysStationary ? smem.first_row : column;
      visit_scores(smem.scores, smem.statistics, params, dropout, smem.work, first_query, first_key,
                   [&](const Score& score, Acc& p, Acc& ds) {
                     const Acc dx = score_gradient(score);
                     p = score.p * score.z;
                     ds = score.p == 0 ? 0 : dx * score.derivative;
                     if (grad_alibi) {
                       const int distance = first_query + score.query + seq.seqlen_k -
                                            seq.seqlen_q - first_key - score.key;
                       alibi -= static_cast<double>(dx) * abs(distance);
                     }
                   });
      multiply_tile(first, smem.scores.products[1], smem.slab, smem.cols[0], column);
      if (kKeysStationary)
        multiply_tile(second, smem.scores.products[0], smem.slab, smem.cols[1], column);
    }
  }

  const long long index = params.cu_seqlens_q != nullptr ? 0 : seq.index;
  const int rows = min(kTileM, (kKeysStationary ? seq.seqlen_k : seq.seqlen_q) - smem.first_row);
  if (kKeysStationary) {
    const long long row = index * params.seqlen_k + seq.begin_k + smem.first_row;
    write_rows(backward.dk, first, row, rows, heads, smem.head, params.head_dim);
    write_rows(backward.dv, second, row, rows, heads, smem.head, params.head_dim_v);
  } else {
    const long long row = index * params.seqlen_q + seq.begin_q + smem.first_row;
    write_rows(backward.dq, first, row, rows, heads, smem.head, params.head_dim);
  }
  if (grad_alibi) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      alibi += __shfl_xor_sync(~0u, alibi, distance);
    if (threadIdx.x % 32 == 0) smem.alibi[threadIdx.x / 32] = alibi;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int warp = 1; warp < Config::threads / 32; ++warp) alibi += smem.alibi[warp];
      *alibi_part(params, backward, seq.index) = alibi;
    }
  }
}
