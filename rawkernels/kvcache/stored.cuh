// Keys and values of a cache as they are stored: numbers, or codes with scales.
#pragma once

#include "kvcache/pages.cuh"
#include "tile/quantized.cuh"

namespace kvcache {

// Keys or values that are codes, or plain ones of type T where `format` is tile::kPlain.
template <class T>
struct Stored {
  const void* data;
  PageStrides stride;  // in bytes of codes, or in elements
  const void* scale;
  const void* minimum;
  const float* offset;
  ScaleStrides scale_stride, minimum_stride;
  int format, group, scale_is_float, rotated, head_dim;

  // A row, spread over the warp: column 32 i + lane to x[i]; 0 past the last.
  template <class Acc, int n>
  __device__ __forceinline__ void load(Acc (&x)[n], int page, int slot, int head) const {
    const long long at = page * stride.page + slot * stride.seq + head * stride.head;
    const int lane = threadIdx.x % 32;
    if (format == tile::kPlain) {
      const T* const row = static_cast<const T*>(data) + at;
#pragma unroll
      for (int i = 0; i < n; ++i)
        x[i] = lane + 32 * i < head_dim ? static_cast<Acc>(row[lane + 32 * i]) : 0;
      return;
    }
    const unsigned char* const row = static_cast<const unsigned char*>(data) + at;
    const long long scales =
        page * scale_stride.page + slot * scale_stride.seq + head * scale_stride.head;
    const long long minima =
        page * minimum_stride.page + slot * minimum_stride.seq + head * minimum_stride.head;
    float value[n];
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int column = lane + 32 * i;
      value[i] = 0;
      if (column >= head_dim) continue;
      const int place = column / group;
      value[i] =
          ptx::mul_rn(tile::scale_value(scale, scales + place * scale_stride.group, scale_is_float),
                      tile::code_value(format, row, column, minimum != nullptr));
      if (minimum != nullptr)
        value[i] = ptx::add_rn(
            value[i],
            tile::scale_value(minimum, minima + place * minimum_stride.group, scale_is_float));
    }
    if (rotated) {
      tile::hadamard(value, tile::rotation_block(head_dim));
#pragma unroll
      for (int i = 0; i < n; ++i) value[i] = tile::with_rotation_sign(value[i], lane + 32 * i);
    }
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int column = lane + 32 * i;
      if (offset != nullptr && column < head_dim)
        value[i] = ptx::add_rn(value[i], offset[head * head_dim + column]);
      x[i] = static_cast<Acc>(value[i]);
    }
  }
};

}  // namespace kvcache
