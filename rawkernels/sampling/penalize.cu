// Penalized logits: logits (rows, vocab) -> out (rows, vocab) of the same type, after penalties for
// earlier tokens, biases, and the mask of allowed tokens. A block takes a segment of one row, a
// multiple of 2048 tokens; grid (rows, ceil(vocab / segment)).
//
// Or, where only few tokens can change, a hash table of their penalized logits for each row, which
// sample_filtered.cu looks up while it reads the logits as they are; grid (rows).
#include "sampling/penalties.cuh"
#include "sampling/vector_access.cuh"

constexpr int kValues = 8;  // tokens of a thread whose loads are in flight together

struct PenalizeParams {
  const void* logits;             // (rows, vocab), row_stride elements apart
  void* out;                      // contiguous rows
  PenalizedLogit* penalty_table;  // (rows, 2^table_bits); if not null, `out` is not written
  long long row_stride;
  int vocab, segment, table_bits;
};

// Writes the table of one row to `out`, of 2^bits slots, more than there can be tokens. Occurrences
// are counted in shared memory, by the slots that the tokens will have: `biases` has room for
// 2^bits of them, if there are triples, and then for as many counts.
__device__ __forceinline__ void make_table(const PenaltyParams& params, int row,
                                           const Config::dtype* logits, int vocab, double* biases,
                                           PenalizedLogit* out, int bits) {
  struct Count {
    int token, count;
  };
  const int slots = 1 << bits;
  Count* const counts = reinterpret_cast<Count*>(biases + (params.triples ? slots : 0));
  for (int slot = threadIdx.x; slot < slots; slot += Config::threads) {
    counts[slot] = {-1, 0};
    if (params.triples) biases[slot] = 0.0;
  }
  __syncthreads();
  // The slot of a token, which becomes the token's if it was empty; -1 for what is no token.
  const auto slot_of = [&](int token) {
    if (token < 0 || token >= vocab) return -1;
    for (unsigned slot = first_slot(token, bits);; ++slot) {
      slot &= slots - 1;
      const int there = atomicCAS(&counts[slot].token, -1, token);
      if (there == -1 || there == token) return int(slot);
    }
  };
  for_each_earlier(params, row, [&](int token) {
    const int slot = slot_of(token);
    if (slot >= 0) atomicAdd(&counts[slot].count, 1);
  });
  for (int n = threadIdx.x; n < params.triples; n += Config::threads) {
    const int slot = params.triple_rows[n] == row ? slot_of(params.triple_tokens[n]) : -1;
    if (slot >= 0) atomicAdd(&biases[slot], double(params.triple_values[n]));
  }
  __syncthreads();
  const auto load = [&](int slot) -> PenalizedLogit {
    const int token = counts[slot].token;
    return {token, token < 0 ? 0.0f : to_float(logits[token])};
  };
  for_each_ahead<4>(threadIdx.x, slots, Config::threads, load, [&](int slot, PenalizedLogit entry) {
    if (entry.token >= 0) {
      double y = penalized(params, row, entry.logit, counts[slot].count);
      if (params.triples) y += biases[slot];
      entry.logit = rounded(y, Config::dtype());
    }
    out[slot] = entry;
  });
}

extern "C" __global__ void __launch_bounds__(Config::threads, 4)
    penalize(const PenalizeParams params, const PenaltyParams penalty_params) {
  const int row = blockIdx.x;
  const auto* logits = static_cast<const Config::dtype*>(params.logits) + row * params.row_stride;
  if (params.penalty_table) {
    PenalizedLogit* const out =
        params.penalty_table + (static_cast<long long>(row) << params.table_bits);
    make_table(penalty_params, row, logits, params.vocab, penalty_smem, out, params.table_bits);
    return;
  }
  const int begin = blockIdx.y * params.segment;
  const Segment segment = {begin, min(begin + params.segment, params.vocab)};
  auto* out = static_cast<Config::dtype*>(params.out) + static_cast<long long>(row) * params.vocab;
  const Penalties penalties(penalty_params, row, segment, logits);
  const bool vectors = has_vectors(params.logits, params.row_stride, params.vocab) &&
                       has_vectors(params.out, params.vocab, params.vocab);
  for (int base = begin; base < segment.end; base += kValues * Config::threads) {
    const ThreadTokens tokens = {base, segment.end, vectors};
    float x[kValues];
    load_tokens(x, logits, tokens);
#pragma unroll
    for (int n = 0; n < kValues; ++n) {
      if (tokens.has(n)) x[n] = penalties.of(tokens.token(n), x[n]);
    }
#pragma unroll
    for (int v = 0; v < kValues / 4; ++v) {
      Vec4 vector;
#pragma unroll
      for (int n = 0; n < 4; ++n) vector.values[n] = Config::dtype(x[4 * v + n]);
      if (vectors && v < tokens.count) {
        *reinterpret_cast<Vec4*>(out + tokens.token(4 * v)) = vector;
      } else if (!vectors) {
#pragma unroll
        for (int n = 4 * v; n < 4 * v + 4; ++n) {
          if (n < tokens.count) out[tokens.token(n)] = vector.values[n % 4];
        }
      }
    }
  }
}
