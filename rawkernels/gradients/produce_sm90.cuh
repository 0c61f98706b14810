// Shared memory of gradients/backward_sm90.cu and backward_192_sm90.cu, and their warps that find
// tiles, load them, and add dq to the sums in global memory.
#pragma once

#include "gradients/layout_sm90.cuh"
#include "ptx/acquire_release.cuh"
#include "ptx/bulk.cuh"
#include "ptx/tma_store.cuh"

constexpr int kDimV = Config::head_dim_v;  // of values and dout, padded; kDim is of the others
constexpr int kPanelsV = kDimV / 64;
constexpr int kConsumers = kKeys / 64;     // warpgroups, of 64 keys each
constexpr bool kAlternate = kPanels == 1;  // dq of a block is one part, which they compute in turn
// Where registers suffice, the first products of a block are in flight with the last of the block
// before.
constexpr bool kPipelined = kDim == 64 && kConsumers == 2 && !Config::dropout;
constexpr int kStages = kDim == 64 ? 4 : 2;  // of queries and dout
constexpr int kStagesDs = kDim > 128 ? 1 : 2;
// Parts of dq that wait to be added: three consumers have one ring of them, and a warp that adds,
// else each has its own.
constexpr bool kOneRing = kConsumers == 3;
constexpr int kRings = kOneRing ? 1 : kConsumers;
constexpr int kStagesDq = kOneRing ? kConsumers : kDim > 128 ? 1 : 2;
constexpr int kParts = kDim / part_columns(kDim);  // of dq of a block of queries
constexpr int kPartFloats = 64 * part_columns(kDim);
// dk and dv of a tile leave by the stages of dq's parts, of which each takes one, or at head_dim 64
// both of a consumer: it goes on while TMA writes them. Tiles of 128 features that walk over many
// queries have no gain from it: consumers write their registers there.
constexpr bool kStoresByTma = Config::stores_by_tma;
constexpr int kStagesOfResults = kOneRing ? kConsumers : kPanels;  // of a ring
// Warps that compute, load and add.
constexpr int kTileReaders = 4 * kConsumers + 1 + (Config::computes_dq ? kRings : 0);

// The blocks of queries of a tile. Where sums have an order the last queries come first: tiles that
// begin together come to a block of queries together then with a causal mask, however many blocks
// each sees, and with a window the first keys come first. With a window all blocks of a head come
// before the next head, as L2 then keeps a sum from one tile to the next (but at head_dim 64, where
// registers do not suffice); else all heads of the group come before the next block, so that tiles
// of few blocks do not wait at every head, nor come to a head long before the others
// (Config::heads_inside): they would read and add to memory what L2 no longer has.
struct QueryWalk : Walk {
  static constexpr bool kBackwards = Config::in_order || Config::heads_inside;
  using Walk::Walk;

  __device__ __forceinline__ int row() const {
    return kBackwards ? (first + left - 1) * kQueries : Walk::row();
  }
  __device__ __forceinline__ void advance(const ForwardParams& params, int group) {
    const bool of_one_head = Config::head_dim > 64 && params.window_left != kUnbounded;
    if (!kBackwards || of_one_head) return Walk::advance();
    if (++head == group) {
      head = 0;
      --left;
    }
  }
};

struct Smem {
  alignas(1024) unsigned char k[kPanels * kPanelBytesK];
  alignas(1024) unsigned char v[kPanelsV * kPanelBytesK];
  alignas(1024) unsigned char q[kStages][kPanels * kPanelBytesQ];
  alignas(1024) unsigned char dout[kStages][kPanelsV * kPanelBytesQ];
  alignas(
      1024) unsigned char ds[kStagesDs][kConsumers][kPanelBytesQ];  // queries × a consumer's keys
  alignas(1024) float dq[kRings][kStagesDq][kPartFloats];
  alignas(128) float score_start[kStages][kQueries], dp_start[kStages][kQueries];
  // TMA's bytes -> all consumers; every consumer warp -> the loading warp.
  ptx::Mbarrier full_k, full_v, empty_k, empty_v;
  ptx::Mbarrier full_q[kStages], full_o[kStages], empty_q[kStages], empty_o[kStages];
  ptx::Mbarrier full_ds[kStagesDs], empty_ds[kStagesDs];  // every consumer warp -> all of them
  // A consumer's warps -> the warp that adds its part to dq_sums, and back.
  ptx::Mbarrier full_dq[kRings][kStagesDq], empty_dq[kRings][kStagesDq];
  TileQueue<Tile> queue;
  // The loading thread's own: its registers are few.
  tile::PipelineCounter<kTiles> loader_at;
  tile::PipelineCounter<1> loader_keys;
};

