// Results that infinities and NaN go into, where a product is computed apart from its values that
// are not finite (tile::Content).
#pragma once

#include "tile/accumulator.cuh"
#include "tile/swizzle.cuh"

namespace tile {

// The output, given the weight in it of the values that `pass` is for.
template <class T>
__device__ __forceinline__ T with_nonfinite(T out, T weight, int pass) {
  const float value = static_cast<float>(out), infinity = tile::infinity();
  if (static_cast<float>(weight) == 0.0f || value != value) return out;
  if (pass == kPositive) return static_cast<T>(infinity);
  return static_cast<T>(value == infinity ? infinity - infinity : -infinity);
}

}  // namespace tile
