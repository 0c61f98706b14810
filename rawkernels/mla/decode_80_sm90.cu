// Latent attention on Hopper with tiles of 80 rows, as 16 heads have with 5 query tokens: keys are
// the rows of products (wgmma), of which queries are 80 columns.
//
//   What mla/decode_sm90.cu computes, where a tile's queries are a box that TMA copies, and pages
//   have at least 8 keys. Grid: (tiles of heads, groups of thread blocks).
//
// With queries as rows, which are 64 of a product, these would be two tiles, and 48 rows of them
// empty. Sᵀ = K Qᵀ and Oᵀ = Vᵀ Pᵀ have any multiple of 8 columns. Two warpgroups hold half of O's
// columns each. Every second block of 64 keys is a warpgroup's own: it computes the scores, raises
// maxima that have been left far behind, and puts probabilities into shared memory, with which both
// add the block's values (consume_80_sm90.cuh). A third warpgroup loads (produce_80_sm90.cuh).
// Beside 80 queries there is no room for two blocks of keys: see kPlaces.
#include "mla/finish_80_sm90.cuh"
#include "mla/produce_80_sm90.cuh"
#include "ptx/setmaxnreg.cuh"

namespace mla {

// By one thread, before all else.
__device__ __forceinline__ void prepare(Smem& smem, const Maps& maps) {
  ptx::prefetch_tensormap(maps.latent);
  ptx::prefetch_tensormap(maps.rope);
  ptx::prefetch_tensormap(maps.q);
  ptx::prefetch_tensormap(maps.q_rope);
  for (int half = 0; half < 2; ++half) {
    for (ptx::Mbarrier& full : smem.full_k[half]) ptx::mbarrier_init(full, 1);
    for (ptx::Mbarrier& empty : smem.empty_k[half]) ptx::mbarrier_init(empty, 8);
    ptx::mbarrier_init(smem.full_rope[half], 1);
    ptx::mbarrier_init(smem.empty_rope[half], kConsumers / 32);
    ptx::mbarrier_init(smem.full_work[half], 1);
    ptx::mbarrier_init(smem.empty_work[half], kProducers);
  }
  ptx::mbarrier_init(smem.full_q, 1);
  ptx::mbarrier_init(smem.empty_q, kConsumers / 32);
  ptx::fence_mbarrier_init();
}

// Finds this thread block's next split, and tells producers of it. By the first warp.
__device__ __forceinline__ void find_work(Smem& smem, const DecodeParams& params, int number) {
  Schedule schedule;
  bool more = true;
  if (number == 0)
    more = schedule.start(params);
  else
    schedule = smem.schedule;
  decoding::Split split;
  more = more && schedule.next(params, split);
  ptx::mbarrier_wait(smem.empty_work[number % 2], number / 2 % 2 ^ 1);
  __syncwarp();  // all lanes have read what the first one writes
  if (threadIdx.x > 0) return;
  Work& work = smem.work[number % 2];
  work.exists = more;
  if (more) {
    const int keys = split.end > split.begin ? split.end - split.origin : 0;
    work.split = split;
    work.place = schedule.place_of(params, split);
    work.first = number == 0 ? 0 : smem.work[(number - 1) % 2].end;
    work.end = work.first + (keys + kKeys - 1) / kKeys;
    smem.schedule = schedule;
  }
  ptx::mbarrier_arrive(smem.full_work[number % 2]);
}

// What rows of a split begin with: zeros where they have no query, and the keys that they see. By
// both warpgroups.
__device__ __forceinline__ void prepare_rows(Smem& smem, const DecodeParams& params,
                                             const MlaParams& mla, const decoding::Split& split) {
  clear_missing_queries<kRows, kConsumers>(smem.q, mla);
  const int row = threadIdx.x;
  if (row >= kRows) return;
  smem.visible[row] = keys_of_row<kRows>(params, split, row);
  smem.row_max[row] = tile::negative_infinity();
  smem.offset[row] = Warpgroup::kNone;
}

// By two warpgroups.
__device__ __forceinline__ void consume(Smem& smem, const DecodeParams& params,
                                        const MlaParams& mla, int warpgroup) {
  if (threadIdx.x < 32) find_work(smem, params, 0);
  SplitWarpgroup own = {{{}, smem, params, mla, warpgroup}};
#pragma unroll 1
  for (int number = 0;; ++number) {
    own.sync_both();
    own.work = &smem.work[number % 2];
    if (!own.work->exists) return;
    if (threadIdx.x < 32) find_work(smem, params, number + 1);
    prepare_rows(smem, params, mla, own.work->split);
    ptx::mbarrier_wait(smem.full_q, number % 2);
    own.sync_both();
    own.run();
    own.finish();
  }
}

}  // namespace mla

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    mla_decode_80_sm90(const __grid_constant__ DecodeParams params,
                       const __grid_constant__ MlaParams mla_params,
                       const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  mla::Smem& smem = *reinterpret_cast<mla::Smem*>(dynamic_smem);
  if (threadIdx.x == 0) mla::prepare(smem, maps);
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup < 2) {
    ptx::setmaxnreg_inc<Config::consumer_registers>();
    mla::consume(smem, params, mla_params, warpgroup);
  } else {
    ptx::setmaxnreg_dec<Config::producer_registers>();
    mla::Producer{smem, params, mla_params, maps}.run();
  }
}
