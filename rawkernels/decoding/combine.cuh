// From the warps' parts of a result to a block's, and from the blocks' parts to what is written
// out.
#pragma once

#include "decoding/schedule.cuh"
#include "ptx/acquire_release.cuh"

namespace decoding {

template <class T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};

template <class Acc>
__device__ __forceinline__ Acc minus_infinity() {
  return static_cast<Acc>(__int_as_float(0xff800000));
}

template <class Acc>
struct alignas(16) Vec {  // four neighbouring columns of a row
  Acc x[4];
};

template <class Acc>
__device__ __forceinline__ Vec<Acc> load_past_l1(const Acc* source) {
  Vec<Acc> v;
  constexpr int kLoads = sizeof(Vec<Acc>) / 16;
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    reinterpret_cast<float4*>(&v)[i] = __ldcg(reinterpret_cast<const float4*>(source) + i);
  return v;
}

// A softmax-weighted sum under way: four columns of O, relative to `max`, and the row's sum of
// weights.
template <class Acc>
struct Partial {
  Vec<Acc> o = {};
  Acc max = minus_infinity<Acc>();
  Acc sum = 0;

  // Moves what exponents are relative to. Nothing seen on both sides: exp(-inf - 0) = 0, and never
  // NaN.
  __device__ __forceinline__ void raise(Acc new_max) {
    const Acc factor = exp(max - (new_max == minus_infinity<Acc>() ? 0 : new_max));
#pragma unroll
    for (int e = 0; e < 4; ++e) o.x[e] *= factor;
    sum *= factor;
    max = new_max;
  }
  // Adds another one, whose maximum `max` is not below.
  __device__ __forceinline__ void add(const Vec<Acc>& other, Acc other_max, Acc other_sum) {
    const Acc factor = exp(other_max - (max == minus_infinity<Acc>() ? 0 : max));
#pragma unroll
    for (int e = 0; e < 4; ++e) o.x[e] = fma(factor, other.x[e], o.x[e]);
    sum = fma(factor, other_sum, sum);
  }
};

// The results of a block, row by row: either the item's result or a partial one.
template <class T, int kRows, int kHeadDim, bool kAligned>
struct Writer {
  using Acc = typename Accumulator<T>::type;

  static constexpr int kVecs = kHeadDim / 4;

  const DecodeParams& params;
  const Piece& piece;
  const Parts& parts;

  __device__ __forceinline__ int rows() const {
    return min(kRows, piece.seq.seqlen_q * params.group - piece.tile * kRows);
  }

  // Columns 4c … 4c + 3 of a row of this piece.
  __device__ __forceinline__ void put(int row, int column, const Partial<Acc>& result) const {
    if (parts.parts == 1) {
      put_result(row, column, result);
    } else {
      const long long at = parts.slot(parts.part) * kRows + row;
      *reinterpret_cast<Vec<Acc>*>(static_cast<Acc*>(params.partial_out) + at * kHeadDim + column) =
          result.o;
      if (column == 0) {
        Acc* max_sum = static_cast<Acc*>(params.partial_max_sum) + 2 * at;
        max_sum[0] = result.max;
        max_sum[1] = result.sum;
      }
    }
  }

  // By all threads, once every row of the piece has been put.
  __device__ __forceinline__ void finish() const {
    if (parts.parts == 1) return;
    __syncthreads();
    if (threadIdx.x == 0)
      ptx::store_release(params.arrived + parts.slot(parts.part), params.ticket);
  }

  // By all threads of the block that has the item's last piece. The other pieces are those of
  // blocks before it, which run, or have run, whatever else the device is doing. `arrived` needs no
  // initial value, since no stale content is this launch's random ticket, and is cleared for a
  // replay of the launch in a CUDA graph.
  __device__ __forceinline__ void merge_parts() const {
    for (int i = threadIdx.x; i < parts.parts; i += Config::threads) {
      unsigned long long* arrived = params.arrived + parts.slot(i);
      while (ptx::load_acquire(arrived) != params.ticket) {
      }
      *arrived = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows() * kVecs; i += Config::threads) {
      const int column = i % kVecs * 4;
      if (column < params.head_dim_v) merge(i / kVecs, column);
    }
  }

 private:
  __device__ __forceinline__ void merge(int row, int column) const {
    constexpr int kBatch = 64 / sizeof(Acc);  // parts on their way from L2 at a time
    Partial<Acc> whole;
#pragma unroll 1
    for (int first = 0; first < parts.parts; first += kBatch) {
      Vec<Acc> o[kBatch];
      Acc max_[kBatch], sum[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const long long at = parts.slot(min(first + i, parts.parts - 1)) * kRows + row;
        const Acc* max_sum = static_cast<const Acc*>(params.partial_max_sum) + 2 * at;
        max_[i] = __ldcg(max_sum);
        sum[i] = __ldcg(max_sum + 1);
        o[i] = load_past_l1(static_cast<const Acc*>(params.partial_out) + at * kHeadDim + column);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (first + i >= parts.parts) max_[i] = minus_infinity<Acc>();  // weighs nothing
      Acc new_max = whole.max;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) new_max = fmax(new_max, max_[i]);
      whole.raise(new_max);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) whole.add(o[i], max_[i], sum[i]);
    }
    put_result(row, column, whole);
  }

  __device__ __forceinline__ void put_result(int row, int column, Partial<Acc> result) const {
    const int index = piece.tile * kRows + row;
    const int token = divided_by_group(params, index);
    const int head = piece.head * params.group + index - token * params.group;
    if (params.sinks != nullptr) {  // a key without a value
      const Acc sink = static_cast<const Acc*>(params.sinks)[head];
      result.raise(fmax(result.max, sink));
      result.add({}, sink, 1);
    }
    const Acc inverse = result.sum == 0 ? 0 : 1 / result.sum;  // 0: no key was seen
    const long long at = piece.seq.index * params.out_stride.batch +
                         (piece.seq.begin_q + token) * params.out_stride.seq +
                         head * params.out_stride.head + column;
    if (params.out_is_acc)
      store(static_cast<Acc*>(params.out) + at, column, result.o, inverse);
    else
      store(static_cast<T*>(params.out) + at, column, result.o, inverse);
    if (params.lse != nullptr && column == 0) {
      const Acc lse = result.sum == 0 ? minus_infinity<Acc>() : result.max + log(result.sum);
      static_cast<Acc*>(params.lse)[piece.seq.index * params.lse_batch_stride +
                                    head * params.lse_head_stride + piece.seq.begin_q + token] =
          lse;
    }
  }

  template <class Out>
  __device__ __forceinline__ void store(Out* target, int column, const Vec<Acc>& o,
                                        Acc inverse) const {
    struct alignas(4 * sizeof(Out) < 16 ? 4 * sizeof(Out) : 16) Packed {
      Out x[4];
    } packed;
#pragma unroll
    for (int e = 0; e < 4; ++e) packed.x[e] = static_cast<Out>(o.x[e] * inverse);
    if (kAligned) {
      *reinterpret_cast<Packed*>(target) = packed;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (column + e < params.head_dim_v) target[e] = packed.x[e];
    }
  }
};

}  // namespace decoding
