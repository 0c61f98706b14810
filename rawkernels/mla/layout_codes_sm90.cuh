// Shared memory of mla/decode_codes_sm90.cu, and the queries' way there.
#pragma once

#include "mla/codes.cuh"
#include "mla/lookup.cuh"
#include "mla/partial.cuh"
#include "mla/schedule.cuh"
#include "ptx/bar.cuh"
#include "ptx/registers.cuh"
#include "tile/pipeline.cuh"
#include "tile/swizzle.cuh"

namespace mla {

using T = Config::dtype;
constexpr int kRows = Config::rows;       // of a tile: heads times query tokens
constexpr int kKeys = Config::tile_keys;  // of a block
constexpr int kStages = Config::stages;
constexpr int kLatent = Config::latent;
constexpr int kQuarters = kLatent / kScaleColumns;
constexpr int kWarpKeys = 16;                    // whose scores a warp has
constexpr int kWarpgroups = Config::warpgroups;  // that compute
constexpr int kComputing = 128 * kWarpgroups;    // threads
constexpr int kPanels = kLatent / 64;            // of the queries' latents
constexpr int kPanelBytes = kRows * 128;         // one row of 128 bytes for each row
static_assert(kKeys == 4 * kWarpKeys && kQuarters == 4, "a warpgroup has the scores of a block");

// Scales of a token: one, or one for each quarter of the columns.
constexpr int kTokenScales = Config::several_scales ? kQuarters : 1;
// A token in shared memory: its codes, words that have its scales, and its rotated part, which
// together are an odd number of 16 bytes, so that no two of eight rows meet in a bank.
constexpr int kScaleAt = kLatent, kRopeAt = kScaleAt + 16, kTokenBytes = kRopeAt + 128;

struct Stage {
  unsigned char tokens[kKeys][kTokenBytes];
  // Of each quarter of the columns, where they differ: its scale over the token's largest.
  alignas(16) __half factors[kTokenScales][kKeys];
  unsigned char halves[kKeys];  // which scales are in the upper halves of their words, a bit each
  unsigned exist[4];            // a bit for each of a warp's keys
};

using Panel = tile::Swizzled<8>;  // rows of 128 bytes, as wgmma reads them
using Schedule = PieceSchedule<kRows, kKeys, 1, 1>;

// What exponents of a row are: a score of its products times `worth`, minus `max`.
struct RowScale {
  float worth, max;
};
// A maximum before there is any.
constexpr float kLeast = -0x1.fffffep127f;

// Of a split: keys that all rows see, and where its first block begins.
struct Bounds {
  int begin, end, origin;
};

// A loading warp's place in the work.
struct alignas(16) LoadedSplit {
  Schedule schedule;  // after `split`
  decoding::Split split;
  SplitKeys keys;
  bool exists;
};

struct Smem {
  // Queries as float16, in the order of the codes, and behind them what is rotated.
  alignas(1024) unsigned char q[kPanels + 1][kPanelBytes];
  // Probabilities of a warpgroup's blocks in turn, row by row, times their tokens' scales.
  alignas(1024) unsigned char p[kWarpgroups][2][kPanelBytes];
  Stage ring[kStages];
  alignas(16) RowScale row_scales[kWarpgroups][kRows];
  tile::Range visible[kRows];             // the split's keys that each row sees
  float warp_max[kWarpgroups][4][kRows];  // of a warp's keys, where a maximum has to move
  float moved_by[kWarpgroups][kRows];     // what sums and O are multiplied by then
  float warp_sum[kWarpgroups][4][kRows];  // of a warp's keys at the end of a split
  OutputRow results[kRows];
  alignas(16) Bounds bounds;
  // The last blocks that have moved a maximum, of every second block of a warpgroup.
  unsigned raised[kWarpgroups][2];
  LoadedSplit loaded[4];
  alignas(16) Schedule schedule;  // of the computing warpgroups, after `split`
  decoding::Split split;
  decoding::SplitPlace place;
  bool exists;
  ptx::Mbarrier full[kStages], empty[kStages][2];  // each half of a block's keys
};
static_assert(sizeof(Smem) <= Config::smem_bytes, "Config has to ask for all of it");

// Named barriers: 1 + number of each warpgroup, and one of all that compute.
__device__ __forceinline__ void sync_warpgroups() { ptx::bar_sync(1 + kWarpgroups, kComputing); }

__device__ __forceinline__ int count_blocks(const decoding::Split& split) {
  return split.end > split.origin ? (split.end - split.origin - 1) / kKeys + 1 : 0;
}

// Whether float16 is too narrow for queries.
template <class>
constexpr bool kScalesQueries = true;
template <>
constexpr bool kScalesQueries<__half> = false;

// A lane's share of a row of queries: 16 channels of the latent, and eight of what is rotated.
struct Query {
  using Chunk = tile::Vec<T, 8>;
  Chunk latent[2], rotated;

