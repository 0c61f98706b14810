// The table of a row's amended logits, made by one block: the tokens that penalties and biases of
// single tokens concern are counted in shared memory, by the slots they will have.
#pragma once

#include "sampling/amended.cuh"
#include "sampling/penalty.cuh"
#include "sampling/row.cuh"

struct Count {
  int token, count;
};

// `biases` is room for 2^bits of them, if there are triples, and then for as many counts; `out` has
// 2^bits slots, more than there can be tokens.
__device__ __forceinline__ void amend(const PenaltyParams& params, int row,
                                      const Config::dtype* logits, int vocab, double* biases,
                                      Amended* out, int bits) {
  constexpr int kAhead = 4;  // loads in flight together
  const int slots = 1 << bits;
  Count* const counts = reinterpret_cast<Count*>(biases + (params.triples ? slots : 0));
  for (int slot = threadIdx.x; slot < slots; slot += Config::threads) {
    counts[slot] = {-1, 0};
    if (params.triples) biases[slot] = 0.0;
  }
  __syncthreads();
  // The slot of a token; -1 for what is none.
  const auto slot_of = [&](int token) {
    if (token < 0 || token >= vocab) return -1;
    for (unsigned slot = first_slot(token, bits);; ++slot) {
      slot &= slots - 1;
      const int there = atomicCAS(&counts[slot].token, -1, token);
      if (there == -1 || there == token) return int(slot);
    }
  };
  const int* const tokens = params.tokens + static_cast<long long>(row) * params.length;
  for (int first = threadIdx.x; first < params.length; first += kAhead * Config::threads) {
    int token[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int n = first + k * Config::threads;
      token[k] = n < params.length ? tokens[n] : -1;
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int slot = slot_of(token[k]);
      if (slot >= 0) atomicAdd(&counts[slot].count, 1);
    }
  }
  for (int n = threadIdx.x; n < params.triples; n += Config::threads) {
    const int slot = params.triple_rows[n] == row ? slot_of(params.triple_tokens[n]) : -1;
    if (slot >= 0) atomicAdd(&biases[slot], double(params.triple_values[n]));
  }
  __syncthreads();
  for (int first = threadIdx.x; first < slots; first += kAhead * Config::threads) {
    Amended amended[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int slot = first + k * Config::threads;
      const int token = slot < slots ? counts[slot].token : -1;
      amended[k] = {token, token < 0 ? 0.0f : to_float(logits[token])};
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int slot = first + k * Config::threads;
      if (slot >= slots) continue;
      if (amended[k].token >= 0) {
        double y = penalised(params, row, amended[k].logit, counts[slot].count);
        if (params.triples) y += biases[slot];
        amended[k].logit = rounded(y, Config::dtype());
      }
      out[slot] = amended[k];
    }
  }
}
