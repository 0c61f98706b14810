// The few logits of a row that penalties for earlier tokens and biases of single tokens change: a
// hash table for each row, made by sampling/penalize.cu.
#pragma once

struct Amended {
  int token;  // -1: none
  float logit;
};

// Where a token is looked for first among 2^bits slots; then come those that follow.
__device__ __forceinline__ unsigned first_slot(int token, int bits) {
  return unsigned(token) * 0x9e3779b1u >> (32 - bits);
}

struct AmendedRow {
  const Amended* slots;  // null: no logit is changed
  int bits;

  // What the logit x of a token becomes.
  __device__ __forceinline__ float of(int token, float x) const {
    if (!slots) return x;
    for (unsigned slot = first_slot(token, bits);; ++slot) {
      const Amended found = slots[slot & ((1u << bits) - 1)];
      if (found.token == token) return found.logit;
      if (found.token < 0) return x;
    }
  }
};
