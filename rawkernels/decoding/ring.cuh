// K and V on their way from a cache to a slice's ring of shared memory.
#pragma once

#include "decoding/schedule.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/createpolicy.cuh"
#include "ptx/shared.cuh"

namespace decoding {

// Rows in shared memory, in panels of kPanel 16-byte chunks; chunks are permuted in groups of eight
// from row to row, so that neither whole rows written nor a chunk of eight rows read by ldmatrix
// meet in a bank.
template <int kPanel, int kPanelBytes>
struct Panels {
  static_assert(kPanel % 8 == 0, "whole groups of eight chunks");
  static constexpr int kRowBytes = kPanel * 16;

  __device__ __forceinline__ static int permuted(int row, int chunk) { return chunk ^ row % 8; }
  __device__ __forceinline__ static int at(int row, int chunk) {
    return chunk / kPanel * kPanelBytes + row * kRowBytes + permuted(row, chunk % kPanel) * 16;
  }

  // Where this lane reads for the four 8×8 matrices of rows 0-15 and chunks 0 and 1: rows 0-7 and
  // 8-15 of chunk 0 first, or chunks 0 and 1 of rows 0-7.
  __device__ __forceinline__ static unsigned rows_first() {
    const int lane = threadIdx.x % 32;
    return at(lane % 16, lane / 16);
  }
  __device__ __forceinline__ static unsigned chunks_first() {
    const int lane = threadIdx.x % 32;
    return at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }
  // The same 2 i chunks on; tiles begin at multiples of 128 bytes.
  __device__ __forceinline__ static unsigned at_chunks(unsigned offset, int i) {
    return (offset ^ i % 4 * 32) + i % (kPanel / 2) / 4 * 128 + i / (kPanel / 2) * kPanelBytes;
  }
};

// Whole rows, one after the other.
template <int kHeadDim>
using SwizzledRows = Panels<kHeadDim / 8, 0>;

template <class T, int kKeys, int kHeadDim>
struct Stage {
  T k[kKeys * kHeadDim];
  T v[kKeys * kHeadDim];
};

// Copies a tile of kWarpKeys keys by kThreads threads; zeros for keys outside [begin, end), which
// are not read: they may be NaN, and 0 · NaN is NaN. `page` is that of key threadIdx.x % kWarpKeys:
// the sequence's number for a contiguous cache. What is read once need not push other things out of
// L2.
template <class T, int kHeadDim, int kWarpKeys, int kThreads, bool kPolicy>
__device__ __forceinline__ void copy_tile(const DecodeParams& params,
                                          const Stage<T, kWarpKeys, kHeadDim>& stage, int key,
                                          int begin, int end, int head, int page, bool read_once) {
  using Tile = SwizzledRows<kHeadDim>;
  constexpr int kChunks = kHeadDim / 8;
  constexpr int kPassRows = kThreads / kChunks;
  constexpr int kPasses = kWarpKeys / kPassRows;
  constexpr int kSpan = 16;  // keys that lie in one page, of pages that have so many
  static_assert(kThreads % kChunks == 0 && 8 % kPassRows == 0 && kWarpKeys % kPassRows == 0,
                "whole passes of 16-byte copies, eight rows in a number of them");
  const int thread = threadIdx.x % kThreads;
  const int row = thread / kChunks, chunk = thread % kChunks;
  const unsigned first = row * Tile::kRowBytes + Tile::permuted(row, chunk) * 16;
  const unsigned k_tile = ptx::shared_address(stage.k) + first;
  const unsigned v_tile = ptx::shared_address(stage.v) + first;
  const PageStrides &ks = params.k_stride, &vs = params.v_stride;
  const T* k = static_cast<const T*>(params.k) + head * ks.head + chunk * 8;
  const T* v = static_cast<const T*>(params.v) + head * vs.head + chunk * 8;
  const bool k_exists = chunk * 8 < params.head_dim, v_exists = chunk * 8 < params.head_dim_v;
  const unsigned from_begin = key + row - begin;
  const unsigned count = end - begin;
  const int mask = (1 << params.page_shift) - 1;
  const unsigned long long policy =
      read_once ? ptx::createpolicy_evict_first() : ptx::createpolicy_evict_normal();
  const auto copy = [&](unsigned target, const T* source, bool exists) {
    if (kPolicy)
      ptx::cp_async_16(target, source, exists, policy);
    else
      ptx::cp_async_16(target, source, exists);
  };
  if (mask >= kSpan - 1) {
#pragma unroll
    for (int span = 0; span < kWarpKeys; span += kSpan) {
      const long long its_page = __shfl_sync(~0u, page, max(begin - key, span) % 32);
      const int slot = (key + span & mask) + row;
      const T* k_row = k + its_page * ks.page + slot * ks.seq;
      const T* v_row = v + its_page * vs.page + slot * vs.seq;
#pragma unroll
      for (int i = span; i < span + kSpan; i += kPassRows) {
        const unsigned at = i * Tile::kRowBytes, permuted = i % 8 * 16;
        const bool inside = from_begin + i < count;
        copy((k_tile ^ permuted) + at, k_row, inside && k_exists);
        copy((v_tile ^ permuted) + at, v_row, inside && v_exists);
        k_row += kPassRows * ks.seq;
        v_row += kPassRows * vs.seq;
      }
    }
  } else {
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const unsigned at = pass * kPassRows * Tile::kRowBytes;
      const unsigned permuted = pass * kPassRows % 8 * 16;
      const bool inside = from_begin + pass * kPassRows < count;
      const long long its_page = __shfl_sync(~0u, page, pass * kPassRows + row);
      const int slot = key + pass * kPassRows + row & mask;
      copy((k_tile ^ permuted) + at, k + its_page * ks.page + slot * ks.seq, inside && k_exists);
      copy((v_tile ^ permuted) + at, v + its_page * vs.page + slot * vs.seq, inside && v_exists);
    }
  }
}

