// Dropout of gradients/backward_sm90.cu: which entries of a block of S^T a consumer keeps
// (tile/dropout.cuh).
//
// Lane 4g + t of the mask's blocks of 16 queries and keys has the queries g and g + 8 and the keys
// 2t and 2t + 1 of both halves; in S^T, where keys are rows, lane 4g + t has the keys g and g + 8
// and the queries 2t and 2t + 1 of both halves. So a lane needs, of two lanes of the mask, one byte
// of each two. Every lane packs what it has of a warp's keys and all queries of a block into one
// word: bit 7 - n of a byte is bit 7 of the same byte of word n % 2 of queries 16 (n / 2) and on.
#pragma once

#include "gradients/layout_sm90.cuh"
#include "ptx/registers.cuh"
#include "tile/dropout.cuh"

// What is kept of a lane's entries of S^T, of its even queries and of its odd ones.
struct KeptSigns {
  unsigned even, odd;

  KeptSigns() = default;

  // Of a warp's 16 keys from 16 * key_block on, and the queries from first_query on.
  __device__ __forceinline__ KeptSigns(const DropoutParams& dropout, int first_query, int key_block,
                                       int head) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    unsigned word = 0;
#pragma unroll
    for (int j = 0; j < kQueries / 16; ++j) {
      const tile::DropoutRow row(dropout.seed, first_query / 16 + j, lane, head);
      const uint2 signs = row.kept_signs(dropout, key_block);
      word |= signs.x >> 2 * j & 0x80808080u >> 2 * j;
      word |= signs.y >> (2 * j + 1) & 0x80808080u >> (2 * j + 1);
    }
    const int first_lane = 8 * t + g / 2;
    even = ptx::opaque(__shfl_sync(~0u, word, first_lane) >> g % 2 * 8);
    odd = ptx::opaque(__shfl_sync(~0u, word, first_lane + 4) >> g % 2 * 8);
  }

  // Clears in P^T, packed, what is dropped.
  __device__ __forceinline__ void clear(unsigned (&p)[kQueries / 4]) const {
#pragma unroll
    for (int i = 0; i < kQueries / 4; ++i)
      p[i] &= ptx::prmt(even << bit(2 * i), odd << bit(2 * i), i / 2 % 2 == 0 ? 0xcc88 : 0xeeaa);
  }

  // Puts into the place of entries of dP^T that are dropped what they started with.
  __device__ __forceinline__ void restart(float (&dp)[kQueries / 2],
                                          const float (&start)[kQueries]) const {
    const float* const mine = start + tile::lane_column(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < kQueries / 2; i += 4) {
      const float2 two = *reinterpret_cast<const float2*>(mine + tile::fragment_column(i));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const unsigned word = e % 2 == 0 ? even : odd;
        const unsigned kept = ptx::prmt(word << bit(i + e), 0, i / 4 % 2 == 0 ? 0x8888 : 0xaaaa);
        const unsigned from = __float_as_uint(e % 2 == 0 ? two.x : two.y);
        dp[i + e] = __uint_as_float((__float_as_uint(dp[i + e]) & kept) | (from & ~kept));
      }
    }
  }

 private:
  // n of entry i.
  static __device__ __forceinline__ constexpr int bit(int i) { return i / 8 * 2 + i / 2 % 2; }
};
