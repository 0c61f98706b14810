// Latent attention of few rows over latents that are codes of 8 bits on Hopper: as
// mla/decode_codes.cu, with warps of their own that load.
//
// Three groups of four warps compute, each a tile of 64 keys in turn (mla/slice_codes.cuh). With
// two, schedulers had an instruction in half of their cycles: a warp waits for what it has
// expanded, and for its group. Four more warps find keys and copy them, 16 of every tile, to one
// ring for all groups, for which three groups leave room for four tiles; and they go on to the next
// split while the groups merge. Groups add up O in turn, in the place of their probabilities.
#include "mla/load_codes.cuh"
#include "mla/slice_codes.cuh"
#include "ptx/registers.cuh"
#include "ptx/setmaxnreg.cuh"
#include "tile/pipeline.cuh"

namespace mla {

struct Smem {
  Stage ring[kStages];
  // Queries as float16 in the order of the codes' operands, and what of them is rotated.
  alignas(1024) unsigned char q[kQuarters * 2][kRows * 128];
  alignas(1024) unsigned char q_rope[kRows * 128];
  union {
    // Probabilities of a tile, times the scales of one quarter of the columns each.
    alignas(1024) unsigned char p[kGroups][kQuarters][kRows * 128];
    float o[kRows][kOStride];  // of all groups
  };
  QueryRow query_rows[kRows];
  float tile_max[kGroups][4][kRows];  // of a warp's keys, where a maximum has to move
  float2 max_sum[kGroups][4][kRows];  // of a warp's keys at the end
  int raised[kGroups];                // the last tile that has moved a maximum, by its first key
  SplitKeys keys[4];                  // of the loading warps
  Schedule schedule;                  // of the groups, after `split`
  decoding::Split split;
  decoding::SplitPlace place;
  tile::Range common;  // keys of the split that all rows see
  unsigned tiles;      // of the splits before
  bool exists;
  ptx::Mbarrier full[kStages], empty[kStages];
};
static_assert(sizeof(Smem) <= Config::smem_bytes, "Config has to ask for all of it");

constexpr int kComputing = kGroups * kGroupThreads;  // threads

__device__ __forceinline__ void sync_groups() { ptx::bar_sync(1 + kGroups, kComputing); }

__device__ __forceinline__ int count_tiles(const decoding::Split& split) {
  return split.end > split.origin ? (split.end - split.origin - 1) / kKeys + 1 : 0;
}

// By the loading warps: tiles of all splits, one after the other.
__device__ __forceinline__ void load(Smem& smem, const DecodeParams& params, const MlaParams& mla,
                                     Schedule& schedule) {
  Loader<kKeys> loader = {params, mla, 0, smem.keys[threadIdx.x / 32 % 4]};
  tile::PipelineCounter<kStages> counter;
  decoding::Split split;
  while (schedule.next(params, split)) {
    const int tiles = count_tiles(split);
    if (tiles == 0) continue;  // nothing between this split and the next would make lanes meet
    loader.keys.start(split);
#pragma unroll 1
    for (int left = tiles; left > 0; --left, counter.advance()) {
      const tile::PipelineState<kStages> at = counter.state();
      ptx::mbarrier_wait(smem.empty[at.index], at.parity ^ 1);
      loader.copy(smem.ring[at.index]);
      ptx::mbarrier_arrive_after_copies(smem.full[at.index]);
      loader.put_scales(smem.ring[at.index]);
      // Tiles become full in their order, which copies need not end in: a group that has had the
      // tile three before waits for this one by a parity, and the one four before was another's.
      const tile::PipelineState<kStages> last =
          tile::PipelineCounter<kStages>{counter.count - 1}.state();
      ptx::mbarrier_wait(smem.full[last.index], last.parity);
      tile::arrive_warp(smem.full[at.index]);
    }
  }
}

// Adds the groups' rows up in smem.o, relative to the largest maximum.
__device__ __forceinline__ void merge(Smem& smem, Slice<Smem>& slice) {
  slice.put_sums();
  sync_groups();
#pragma unroll 1
  for (int group = 0; group < kGroups; ++group) {
    if (group == slice.group) slice.add_to(smem.o, group == 0);
    sync_groups();
  }
}

// Writes the merged rows, or a partial result.
__device__ __forceinline__ void put(const Smem& smem, const DecodeParams& params,
                                    const MlaParams& mla, int thread) {
  constexpr int kVecs = kLatent / 4;
  const decoding::Split& split = smem.split;
  const decoding::SplitPlace& place = smem.place;
  const int rows = min(kRows, split.seq.seqlen_q * params.group - split.row_tile * kRows);
#pragma unroll 1
  for (int i = thread; i < rows * kVecs; i += kComputing) {
    const int row = i / kVecs, column = i % kVecs * 4;
    const auto& o = reinterpret_cast<const decoding::FourColumns<float>&>(smem.o[row][column]);
    const float max = largest_max(smem, row);
    float sum = 0.0f;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float factor =
          ptx::ex2(smem.max_sum[group][0][row].x - tile::OnlineSoftmax::offset(max, 1.0f));
#pragma unroll
      for (int warp = 0; warp < 4; ++warp)
        sum = fmaf(factor, smem.max_sum[group][warp][row].y, sum);
    }
    if (place.count > 1) {
      auto& part = static_cast<PartialTile<kRows, kLatent>*>(mla.parts)[place.slot(place.index)];
      reinterpret_cast<decoding::FourColumns<float>&>(part.o[part.at(row, column / 4)]) = o;
      if (column == 0) part.max_sum[row] = {max, sum};
    } else {
      put_columns<T>(params, output_row<T, kRows>(params, split, row, max, sum), column, o);
    }
  }
  if (thread == 0 && place.index + 1 == place.count) put_task<kRows>(params, mla, split, place);
}

