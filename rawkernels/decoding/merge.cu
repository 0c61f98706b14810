// Merges partial attention results over disjoint sets of keys into the result over all of them,
// each weighted by its log-sum-exp. Memory-bound: each partial result is read once.
//
//   outs: `parts` arrays (outer, middle, inner, head_dim_v) of the same strides, up to kMaxParts of
//   them or any number at equal distances; lses float (double for float64), of the same strides
//   over the first three axes, as the lse that is written; out contiguous, of the outs' type or of
//   out_dtype. A thread has four columns of a row at a time. With Config::many_parts, at equal
//   distances and of which four columns can be read at once, a lane has these, and the warps of a
//   block take parts in turn, so that few reads follow each other.
#include "decoding/combine.cuh"
#include "tile/divisor.cuh"

using T = Config::dtype;
using Acc = tile::Accumulator<T>;
using Out = Config::out_dtype;

constexpr int kMaxParts = 32;
constexpr int kBatch = 8;  // parts that a thread loads at a time
constexpr int kWarps = Config::threads / 32;
// Two parts, and up to four, have loops of their own; in float64 the kernel would spill.
constexpr bool kOfTheirOwn = sizeof(Acc) == 4;

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
  tile::Divisor by_vecs, by_middle, by_inner;  // of four columns of a row, and of rows
};

// n / divisor, by a multiplication where all numbers are below 2^31.
__device__ __forceinline__ long long divided(long long n, long long divisor, tile::Divisor by,
                                             bool is_large) {
  return is_large ? n / divisor : tile::divided(static_cast<int>(n), by);
}

__device__ __forceinline__ const T* out_of(const MergeParams& params, int part) {
  if (params.out_part_stride == 0) return static_cast<const T*>(params.outs[part]);
  return static_cast<const T*>(params.outs[0]) + part * params.out_part_stride;
}
__device__ __forceinline__ const Acc* lse_of(const MergeParams& params, int part) {
  if (params.out_part_stride == 0) return static_cast<const Acc*>(params.lses[part]);
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

// Where four columns of a row lie.
struct Place {
  long long row, from, lse_at;  // of all rows; in a part; in its lse
  int column;

  // Number `i` of `count`, of which a row has `vecs`.
  __device__ __forceinline__ Place(const MergeParams& params, long long i, int vecs,
                                   long long count) {
    const bool is_large = count >= 1ll << 31;
    row = divided(i, vecs, params.by_vecs, is_large);
    column = static_cast<int>(i - row * vecs) * 4;
    const long long xy = divided(row, params.inner, params.by_inner, is_large),
                    x = divided(xy, params.middle, params.by_middle, is_large),
                    y = xy - x * params.middle, z = row - xy * params.inner;
    from = x * params.out_stride[0] + y * params.out_stride[1] + z * params.out_stride[2] + column;
    lse_at = x * params.lse_stride[0] + y * params.lse_stride[1] + z * params.lse_stride[2];
  }
};

// Adds a part, which may hold anything, NaN included, where it has seen no key.
__device__ __forceinline__ void add(Acc (&o)[4], Acc& sum, Acc weight,
                                    const decoding::FourColumns<T>& values) {
  sum += weight;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const Acc value = weight == 0 ? 0 : static_cast<Acc>(values.x[e]);
    o[e] = fma(weight, value, o[e]);
  }
}

// Writes four columns of a row: sums of weights that are relative to e^shift.
template <bool kRegular>
__device__ __forceinline__ void write(const MergeParams& params, const Place& place,
                                      const Acc (&o)[4], Acc sum, Acc shift) {
  const Acc inverse = sum == 0 ? 0 : 1 / sum;
  decoding::FourColumns<Out> result;
#pragma unroll
  for (int e = 0; e < 4; ++e) result.x[e] = static_cast<Out>(o[e] * inverse);
  Out* target = static_cast<Out*>(params.out) + place.row * params.head_dim_v + place.column;
  if (kRegular || params.packed) {
    *reinterpret_cast<decoding::FourColumns<Out>*>(target) = result;
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (place.column + e < params.head_dim_v) target[e] = result.x[e];
  }
  if (place.column == 0) static_cast<Acc*>(params.lse)[place.lse_at] = log(sum) + shift;
}

