// Rows that have one scale each, found for them, and no offset: their codes with fewer instructions
// than tile/lane_row.cuh takes for any row, and the same bits.
#pragma once

#include "ptx/magnitudes.cuh"
#include "tile/found_scale.cuh"
#include "tile/lane_row.cuh"
#include "tile/packed_extent.cuh"

namespace tile {

template <class T, int kLanes, int kFormat>
struct WholeRow {
  using Columns = LaneColumns<kLanes>;
  static constexpr int kHeadDim = Columns::kHeadDim;
  static constexpr bool kHasMinimum = kFormat == kInt4;
  static_assert(sizeof(T) == 2, "words hold two numbers");

  float x[4][8];

  // Of numbers that are not rotated: both ends of the row, or the largest magnitude twice.
  __device__ __forceinline__ static void ends_of(const FetchedRow<T, kLanes>& fetched, float& most,
                                                 float& least) {
    unsigned words[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) words[i] = fetched.word(i / 4, i % 4);
    unsigned ends = packed_extent<T>(words);
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2)
      ends = larger_halves<T>(ends, __shfl_xor_sync(~0u, ends, distance));
    if (!kHasMinimum) ends = larger_halves<T>(ends, ptx::prmt(ends, ends, 0x1032));
    const float2 both = to_floats<T>(ends);
    most = both.x;
    least = negated(both.y);
  }

  __device__ __forceinline__ void unpack(const FetchedRow<T, kLanes>& fetched) { fetched.get(x); }

  // All numbers become 0: of a row whose numbers are not all finite.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int part = 0; part < 4; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e) x[part][e] = 0;
  }

  // Gives codes of the row to `put`, each eight features' at a time.
  template <bool kInSlots, class Put>
  __device__ __forceinline__ void divide(float inverse, float minimum, const Put& put) {
#pragma unroll
    for (int part = 0; part < 4; ++part)
      put(Columns::column(kInSlots ? Columns::quarter_of(part) : part) / (kFormat == kInt4 ? 2 : 1),
          eight_codes<kFormat>(x[part], inverse, minimum));
  }

  // The Hadamard transform of a row in slots whose words lanes have exchanged, so that its first
  // stages need no other lane; what they give is exchanged back for the others. (The stages of
  // LaneRow: lanes that exchange sums in each of two stages send 64 floats, and here 24, and 12
  // words before.) The extent is that of sums before the last factor, times this one: rounding
  // keeps the order of numbers.
  __device__ __forceinline__ void transform(float& most, float& least) {
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2)
#pragma unroll
      for (int slot = 0; slot < 4; ++slot)
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (!(e & distance)) butterfly(x[slot][e], x[slot][e + distance]);
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) combine_slots(distance);
#pragma unroll
    for (int slot = 1; slot < 4; ++slot)
      if (slot % kLanes != 0)
#pragma unroll
        for (int e = 0; e < 8; ++e) x[slot][e] = __shfl_xor_sync(~0u, x[slot][e], slot % kLanes);
    combine_slots(1);
    int magnitude = 0;  // bits of a float
    if (!kHasMinimum) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int low = __float_as_int(ptx::add_magnitudes_rn(x[0][e], x[2][e]));
        const int high = __float_as_int(ptx::add_magnitudes_rn(x[1][e], x[3][e]));
        magnitude = max(max(low, high), magnitude);
      }
    }
    combine_slots(2);
    const float scale = hadamard_scale(kHeadDim);
    if (kHasMinimum) {
      both_ends(most, least);
      most = ptx::mul_rn(most, scale);
      least = ptx::mul_rn(least, scale);
    } else {
#pragma unroll
      for (int distance = 1; distance < kLanes; distance *= 2)
        magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, distance));
      most = least = ptx::mul_rn(__int_as_float(magnitude), scale);
    }
#pragma unroll
    for (int part = 0; part < 4; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e) x[part][e] = ptx::mul_rn(x[part][e], scale);
  }

 private:
  // Sums and differences of slots whose quarters are `distance` apart. In some lanes the first of
  // two slots has the second quarter.
  __device__ __forceinline__ void combine_slots(int distance) {
    const float sign = Columns::quarter_of(0) & distance ? -1.0f : 1.0f;
#pragma unroll
    for (int slot = 0; slot < 4; ++slot)
      if (!(slot & distance))
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float &a = x[slot][e], &b = x[slot + distance][e];
          const float first = ptx::fma_rn(a, sign, b);
          b = ptx::fma_rn(b, -sign, a);
          a = first;
        }
  }

  // The largest and the least number of the row. As integers with a sign bits of floats have their
  // order from 0 on, and without a sign those of negative ones come last, the least one of all:
  // three of them are compared at once, and three floats cannot be.
  __device__ __forceinline__ void both_ends(float& most, float& least) const {
    int bits[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) bits[i] = __float_as_int(x[i / 8][i % 8]);
    int high = bits[0];
    unsigned low = bits[0];
#pragma unroll
    for (int i = 1; i < 31; i += 2) {
      high = max(max(bits[i], bits[i + 1]), high);
      low = max(max(static_cast<unsigned>(bits[i]), static_cast<unsigned>(bits[i + 1])), low);
    }
    high = max(high, bits[31]);
    low = max(low, static_cast<unsigned>(bits[31]));
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      high = max(high, __shfl_xor_sync(~0u, high, distance));
      low = max(low, __shfl_xor_sync(~0u, low, distance));
    }
    most = __int_as_float(high);
    least = __uint_as_float(low);
    if (__any_sync(~0u, high < 0 || static_cast<int>(low) >= 0)) {  // of one sign only
      most = least = x[0][0];
#pragma unroll
      for (int part = 0; part < 4; ++part)
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          most = ptx::max_nan(most, x[part][e]);
          least = ptx::min_nan(least, x[part][e]);
        }
#pragma unroll
      for (int distance = 1; distance < kLanes; distance *= 2) {
        most = ptx::max_nan(most, __shfl_xor_sync(~0u, most, distance));
        least = ptx::min_nan(least, __shfl_xor_sync(~0u, least, distance));
      }
    }
  }
};

}  // namespace tile
