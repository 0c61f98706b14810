// Penalties, biases and the mask of allowed tokens: logits (rows, vocab) -> out (rows, vocab), of
// one type. A block takes a segment of one row, a multiple of 2048 tokens; grid (ceil(vocab /
// segment), rows).
//
// Or, for those who need only know of the few tokens that penalties and biases of single tokens
// concern, a table of them for each row, grid (1, rows).
#include "sampling/amend.cuh"
#include "sampling/penalties.cuh"
#include "sampling/quads.cuh"

constexpr int kValues = 8;  // of a thread, in flight together

struct PenalizeParams {
  const void* logits;  // (rows, vocab), row_stride elements apart
  void* out;           // contiguous rows
  Amended* amended;    // (rows, 2^bits), in place of all this; else null
  long long row_stride;
  int vocab, segment, bits;
};

extern "C" __global__ void __launch_bounds__(Config::threads, 4)
    penalize(const PenalizeParams params, const PenaltyParams penalties) {
  const int row = blockIdx.y;
  const auto* logits = static_cast<const Config::dtype*>(params.logits) + row * params.row_stride;
  if (params.amended) {
    Amended* const out = params.amended + (static_cast<long long>(row) << params.bits);
    amend(penalties, row, logits, params.vocab, penalty_smem, out, params.bits);
    return;
  }
  const int begin = blockIdx.x * params.segment;
  const Segment segment = {begin, min(begin + params.segment, params.vocab)};
  auto* out = static_cast<Config::dtype*>(params.out) + static_cast<long long>(row) * params.vocab;
  const Penalties penalised(penalties, row, segment, logits);
  const bool quads = has_quads(params.logits, params.row_stride, params.vocab) &&
                     has_quads(params.out, params.vocab, params.vocab);
  for (int turn = begin; turn < segment.end; turn += kValues * Config::threads) {
    const Places places = {turn, segment.end, quads};
    float x[kValues];
    read(x, logits, places);
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      if (places.has(k)) x[k] = penalised.of(places.token(k), x[k]);
    }
#pragma unroll
    for (int q = 0; q < kValues / 4; ++q) {
      Quad quad;
#pragma unroll
      for (int k = 0; k < 4; ++k) quad.values[k] = Config::dtype(x[4 * q + k]);
      if (quads && q < places.count) {
        *reinterpret_cast<Quad*>(out + places.token(4 * q)) = quad;
      } else if (!quads) {
#pragma unroll
        for (int k = 4 * q; k < 4 * q + 4; ++k) {
          if (k < places.count) out[places.token(k)] = quad.values[k % 4];
        }
      }
    }
  }
}
