// Keys and values that lie in caches or pages, as attention/forward_sm80.cu reads them: the rows of
// a tile are looked up in the page table one by one, and their chunks copied by cp.async.
#pragma once

#include "attention/params.cuh"
#include "kvcache/pages.cuh"
#include "tile/ragged.cuh"
#include "tile/swizzle.cuh"

// Beside ForwardParams, whose strides of k and v over the batch are then those over pages, and
// whose seqlen_k is what a sequence has room for. Declared as CACHE_PARAMS in cuattn/gpu/params.py
// too.
struct CacheParams {
  const int* page_table;  // null: one page for each sequence
  const int* seq_lens;    // keys of each sequence
  long long table_stride;
  int page_shift, num_pages;
};

struct CachedForwardParams : ForwardParams {
  CacheParams cache;
};
static_assert(sizeof(CachedForwardParams) == sizeof(ForwardParams) + sizeof(CacheParams),
              "the launching code packs the one after the other");

namespace attention {

// How many keys a sequence of batched rows has; in a cache a length that cannot be is moved to the
// nearest that can.
__device__ __forceinline__ int count_keys(const ForwardParams& params, int) {
  return params.seqlen_k;
}
__device__ __forceinline__ int count_keys(const CachedForwardParams& params, int sequence) {
  const int existing = min(sequence, params.batch - 1);
  return tile::clamped(params.cache.seq_lens[existing], 0, params.seqlen_k);
}

// The sequence and tile of a slot, of ragged rows.
template <int kTileM>
__device__ __forceinline__ tile::Sequence sequence_of_slot(const ForwardParams& params, int slot) {
  return tile::varlen_sequence<kTileM>(params, slot);
}
template <int kTileM>
__device__ __forceinline__ tile::Sequence sequence_of_slot(const CachedForwardParams& params,
                                                           int slot) {
  const auto by_tile = [](int row) { return row / kTileM; };
  const int index = tile::sequence_of_slot(params.cu_seqlens_q, params.batch, slot, by_tile);
  const tile::Rows rows = tile::ragged_rows(params.cu_seqlens_q, params.seqlen_q, index);
  const int tile = tile::tile_of_slot(rows.begin, rows.length, index, slot, kTileM, by_tile);
  return {index, rows.begin, 0, rows.length, count_keys(params, index), tile};
}

// Loads tiles of the keys, or values, of a head of a sequence, of which `first` is the first
// element: in arrays.
template <class Params, class T, class Tile, int kRows, int kThreads>
struct KeyLoader : tile::TileLoader<T, Tile, kRows, kThreads> {
  __device__ __forceinline__ KeyLoader(const Params&, int, const T* first, const Strides& stride,
                                       int cols, bool aligned)
      : tile::TileLoader<T, Tile, kRows, kThreads>(first, stride.seq, cols, aligned) {}
};

// The same in a cache, of whose first page `first` is the head's first element.
template <class T, class Tile, int kRows, int kThreads>
class KeyLoader<CachedForwardParams, T, Tile, kRows, kThreads> {
  using Rows = tile::TileLoader<T, Tile, kRows, kThreads>;
  static constexpr int kRowsPerPass = kThreads / Tile::kGroup;

  kvcache::PageTable table_;
  const T* pages_;
  const Strides& stride_;
  int sequence_, cols_;
  bool aligned_;

 public:
  __device__ __forceinline__ KeyLoader(const CachedForwardParams& params, int sequence,
                                       const T* first, const Strides& stride, int cols,
                                       bool aligned)
      : table_{params.cache.page_table, params.cache.table_stride, params.cache.page_shift,
               params.cache.num_pages},
        pages_(first),
        stride_(stride),
        sequence_(sequence),
        cols_(cols),
        aligned_(aligned) {}

  // As TileLoader's.
  __device__ __forceinline__ void load(unsigned tile, int first_row, int begin, int end,
                                       int content = tile::kValues) const {
    const bool chunks = aligned_ && content == tile::kValues;
    const int thread = ptx::thread_index();  // registers are for scores
    const int row = thread / Tile::kGroup, chunk = thread % Tile::kGroup;
    tile += Tile::at(row, chunk);
    int pages[kRows /
              kRowsPerPass];  // first, so that the reads of the table are under way together
#pragma unroll
    for (int pass = 0; pass < kRows / kRowsPerPass; ++pass) {
      const int key = first_row + row + pass * kRowsPerPass;
      pages[pass] = table_.page(sequence_, min(max(begin, key), end - 1));
    }
#pragma unroll
    for (int pass = 0; pass < kRows / kRowsPerPass; ++pass) {
      const int key = first_row + row + pass * kRowsPerPass;
      const bool inside = begin <= key && key < end;
      const T* source =
          pages_ + pages[pass] * stride_.batch + table_.slot(key) * stride_.seq + chunk * 8;
#pragma unroll
      for (int group = 0; group < Tile::kGroups; ++group) {
        const int count = inside ? cols_ - (chunk + group * Tile::kGroup) * 8 : 0;
        const unsigned to = tile + Rows::offset(pass, group);
        if (chunks)
          ptx::cp_async_16(to, source + group * Tile::kGroup * 8, count > 0);
        else
          Rows::copy_elements(to, source + group * Tile::kGroup * 8, count, content);
      }
    }
  }
};

}  // namespace attention
