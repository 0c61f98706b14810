// Copies K and V by cp.async from a cache to rings of stages in shared memory, ahead of the
// products, across the ends of splits.
#pragma once

#include "decoding/elements.cuh"
#include "decoding/schedule.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/createpolicy.cuh"
#include "ptx/shared.cuh"
#include "tile/swizzle.cuh"

namespace decoding {

// Tiles of whole rows, in one panel.
template <int kHeadDim>
using SwizzledRows = tile::Swizzled<kHeadDim / 8>;

// With kWholeLines, L2 reads 128 bytes for each 16 that are asked for, of which the next copies of
// the thread block are a part as a rule. Where rows of several heads lie side by side, and are no
// multiple of that, the rest would be another thread block's. Of a head's kHeadDim columns the
// first kColumns are copied.
template <class T, int kKeys, int kHeadDim, bool kWholeLines = true, int kHeads = 1,
          int kColumns = kHeadDim>
struct Stage {
  T k[kKeys * kHeads * kHeadDim];
  T v[kKeys * kHeads * kHeadDim];
};

// Which chunk of a key's rows of kHeads neighbouring heads a thread copies, `lane` of as many as a
// row of the tile has: of one head, that one's.
template <class T, int kHeadDim, int kHeads>
struct CopiedChunk {
  static constexpr int head = 0;
  int chunk;

  __device__ __forceinline__ CopiedChunk(const DecodeParams&, int, int lane) : chunk(lane) {}
  __device__ __forceinline__ int place() const { return chunk; }
};

// Of two: eight lanes at a time ask L2 for what they copy, so they take a line of 128 bytes where
// that is possible, of both heads' rows as they follow each other. The lanes before and after these
// write the zeros past the ends of both rows in the tile.
template <class T, int kHeadDim>
struct CopiedChunk<T, kHeadDim, 2> {
  static constexpr int kHeadChunks = kHeadDim / 8;
  int head, chunk;

