// What kernels over latents that are codes (tile/quantized.cuh) have in common: operands that are
// made of codes (tile/expand.cuh), and scales.
#pragma once

#include "decoding/params.cuh"
#include "tile/expand.cuh"

namespace mla {

// Neighbouring columns of a latent that have a scale of their own: these, or twice as many, or all.
constexpr int kScaleColumns = 128;

// A scale as it lies in memory: it is read well before it is needed, and nothing waits for it till
// then.
struct StoredScale {
  unsigned bits = 0;

  // That of a piece of kScaleColumns of a token's latent; 0 where the token does not exist. Scales
  // are those of values: of keys the latent is a part.
  __device__ __forceinline__ void load(const DecodeParams& params, int page, int slot, int piece,
                                       bool exists) {
    bits = 0;
    if (!exists || piece * kScaleColumns >= params.head_dim_v) return;
    const ScaleStrides& stride = params.v_scale_stride;  // of groups: 0 where there is one
    const int group = params.v_group == 2 * kScaleColumns ? piece / 2 : piece;
    const long long at = page * stride.page + slot * stride.seq + group * stride.group;
    if (params.v_scale_is_float)
      bits = static_cast<const unsigned*>(params.v_scale)[at];
    else
      bits = static_cast<const unsigned short*>(params.v_scale)[at];
  }
  __device__ __forceinline__ float value(const DecodeParams& params) const {
    return __uint_as_float(params.v_scale_is_float ? bits : bits << 16);
  }
};

}  // namespace mla
