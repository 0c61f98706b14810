// From the warps' parts of a result to a block's, and from the blocks' parts to what is written
// out.
#pragma once

#include "decoding/schedule.cuh"
#include "ptx/b128.cuh"
#include "tile/softmax.cuh"

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

// e^x / 2^max. The logarithm's base in two parts: one part's error would be that of every weight.
__device__ __forceinline__ float weight(float x, float max) {
  return exp2f(fmaf(x, 1.925963033500011e-8f, fmaf(x, tile::kLog2e, -max)));
}
__device__ __forceinline__ double weight(double x, double max) {
  return exp2(fma(x, 2.0355273740931033e-17, fma(x, 1.4426950408889634, -max)));
}

// 2^n of a whole number, exactly, and 0 far below 1.
__device__ __forceinline__ float power_of_two(float n) {
  return __int_as_float(127 + static_cast<int>(fmaxf(n, -127.0f)) << 23);
}
__device__ __forceinline__ double power_of_two(double n) {
  return __hiloint2double(1023 + static_cast<int>(fmax(n, -1023.0)) << 20, 0);
}

// log(2^n x)
__device__ __forceinline__ float log_of_power(float n, float x) {
  return fmaf(n, 0.693145752f, fmaf(n, 1.42860677e-6f, logf(x)));
}
__device__ __forceinline__ double log_of_power(double n, double x) {
  return fma(n, 0.6931471805599453, fma(n, 2.3190468138462996e-17, log(x)));
}

// A softmax-weighted sum under way: four columns of O, relative to 2^max, and the row's sum of
// weights. Where inputs have more than 16 bits, maxima are whole numbers, and weighing parts
// against each other costs no digit.
template <class T>
struct Partial {
  using Acc = typename Accumulator<T>::type;

  Vec<Acc> o = {};
  Acc max = minus_infinity<Acc>();
  Acc sum = 0;

  __device__ __forceinline__ static Acc power(Acc n) {
    if (sizeof(T) == 2) return ptx::ex2(static_cast<float>(n));
    return power_of_two(n);
  }
  // Moves what exponents are relative to. Nothing seen on both sides: 2^(-inf - 0) = 0, and never
  // NaN.
  __device__ __forceinline__ void raise(Acc new_max) {
    const Acc factor = power(max - (new_max == minus_infinity<Acc>() ? 0 : new_max));
#pragma unroll
    for (int e = 0; e < 4; ++e) o.x[e] *= factor;
    sum *= factor;
    max = new_max;
  }
  // Adds another one, whose maximum `max` is not below.
  __device__ __forceinline__ void add(const Vec<Acc>& other, Acc other_max, Acc other_sum) {
    const Acc factor = power(other_max - (max == minus_infinity<Acc>() ? 0 : max));
#pragma unroll
    for (int e = 0; e < 4; ++e) o.x[e] = fma(factor, other.x[e], o.x[e]);
    sum = fma(factor, other_sum, sum);
  }
  // Adds that of the lane at a distance, which adds this one.
  __device__ __forceinline__ void add_lane(int distance) {
    raise(fmax(max, __shfl_xor_sync(~0u, max, distance)));
#pragma unroll
    for (int e = 0; e < 4; ++e) o.x[e] += __shfl_xor_sync(~0u, o.x[e], distance);
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
};

// The results of a block, row by row: either the item's result or a partial one; kBatch parts are
// on their way from L2 at a time when they are merged. A partial result is
// written in units of 16 bytes, half of each numbers and half the launch's ticket, so that no flag
// and no fence is needed: who finds the ticket has found the numbers.
template <class T, int kRows, int kHeadDim, bool kAligned, int kBatch>
struct Writer {
  using Acc = typename Accumulator<T>::type;
  using Unit = ptx::B128;

  static constexpr int kVecs = kHeadDim / 4;
  static constexpr int kNumbers = 8 / sizeof(Acc);  // of a unit
  // Units of a row: O's, a column of four in kOUnits parts that lie apart, so that neighbouring
  // threads' lie together; then maximum and sum, once for every 64 columns.
  static constexpr int kOUnits = 4 / kNumbers, kMaxSumUnits = 2 / kNumbers;
  static constexpr int kUnits = kOUnits * kVecs + kMaxSumUnits * (kHeadDim / 64);

  const DecodeParams& params;
  const Piece& piece;
  const Parts& parts;

  __device__ __forceinline__ int rows() const {
    return min(kRows, piece.seq.seqlen_q * params.group - piece.tile * kRows);
  }

  // Columns 4c … 4c + 3 of a row of this piece.
  __device__ __forceinline__ void put(int row, int column, const Partial<T>& result) const {
    if (parts.parts == 1) {
      put_result(row, column, result);
    } else {
      Unit* slot = static_cast<Unit*>(params.partials) + parts.slot(parts.part) * kSlotUnits;
      const Acc max_sum[2] = {result.max, result.sum};
      put_numbers(slot + o_unit(row, column), kVecs, result.o.x);
      if (column % 64 == 0) put_numbers(slot + max_sum_unit(row, column), 1, max_sum);
    }
  }