// All rows. `kRegular`: parts at equal distances, of which four columns can be read at once, so
// that a part takes few instructions. `kMost`: of parts, or 0.
template <bool kRegular, int kMost>
__device__ __forceinline__ void merge_rows(const MergeParams& params) {
  constexpr int kLoads = kMost > 0 ? kMost : kBatch;
  const int vecs = (params.head_dim_v + 3) / 4;
  const int parts = kMost > 0 ? min(params.parts, kMost) : params.parts;
  const long long count = params.rows * vecs;
  for (long long i = blockIdx.x * static_cast<long long>(Config::threads) + threadIdx.x; i < count;
       i += static_cast<long long>(gridDim.x) * Config::threads) {
    const Place place(params, i, vecs, count);
    const T* const first_out = static_cast<const T*>(params.outs[0]) + place.from;
    const Acc* const first_lse = static_cast<const Acc*>(params.lses[0]) + place.lse_at;
    // Of a part, or of the last one beyond: what a predicate kept from being read would be read one
    // after the other.
    const auto lse = [&](int part) {
      part = min(part, parts - 1);
      if constexpr (kRegular) return first_lse[part * params.lse_part_stride];
      return lse_of(params, part)[place.lse_at];
    };
    const auto columns = [&](int part) {
      part = min(part, parts - 1);
      if constexpr (kRegular)
        return *reinterpret_cast<const decoding::FourColumns<T>*>(first_out +
                                                                  part * params.out_part_stride);
      return load(params, part, place.from, place.column);
    };
    Acc max_lse = tile::negative_infinity<Acc>();
    for (int first = 0; first < parts; first += kLoads) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) max_lse = fmax(max_lse, lse(first + i));
      if (kMost > 0) break;
    }
    const Acc shift = max_lse == tile::negative_infinity<Acc>() ? 0 : max_lse;
    Acc sum = 0, o[4] = {};
    for (int first = 0; first < parts; first += kLoads) {
      Acc weight[kLoads];
      decoding::FourColumns<T> values[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        weight[i] = lse(first + i);
        values[i] = columns(first + i);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        weight[i] = first + i < parts ? exp(weight[i] - shift) : 0;
        add(o, sum, weight[i], values[i]);
      }
      if (kMost > 0) break;
    }
    write<kRegular>(params, place, o, sum, shift);
  }
}

// What a warp's lanes have of their rows after its share of the parts.
struct Sums {
  decoding::FourColumns<Acc> o[32];
  Acc max_lse[32], sum[32];
};

// All rows of many parts at equal distances, of which four columns can be read at once. A warp has
// every kWarps-th part, `kLoads` at a time.
template <int kLoads>
__device__ __forceinline__ void merge_many_parts(const MergeParams& params,
                                                 Sums (&of_warp)[kWarps]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int vecs = params.head_dim_v / 4, parts = params.parts;
  const long long count = params.rows * vecs;
  for (long long first = blockIdx.x * 32ll; first < count; first += gridDim.x * 32ll) {
    const Place place(params, min(first + lane, count - 1), vecs, count);
    const T* const outs = static_cast<const T*>(params.outs[0]) + place.from;
    const Acc* const lses = static_cast<const Acc*>(params.lses[0]) + place.lse_at;
    Acc max_lse = tile::negative_infinity<Acc>(), sum = 0, o[4] = {};
    for (int part = warp; part < parts; part += kWarps * kLoads) {
      Acc weight[kLoads];
      decoding::FourColumns<T> values[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const long long its = min(part + i * kWarps, parts - 1);
        weight[i] = lses[its * params.lse_part_stride];
        values[i] =
            *reinterpret_cast<const decoding::FourColumns<T>*>(outs + its * params.out_part_stride);
      }
      Acc new_max = max_lse;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) new_max = fmax(new_max, weight[i]);
      const Acc shift = new_max == tile::negative_infinity<Acc>() ? 0 : new_max;
      const Acc factor = exp(max_lse - shift);
      sum *= factor;
#pragma unroll
      for (int e = 0; e < 4; ++e) o[e] *= factor;
      max_lse = new_max;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        weight[i] = part + i * kWarps < parts ? exp(weight[i] - shift) : 0;
        add(o, sum, weight[i], values[i]);
      }
    }
    Sums& own = of_warp[warp];
    own.o[lane] = {o[0], o[1], o[2], o[3]};
    own.max_lse[lane] = max_lse;
    own.sum[lane] = sum;
    __syncthreads();
    if (warp == 0 && first + lane < count) {
      max_lse = tile::negative_infinity<Acc>();
#pragma unroll
      for (int i = 0; i < kWarps; ++i) max_lse = fmax(max_lse, of_warp[i].max_lse[lane]);
      const Acc shift = max_lse == tile::negative_infinity<Acc>() ? 0 : max_lse;
      Acc whole_sum = 0, whole[4] = {};
#pragma unroll
      for (int i = 0; i < kWarps; ++i) {
        const Acc factor = exp(of_warp[i].max_lse[lane] - shift);
        whole_sum = fma(factor, of_warp[i].sum[lane], whole_sum);
#pragma unroll
        for (int e = 0; e < 4; ++e) whole[e] = fma(factor, of_warp[i].o[lane].x[e], whole[e]);
      }
      write<true>(params, place, whole, whole_sum, shift);
    }
    __syncthreads();  // the sums have been read
  }
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    merge(const __grid_constant__ MergeParams params) {
  if constexpr (Config::many_parts) {
    __shared__ Sums of_warp[kWarps];
    if (params.parts <= 2 * kWarps)
      merge_many_parts<2>(params, of_warp);
    else if (params.parts <= 4 * kWarps)
      merge_many_parts<4>(params, of_warp);
    else
      merge_many_parts<kBatch>(params, of_warp);
  } else if (!params.packed || params.out_part_stride == 0) {
    merge_rows<false, 0>(params);
  } else if (kOfTheirOwn && params.parts <= 2) {
    merge_rows<true, 2>(params);
  } else if (kOfTheirOwn && params.parts <= 4) {
    merge_rows<true, 4>(params);
  } else {
    merge_rows<true, 0>(params);
  }
}
