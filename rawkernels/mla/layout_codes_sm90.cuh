// Shared memory of mla/decode_codes_sm90.cu, and the queries' way there.
#pragma once

#include "mla/codes.cuh"
#include "mla/lookup.cuh"
#include "mla/partial.cuh"
#include "mla/schedule.cuh"
#include "ptx/bar.cuh"
#include "ptx/cp_async.cuh"
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
constexpr bool kSharesValues = kRows == 64;      // each has half of O's columns
constexpr int kMaxima = kSharesValues ? 1 : kWarpgroups;
constexpr int kComputing = 128 * kWarpgroups;  // threads
constexpr int kPanels = kLatent / 64;          // of the queries' latents
constexpr int kPanelBytes = kRows * 128;       // one row of 128 bytes for each row
static_assert(kKeys == 4 * kWarpKeys && kQuarters == 4, "a warpgroup has the scores of a block");

// Scales of a token: one, or one for each quarter of the columns.
constexpr int kTokenScales = Config::several_scales ? kQuarters : 1;
// Several scales cost least where no operand made of codes is multiplied by them: scores of each
// quarter are added up by themselves, and probabilities are put once for each quarter, times its
// scale. 32 rows have no shared memory for that, 64 no registers.
constexpr bool kByQuarter = Config::several_scales && kRows == 16;
constexpr bool kScalesOperands = Config::several_scales && !kByQuarter;
// Copies of a block's probabilities, and places for those of a warpgroup's blocks in turn.
constexpr int kCopies = kByQuarter ? kQuarters : 1;
constexpr int kTurns = kSharesValues || kByQuarter ? 1 : 2;
// Of each key of a block 128 bytes lie side by side in shared memory: codes, or what is rotated.
constexpr int kKeyPanels = kLatent / 128, kKeyPanelBytes = kKeys * 128;

struct Stage {
  // Codes, and behind them what is rotated; as TMA writes rows of 128 bytes.
  alignas(1024) unsigned char panels[kKeyPanels + 1][kKeyPanelBytes];
  float scales[kKeys];  // of several the largest one
  // Where there are several, that of each quarter of the columns, in the order in which lanes read
  // them: itself for scores, and over the largest one, of keys and of values.
  alignas(8) float quarter_scales[kByQuarter ? kQuarters : 1][kKeys];
  alignas(16) __half key_factors[kKeys / 2][kTokenScales][2];
  alignas(16) __half value_factors[kScalesOperands ? kQuarters : 1][kKeys];
  unsigned exist[4];  // a bit for each of a warp's keys
};
// Where a key is among those 8 apart, whose scores a lane has.
__device__ __forceinline__ int pair_of(int key) { return key / 16 * 8 + key % 8; }
// Where it is among the eight of each half of a block that a lane has of values.
__device__ __forceinline__ int value_slot(int key) {
  return key / 32 * 32 + key % 8 / 2 * 8 + key / 8 % 4 * 2 + key % 2;
}

using Panel = tile::Swizzled<8>;  // rows of 128 bytes, as wgmma reads them
using Schedule = PieceSchedule<kRows, kKeys, 1, 3>;

// What exponents of a row are: a score of its products times `worth`, minus `max`.
struct RowScale {
  float worth, max;
};
// A maximum before there is any.
constexpr float kLeast = -0x1.fffffep127f;

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
  alignas(1024) unsigned char p[kWarpgroups][kTurns][kCopies][kPanelBytes];
  Stage ring[kStages];
  alignas(16) RowScale row_scales[kMaxima][kRows];
  tile::Range visible[kRows];             // the split's keys that each row sees
  float warp_max[kMaxima][4][kRows];      // of a warp's keys, where a maximum has to move
  float moved_by[kMaxima][kRows];         // what sums and O are multiplied by then
  float warp_sum[kWarpgroups][4][kRows];  // of a warp's keys at the end of a split
  OutputRow results[kRows];
  // The last blocks that have moved a maximum, of every second block of a warpgroup.
  unsigned raised[kWarpgroups][2];
  LoadedSplit loaded[4];
  alignas(16) Schedule schedule;  // of the computing warpgroups, after `split`
  decoding::Split split;
  decoding::SplitPlace place;
  bool exists;
  ptx::Mbarrier full[kStages], empty[kStages][2];  // each half of a block's keys
  ptx::Mbarrier full_p[2];  // where values are shared, of each warpgroup's probabilities
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

