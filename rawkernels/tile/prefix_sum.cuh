// Prefix sums over the lanes of a warp.
#pragma once

namespace tile {

// The sum of the lanes up to a thread's own, that one included.
template <class T>
__device__ __forceinline__ T prefix_sum_of_warp(T value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T left = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += left;
  }
  return value;
}

}  // namespace tile
