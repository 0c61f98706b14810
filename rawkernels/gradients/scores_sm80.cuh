// What scores of gradients/backward_sm80.cu go through on their way to probabilities, beside the
// exponential: biases and other terms with their derivatives, and dropout.
#pragma once

#include "gradients/block_sm80.cuh"
#include "ptx/registers.cuh"
#include "tile/fragment.cuh"

// A lane's first query and key: the warp's rows begin at `row`, the columns at `column`.
struct Place {
  int query, key;

  __device__ __forceinline__ Place(int row, int column) {
    const int lane = ptx::thread_index() % 32;
    row += tile::lane_row(lane);
    column += tile::lane_column(lane);
    query = kKeysStationary ? column : row;
    key = kKeysStationary ? row : column;
  }
  __device__ __forceinline__ int query_of(int i) const {
    return query + (kKeysStationary ? tile::fragment_column(i) : tile::fragment_row(i));
  }
  __device__ __forceinline__ int key_of(int i) const {
    return key + (kKeysStationary ? tile::fragment_row(i) : tile::fragment_column(i));
  }
};

// Scores from products, and their derivatives by scale · q·k. The scale itself is for results: a
// small one would make dS numbers that float16 hardly has.
__device__ __forceinline__ void apply_score_mod(float (&s)[kTileN / 2],
                                                float (&derivative)[kTileN / 2],
                                                const ForwardParams& params, const Block& block,
                                                int head, const Place& place) {
  const tile::Sequence& seq = block.seq;
  const ScoreMod<T, true, false> score_mod = {score_inputs(params).of_head<T>(seq.index, head)};
  const float slope = score_mod.slope(seq.index, head), scale = score_mod.scale_factor();
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) {
    s[i] *= scale;
    derivative[i] = 1.0f;
  }
  score_mod.terms_after_scale([&](const auto& term) {
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) {
      const int query = place.query_of(i), key = place.key_of(i);
      const tile::ScoreRow<float> row = {seq.index, head, query,
                                         query + seq.seqlen_k - seq.seqlen_q, slope};
      derivative[i] *= term.derivative(s[i], row, key);
      s[i] = term(s[i], row, key);
    }
  });
}

// What dropout multiplies the probabilities of 16 columns by, the first of them `column`.
__device__ __forceinline__ void dropout_factors(float (&z)[8], const DropoutParams& dropout,
                                                int row, int column, int head) {
  const int lane = ptx::thread_index() % 32;
  if (!kKeysStationary) {
    const tile::DropoutBits bits(dropout, row / 16, column / 16, lane, head);
#pragma unroll
    for (int i = 0; i < 8; ++i) z[i] = bits.drops(i) ? 0.0f : static_cast<float>(dropout.scale);
  } else {
    // The mask turned round: query 2t + e and key g are entry g % 2 of lane 8t + 4e + g / 2. Lanes
    // of keys 2n and 2n + 1 want the same two: each evaluates one of them.
    const int g = lane / 4, t = lane % 4;
    const tile::DropoutBits mine(dropout, column / 16, row / 16, 8 * t + 4 * (g % 2) + g / 2, head);
    const tile::DropoutBits other = mine.exchanged(4);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // Entry i: query + 8 (i / 4) + i % 2, key + 8 (i / 2 % 2).
      const int even = 4 * (i / 2 % 2) + 2 * (i / 4);
      const bool own = g % 2 == 0 ? mine.drops(even) : mine.drops(even + 1);
      const bool others = g % 2 == 0 ? other.drops(even) : other.drops(even + 1);
      z[i] = (g % 2 == i % 2 ? own : others) ? 0.0f : static_cast<float>(dropout.scale);
    }
  }
}