// A row of queries in shared memory, of which a lane has 16 channels of the latent, and of the
// first lanes each 8 of what is rotated.
struct QueryRow {
  using Chunk = tile::Vec<T, 8>;
  Smem& smem;
  const int row;
  const int lane = ptx::thread_index() % 32;  // nothing is worked out ahead of all splits

  __device__ __forceinline__ unsigned char* latent(int half) const {
    return smem.q[lane / 4] + Panel::at(row, lane % 4 * 2 + half);
  }
  __device__ __forceinline__ unsigned char* rotated() const {
    return smem.q[kPanels] + Panel::at(row, lane % 8);
  }

  // Asks for it as it is; for zeros where there is none.
  __device__ __forceinline__ void copy(const DecodeParams& params, const MlaParams& mla) const {
    const decoding::Split& split = smem.split;
    const int index = split.row_tile * kRows + row, token = divided_by_group(params, index);
    const int head = split.head * params.group + index - token * params.group;
    const bool exists = index < split.seq.seqlen_q * params.group;
    const auto row_of = [&](const void* q, const Strides& stride) {
      const long long at = split.seq.index * stride.batch +
                           (split.seq.begin_q + token) * stride.seq + head * stride.head;
      return reinterpret_cast<const Chunk*>(static_cast<const T*>(q) + (exists ? at : 0));
    };
    const Chunk* const from = row_of(params.q, params.q_stride) + 2 * lane;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ptx::cp_async_16(ptx::shared_address(latent(half)), from + half,
                       exists && lane * 16 < params.head_dim_v);
    if (lane < 8)
      ptx::cp_async_16(ptx::shared_address(rotated()), row_of(mla.q_rope, mla.q_rope_stride) + lane,
                       exists && lane * 8 < params.head_dim - params.head_dim_v);
  }

  // Makes operands of what this lane has copied: channels in the order of the codes, as float16.
  // Where that is too narrow for them they are multiplied by a power of two.
  __device__ __forceinline__ void convert(const DecodeParams& params) const {
    Chunk chunks[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) chunks[half] = reinterpret_cast<Chunk&>(*latent(half));
    Chunk own = {};
    if (lane < 8) own = reinterpret_cast<Chunk&>(*rotated());
    const auto channel = [&](int i) { return static_cast<float>(chunks[i / 8].x[i % 8]); };
    float inverse = 1.0f, worth = 1.0f;
    if constexpr (kScalesQueries<T>) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < 16; ++i) largest = fmaxf(largest, fabsf(channel(i)));
#pragma unroll
      for (int i = 0; i < 8; ++i)
        largest = fmaxf(largest, 0x1p-60f * fabsf(static_cast<float>(own.x[i])));
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
      *reinterpret_cast<uint4*>(latent(half)) = reinterpret_cast<const uint4&>(slots[half]);
#pragma unroll
    for (int i = 0; i < 8; ++i) own.x[i] = static_cast<T>(static_cast<float>(own.x[i]) * inverse);
    if (lane < 8) reinterpret_cast<Chunk&>(*rotated()) = own;
    const float scale_log2 = static_cast<float>(params.scale) * tile::kLog2e;
    const float whole = fmaxf(fminf(worth * scale_log2, 0x1p127f), 0x1p-126f);
    if (lane < kMaxima) smem.row_scales[lane][row] = {whole, kLeast};
  }
};

// Queries of a split to shared memory: the computing warps take rows in turn. No loop is unrolled:
// it takes longer to read instructions for the first time than to copy rows.
__device__ __forceinline__ void put_queries(Smem& smem, const DecodeParams& params,
                                            const MlaParams& mla) {
  constexpr int kWarps = kComputing / 32;
  const int first = ptx::thread_index() / 32;
#pragma unroll 1
  for (int row = first; row < kRows; row += kWarps) QueryRow{smem, row}.copy(params, mla);
  ptx::cp_async_wait_all();
#pragma unroll 1
  for (int row = first; row < kRows; row += kWarps) QueryRow{smem, row}.convert(params);
}

}  // namespace mla
