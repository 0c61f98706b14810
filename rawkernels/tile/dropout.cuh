// Which scores dropout removes: a function of seed, head, query and key alone, so that nothing is
// stored and every kernel, and NumPy (cuattn/reference/dropout.py), drops the same ones.
//
// The mask is made of blocks of 16 queries and 16 keys, aligned to the first of their sequence. A
// counter of Philox4x32-10 gives 16 bits to each of the eight entries of a block that lie in a
// lane's accumulators of mma.sync (tile/fragment.cuh): entry i has half i % 2 of word i / 2.
#pragma once

#include "ptx/prmt.cuh"
#include "tile/philox.cuh"

struct DropoutParams {
  unsigned long long seed;
  double scale;        // of the probabilities that are kept
  unsigned threshold;  // entries whose bits are below it are dropped; 0: none are
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

class DropoutBits {
  uint4 words_;

  __device__ __forceinline__ explicit DropoutBits(uint4 words) : words_(words) {}

 public:
  // Of block (row_block, key_block) of a query head; `head` counts over the batch.
  __device__ __forceinline__ DropoutBits(unsigned long long seed, int row_block, int key_block,
                                         int lane, int head) {
    uint4 words[1] = {{static_cast<unsigned>(row_block), static_cast<unsigned>(key_block),
                       static_cast<unsigned>(lane), static_cast<unsigned>(head)}};
    philox4x32(words, seed);
    words_ = words[0];
  }

  // Those of another lane of the warp, `distance` away by its bits.
  __device__ __forceinline__ DropoutBits exchanged(int distance) const {
    return DropoutBits(
        uint4{__shfl_xor_sync(~0u, words_.x, distance), __shfl_xor_sync(~0u, words_.y, distance),
              __shfl_xor_sync(~0u, words_.z, distance), __shfl_xor_sync(~0u, words_.w, distance)});
  }

  // Of entry i of the lane's eight.
  __device__ __forceinline__ unsigned operator[](int i) const {
    const unsigned word = i < 2 ? words_.x : i < 4 ? words_.y : i < 6 ? words_.z : words_.w;
    return word >> i % 2 * 16 & 0xffffu;
  }
};

// What the blocks of 16 queries and one head have in common in a lane: Philox's first three rounds,
// of which only two products depend on the block of keys. That leaves 16 of a counter's 20.
class DropoutRow {
  unsigned x1_, key_z2_, key_x3_, key_z3_, w3_;

 public:
  __device__ __forceinline__ DropoutRow(unsigned long long seed, int row_block, int lane,
                                        int head) {
    const auto multiplied = [](unsigned long long multiplier, unsigned x) {
      const unsigned long long product = multiplier * x;
      return uint2{unsigned(product >> 32), unsigned(product)};
    };
    const uint2 key1 = philox_round_keys(seed, 0), key2 = philox_round_keys(seed, 1),
                key3 = philox_round_keys(seed, 2);
    const uint2 of_row = multiplied(kPhiloxMultiplier0, row_block);
    const uint2 of_lane = multiplied(kPhiloxMultiplier1, lane);
    const uint2 of_head = multiplied(kPhiloxMultiplier1, of_row.x ^ head ^ key1.y);
    const uint2 of_x2 = multiplied(kPhiloxMultiplier0, of_head.x ^ of_lane.y ^ key2.x);
    x1_ = of_lane.x ^ key1.x;
    key_z2_ = of_row.y ^ key2.y;
    key_x3_ = of_head.y ^ key3.x;
    key_z3_ = of_x2.x ^ key3.y;
    w3_ = of_x2.y;
  }

  // The counters of `kBlocks` blocks of keys from `key_block` on, as rounds 1 to 3 leave them, to
  // the words of DropoutBits.
  template <int kBlocks>
  __device__ __forceinline__ void bits(uint4 (&words)[kBlocks], unsigned long long seed,
                                       int key_block) const {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const unsigned long long of_x1 = kPhiloxMultiplier0 * (x1_ ^ (key_block + n));
      const unsigned long long of_z2 = kPhiloxMultiplier1 * (unsigned(of_x1 >> 32) ^ key_z2_);
      words[n] = {unsigned(of_z2 >> 32) ^ key_x3_, unsigned(of_z2), unsigned(of_x1) ^ key_z3_, w3_};
    }
    philox4x32<3>(words, seed);
  }
};

// 0xffff in each half of a word whose 16 random bits are below the threshold.
__device__ __forceinline__ unsigned dropped_halves(unsigned word, unsigned threshold) {
  const unsigned low = (word & 0xffffu) - threshold, high = (word >> 16) - threshold;
  return ptx::prmt(low, high, 0xffbb);  // their signs
}

// Of four words: those of the A fragment of 16 queries and 16 keys, pair by pair.
__device__ __forceinline__ uint4 dropped_pairs(uint4 words, unsigned threshold) {
  return {dropped_halves(words.x, threshold), dropped_halves(words.y, threshold),
          dropped_halves(words.z, threshold), dropped_halves(words.w, threshold)};
}

// Whether one entry is dropped.
__device__ __forceinline__ bool is_dropped(const DropoutParams& dropout, int query, int key,
                                           int head) {
  const int lane = query % 8 * 4 + key % 8 / 2;
  const DropoutBits bits(dropout.seed, query / 16, key / 16, lane, head);
  return bits[key % 16 / 8 * 4 + query % 16 / 8 * 2 + key % 2] < dropout.threshold;
}

}  // namespace tile
