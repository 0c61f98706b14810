// A row of 32 times a power of two features, shared by neighbouring lanes of a warp, that becomes
// codes or is made of them: every load and store is of 8 features.
#pragma once

#include "tile/code_row.cuh"
#include "tile/vec.cuh"

namespace tile {

// Of each quarter of the features lane c of kLanes neighbouring ones has eight, from 8 c on: the
// partners of RoPE, and whatever 2^5 features of a group or of the Hadamard transform are its own.
// Groups are of a power of two, 8 or more. Pointers are aligned to 8 features.
template <int kLanes>
struct LaneRow {
  static constexpr int kRowLanes = kLanes;
  static constexpr int kHeadDim = 32 * kLanes;
  static constexpr int kQuarter = 8 * kLanes;
  static_assert(kLanes <= 32 && (kLanes & (kLanes - 1)) == 0, "a row must be part of a warp");

  float x[4][8];

  __device__ __forceinline__ static int lane() { return threadIdx.x % kLanes; }
  __device__ __forceinline__ static int column(int part) { return part * kQuarter + lane() * 8; }

  template <class T>
  __device__ __forceinline__ void load(const T* row, int, const RowRope<T>& rope) {
    if (rope.cos != nullptr && (2 * rope.pairs != kHeadDim || sizeof(T) == 8)) {
#pragma unroll
      for (int part = 0; part < 4; ++part)
#pragma unroll
        for (int e = 0; e < 8; ++e) x[part][e] = to_float(rope.column(row, column(part) + e));
      return;
    }
#pragma unroll
    for (int part = 0; part < 4; ++part) load_eight(x[part], row + column(part));
    if (rope.cos == nullptr) return;
    if (rope.interleaved) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const auto cos = angles(rope.cos, column(part) / 2);
        const auto sin = angles(rope.sin, column(part) / 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) turn<T>(x[part][2 * i], x[part][2 * i + 1], cos.x[i], sin.x[i]);
      }
    } else {
#pragma unroll
      for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
          const auto cos = angles(rope.cos, column(part) + i);
          const auto sin = angles(rope.sin, column(part) + i);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            turn<T>(x[part][i + e], x[part + 2][i + e], cos.x[e], sin.x[e]);
        }
    }
  }

  template <class T>
  __device__ __forceinline__ void store(T* row, int) const {
    constexpr int kEach = 16 / sizeof(T);
#pragma unroll
    for (int part = 0; part < 4; ++part)
#pragma unroll
      for (int i = 0; i < 8; i += kEach) {
        Vec<T, kEach> vec;
#pragma unroll
        for (int e = 0; e < kEach; ++e) vec.x[e] = static_cast<T>(x[part][i + e]);
        __stcs(reinterpret_cast<uint4*>(row + column(part) + i),
               reinterpret_cast<const uint4&>(vec));
      }
  }

  // Makes codes of the row, and writes them where it exists.
  template <int kFormat>
  __device__ __forceinline__ void quantize(const CodeRow<kFormat>& to, int, bool exists) {
    if (to.offset != nullptr) shift(to.offset, -1.0f);
    if (to.rotated) {
      change_signs();
      transform();
    }
    if (to.is_static())
      quantize_by_given(to, exists);
    else if (to.has_minimum())
      quantize_by_found<true>(to, exists);
    else
      quantize_by_found<false>(to, exists);
  }

  // Reads the row's codes.
  template <int kFormat>
  __device__ __forceinline__ void dequantize(const CodeRow<kFormat>& from, int) {
    if (from.format() == kInt8)
      expand<kInt8>(from);
    else if (from.format() == kInt4)
      expand<kInt4>(from);
    else if (from.format() == kE4m3)
      expand<kE4m3>(from);
    else
      expand<kE5m2>(from);
    if (from.rotated) {
      transform();
      change_signs();
    }
    if (from.offset != nullptr) shift(from.offset, 1.0f);
  }

 private:
  template <class To>
  __device__ __forceinline__ void quantize_by_given(const To& to, bool exists) {
    const float least = to.least_code(), most = to.most_code();
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const float inverse = inverse_of_any(to.scale_at(column(part) >> to.group_shift));
      const float minimum = to.minimum_at(column(part) >> to.group_shift);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (to.has_minimum()) x[part][e] = ptx::sub_rn(x[part][e], minimum);
        x[part][e] = clipped(x[part][e], inverse, least, most);
      }
      if (exists) put_codes(to, part, true);
    }
  }

  // Of a group that has its own scale no code is out of range, and all are NaN or none is.
  template <bool kHasMinimum, class To>
  __device__ __forceinline__ void quantize_by_found(const To& to, bool exists) {
    float scale[4], minimum[4];
    find_scales<kHasMinimum>(to, exists, scale, minimum);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const float inverse = inverse_of(scale[part]);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (kHasMinimum) x[part][e] = ptx::sub_rn(x[part][e], minimum[part]);
        x[part][e] = ptx::mul_rn(x[part][e], inverse);
      }
      if (exists) put_codes(to, part, scale[part] == scale[part]);
    }
  }

  // Where the numbers are not valid, codes are those of 0.
  template <class To>
  __device__ __forceinline__ void put_codes(const To& to, int part, bool valid) const {
    if (to.format() == kInt4) {
      const unsigned zero = to.has_minimum() ? 0 : 0x88888888;
      __stcs(reinterpret_cast<unsigned*>(to.codes + column(part) / 2),
             valid ? eight_nibbles(x[part], to.has_minimum()) : zero);
    } else {
      const float low[4] = {x[part][0], x[part][1], x[part][2], x[part][3]};
      const float high[4] = {x[part][4], x[part][5], x[part][6], x[part][7]};
      __stcs(reinterpret_cast<uint2*>(to.codes + column(part)),
             make_uint2(valid ? four_codes(to.format(), low) : 0,
                        valid ? four_codes(to.format(), high) : 0));
    }
  }

  template <bool kHasMinimum, class To>
  __device__ __forceinline__ void find_scales(const To& to, bool exists, float (&scale)[4],
                                              float (&minimum)[4]) const {
    Extent<kHasMinimum> extent[4];
#pragma unroll
    for (int part = 0; part < 4; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e) extent[part].add(x[part][e]);
    if (to.group == kHeadDim) {  // the usual case: one scale
      extent[0].add(extent[1]);
      extent[2].add(extent[3]);
      extent[0].add(extent[2]);
#pragma unroll
      for (int distance = 1; distance < kLanes; distance *= 2) extent[0].add_lane(distance);
      scale[0] = extent[0].scale(to.format(), minimum[0]);
      if (exists && lane() == 0) to.put_scale(0, scale[0], minimum[0]);
#pragma unroll
      for (int part = 1; part < 4; ++part) {
        scale[part] = scale[0];
        minimum[part] = minimum[0];
      }
      return;
    }
    if (to.group == kHeadDim / 2) {
      extent[0].add(extent[1]);
      extent[2].add(extent[3]);
      extent[1] = extent[0];
      extent[3] = extent[2];
    }
#pragma unroll
    for (int part = 0; part < 4; ++part) {
#pragma unroll
      for (int distance = 1; distance < kLanes; distance *= 2)
        if (8 * distance < to.group) extent[part].add_lane(distance);
      scale[part] = extent[part].scale(to.format(), minimum[part]);
      if (exists && (column(part) & to.group - 1) == 0)
        to.put_scale(column(part) >> to.group_shift, scale[part], minimum[part]);
    }
  }

  template <int kFormat, class From>
  __device__ __forceinline__ void expand(const From& from) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      unsigned words[2];
      if constexpr (kFormat == kInt4)
        words[0] = __ldcs(reinterpret_cast<const unsigned*>(from.codes + column(part) / 2));
      else
        reinterpret_cast<uint2&>(words) =
            __ldcs(reinterpret_cast<const uint2*>(from.codes + column(part)));
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const unsigned code =
            kFormat == kInt4 ? words[0] >> 4 * e & 15 : words[e / 4] >> e % 4 * 8 & 0xff;
        x[part][e] = number_of_code(kFormat, code, from.has_minimum());
      }
    }
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const float scale = from.scale_at(column(part) >> from.group_shift);
      const float minimum = from.minimum_at(column(part) >> from.group_shift);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[part][e] = ptx::mul_rn(scale, x[part][e]);
      if (!from.has_minimum()) continue;
