// Four rows of numbers of 16 bits that become codes with a scale each, in a few threads' registers:
// neighbouring threads have neighbouring features.
#pragma once

#include "tile/code_row.cuh"
#include "tile/found_scale.cuh"
#include "tile/packed_extent.cuh"

namespace tile {

// Each of kThreads has eight features of every row. A row's scale is found by one in four of them.
template <class T, int kThreads, int kFormat>
struct FourRows {
  static constexpr bool kHasMinimum = kFormat == kInt4;
  static_assert(sizeof(T) == 2, "words hold two numbers");
  static_assert(kThreads == 8 || kThreads == 16, "a row must be a half or a quarter of a warp");

  uint4 words[4];

  __device__ __forceinline__ void fetch(const T* first, long long stride) {
#pragma unroll
    for (int row = 0; row < 4; ++row)
      words[row] = __ldcs(reinterpret_cast<const uint4*>(first + row * stride));
  }

  // The row whose scale this thread finds.
  __device__ __forceinline__ static int own_row() {
    return threadIdx.x % 2 * 2 + threadIdx.x / 2 % 2;
  }

  __device__ __forceinline__ FoundScale find_scale() const {
    const bool odd = threadIdx.x % 2, upper = threadIdx.x / 2 % 2;
    // Words of what a thread keeps of two of the rows, or parts of rows; the other has the others.
    const auto halved = [&](unsigned first, unsigned second, bool keeps_second, int distance) {
      const unsigned kept = keeps_second ? second : first;
      const unsigned others = __shfl_xor_sync(~0u, keeps_second ? first : second, distance);
      return larger_halves<T>(kept, others);
    };
    unsigned ends[4];
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      const unsigned of_row[4] = {words[row].x, words[row].y, words[row].z, words[row].w};
      ends[row] = packed_extent<T>(of_row);
    }
    unsigned own;
    if constexpr (kHasMinimum) {
      const unsigned first = halved(ends[0], ends[2], odd, 1);
      const unsigned second = halved(ends[1], ends[3], odd, 1);
      own = halved(first, second, upper, 2);
    } else {
      own = halved(magnitudes(ends[0], ends[1]), magnitudes(ends[2], ends[3]), odd, 1);
      own = larger_halves<T>(own, __shfl_xor_sync(~0u, own, 2));
    }
#pragma unroll
    for (int distance = 4; distance < kThreads; distance *= 2)
      own = larger_halves<T>(own, __shfl_xor_sync(~0u, own, distance));
    const float2 both = to_floats<T>(own);
    if constexpr (kHasMinimum) return found_scale<kFormat>(both.x, negated(both.y));
    const float most = upper ? both.y : both.x;
    return found_scale<kFormat>(most, most);
  }

  // Gives codes of this thread's features to `put`, of one row after the other.
  template <class Put>
  __device__ __forceinline__ void divide(const FoundScale& found, const Put& put) {
    float own_inverse = found.inverse;
    if (__any_sync(~0u, found.scale != found.scale)) {  // rows of which a number is not finite
      if (found.scale != found.scale) own_inverse = 0;
#pragma unroll 1
      for (int row = 0; row < 4; ++row) {
        const float scale = __shfl_sync(~0u, found.scale, finder(row), kThreads);
        const auto clear = [&](uint4& of_row, int its) {
          if (row == its && scale != scale) of_row = make_uint4(0, 0, 0, 0);
        };
#pragma unroll
        for (int its = 0; its < 4; ++its) clear(words[its], its);
      }
    }
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      const float inverse = __shfl_sync(~0u, own_inverse, finder(row), kThreads);
      const float minimum =
          kHasMinimum ? __shfl_sync(~0u, found.minimum, finder(row), kThreads) : 0.0f;
      const unsigned of_row[4] = {words[row].x, words[row].y, words[row].z, words[row].w};
      float x[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = to_floats<T>(of_row[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
      put(eight_codes<kFormat>(x, inverse, minimum));
    }
  }

 private:
  // Which of a row's threads finds the scale of `row`: own_row's inverse.
  __device__ __forceinline__ static int finder(int row) { return row / 2 + row % 2 * 2; }
  // Of two rows, one in each half.
  __device__ __forceinline__ static unsigned magnitudes(unsigned ends, unsigned ends_of_next) {
    return larger_halves<T>(ptx::prmt(ends, ends_of_next, 0x5410),
                            ptx::prmt(ends, ends_of_next, 0x7632));
  }
};

}  // namespace tile