// Loads the tiles of one slice, piece after piece, and its warps' share of each piece's rows of Q.
// Behind the traffic of the ring a read takes microseconds, so nothing is asked for when it is
// needed: queries come with their piece's first tile, and where a tile's keys are is asked of the
// page table, if there is one, when the tile kStages before it is loaded; or all of a lone
// sequence's table, of up to kTable entries, is asked for before its length is known.
template <class T, class Work, int kRows, int kHeadDim, int kWarpKeys, int kWarpsQ, int kWarpsK,
          int kStages, int kQueryBuffers, int kTable>
struct Loader {
  using Tile = SwizzledRows<kHeadDim>;
  using Queries = T[kQueryBuffers][kRows * kHeadDim];  // of pieces in turn
  using Table = int[kTable > 0 ? kTable : 1];
  static constexpr int kThreads = 32 * kWarpsQ;
  static constexpr int kBlockThreads = kThreads * kWarpsK;
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kStep = kWarpKeys * kWarpsK;

  struct Place {           // of a tile
    int key;               // its first; negative where there is no tile any more
    int begin, end, head;  // of its piece
  };

  const DecodeParams& params;
  Work& work;  // where the slice is, in shared memory: needed only between pieces
  Queries& queries;
  const Table& table;
  Piece piece;
  int number;   // of that piece, counted from the block's first
  int fetched;  // the last piece whose queries have been asked for
  int since;    // calls of load since then
  int key;      // first of the next tile to be looked up
  bool more;
  int depth;  // calls of load before the first tile is there to be computed
  Place places[kStages];

  // Whether all of a lone sequence's page table is brought to shared memory.
  __device__ __forceinline__ static bool has_table(const DecodeParams& params) {
    return kTable > 0 && params.one_item && params.page_table != nullptr &&
           params.capacity >> params.page_shift <= kTable;
  }
  __device__ __forceinline__ static void fetch_table(const DecodeParams& params, Table& table) {
    for (int i = threadIdx.x; i < params.capacity >> params.page_shift; i += kBlockThreads)
      ptx::cp_async_4(ptx::shared_address(table + i), params.page_table + i);
  }

  // `work` has given its first piece; `pages` are the stages', of all warps. Where the first piece
  // has a tile for every stage these are looked up at once.
  __device__ __forceinline__ Loader(const DecodeParams& params, Work& work, Queries& queries,
                                    const Table& table, const Piece& first,
                                    int (&pages)[kStages][kBlockThreads / 32][kWarpKeys])
      : params(params), work(work), queries(queries), table(table), piece(first) {
    number = 0;
    fetched = -1;
    since = 0;
    more = true;
    key = first_key();
#pragma unroll
    for (int i = 0; i < kStages; ++i) places[i] = {-1, 0, 0, 0};
    if (!looks_up_ahead()) {
      depth = kStages;
    } else if (key + (kStages - 1) * kStep >= piece.end) {
      depth = 2 * kStages;
    } else {
      depth = kStages;
#pragma unroll
      for (int i = 0; i < kStages; ++i) {
        places[i] = {key, piece.begin, piece.end, piece.head};
        ask_for_page(pages[i][threadIdx.x / 32][threadIdx.x % kWarpKeys]);
        key += kStep;
      }
#pragma unroll
      for (int i = 0; i < kStages; ++i) ptx::cp_async_commit();  // as many as load waits behind
    }
  }

