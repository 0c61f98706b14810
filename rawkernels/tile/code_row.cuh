// A row of numbers that becomes codes, or is made of them: where it is, its extent, its RoPE. Every
// operation is one of cuattn/reference/quantization.py, with the same rounding. tile/lane_row.cuh
// and tile/warp_row.cuh have rows that lanes of a warp share in one way or another.
#pragma once

#include "ptx/magnitudes.cuh"
#include "tile/accumulator.cuh"
#include "tile/quantized.cuh"

namespace tile {

// Instead of a format: it is known when the kernel runs. Rows of a format that is known before have
// scales that are found, and minima where they are kInt4.
constexpr int kAnyFormat = -1;

// Where a row's codes and scales are.
template <int kFormat = kAnyFormat>
struct CodeRow {
  static constexpr int kKnownFormat = kFormat;
  static constexpr bool kStaged = false;

  unsigned char* codes;
  void* scale;    // of the first group of features; bfloat16, or float where scale_is_float
  void* minimum;  // likewise; null: none
  long long scale_stride, minimum_stride;  // from group to group, in elements
  const float* offset;                     // of the row's head; null: none
  int any_format, group;                   // features that share a scale
  int group_shift;                         // log2 of `group` where it is a power of two
  int scale_is_float, rotated;
  int scales_are_given;

  __device__ __forceinline__ int format() const {
    return kFormat == kAnyFormat ? any_format : kFormat;
  }
  __device__ __forceinline__ bool has_minimum() const {
    return kFormat == kAnyFormat ? minimum != nullptr : kFormat == kInt4;
  }
  __device__ __forceinline__ bool is_static() const {
    return kFormat == kAnyFormat && scales_are_given;
  }
  __device__ __forceinline__ float scale_at(int place) const {
    return scale_value(scale, place * scale_stride, scale_is_float);
  }
  __device__ __forceinline__ float minimum_at(int place) const {
    return has_minimum() ? scale_value(minimum, place * minimum_stride, scale_is_float) : 0.0f;
  }
  // Only scales that are found are written: they are bfloat16. NaN has more than one pattern.
  __device__ __forceinline__ void put_scale(int place, float found, float least) const {
    unsigned short* const to = static_cast<unsigned short*>(scale) + place * scale_stride;
    if (has_minimum()) {
      unsigned short* const beside = static_cast<unsigned short*>(minimum) + place * minimum_stride;
      if (beside == to + 1 && reinterpret_cast<unsigned long long>(to) % 4 == 0) {
        *reinterpret_cast<unsigned*>(to) =
            bfloat16_bits(found) | static_cast<unsigned>(bfloat16_bits(least)) << 16;
        return;
      }
      *beside = bfloat16_bits(least);
    }
    *to = bfloat16_bits(found);
  }
  // Eight codes of 8 bits, or of 4.
  __device__ __forceinline__ void put_codes(int column, uint2 words) const {
    __stcs(reinterpret_cast<uint2*>(codes + column), words);
  }
  __device__ __forceinline__ void put_codes(int column, unsigned word) const {
    __stcs(reinterpret_cast<unsigned*>(codes + column / 2), word);
  }
  // 32 of 4 bits.
  __device__ __forceinline__ void put_codes(int column, uint4 words) const {
    __stcs(reinterpret_cast<uint4*>(codes + column / 2), words);
  }
  __device__ __forceinline__ float least_code() const {
    return format() == kInt4 && has_minimum() ? 0.0f : -largest_code(format());
  }
  __device__ __forceinline__ float most_code() const {
    return format() == kInt4 && has_minimum() ? 15.0f : largest_code(format());
  }
};

// The same with codes in shared memory, where there is room for those of rows that do not exist. A
// minimum of kInt4 lies behind its scale, both in an aligned word.
template <int kFormat>
struct StagedCodeRow : CodeRow<kFormat> {
  static constexpr bool kStaged = true;

