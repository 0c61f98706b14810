// What a writer of codes is told beside WriteParams. Declared as QUANTIZED_WRITE_PARAMS in
// cuattn/gpu/params.py too.
#pragma once

#include "kvcache/pages.cuh"
#include "tile/divisor.cuh"

struct QuantizedWriteParams {
  void* k_scale;
  void* k_minimum;
  void* v_scale;
  void* v_minimum;
  const float* k_offset;  // (heads, head_dim); null: none
  const float* v_offset;
  ScaleStrides k_scale_stride, k_minimum_stride, v_scale_stride, v_minimum_stride;
  int k_format, v_format, k_group, v_group, k_group_shift, v_group_shift;
  int k_scale_is_float, v_scale_is_float, k_rotated, v_rotated, k_is_static, v_is_static;
  tile::Divisor by_heads;
};