static_assert(!kStoresByTma || Config::computes_dq, "dk and dv need the stages of dq's parts");
static_assert(!kStoresByTma || 2 * 64 * kDim * sizeof(T) == kPanels * kPartFloats * sizeof(float),
              "dk and dv of a consumer's keys have the size of a part of dq for each panel");
static_assert(sizeof(Smem) <= Config::smem_bytes, "Config::smem_bytes must hold Smem");
static_assert(Config::threads == 128 * (kConsumers + 1), "one warpgroup loads, the others compute");
static_assert(kKeys == 64 * kConsumers, "a consumer has 64 keys");
static_assert(!kOneRing || kAlternate, "with one ring every block of queries has one part of dq");
static_assert(kQueries == 64 && kParts <= kConsumers, "a consumer computes one part of dq");
static_assert(kDimV % 64 == 0 && (!kStoresByTma || kDim == kDimV), "panels are whole, and alike");

__device__ __forceinline__ void init_barriers(Smem& smem) {
  ptx::mbarrier_init(smem.full_k, 1);
  ptx::mbarrier_init(smem.full_v, 1);
  ptx::mbarrier_init(smem.empty_k, 4 * kConsumers);
  ptx::mbarrier_init(smem.empty_v, 4 * kConsumers);
  for (int i = 0; i < kStages; ++i) {
    ptx::mbarrier_init(smem.full_q[i], 1);
    ptx::mbarrier_init(smem.full_o[i], 1);
    ptx::mbarrier_init(smem.empty_q[i], 4 * kConsumers);
    ptx::mbarrier_init(smem.empty_o[i], 4 * kConsumers);
  }
  for (int i = 0; i < kStagesDs; ++i) {
    ptx::mbarrier_init(smem.full_ds[i], 4 * kConsumers);
    ptx::mbarrier_init(smem.empty_ds[i], kAlternate ? 4 : 4 * kConsumers);
  }
  for (int i = 0; i < kRings * kStagesDq; ++i) {
    ptx::mbarrier_init(smem.full_dq[i / kStagesDq][i % kStagesDq], 4);
    ptx::mbarrier_init(smem.empty_dq[i / kStagesDq][i % kStagesDq], 1);
  }
  for (int i = 0; i < kTiles; ++i) {
    ptx::mbarrier_init(smem.queue.full[i], 1);
    ptx::mbarrier_init(smem.queue.empty[i], kTileReaders);
  }
  ptx::mbarrier_init(smem.queue.loaded, 1);
  smem.loader_at.count = smem.loader_keys.count = 0;
  ptx::fence_mbarrier_init();
}

__device__ __forceinline__ void prefetch_maps(const Sm90BackwardParams& sm90) {
  ptx::prefetch_tensormap(sm90.q);
  ptx::prefetch_tensormap(sm90.k);
  ptx::prefetch_tensormap(sm90.v);
  ptx::prefetch_tensormap(sm90.dout);
  if (kStoresByTma) {
    ptx::prefetch_tensormap(sm90.dk);
    ptx::prefetch_tensormap(sm90.dv);
  }
}

// The warp that loads, one thread of it: block after block of queries and dout with their
// statistics, and after a tile's first block its values and keys, whose places become free later.
// Tiles are not copied, here and in add_dq: registers are few.
struct Loader {
  Smem& smem;
  const ForwardParams& params;
  const Sm90BackwardParams& sm90;
  tile::PipelineCounter<kStages> stage;

