// What the sampling kernels are told about one call. Mirrored field by field by SAMPLE_PARAMS in
// cuattn/gpu/params.py.
#pragma once

#include "sampling/amended.cuh"
#include "tile/philox.cuh"

// A parameter: one value a row where per_row is set, else one for all.
template <class T>
struct RowValue {
  const T* per_row;
  T value;

  __device__ __forceinline__ T operator[](int row) const { return per_row ? per_row[row] : value; }
};

// Seeds: one for each row where per_row is set, else one from which each row has a stream of its
// own, as row_seeds() of cuattn/_philox.py has it.
struct RowSeeds {
  const unsigned long long* per_row;
  unsigned long long value;

  __device__ __forceinline__ unsigned long long operator[](int row) const {
    return per_row ? per_row[row] : value + unsigned(row) * kPhiloxRowStep;
  }
};

struct SampleParams {
  const void* logits;  // (rows, vocab), row_stride elements apart
  int* tokens;         // (rows,); null: no draw
  float* filtered;     // (rows, vocab): logits over temperature; null: not wanted
  void* top_values;    // (rows, top_count) of the logits' type; null: not wanted
  int* top_indices;
  const Amended* amended;  // (rows, 2^amended_bits): logits to be had from there; null: none
  long long row_stride;
  RowSeeds seed;
  RowValue<unsigned long long> offset;
  RowValue<float> temperature, top_p, min_p, typical_p;
  RowValue<int> top_k;
  int vocab, top_count;
  int rest;  // whether only the rows are left whose token is kLater
  int kind;  // of the logits: 0 float32, 1 float16, 2 bfloat16
  int amended_bits;
};

constexpr int kLater = -2;  // in place of a token, if another kernel is to draw it