  // Copies a tile to the stage whose copies are the oldest under way. With a page table it is the
  // tile that was looked up kStages calls before. `pages` is the warp's for that stage, `opened`
  // the number of pieces that are computed or being computed.
  __device__ __forceinline__ void load(const Stage<T, kWarpKeys, kHeadDim>& stage,
                                       int (&pages)[kWarpKeys], int opened) {
    Place place = places[0];
    int page = 0;  // of key threadIdx.x % kWarpKeys
    if (looks_up_ahead()) {
      ptx::cp_async_wait<kStages - 1>();
      __syncwarp();
      page = pages[threadIdx.x % kWarpKeys];
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) places[i] = places[i + 1];
    places[kStages - 1] = look_up();
    ++since;
    if (!looks_up_ahead()) {
      if (!more) return ptx::cp_async_commit();
      place = places[kStages - 1];
      page = piece.seq.index;
      if (has_table(params)) {
        const int mine = key + static_cast<int>(threadIdx.x) % kWarpKeys;
        page = table[min(mine, params.capacity - 1) >> params.page_shift];
      }
    } else {
      ask_for_page(pages[threadIdx.x % kWarpKeys]);
    }
    key += kStep;
    if (place.key >= 0)
      copy_tile<T, kHeadDim, kWarpKeys, kThreads, kRows == 8>(
          params, stage, place.key, place.begin, place.end, place.head, page, read_once());
    const bool room = kQueryBuffers > 1 || opened == 0;  // beside those being computed with
    if (more && room && number == opened && fetched < number) fetch_queries(piece, number);
    ptx::cp_async_commit();
  }

  // Waits for this warp's share of the queries of piece `opened`, which is the next to be computed.
  __device__ __forceinline__ void wait_for_queries(const Piece& next, int opened) {
    if (fetched < opened) {
      fetch_queries(next, opened);
      ptx::cp_async_wait_all();
    } else if (since < kStages - 1) {
      ptx::cp_async_wait_all();
    } else {
      ptx::cp_async_wait<kStages - 1>();
    }
  }

 private:
  __device__ __forceinline__ bool looks_up_ahead() const {
    return params.page_table != nullptr && !has_table(params);
  }

  // Whether every key is for one tile of rows alone.
  __device__ __forceinline__ bool read_once() const {
    return params.cu_seqlens_q == nullptr && params.seqlen_q * params.group <= kRows;
  }

  __device__ __forceinline__ int first_key() const {
    return piece.origin + static_cast<int>(threadIdx.x) / kThreads * kWarpKeys;
  }

  __device__ __forceinline__ Place look_up() {
    while (more && key >= piece.end) {
      more = work.step < work.end;
      if (!more) break;
      Work mine = work;
      more = mine.next(params, piece);
      __syncwarp();
      if (threadIdx.x % 32 == 0) work = mine;
      __syncwarp();
      key = first_key();
      ++number;
    }
    return {more ? key : -1, piece.begin, piece.end, piece.head};
  }

  // Of the tile that was looked up.
  __device__ __forceinline__ void ask_for_page(int& page) const {
    const int mine = key + static_cast<int>(threadIdx.x) % kWarpKeys;
    if (!more || mine < piece.begin || mine >= piece.end || threadIdx.x % 32 >= kWarpKeys) return;
    const long long entry = piece.seq.index * params.table_stride + (mine >> params.page_shift);
    ptx::cp_async_4(ptx::shared_address(&page), params.page_table + entry);
  }

  __device__ __forceinline__ void fetch_queries(const Piece& from, int to) {
    fetched = to;
    since = 0;
    const int group = params.group;
    const int rows = from.seq.seqlen_q * group - from.tile * kRows;
    const unsigned target = ptx::shared_address(queries[to % kQueryBuffers]);
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kChunks; i += kBlockThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const int index = from.tile * kRows + row;
      const int token = divided_by_group(params, index);
      const T* source = static_cast<const T*>(params.q) + from.seq.index * params.q_stride.batch +
                        (from.seq.begin_q + token) * params.q_stride.seq +
                        (from.head * group + index - token * group) * params.q_stride.head +
                        chunk * 8;
      ptx::cp_async_16(target + row * Tile::kRowBytes + Tile::permuted(row, chunk) * 16, source,
                       row < rows && chunk * 8 < params.head_dim);
    }
  }
};

}  // namespace decoding
