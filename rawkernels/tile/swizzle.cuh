// Swizzled tiles in shared memory: the 16-byte chunks of a row are permuted from row to row, so
// that neither writes of whole rows (cp.async, TMA) nor ldmatrix's reads of one chunk of eight rows
// meet in a bank. TileLoader copies tiles of 16-bit rows by cp.async.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"

namespace tile {

// Panels of kPanelChunks chunks a row, row after row; a tile of more chunks a row has more panels,
// kPanelBytes apart. Rows of a multiple of 128 bytes permute groups of eight chunks by row % 8, as
// TMA's 128-byte swizzle does; rows of 64 bytes more permute groups of four by row / 2 % 4, since
// every second one starts in the middle of the banks; rows of 32 bytes pairs by row / 4 % 2.
template <int kPanelChunks, int kPanelBytes = 0>
struct Swizzled {
  static_assert(kPanelChunks % 4 == 0 || kPanelChunks == 2,
                "rows must be of 32 bytes, or multiples of 64");
  static constexpr int kRowBytes = kPanelChunks * 16;
  static constexpr int kGroup =  // chunks permuted among themselves
      kPanelChunks % 8 == 0   ? 8
      : kPanelChunks % 4 == 0 ? 4
                              : 2;
  static constexpr int kGroups = kPanelChunks / kGroup;
  static constexpr bool kOnePanel = kPanelBytes == 0;

  // Where a chunk lies in a tile, in bytes.
  __device__ __forceinline__ static int at(int row, int chunk) {
    const int panel = kOnePanel ? 0 : chunk / kPanelChunks;
    const int in_panel = kOnePanel ? chunk : chunk % kPanelChunks;
    return panel * kPanelBytes + row * kRowBytes + (in_panel ^ row / (8 / kGroup) % kGroup) * 16;
  }

  // Where this lane reads for the four 8×8 matrices of rows 0-15 and chunks 0-1; rows 16i on are at
  // + 16i * kRowBytes. Row-major order (rows 0-7 and 8-15 of chunk 0, then of chunk 1) loads an A
  // fragment, and with .trans the B fragments of two n8 blocks of a row-major B; column-major order
  // (chunks 0 and 1 of rows 0-7, then of rows 8-15) those of a column-major B, and with .trans an A
  // fragment of the transpose.
  __device__ __forceinline__ static unsigned lane_row_major() {
    const int lane = threadIdx.x % 32;
    return at(lane % 16, lane / 16);
  }
  __device__ __forceinline__ static unsigned lane_column_major() {
    const int lane = threadIdx.x % 32;
    return at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }

  // The same address for chunks 2i and 2i + 1. It may include the tile's, a multiple of 128.
  __device__ __forceinline__ static unsigned at_chunks(unsigned address, int i) {
    const int panel = kOnePanel ? 0 : i / (kPanelChunks / 2);
    const int in_panel = kOnePanel ? i : i % (kPanelChunks / 2);
    return (address ^ (in_panel % (kGroup / 2) * 32)) + in_panel / (kGroup / 2) * (kGroup * 16) +
           panel * kPanelBytes;
  }
};

// What a tile holds of a matrix: its values; the finite ones, and zeros for others; ones for NaN
// and inf; ones for NaN and -inf.
enum Content { kValues, kFinite, kPositive, kNegative };

// Copies tiles of kRows rows of a global matrix, whose columns are contiguous, to shared memory, by
// kThreads threads and cp.async.
template <class T, class Tile, int kRows, int kThreads>
class TileLoader {
  static_assert(sizeof(T) == 2, "a chunk must hold eight elements");
  static constexpr int kCols = Tile::kRowBytes / 2;
  static constexpr int kRowsPerPass = kThreads / Tile::kGroup;
  static_assert(kThreads % (8 * Tile::kGroup) == 0 && kRows % kRowsPerPass == 0,
                "a thread's permutation is the same in every pass");

  const T* matrix_;
  long long row_stride_;
  int cols_;
  bool aligned_;
  const T* source_;  // this thread's first chunk of row 0
  unsigned target_;  // … and of a tile

