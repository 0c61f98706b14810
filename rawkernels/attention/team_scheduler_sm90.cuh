// The tile scheduler of attention/forward_team_codes_sm90.cu: which tiles a team of thread blocks
// works on, in what order.
#pragma once

#include "attention/even_scheduler_sm90.cuh"

// CodeScales::team thread blocks side by side have neighbouring tiles of a key head at a time, a
// group, of which the last may be missing. Groups are dealt out to teams in turn, those of the last
// queries first: they see the most keys.
struct TeamTileScheduler {
  const ForwardParams& params;
  const Sm90Params& sm90;
  const int team;  // thread blocks
  int group;       // the next one's number

  __device__ __forceinline__ TeamTileScheduler(const ForwardParams& params, const Sm90Params& sm90,
                                               SortedTiles::Shared&)
      : params(params),
        sm90(sm90),
        team(team_size(static_cast<const Sm90Arguments&>(sm90))),
        group(blockIdx.x / team) {}

  __device__ __forceinline__ Tile next(bool) {
    Tile tile;
    tile.row = -1;
    const int heads = scheduled_heads(params);
    const int sequences = Config::varlen ? 1 : params.batch;  // that have as many groups
    const int groups = Config::varlen
                           ? divided_by_tile(sm90, params.seqlen_q) / team + params.batch
                           : groups_before(params.seqlen_q + team * queries_of_tile(params) - 1);
    while (group < groups * sequences * heads && tile.row < 0) {
      const int rest = group / heads, place = groups - 1 - rest / sequences;
      set_head(tile, params, group % heads);
      find(tile, rest % sequences, place);
      group += gridDim.x / team;
    }
    return tile;
  }

 private:
  // How many groups end before a query.
  __device__ __forceinline__ int groups_before(int query) const {
    return divided_by_tile(sm90, query) / team;
  }

  // The thread block's tile of a group; a negative row where a slot for ragged rows has none.
  __device__ __forceinline__ void find(Tile& tile, int sequence, int place) const {
    if constexpr (Config::varlen) {
      const auto by_group = [this](int query) { return groups_before(query); };
      tile.batch = tile::sequence_of_slot(params.cu_seqlens_q, params.batch, place, by_group);
      const tile::Sequence found = find_sequence(params, sm90, tile.batch);
      place = tile::tile_of_slot(static_cast<int>(found.begin_q), found.seqlen_q, tile.batch, place,
                                 team * queries_of_tile(params), by_group);
      tile.queries = tile::ragged_tma_rows(static_cast<int>(found.begin_q), found.seqlen_q);
      tile.keys = {found.seqlen_k, 0, tile.batch};
    } else {
      tile.batch = sequence;
      tile.queries = {params.seqlen_q, 0, sequence};
      tile.keys = {find_sequence(params, sm90, sequence).seqlen_k, 0, sequence};
    }
    tile.row = place * team * kTileM;
    if (tile.row < 0) return;
    const int first = tile.row;
    tile.row = first + (team - 1) * kTileM;
    tile.find_blocks(params, sm90);
    tile.set_team_end(tile.block_end);
    tile.row = first + static_cast<int>(blockIdx.x % team) * kTileM;
    tile.find_blocks(params, sm90);
    if (!tile.exists(params, tile.row)) tile.block_end = tile.block_begin = 0;
  }
};

enum class Scheduler { kStatic, kDynamic, kEven, kTeam };
template <Scheduler kScheduler>
struct TileSchedulerOf {
  using Type = StaticTileScheduler;
};
template <>
struct TileSchedulerOf<Scheduler::kDynamic> {
  using Type = DynamicTileScheduler;
};
template <>
struct TileSchedulerOf<Scheduler::kEven> {
  using Type = EvenTileScheduler;
};
template <>
struct TileSchedulerOf<Scheduler::kTeam> {
  using Type = TeamTileScheduler;
};
using TileScheduler = TileSchedulerOf<kSharesCodes        ? Scheduler::kTeam
                                      : Config::even_keys ? Scheduler::kEven
                                      : kDynamic          ? Scheduler::kDynamic
                                                          : Scheduler::kStatic>::Type;
