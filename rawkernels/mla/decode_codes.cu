// Latent attention of few rows over latents that are codes of 8 bits, on tensor cores (mma.sync),
// for Ampere and newer: tiles of 16 rows, at the speed that the codes can be read.
//
//   q_latent, out (batch, seqlen_q, heads, latent) or (total, heads, latent), q_rope with rope_dim
//   in place of latent; pages of codes and of rotated parts, of any size, or chosen tokens; float16
//   or bfloat16; latent a multiple of 16 up to kLatent, rope_dim one of 8 up to 64, everything
//   16-byte aligned, scale > 0. A token has one scale, or one for 128 or 256 columns each.
//   DecodeParams and MlaParams have the rest.
//
// No code is expanded in memory, and none is scaled: each becomes a float16 operand where it is
// multiplied (tile/expand.cuh), exactly. Queries become float16 times a power of two for each row;
// products are scaled by a token's scale, and so are its probabilities, before they are rounded.
//
// Groups of four warps take tiles of 64 keys in turn, which arrive by cp.async in rings of their
// own, and are merged at the end of a split. Operands are swapped, as in mla/decode_sm80.cu: keys
// fill the 16 rows of an mma, and query rows its 8 columns. A warp of a group has the scores of 16
// keys, all of whose columns it multiplies, and a quarter of O's columns. Probabilities go through
// shared memory.
#include "mla/load_codes.cuh"
#include "mla/slice_codes.cuh"
#include "ptx/registers.cuh"

namespace mla {

struct Smem {
  union {
    Stage ring[kGroups][kStages];
    alignas(16) float o[kGroups][kRows][kOStride];
  };
  // Queries as float16 in the order of the codes' operands, and what of them is rotated.
  alignas(1024) unsigned char q[kQuarters * 2][kRows * 128];
  alignas(1024) unsigned char q_rope[kRows * 128];
  // Probabilities of a tile, times the scales of one quarter of the columns each.
  alignas(1024) unsigned char p[kGroups][kQuarters][kRows * 128];
  QueryRow query_rows[kRows];
  float tile_max[kGroups][4][kRows];  // of a warp's keys, where a maximum has to move
  float2 max_sum[kGroups][4][kRows];  // of a warp's keys at the end
  int raised[kGroups];                // the last tile that has moved a maximum, by its first key
  SplitKeys keys[kGroups * 4];
  Schedule schedule;  // after `split`
  decoding::Split split;
  decoding::SplitPlace place;
  bool exists;
};
static_assert(sizeof(Smem) <= Config::smem_bytes, "Config has to ask for all of it");

// This thread's group's keys of a split.
__device__ __forceinline__ void compute(Smem& smem, const DecodeParams& params,
                                        const MlaParams& mla) {
  constexpr int kStep = kGroups * kKeys;
  const int group = threadIdx.x / kGroupThreads, end = smem.split.end;
  int first = smem.split.origin + group * kKeys;
  Stage(&ring)[kStages] = smem.ring[group];
  Loader<kStep> loader = {params, mla, group, smem.keys[threadIdx.x / 32]};
  // A tile, if there is one; a group of copies in any case.
  const auto load = [&](Stage& stage, bool exists) {
    if (exists) loader.copy(stage);
    ptx::cp_async_commit();
  };
  loader.keys.start(smem.split);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage > 0) loader.put_scales(ring[stage - 1]);
    load(ring[stage], first + stage * kStep < end);
  }
  load_queries(smem, params, mla);
  Slice<Smem> slice = {smem, params, mla};
  slice.start();
  __syncthreads();  // queries are there
  int stage = 0, last = kStages - 2;
#pragma unroll 1
  for (; first < end; first += kStep) {
    loader.put_scales(ring[last]);
    ptx::cp_async_wait<kStages - 2>();
    sync_group(group);  // the tile is there, and the one before has been used
    last = stage == 0 ? kStages - 1 : stage - 1;
    load(ring[last], first + (kStages - 1) * kStep < end);
    const Stage& tile = ring[stage];
    Scores s;
    slice.multiply_keys(s, tile);
    slice.hide_keys(s, tile, first);
    slice.soften(s, tile, first);
    slice.multiply_values(tile);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  ptx::cp_async_wait_all();
  __syncthreads();  // O takes the rings' place
  slice.put();
}

// Merges the groups' rows and writes them, or a partial result.
__device__ __forceinline__ void combine(const Smem& smem, const DecodeParams& params,
                                        const MlaParams& mla) {
  constexpr int kVecs = kLatent / 4;
  const decoding::Split& split = smem.split;
  const decoding::SplitPlace& place = smem.place;
  const int rows = min(kRows, rows_from<kRows>(params, split));
  for (int i = threadIdx.x; i < rows * kVecs; i += Config::threads) {
    const int row = i / kVecs, column = i % kVecs * 4;
    decoding::Partial<T> whole;
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
      whole.max = fmaxf(whole.max, smem.max_sum[group][0][row].x);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) sum += smem.max_sum[group][warp][row].y;
      whole.add(reinterpret_cast<const decoding::FourColumns<float>&>(smem.o[group][row][column]),
                smem.max_sum[group][0][row].x, sum);
    }
    if (place.count > 1) {
      auto& part = static_cast<PartialTile<kRows, kLatent>*>(mla.parts)[place.slot(place.index)];
      reinterpret_cast<decoding::FourColumns<float>&>(part.o[part.at(row, column / 4)]) = whole.o;
      if (column == 0) part.max_sum[row] = {whole.max, whole.sum};
    } else {
      const OutputRow result = output_row<T, kRows>(params, split, row, whole.max, whole.sum);
      if (column == 0) put_lse(params, result);
      if (column >= params.head_dim_v) continue;
      tile::Vec<T, 4> packed;
#pragma unroll
      for (int e = 0; e < 4; ++e) packed.x[e] = static_cast<T>(whole.o.x[e] * result.factor);
      *reinterpret_cast<tile::Vec<T, 4>*>(static_cast<T*>(params.out) + result.at + column) =
          packed;
    }
  }
  if (threadIdx.x == 0 && place.index + 1 == place.count)
    put_task<kRows>(params, mla, split, place);
}

}  // namespace mla

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    mla_decode_codes(const __grid_constant__ DecodeParams params,
                     const __grid_constant__ MlaParams mla_params) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  mla::Smem& smem = *reinterpret_cast<mla::Smem*>(dynamic_smem);
  {
    mla::Schedule schedule;
    if (!schedule.start(params)) return;
    if (threadIdx.x == 0) smem.schedule = schedule;
  }
  if (threadIdx.x < mla::kGroups) smem.raised[threadIdx.x] = -1;
  while (true) {
    __syncthreads();  // O has been read
    if (threadIdx.x == 0) {
      smem.exists = smem.schedule.next(params, smem.split);
      if (smem.exists) smem.place = smem.schedule.place_of(params, smem.split);
    }
    __syncthreads();
    if (!smem.exists) return;
    mla::compute(smem, params, mla_params);
    __syncthreads();
    mla::combine(smem, params, mla_params);
  }
}
