// Where the elements of a warp's accumulator fragment lie, for mma.sync and wgmma alike: element i
// of lane 4g + t is in row g + fragment_row(i) of the warp's 16 and column 2t + fragment_column(i).
#pragma once

namespace tile {

__device__ __forceinline__ constexpr int fragment_row(int i) { return i / 2 % 2 * 8; }
__device__ __forceinline__ constexpr int fragment_column(int i) { return i / 4 * 8 + i % 2; }

// Row and column of a lane's element 0.
__device__ __forceinline__ constexpr int lane_row(int lane) { return lane / 4; }
__device__ __forceinline__ constexpr int lane_column(int lane) { return lane % 4 * 2; }

// The four lanes of a quad exchange words: lane t gives its word i to lane i, and gets that lane's
// word t, as its own word i. By all lanes of a warp.
__device__ __forceinline__ void transpose_quad(unsigned (&words)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // words 2 and 3 of the low lanes, 0 and 1 of the high ones
    const unsigned got = __shfl_xor_sync(~0u, high ? words[i] : words[i + 2], 2);
    words[i] = high ? got : words[i];
    words[i + 2] = high ? words[i + 2] : got;
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {  // words 1 and 3 of the even lanes, 0 and 2 of the odd ones
    const unsigned got = __shfl_xor_sync(~0u, odd ? words[i] : words[i + 1], 1);
    words[i] = odd ? got : words[i];
    words[i + 1] = odd ? words[i + 1] : got;
  }
}

}  // namespace tile
