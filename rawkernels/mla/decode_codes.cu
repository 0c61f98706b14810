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
#include "mla/slice_codes.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/registers.cuh"

namespace mla {

// Copies a group's tiles of keys to its ring: each warp 16 keys of a tile, which its lanes look up,
// each key by two of them.
struct Loader {
  Smem& smem;
  const DecodeParams& params;
  const MlaParams& mla;
  const int group = threadIdx.x / kGroupThreads, warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  KeyLookup<kGroups * kKeys> keys = {params, mla, group * kKeys + warp * 16 + lane % 16,
                                     smem.keys[threadIdx.x / 32]};
  // Of the tile that has been asked for last: of columns 128 (lane / 16 + 2 i) on.
  StoredScale scales[kQuarters / 2];

  // Asks for a tile, if there is one; a group of copies in any case.
  __device__ __forceinline__ void load(int stage, bool exists) {
    if (exists) copy(smem.ring[group][stage]);
    ptx::cp_async_commit();
  }
  // Puts its scales to their stage, when they have arrived.
  __device__ __forceinline__ void put_scales(int stage) const {
    float (&own)[kQuarters] = smem.ring[group][stage].scales[warp * 16 + lane % 16];
#pragma unroll
    for (int i = 0; i < kQuarters / 2; ++i) own[lane / 16 + 2 * i] = scales[i].value(params);
  }

 private:
  __device__ __forceinline__ void copy(Stage& stage) {
    // Places are in 16 bytes: half the registers of an address.
    constexpr unsigned kNowhere = ~0u;
    const Place place = keys.next();
    const long long latent_at =
        place.page * params.k_stride.page + place.slot * params.k_stride.seq;
    const long long rope_at = place.page * mla.rope_stride.page + place.slot * mla.rope_stride.seq;
    const unsigned own_latent = place.has ? static_cast<unsigned>(latent_at >> 4) : kNowhere;
    const unsigned own_rope = static_cast<unsigned>(rope_at >> 3);
    const int chunk = lane % 8, rope_dim = params.head_dim - params.head_dim_v;
    const unsigned rope_bytes = ptx::shared_address(stage.rope) - ptx::shared_address(stage.codes);
    const unsigned to = ptx::shared_address(stage.codes) + Tile::at(warp * 16 + lane / 8, chunk);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8;
      const unsigned latent = __shfl_sync(~0u, own_latent, row);
      const unsigned rope = __shfl_sync(~0u, own_rope, row);
      const bool has = latent != kNowhere;
      // Rows r and r + 4 differ in where their chunks lie, rows r and r + 8 do not.
      const unsigned its_to = (to ^ i % 2 * 64) + i * 4 * Tile::kRowBytes;
      const uint4* const from = static_cast<const uint4*>(params.k) + (latent + chunk);
#pragma unroll
      for (int quarter = 0; quarter < kQuarters; ++quarter)
        ptx::cp_async_16(its_to + quarter * sizeof(stage.codes[0]), from + quarter * 8,
                         has && quarter * kQuarter + chunk * 16 < params.head_dim_v);
      ptx::cp_async_16(its_to + rope_bytes, static_cast<const uint4*>(mla.rope) + (rope + chunk),
                       has && chunk * 8 < rope_dim);
    }
#pragma unroll
    for (int i = 0; i < kQuarters / 2; ++i)
      scales[i].load(params, place.page, place.slot, lane / 16 + 2 * i, place.has);
    const unsigned exist = __ballot_sync(~0u, place.has) & 0xffff;
    if (lane == 0) stage.exist[warp] = exist;
  }
};

// This thread's group's keys of a split.
__device__ __forceinline__ void compute(Smem& smem, const DecodeParams& params,
                                        const MlaParams& mla) {
  constexpr int kStep = kGroups * kKeys;
  const int group = threadIdx.x / kGroupThreads, end = smem.split.end;
  int first = smem.split.origin + group * kKeys;
  Loader loader = {smem, params, mla};
  loader.keys.start(smem.split);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage > 0) loader.put_scales(stage - 1);
    loader.load(stage, first + stage * kStep < end);
  }
  load_queries(smem, params, mla);
  Slice slice = {smem, params, mla};
  slice.start();
  __syncthreads();  // queries are there
  int stage = 0, last = kStages - 2;
#pragma unroll 1
  for (; first < end; first += kStep) {
    loader.put_scales(last);
    ptx::cp_async_wait<kStages - 2>();
    sync_group(group);  // the tile is there, and the one before has been used
    last = stage == 0 ? kStages - 1 : stage - 1;
    loader.load(last, first + (kStages - 1) * kStep < end);
    const Stage& tile = smem.ring[group][stage];
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
  const int rows = min(kRows, split.seq.seqlen_q * params.group - split.row_tile * kRows);
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
      reinterpret_cast<decoding::FourColumns<float>&>(part.o[row][column]) = whole.o;
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