  __device__ __forceinline__ CopiedChunk(const DecodeParams& params, int first_head, int lane) {
    const int chunks = params.head_dim / 8, missing = kHeadChunks - chunks;
    const T* const begin = static_cast<const T*>(params.k) + first_head * params.k_stride.head;
    const int in_line = reinterpret_cast<unsigned long long>(begin) / 16 % 8;
    lane -= min(in_line, 2 * missing);
    if (lane < 0) lane += 2 * kHeadChunks;
    if (lane < 2 * chunks) {
      head = lane >= chunks;
      chunk = lane - head * chunks;
    } else {
      head = lane - 2 * chunks >= missing;
      chunk = lane - chunks - head * missing;
    }
  }
  __device__ __forceinline__ int place() const { return head * kHeadChunks + chunk; }
};

// Copies a tile of kWarpKeys keys by kThreads threads; zeros for keys outside [begin, end), which
// are not read: they may be NaN, and 0 · NaN is NaN. `page` is that of key threadIdx.x % kWarpKeys.
// A key's rows of kHeads neighbouring heads are copied side by side. What is read once need not
// push other data out of L2.
template <int kThreads, bool kPolicy, class T, int kHeadDim, int kWarpKeys, bool kWholeLines,
          int kHeads, int kColumns>
__device__ __forceinline__ void copy_tile(
    const DecodeParams& params,
    const Stage<T, kWarpKeys, kHeadDim, kWholeLines, kHeads, kColumns>& stage, int key, int begin,
    int end, int head, int page, bool read_once) {
  static_assert(kPolicy || kWholeLines, "without a policy there is one kind of copy");
  using Tile = SwizzledRows<kHeads * kHeadDim>;
  constexpr int kChunks = kHeads * kHeadDim / 8;
  constexpr int kPassRows = kThreads / kChunks;
  constexpr int kPasses = kWarpKeys / kPassRows;
  constexpr int kSpan = 16;  // consecutive keys that lie in one page, where pages have so many
  static_assert(kThreads % kChunks == 0 && 8 % kPassRows == 0 && kWarpKeys % kPassRows == 0,
                "a pass of 16-byte copies must be whole rows, and eight rows whole passes");
  const int thread = threadIdx.x % kThreads;
  const int row = thread / kChunks;
  const CopiedChunk<T, kHeadDim, kHeads> own = {params, head, thread % kChunks};
  const unsigned first = Tile::at(row, own.place());
  const unsigned k_tile = ptx::shared_address(stage.k) + first;
  const unsigned v_tile = ptx::shared_address(stage.v) + first;
  head += own.head;
  const int column = own.chunk * 8;
  const kvcache::Pages<const T> k = {static_cast<const T*>(params.k) + column, params.k_stride};
  const kvcache::Pages<const T> v = {static_cast<const T*>(params.v) + column, params.v_stride};
  const bool k_exists = column < params.head_dim, v_exists = column < params.head_dim_v;
  const unsigned from_begin = key + row - begin;
  const unsigned count = end - begin;
  const int mask = (1 << params.page_shift) - 1;
  const unsigned long long policy =
      read_once ? ptx::createpolicy_evict_first() : ptx::createpolicy_evict_normal();
  const bool is_used = kColumns == kHeadDim || column < kColumns;
  const auto copy = [&](unsigned target, const T* source, bool exists) {
    if (!is_used) return;
    if (kPolicy)
      ptx::cp_async_16<kWholeLines>(target, source, exists, policy);
    else
      ptx::cp_async_16(target, source, exists);
  };
  if (mask >= kSpan - 1) {
#pragma unroll
    for (int span = 0; span < kWarpKeys; span += kSpan) {
      const int its_page = __shfl_sync(~0u, page, max(begin - key, span) % 32);
      const int slot = (key + span & mask) + row;
      const T* k_row = k.row(its_page, slot, head);
      const T* v_row = v.row(its_page, slot, head);
#pragma unroll
      for (int i = span; i < span + kSpan; i += kPassRows) {
        const unsigned at = i * Tile::kRowBytes, permuted = i % 8 * 16;
        const bool inside = from_begin + i < count;
        copy((k_tile ^ permuted) + at, k_row, inside && k_exists);
        copy((v_tile ^ permuted) + at, v_row, inside && v_exists);
        k_row += kPassRows * k.stride.seq;
        v_row += kPassRows * v.stride.seq;
      }
    }
  } else {
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const unsigned at = pass * kPassRows * Tile::kRowBytes;
      const unsigned permuted = pass * kPassRows % 8 * 16;
      const bool inside = from_begin + pass * kPassRows < count;
      const int its_page = __shfl_sync(~0u, page, pass * kPassRows + row);
      const int slot = key + pass * kPassRows + row & mask;
      copy((k_tile ^ permuted) + at, k.row(its_page, slot, head), inside && k_exists);
      copy((v_tile ^ permuted) + at, v.row(its_page, slot, head), inside && v_exists);
    }
  }
}

// A tile that is to be loaded.
template <bool kElementwise>
struct KeyTile {
  int key;               // its first; negative after the last tile
  int begin, end, head;  // of its split

  __device__ __forceinline__ static KeyTile of(int key, const Split& split) {
    return {key, split.begin, split.end, split.head};
  }
};
template <>
struct KeyTile<true> : KeyTile<false> {
  TileRows rows;

  __device__ __forceinline__ static KeyTile of(int key, const Split& split) {
    return {KeyTile<false>::of(key, split), TileRows::of(split)};
  }
};

// Loads the tiles of one slice, split after split, and its warps' share of each split's rows of Q.
// Behind the ring's traffic a read takes microseconds, so everything is requested before it is
// needed: queries with their split's first tile, and the page table's entries of a tile when the
// tile kStages before it is loaded; or all of a single sequence's table, of up to kTable entries,
// before the sequence's length is known.
template <class T, class Stage, class Schedule, int kRows, int kHeadDim, int kWarpKeys, int kWarpsQ,
          int kWarpsK, int kStages, int kQueryBuffers, int kTable, bool kElementwise = false,
          int kHeads = 1>
