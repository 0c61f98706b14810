// Merges partial attention results over disjoint sets of keys into the result over all of them,
// each weighted by its log-sum-exp. Memory-bound: each partial result is read once.
//
//   outs: `parts` arrays (outer, middle, inner, head_dim_v) of the same strides, up to kMaxParts of
//   them or any number at equal distances; lses float (double for float64), of the same strides
//   over the first three axes, as the lse that is written; out contiguous, of the outs' type or of
//   out_dtype. A thread has four columns of a row at a time.
#include "decoding/combine.cuh"

using T = Config::dtype;
using Acc = tile::Accumulator<T>;
using Out = Config::out_dtype;

constexpr int kMaxParts = 32;
constexpr int kBatch = 8;  // parts that a thread loads at a time

struct MergeParams {
  const void* outs[kMaxParts];
  const void* lses[kMaxParts];
  void* out;
  void* lse;
  long long out_stride[3];  // of every part, in elements
  long long lse_stride[3];
  long long rows;
  int middle, inner, head_dim_v, parts;
  int packed;  // four columns may be read and written at once
  // Nonzero: parts are so many elements apart, from outs[0] and lses[0] on, and there may be any
  // number of them.
  long long out_part_stride, lse_part_stride;
};

__device__ __forceinline__ const T* out_of(const MergeParams& params, int part) {
  if (params.out_part_stride == 0) return static_cast<const T*>(params.outs[part]);
  return static_cast<const T*>(params.outs[0]) + part * params.out_part_stride;
}
__device__ __forceinline__ const Acc* lse_of(const MergeParams& params, int part) {
  if (params.lse_part_stride == 0) return static_cast<const Acc*>(params.lses[part]);
  return static_cast<const Acc*>(params.lses[0]) + part * params.lse_part_stride;
}

// Columns from `column` on of a part's row.
__device__ __forceinline__ decoding::FourColumns<T> load(const MergeParams& params, int part,
                                                         long long from, int column) {
  const T* source = out_of(params, part) + from;
  if (params.packed) return *reinterpret_cast<const decoding::FourColumns<T>*>(source);
  decoding::FourColumns<T> values = {};
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (column + e < params.head_dim_v) values.x[e] = source[e];
  return values;
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    merge(const __grid_constant__ MergeParams params) {
  const int vecs = (params.head_dim_v + 3) / 4;
  const long long count = params.rows * vecs;
  for (long long i = blockIdx.x * static_cast<long long>(Config::threads) + threadIdx.x; i < count;
       i += static_cast<long long>(gridDim.x) * Config::threads) {
    const long long row = i / vecs;
    const int column = static_cast<int>(i % vecs) * 4;
    const long long x = row / params.inner / params.middle, y = row / params.inner % params.middle,
                    z = row % params.inner;
    const long long from =
        x * params.out_stride[0] + y * params.out_stride[1] + z * params.out_stride[2] + column;
    const long long lse_at =
        x * params.lse_stride[0] + y * params.lse_stride[1] + z * params.lse_stride[2];
    const auto lse = [&](int part) { return lse_of(params, min(part, params.parts - 1))[lse_at]; };
    Acc max_lse = tile::negative_infinity<Acc>();
    for (int first = 0; first < params.parts; first += kBatch) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) max_lse = fmax(max_lse, lse(first + i));
    }
    const Acc shift = max_lse == tile::negative_infinity<Acc>() ? 0 : max_lse;
    Acc sum = 0, o[4] = {};
    for (int first = 0; first < params.parts; first += kBatch) {
      Acc weight[kBatch];
      decoding::FourColumns<T> values[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        weight[i] = lse(first + i);
        values[i] = load(params, min(first + i, params.parts - 1), from, column);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        weight[i] = first + i < params.parts ? exp(weight[i] - shift) : 0;
        sum += weight[i];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // A part that has seen no key may hold anything, NaN included.
          const Acc value = weight[i] == 0 ? 0 : static_cast<Acc>(values[i].x[e]);
          o[e] = fma(weight[i], value, o[e]);
        }
      }
    }
    const Acc inverse = sum == 0 ? 0 : 1 / sum;
    decoding::FourColumns<Out> result;
#pragma unroll
    for (int e = 0; e < 4; ++e) result.x[e] = static_cast<Out>(o[e] * inverse);
    Out* target = static_cast<Out*>(params.out) + row * params.head_dim_v + column;
    if (params.packed) {
      *reinterpret_cast<decoding::FourColumns<Out>*>(target) = result;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (column + e < params.head_dim_v) target[e] = result.x[e];
    }
    if (column == 0) static_cast<Acc*>(params.lse)[lse_at] = log(sum) + shift;
  }
}
