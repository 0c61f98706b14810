// Sums of dq in one order, that of keys (Config::in_order of gradients/backward_sm90.cu): which
// tiles a thread block takes then, and how its parts of dq are added.
//
// A tile waits for the one before it among those that see the same queries, which has a smaller
// number. A counter gives tiles, in the order of their numbers, to thread blocks that run. So of
// the tiles that are not done the first waits for nobody, however few blocks run: its block has
// done those that it took before, and none of its warps waits for what comes after.
#pragma once

#include "gradients/produce_sm90.cuh"

static_assert(!Config::in_order || (Config::computes_dq && !kStoresByTma),
              "what is in order are sums of dq, which have the stages of its parts alone");
static_assert(!Config::in_order || kOneRing || !kAlternate,
              "a ring has a part of every block of queries");

// find_tiles where the counter gives a block its first tile, too.
template <class Tile>
__device__ __forceinline__ void find_tiles_in_order(TileQueue<Tile>& queue,
                                                    const ForwardParams& params,
                                                    const Sm90BackwardParams& sm90) {
  const int first = gridDim.x;  // that next_tile gives
  tile::PipelineState<kTiles> at;
  tile::PipelineState<1> loaded;
  bool exists = true;
  while (exists) {
    int number = next_tile(sm90.next_tile) - first;
    ptx::mbarrier_wait(queue.empty[at.index], at.parity ^ 1);
    Tile& tile = queue.tiles[at.index];
    exists = false;
    while (number < sm90.tiles && !exists) {
      exists = find_tile(tile, params, sm90, number);
      if (!exists) number = next_tile(sm90.next_tile) - first;
      __syncwarp();  // before the tile is written again
    }
    if (!exists) tile.blocks = -1;
    tile::arrive_warp(queue.full[at.index]);
    at.advance();
    if (exists) {
      ptx::mbarrier_wait(queue.loaded, loaded.parity);
      loaded.advance();
    }
  }
}

// Whether sequences lie one after the other, as they must; by a whole warp. If not, their tiles may
// be any, and nobody may wait for one: sums are nonsense then in any order.
__device__ __forceinline__ bool are_in_order(const int* cu_seqlens, int batch, int total) {
  bool result = true;
  for (int index = threadIdx.x % 32; index < batch; index += 32) {
    const int begin = cu_seqlens[index], end = cu_seqlens[index + 1];
    result = result && 0 <= begin && begin <= end && end <= total;
  }
  return __all_sync(~0u, result);
}

__device__ __forceinline__ bool tiles_exist(const ForwardParams& params) {
  if constexpr (Config::varlen)
    return are_in_order(params.cu_seqlens_q, params.batch, params.seqlen_q) &&
           are_in_order(params.cu_seqlens_k, params.batch, params.seqlen_k);
  return true;
}

// Adds the parts of dq of one ring to the sums; one thread. Sm90BackwardParams::opened says of a
// part kOpen and how many tiles are still to add to it: the first tile's part is stored, and the
// last leaves kOpen.
struct AdderInOrder {
  Smem& smem;
  const ForwardParams& params;
  const Sm90BackwardParams& sm90;
  const int ring;
  const bool waits;  // where the tiles that it would wait for exist
  tile::PipelineState<kStagesDq> stage;

  __device__ __forceinline__ void run() {
    tile::PipelineState<kTiles> at;
    while (true) {
      ptx::mbarrier_wait(smem.queue.full[at.index], at.parity);
      const Tile& tile = smem.queue.tiles[at.index];
      if (tile.blocks < 0) return;
      add(tile);
      ptx::mbarrier_arrive(smem.queue.empty[at.index]);
      at.advance();
    }
  }

  __device__ __forceinline__ void add(const Tile& tile) {
    const int group = sm90.group;
    QueryWalk walk(tile);
    for (int n = 0; n < group * tile.blocks; ++n, walk.advance(params, group)) {
      const long long row =
          statistics_row(params, sm90, tile.batch, tile.head_kv * group + walk.head,
                         tile.statistics_row + walk.row());
      const long long part = row / 64 * kParts + (kOneRing ? 0 : ring);
      unsigned long long* const opened = sm90.opened + part;
      // The tiles that add to it: by whole blocks of queries, as in find_tile.
      const tile::Range keys = tile.visibility.keys_of_any(walk.row(), walk.row() + kQueries - 1);
      const int number = tile.first_key / kKeys;
      const bool is_first = number == max(keys.begin, 0) / kKeys;
      const unsigned long long left = kOpen + (keys.end - 1) / kKeys - number;

      // Asked for while the part is still to come.
      const bool has_turn = is_first || !waits || ptx::load_acquire(opened) == left + 1;
      ptx::mbarrier_wait(smem.full_dq[ring][stage.index], stage.parity);
      if (!has_turn)
        while (ptx::load_acquire(opened) != left + 1) continue;
      ptx::fence_proxy_async_global();
      float* const sums = sm90.dq_sums + part * kPartFloats;
      const float* const source = smem.dq[ring][stage.index];
      if (is_first)
        ptx::bulk_store(sums, source, kPartFloats * 4);
      else
        ptx::bulk_reduce_add(sums, source, kPartFloats * 4);
      ptx::bulk_commit_group();

      // The stage is free as soon as it has been read, and the next tile may add once all is
      // written.
      ptx::bulk_wait_group_read<0>();
      ptx::mbarrier_arrive(smem.empty_dq[ring][stage.index]);
      ptx::bulk_wait_all();
      ptx::store_release(opened, left);
      stage.advance();
    }
  }
};

// add_dq in the order of keys.
__device__ __forceinline__ void add_dq_in_order(Smem& smem, const ForwardParams& params,
                                                const Sm90BackwardParams& sm90, int ring) {
  const bool waits = tiles_exist(params);
  if (threadIdx.x % 32 == 0) AdderInOrder{smem, params, sm90, ring, waits}.run();
}
