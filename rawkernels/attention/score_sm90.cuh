// What happens to q·k in attention/forward_sm90.cu before the softmax: softcap, bias, ALiBi, masks.
// Scores are wgmma's accumulators: a lane has s[4j + e] in row g and s[4j + 2 + e] in row g + 8 of
// its warp's 16, in column 8j + 2t + e of the block of keys; g = lane / 4, t = lane % 4, e = 0
// or 1.
#pragma once

#include "attention/layout_sm90.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "tile/softmax.cuh"

// Softcap and ALiBi, but for a factor of score_scale, which `slope` has been divided by. `distance`
// is that from the lane's first query to its first key. The tanh is an instruction with an error of
// 2^-11, which is what rounding scores to 16 bits costs.
__device__ __forceinline__ void bend_scores(float (&s)[kTileN / 2], float cap_scale, float slope,
                                            float distance) {
  if (cap_scale != 0.0f) {
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) s[i] = ptx::tanh(s[i] * cap_scale);
  }
  if (slope != 0.0f) {
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i)
      s[i] = fmaf(-slope, fabsf(distance + static_cast<float>(i / 2 % 2 * 8 - i / 4 * 8 - i % 2)),
                  s[i]);
  }
}

// Sets scores of keys after the last that a query sees to -inf, and of those before the first.
__device__ __forceinline__ void hide_later_keys(float (&s)[kTileN / 2], const ForwardParams& params,
                                                const Tile& tile, int row, int column) {
  const int end[2] = {tile.end_key(params, row) - column, tile.end_key(params, row + 8) - column};
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i)
    if (i / 4 * 8 + i % 2 >= end[i / 2 % 2]) s[i] = tile::negative_infinity();
}
__device__ __forceinline__ void hide_earlier_keys(float (&s)[kTileN / 2],
                                                  const ForwardParams& params, const Tile& tile,
                                                  int row, int column) {
  const int first[2] = {tile.first_key(params, row) - column,
                        tile.first_key(params, row + 8) - column};
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i)
    if (i / 4 * 8 + i % 2 < first[i / 2 % 2]) s[i] = tile::negative_infinity();
}

template <class Element>
__device__ __forceinline__ void copy_elements(unsigned char* to, const void* from, long long stride,
                                              int first, int count) {
#pragma unroll 8
  for (int i = first; i < count; i += 2)
    reinterpret_cast<Element*>(to)[i] = static_cast<const Element*>(from)[i * stride];
}

// Starts copying 16 rows of bias or of mask to shared memory, two lanes a row. `head` is the first
// element of this sequence and head, `size` that of an element in bytes, `row` the first query of
// the warp and `column` the first key of the block. Queries that do not exist get the last one's,
// keys that do not exist get anything.
__device__ __noinline__ void copy_rows(unsigned char* rows, int pitch, const char* head, int size,
                                       long long row_stride, long long column_stride, int row,
                                       int column, int queries, int keys) {
  const int lane = threadIdx.x % 32, half = lane % 2;
  const unsigned alignment =
      static_cast<unsigned>(reinterpret_cast<unsigned long long>(head) | row_stride * size);
  const char* const from =
      head + (min(row + lane / 2, queries - 1) * row_stride + column * column_stride) * size;
  unsigned char* const to = rows + lane / 2 * pitch;
  keys = min(keys - column, kTileN);
  // The last piece of a row may reach beyond it, but not beyond memory: pieces are aligned.
  if (column_stride == 1 && alignment % 16 == 0) {
    for (int at = half * 16; at < keys * size; at += 32)
      ptx::cp_async_16(ptx::shared_address(to + at), from + at);
  } else if (column_stride == 1 && alignment % 4 == 0) {
    for (int at = half * 4; at < keys * size; at += 8)
      ptx::cp_async_4(ptx::shared_address(to + at), from + at);
  } else if (size == 4) {
    copy_elements<unsigned>(to, from, column_stride, half, keys);
  } else if (size == 2) {
    copy_elements<unsigned short>(to, from, column_stride, half, keys);
  } else {
    copy_elements<unsigned char>(to, from, column_stride, half, keys);
  }
}

// All lanes of a warp together, when they have read the block before.
__device__ __forceinline__ void copy_score_rows(ScoreRows& rows, const ForwardParams& params,
                                                const Tile& tile, int row, int column) {
  const auto copy = [&](unsigned char* place, int pitch, const void* array, int size,
                        const ScoreStrides& stride) {
    const char* const head = static_cast<const char*>(array) +
                             (tile.batch * stride.batch + tile.head * stride.head) * size;
    copy_rows(place, pitch, head, size, stride.row, stride.col, row, column, tile.queries.length,
              tile.keys.length);
  };
  __syncwarp();
  if (params.bias != nullptr) {
    const bool wide = params.bias_is_float32;
    copy(rows.bias, wide ? ScoreRows::kFloatPitch : ScoreRows::kBiasPitch, params.bias,
         wide ? 4 : 2, params.bias_stride);
  }
  if (params.mask != nullptr)
    copy(rows.mask, ScoreRows::kMaskPitch, params.mask, 1, params.mask_stride);
}

__device__ __forceinline__ float2 read_pair(const float* pair) {
  return *reinterpret_cast<const float2*>(pair);
}
__device__ __forceinline__ float2 read_pair(const __half* pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(pair));
}
__device__ __forceinline__ float2 read_pair(const __nv_bfloat16* pair) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(pair));
}

template <int kPitch, class Element>
__device__ __forceinline__ void add_bias(float (&s)[kTileN / 2], const unsigned char* rows,
                                         float scale) {
  const unsigned char* const pairs =
      rows + threadIdx.x % 32 / 4 * kPitch + threadIdx.x % 4 * 2 * sizeof(Element);
#pragma unroll
  for (int i = 0; i < kTileN / 2; i += 2) {
    const float2 bias = read_pair(reinterpret_cast<const Element*>(pairs + i / 2 % 2 * 8 * kPitch +
                                                                   i / 4 * 8 * sizeof(Element)));
    s[i] = fmaf(s[i], scale, bias.x);
    s[i + 1] = fmaf(s[i + 1], scale, bias.y);
  }
}

// Bias and mask, when their rows have come. With a bias, scores are in natural units afterwards.
__device__ __forceinline__ void add_score_rows(float (&s)[kTileN / 2], const ScoreRows& rows,
                                               const ForwardParams& params, float score_scale) {
  ptx::cp_async_wait_all();
  __syncwarp();
  if (params.bias != nullptr) {
    if (params.bias_is_float32)
      add_bias<ScoreRows::kFloatPitch, float>(s, rows.bias, score_scale);
    else
      add_bias<ScoreRows::kBiasPitch, T>(s, rows.bias, score_scale);
  }
  if (params.mask != nullptr) {
    const unsigned char* const pairs =
        rows.mask + threadIdx.x % 32 / 4 * ScoreRows::kMaskPitch + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTileN / 2; i += 2) {
      const unsigned keep = *reinterpret_cast<const unsigned short*>(
          pairs + i / 2 % 2 * 8 * ScoreRows::kMaskPitch + i / 4 * 8);
      s[i] = keep & 0xff ? s[i] : tile::negative_infinity();
      s[i + 1] = keep & 0xff00 ? s[i + 1] : tile::negative_infinity();
    }
  }
}
