// Merges partial results: the warps' into a thread block's, and the thread blocks', by way of
// global memory, into what is written out.
#pragma once

#include "decoding/schedule.cuh"
#include "ptx/b128.cuh"
#include "tile/accumulator.cuh"
#include "tile/softmax.cuh"
#include "tile/vec.cuh"

namespace decoding {

template <class Acc>
using FourColumns = tile::Vec<Acc, 4>;  // of a row

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

// A softmax-weighted sum over some keys: four columns of O, relative to 2^max, and the row's sum of
// weights. Where inputs have more than 16 bits, maxima are whole numbers, so that rescaling one sum
// to another's maximum is exact.
template <class T>
struct Partial {
  using Acc = tile::Accumulator<T>;

  FourColumns<Acc> o = {};
  Acc max = tile::negative_infinity<Acc>();
  Acc sum = 0;

  __device__ __forceinline__ static Acc power(Acc n) {
    if (sizeof(T) == 2) return ptx::ex2(static_cast<float>(n));
    return power_of_two(n);
  }
  // Moves what exponents are relative to. Where no key has been seen yet the factor is 2^(-inf - 0)
  // = 0, and never NaN.
  __device__ __forceinline__ void rescale(Acc new_max) {
    const Acc factor = power(max - (new_max == tile::negative_infinity<Acc>() ? 0 : new_max));
#pragma unroll
    for (int e = 0; e < 4; ++e) o.x[e] *= factor;
    sum *= factor;
    max = new_max;
  }
  // Adds another sum, whose maximum is not above this one's.
  __device__ __forceinline__ void add(const FourColumns<Acc>& other, Acc other_max, Acc other_sum) {
    const Acc factor = power(other_max - (max == tile::negative_infinity<Acc>() ? 0 : max));
#pragma unroll
    for (int e = 0; e < 4; ++e) o.x[e] = fma(factor, other.x[e], o.x[e]);
    sum = fma(factor, other_sum, sum);
  }
  // Adds the sum of the lane at a distance, which adds this one.
  __device__ __forceinline__ void add_lane(int distance) {
    rescale(fmax(max, __shfl_xor_sync(~0u, max, distance)));
#pragma unroll
    for (int e = 0; e < 4; ++e) o.x[e] += __shfl_xor_sync(~0u, o.x[e], distance);
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
};

// Writes a split's result, row by row: the work tile's where it is the only split, else a partial
// result; and merges partial results, of which a lane has kBatch on their way from L2 at a time. A
// partial result is written in packets of 16 bytes, half of each numbers and half the launch's id,
// so that neither flags nor fences are needed: who reads the id has read the numbers.
template <class T, int kRows, int kHeadDim, bool kAligned, int kBatch,
          int kWarps = Config::threads / 32, int kHeads = 1>
struct Writer {
  using Acc = tile::Accumulator<T>;
  using Packet = ptx::B128;

  using HeadRows = decoding::HeadRows<kRows, kHeads>;
  static constexpr int kVecs = kHeadDim / 4;
  static constexpr int kNumbers = 8 / sizeof(Acc);  // of a packet
  // Packets of a row: O's, four columns in kOPackets packets that lie apart, so that those of
  // neighbouring threads lie together; then maximum and sum, once for every 64 columns.
  static constexpr int kOPackets = 4 / kNumbers, kMaxSumPackets = 2 / kNumbers;
  static constexpr int kPanels = kHeadDim / 64;
  static constexpr int kPackets = kOPackets * kVecs + kMaxSumPackets * kPanels;
  static constexpr bool kAhead = sizeof(Acc) == 4;  // double leaves no registers for it

  const DecodeParams& params;
  const Split& split;
  const SplitPlace& place;

  // Rows of each of the tile's key heads that exist.
  __device__ __forceinline__ int rows() const {
    return min(HeadRows::kEach,
               split.seq.seqlen_q * params.group - split.row_tile * HeadRows::kEach);
  }
  __device__ __forceinline__ bool exists(int row) const { return HeadRows::in_head(row) < rows(); }

  // Columns 4c … 4c + 3 of a row of this split.
  __device__ __forceinline__ void put(int row, int column, const Partial<T>& result) const {
    if (place.count == 1)
      put_result(row, column, result);
    else
      put_partial(row, column, result, place.slot(place.index));
  }