  __device__ __forceinline__ void run() {
    tile::PipelineCounter<kTiles>& at = smem.loader_at;
    while (true) {
      ptx::mbarrier_wait(smem.queue.full[at.state().index], at.state().parity);
      const Tile& tile = smem.queue.tiles[at.state().index];
      if (tile.blocks < 0) return;
      load(tile);
      ptx::mbarrier_arrive(smem.queue.empty[at.state().index]);
      at.advance();
    }
  }

  __device__ __forceinline__ void load(const Tile& tile) {
    const int group = sm90.group;
    if (tile.blocks == 0) return ptx::mbarrier_arrive(smem.queue.loaded);
    const int until_next = max(group * tile.blocks - kBlocksAhead, 0);
    QueryWalk walk(tile);
    for (int n = 0; n < group * tile.blocks; ++n) {
      if (n == until_next) ptx::mbarrier_arrive(smem.queue.loaded);
      const int head = tile.head_kv * group + walk.head, row = walk.row();
      const long long at =
          statistics_row(params, sm90, tile.batch, head, tile.statistics_row + row);
      const auto [now, parity] = stage.state();
      ptx::mbarrier_wait(smem.empty_q[now], parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(smem.full_q[now], kPanels * kPanelBytesQ + kQueries * 4);
      ptx::bulk_load(smem.score_start[now], sm90.score_start + at, kQueries * 4, smem.full_q[now]);
      load_rows<kPanelBytesQ>(smem.q[now], sm90.q, smem.full_q[now], tile.queries, row, head);
      ptx::mbarrier_wait(smem.empty_o[now], parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(smem.full_o[now], kPanelsV * kPanelBytesQ + kQueries * 4);
      ptx::bulk_load(smem.dp_start[now], sm90.dp_start + at, kQueries * 4, smem.full_o[now]);
      load_rows<kPanelBytesQ, kPanelsV>(smem.dout[now], sm90.dout, smem.full_o[now], tile.queries,
                                        row, head);
      if (n == 0) {
        load_keys<kPanelsV>(smem.v, sm90.v, smem.full_v, smem.empty_v, tile);
        load_keys<kPanels>(smem.k, sm90.k, smem.full_k, smem.empty_k, tile);
      }
      stage.advance();
      walk.advance(params, group);
    }
    smem.loader_keys.advance();
  }

  template <int kCount>
  __device__ __forceinline__ void load_keys(unsigned char* place, const ptx::TensorMap& map,
                                            ptx::Mbarrier& full, ptx::Mbarrier& empty,
                                            const Tile& tile) {
    ptx::mbarrier_wait(empty, smem.loader_keys.state().parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, kCount * kPanelBytesK);
    load_rows<kPanelBytesK, kCount>(place, map, full, tile.keys, tile.first_key, tile.head_kv);
  }
};

// Adds a part of dq to its sums; by one thread. Where sums do not begin as zeros, who comes first
// opens them: its part is stored, not added, and all others wait until it is there. Nobody waits
// but for a store that is under way, so tiles may come in any order. (Where sequences are not what
// they must be, what is found there may be anything.)
__device__ __forceinline__ void add_part(const Sm90BackwardParams& sm90, long long part,
                                         const float* source, bool is_open) {
  constexpr int kBytes = kPartFloats * 4;
  float* const sums = sm90.dq_sums + part * kPartFloats;
  if (!is_open) {
    unsigned long long* const opened = sm90.opened + part;
    if (atomicMax(opened, kOpening) == kUnopened) {
      ptx::bulk_store(sums, source, kBytes);
      ptx::bulk_commit_group();
      ptx::bulk_wait_all();
      return ptx::store_release(opened, kOpen);
    }
    while (ptx::load_acquire(opened) == kOpening) continue;
  }
  if (sm90.opened != nullptr) ptx::fence_proxy_async_global();
  ptx::bulk_reduce_add(sums, source, kBytes);
  ptx::bulk_commit_group();
}

// Writes dk or dv of a consumer's keys, of the tile's rows `row` and on: by one thread.
__device__ __forceinline__ void store_gradient(const ptx::TensorMap& map, const Tile& tile, int row,
                                               const float* source) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    const float* const from = source + panel * (64 * kRowBytes / 4);
    const tile::TmaRows& rows = tile.keys;
    if constexpr (Config::varlen)
      ptx::tma_store(map, from, 64 * panel, rows.shift + row, tile.head_kv, rows.outer,
                     tile::kFarRows);
    else
      ptx::tma_store(map, from, 64 * panel, rows.shift + row, tile.head_kv, rows.outer);
  }
}

