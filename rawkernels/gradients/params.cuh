// What the gradient kernels are told beside the forward call's ForwardParams, whose out and lse
// they read. Mirrored in cuattn/gpu/params.py. Acc: float, double for float64 inputs.
//
// What is written is contiguous: dq, dk and dv of the shapes of q, k and v.
#pragma once

#include "attention/params.cuh"
#include "tile/dropout.cuh"

struct BackwardParams {
  const void* dout;  // of out's shape and type
  const void* dlse;  // Acc, of lse's shape; null: none
  void* dq;
  void* dk;
  void* dv;
  void* delta;          // Acc, of lse's shape: sum(dout * out) - dlse; 0 in rows of no sequence
  void* dbias;          // Acc, of bias' shape
  void* dsinks;         // Acc (heads_q,)
  void* dalibi;         // Acc (heads_q,), or (batch, heads_q) where alibi_batched
  double* alibi_parts;  // what each block of the dq pass adds to dalibi; null: not wanted

  Strides dout_stride;
  int bias_batch, bias_heads, bias_rows, bias_cols;  // the lengths of bias' axes
  int alibi_batched;
  int alibi_slots;  // of alibi_parts, for each head: (batch, heads_q, slots) or (heads_q, slots)
  int alibi_tile;   // queries of a block of the dq pass

  int* nonfinite;  // becomes 1 where some gradient is not finite; null: nobody asks
  float*
      dq_sums;  // of dq's shape, what gradients/backward_sm80.cu adds up dq in; null: it does not
};

// Where a block of the dq pass leaves its part of dalibi.
__device__ __forceinline__ double* alibi_part(const ForwardParams& params,
                                              const BackwardParams& backward, int batch) {
  const int slots = backward.alibi_slots;
  const int head = blockIdx.x / slots, slot = blockIdx.x % slots;
  const long long row =
      params.cu_seqlens_q != nullptr ? head : static_cast<long long>(batch) * params.heads_q + head;
  return backward.alibi_parts + row * slots + slot;
}
