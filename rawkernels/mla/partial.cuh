// Partial results of mla/decode_sm90.cu, which mla/combine.cu merges in a launch of its own: with
// rows of 512 numbers that takes all multiprocessors.
#pragma once

#include "decoding/combine.cuh"
#include "mla/params.cuh"

namespace mla {

// Softmax-weighted sums of a split's values, relative to 2^max, and the sums of weights.
template <int kRows, int kLatent>
struct PartialTile {
  float o[kRows][kLatent];
  float2 max_sum[kRows];
};

}  // namespace mla
