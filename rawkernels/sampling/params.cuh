// The arguments of the kernels that draw tokens or filter logits; cuattn/gpu/params.py mirrors
// them.
#pragma once

#include "sampling/penalty_table.cuh"
#include "tile/philox.cuh"

// A parameter: one value a row where per_row is set, else one for all rows.
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
  int* tokens;         // (rows,); null: nothing is drawn
  float* filtered;     // (rows, vocab): filtered logits over temperature; null: not asked for
  void* top_values;    // (rows, top_count) of the logits' type; null: not asked for
  int* top_indices;
  const PenalizedLogit* penalty_table;  // (rows, 2^table_bits); null: logits are as they are
  long long row_stride;
  RowSeeds seed;
  RowValue<unsigned long long> offset;
  RowValue<float> temperature, top_p, min_p, typical_p;
  RowValue<int> top_k;
  int vocab, top_count;
  int only_fallback;  // whether to serve only rows whose token is kNeedsFallback
  int kind;           // of the logits: 0 float32, 1 float16, 2 bfloat16
  int table_bits;
};

// What sample_filtered.cu writes in place of a token, if filter.cu is to draw it.
constexpr int kNeedsFallback = -2;