struct Loader {
  using Params = typename DecodeParamsOf<kElementwise>::Type;
  using Tile = SwizzledRows<kHeadDim>;
  using Queries = T[kQueryBuffers][kRows * kHeadDim];  // of splits in turn
  using Table = int[kTable > 0 ? kTable : 1];
  using HeadRows = decoding::HeadRows<kRows, kHeads>;
  static constexpr bool kPolicy = HeadRows::kEach <= 16;
  static constexpr int kThreads = 32 * kWarpsQ;
  static constexpr int kBlockThreads = kThreads * kWarpsK;
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kStep = kWarpKeys * kWarpsK;

  using KeyTile = decoding::KeyTile<kElementwise>;

  const Params& params;
  Schedule& schedule;  // where the loads are, in shared memory: needed only between splits
  Queries& queries;
  const Table& table;
  Split split;
  int number;             // of that split, counted from the thread block's first
  int requested_queries;  // the last split whose queries have been requested
  int loads_since;        // calls of load since then
  int key;                // first of the next tile to be looked up
  bool more;
  int depth;  // calls of load before the first tile is there to be computed
  KeyTile tiles[kStages];

  // Whether all of a single sequence's page table is copied to shared memory.
  __device__ __forceinline__ static bool has_table(const DecodeParams& params) {
    return kTable > 0 && params.single_tile && params.page_table != nullptr &&
           params.capacity >> params.page_shift <= kTable;
  }
  __device__ __forceinline__ static void fetch_table(const DecodeParams& params, Table& table) {
    for (int i = threadIdx.x; i < params.capacity >> params.page_shift; i += kBlockThreads)
      ptx::cp_async_4(ptx::shared_address(table + i), params.page_table + i);
  }

  // `schedule` has given its first split; `pages` are the stages', of all warps. Where the first
  // split has a tile for every stage these are looked up at once.
  __device__ __forceinline__ Loader(const Params& params, Schedule& schedule, Queries& queries,
                                    const Table& table, const Split& first,
                                    int (&pages)[kStages][kBlockThreads / 32][kWarpKeys])
      : params(params), schedule(schedule), queries(queries), table(table), split(first) {
    number = 0;
    requested_queries = -1;
    loads_since = 0;
    more = true;
    key = first_key();
#pragma unroll
    for (int i = 0; i < kStages; ++i) tiles[i] = {-1, 0, 0, 0};
    if (!looks_up_ahead()) {
      depth = kStages;
    } else if (key + (kStages - 1) * kStep >= split.end) {
      depth = 2 * kStages;
    } else {
      depth = kStages;
#pragma unroll
      for (int i = 0; i < kStages; ++i) {
        tiles[i] = KeyTile::of(key, split);
        request_page(pages[i][threadIdx.x / 32][threadIdx.x % kWarpKeys]);
        key += kStep;
      }
#pragma unroll
      for (int i = 0; i < kStages; ++i) ptx::cp_async_commit();  // as many as load waits behind
    }
  }

