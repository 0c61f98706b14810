// The epilogue of attention/forward_sm90.cu: what a consumer does with O when it is through with a
// tile.
#pragma once

#include "attention/filter_sm90.cuh"
#include "tile/softmax.cuh"

// The output of one row by a warp alone, from what lies in global memory: of calls with dropout,
// where values that are not finite have reached O, perhaps from keys that are dropped, as 0 * NaN
// is NaN. `max` and `inverse` are the row's offset of exponents and the factor of its sums. Rarely
// called, and slow.
__device__ __forceinline__ void recompute_row(const Params& params, const Sm90Params& sm90,
                                              const Tile& tile, int row, float max, float inverse) {
  const int lane = threadIdx.x % 32;
  const int first_query = Config::varlen ? tile.queries.outer - tile.queries.length : 0;
  const int first_key = kRaggedKeys ? tile.keys.outer - tile.keys.length : 0;
  const T* const q = static_cast<const T*>(params.q) +
                     (Config::varlen ? 0 : tile.batch * params.q_stride.batch) +
                     tile.head * params.q_stride.head + (first_query + row) * params.q_stride.seq;
  float o[kHeadDimV / 32] = {};
#pragma unroll 1
  for (int begin = 0; begin < tile.keys.length; begin += 32) {
    const int key = begin + lane;
    const bool sees = key < tile.keys.length && tile.sees(params, row, key);
    float p = 0.0f;
    if (sees) {
      const T* const k =
          static_cast<const T*>(params.k) + (kRaggedKeys ? 0 : tile.batch * params.k_stride.batch) +
          tile.head_kv * params.k_stride.head + (first_key + key) * params.k_stride.seq;
      float score = 0.0f;
#pragma unroll 1
      for (int i = 0; i < params.head_dim; ++i)
        score = fmaf(static_cast<float>(q[i]), static_cast<float>(k[i]), score);
      p = static_cast<float>(static_cast<T>(ptx::ex2(score * sm90.scale_log2 - max)));
    }
#pragma unroll 1
    for (unsigned left = __ballot_sync(~0u, sees); left != 0; left &= left - 1) {
      const int other = __ffs(left) - 1;
      const float weight = __shfl_sync(~0u, p, other);
      const T* const v =
          static_cast<const T*>(params.v) + tile.value_offset(params, sm90, begin + other);
#pragma unroll
      for (int i = 0; i < kHeadDimV / 32; ++i)
        if (lane + 32 * i < params.head_dim_v)
          o[i] = fmaf(weight, static_cast<float>(v[lane + 32 * i]), o[i]);
    }
  }
  Out* const out = static_cast<Out*>(params.out) + tile.out_offset(params, row);
#pragma unroll
  for (int i = 0; i < kHeadDimV / 32; ++i)
    if (lane + 32 * i < params.head_dim_v) out[lane + 32 * i] = static_cast<Out>(o[i] * inverse);
}

