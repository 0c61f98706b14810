// Which scores dropout removes: a function of seed, head, query and key alone, so that nothing is
// stored and every kernel, and NumPy (cuattn/reference/dropout.py), drops the same ones.
//
// The mask is made of blocks of 16 queries and 16 keys, aligned to the first of their sequence. A
// counter of Philox4x32-10 gives 16 bits to each of the eight entries of a block that lie in a
// lane's accumulators of mma.sync (tile/fragment.cuh): entry i has half i % 2 of word i / 2.
#pragma once

#include "tile/philox.cuh"

struct DropoutParams {
  unsigned long long seed;
  double scale;        // of the probabilities that are kept
  unsigned threshold;  // entries whose bits are below it are dropped; 0: none are
};

namespace tile {

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

}  // namespace tile
