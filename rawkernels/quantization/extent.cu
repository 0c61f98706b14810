// Scales that many rows share: the least and the greatest value of each feature of each head over
// all tokens, and the scales that follow from them.
//
//   `extents` reads x as quantize.cu does, a warp a row, blockIdx.y the head, and merges what each
//   lane has found into (2, heads, head_dim): both ends as integers of the same order, NaN above
//   all. They begin as the largest integer and 0. `scales` then makes a scale, and a minimum, of
//   each group of features of a head or of all heads.
#include "ptx/magnitudes.cuh"
#include "quantization/params.cuh"

using T = Config::dtype;
using Row = tile::WarpRow<Config::columns>;

// Floats as integers of the same order, and back.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000;
}
__device__ __forceinline__ float unordered(unsigned key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key);
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    extents(const __grid_constant__ QuantizeParams params, unsigned* found) {
  const int head = blockIdx.y, warps = Config::threads / 32;
  const float* const offset =
      params.offset == nullptr ? nullptr : params.offset + head * params.head_dim;
  tile::Extent<true> extent[Config::columns];
  for (int i = blockIdx.x * warps + threadIdx.x / 32; i < params.rows / params.heads;
       i += gridDim.x * warps) {
    const int page = tile::divided(i, params.by_tokens), token = i - page * params.tokens;
    const PageStrides& stride = params.x_stride;
    Row row;
    row.load(static_cast<const T*>(params.x) + page * stride.page + token * stride.seq +
                 head * stride.head,
             params.head_dim, tile::RowRope<T>{});
    row.prepare(offset, params.rotated, params.head_dim);
#pragma unroll
    for (int c = 0; c < Config::columns; ++c) extent[c].add(row.x[c]);
  }
  const int all = params.heads * params.head_dim;
#pragma unroll
  for (int c = 0; c < Config::columns; ++c) {
    if (Row::column(c) >= params.head_dim) continue;
    unsigned* const to = found + head * params.head_dim + Row::column(c);
    atomicMin(to, ordered(extent[c].least));
    atomicMax(to + all, ordered(extent[c].most));
  }
}

// A thread makes a scale; of all heads where `scale_stride.head` is 0.
extern "C" __global__ void scales(const __grid_constant__ QuantizeParams params,
                                  const unsigned* found) {
  const int groups = params.head_dim / params.group;
  const int shared = params.scale_stride.head == 0 ? params.heads : 1;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= params.heads / shared * groups) return;
  const int head = i / groups, place = i - head * groups, all = params.heads * params.head_dim;
  tile::Extent<true> extent;
  for (int h = head; h < head + shared; ++h)
    for (int c = place * params.group; c < (place + 1) * params.group; ++c) {
      const unsigned* const from = found + h * params.head_dim + c;
      tile::Extent<true> other;
      other.least = unordered(from[0]);
      other.most = unordered(from[all]);
      extent.add(other);
    }
  float minimum = 0, scale;
  if (params.minimum != nullptr)
    scale = extent.scale(params.format, minimum);
  else
    scale = tile::finite_scale_of(ptx::magnitude(ptx::max_magnitude_nan(extent.least, extent.most)),
                                  tile::largest_code(params.format), 0.0f);
  const long long at = head * params.scale_stride.head + place * params.scale_stride.group;
  static_cast<unsigned short*>(params.scale)[at] = tile::bfloat16_bits(scale);
  if (params.minimum != nullptr)
    static_cast<unsigned short*>(
        params.minimum)[head * params.minimum_stride.head + place * params.minimum_stride.group] =
        tile::bfloat16_bits(minimum);
}
