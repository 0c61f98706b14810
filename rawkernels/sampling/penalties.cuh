// Penalties for a row's earlier tokens, biases, and the mask of allowed tokens, in this order,
// applied to logits as a kernel reads them, so that no penalized copy of a row is written.
//
// The tokens of a segment that occurred earlier, or have a bias of their own, are its "listed"
// tokens. A bitmap in shared memory marks them, and a token's rank among the bits is its place in a
// list of penalized logits, computed in float64 as in NumPy. A kernel reads its segment through
// dense(), in which listed and disallowed tokens are -inf, and adds the listed ones with
// each_listed().
#pragma once

#include "sampling/params.cuh"
#include "sampling/row.cuh"

struct PenaltyParams {
  const int* tokens;       // (rows, length) contiguous, -1 for none
  const float* bias;       // (rows, vocab), bias_stride apart; null: none
  const int* triple_rows;  // (triples,) each
  const int* triple_tokens;
  const float* triple_values;
  const void* allowed;  // bytes, or bits of 32-bit words if packed; null: all are allowed
  long long bias_stride, allowed_stride;
  RowValue<float> repetition, frequency, presence;
  int length, triples, packed;
  int any;  // whether there is any penalty, bias or mask
};

// Rounded as NumPy rounds: to float16 at once, to bfloat16, as ml_dtypes does, by way of float32.
__device__ __forceinline__ float rounded(double y, __half) {
  return __half2float(__double2half(y));
}
__device__ __forceinline__ float rounded(double y, __nv_bfloat16) {
  return to_float(__nv_bfloat16(float(y)));
}
__device__ __forceinline__ float rounded(double y, float) { return float(y); }

// The logit y of a token that occurred `count` times, after penalties and before biases.
__device__ __forceinline__ double penalized(const PenaltyParams& params, int row, double y,
                                            int count) {
  if (count == 0) return y;
  const double repetition = params.repetition[row];
  y = y > 0.0 ? y / repetition : y * repetition;
  y -= double(params.frequency[row]) * count;
  return y - double(params.presence[row]);
}

// f(token) for each of the row's earlier tokens, -1 for none.
template <class F>
__device__ __forceinline__ void for_each_earlier(const PenaltyParams& params, int row, F f) {
  const int* const tokens = params.tokens + static_cast<long long>(row) * params.length;
  for_each_ahead<4>(
      threadIdx.x, params.length, Config::threads, [&](int n) { return tokens[n]; },
      [&](int, int token) { f(token); });
}

// Memory of Penalties (penalty_bytes() of cuattn/gpu/dispatch/sampling.py), or of a table.
extern __shared__ double penalty_smem[];

// Logits as they are.
struct NoPenalties {
  __device__ __forceinline__ float dense(int, float x) const { return x; }
  __device__ __forceinline__ float of(int, float x) const { return x; }
  template <class F>
  __device__ __forceinline__ void each_listed(F) const {}
};

class Penalties {
 public:
  // All threads of the block must call this.
  __device__ __forceinline__ Penalties(const PenaltyParams& params, int row, Segment segment,
                                       const Config::dtype* logits)
      : begin_(segment.begin), num_words_((segment.end - segment.begin + 31) / 32) {
    bias_ = params.bias ? params.bias + row * params.bias_stride : nullptr;
    const int capacity = min(params.length + params.triples, segment.end - segment.begin);
    double* const biases = penalty_smem;  // sums of the listed tokens' triples
    words_ = reinterpret_cast<Word*>(biases + (params.triples ? capacity : 0));
    counts_ = reinterpret_cast<int*>(words_ + num_words_);
    tokens_ = counts_ + capacity;
    exclude_disallowed(params, row, segment);
    for (int n = threadIdx.x; n < capacity; n += Config::threads) {
      counts_[n] = 0;
      if (params.triples) biases[n] = 0.0;
    }
    __syncthreads();
    const auto mark = [&](int place) { atomicOr(&words_[place / 32].listed, 1u << place % 32); };
    each_token(params, row, segment, mark);
    each_triple(params, row, segment, [&](int place, float) { mark(place); });
    __syncthreads();
    rank_words();
    each_token(params, row, segment, [&](int place) {
      const int n = rank(place);
      atomicAdd(&counts_[n], 1);
      tokens_[n] = segment.begin + place;
    });
    each_triple(params, row, segment, [&](int place, float bias) {
      const int n = rank(place);
      atomicAdd(&biases[n], double(bias));
      tokens_[n] = segment.begin + place;
    });
    __syncthreads();

    for (int n = threadIdx.x; n < num_listed_; n += Config::threads) {
      const int i = tokens_[n], place = i - segment.begin;
      double y = penalized(params, row, to_float(logits[i]), counts_[n]);
      if (params.triples) y += biases[n];
      if (bias_) y += double(bias_[i]);
      const bool excluded = words_[place / 32].excluded >> place % 32 & 1;
      counts_[n] = __float_as_int(excluded ? -kInfinity : rounded(y, Config::dtype()));
    }
    __syncthreads();
    for (int n = threadIdx.x; n < num_words_; n += Config::threads) {
      words_[n].excluded |= words_[n].listed;
    }
    __syncthreads();
  }

