// What the decoding kernels are told about one call. Declared as DECODE_PARAMS in
// cuattn/gpu/params.py too; the order keeps every field at its natural alignment, so both sides
// agree on the bytes.
//
// q and out are (batch, seqlen_q, heads_q, head_dim), or with cu_seqlens_q (total, heads_q,
// head_dim): batch strides are then 0 and seqlen_q is the total. k and v are pages (num_pages,
// page_size, heads_kv, head_dim), or without a page table contiguous caches (batch, capacity,
// heads_kv, head_dim), which are read as one page for each sequence. Strides are in elements.
#pragma once

#include "attention/params.cuh"
#include "kvcache/pages.cuh"

struct DecodeParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;  // of the inputs' type, or of the accumulators' where out_is_acc
  void* lse;  // float (double for float64), strides over batch and heads below; null: not wanted
  const void* alibi_slopes;      // float (double for float64); null: none
  const void* sinks;             // float (double for float64) (heads_q,); null: none
  const int* page_table;         // null: contiguous
  const int* seq_lens;           // null: every sequence has `capacity` keys
  const int* cu_seqlens_q;       // null: seqlen_q queries for each sequence
  void* workspace;               // for partial results
  unsigned long long launch_id;  // a random number of this launch's own

  Strides q_stride, out_stride;
  PageStrides k_stride, v_stride;
  long long table_stride;        // of the page table's rows
  long long alibi_batch_stride;  // 0 for slopes of shape (heads_q,)
  long long lse_batch_stride, lse_head_stride;

  double scale;    // of q·k
  double softcap;  // 0: none

  int batch, seqlen_q, capacity, heads_q, heads_kv, head_dim, head_dim_v;
  int window_left, window_right;  // as in ForwardParams, with a sequence's length as its seqlen_k
  int page_shift;                 // log2 of the page size; 30 for contiguous caches
  int num_pages;                  // of a contiguous cache: batch
  int first_key;                  // keys before it are not read: they are merged in from elsewhere
  int fixed_splits;     // nonzero: every block of keys is a split; else a thread block's are one
  int kv_block_shift;   // log2 of the keys of a block: with fixed_splits, unless num_splits says;
                        // else at least
  int num_splits;       // 0: not given
  int heads_per_block;  // gridDim.x thread blocks share heads_kv heads
  int group, group_shift;  // heads_q / heads_kv; n / group = n * group_magic >> group_shift
  unsigned group_magic;
  int out_is_acc;
  int single_tile;  // a thread block's heads have one work tile: nothing is to be searched for

  // Of keys and values that are codes (tile/quantized.cuh), whose strides are then in bytes. Scales
  // and minima are bfloat16, or float; a null minimum is 0. Offsets are (heads_kv, head_dim), or
  // null.
  const void* k_scale;
  const void* k_minimum;
  const float* k_offset;
  const void* v_scale;
  const void* v_minimum;
  const float* v_offset;
  ScaleStrides k_scale_stride, k_minimum_stride, v_scale_stride, v_minimum_stride;
  int k_format, v_format;  // tile::Format
  int k_group, v_group;    // neighbouring features that share a scale
  int k_scale_is_float, v_scale_is_float;
  int k_rotated, v_rotated;
  int max_queries;  // sequences of more are left to another launch
};

// Beside it, for the kernels that serve them: bias and mask, as in ForwardParams.
struct ScoreParams {
  const void* bias;
  const unsigned char* mask;
  ScoreStrides bias_stride, mask_stride;
  int bias_is_float32, score_rows, score_cols;
};

// Both, for kernels that take one struct.
struct ScoredDecodeParams : DecodeParams {
  ScoreParams scores;
};
static_assert(sizeof(ScoredDecodeParams) == sizeof(DecodeParams) + sizeof(ScoreParams),
              "the launching code packs the one after the other");

template <bool kElementwise>
struct DecodeParamsOf {
  using Type = DecodeParams;
};
template <>
struct DecodeParamsOf<true> {
  using Type = ScoredDecodeParams;
};

__device__ __forceinline__ tile::ScoreInputs score_inputs(const DecodeParams& params) {
  tile::ScoreInputs inputs = {};
  inputs.scale = params.scale;
  inputs.softcap = params.softcap;
  inputs.alibi_slopes = params.alibi_slopes;
  inputs.alibi_batch_stride = params.alibi_batch_stride;
  return inputs;
}

__device__ __forceinline__ tile::ScoreInputs score_inputs(const DecodeParams& params,
                                                          const ScoreParams& scores) {
  tile::ScoreInputs inputs = score_inputs(params);
  inputs.bias = scores.bias;
  inputs.mask = scores.mask;
  inputs.bias_stride = scores.bias_stride;
  inputs.mask_stride = scores.mask_stride;
  inputs.bias_is_float32 = scores.bias_is_float32;
  inputs.rows = scores.score_rows;
  inputs.cols = scores.score_cols;
  return inputs;
}

__device__ __forceinline__ kvcache::PageTable page_table(const DecodeParams& params) {
  return {params.page_table, params.table_stride, params.page_shift, params.num_pages};
}

__device__ __forceinline__ int divided_by_group(const DecodeParams& params, int n) {
  return static_cast<int>(static_cast<unsigned long long>(n) * params.group_magic >>
                          params.group_shift);
}
