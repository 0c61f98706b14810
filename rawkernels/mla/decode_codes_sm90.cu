// Latent attention over latents that are codes of 8 bits on Hopper: wgmma, with keys as its rows.
//
//   q_latent, out (batch, seqlen_q, heads, latent) or (total, heads, latent), q_rope with rope_dim
//   in place of latent; pages of codes and of rotated parts, of any size, or chosen tokens; float16
//   or bfloat16; latent a multiple of 16 up to kLatent, rope_dim one of 8 up to 64, everything
//   16-byte aligned, scale > 0. A token has one scale, or, where Config::several_scales, one for
//   128 or 256 columns each. DecodeParams and MlaParams have the rest.
//
// No code is expanded in memory. Warpgroups take blocks of 64 keys in turn, and make operands of
// their codes where they multiply, in registers, as float16 and exactly
// (multiply_codes_sm90.cuh). Queries become float16 times a power of two for each row; products are
// multiplied by a token's scale, and so are its probabilities, before they are rounded. Where a
// token has several scales, this is its largest one, and codes are multiplied by the quotients of
// the others with it, and rounded to float16; or, in tiles of 16 rows, scores of each quarter of
// the columns are multiplied by its scale, and probabilities by its quotient.
//
// With tiles of up to 32 rows each warpgroup has all of O for its own blocks
// (consume_codes_sm90.cuh), with 64 rows two share its columns (share_codes_sm90.cuh).
//
// Four more warps find keys and copy them, 16 of every block each, to one ring for all warpgroups
// (load_codes_sm90.cuh), and go on to the next split while these merge.
#include "mla/consume_codes_sm90.cuh"
#include "mla/load_codes_sm90.cuh"
#include "mla/share_codes_sm90.cuh"
#include "ptx/setmaxnreg.cuh"

namespace mla {

template <bool kShared>
struct ComputingOf {
  using Type = WholeValues;
};
template <>
struct ComputingOf<true> {
  using Type = SharedValues;
};
using Computing = ComputingOf<kSharesValues>::Type;

// By one thread.
__device__ __forceinline__ void prepare(Smem& smem) {
  for (int stage = 0; stage < kStages; ++stage) {
    // Each loading lane's copies, and what it has written itself; the warps that read a block.
    ptx::mbarrier_init(smem.full[stage], 2 * 128);
    for (int half = 0; half < 2; ++half)
      ptx::mbarrier_init(smem.empty[stage][half], kSharesValues ? 8 : 4);
  }
  for (ptx::Mbarrier& full_p : smem.full_p) ptx::mbarrier_init(full_p, 4);
  for (auto& raised : smem.raised) raised[0] = raised[1] = 0;
  ptx::fence_mbarrier_init();
}

}  // namespace mla

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    mla_decode_codes_sm90(const __grid_constant__ DecodeParams params,
                          const __grid_constant__ MlaParams mla_params,
                          const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  mla::Smem& smem = *reinterpret_cast<mla::Smem*>(dynamic_smem);
  {
    // Where there is nothing to do its next() says so. Were there a return here, ptxas would not
    // know that whole warps go on, and compute wgmma's descriptors in every lane.
    mla::Schedule schedule;
    schedule.start(params);
    const int thread = ptx::thread_index();  // nothing of it is kept for the roles
    if (thread == 0) smem.schedule = schedule;
    if (thread >= mla::kComputing && thread % 32 == 0)
      smem.loaded[thread / 32 % 4].schedule = schedule;
    if (thread == 0) mla::prepare(smem);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup < mla::kWarpgroups) {
    ptx::setmaxnreg_inc<Config::computing_registers>();
    mla::Computing{{{smem, params}, mla_params, warpgroup}}.run();
  } else {
    ptx::setmaxnreg_dec<Config::loading_registers>();
    mla::Loader{smem, params, mla_params, maps}.run();
  }
}