  __device__ __forceinline__ void load(const decoding::Split& split, const DecodeParams& params,
                                       const MlaParams& mla, int row) {
    const int lane = threadIdx.x % 32, index = split.row_tile * kRows + row;
    const int token = divided_by_group(params, index);
    const int head = split.head * params.group + index - token * params.group;
    const bool exists = row < kRows && index < split.seq.seqlen_q * params.group;
    const auto row_of = [&](const void* q, const Strides& stride) {
      return reinterpret_cast<const Chunk*>(
          static_cast<const T*>(q) + split.seq.index * stride.batch +
          (split.seq.begin_q + token) * stride.seq + head * stride.head);
    };
    latent[0] = latent[1] = rotated = {};
    if (exists && lane * 16 < params.head_dim_v) {
      const Chunk* const from = row_of(params.q, params.q_stride) + 2 * lane;
      latent[0] = from[0];
      latent[1] = from[1];
    }
    if (exists && lane < 8 && lane * 8 < params.head_dim - params.head_dim_v)
      rotated = row_of(mla.q_rope, mla.q_rope_stride)[lane];
  }

  // To shared memory. Where float16 is too narrow for them they are multiplied by a power of two.
  __device__ __forceinline__ void put(Smem& smem, const DecodeParams& params, int row) const {
    const int lane = threadIdx.x % 32;
    const auto channel = [&](int i) { return static_cast<float>(latent[i / 8].x[i % 8]); };
    float inverse = 1.0f, worth = 1.0f;
    if constexpr (kScalesQueries<T>) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < 16; ++i) largest = fmaxf(largest, fabsf(channel(i)));
#pragma unroll
      for (int i = 0; i < 8; ++i)
        largest = fmaxf(largest, 0x1p-60f * fabsf(static_cast<float>(rotated.x[i])));
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
      // The row's largest becomes 2^14 or more, below 2^15.
      const int exponent = max(__float_as_int(largest) >> 23, 15);
      inverse = __int_as_float(268 - exponent << 23);
      worth = __int_as_float(exponent - 14 << 23);
    }
    tile::Vec<__half, 8> slots[2];
#pragma unroll
    for (int i = 0; i < 16; ++i)
      slots[i % 4 / 2].x[i / 4 * 2 + i % 2] = __float2half_rn(channel(i) * inverse);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<uint4*>(smem.q[lane / 4] + Panel::at(row, lane % 4 * 2 + half)) =
          reinterpret_cast<const uint4&>(slots[half]);
    Chunk scaled;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      scaled.x[i] = static_cast<T>(static_cast<float>(rotated.x[i]) * inverse);
    if (lane < 8) *reinterpret_cast<Chunk*>(smem.q[kPanels] + Panel::at(row, lane)) = scaled;
    const float scale_log2 = static_cast<float>(params.scale) * tile::kLog2e;
    const float whole = fmaxf(fminf(worth * scale_log2, 0x1p127f), 0x1p-126f);
    if (lane < kWarpgroups) smem.row_scales[lane][row] = {whole, kLeast};
  }
};

// Queries of a split to shared memory: the computing warps take rows in turn.
__device__ __forceinline__ void put_queries(Smem& smem, const DecodeParams& params,
                                            const MlaParams& mla) {
  // Nothing is worked out ahead of all splits, nor for more rows at a time than are on their way.
  constexpr int kWarps = kComputing / 32, kAtATime = 4;
#pragma unroll 1
  for (int first = ptx::thread_index() / 32; first < kRows; first += kWarps * kAtATime) {
    Query queries[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) queries[i].load(smem.split, params, mla, first + i * kWarps);
#pragma unroll
    for (int i = 0; i < kAtATime; ++i)
      if (first + i * kWarps < kRows) queries[i].put(smem, params, first + i * kWarps);
  }
}

}  // namespace mla
