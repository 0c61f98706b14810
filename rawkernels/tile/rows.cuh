// Both kinds of rows of tile/code_row.cuh, by the number of lanes that a Config says.
#pragma once

#include "tile/lane_row.cuh"
#include "tile/warp_row.cuh"

namespace tile {

template <int kLanes>
struct RowOf {
  using type = LaneRow<kLanes>;
};
template <>
struct RowOf<0> {
  using type = WarpRow<16>;
};

}  // namespace tile
