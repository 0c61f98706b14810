// What every forward attention kernel is told about one call. Mirrored field by field by
// FORWARD_PARAMS in cuattn/gpu/params.py; the order keeps every field at its natural alignment, so
// both sides agree on the bytes.
//
// Strides are in elements. A head_dim axis is always contiguous. With cu_seqlens_q set (varlen) q,
// k, v and out are (total, heads, head_dim): batch strides are 0, batch is the number of sequences,
// and seqlen_q, seqlen_k are the totals.
#pragma once

#include "tile/score_mod.cuh"
#include "tile/visibility.cuh"

using tile::ScoreStrides;

struct Strides {
  long long batch, seq, head;
};

struct ForwardParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  void* lse;  // float (double for float64 inputs) (batch, heads_q, seqlen_q) or (heads_q, total);
              // null: not wanted
  const void* bias;           // of the inputs' type, or float where bias_is_float32; null: none
  const unsigned char* mask;  // one byte a score, nonzero keeps; null: none
  const void* alibi_slopes;   // float (double for float64 inputs), strides below; null: none
  const void* sinks;          // float (double for float64 inputs) (heads_q,); null: none
  const int* cu_seqlens_q;    // (batch + 1,); null: not varlen
  const int* cu_seqlens_k;

  Strides q_stride, k_stride, v_stride, out_stride;
  ScoreStrides bias_stride, mask_stride;
  long long alibi_batch_stride;  // 0 for slopes of shape (heads_q,)

  double scale;    // of q·k
  double softcap;  // 0: none

  int batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v;
  // Query i sees keys j with  i + seqlen_k - seqlen_q - window_left <= j <= i + seqlen_k - seqlen_q
  // + window_right. causal has been folded into window_right = min(window_right, 0). kUnbounded on
  // a side: no limit there.
  int window_left, window_right;
  int bias_is_float32;
  int score_rows, score_cols;  // queries and keys that bias and mask have elements for
  // What packs rows of all query heads that share a key head: heads_q / heads_kv; how many queries
  // with all of these heads fit into 64 rows; and n / group = n * group_magic >> 16 for n < 64.
  int group, queries_of_64_rows;
  unsigned group_magic;
};

__device__ __forceinline__ tile::ScoreInputs score_inputs(const ForwardParams& params) {
  return {params.scale,           params.softcap,     params.bias,        params.mask,
          params.alibi_slopes,    params.bias_stride, params.mask_stride, params.alibi_batch_stride,
          params.bias_is_float32, params.score_rows,  params.score_cols};
}