 public:
  // Without `aligned`, rows may start at any element, and go through registers.
  __device__ __forceinline__ TileLoader(const T* matrix, long long row_stride, int cols,
                                        bool aligned)
      : matrix_(matrix), row_stride_(row_stride), cols_(cols), aligned_(aligned) {
    const int row = threadIdx.x / Tile::kGroup, chunk = threadIdx.x % Tile::kGroup;
    source_ = matrix + row * row_stride + chunk * 8;
    target_ = Tile::at(row, chunk);
  }

  // Of a thread's chunk in a tile, from that of its first pass and group.
  __device__ __forceinline__ static int offset(int pass, int group) {
    return pass * kRowsPerPass * Tile::kRowBytes + group * Tile::kGroup * 16;
  }

  // Rows first_row on, but only `content` of them. Rows outside [begin, end) and columns from cols
  // on become zeros and are not read: what lies there may be NaN, and 0 · NaN is NaN.
  __device__ __forceinline__ void load(unsigned tile, int first_row, int begin, int end,
                                       int content = kValues) const {
    const bool chunks = aligned_ && content == kValues;
    if (chunks && cols_ == kCols && begin <= first_row && first_row + kRows <= end) {
      const long long row_stride = ptx::opaque_uniform(row_stride_);
      const T* source = source_ + first_row * row_stride;
#pragma unroll
      for (int pass = 0; pass < kRows / kRowsPerPass; ++pass) {
#pragma unroll
        for (int group = 0; group < Tile::kGroups; ++group)
          ptx::cp_async_16(tile + target_ + offset(pass, group), source + group * Tile::kGroup * 8);
        source += kRowsPerPass * row_stride;
      }
    } else {
      load_edge(tile, first_row, begin, end, chunks, content);
    }
  }

  // Copies the first `count` elements of a chunk, or what of them is `content`; zeros follow.
  __device__ __forceinline__ static void copy_elements(unsigned target, const T* source, int count,
                                                       int content) {
    T chunk[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      chunk[i] = i < count ? source[i] : static_cast<T>(0.0f);
      if (content == kValues) continue;
      const float value = static_cast<float>(chunk[i]);
      const bool finite = fabsf(value) <= 3.402823466e38f;
      const bool counts = !finite && (content == kPositive ? !(value < 0.0f) : !(value > 0.0f));
      chunk[i] = content == kFinite ? (finite ? chunk[i] : static_cast<T>(0.0f))
                                    : static_cast<T>(counts ? 1.0f : 0.0f);
    }
    *static_cast<uint4*>(__cvta_shared_to_generic(target)) = reinterpret_cast<const uint4&>(chunk);
  }

 private:
  __device__ __forceinline__ void load_edge(unsigned tile, int first_row, int begin, int end,
                                            bool chunks, int content) const {
    const int thread = ptx::thread_index();  // nothing for this rare path is kept in registers
    const int row = thread / Tile::kGroup, chunk = thread % Tile::kGroup;
    const T* source = matrix_ + (static_cast<long long>(first_row) + row) * row_stride_ + chunk * 8;
    tile += Tile::at(row, chunk);
#pragma unroll
    for (int pass = 0; pass < kRows / kRowsPerPass; ++pass) {
      const unsigned from_begin = first_row + row + pass * kRowsPerPass - begin;
      const bool inside = from_begin < static_cast<unsigned>(end - begin);
#pragma unroll
      for (int group = 0; group < Tile::kGroups; ++group) {
        const int count = inside ? cols_ - (chunk + group * Tile::kGroup) * 8 : 0;
        if (chunks)
          ptx::cp_async_16(tile + offset(pass, group), source + group * Tile::kGroup * 8,
                           count > 0);
        else
          copy_elements(tile + offset(pass, group), source + group * Tile::kGroup * 8, count,
                        content);
      }
      source += kRowsPerPass * row_stride_;
    }
  }
};

}  // namespace tile