// By the groups.
__device__ __forceinline__ void compute(Smem& smem, const DecodeParams& params,
                                        const MlaParams& mla) {
  while (true) {
    sync_groups();                           // O, the queries and the split have been read
    const int thread = ptx::thread_index();  // nothing is worked out ahead of all splits
    if (thread == 0) {
      smem.exists = smem.schedule.next(params, smem.split);
      if (smem.exists) smem.place = smem.schedule.place_of(params, smem.split);
    }
    sync_groups();
    if (!smem.exists) return;
    load_queries(smem, params, mla, thread);
    const int group = thread / kGroupThreads;
    Slice<Smem> slice = {smem, params, mla, group};
    slice.start();
    if (thread == 0) smem.common = slice.common;
    sync_groups();  // queries are there
    int first = smem.split.origin + group * kKeys;
    tile::PipelineCounter<kStages> counter = {smem.tiles + group};
#pragma unroll 1
    for (; first < smem.split.end; first += kGroups * kKeys, counter.count += kGroups) {
      // Registers are few: nothing is kept for the next tile that can be had anew.
      const int thread = ptx::thread_index();
      slice.group = thread / kGroupThreads;
      slice.warp = thread / 32 % 4;
      slice.lane = thread % 32;
      const tile::PipelineState<kStages> at = counter.state();
      const Stage& tile = smem.ring[at.index];
      ptx::mbarrier_wait(smem.full[at.index], at.parity);
      Scores s;
      slice.multiply_keys(s, tile);
      slice.common = smem.common;
      slice.hide_keys(s, tile, first);
      sync_group(slice.group);  // the probabilities of the tile before have been used
      slice.soften(s, tile, first);
      slice.multiply_values(tile);
      __syncwarp();
      if (slice.lane == 0) ptx::mbarrier_arrive(smem.empty[at.index]);
    }
    sync_groups();  // O takes the probabilities' place
    merge(smem, slice);
    put(smem, params, mla, ptx::thread_index());
    if (ptx::thread_index() == 0) smem.tiles += count_tiles(smem.split);
  }
}

}  // namespace mla

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    mla_decode_codes_sm90(const __grid_constant__ DecodeParams params,
                          const __grid_constant__ MlaParams mla_params) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  mla::Smem& smem = *reinterpret_cast<mla::Smem*>(dynamic_smem);
  mla::Schedule schedule;
  if (!schedule.start(params)) return;
  if (threadIdx.x == 0) {
    smem.schedule = schedule;
    smem.tiles = 0;
    for (int stage = 0; stage < mla::kStages; ++stage) {
      // Of each loading warp: its lanes' copies, and what it has written itself.
      ptx::mbarrier_init(smem.full[stage], 4 * 33);
      ptx::mbarrier_init(smem.empty[stage], 4);
    }
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x < mla::kGroups) smem.raised[threadIdx.x] = -1;
  __syncthreads();
  if (threadIdx.x < mla::kComputing) {
    ptx::setmaxnreg_inc<Config::computing_registers>();
    mla::compute(smem, params, mla_params);
  } else {
    ptx::setmaxnreg_dec<Config::loading_registers>();
    mla::load(smem, params, mla_params, schedule);
  }
}
