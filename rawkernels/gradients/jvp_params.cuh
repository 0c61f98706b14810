// What the kernels of the derivative in a direction are told beside the forward call's
// ForwardParams. Mirrored in cuattn/gpu/params.py.
#pragma once

#include "attention/params.cuh"
#include "tile/dropout.cuh"

struct JvpParams {
  const void* tangent_q;  // of the shapes and type of q, k and v
  const void* tangent_k;
  const void* tangent_v;
  void* dout;  // of out's, contiguous as out is
  Strides tangent_q_stride, tangent_k_stride, tangent_v_stride;
};
