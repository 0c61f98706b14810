// Division by a number that the host knows, by a multiplication (Granlund & Montgomery, 1994).
#pragma once

namespace tile {

// n / divisor = n * magic >> shift for n below 2^31: `divisor` of cuattn/gpu/params.py.
struct Divisor {
  unsigned magic, shift;
};
__device__ __forceinline__ int divided(int n, Divisor by) {
  return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(n)) * by.magic >>
                          by.shift);
}

}  // namespace tile
