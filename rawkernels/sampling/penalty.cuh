// What is asked for before anything else is done with the logits, and what it makes of one of them.
// Mirrored field by field by PENALTY_PARAMS in cuattn/gpu/params.py.
#pragma once

#include "sampling/params.cuh"
#include "sampling/row.cuh"

struct PenaltyParams {
  const int* tokens;       // (rows, length) contiguous, -1 for none
  const float* bias;       // (rows, vocab), bias_stride apart; null: none
  const int* triple_rows;  // (triples,) each
  const int* triple_tokens;
  const float* triple_values;
  const void* allowed;  // bytes, or bits of 32-bit words if packed; null: all
  long long bias_stride, allowed_stride;
  RowValue<float> repetition, frequency, presence;
  int length, triples, packed;
  int any;  // whether anything is to be done
};

// Rounded as NumPy rounds: to float16 at once, to bfloat16, as ml_dtypes does, by way of float32.
__device__ __forceinline__ float rounded(double y, __half) {
  return __half2float(__double2half(y));
}
__device__ __forceinline__ float rounded(double y, __nv_bfloat16) {
  return to_float(__nv_bfloat16(float(y)));
}
__device__ __forceinline__ float rounded(double y, float) { return float(y); }

// What the logit y becomes of a token that was met `count` times; biases come on top.
__device__ __forceinline__ double penalised(const PenaltyParams& params, int row, double y,
                                            int count) {
  if (count == 0) return y;
  const double repetition = params.repetition[row];
  y = y > 0.0 ? y / repetition : y * repetition;
  y -= double(params.frequency[row]) * count;
  return y - double(params.presence[row]);
}