// Gives back the stage of a ring before `now`, or `now` where there is one, once it has been read;
// by one thread, after it committed what reads stage `now`.
__device__ __forceinline__ void release_before(Smem& smem, int ring, int now, bool exists) {
  if constexpr (kStagesDq == 1) {
    ptx::bulk_wait_group_read<0>();
    return ptx::mbarrier_arrive(smem.empty_dq[ring][now]);
  }
  ptx::bulk_wait_group_read<1>();
  if (exists) ptx::mbarrier_arrive(smem.empty_dq[ring][now == 0 ? kStagesDq - 1 : now - 1]);
}

// A warp that adds the parts of dq of one ring to the sums, and where TMA writes dk and dv of a
// consumer hands them over.
__device__ __forceinline__ void add_dq(Smem& smem, const ForwardParams& params,
                                       const Sm90BackwardParams& sm90, int ring) {
  const int group = sm90.group;
  tile::PipelineState<kTiles> at;
  tile::PipelineState<kStagesDq> stage;
  bool reads_another = false;  // the sum before, of the stage before
  while (true) {
    const Tile& tile = smem.queue.tiles[at.index];
    ptx::mbarrier_wait(smem.queue.full[at.index], at.parity);
    if (tile.blocks < 0) break;
    QueryWalk walk(tile);
    for (int n = 0; n < group * tile.blocks; ++n, walk.advance(params, group)) {
      if (kAlternate && !kOneRing && n % 2 != ring) continue;
      const long long row =
          statistics_row(params, sm90, tile.batch, tile.head_kv * group + walk.head,
                         tile.statistics_row + walk.row());
      const long long part = row / 64 * kParts + (kAlternate ? 0 : ring);
      const int now = stage.index;
      // Most sums are open by then, and asked for while the part is still to come.
      const bool is_open = sm90.opened == nullptr || ptx::load_acquire(sm90.opened + part) == kOpen;
      ptx::mbarrier_wait(smem.full_dq[ring][now], stage.parity);
      if (threadIdx.x % 32 == 0) {
        add_part(sm90, part, smem.dq[ring][now], is_open);
        release_before(smem, ring, now, reads_another);
      }
      reads_another = true;
      stage.advance();
      __syncwarp();
    }
    for (int n = 0; n < kStoresByTma * kStagesOfResults; ++n) {
      const int now = stage.index, row = tile.first_key + 64 * (kOneRing ? now : ring);
      const float* const source = smem.dq[ring][now];
      ptx::mbarrier_wait(smem.full_dq[ring][now], stage.parity);
      if (threadIdx.x % 32 == 0) {
        if (kPanels == 1 || n == 0) store_gradient(sm90.dv, tile, row, source);
        if (kPanels == 1 || n == 1)
          store_gradient(sm90.dk, tile, row, source + (2 - kPanels) * kPartFloats / 2);
        ptx::bulk_commit_group();
        release_before(smem, ring, now, reads_another);
      }
      reads_another = true;
      stage.advance();
      __syncwarp();
    }
    tile::arrive_warp(smem.queue.empty[at.index]);
    at.advance();
  }
  if (threadIdx.x % 32 == 0) ptx::bulk_wait_all();
}
