// Arguments of Hopper's backward kernels; and of the two whose thread blocks have keys
// (backward_sm90.cu, backward_keys_sm90.cu): which keys these are, which queries see them, and how
// both come to shared memory.
#pragma once

#include "gradients/params.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/ragged.cuh"
#include "tile/visibility.cuh"

using T = Config::dtype;

constexpr int kDim = Config::head_dim;    // of rows, padded: TMA fills with zeros
constexpr int kQueries = Config::tile_m;  // of a block that is streamed
constexpr int kKeys = Config::tile_n;     // of a thread block
constexpr int kStatisticsPad = 128;       // rows of statistics are padded to a multiple of it
// A tile lies in shared memory as panels of 64 columns, 128 bytes a row.
constexpr int kRowBytes = 128;
constexpr int kPanels = kDim / 64;
constexpr int kPanelBytesQ = kQueries * kRowBytes;
constexpr int kPanelBytesK = kKeys * kRowBytes;

// Columns of a part of dq, which has 64 queries: a panel, or of three panels one and half of the
// last, 0 to 63 and 128 to 159 or 64 to 127 and 160 to 191.
__device__ __forceinline__ constexpr int part_columns(int head_dim) {
  return head_dim == 192 ? 96 : 64;
}

static_assert(kDim % 64 == 0, "panels are whole");
static_assert(kStatisticsPad % kQueries == 0,
              "blocks do not reach beyond the statistics of their sequence");

// What gradients/backward_sm90.cu and the kernels around it (gradients/around_sm90.cu) are told
// beside ForwardParams and BackwardParams. Mirrored in cuattn/gpu/params.py.
//
// A sequence has padded rows of statistics, from row 0 of its batch entry on, or where ragged from
// (begin / 128 + index) * 128 on: `padded_q` rows for a head of a batch entry (or of all
// sequences).
struct Sm90BackwardParams {
  // Dimensions (head_dim, row, head, outer), see tile::TmaRows.
  ptx::TensorMap q, k, v, dout;
  ptx::TensorMap dk, dv;  // boxes of 64 rows
  float* score_start;     // (…, heads_q, padded_q): -lse / scale, with which scores start
  float* dp_start;        // -delta, with which dP starts
  // (…, heads_q, padded_q / 64, parts): parts of 64 rows and part_columns of dq / scale, each in
  // the order of a warpgroup's accumulators: (columns / 8, 128 threads, 4).
  float* dq_sums;
  // Of each part of dq_sums whether it holds a sum yet, kUnopened to kOpen; null: all begin as
  // zeros.
  unsigned long long* opened;
  int* next_tile;  // a counter of tiles that are taken beyond a block's first
  int padded_q;
  int slots, tiles;  // tiles of keys: of a head, and of all
  int section;       // heads whose tiles are dealt out at a time
  int late;          // the first slot whose tiles come after those of all heads
  int group;         // query heads that share a key head
  float scale_log2;  // from a score to the exponent of 2
};

// What Sm90BackwardParams::opened holds of a part of the sums.
constexpr unsigned long long kUnopened = 0, kOpening = 1, kOpen = 2;

// The keys of a thread block and the queries that it walks over: blocks of kQueries, of all heads
// that share the keys.
struct Tile {
  int batch, head_kv, first_key, seqlen_q, seqlen_k;
  long long row_k;          // of the sequence's first key in dk and dv
  int statistics_row;       // of its first query
  int first_block, blocks;  // of a head
  tile::TmaRows queries, keys;
  tile::Visibility visibility;  // rows are counted from the sequence's first
};

// What tile::varlen_sequence wants to know, of keys as its queries.
struct KeyLengths {
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  int batch, seqlen_q, seqlen_k;
};

// The order of tiles: `section` heads at a time, all of their first slots, then their second ones;
// the slots from `late` on, the shortest, after all others of all heads: they even out at what
// times blocks end.
struct SlotOfHead {
  int slot, head;

  __device__ __forceinline__ SlotOfHead(int number, const Sm90BackwardParams& sm90) {
    const int all = sm90.tiles / sm90.slots, late = number - all * sm90.late;
    if (late >= 0) {
      slot = sm90.late + late / all;
      head = late % all;
    } else {
      const int before = number / (sm90.late * sm90.section) * sm90.section;
      const int heads = min(sm90.section, all - before), rest = number - before * sm90.late;
      slot = rest / heads;
      head = before + rest % heads;
    }
  }
};