  // By all threads of the block that has the item's last piece. The other pieces are those of
  // blocks before it, which run, or have run, whatever else the device is doing. Tickets need no
  // initial value, since no stale content is this launch's random one, and are cleared for a replay
  // of the launch in a CUDA graph.
  __device__ __forceinline__ void merge_parts() const {
    constexpr int kPanels = kHeadDim / 64;
    for (int i = threadIdx.x / 32; i < rows() * kPanels; i += Config::threads / 32)
      if (i % kPanels * 64 < params.head_dim_v) merge(i / kPanels, i % kPanels);
  }

 private:
  static constexpr unsigned long long kSlotUnits = kRows * kUnits;

  __device__ __forceinline__ static unsigned o_unit(int row, int column) {
    return row * kUnits + column / 4;
  }
  __device__ __forceinline__ static unsigned max_sum_unit(int row, int column) {
    return row * kUnits + kOUnits * kVecs + column / 64 * kMaxSumUnits;
  }

  template <int n>
  __device__ __forceinline__ void put_numbers(Unit* units, int stride,
                                              const Acc (&numbers)[n]) const {
#pragma unroll
    for (int i = 0; i < n / kNumbers; ++i) {
      Unit unit;
      unit.high = params.ticket;
#pragma unroll
      for (int j = 0; j < kNumbers; ++j)
        reinterpret_cast<Acc*>(&unit.low)[j] = numbers[i * kNumbers + j];
      ptx::store_relaxed(units + i * stride, unit);
    }
  }

  // By a warp, 64 columns of a row: four a lane, in two halves of the warp that take every second
  // part. The others wait for the last part's read, so it takes few instructions: what does not
  // exist is read as its neighbour is, and not added. All lanes have read a unit before its ticket
  // is cleared.
  __device__ __forceinline__ void merge(int row, int panel) const {
    const int lane = threadIdx.x % 32, half = lane / 16;
    const int column = panel * 64 + lane % 16 * 4;
    Unit* const units = static_cast<Unit*>(params.partials);
    Unit* const o_units = units + o_unit(row, min(column, params.head_dim_v - 1));
    Unit* const max_sum_units = units + max_sum_unit(row, column);
    const Parts all = parts;
    Partial<T> whole;
#pragma unroll 1
    for (int first = half; first - half < all.parts; first += 2 * kBatch) {
      unsigned slot[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) slot[i] = all.slot(min(first + 2 * i, all.parts - 1));
      Unit o[kBatch][kOUnits], max_sum[kBatch][kMaxSumUnits];
      unsigned long long missing;
      do {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
#pragma unroll
          for (int unit = 0; unit < kOUnits; ++unit)
            o[i][unit] = ptx::load_relaxed(o_units + slot[i] * kSlotUnits + unit * kVecs);
#pragma unroll
          for (int unit = 0; unit < kMaxSumUnits; ++unit)
            max_sum[i][unit] = ptx::load_relaxed(max_sum_units + slot[i] * kSlotUnits + unit);
        }
        missing = 0;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
#pragma unroll
          for (int unit = 0; unit < kOUnits; ++unit) missing |= o[i][unit].high ^ params.ticket;
#pragma unroll
          for (int unit = 0; unit < kMaxSumUnits; ++unit)
            missing |= max_sum[i][unit].high ^ params.ticket;
        }
      } while (__any_sync(~0u, missing != 0));
      Acc new_max = whole.max;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) new_max = fmax(new_max, number(max_sum[i], 0));
      whole.raise(new_max);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + 2 * i < all.parts) {
          Vec<Acc> numbers;
#pragma unroll
          for (int e = 0; e < 4; ++e) numbers.x[e] = number(o[i], e);
          whole.add(numbers, number(max_sum[i], 0), number(max_sum[i], 1));
        }
#pragma unroll
        for (int unit = 0; unit < kOUnits; ++unit)
          o_units[slot[i] * kSlotUnits + unit * kVecs].high = 0;
#pragma unroll
        for (int unit = 0; unit < kMaxSumUnits; ++unit)
          max_sum_units[slot[i] * kSlotUnits + unit].high = 0;
      }
    }
    whole.add_lane(16);
    if (half == 0 && column < params.head_dim_v) put_result(row, column, whole);
  }

  template <int n>
  __device__ __forceinline__ static Acc number(const Unit (&units)[n], int i) {
    return reinterpret_cast<const Acc*>(&units[i / kNumbers].low)[i % kNumbers];
  }

  __device__ __forceinline__ void put_result(int row, int column, Partial<T> result) const {
    const int index = piece.tile * kRows + row;
    const int token = divided_by_group(params, index);
    const int head = piece.head * params.group + index - token * params.group;
    if (params.sinks != nullptr) {  // a key without a value
      const Acc sink = static_cast<const Acc*>(params.sinks)[head];
      result.raise(fmax(result.max, ceil(sink * static_cast<Acc>(1.4426950408889634))));
      result.sum += weight(sink, result.max == minus_infinity<Acc>() ? 0 : result.max);
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
      const Acc lse =
          result.sum == 0 ? minus_infinity<Acc>() : log_of_power(result.max, result.sum);
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
