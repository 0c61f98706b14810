// How a kernel stores keys and values in shared memory, be they of the queries' type or codes.
#pragma once

#include "decoding/slice_codes.cuh"

namespace decoding {

// How a kernel stores K and V in shared memory, and what computes with them: PlainStage and
// PlainSlice for elements of the queries' type, or these for codes.
template <class PlainStage, class PlainSlice, int kKFormat, int kVFormat, int kHeadDim, int kRows,
          int kWarpRows, int kWarpKeys, int kKGroups, int kVGroups>
struct Storage {
  using Stage = CodeStage<kKFormat, kVFormat, kWarpKeys, kHeadDim, kKGroups, kVGroups>;
  using Slice = CodeSlice<kKFormat, kVFormat, kHeadDim, kWarpRows, kWarpKeys, kKGroups, kVGroups>;
  using Tiles = typename Slice::Tiles;
  using QueryRows = typename Slice::QueryRows[kRows];
  template <int kWarps, int kStages, class Scales = typename Slice::Scales>
  struct Extra {  // shared memory, where a stage has only codes
    QueryRows query_rows;
    Scales scales[kWarps][kStages];
  };
};
template <class PlainStage, class PlainSlice, int kHeadDim, int kRows, int kWarpRows, int kWarpKeys,
          int kKGroups, int kVGroups>
struct Storage<PlainStage, PlainSlice, tile::kPlain, tile::kPlain, kHeadDim, kRows, kWarpRows,
               kWarpKeys, kKGroups, kVGroups> {
  using Stage = PlainStage;
  using Slice = PlainSlice;
  using Tiles = PlainStage;
  struct QueryRows {};
  template <int, int, class = void>
  struct Extra {};
};

}  // namespace decoding
