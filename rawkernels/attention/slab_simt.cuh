// Copies slabs of Q, K and V for attention/forward_simt.cu from global to shared memory.
#pragma once

#include "attention/params.cuh"
#include "tile/accumulator.cuh"
#include "tile/vec.cuh"

using T = Config::dtype;
using Acc = tile::Accumulator<T>;

constexpr int kVec = 16 / sizeof(Acc);  // shared memory is read and written 16 bytes at a time

using Vec = tile::Vec<Acc, kVec>;
using Packed = tile::Vec<T, kVec>;  // as they are in global memory

// Rows of one head of one sequence in global memory.
struct Matrix {
  const T* data;
  long long stride;
  int rows, columns;
  bool packed;  // every row starts where a Packed may, and holds a whole number of them
};

__device__ Matrix matrix(const void* base, const Strides& strides, int batch, long long first_row,
                         int head, int rows, int columns) {
  const T* data = static_cast<const T*>(base) + batch * strides.batch + first_row * strides.seq +
                  head * strides.head;
  const long long bytes =
      reinterpret_cast<long long>(data) | strides.seq * static_cast<long long>(sizeof(T));
  const bool packed = bytes % static_cast<long long>(sizeof(Packed)) == 0 && columns % kVec == 0;
  return {data, strides.seq, rows, columns, packed};
}

// Copies kSlabRows x kColumns elements from (row, column) on into a slab; zeros past the matrix's
// end, so that nothing beyond it is multiplied. Returns whether this thread saw an infinity or a
// NaN.
template <int kColumns, int kSlabRows, int kPitch>
__device__ __forceinline__ bool load_slab(Acc (&slab)[kSlabRows][kPitch], Matrix from, int row,
                                          int column) {
  bool nonfinite = false;
  if (from.packed) {
    constexpr int kRowVecs = kColumns / kVec;
    constexpr int kRowsAtOnce = Config::threads / kRowVecs;
    constexpr int kLoads = (kSlabRows + kRowsAtOnce - 1) / kRowsAtOnce;
    const int r = threadIdx.x / kRowVecs, c = threadIdx.x % kRowVecs * kVec;
    const T* source = from.data + (row + r) * from.stride + column + c;
    Packed loaded[kLoads];  // all on their way before the first is used
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool inside = row + r + i * kRowsAtOnce < from.rows && column + c < from.columns;
      loaded[i] = inside ? *reinterpret_cast<const Packed*>(source) : Packed{};
      source += kRowsAtOnce * from.stride;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      Vec values;
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        values.x[e] = static_cast<Acc>(loaded[i].x[e]);
        nonfinite |= !isfinite(values.x[e]);
      }
      if (r + i * kRowsAtOnce < kSlabRows)
        reinterpret_cast<Vec&>(slab[r + i * kRowsAtOnce][c]) = values;
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < kSlabRows * kColumns; i += Config::threads) {
      const int r = i / kColumns, c = i % kColumns;
      const bool inside = row + r < from.rows && column + c < from.columns;
      const Acc value =
          inside ? static_cast<Acc>(from.data[(row + r) * from.stride + column + c]) : 0;
      nonfinite |= !isfinite(value);
      slab[r][c] = value;
    }
  }
  return nonfinite;
}
