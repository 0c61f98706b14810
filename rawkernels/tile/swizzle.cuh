// Tiles of 16-bit rows in shared memory, in 16-byte chunks whose order is permuted from row to row, so that neither cp.async's
// writes of whole rows nor ldmatrix's reads of one chunk of eight rows meet in a bank: rows of an even number of 64-byte
// pieces permute groups of eight chunks by row % 8, others groups of four by row / 2 % 4 (their odd rows start half way).
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "ptx/thread_index.cuh"

namespace tile {

template <class T, int kCols>
struct SwizzledTile {
  static_assert(sizeof(T) == 2 && kCols % 32 == 0, "rows are whole pieces of 64 bytes");
  static constexpr int kRowBytes = kCols * 2;
  static constexpr int kGroup = kCols % 64 == 0 ? 8 : 4;  // chunks permuted among themselves
  static constexpr int kGroups = kCols / 8 / kGroup;

  __device__ __forceinline__ static int permuted(int row, int chunk) {
    return chunk ^ (kGroup == 8 ? row % 8 : row / 2 % 4);
  }

  // Where this lane reads for the four 8×8 matrices of rows 0-15 and chunks 0-1. Row-major order (rows 0-7 and 8-15 of chunk 0, then of chunk
  // 1) loads an A fragment, and with .trans the B fragments of two n8 blocks of a row-major B; column-major order (chunks 0 and 1 of
  // rows 0-7, then of rows 8-15) those of a column-major B. Rows 16i on are at + 16i * kRowBytes.
  __device__ __forceinline__ static unsigned lane_offset_row_major() {
    const int lane = threadIdx.x % 32;
    return lane % 16 * kRowBytes + permuted(lane % 16, lane / 16) * 16;
  }
  __device__ __forceinline__ static unsigned lane_offset_column_major() {
    const int lane = threadIdx.x % 32;
    const int row = lane % 8 + lane / 16 * 8;
    return row * kRowBytes + permuted(row, lane / 8 % 2) * 16;
  }

  // The same of chunks 2i and 2i + 1; tile + lane_offset() may be passed too, for a tile at a multiple of 128 bytes.
  __device__ __forceinline__ static unsigned at_chunks(unsigned offset, int i) {
    return (offset ^ (i % (kGroup / 2) * 32)) + i / (kGroup / 2) * (kGroup * 16);
  }

  // Rows first_row, first_row + 1 … of a matrix to rows 0 … kRows - 1 of a tile, by kThreads threads; zeros for rows outside
  // [begin, end) and columns from `cols` on, which are not read: what lies there may be NaN, and 0 · NaN is NaN. Without
  // kAligned rows may start anywhere, and go through registers.
  template <int kRows, int kThreads>
  __device__ __forceinline__ static void load(unsigned tile, const T* matrix, long long row_stride, int cols, int first_row,
                                              int begin, int end, bool aligned) {
    constexpr int kRowsPerPass = kThreads / kGroup;
    static_assert(kThreads % (8 * kGroup) == 0 && kRows % kRowsPerPass == 0, "whole passes keep a thread's permutation");
    const int thread = ptx::thread_index();
    const int row = thread / kGroup, chunk = thread % kGroup;
    const T* source = matrix + (static_cast<long long>(first_row) + row) * row_stride + chunk * 8;
    const unsigned rows = end - begin;
    tile += row * kRowBytes + permuted(row, chunk) * 16;
#pragma unroll
    for (int pass = 0; pass < kRows / kRowsPerPass; ++pass) {
      const bool inside = static_cast<unsigned>(first_row + row + pass * kRowsPerPass - begin) < rows;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int rest = cols - (chunk + group * kGroup) * 8;
        const unsigned target = tile + pass * kRowsPerPass * kRowBytes + group * kGroup * 16;
        if (aligned)
          ptx::cp_async_16(target, source + group * kGroup * 8, inside && rest > 0);
        else
          copy_elements(target, source + group * kGroup * 8, inside ? rest : 0);
      }
      source += kRowsPerPass * row_stride;
    }
  }

 private:
  __device__ __forceinline__ static void copy_elements(unsigned target, const T* source, int count) {
    unsigned short chunk[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) chunk[i] = i < count ? reinterpret_cast<const unsigned short*>(source)[i] : 0;
    *static_cast<uint4*>(__cvta_shared_to_generic(target)) = reinterpret_cast<const uint4&>(chunk);
  }
};

}  // namespace tile
