// Where the elements of a warp's accumulator fragment lie, for mma.sync and wgmma alike: element i
// of lane 4g + t is in row g + fragment_row(i) of the warp's 16 and column 2t + fragment_column(i).
#pragma once

namespace tile {

__device__ __forceinline__ constexpr int fragment_row(int i) { return i / 2 % 2 * 8; }
__device__ __forceinline__ constexpr int fragment_column(int i) { return i / 4 * 8 + i % 2; }

// Row and column of a lane's element 0.
__device__ __forceinline__ constexpr int lane_row(int lane) { return lane / 4; }
__device__ __forceinline__ constexpr int lane_column(int lane) { return lane % 4 * 2; }

}  // namespace tile
