// What mla/decode_codes.cu has in shared memory, and the queries' way there.
#pragma once

#include "mla/codes.cuh"
#include "mla/lookup.cuh"
#include "mla/partial.cuh"
#include "ptx/bar.cuh"
#include "tile/swizzle.cuh"
#include "tile/vec.cuh"

namespace mla {

using T = Config::dtype;
using Codes = tile::Codes<Config::latent_format>;
constexpr int kRows = Config::rows;
constexpr int kKeys = Config::tile_keys;
constexpr int kStages = Config::stages;
constexpr int kLatent = Config::latent;
constexpr int kGroups = Config::groups;
constexpr int kGroupThreads = 128;
constexpr int kWarpKeys = kKeys / 4;  // whose scores a warp has
constexpr int kQuarters = 4;          // of the columns: a warp's of O
constexpr int kQuarter = kLatent / kQuarters;
constexpr int kSteps = kQuarter / 16;
constexpr int kRowBlocks = kRows / 8;
constexpr int kOStride = kLatent + 4;                     // of rows of O: without bank conflicts
constexpr bool kHasExcess = Codes::value_excess(0) != 0;  // operands exceed codes by something
static_assert(kWarpKeys == 16 && kRows == 16, "scores are one mma wide, and O takes 64 registers");
static_assert(kQuarter == kScaleColumns, "a quarter's codes of a token have one scale");
static_assert(kQuarter == 128, "a quarter's codes of a token are one row of a panel");

using Tile = tile::Swizzled<8, kKeys * 128>;
using QTile = tile::Swizzled<8, kRows * 128>;
using Schedule = decoding::Schedule<kRows, kKeys>;
using Scores = float[kRowBlocks][4];

struct Stage {
  alignas(1024) unsigned char codes[kQuarters][kKeys * 128];
  alignas(1024) unsigned char rope[kKeys * 128];
  alignas(16) float scales[kKeys][kQuarters];
  unsigned exist[4];  // a bit for each of a warp's keys
};
// What a row's products of operands are worth, and what they exceed those of codes by.
struct QueryRow {
  float worth, minus_excess[kQuarters];
};
// Of the warps of a group.
__device__ __forceinline__ void sync_group(int group) { ptx::bar_sync(1 + group, kGroupThreads); }

// Queries of a split to shared memory; by the groups' warps, which take rows in turn. Where float16
// is too narrow for them, they are multiplied by a power of two for each row.
template <class Smem>
__device__ __forceinline__ void load_queries(Smem& smem, const DecodeParams& params,
                                             const MlaParams& mla) {
  const decoding::Split& split = smem.split;
  const int lane = threadIdx.x % 32, rows = split.seq.seqlen_q * params.group;
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < kRows; row += kGroups * kGroupThreads / 32) {
    const int index = split.row_tile * kRows + row;
    const bool exists = index < rows;
    const int token = divided_by_group(params, index);
    const int head = split.head * params.group + index - token * params.group;
    const auto row_of = [&](const void* q, const Strides& stride) {
      return static_cast<const T*>(q) + split.seq.index * stride.batch +
             (split.seq.begin_q + token) * stride.seq + head * stride.head;
    };
    using Chunk = tile::Vec<T, 8>;
    if (lane < 8) {
      Chunk rotated = {};
      if (exists && lane * 8 < params.head_dim - params.head_dim_v)
        rotated = reinterpret_cast<const Chunk*>(row_of(mla.q_rope, mla.q_rope_stride))[lane];
      *reinterpret_cast<Chunk*>(smem.q_rope + QTile::at(row, lane)) = rotated;
    }
    // Of one step of 16 channels.
    float x[16] = {};
    float largest = 0.0f;
    if (exists && lane * 16 < params.head_dim_v) {
      const T* const latent = row_of(params.q, params.q_stride) + lane * 16;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Chunk chunk = reinterpret_cast<const Chunk*>(latent)[half];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[half * 8 + i] = static_cast<float>(chunk.x[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = fmaxf(largest, fabsf(x[i]));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    // The row's largest becomes 2^14 or more, below 2^15.
    const int exponent = max(__float_as_int(largest) >> 23, 15);
    const float inverse = __int_as_float(268 - exponent << 23);
    float excess = 0.0f;
    tile::Vec<__half, 8> slots[2];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const __half stored = __float2half_rn(x[i] * inverse);
      slots[i % 4 / 2].x[i / 4 * 2 + i % 2] = stored;
      excess -= __half2float(stored) * Codes::key_excess(0);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<uint4*>(smem.q[0] + QTile::at(row, 2 * lane + half)) =
          reinterpret_cast<const uint4&>(slots[half]);
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2)
      excess += __shfl_xor_sync(~0u, excess, distance);
    QueryRow& query_row = smem.query_rows[row];
    if (lane % 8 == 0) query_row.minus_excess[lane / 8] = excess;
    if (lane == 0)
      query_row.worth = fminf(__int_as_float(exponent - 14 << 23) * Codes::kKeyUnit, 0x1p127f);
  }
}

}  // namespace mla
