// The penalized logits of a row: a hash table of the few tokens whose logits penalties for earlier
// tokens and biases of single tokens change. sampling/penalize.cu makes it, one for each row.
#pragma once

struct PenalizedLogit {
  int token;  // -1: an empty slot
  float logit;
};

// The slot, of 2^bits, at which the search for a token begins (Fibonacci hashing, linear probing).
__device__ __forceinline__ unsigned first_slot(int token, int bits) {
  return unsigned(token) * 0x9e3779b1u >> (32 - bits);
}

struct PenalizedRow {
  const PenalizedLogit* slots;  // null: no logit is changed
  int bits;

  // The penalized logit of a token whose logit is x.
  __device__ __forceinline__ float of(int token, float x) const {
    if (!slots) return x;
    for (unsigned slot = first_slot(token, bits);; ++slot) {
      const PenalizedLogit found = slots[slot & ((1u << bits) - 1)];
      if (found.token == token) return found.logit;
      if (found.token < 0) return x;
    }
  }
};