#pragma unroll
      for (int e = 0; e < 8; ++e) x[part][e] = ptx::add_rn(x[part][e], minimum);
    }
  }

  template <class T>
  __device__ __forceinline__ static void load_eight(float (&to)[8], const T* from) {
    constexpr int kEach = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < 8; i += kEach) {
      Vec<T, kEach> vec;
      reinterpret_cast<uint4&>(vec) = __ldcs(reinterpret_cast<const uint4*>(from + i));
#pragma unroll
      for (int e = 0; e < kEach; ++e) to[i + e] = to_float(vec.x[e]);
    }
  }

  __device__ __forceinline__ static Vec<float, 4> angles(const void* table, int pair) {
    return *reinterpret_cast<const Vec<float, 4>*>(static_cast<const float*>(table) + pair);
  }

  template <class T>
  __device__ __forceinline__ static void turn(float& a, float& b, float cos, float sin) {
    const float before = a;
    a = to_float(RowRope<T>::first(a, b, cos, sin));
    b = to_float(RowRope<T>::second(before, b, cos, sin));
  }

  __device__ __forceinline__ void shift(const float* offset, float sign) {
#pragma unroll
    for (int part = 0; part < 4; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        x[part][e] = ptx::add_rn(x[part][e], sign * offset[column(part) + e]);
  }

  __device__ __forceinline__ void change_signs() {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const unsigned signs = rotation_signs(column(part));
#pragma unroll
      for (int e = 0; e < 8; ++e)
        x[part][e] =
            __uint_as_float(__float_as_uint(x[part][e]) ^ (signs << (31 - e) & 0x80000000));
    }
  }

  // The Hadamard transform: distances within eight features, over lanes, between quarters.
  __device__ __forceinline__ void transform() {
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2)
#pragma unroll
      for (int part = 0; part < 4; ++part)
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (!(e & distance)) butterfly(x[part][e], x[part][e + distance]);
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const float sign = lane() & distance ? -1.0f : 1.0f;
#pragma unroll
      for (int part = 0; part < 4; ++part)
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float other = __shfl_xor_sync(~0u, x[part][e], distance);
          x[part][e] = ptx::fma_rn(x[part][e], sign, other);
        }
    }
    const float scale = hadamard_scale(kHeadDim);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      butterfly(x[0][e], x[1][e]);
      butterfly(x[2][e], x[3][e]);
      butterfly(x[0][e], x[2][e]);
      butterfly(x[1][e], x[3][e]);
#pragma unroll
      for (int part = 0; part < 4; ++part) x[part][e] = ptx::mul_rn(x[part][e], scale);
    }
  }

  __device__ __forceinline__ static void butterfly(float& a, float& b) {
    const float sum = ptx::add_rn(a, b);
    b = ptx::sub_rn(a, b);
    a = sum;
  }
};

}  // namespace tile
