// Latents that are codes (tile/quantized.cuh) as 16-bit operands of tensor cores: each code times
// its scale in float, rounded once, so that what is multiplied afterwards is what a plain cache of
// the dequantised latents would hold.
#pragma once

#include "decoding/params.cuh"
#include "tile/expand.cuh"
#include "tile/softmax.cuh"

namespace mla {

// Neighbouring columns of a latent that have a scale of their own: these, or twice as many, or all.
constexpr int kScaleColumns = 128;

// Eight codes, in order, times `scale`, which has Codes::kUnit in it.
template <class T, int kFormat>
__device__ __forceinline__ uint4 expanded(uint2 codes, float scale) {
  using Codes = tile::Codes<kFormat>;
  unsigned pairs[2][2], numbers[4];
  Codes::expand_keys(pairs[0], codes.x);
  Codes::expand_keys(pairs[1], codes.y);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned pair = pairs[i / 2][i % 2];
    if constexpr (kFormat == tile::kInt8) pair = tile::subtract_pair(pair, 0x6480);
    const float2 value = __half22float2(reinterpret_cast<const __half2&>(pair));
    numbers[i] = tile::pack<T>(value.x * scale, value.y * scale);
  }
  return {numbers[0], numbers[1], numbers[2], numbers[3]};
}

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
