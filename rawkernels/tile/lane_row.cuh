// A row of 32 times a power of two features, shared by neighbouring lanes of a warp, that becomes
// codes or is made of them: every load and store is of 8 features.
#pragma once

#include "tile/code_row.cuh"
#include "tile/eight.cuh"
#include "tile/softmax.cuh"

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

  // The features of a row as they lie in memory, on their way to registers.
  template <class T>
  struct Fetched {
    uint4 words[4][8 * sizeof(T) / 16];

    __device__ __forceinline__ void fetch(const T* row) {
      constexpr int kEach = 16 / sizeof(T);
#pragma unroll
      for (int part = 0; part < 4; ++part)
#pragma unroll
        for (int i = 0; i < 8; i += kEach)
          words[part][i / kEach] = __ldcs(reinterpret_cast<const uint4*>(row + column(part) + i));
    }
    // The same of a row in shared memory.
    __device__ __forceinline__ void read(const T* row) {
      constexpr int kEach = 16 / sizeof(T);
#pragma unroll
      for (int part = 0; part < 4; ++part)
#pragma unroll
        for (int i = 0; i < 8; i += kEach)
          words[part][i / kEach] = *reinterpret_cast<const uint4*>(row + column(part) + i);
    }
  };
  template <class T>
  __device__ __forceinline__ void unpack(const Fetched<T>& fetched) {
    constexpr int kEach = 16 / sizeof(T);
#pragma unroll
    for (int part = 0; part < 4; ++part)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        x[part][i] = to_float(
            reinterpret_cast<const Vec<T, kEach>&>(fetched.words[part][i / kEach]).x[i % kEach]);
  }

  __device__ __forceinline__ static int lane() { return threadIdx.x % kLanes; }
  __device__ __forceinline__ static int column(int part) { return part * kQuarter + lane() * 8; }

  template <class T>
  __device__ __forceinline__ void load(const T* row, int, const RowRope<T>& rope) {
    Fetched<T> fetched;
    fetched.fetch(row);
    load(fetched, row, rope);
  }
  // The same of a row that has been fetched.
  template <class T>
  __device__ __forceinline__ void load(const Fetched<T>& fetched, const T* row,
                                       const RowRope<T>& rope) {
    if (rope.cos != nullptr && (2 * rope.pairs != kHeadDim || sizeof(T) == 8)) {
#pragma unroll
      for (int part = 0; part < 4; ++part)
#pragma unroll
        for (int e = 0; e < 8; ++e) x[part][e] = to_float(rope.column(row, column(part) + e));
      return;
    }
    unpack(fetched);
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
#pragma unroll
    for (int part = 0; part < 4; ++part) store_eight(row + column(part), x[part]);
  }

  // Makes codes of the row, and writes them where it exists.
  template <class To>
  __device__ __forceinline__ void quantize(const To& to, int, bool exists) {
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
      put_codes(to, part, part + 1, exists, true);
    }
  }

  // Of a group that has its own scale no code is out of range, and all are NaN or none is.
  template <bool kHasMinimum, class To>
  __device__ __forceinline__ void quantize_by_found(const To& to, bool exists) {
    if (to.group == kHeadDim) {  // the usual case
      float minimum;
      const float scale = find_scale<kHasMinimum>(to, exists, minimum);
      divide<kHasMinimum>(scale, minimum, 0, 4);
      put_codes(to, 0, 4, exists, scale == scale);
      return;
    }
    float scale[4], minimum[4];
    find_scales<kHasMinimum>(to, exists, scale, minimum);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      divide<kHasMinimum>(scale[part], minimum[part], part, part + 1);
      put_codes(to, part, part + 1, exists, scale[part] == scale[part]);
    }
  }

  template <bool kHasMinimum>
  __device__ __forceinline__ void divide(float scale, float minimum, int begin, int end) {
    const float inverse = inverse_of(scale);
#pragma unroll
    for (int part = begin; part < end; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (kHasMinimum) x[part][e] = ptx::sub_rn(x[part][e], minimum);
        x[part][e] = ptx::mul_rn(x[part][e], inverse);
      }
  }

  // Writes the codes of some quarters; those of 0 where the numbers are not valid.
  template <class To>
  __device__ __forceinline__ void put_codes(const To& to, int begin, int end, bool exists,
                                            bool valid) const {
    const unsigned mask = valid ? ~0u : 0;
    uint2 words[4];
#pragma unroll
    for (int part = begin; part < end; ++part) {
      if (to.format() == kInt4) {
        const unsigned zeros = to.has_minimum() ? 0 : 0x88888888;
        words[part].x = eight_nibbles(x[part], to.has_minimum()) & mask | zeros & ~mask;
      } else {
        const float low[4] = {x[part][0], x[part][1], x[part][2], x[part][3]};
        const float high[4] = {x[part][4], x[part][5], x[part][6], x[part][7]};
        words[part] =
            make_uint2(four_codes(to.format(), low) & mask, four_codes(to.format(), high) & mask);
      }
    }
    if constexpr (!To::kStaged && To::kKnownFormat == kInt4 && (kLanes == 2 || kLanes == 4)) {
      if (end - begin == 4) {  // 16 bytes a lane, not four pieces of a sector
        const uint4 codes = gathered<kLanes>(words);
        if (exists) to.put_codes(lane() * 32, codes);
        return;
      }
    }
    if (!exists) return;
#pragma unroll
    for (int part = begin; part < end; ++part) {
      if (to.format() == kInt4)
        to.put_codes(column(part), words[part].x);
      else
        to.put_codes(column(part), words[part]);
    }
  }

  // The scale of a row that has one.
  template <bool kHasMinimum, class To>
  __device__ __forceinline__ float find_scale(const To& to, bool exists, float& minimum) const {
    Extent<kHasMinimum> extent[4];
#pragma unroll
    for (int part = 0; part < 4; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e) extent[part].add(x[part][e]);
    extent[0].add(extent[1]);
    extent[2].add(extent[3]);
    extent[0].add(extent[2]);
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) extent[0].add_lane(distance);
    const float scale = extent[0].scale(to.format(), minimum);
    if (exists && lane() == 0) to.put_scale(0, scale, minimum);
    return scale;
  }

  template <bool kHasMinimum, class To>
  __device__ __forceinline__ void find_scales(const To& to, bool exists, float (&scale)[4],
                                              float (&minimum)[4]) const {
    Extent<kHasMinimum> extent[4];
#pragma unroll
    for (int part = 0; part < 4; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e) extent[part].add(x[part][e]);
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
      expand_eight<kFormat>(x[part], words, from.has_minimum());
    }
    float scale[4], minimum[4];
    scale[0] = from.scale_at(column(0) >> from.group_shift);
    minimum[0] = from.minimum_at(column(0) >> from.group_shift);
    if (from.group == kHeadDim) {  // the usual case
#pragma unroll
      for (int part = 1; part < 4; ++part) {
        scale[part] = scale[0];
        minimum[part] = minimum[0];
      }
    } else {
#pragma unroll
      for (int part = 1; part < 4; ++part) {
        scale[part] = from.scale_at(column(part) >> from.group_shift);
        minimum[part] = from.minimum_at(column(part) >> from.group_shift);
      }
    }
#pragma unroll
    for (int part = 0; part < 4; ++part) {
#pragma unroll
      for (int e = 0; e < 8; ++e) x[part][e] = ptx::mul_rn(scale[part], x[part][e]);
      if (!from.has_minimum()) continue;
#pragma unroll
      for (int e = 0; e < 8; ++e) x[part][e] = ptx::add_rn(x[part][e], minimum[part]);
    }
  }

  __device__ __forceinline__ static Vec<float, 4> angles(const void* table, int pair) {
    return *reinterpret_cast<const Vec<float, 4>*>(static_cast<const float*>(table) + pair);
  }

  template <class T>
  __device__ __forceinline__ static void turn(float& a, float& b, float cos, float sin) {
    const float first = RowRope<T>::first(a, b, cos, sin);
    const float second = RowRope<T>::second(a, b, cos, sin);
    a = first;
    b = second;
    if constexpr (sizeof(T) == 2) {  // both at once: one at a time is several times as slow
      const unsigned rounded = pack<T>(first, second);
      a = to_float(reinterpret_cast<const Vec<T, 2>&>(rounded).x[0]);
      b = to_float(reinterpret_cast<const Vec<T, 2>&>(rounded).x[1]);
    }
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
