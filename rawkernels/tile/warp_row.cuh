// A row of any number of features, spread over a warp, that becomes codes or is made of them.
#pragma once

#include "tile/code_row.cuh"

namespace tile {

// Lane l of a warp has features l, l + 32, …; groups are of any size, pointers of any alignment.
template <int kColumns>
struct WarpRow {
  static constexpr int kRowLanes = 32;

  float x[kColumns];

  __device__ __forceinline__ static int column(int i) { return threadIdx.x % 32 + 32 * i; }

  template <class T>
  __device__ __forceinline__ void load(const T* row, int head_dim, const RowRope<T>& rope) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      x[i] = column(i) < head_dim ? to_float(rope.column(row, column(i))) : 0;
  }

  template <class T>
  __device__ __forceinline__ void store(T* row, int head_dim) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (column(i) < head_dim) row[column(i)] = static_cast<T>(x[i]);
  }

  // What codes are made of: without the offset, and rotated.
  __device__ __forceinline__ void prepare(const float* offset, bool rotated, int head_dim) {
    shift(offset, head_dim, -1.0f);
    if (!rotated) return;
    change_signs();
    hadamard(x, rotation_block(head_dim));
  }

  template <class To>
  __device__ __forceinline__ void quantize(const To& to, int head_dim, bool exists) {
    prepare(to.offset, to.rotated, head_dim);
    const bool has_minimum = to.has_minimum();
    const float least = to.least_code(), most = to.most_code();
    float scaled[kColumns] = {};
    for (int first = 0; first < head_dim; first += to.group) {
      const int place = first / to.group;
      float scale, minimum;
      if (to.is_static()) {
        scale = to.scale_at(place);
        minimum = to.minimum_at(place);
      } else {
        scale = has_minimum ? found_scale<true>(to, first, minimum)
                            : found_scale<false>(to, first, minimum);
        if (exists && threadIdx.x % 32 == 0) to.put_scale(place, scale, minimum);
      }
      const float inverse = inverse_of_any(scale);
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        if (column(i) >= first && column(i) < first + to.group)
          scaled[i] =
              clipped(has_minimum ? ptx::sub_rn(x[i], minimum) : x[i], inverse, least, most);
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (to.format() == kInt4) {
        const unsigned own = rounded_bits(scaled[i], has_minimum ? 0 : 8) & 15;
        const unsigned next = __shfl_down_sync(~0u, own, 1);
        if (exists && column(i) < head_dim && threadIdx.x % 2 == 0)
          to.codes[column(i) / 2] = own | next << 4;
      } else {
        const float four[4] = {scaled[i], 0, 0, 0};
        if (exists && column(i) < head_dim) to.codes[column(i)] = four_codes(to.format(), four);
      }
    }
  }

  template <class From>
  __device__ __forceinline__ void dequantize(const From& from, int head_dim) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      x[i] = 0;
      if (column(i) >= head_dim) continue;
      const int place = column(i) / from.group;
      x[i] = ptx::mul_rn(from.scale_at(place),
                         code_value(from.format(), from.codes, column(i), from.has_minimum()));
      if (from.has_minimum()) x[i] = ptx::add_rn(x[i], from.minimum_at(place));
    }
    if (from.rotated) {
      hadamard(x, rotation_block(head_dim));
      change_signs();
    }
    shift(from.offset, head_dim, 1.0f);
  }

 private:
  // Of the group whose first feature is `first`.
  template <bool kHasMinimum, class To>
  __device__ __forceinline__ float found_scale(const To& to, int first, float& minimum) const {
    Extent<kHasMinimum> extent;
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (column(i) >= first && column(i) < first + to.group) extent.add(x[i]);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) extent.add_lane(distance);
    return extent.scale(to.format(), minimum);
  }

  __device__ __forceinline__ void shift(const float* offset, int head_dim, float sign) {
    if (offset == nullptr) return;
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (column(i) < head_dim) x[i] = ptx::add_rn(x[i], sign * offset[column(i)]);
  }

  __device__ __forceinline__ void change_signs() {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) x[i] = with_rotation_sign(x[i], column(i));
  }
};

}  // namespace tile