  // Waits for the partial results that this split's thread block merges, and merges them; by all of
  // its threads. A thread block only waits for thread blocks with lower indices, which are resident
  // or have ended: no deadlock. The id in memory needs no initial value, since no stale content is
  // this launch's random one, and is cleared for a replay of the launch in a CUDA graph.
  //
  // A warp merges 64 columns of a row at a time: four a lane, in two halves of the warp that take
  // every second partial result. The other thread blocks wait for the last one's reads, so a lane
  // requests kBatch while those before are added up, in few instructions: what does not exist is
  // read as its neighbour is, and not added. All lanes have read a packet before its id is cleared.
  __device__ __forceinline__ void merge_partials() const {
    const int tasks = (kHeads == 1 ? rows() : kRows) * kPanels, lane = threadIdx.x % 32;
    const MergeList list = place.merge_list();
    Packet packets[kBatch][kOPackets + kMaxSumPackets];
    Numbers numbers[kBatch];
    Partial<T> whole;
    Round requested = {static_cast<int>(threadIdx.x) / 32, 0}, read = {-1, 0};
#pragma unroll 1
    while (true) {
      while (requested.task < tasks && !exists(requested)) requested.task += kWarps;
      const bool more = requested.task < tasks;
      if (kAhead && more) request(list, requested, packets);
      if (read.task >= 0) {
        accumulate(list, read, numbers, whole);
        if (read.first + 2 * kBatch >= list.count) {
          whole.add_lane(16);
          const int column = column_of(read);
          if (lane < 16 && column < params.head_dim_v) {
            if (place.merges_for_later())
              put_partial(row_of(read), column, whole, place.merged_slot(place.index));
            else
              put_result(row_of(read), column, whole);
          }
          whole = {};
        }
        read.task = -1;
      }
      if (!more) return;
      if (!kAhead) request(list, requested, packets);
      if (!arrived(packets, numbers)) continue;
      read = requested;
      requested.first += 2 * kBatch;
      if (requested.first >= list.count) requested = {requested.task + kWarps, 0};
    }
  }

 private:
  static constexpr unsigned long long kSlotPackets = kRows * kPackets;

  __device__ __forceinline__ static unsigned o_packet(int row, int column) {
    return row * kPackets + column / 4;
  }
  __device__ __forceinline__ static unsigned max_sum_packet(int row, int column) {
    return row * kPackets + kOPackets * kVecs + column / 64 * kMaxSumPackets;
  }

  __device__ __forceinline__ void put_partial(int row, int column, const Partial<T>& partial,
                                              unsigned slot) const {
    Packet* const packets = static_cast<Packet*>(params.workspace) + slot * kSlotPackets;
    const Acc max_sum[2] = {partial.max, partial.sum};
    put_numbers(packets + o_packet(row, column), kVecs, partial.o.x);
    if (column % 64 == 0) put_numbers(packets + max_sum_packet(row, column), 1, max_sum);
  }

  template <int n>
  __device__ __forceinline__ void put_numbers(Packet* packets, int stride,
                                              const Acc (&numbers)[n]) const {
#pragma unroll
    for (int i = 0; i < n / kNumbers; ++i) {
      Packet packet;
      packet.high = params.launch_id;
#pragma unroll
      for (int j = 0; j < kNumbers; ++j)
        reinterpret_cast<Acc*>(&packet.low)[j] = numbers[i * kNumbers + j];
      ptx::store_relaxed(packets + i * stride, packet);
    }
  }

  struct Round {  // of a warp's reads
    int task;     // 64 columns of a row
    int first;    // of 2 kBatch partial results
  };
  struct Numbers {
    FourColumns<Acc> o;
    Acc max_sum[2];
  };

  __device__ __forceinline__ bool exists(Round round) const {
    return round.task % kPanels * 64 < params.head_dim_v && (kHeads == 1 || exists(row_of(round)));
  }
  __device__ __forceinline__ static int row_of(Round round) { return round.task / kPanels; }
  // The first of this lane's four.
  __device__ __forceinline__ static int column_of(Round round) {
    return round.task % kPanels * 64 + threadIdx.x % 16 * 4;
  }
  // Partial result i of this half warp's batch, which may not exist.
  __device__ __forceinline__ static int partial_of(Round round, int i) {
    return round.first + 2 * i + threadIdx.x % 32 / 16;
  }

