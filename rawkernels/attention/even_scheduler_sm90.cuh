// The even tile scheduler of attention/forward_sm90.cu (Config::even_keys), which shares keys out
// to thread blocks whatever the sequences' lengths, and the choice between schedulers.
#pragma once

#include "attention/scheduler_sm90.cuh"

// Config::even_keys: a tile has all rows of a sequence and key head. Thread blocks work in teams of
// Sm90Params::section, of a head each, which read the same keys at the same time: rows of several
// heads have lines of L2 in common, and would else be fetched twice (33% more of 96 features). The
// blocks of keys of all sequences lie in one row, of which every team has an equal range: sequence
// after sequence and, where there are more heads than that, section after section.
//
// Where the lengths allow it a range is a part of one sequence or a whole one, as then no thread
// block has two tiles to leave to others: a sequence's blocks are taken in units of as many as a
// team then has. Else a unit is one block. A sequence without keys counts as one block, which is a
// tile of its own. All lanes of one warp together.
struct EvenTileScheduler {
  // Blocks that a team may have more than the mean, so that it has a part of one sequence: they
  // take as long as to leave another part in memory.
  static constexpr unsigned kMostUneven = Config::head_dim <= 64 ? 4 : 2;

  const ForwardParams& params;
  const Sm90Params& sm90;
  const unsigned sections, teams;
  unsigned unit = 1;              // blocks
  unsigned total, ranges;         // units of keys, and teams that have some
  unsigned at, end;               // where this team is in its range
  int index = 0;                  // the sequence there,
  unsigned first = 0, units = 1;  // where its keys begin, and its units for each section

  __device__ __forceinline__ EvenTileScheduler(const ForwardParams& params, const Sm90Params& sm90,
                                               SortedTiles::Shared&)
      : params(params),
        sm90(sm90),
        sections(params.heads_kv / sm90.section),
        teams(gridDim.x / sm90.section) {
    total = count_units();
    if (sections * params.batch <= teams) choose_unit();
    ranges = min(teams, total);
    const unsigned team = blockIdx.x / sm90.section;
    at = team < ranges ? begin_of(team) : total;
    end = team < ranges ? begin_of(team + 1) : total;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (; at < end; index += 32) {
      unsigned until = index + lane < params.batch ? units_of(keys_of(index + lane)) : 0;
      until *= sections;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const unsigned before = __shfl_up_sync(~0u, until, step);
        if (lane >= step) until += before;
      }
      const unsigned owners = __ballot_sync(~0u, at < first + until);
      if (owners != 0) {
        const int owner = __ffs(owners) - 1;
        if (owner > 0) first += __shfl_sync(~0u, until, owner - 1);
        index += owner;
        break;
      }
      first += __shfl_sync(~0u, until, 31);
    }
  }

  __device__ __forceinline__ Tile next(bool is_first) {
    Tile tile;
    tile.row = -1;
    if (at >= end) return tile;
    int keys = keys_of(index);
    if (!is_first && at >= first + units * sections) {
      first += units * sections;
      keys = keys_of(++index);
    }
    units = units_of(keys);
    const unsigned section = (at - first) / units;
    const unsigned begin = first + section * units, until = min(end, begin + units);
    tile.row = 0;
    tile.batch = index;
    const unsigned member = blockIdx.x % sm90.section;
    set_head(tile, params, section * sm90.section + member);
    tile.queries = {params.seqlen_q, 0, index};
    tile.keys = {keys, 0, index};
    tile.block_begin = block_of_unit(at - begin, keys);
    tile.block_end = keys == 0 ? 0 : block_of_unit(until - begin, keys);
    const unsigned first_team = team_of(begin);
    tile.set_parts(first_team * sm90.section + member, team_of(begin + units - 1) - first_team + 1);
    at = until;
    return tile;
  }

 private:
  __device__ __forceinline__ int keys_of(int index) const {
    return find_sequence(params, sm90, index).seqlen_k;
  }
  __device__ __forceinline__ static unsigned blocks_of(int keys) {
    return max(1, (keys + Config::tile_n - 1) / Config::tile_n);
  }
  __device__ __forceinline__ unsigned units_of(int keys) const {
    return unit == 1 ? blocks_of(keys) : (blocks_of(keys) + unit - 1) / unit;
  }
  // The first block of a sequence's unit: units are equal, but for one block.
  __device__ __forceinline__ unsigned block_of_unit(unsigned number, int keys) const {
    return unit == 1 ? number : number * blocks_of(keys) / units;
  }

  __device__ __forceinline__ unsigned count_units() const {
    unsigned sum = 0;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < params.batch; i += 32) sum += units_of(keys_of(i));
    return __reduce_add_sync(~0u, sum) * sections;
  }

  // The smallest unit of which every team has one at most, where that is not too uneven.
  __device__ __forceinline__ void choose_unit() {
    const unsigned blocks = total, even = (blocks + teams - 1) / teams;
#pragma unroll 1
    for (unit = even; unit <= even + kMostUneven; ++unit) {
      total = count_units();
      if (total <= teams) return;
    }
    unit = 1;
    total = blocks;
  }

  __device__ __forceinline__ unsigned begin_of(unsigned team) const {
    return static_cast<unsigned long long>(total) * team / ranges;
  }
  // The team whose range has a place.
  __device__ __forceinline__ unsigned team_of(unsigned place) const {
    return ((place + 1ull) * ranges - 1) / total;
  }
};