// The sequence and the tile of keys of a slot, the sequences of most queries first: their tiles are
// the most work. Of up to 32 sequences, by a whole warp, a lane for each.
__device__ __forceinline__ tile::Sequence longest_first(const KeyLengths& lengths, int slot) {
  const int lane = ptx::thread_index() % 32;  // nothing of it is kept: registers are few
  const bool exists = lane < lengths.batch;
  const tile::Sequence mine = tile::sequence(lengths, exists ? lane : 0);
  const int tiles = exists ? (mine.seqlen_q + kKeys - 1) / kKeys : 0;
  int before = 0;
#pragma unroll 1
  for (int other = 0; other < lengths.batch; ++other) {
    const int queries = __shfl_sync(~0u, mine.seqlen_k, other);
    const int theirs = __shfl_sync(~0u, tiles, other);
    if (queries > mine.seqlen_k || (queries == mine.seqlen_k && other < lane)) before += theirs;
  }
  const unsigned owner = __ballot_sync(~0u, slot >= before && slot < before + tiles);
  const int index = owner == 0 ? 0 : __ffs(owner) - 1;
  tile::Sequence found = tile::sequence(lengths, index);
  found.tile = owner == 0 ? -1 : slot - __shfl_sync(~0u, before, index);
  return found;
}

// Tile `number` of a call; false where there is none, in slots that no sequence needs. Whole warps
// together.
__device__ __forceinline__ bool find_tile(Tile& tile, const ForwardParams& params,
                                          const Sm90BackwardParams& sm90, int number) {
  const SlotOfHead found_slot(number, sm90);
  const int slot = found_slot.slot, head = found_slot.head;
  tile.head_kv = head % params.heads_kv;
  if constexpr (Config::varlen) {
    const KeyLengths lengths = {params.cu_seqlens_k, params.cu_seqlens_q, params.batch,
                                params.seqlen_k, params.seqlen_q};
    const tile::Sequence found = lengths.batch <= 32 ? longest_first(lengths, slot)
                                                     : tile::varlen_sequence<kKeys>(lengths, slot);
    if (found.tile < 0) return false;
    const int begin_q = static_cast<int>(found.begin_k), begin_k = static_cast<int>(found.begin_q);
    tile.batch = found.index;
    tile.seqlen_q = found.seqlen_k;
    tile.seqlen_k = found.seqlen_q;
    tile.first_key = found.tile * kKeys;
    tile.row_k = begin_k;
    tile.statistics_row = (begin_q / kStatisticsPad + found.index) * kStatisticsPad;
    tile.queries = tile::ragged_tma_rows(begin_q, tile.seqlen_q);
    tile.keys = tile::ragged_tma_rows(begin_k, tile.seqlen_k);
  } else {
    // The first keys come first: with a causal mask they are the most work.
    tile.batch = head / params.heads_kv;
    tile.seqlen_q = params.seqlen_q;
    tile.seqlen_k = params.seqlen_k;
    tile.first_key = slot * kKeys;
    tile.row_k = static_cast<long long>(tile.batch) * params.seqlen_k;
    tile.statistics_row = 0;
    tile.queries = {params.seqlen_q, 0, tile.batch};
    tile.keys = {params.seqlen_k, 0, tile.batch};
  }
  tile.visibility = tile::Visibility::from_row(0, tile.seqlen_q + kQueries, params.window_left,
                                               params.window_right, tile.seqlen_q, tile.seqlen_k);
  const int last_key = min(tile.first_key + kKeys, tile.seqlen_k) - 1;
  const tile::Range rows = tile.visibility.rows_of_any(tile.first_key, last_key);
  const int end = min(rows.end, tile.seqlen_q);
  tile.first_block = max(rows.begin, 0) / kQueries;
  tile.blocks = max(end - tile.first_block * kQueries + kQueries - 1, 0) / kQueries;
  return true;
}

// The blocks of queries of a tile, one after the other: what a role is at.
struct Walk {
  const int first, blocks;
  int left, head = 0;  // `left` of this head's blocks; head: of those of the tile

  __device__ __forceinline__ explicit Walk(const Tile& tile)
      : first(tile.first_block), blocks(tile.blocks), left(tile.blocks) {}

  __device__ __forceinline__ int row() const { return (first + blocks - left) * kQueries; }
  __device__ __forceinline__ void advance() {
    if (--left == 0) {
      left = blocks;
      ++head;
    }
  }
};

