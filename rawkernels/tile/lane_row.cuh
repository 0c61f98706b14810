// A row of 32 times a power of two features, shared by neighbouring lanes of a warp, that becomes
// codes or is made of them: every load and store is of 8 features.
#pragma once

#include "tile/eight.cuh"
#include "tile/fetched_row.cuh"

namespace tile {

// A step of the Hadamard transform.
__device__ __forceinline__ void butterfly(float& a, float& b) {
  const float sum = ptx::add_rn(a, b);
  b = ptx::sub_rn(a, b);
  a = sum;
}

// The Hadamard transform of the quarters of a row: distances within eight features, over lanes.
template <int kLanes>
__device__ __forceinline__ void transform_quarters(float (&x)[4][8]) {
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2)
#pragma unroll
    for (int part = 0; part < 4; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (!(e & distance)) butterfly(x[part][e], x[part][e + distance]);
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const float sign = LaneColumns<kLanes>::lane() & distance ? -1.0f : 1.0f;
#pragma unroll
    for (int part = 0; part < 4; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float other = __shfl_xor_sync(~0u, x[part][e], distance);
        x[part][e] = ptx::fma_rn(x[part][e], sign, other);
      }
  }
}

// Each lane has the features of LaneColumns. Groups are of a power of two, 8 or more. Pointers are
// aligned to 8 features.
template <int kLanes>
struct LaneRow {
  using Columns = LaneColumns<kLanes>;
  static constexpr int kRowLanes = kLanes;
  static constexpr int kHeadDim = Columns::kHeadDim;

  float x[4][8];

  template <class T>
  using Fetched = FetchedRow<T, kLanes>;

  template <class T>
  __device__ __forceinline__ void unpack(const Fetched<T>& fetched) {
    fetched.get(x);
  }

  __device__ __forceinline__ static int lane() { return Columns::lane(); }
  __device__ __forceinline__ static int column(int part) { return Columns::column(part); }

  template <class T>
  __device__ __forceinline__ void load(const T* row, int, const RowRope<T>& rope) {
    Fetched<T> fetched;
    if (Fetched<T>::turns_some(rope)) {
      fetched.turn_some(row, rope);
    } else {
      fetched.fetch(row);
      if (rope.cos != nullptr) fetched.turn(rope);
    }
    unpack(fetched);
  }
  template <class T>
  __device__ __forceinline__ void store(T* row, int) const {
#pragma unroll
    for (int part = 0; part < 4; ++part) store_eight(row + column(part), x[part]);
  }

  // Makes codes of the row, and writes them where it exists. It may have the rotation's signs.
  template <class To>
  __device__ __forceinline__ void quantize(const To& to, int, bool exists, bool has_signs = false) {
    if (to.offset != nullptr) shift(to.offset, -1.0f);
    if (to.rotated) {
      if (!has_signs) change_signs();
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

  // The Hadamard transform: of quarters, then between them.
  __device__ __forceinline__ void transform() {
    transform_quarters<kLanes>(x);
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
};

}  // namespace tile
