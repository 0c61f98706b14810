// Numbers that are stored as codes: x = unrotate(scale * code + minimum) + offset, in float, one
// rounding an operation, so that the bits are those of cuattn/reference/quantization.py.
#pragma once

namespace tile {

// As FORMATS in cuattn/_quantized.py.
enum Format : int { kPlain, kInt8, kInt4, kE4m3, kE5m2 };

// Signs of the rotation, a bit a channel, repeated every 256: ROTATION_SIGNS of
// cuattn/_quantized.py.
constexpr unsigned kRotationSigns[8] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344,
                                        0xa4093822, 0x299f31d0, 0x082efa98, 0xec4e6c89};

// `x` with the sign of a channel of the rotation.
__device__ __forceinline__ float with_rotation_sign(float x, int channel) {
  const unsigned sign = kRotationSigns[channel / 32 % 8] >> channel % 32 << 31;
  return __uint_as_float(__float_as_uint(x) ^ sign);
}

// The code of a row's column as a number. Packed codes of 4 bits are 0 to 15 with a minimum, the
// number plus 8 without one.
__device__ __forceinline__ float code_value(int format, const unsigned char* row, int column,
                                            bool has_minimum) {
  if (format == kInt4) {
    const int nibble = row[column / 2] >> column % 2 * 4 & 15;
    return static_cast<float>(has_minimum ? nibble : nibble - 8);
  }
  const unsigned code = row[column];
  if (format == kInt8) return static_cast<float>(static_cast<signed char>(code));
  if (format == kE5m2) return __half2float(__ushort_as_half(code << 8));  // the upper half of one
  // Exponents of 4 bits, biased by 7, go where float's of 8 bits, biased by 127, are.
  const float magnitude = __uint_as_float((code & 0x7f) << 20) * 0x1p120f;
  const unsigned bits = (code & 0x7f) == 0x7f ? 0x7fc00000 : __float_as_uint(magnitude);
  return __uint_as_float(bits | (code & 0x80) << 24);
}

// A scale or a minimum.
__device__ __forceinline__ float scale_value(const void* scales, long long at, bool is_float) {
  return is_float ? static_cast<const float*>(scales)[at]
                  : __bfloat162float(static_cast<const __nv_bfloat16*>(scales)[at]);
}

// The largest power of two that divides `head_dim`: how many channels are rotated together.
__device__ __forceinline__ int rotation_block(int head_dim) { return head_dim & -head_dim; }

// What a Hadamard matrix of n columns is multiplied by: 1 / sqrt(n).
__device__ __forceinline__ float hadamard_scale(int n) {
  const int log2 = __popc(n - 1);
  return __int_as_float(127 - log2 / 2 << 23) * (log2 % 2 ? 0x1.6a09e6p-1f : 1.0f);
}

// Hadamard transform of a row of a warp, which has column 32 i + lane in x[i], in blocks of `block`
// columns.
template <int n>
__device__ __forceinline__ void hadamard(float (&x)[n], int block) {
  for (int distance = 1; distance < 32 && distance < block; distance *= 2) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], distance);
      x[i] = threadIdx.x & distance ? __fsub_rn(other, x[i]) : __fadd_rn(x[i], other);
    }
  }
#pragma unroll
  for (int distance = 1; distance < n; distance *= 2) {
    if (32 * distance >= block) break;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (i & distance || i + distance >= n) continue;
      const float a = x[i], b = x[i + distance];
      x[i] = __fadd_rn(a, b);
      x[i + distance] = __fsub_rn(a, b);
    }
  }
  const float scale = hadamard_scale(block);
#pragma unroll
  for (int i = 0; i < n; ++i) x[i] = __fmul_rn(x[i], scale);
}

// Keys or values that are codes, or plain ones of type T where `format` is kPlain.
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
    if (format == kPlain) {
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
      value[i] = __fmul_rn(scale_value(scale, scales + place * scale_stride.group, scale_is_float),
                           code_value(format, row, column, minimum != nullptr));
      if (minimum != nullptr)
        value[i] = __fadd_rn(
            value[i], scale_value(minimum, minima + place * minimum_stride.group, scale_is_float));
    }
    if (rotated) {
      hadamard(value, rotation_block(head_dim));
#pragma unroll
      for (int i = 0; i < n; ++i) value[i] = with_rotation_sign(value[i], lane + 32 * i);
    }
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int column = lane + 32 * i;
      if (offset != nullptr && column < head_dim)
        value[i] = __fadd_rn(value[i], offset[head * head_dim + column]);
      x[i] = static_cast<Acc>(value[i]);
    }
  }
};

}  // namespace tile