  // Copies a tile to the stage whose copies are the oldest under way. With a page table it is the
  // tile that was looked up kStages calls before. `pages` is the warp's for that stage, `started`
  // the number of splits that are computed or being computed.
  __device__ __forceinline__ void load(const Stage& stage, int (&pages)[kWarpKeys], int started) {
    KeyTile tile = tiles[0];
    int page = 0;            // of key threadIdx.x % kWarpKeys
    if (looks_up_ahead()) {  // a lane reads what it has requested itself: no barrier
      ptx::cp_async_wait<kStages - 1>();
      if (threadIdx.x % 32 < kWarpKeys) page = pages[threadIdx.x % 32];
    }
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) tiles[i] = tiles[i + 1];
    tiles[kStages - 1] = look_up();
    ++loads_since;
    if (!looks_up_ahead()) {
      if (!more) return ptx::cp_async_commit();
      tile = tiles[kStages - 1];
      page = split.seq.index;
      if (has_table(params)) {
        const int own_key = key + static_cast<int>(threadIdx.x) % kWarpKeys;
        const int entry = min(own_key, params.capacity - 1) >> params.page_shift;
        page = table[entry];
      }
    } else {
      request_page(pages[threadIdx.x % kWarpKeys]);
    }
    key += kStep;
    if (tile.key >= 0) {
      page = page_table(params).existing(page);  // here: sooner would wait for its read
      copy_tile<kThreads, kPolicy>(params, stage, tile.key, tile.begin, tile.end, tile.head, page,
                                   read_once());
      if constexpr (kElementwise)
        copy_elements<T, kThreads>(params, stage.elements, tile.rows, tile.head, tile.key);
    }
    const bool room = kQueryBuffers > 1 || started == 0;  // beside those being computed with
    if (more && room && number == started && requested_queries < number)
      request_queries(split, number);
    ptx::cp_async_commit();
  }

  // Waits for this warp's share of the queries of split `started`, which is the next to be
  // computed.
  __device__ __forceinline__ void wait_for_queries(const Split& next, int started) {
    if (requested_queries < started) {
      request_queries(next, started);
      ptx::cp_async_wait_all();
    } else if (loads_since < kStages - 1) {
      ptx::cp_async_wait_all();
    } else {
      ptx::cp_async_wait<kStages - 1>();
    }
  }

 private:
  __device__ __forceinline__ bool looks_up_ahead() const {
    return params.page_table != nullptr && !has_table(params);
  }

  // Whether only one tile of rows reads each key: as a rule also of ragged rows, which get a tile
  // that the mean of the sequences fits into.
  __device__ __forceinline__ bool read_once() const {
    return params.cu_seqlens_q != nullptr || params.seqlen_q * params.group <= HeadRows::kEach;
  }

  __device__ __forceinline__ int first_key() const {
    return split.origin + static_cast<int>(threadIdx.x) / kThreads * kWarpKeys;
  }

  __device__ __forceinline__ KeyTile look_up() {
    while (more && key >= split.end) {
      more = schedule.step < schedule.end;
      if (!more) break;
      Schedule own = schedule;
      more = own.next(params, split);
      __syncwarp();
      if (threadIdx.x % 32 == 0) schedule = own;
      __syncwarp();
      key = first_key();
      ++number;
    }
    return KeyTile::of(more ? key : -1, split);
  }

  // Copies the page table's entry for this lane's key of the tile that was looked up.
  __device__ __forceinline__ void request_page(int& page) const {
    const int own_key = key + static_cast<int>(threadIdx.x) % kWarpKeys;
    if (!more || own_key < split.begin || own_key >= split.end || threadIdx.x % 32 >= kWarpKeys)
      return;
    ptx::cp_async_4(ptx::shared_address(&page), page_table(params).entry(split.seq.index, own_key));
  }

  __device__ __forceinline__ void request_queries(const Split& from, int to) {
    requested_queries = to;
    loads_since = 0;
    const int group = params.group;
    const int rows = from.seq.seqlen_q * group - from.row_tile * HeadRows::kEach;
    const unsigned target = ptx::shared_address(queries[to % kQueryBuffers]);
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kChunks; i += kBlockThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const int index = from.row_tile * HeadRows::kEach + HeadRows::in_head(row);
      const int token = divided_by_group(params, index);
      const T* source = static_cast<const T*>(params.q) + from.seq.index * params.q_stride.batch +
                        (from.seq.begin_q + token) * params.q_stride.seq +
                        ((from.head + HeadRows::head_of(row)) * group + index - token * group) *
                            params.q_stride.head +
                        chunk * 8;
      ptx::cp_async_16(target + Tile::at(row, chunk), source,
                       HeadRows::in_head(row) < rows && chunk * 8 < params.head_dim);
    }
  }
};

}  // namespace decoding
