// K and V on their way from a cache to a slice's ring of shared memory.
#pragma once

#include "decoding/schedule.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"

namespace decoding {

// Rows of K, V and Q in shared memory: 16-byte chunks, permuted in groups of eight from row to row,
// so that neither whole rows written nor a chunk of eight rows read by ldmatrix meet in a bank.
template <int kHeadDim>
struct SwizzledRows {
  static_assert(kHeadDim % 64 == 0, "whole groups of eight chunks");
  static constexpr int kRowBytes = kHeadDim * 2;

  __device__ __forceinline__ static int permuted(int row, int chunk) { return chunk ^ row % 8; }

  // Where this lane reads for the four 8×8 matrices of rows 0-15 and chunks 0 and 1: rows 0-7 and
  // 8-15 of chunk 0 first, or chunks 0 and 1 of rows 0-7.
  __device__ __forceinline__ static unsigned rows_first() {
    const int lane = threadIdx.x % 32;
    return lane % 16 * kRowBytes + permuted(lane, lane / 16) * 16;
  }
  __device__ __forceinline__ static unsigned chunks_first() {
    const int lane = threadIdx.x % 32;
    return (lane % 8 + lane / 16 * 8) * kRowBytes + permuted(lane, lane / 8 % 2) * 16;
  }
  // The same 2 i chunks on; tiles begin at multiples of 128 bytes.
  __device__ __forceinline__ static unsigned at_chunks(unsigned offset, int i) {
    return (offset ^ i % 4 * 32) + i / 4 * 128;
  }
};

template <class T, int kKeys, int kHeadDim>
struct Stage {
  T k[kKeys * kHeadDim];
  T v[kKeys * kHeadDim];
};

// Loads the tiles of one slice, piece after piece. Where a tile's keys are is asked of the page
// table, if there is one, when the tile kStages before it is loaded, and the answer comes with
// that: behind the traffic of the loads a read takes microseconds.
template <class T, class Work, int kHeadDim, int kWarpKeys, int kWarpsQ, int kWarpsK, int kStages>
struct Loader {
  using Tile = SwizzledRows<kHeadDim>;
  static constexpr int kThreads = 32 * kWarpsQ;
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kPasses = kWarpKeys * kChunks / kThreads;
  static_assert(kWarpKeys * kChunks % kThreads == 0, "whole passes of 16-byte copies");

  struct Place {  // of the key of a tile that is this lane's
    int page;     // the sequence's number for a contiguous cache, 0 where the page table is to say;
                  // -1: outside the piece
    int slot, head;
    bool exists;  // the tile, at all
  };

  // Calls of load before the first tile is there to be computed.
  __device__ __forceinline__ static int depth(const DecodeParams& params) {
    return params.page_table == nullptr ? kStages : 2 * kStages;
  }

  const DecodeParams& params;
  Work& work;  // where the slice is, in shared memory: needed only between pieces
  Piece piece;
  int key;  // first of the next tile to be looked up
  bool more;
  Place places[kStages];

  __device__ __forceinline__ Loader(const DecodeParams& params, Work& work)
      : params(params), work(work) {
    key = piece.end = 0;
    more = true;
#pragma unroll
    for (int i = 0; i < kStages; ++i) places[i] = {-1, 0, 0, false};
  }

  __device__ __forceinline__ Place look_up(int& page) {
    while (more && key >= piece.end) {
      Work mine = work;
      more = mine.next(params, piece);
      __syncwarp();
      if (threadIdx.x % 32 == 0) work = mine;
      __syncwarp();
      key = piece.origin + static_cast<int>(threadIdx.x) / kThreads * kWarpKeys;
    }
    const int mine = key + static_cast<int>(threadIdx.x) % kWarpKeys;
    Place place = {-1, mine & ((1 << params.page_shift) - 1), piece.head, more};
    if (more && mine >= piece.begin && mine < piece.end) {
      place.page = params.page_table == nullptr ? piece.seq.index : 0;
      const long long entry = piece.seq.index * params.table_stride + (mine >> params.page_shift);
      if (params.page_table != nullptr && threadIdx.x % 32 < kWarpKeys)
        ptx::cp_async_4(ptx::shared_address(&page), params.page_table + entry);
    }
    key += kWarpKeys * kWarpsK;
    return place;
  }

  // Copies a tile to the stage whose copies are the oldest under way; zeros for keys outside the
  // piece, which are not read: they may be NaN, and 0 · NaN is NaN. With a page table it is the
  // tile that was looked up kStages calls before. `pages` is the warp's for that stage.
  __device__ __forceinline__ void load(const Stage<T, kWarpKeys, kHeadDim>& stage,
                                       int (&pages)[kWarpKeys]) {
    int& page = pages[threadIdx.x % kWarpKeys];
    Place place = places[0];
    if (params.page_table != nullptr) {
      ptx::cp_async_wait<kStages - 1>();
      __syncwarp();
      if (place.page >= 0) place.page = page;
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) places[i] = places[i + 1];
    places[kStages - 1] = look_up(page);
    if (params.page_table == nullptr) place = places[kStages - 1];
    if (place.exists) {
      const int thread = threadIdx.x % kThreads;
      const PageStrides &ks = params.k_stride, &vs = params.v_stride;
      const long long k_row = place.page * ks.page + place.slot * ks.seq + place.head * ks.head;
      const long long v_row = place.page * vs.page + place.slot * vs.seq + place.head * vs.head;
      const unsigned k_tile = ptx::shared_address(stage.k), v_tile = ptx::shared_address(stage.v);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int row = (pass * kThreads + thread) / kChunks;
        const int chunk = thread % kChunks;
        const bool inside = __shfl_sync(~0u, place.page, row) >= 0;
        const T* k = static_cast<const T*>(params.k) + __shfl_sync(~0u, k_row, row) + chunk * 8;
        const T* v = static_cast<const T*>(params.v) + __shfl_sync(~0u, v_row, row) + chunk * 8;
        const unsigned at = row * Tile::kRowBytes + Tile::permuted(row, chunk) * 16;
        ptx::cp_async_16(k_tile + at, k, inside && chunk * 8 < params.head_dim);
        ptx::cp_async_16(v_tile + at, v, inside && chunk * 8 < params.head_dim_v);
      }
    }
    ptx::cp_async_commit();
  }
};

}  // namespace decoding