  // The penalized logit of token i, whose logit is x; -inf for a listed token.
  __device__ __forceinline__ float dense(int i, float x) const {
    if (bias_) x = to_float(Config::dtype(x + bias_[i]));
    return words_[(i - begin_) / 32].excluded >> (i - begin_) % 32 & 1 ? -kInfinity : x;
  }

  // The penalized logit of token i, whose logit is x.
  __device__ __forceinline__ float of(int i, float x) const {
    const bool listed = words_[(i - begin_) / 32].listed >> (i - begin_) % 32 & 1;
    return listed ? __int_as_float(counts_[rank(i - begin_)]) : dense(i, x);
  }

  // f(i) for each listed token.
  template <class F>
  __device__ __forceinline__ void each_listed(F f) const {
    for (int n = threadIdx.x; n < num_listed_; n += Config::threads) f(tokens_[n]);
  }

 private:
  struct Word {                         // 32 tokens
    unsigned listed, before, excluded;  // `before`: how many tokens of earlier words are listed
  };

  // Clears the words, and excludes the tokens that are not allowed.
  __device__ __forceinline__ void exclude_disallowed(const PenaltyParams& params, int row,
                                                     Segment segment) {
    const long long first = row * params.allowed_stride;
    if (params.allowed && !params.packed) {
      constexpr int kAhead = 8;
      const auto* const flags = static_cast<const unsigned char*>(params.allowed) + first;
      for (int word = threadIdx.x / 32; word < num_words_; word += kAhead * kWarps) {
        bool blocked[kAhead];
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          const int i = segment.begin + 32 * (word + k * kWarps) + int(threadIdx.x % 32);
          blocked[k] = i < segment.end && flags[i] == 0;
        }
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          const int n = word + k * kWarps;
          const unsigned bits = __ballot_sync(0xffffffffu, blocked[k]);
          if (threadIdx.x % 32 == 0 && n < num_words_) words_[n] = {0, 0, bits};
        }
      }
    } else {
      const auto* const words = static_cast<const unsigned*>(params.allowed) + first;
      for (int n = threadIdx.x; n < num_words_; n += Config::threads) {
        words_[n] = {0, 0, params.allowed ? ~words[segment.begin / 32 + n] : 0};
      }
    }
  }

  // f(place in the segment) for the row's earlier tokens that lie in the segment.
  template <class F>
  __device__ __forceinline__ static void each_token(const PenaltyParams& params, int row,
                                                    Segment segment, F f) {
    for_each_earlier(params, row, [&](int token) {
      if (token >= segment.begin && token < segment.end) f(token - segment.begin);
    });
  }

  // f(place in the segment, value) for the row's triples that lie in the segment.
  template <class F>
  __device__ __forceinline__ static void each_triple(const PenaltyParams& params, int row,
                                                     Segment segment, F f) {
    for (int n = threadIdx.x; n < params.triples; n += Config::threads) {
      const int i = params.triple_tokens[n];
      if (params.triple_rows[n] == row && i >= segment.begin && i < segment.end) {
        f(i - segment.begin, params.triple_values[n]);
      }
    }
  }

  __device__ __forceinline__ int rank(int place) const {
    const Word word = words_[place / 32];
    return word.before + __popc(word.listed & ((1u << place % 32) - 1));
  }

  // Sets `before` of each word, and num_listed_. Each warp counts what lies before its share of the
  // words, and then goes through its share.
  __device__ __forceinline__ void rank_words() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int share = (num_words_ + kWarps - 1) / kWarps;
    const int begin = min(warp * share, num_words_), end = min(begin + share, num_words_);
    unsigned before = 0;
    for (int n = lane; n < begin; n += 32) before += __popc(words_[n].listed);
    before = reduce_warp(before, Add());
    for (int first = begin; first < end; first += 32) {
      const int n = first + lane;
      const unsigned own = n < end ? __popc(words_[n].listed) : 0;
      const unsigned sum = tile::prefix_sum_of_warp(own);
      if (n < end) words_[n].before = before + sum - own;
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
    __syncthreads();
    const Word last = num_words_ > 0 ? words_[num_words_ - 1] : Word{0, 0, 0};
    num_listed_ = last.before + __popc(last.listed);
  }

  int begin_, num_words_, num_listed_;
  const float* bias_;
  Word* words_;
  int* counts_;  // how often each listed token occurred; later the bits of its penalized logit
  int* tokens_;  // the listed tokens
};
