// From the warps' parts of a result to a block's, and from the blocks' parts to what is written
// out.
#pragma once

#include "decoding/schedule.cuh"
#include "ptx/b128.cuh"
#include "tile/accumulator.cuh"
#include "tile/softmax.cuh"

namespace decoding {

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
  using Acc = tile::Accumulator<T>;

  Vec<Acc> o = {};
  Acc max = tile::negative_infinity<Acc>();
  Acc sum = 0;

  __device__ __forceinline__ static Acc power(Acc n) {
    if (sizeof(T) == 2) return ptx::ex2(static_cast<float>(n));
    return power_of_two(n);
  }
  // Moves what exponents are relative to. Nothing seen on both sides: 2^(-inf - 0) = 0, and never
  // NaN.
  __device__ __forceinline__ void raise(Acc new_max) {
    const Acc factor = power(max - (new_max == tile::negative_infinity<Acc>() ? 0 : new_max));
#pragma unroll
    for (int e = 0; e < 4; ++e) o.x[e] *= factor;
    sum *= factor;
    max = new_max;
  }
  // Adds another one, whose maximum `max` is not below.
  __device__ __forceinline__ void add(const Vec<Acc>& other, Acc other_max, Acc other_sum) {
    const Acc factor = power(other_max - (max == tile::negative_infinity<Acc>() ? 0 : max));
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
// on their way from L2 to a lane at a time when they are merged. A partial result is written in
// units of 16 bytes, half of each numbers and half the launch's ticket, so that no flag and no
// fence is needed: who finds the ticket has found the numbers.
template <class T, int kRows, int kHeadDim, bool kAligned, int kBatch>
struct Writer {
  using Acc = tile::Accumulator<T>;
  using Unit = ptx::B128;

  static constexpr int kVecs = kHeadDim / 4;
  static constexpr int kNumbers = 8 / sizeof(Acc);  // of a unit
  // Units of a row: O's, a column of four in kOUnits parts that lie apart, so that neighbouring
  // threads' lie together; then maximum and sum, once for every 64 columns.
  static constexpr int kOUnits = 4 / kNumbers, kMaxSumUnits = 2 / kNumbers;
  static constexpr int kPanels = kHeadDim / 64;
  static constexpr int kUnits = kOUnits * kVecs + kMaxSumUnits * kPanels;
  static constexpr bool kAhead = sizeof(Acc) == 4;  // double leaves no registers for it

  const DecodeParams& params;
  const Piece& piece;
  const Parts& parts;

  __device__ __forceinline__ int rows() const {
    return min(kRows, piece.seq.seqlen_q * params.group - piece.tile * kRows);
  }

  // Columns 4c … 4c + 3 of a row of this piece.
  __device__ __forceinline__ void put(int row, int column, const Partial<T>& result) const {
    if (parts.parts == 1)
      put_result(row, column, result);
    else
      put_part(row, column, result, parts.slot(parts.part));
  }

  // By all threads of a block that has the last of the parts. The others are pieces of
  // blocks before it, which run, or have run, whatever else the device is doing. Tickets need no
  // initial value, since no stale content is this launch's random one, and are cleared for a replay
  // of the launch in a CUDA graph.
  //
  // A warp merges 64 columns of a row at a time: four a lane, in two halves of the warp that take
  // every second part. Others wait for the last part's read, so kBatch parts a lane are asked for
  // while those before are added up, and that takes few instructions: what does not exist is read
  // as its neighbour is, and not added. All lanes have read a unit before its ticket is cleared.
  __device__ __forceinline__ void merge_parts() const {
    const int tasks = rows() * kPanels, lane = threadIdx.x % 32;
    const Merge merge = parts.merge();
    Unit units[kBatch][kOUnits + kMaxSumUnits];
    Numbers numbers[kBatch];
    Partial<T> whole;
    Round asked = {static_cast<int>(threadIdx.x) / 32, 0}, read = {-1, 0};
#pragma unroll 1
    while (true) {
      while (asked.task < tasks && asked.task % kPanels * 64 >= params.head_dim_v)
        asked.task += Config::threads / 32;
      const bool more = asked.task < tasks;
      if (kAhead && more) ask(merge, asked, units);
      if (read.task >= 0) {
        add_up(merge, read, numbers, whole);
        if (read.first + 2 * kBatch >= merge.count) {
          whole.add_lane(16);
          const int column = column_of(read);
          if (lane < 16 && column < params.head_dim_v) {
            if (parts.leads())
              put_part(row_of(read), column, whole, parts.merged_slot(parts.part));
            else
              put_result(row_of(read), column, whole);
          }
          whole = {};
        }
        read.task = -1;
      }
      if (!more) return;
      if (!kAhead) ask(merge, asked, units);
      if (!take(units, numbers)) continue;
      read = asked;
      asked.first += 2 * kBatch;
      if (asked.first >= merge.count) asked = {asked.task + Config::threads / 32, 0};
    }
  }

 private:
  static constexpr unsigned long long kSlotUnits = kRows * kUnits;

  __device__ __forceinline__ static unsigned o_unit(int row, int column) {
    return row * kUnits + column / 4;
  }
  __device__ __forceinline__ static unsigned max_sum_unit(int row, int column) {
    return row * kUnits + kOUnits * kVecs + column / 64 * kMaxSumUnits;
  }

  __device__ __forceinline__ void put_part(int row, int column, const Partial<T>& part,
                                           unsigned slot) const {
    Unit* const units = static_cast<Unit*>(params.partials) + slot * kSlotUnits;
    const Acc max_sum[2] = {part.max, part.sum};
    put_numbers(units + o_unit(row, column), kVecs, part.o.x);
    if (column % 64 == 0) put_numbers(units + max_sum_unit(row, column), 1, max_sum);
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

  struct Round {  // of a warp's reads
    int task;     // 64 columns of a row
    int first;    // part
  };
  struct Numbers {
    Vec<Acc> o;
    Acc max_sum[2];
  };

  __device__ __forceinline__ static int row_of(Round round) { return round.task / kPanels; }
  // The first of this lane's four.
  __device__ __forceinline__ static int column_of(Round round) {
    return round.task % kPanels * 64 + threadIdx.x % 16 * 4;
  }
  // The batch's part i, which may not exist: this half warp's.
  __device__ __forceinline__ static int part_of(Round round, int i) {
    return round.first + 2 * i + threadIdx.x % 32 / 16;
  }

  // Visits this lane's units of the batch's part i, with their numbers.
  template <class Visit>
  __device__ __forceinline__ void each_unit(const Merge& merge, Round round, int i,
                                            const Visit& visit) const {
    Unit* const slot = static_cast<Unit*>(params.partials) +
                       merge.slot_of(min(part_of(round, i), merge.count - 1)) * kSlotUnits;
    const int row = row_of(round), column = column_of(round);
    Unit* const o = slot + o_unit(row, min(column, params.head_dim_v - 1));
#pragma unroll
    for (int unit = 0; unit < kOUnits; ++unit) visit(o[unit * kVecs], unit);
#pragma unroll
    for (int unit = 0; unit < kMaxSumUnits; ++unit)
      visit(slot[max_sum_unit(row, column) + unit], kOUnits + unit);
  }

  template <int n>
  __device__ __forceinline__ void ask(const Merge& merge, Round round,
                                      Unit (&units)[kBatch][n]) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      each_unit(merge, round, i,
                [&](const Unit& from, int unit) { units[i][unit] = ptx::load_relaxed(&from); });
  }

  // Whether they are there, for all lanes.
  template <int n>
  __device__ __forceinline__ bool take(const Unit (&units)[kBatch][n],
                                       Numbers (&numbers)[kBatch]) const {
    unsigned long long missing = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
#pragma unroll
      for (int unit = 0; unit < n; ++unit) missing |= units[i][unit].high ^ params.ticket;
    if (__any_sync(~0u, missing != 0)) return false;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) numbers[i].o.x[e] = number(units[i], e);
#pragma unroll
      for (int e = 0; e < 2; ++e) numbers[i].max_sum[e] = number(units[i], 4 + e);
    }
    return true;
  }

  __device__ __forceinline__ void add_up(const Merge& merge, Round round,
                                         const Numbers (&numbers)[kBatch],
                                         Partial<T>& whole) const {
    Acc new_max = whole.max;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) new_max = fmax(new_max, numbers[i].max_sum[0]);
    whole.raise(new_max);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (part_of(round, i) < merge.count)
        whole.add(numbers[i].o, numbers[i].max_sum[0], numbers[i].max_sum[1]);
      each_unit(merge, round, i, [](Unit& unit, int) { unit.high = 0; });
    }
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
      result.sum += weight(sink, result.max == tile::negative_infinity<Acc>() ? 0 : result.max);
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
          result.sum == 0 ? tile::negative_infinity<Acc>() : log_of_power(result.max, result.sum);
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