// Divides O by the sums of exponentials and writes it and lse. Lanes 2i and 2i + 1 exchange halves,
// so that each writes four columns side by side and a row's writes fill whole 32-byte sectors.
__device__ __forceinline__ void write_output(const float (&o)[kHeadDimV / 2],
                                             const Softmax& softmax, const Params& params,
                                             const Sm90Params& sm90, const Tile& tile, int row) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane % 2;
  // Exponents are counted in log2, or where scores may be of any size in natural units: the largest
  // float has no logarithm in others. (Plain calls are written without a product by 1, which
  // flushes to 0 and so is an instruction.)
  const auto power = [](float x) { return ptx::ex2(Config::score ? x * tile::kLog2e : x); };
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = tile::quad_sum(softmax.row_sum[i]);
    float max = Softmax::offset(softmax.row_max[i],
                                Config::score ? sm90.scale_log2 * tile::kLn2 : sm90.scale_log2);
    const float offset_of_keys = max;
    if (kSoftcapAlibi && sum == 0.0f) max = 0.0f;  // a bound may stand for the maximum of no keys
    float rescale = 1.0f;
    int head = tile.head;
    if constexpr (Config::pack_gqa) head = tile.packed(params, row + 8 * i).head;
    const float* sinks = static_cast<const float*>(params.sinks);
    if constexpr (Config::split_kv) sinks = tile.split() == 0 ? sinks : nullptr;
    if (sinks != nullptr) {
      const float sink = Config::score ? sinks[head] : sinks[head] * tile::kLog2e;
      if (sum == 0.0f) max = fmaxf(sink, -3.402823466e38f);  // no keys: it weighs nothing
      const float larger = fmaxf(max, sink);
      rescale = power(max - larger);
      sum = sum * rescale + power(sink - larger);
      max = larger;
    }
    float inverse = sum == 0.0f ? 0.0f : rescale * ptx::rcp(sum);
    if constexpr (Config::dropout) inverse *= static_cast<float>(tile::dropout_of(params).scale);
    const bool exists = tile.exists(params, row + 8 * i);
    const long long offset = tile.out_offset(params, row + 8 * i) + lane % 4 * 2;
    if constexpr (sizeof(Out) == sizeof(float)) {
      float* const out = static_cast<float*>(params.out) + offset;
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; ++j)
        if (exists && 8 * j < params.head_dim_v)
          *reinterpret_cast<float2*>(out + 8 * j) =
              make_float2(o[4 * j + 2 * i] * inverse, o[4 * j + 2 * i + 1] * inverse);
    } else {
      T* const out = static_cast<T*>(params.out) + offset + (odd ? 6 : 0);
#pragma unroll
      for (int step = 0; step < kHeadDimV / 16; ++step) {
        const unsigned low =
            tile::pack<T>(o[8 * step + 2 * i] * inverse, o[8 * step + 2 * i + 1] * inverse);
        const unsigned high =
            tile::pack<T>(o[8 * step + 2 * i + 4] * inverse, o[8 * step + 2 * i + 5] * inverse);
        const unsigned other = __shfl_xor_sync(~0u, odd ? low : high, 1);
        if (exists && 16 * step + (odd ? 8 : 0) < params.head_dim_v)
          *reinterpret_cast<uint2*>(out + 16 * step) =
              odd ? make_uint2(other, high) : make_uint2(low, other);
      }
    }
    if (exists && params.lse != nullptr && lane % 4 == 0)
      static_cast<float*>(params.lse)[tile.lse_offset(params, row + 8 * i)] =
          Config::score ? fmaf(ptx::lg2(sum), tile::kLn2, max) : (max + ptx::lg2(sum)) * tile::kLn2;
    if constexpr (Config::dropout) {
      float zeros = 0.0f;  // NaN after an infinity or NaN
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; ++j)
        zeros = fmaf(o[4 * j + 2 * i], 0.0f, fmaf(o[4 * j + 2 * i + 1], 0.0f, zeros));
      // Where the sum is NaN so is the row.
      unsigned lanes = __ballot_sync(~0u, exists && zeros != 0.0f && sum == sum);
      __syncwarp();
#pragma unroll 1
      while (lanes != 0) {
        const int first_lane = (__ffs(lanes) - 1) / 4 * 4;  // of the row's four
        lanes &= ~(0xfu << first_lane);
        recompute_row(params, sm90, tile, __shfl_sync(~0u, row + 8 * i, first_lane),
                      __shfl_sync(~0u, offset_of_keys, first_lane),
                      __shfl_sync(~0u, inverse, first_lane));
      }
    }
  }
}

// Adds the values of a tile that the nonfinite filter has replaced by 0 to the outputs of a warp's
// 16 rows, of which `first_row` is the first, where they see them: as many lanes as there are
// 16-byte words in a row of V go through the keys. Rarely called.
__device__ __forceinline__ void restore_values(const Params& params, const Sm90Params& sm90,
                                               const Tile& tile, int first_row) {
  const Tile::Partial filtered = tile.filtered(params);
  const int column = threadIdx.x % 32 * 8;
  __syncwarp();
  if (column >= params.head_dim_v) return;
#pragma unroll 1
  for (int key = tile.block_begin * kTileN; key < min(tile.block_end * kTileN, tile.keys.length);
       ++key) {
    if (!filtered.has(key / kTileN)) continue;
    uint4 values;
    if constexpr (kReadsCodes)
      values = CodeWarps<kReadsCodes>::values(params, sm90, tile, key, column);
    else
      values = *reinterpret_cast<const uint4*>(static_cast<const T*>(params.v) +
                                               tile.value_offset(params, sm90, key) + column);
    if (finite_halves(values.x) == values.x && finite_halves(values.y) == values.y &&
        finite_halves(values.z) == values.z && finite_halves(values.w) == values.w)
      continue;
#pragma unroll 1
    for (int row = first_row; row < first_row + 16; ++row) {
      if (!tile.sees(params, row, key)) continue;
      Out* const out = static_cast<Out*>(params.out) + tile.out_offset(params, row) + column;
#pragma unroll 1
      for (int i = 0; i < 8; ++i) {
        const float value = static_cast<float>(reinterpret_cast<const T*>(&values)[i]);
        if (!isfinite(value)) out[i] = static_cast<Out>(static_cast<float>(out[i]) + value);
      }
    }
  }
}