  __device__ __forceinline__ void put_scale(int place, float found, float least) const {
    unsigned short* const to =
        static_cast<unsigned short*>(this->scale) + place * this->scale_stride;
    if (kFormat == kInt4)
      *reinterpret_cast<unsigned*>(to) =
          bfloat16_bits(found) | static_cast<unsigned>(bfloat16_bits(least)) << 16;
    else
      *to = bfloat16_bits(found);
  }
  __device__ __forceinline__ void put_codes(int column, uint2 words) const {
    *reinterpret_cast<uint2*>(this->codes + column) = words;
  }
  __device__ __forceinline__ void put_codes(int column, unsigned word) const {
    *reinterpret_cast<unsigned*>(this->codes + column / 2) = word;
  }
};

// The scale of numbers that codes from 0 to `codes` above `minimum` stand for (scale_of), or NaN
// where the number of the largest code would not be finite.
__device__ __forceinline__ float finite_scale_of(float extent, float codes, float minimum) {
  const float scale = scale_of(extent, codes);
  const float most = ptx::add_rn(ptx::mul_rn(scale, codes), minimum);
  return fabsf(most) < infinity() ? scale : __uint_as_float(0x7fc00000);
}

// From `least` to `most`; never -0, which the difference of zeros may be and scale_of does not
// know.
__device__ __forceinline__ float distance_of(float least, float most) {
  return ptx::add_rn(ptx::sub_rn(most, least), 0.0f);
}

// What of a group decides about its scale: the largest magnitude, with any sign, or with a minimum
// both ends. NaN makes them NaN.
template <bool kHasMinimum>
struct Extent {
  float least, most = kHasMinimum ? negative_infinity() : 0.0f;

  __device__ __forceinline__ Extent() : least(infinity()) {}
  __device__ __forceinline__ void add(float x) {
    if (kHasMinimum) least = ptx::min_nan(least, x);
    add_most(x);
  }
  __device__ __forceinline__ void add(const Extent& other) {
    if (kHasMinimum) least = ptx::min_nan(least, other.least);
    add_most(other.most);
  }
  // With that of the lane whose number differs in one bit.
  __device__ __forceinline__ void add_lane(int distance) {
    Extent other;
    if (kHasMinimum) other.least = __shfl_xor_sync(~0u, least, distance);
    other.most = __shfl_xor_sync(~0u, most, distance);
    add(other);
  }
  // Gives the scale, and the minimum where codes have one, else 0.
  __device__ __forceinline__ float scale(int format, float& minimum) const {
    minimum = 0;
    if (!kHasMinimum) return finite_scale_of(ptx::magnitude(most), largest_code(format), 0.0f);
    const float low = rounded_down(least);
    const float scale = finite_scale_of(distance_of(low, most), 15.0f, low);
    minimum = scale == scale ? low : 0.0f;
    return scale;
  }

 private:
  __device__ __forceinline__ void add_most(float x) {
    most = kHasMinimum ? ptx::max_nan(most, x) : ptx::max_magnitude_nan(most, x);
  }
};

__device__ __forceinline__ float mul_rn(float a, float b) { return ptx::mul_rn(a, b); }
__device__ __forceinline__ double mul_rn(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float add_rn(float a, float b) { return ptx::add_rn(a, b); }
__device__ __forceinline__ double add_rn(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ float sub_rn(float a, float b) { return ptx::sub_rn(a, b); }
__device__ __forceinline__ double sub_rn(double a, double b) { return __dsub_rn(a, b); }

template <class T>
__device__ __forceinline__ float to_float(T x) {
  return static_cast<float>(x);
}
__device__ __forceinline__ float to_float(double x) { return ptx::cvt_rn(x); }

// Two neighbouring numbers of 16 bits.
template <class T>
__device__ __forceinline__ float2 to_floats(unsigned pair);
template <>
__device__ __forceinline__ float2 to_floats<__half>(unsigned pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}
template <>
__device__ __forceinline__ float2 to_floats<__nv_bfloat16>(unsigned pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
}

// RoPE of one row: what rotates it, or nothing where `cos` is null.
template <class T>
struct RowRope {
  using Acc = Accumulator<T>;

  const Acc* cos;  // of the row's position
  const Acc* sin;
  int pairs, interleaved;

  // A pair, not yet rounded to T.
  __device__ __forceinline__ static Acc first(Acc a, Acc b, Acc cos, Acc sin) {
    return sub_rn(mul_rn(a, cos), mul_rn(b, sin));
  }
  __device__ __forceinline__ static Acc second(Acc a, Acc b, Acc cos, Acc sin) {
    return add_rn(mul_rn(b, cos), mul_rn(a, sin));
  }
  // A column of `row` after the rotation.
  __device__ __forceinline__ T column(const T* row, int column) const {
    if (cos == nullptr || column >= 2 * pairs) return row[column];
    const bool is_second = interleaved ? column % 2 : column >= pairs;
    const int distance = interleaved ? 1 : pairs;
    const int pair = interleaved ? column / 2 : column - (is_second ? pairs : 0);
    const Acc own = static_cast<Acc>(row[column]);
    const Acc other = static_cast<Acc>(row[is_second ? column - distance : column + distance]);
    return static_cast<T>(is_second ? second(other, own, cos[pair], sin[pair])
                                    : first(own, other, cos[pair], sin[pair]));
  }
};

}  // namespace tile
