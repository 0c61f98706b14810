// Dropout of gradients/backward_sm90.cu: which entries of a block of S^T a consumer keeps
// (tile/dropout.cuh).
//
// Lane 4g + t of the mask's blocks of 16 queries and 32 keys has the queries g and g + 8 and the
// keys 2t and 2t + 1 of each eight; in S^T, where keys are rows, lane 4g + t has the keys g and
// g + 8 of its warp's 16 and the queries 2t and 2t + 1 of each eight. So a lane needs, of two lanes
// of the mask, one byte of each two. Two warps have the 32 keys of a counter: each evaluates those
// of half of the queries for both, and they exchange words through shared memory.
#pragma once

#include "gradients/produce_sm90.cuh"
#include "ptx/bar.cuh"
#include "ptx/registers.cuh"
#include "tile/dropout.cuh"

// Of two warps: what a lane of each has evaluated. Bit 7 - n of a byte is bit 7 of the same byte of
// word n / 4 * 2 + n % 2 of the counter of the evaluating warp's queries 16 (n / 2 % 2) and on.
struct MaskWords {
  unsigned of_warp[32][2];
};
constexpr int kPairs = kConsumers * 2;  // of warps
static_assert(!Config::dropout || sizeof(Smem) + kPairs * sizeof(MaskWords) <= Config::smem_bytes,
              "Config::smem_bytes must hold Smem and what follows it");

// What is kept of a lane's entries of S^T, of its even queries and of its odd ones: bit 7 - n of
// bytes 0 and 2 is of queries 8n and on, and of keys g and g + 8.
struct KeptSigns {
  unsigned even, odd;

  KeptSigns() = default;

  // Of a warp's 16 keys from 16 * key_block on, and the queries from first_query on.
  __device__ __forceinline__ KeptSigns(Smem& smem, const DropoutParams& dropout, int first_query,
                                       int key_block, int head) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int pair = threadIdx.x / 64 - 2, side = threadIdx.x / 32 % 2;
    unsigned word = 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const tile::DropoutRow row(dropout.seed, first_query / 16 + 2 * side + j, lane, head);
      uint4 signs[1];
      row.kept_signs(signs, dropout, key_block / 2);
      word |= signs[0].x >> 2 * j & 0x80808080u >> 2 * j;
      word |= signs[0].y >> (2 * j + 1) & 0x80808080u >> (2 * j + 1);
      word |= signs[0].z >> (2 * j + 4) & 0x80808080u >> (2 * j + 4);
      word |= signs[0].w >> (2 * j + 5) & 0x80808080u >> (2 * j + 5);
    }
    unsigned (&words)[32][2] = reinterpret_cast<MaskWords*>(&smem + 1)[pair].of_warp;
    ptx::bar_sync(1 + pair, 64);  // those of the block before have been read
    words[lane][side] = word;
    ptx::bar_sync(1 + kPairs + pair, 64);
    const int first_lane = 8 * t + g / 2;
    even = of_keys(words[first_lane], side) >> g % 2 * 8;
    odd = of_keys(words[first_lane + 4], side) >> g % 2 * 8;
  }

  // Clears in P^T, packed, what is dropped.
  __device__ __forceinline__ void clear(unsigned (&p)[kQueries / 4]) const {
#pragma unroll
    for (int i = 0; i < kQueries / 4; ++i)
      p[i] &= ptx::prmt(even << bit(2 * i), odd << bit(2 * i), i / 2 % 2 == 0 ? 0xcc88 : 0xeeaa);
  }

  // From dP^T to dS^T, with P^T: entries that are dropped count as what dP^T started with.
  __device__ __forceinline__ void multiply(float (&dp)[kQueries / 2],
                                           const float (&p)[kQueries / 2],
                                           const float (&start)[kQueries]) const {
    const float* const mine = start + tile::lane_column(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < kQueries / 2; i += 4) {
      const float2 two = *reinterpret_cast<const float2*>(mine + tile::fragment_column(i));
#pragma unroll
      for (int e = 0; e < 4; ++e)
        dp[i + e] =
            product(dp[i + e], e % 2 == 0 ? two.x : two.y, p[i + e],
                    (e % 2 == 0 ? even : odd) & (i / 4 % 2 == 0 ? 0x80u : 0x800000u) >> bit(i + e));
    }
  }

 private:
  // A lane's words of its first and its last queries, for the keys of one of the warps.
  static __device__ __forceinline__ unsigned of_keys(const unsigned (&words)[2], int side) {
    const uint2 both = *reinterpret_cast<const uint2*>(words);
    return (both.x << 4 * side & 0xf0f0f0f0u) | (both.y >> (4 - 4 * side) & 0x0f0f0f0fu);
  }

  // p * dp, or where `kept` is 0 p * start: two products of which one counts take the pipe of
  // products, a selection that of integers, which masks keep busy.
  static __device__ __forceinline__ float product(float dp, float start, float p, unsigned kept) {
    float result;
    asm("{\n"
        ".reg .pred drops;\n"
        "setp.eq.u32 drops, %4, 0;\n"
        "mul.ftz.f32 %0, %3, %1;\n"
        "@drops mul.ftz.f32 %0, %3, %2;\n"
        "}"
        : "=&f"(result)
        : "f"(dp), "f"(start), "f"(p), "r"(kept));
    return result;
  }

  // n of entry i.
  static __device__ __forceinline__ constexpr int bit(int i) { return i / 8 * 2 + i / 2 % 2; }
};
