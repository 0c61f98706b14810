// Penalties, biases and the mask of allowed tokens: logits (rows, vocab) -> out (rows, vocab), of
// one type.
//
// A block takes kSegment tokens of the vocabulary of one row: it counts which of the row's earlier
// tokens are among them, in shared memory, then reads and writes each logit once. Grid (ceil(vocab
// / kSegment), rows).
#include "sampling/params.cuh"

constexpr int kSegment = 4096;

struct PenaltyParams {
  const void* logits;
  void* out;               // contiguous rows
  const int* tokens;       // (rows, length) contiguous, -1 for none
  const float* bias;       // (rows, vocab), bias_stride apart; null: none
  const int* triple_rows;  // (triples,) each; null: none
  const int* triple_tokens;
  const float* triple_values;
  const void* allowed;  // bytes, or bits of 32-bit words if packed; null: all
  long long row_stride, bias_stride, allowed_stride;
  RowValue<float> repetition, frequency, presence;
  int vocab, length, triples, packed;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

extern "C" __global__ void __launch_bounds__(Config::threads) penalize(const PenaltyParams params) {
  __shared__ int counts[kSegment];
  __shared__ float biases[kSegment];
  const int row = blockIdx.y;
  const int begin = blockIdx.x * kSegment;
  const int size = min(kSegment, params.vocab - begin);
  for (int i = threadIdx.x; i < size; i += Config::threads) {
    counts[i] = 0;
    biases[i] = params.bias ? params.bias[row * params.bias_stride + begin + i] : 0.0f;
  }
  __syncthreads();
  const int* const tokens = params.tokens + static_cast<long long>(row) * params.length;
  for (int j = threadIdx.x; j < params.length; j += Config::threads) {
    const int i = tokens[j] - begin;
    if (i >= 0 && i < size) atomicAdd(&counts[i], 1);
  }
  for (int j = threadIdx.x; j < params.triples; j += Config::threads) {
    const int i = params.triple_tokens[j] - begin;
    if (params.triple_rows[j] == row && i >= 0 && i < size)
      atomicAdd(&biases[i], params.triple_values[j]);
  }
  __syncthreads();

  const float repetition = params.repetition[row], frequency = params.frequency[row],
              presence = params.presence[row];
  const auto* logits =
      static_cast<const Config::dtype*>(params.logits) + row * params.row_stride + begin;
  auto* out =
      static_cast<Config::dtype*>(params.out) + static_cast<long long>(row) * params.vocab + begin;
  const auto* flags =
      static_cast<const unsigned char*>(params.allowed) + row * params.allowed_stride;
  const auto* words = static_cast<const unsigned*>(params.allowed) + row * params.allowed_stride;
  for (int i = threadIdx.x; i < size; i += Config::threads) {
    float x = to_float(logits[i]);
    if (counts[i] > 0) {
      x = x > 0.0f ? x / repetition : x * repetition;
      x = x - frequency * counts[i] - presence;
    }
    x += biases[i];
    if (params.allowed) {
      const int token = begin + i;
      const bool allowed = params.packed ? words[token / 32] >> token % 32 & 1 : flags[token] != 0;
      if (!allowed) x = __int_as_float(0xff800000);
    }
    out[i] = Config::dtype(x);
  }
}
