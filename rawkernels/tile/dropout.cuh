// Which scores dropout removes: a function of seed, head, query and key alone, so that nothing is
// stored and every kernel, and NumPy (cuattn/reference/dropout.py), drops the same ones.
//
// The mask is made of blocks of 16 queries and 32 keys, aligned to the first of their sequence. A
// counter of Philox4x32-7 gives seven bits to each of the 16 entries of a block that lie in a
// lane's accumulators of mma.sync (tile/fragment.cuh): entry i has the lower bits of byte i % 4 of
// word i / 4, and is dropped where these are below the counter's threshold, of which there are two:
// the nearest multiples of 1/128 below and above the probability. How often it is the upper one
// makes up for the bits that an entry does not have.
#pragma once

#include "ptx/mul_wide.cuh"
#include "ptx/prmt.cuh"
#include "tile/philox.cuh"

struct DropoutParams {
  unsigned long long seed;
  double scale;        // of the probabilities that are kept
  unsigned threshold;  // the probability of being dropped, times 2^16; 0: there is no dropout
};

namespace tile {

// A kernel's arguments with those of dropout behind them.
template <class Params>
struct WithDropout : Params {
  DropoutParams dropout;
};
// What a kernel takes: without dropout what it took before there was any.
template <class Params, bool kDropout>
struct ParamsOf {
  using Type = Params;
};
template <class Params>
struct ParamsOf<Params, true> {
  using Type = WithDropout<Params>;
  static_assert(sizeof(Type) == sizeof(Params) + sizeof(DropoutParams),
                "the launching code packs the one after the other");
};

template <class Params>
__device__ __forceinline__ DropoutParams dropout_of(const WithDropout<Params>& params) {
  return params.dropout;
}
template <class Params>
__device__ __forceinline__ DropoutParams dropout_of(const Params&) {
  return {};
}

constexpr int kDropoutRounds = 7;  // the fewest that pass BigCrush (Salmon et al., table 2)

// What the blocks of 16 queries and one head have in common in a lane: Philox's first three rounds,
// of which only two products depend on the block of keys. That leaves ten of a counter's 14.
class DropoutRow {
  unsigned x1_, key_z2_, key_x3_, key_z3_, w3_;

  // A counter as rounds 1 to 3 leave it.
  __device__ __forceinline__ uint4 counter(int key_block) const {
    const uint2 of_x1 = ptx::mul_wide(kPhiloxMultiplier0, x1_ ^ key_block);
    const uint2 of_z2 = ptx::mul_wide(kPhiloxMultiplier1, of_x1.x ^ key_z2_);
    return {of_z2.x ^ key_x3_, of_z2.y, of_x1.y ^ key_z3_, w3_};
  }

  // The counter's threshold in each byte. The upper one of two is chosen by a Weyl sequence over
  // blocks of keys, which begins anywhere.
  __device__ __forceinline__ unsigned thresholds(const DropoutParams& dropout,
                                                 int key_block) const {
    const unsigned weyl = w3_ + key_block * 0x9E3779B9u;
    return ptx::prmt((dropout.threshold << 15) + (weyl >> 8), 0, 0x3333);
  }

  // Bit 7 of each byte: its random bits are not below the threshold.
  static __device__ __forceinline__ unsigned kept(unsigned word, unsigned thresholds) {
    return (word | 0x80808080u) - thresholds;
  }

 public:
  __device__ __forceinline__ DropoutRow(unsigned long long seed, int row_block, int lane,
                                        int head) {
    const uint2 key1 = philox_round_keys(seed, 0), key2 = philox_round_keys(seed, 1),
                key3 = philox_round_keys(seed, 2);
    const uint2 of_row = ptx::mul_wide(kPhiloxMultiplier0, row_block);
    const uint2 of_lane = ptx::mul_wide(kPhiloxMultiplier1, lane);
    const uint2 of_head = ptx::mul_wide(kPhiloxMultiplier1, of_row.x ^ head ^ key1.y);
    const uint2 of_x2 = ptx::mul_wide(kPhiloxMultiplier0, of_head.x ^ of_lane.y ^ key2.x);
    x1_ = of_lane.x ^ key1.x;
    key_z2_ = of_row.y ^ key2.y;
    key_x3_ = of_head.y ^ key3.x;
    key_z3_ = of_x2.x ^ key3.y;
    w3_ = of_x2.y;
  }

