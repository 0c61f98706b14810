// What the warps of decode_codes_sm90.cu share: the tiles of a block, and its shared memory.
#pragma once

#include "decoding/combine.cuh"
#include "decoding/slice_codes.cuh"

using T = Config::dtype;
constexpr int kHeadDim = Config::head_dim;
constexpr int kRows = Config::rows;
constexpr int kWarpKeys = Config::warp_keys;
constexpr int kWarps = Config::warps;
constexpr int kStages = Config::stages;
constexpr int kThreads = 32 * kWarps;         // that compute
constexpr int kHeads = Config::heads;         // of keys, neighbours that a block has side by side
constexpr int kUnits = kWarps / kHeads;       // of warps with the same keys of different heads
constexpr int kWarpRows = Config::warp_rows;  // of which a warp wants those of its head
constexpr int kHalves = Config::merged_rows / 4;  // of eight rows, that a block merges at a time
constexpr int kTileKeys = kUnits * kWarpKeys;
constexpr int kBlockKeys = Config::tile_keys;  // by which work is shared out
constexpr int kChunks = kHeadDim / 8;
static_assert(Config::threads == kThreads + 128, "registers are given by a whole warpgroup");
// Of the 128 or 168 that a thread has at first.
constexpr bool kWide = kHeadDim == 128 && (kHeads == 1 || Config::k_format == tile::kInt4);
constexpr int kLoadRegisters = kWarps == 8 ? 88 : kWide ? 80 : 104;
constexpr int kComputeRegisters = kWarps == 8 ? 208 : kWide ? 144 : 136;
static_assert(kWarps == 8 || kWarps == 12, "registers are shared out for these");
constexpr int kLoaders = kUnits % 4 == 0 ? 4 : kUnits % 3 == 0 ? 3 : 2;  // warps
constexpr int kLoadedUnits = kUnits / kLoaders;                          // by each of them
static_assert(kWarps % kHeads == 0 && kUnits % kLoaders == 0, "work is even");
static_assert(kWarpKeys % 32 == 0, "tiles are of whole boxes, of 32 keys or 16");
static_assert(kRows % kWarpRows == 0, "a head's rows must lie in one warp's");
static_assert(kRows * kChunks % 32 == 0, "lanes load queries in whole rounds");
static_assert(kHalves == 1 || kWarpRows % 8 == 0, "there must be two halves");

using QTile = decoding::SwizzledRows<kHeadDim>;
using Slice =
    decoding::CodeSlice<Config::k_format, Config::v_format, kHeadDim, kWarpRows, kWarpKeys, 1, 1>;
using Tiles = decoding::CodePanels<Config::k_format, Config::v_format, kWarpKeys, kHeadDim, kHeads>;
using KScale = decoding::PackedScale<Config::k_format>;
using VScale = decoding::PackedScale<Config::v_format>;
using Scales = decoding::PackedScales<Config::k_format, Config::v_format, kWarpKeys>;
constexpr int kKScaleLanes = sizeof(Scales::k) / 16, kVScaleLanes = sizeof(Scales::v) / 16;
constexpr int kScaleLanes = kKScaleLanes > kVScaleLanes ? kKScaleLanes : kVScaleLanes;
constexpr int kScaleChunks = kLoadedUnits * kHeads * kScaleLanes;  // a loading warp's at a time
using Schedule = decoding::Schedule<kRows, kBlockKeys, 1, true>;
using Writer = decoding::Writer<T, kRows, kHeadDim, true, 2, kWarps>;

// What the first loading warp finds out about a split, ahead of those that compute.
struct Work {
  decoding::Split split;
  decoding::SplitPlace place;
  decoding::Rows<T, kRows> rows;
  tile::Range common_keys;  // that all rows see
  bool exists;              // else there are no more splits
};

struct Smem {
  alignas(1024) Tiles ring[kUnits][kStages];
  alignas(128) T queries[2][kRows * kHeadDim];
  Scales scales[kUnits][kStages][kHeads];
  // Four or eight rows of each warp at a time, columns permuted.
  float o[kWarps][kHalves][4][kHeadDim];
  float2 max_sum[kWarps][kHalves][4];
  ptx::Mbarrier full[kUnits][kStages], empty[kUnits][kStages], full_queries[2], empty_queries[2];
  Slice::QueryRows query_rows[kRows];  // of the split that is computed
  Work work[2];                        // the split that is computed, and the next, in turn
  decoding::Split last_split;  // of a work tile that other blocks began: to be merged at the end
  decoding::SplitPlace last_place;
};
static_assert(sizeof(Smem) <= Config::smem_bytes, "Config has to ask for all of it");

struct Maps {
  ptx::TensorMap k, v;
};
