// Rows of a 16-bit result on their way from a warp's registers to global memory: through shared
// memory of the warp's own, in whole chunks of 16 bytes.
#pragma once

#include "tile/nonfinite.cuh"
#include "tile/softmax.cuh"

namespace tile {

// Puts 16 rows of accumulators, from `row` on, into a staged tile.
template <class T, class Tile, int n>
__device__ __forceinline__ void stage_rows(unsigned char* staged, const float (&o)[n], int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < n / 2; ++i) {
    const int at = Tile::at(row + lane / 4 + i % 2 * 8, i / 2) + lane % 4 * 4;
    *reinterpret_cast<unsigned*>(staged + at) = pack<T>(o[2 * i], o[2 * i + 1]);
  }
}

// Writes kRows staged rows of kColumns, of which the result has `rows` and `columns`. `whole`: its
// rows are whole chunks at multiples of 16 bytes. Passes after the finite one (tile::Content)
// change what that has left.
template <class Tile, int kRows, int kColumns, class T>
__device__ __forceinline__ void write_staged(T* result, long long row_stride,
                                             const unsigned char* staged, int rows, int columns,
                                             bool whole, int pass) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = lane; i < kRows * (kColumns / 8); i += 32) {
    const int row = i / (kColumns / 8), chunk = i % (kColumns / 8);
    if (row >= rows || chunk * 8 >= columns) continue;
    const unsigned char* elements = staged + Tile::at(row, chunk);
    T* target = result + row * row_stride + chunk * 8;
    if (whole && pass < kPositive) {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(elements);
    } else {
      for (int e = 0; e < min(8, columns - chunk * 8); ++e) {
        const T element = reinterpret_cast<const T*>(elements)[e];
        target[e] = pass < kPositive ? element : with_nonfinite(target[e], element, pass);
      }
    }
  }
}

}  // namespace tile