// Row of statistics of a head's first query.
__device__ __forceinline__ long long statistics_row(const ForwardParams& params,
                                                    const Sm90BackwardParams& sm90, int batch,
                                                    int head, int row) {
  const long long index =
      Config::varlen ? head : static_cast<long long>(batch) * params.heads_q + head;
  return index * sm90.padded_q + row;
}

// Rows of one head, all panels of them, by one thread.
template <int kPanelBytes, int kCount = kPanels>
__device__ __forceinline__ void load_rows(unsigned char* place, const ptx::TensorMap& map,
                                          ptx::Mbarrier& full, const tile::TmaRows& rows, int row,
                                          int head) {
#pragma unroll
  for (int panel = 0; panel < kCount; ++panel) {
    unsigned char* const to = place + panel * kPanelBytes;
    if constexpr (Config::varlen)
      ptx::tma_load(to, map, full, 64 * panel, rows.shift + row, head, rows.outer, tile::kFarRows,
                    ptx::kEvictLast);
    else
      ptx::tma_load(to, map, full, 64 * panel, rows.shift + row, head, rows.outer, ptx::kEvictLast);
  }
}

// The accumulators of S^T or dP^T: every key's row starts with the statistics of its queries.
__device__ __forceinline__ void start(float (&x)[kQueries / 2], const float* statistics) {
  statistics += tile::lane_column(threadIdx.x % 32);
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j) {
    const float2 two = *reinterpret_cast<const float2*>(statistics + 8 * j);
    x[4 * j] = x[4 * j + 2] = two.x;
    x[4 * j + 1] = x[4 * j + 3] = two.y;
  }
}

// Sets scores of S^T to -inf where the query does not see the key, or there is no key. This lane's
// first element is of `key` and `query`.
__device__ __forceinline__ void hide(float (&s)[kQueries / 2], const Tile& tile, int key,
                                     int query) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const tile::Range rows = tile.visibility.rows(key + 8 * r);
    const int begin = rows.begin - query;
    const unsigned count = key + 8 * r < tile.seqlen_k ? max(rows.end - rows.begin, 0) : 0;
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = 4 * j + 2 * r + e;
        if (static_cast<unsigned>(tile::fragment_column(i) - begin) >= count)
          s[i] = tile::negative_infinity();
      }
  }
}

constexpr int kTiles = 2;  // of a queue
// Blocks of queries that are still to be loaded when the next tile is looked for: an atomic
// addition and the first copies take some 5,000 cycles, in which two are computed.
constexpr int kBlocksAhead = 4;

// By a whole warp.
__device__ __forceinline__ int next_tile(int* counter) {
  int taken = 0;
  if (threadIdx.x % 32 == 0) taken = atomicAdd(counter, 1);
  return gridDim.x + __shfl_sync(~0u, taken, 0);
}

// Tiles, from the warp that finds them to all others of a persistent block. `full` and `loaded`
// have one arrival, `empty` one of every warp that reads.
template <class Tile>
struct TileQueue {
  Tile tiles[kTiles];
  ptx::Mbarrier full[kTiles], empty[kTiles];
  ptx::Mbarrier loaded;  // the loading warp, once it has asked for most of a tile -> the finder
};

// The warp that finds tiles: a block's first has its own number, and a counter gives the others,
// not much sooner than there is something to load: who takes tiles early leaves other blocks idle
// at the end (13% at head_dim 128, causal, 8192 queries). After the last tile comes one of -1
// blocks.
template <class Tile>
__device__ __forceinline__ void find_tiles(TileQueue<Tile>& queue, const ForwardParams& params,
                                           const Sm90BackwardParams& sm90, int tiles,
                                           int* counter) {
  tile::PipelineCounter<kTiles> at;
  int number = blockIdx.x;
  bool exists = true;
  while (exists) {
    ptx::mbarrier_wait(queue.empty[at.state().index], at.state().parity ^ 1);
    Tile& tile = queue.tiles[at.state().index];  // written by all lanes: registers are few
    exists = false;
    while (number < tiles && !exists) {
      exists = find_tile(tile, params, sm90, number);
      if (!exists) number = next_tile(counter);
      __syncwarp();  // before the tile is written again
    }
    if (!exists) tile.blocks = -1;
    tile::arrive_warp(queue.full[at.state().index]);
    if (exists) {
      ptx::mbarrier_wait(queue.loaded, at.count % 2);
      number = next_tile(counter);
    }
    at.advance();
  }
}

// Tells the compiler that all lanes have the same.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