  // Bit 7 of byte i % 4 of word i / 4 of signs[n]: entry i of block key_block + n is kept. Counters
  // advance together, so that they share the keys of a round.
  template <int kBlocks>
  __device__ __forceinline__ void kept_signs(uint4 (&signs)[kBlocks], const DropoutParams& dropout,
                                             int key_block) const {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) signs[n] = counter(key_block + n);
#pragma unroll
    for (int round = 3; round < kDropoutRounds; ++round) {
      const uint2 key = philox_round_keys(dropout.seed, round);
#pragma unroll
      for (uint4& c : signs) {
        const uint2 of_x = ptx::mul_wide(kPhiloxMultiplier0, c.x);
        const uint2 of_z = ptx::mul_wide(kPhiloxMultiplier1, c.z);
        c = {of_z.x ^ c.y ^ key.x, of_z.y, of_x.x ^ c.w ^ key.y, of_x.y};
      }
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const unsigned bytes = thresholds(dropout, key_block + n);
      signs[n] = {kept(signs[n].x, bytes), kept(signs[n].y, bytes), kept(signs[n].z, bytes),
                  kept(signs[n].w, bytes)};
    }
  }

  // The same for half a block, of the 16 keys from 16 * key_block on: its last round has half of
  // the products.
  __device__ __forceinline__ uint2 kept_signs(const DropoutParams& dropout, int key_block) const {
    uint4 c = counter(key_block / 2);
#pragma unroll
    for (int round = 3; round < kDropoutRounds - 1; ++round) {
      const uint2 key = philox_round_keys(dropout.seed, round);
      const uint2 of_x = ptx::mul_wide(kPhiloxMultiplier0, c.x);
      const uint2 of_z = ptx::mul_wide(kPhiloxMultiplier1, c.z);
      c = {of_z.x ^ c.y ^ key.x, of_z.y, of_x.x ^ c.w ^ key.y, of_x.y};
    }
    const uint2 key = philox_round_keys(dropout.seed, kDropoutRounds - 1);
    const bool second = key_block % 2 != 0;
    const uint2 product =
        ptx::mul_wide(second ? kPhiloxMultiplier0 : kPhiloxMultiplier1, second ? c.x : c.z);
    const unsigned bytes = thresholds(dropout, key_block / 2);
    return {kept(product.x ^ (second ? c.w ^ key.y : c.y ^ key.x), bytes), kept(product.y, bytes)};
  }
};

// What is kept of the eight entries of a lane in a block of 16 queries and 16 keys.
class DropoutBits {
  uint2 signs_;

  __device__ __forceinline__ explicit DropoutBits(uint2 signs) : signs_(signs) {}

 public:
  // Of block (row_block, key_block) of 16 by 16 of a query head; `head` counts over the batch.
  __device__ __forceinline__ DropoutBits(const DropoutParams& dropout, int row_block, int key_block,
                                         int lane, int head) {
    signs_ = DropoutRow(dropout.seed, row_block, lane, head).kept_signs(dropout, key_block);
  }

  // Those of another lane of the warp, `distance` away by its bits.
  __device__ __forceinline__ DropoutBits exchanged(int distance) const {
    return DropoutBits(
        uint2{__shfl_xor_sync(~0u, signs_.x, distance), __shfl_xor_sync(~0u, signs_.y, distance)});
  }

  // Whether entry i of the lane's eight is dropped.
  __device__ __forceinline__ bool drops(int i) const {
    return (((i < 4 ? signs_.x : signs_.y) >> i % 4 * 8) & 0x80u) == 0;
  }
};

// Clears in two pairs of 16 bits, which belong to four entries in order, those that are not kept.
__device__ __forceinline__ void clear_dropped(unsigned& first, unsigned& second, unsigned signs) {
  first &= ptx::prmt(signs, 0, 0x9988);
  second &= ptx::prmt(signs, 0, 0xbbaa);
}

// The same in the fragment of P for 16 queries and 16 or 32 keys.
__device__ __forceinline__ void clear_dropped(unsigned* pairs, const uint2& signs) {
  clear_dropped(pairs[0], pairs[1], signs.x);
  clear_dropped(pairs[2], pairs[3], signs.y);
}
__device__ __forceinline__ void clear_dropped(unsigned* pairs, const uint4& signs) {
  clear_dropped(pairs[0], pairs[1], signs.x);
  clear_dropped(pairs[2], pairs[3], signs.y);
  clear_dropped(pairs[4], pairs[5], signs.z);
  clear_dropped(pairs[6], pairs[7], signs.w);
}

// Whether one entry is dropped.
__device__ __forceinline__ bool is_dropped(const DropoutParams& dropout, int query, int key,
                                           int head) {
  const int lane = query % 8 * 4 + key % 8 / 2;
  const DropoutBits bits(dropout, query / 16, key / 16, lane, head);
  return bits.drops(key % 16 / 8 * 4 + query % 16 / 8 * 2 + key % 2);
}

}  // namespace tile