  // Visits this lane's packets of partial result i of the batch, with their numbers.
  template <class Visit>
  __device__ __forceinline__ void each_packet(const MergeList& list, Round round, int i,
                                              const Visit& visit) const {
    Packet* const slot = static_cast<Packet*>(params.workspace) +
                         list.slot_of(min(partial_of(round, i), list.count - 1)) * kSlotPackets;
    const int row = row_of(round), column = column_of(round);
    Packet* const o = slot + o_packet(row, min(column, params.head_dim_v - 1));
#pragma unroll
    for (int j = 0; j < kOPackets; ++j) visit(o[j * kVecs], j);
#pragma unroll
    for (int j = 0; j < kMaxSumPackets; ++j)
      visit(slot[max_sum_packet(row, column) + j], kOPackets + j);
  }

  template <int n>
  __device__ __forceinline__ void request(const MergeList& list, Round round,
                                          Packet (&packets)[kBatch][n]) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      each_packet(list, round, i,
                  [&](const Packet& from, int j) { packets[i][j] = ptx::load_relaxed(&from); });
  }

  // Whether all that all lanes have requested is of this launch; if so, gives the numbers.
  template <int n>
  __device__ __forceinline__ bool arrived(const Packet (&packets)[kBatch][n],
                                          Numbers (&numbers)[kBatch]) const {
    unsigned long long missing = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
#pragma unroll
      for (int j = 0; j < n; ++j) missing |= packets[i][j].high ^ params.launch_id;
    if (__any_sync(~0u, missing != 0)) return false;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) numbers[i].o.x[e] = number(packets[i], e);
#pragma unroll
      for (int e = 0; e < 2; ++e) numbers[i].max_sum[e] = number(packets[i], 4 + e);
    }
    return true;
  }

  __device__ __forceinline__ void accumulate(const MergeList& list, Round round,
                                             const Numbers (&numbers)[kBatch],
                                             Partial<T>& whole) const {
    Acc new_max = whole.max;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) new_max = fmax(new_max, numbers[i].max_sum[0]);
    whole.rescale(new_max);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (partial_of(round, i) < list.count)
        whole.add(numbers[i].o, numbers[i].max_sum[0], numbers[i].max_sum[1]);
      each_packet(list, round, i, [](Packet& packet, int) { packet.high = 0; });
    }
  }

  template <int n>
  __device__ __forceinline__ static Acc number(const Packet (&packets)[n], int i) {
    return reinterpret_cast<const Acc*>(&packets[i / kNumbers].low)[i % kNumbers];
  }

  __device__ __forceinline__ void put_result(int row, int column, Partial<T> result) const {
    const int index = split.row_tile * HeadRows::kEach + HeadRows::in_head(row);
    const int token = divided_by_group(params, index);
    const int head =
        (split.head + HeadRows::head_of(row)) * params.group + index - token * params.group;
    if (params.sinks != nullptr) {  // a key without a value
      const Acc sink = static_cast<const Acc*>(params.sinks)[head];
      result.rescale(fmax(result.max, ceil(sink * static_cast<Acc>(1.4426950408889634))));
      result.sum += weight(sink, result.max == tile::negative_infinity<Acc>() ? 0 : result.max);
    }
    const Acc inverse = result.sum == 0 ? 0 : 1 / result.sum;  // 0: no key was seen
    const long long at = split.seq.index * params.out_stride.batch +
                         (split.seq.begin_q + token) * params.out_stride.seq +
                         head * params.out_stride.head + column;
    if (params.out_is_acc)
      store(static_cast<Acc*>(params.out) + at, column, result.o, inverse);
    else
      store(static_cast<T*>(params.out) + at, column, result.o, inverse);
    if (params.lse != nullptr && column == 0) {
      const Acc lse =
          result.sum == 0 ? tile::negative_infinity<Acc>() : log_of_power(result.max, result.sum);
      static_cast<Acc*>(params.lse)[split.seq.index * params.lse_batch_stride +
                                    head * params.lse_head_stride + split.seq.begin_q + token] =
          lse;
    }
  }

  template <class Out>
  __device__ __forceinline__ void store(Out* target, int column, const FourColumns<Acc>& o,
                                        Acc inverse) const {
    FourColumns<Out> packed;
#pragma unroll
    for (int e = 0; e < 4; ++e) packed.x[e] = static_cast<Out>(o.x[e] * inverse);
    if (kAligned) {
      *reinterpret_cast<FourColumns<Out>*>(target) = packed;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (column + e < params.head_dim_v) target[e] = packed.x[e];
    }
  }
};

}  // namespace decoding
