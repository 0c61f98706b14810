// Latent attention of few rows and few sequences on Hopper, where latency decides: keys are the
// rows of products (wgmma), and the thread blocks of a tile merge its result in the same launch.
//
//   What mla/decode_sm90.cu computes, with as many queries for each sequence, at most kRows of them
//   times heads in a tile, and pages of at least 8 keys. Grid: (thread blocks of a tile, tiles of
//   heads, batch).
//
// Sᵀ = K Qᵀ and Oᵀ = Vᵀ Pᵀ have no empty rows to multiply where queries are few. Blocks of 64 keys
// are dealt out to warpgroups in turn (layout_few_sm90.cuh). A warpgroup asks TMA for its own
// blocks, has all of O for them in registers, and adds it to the other warpgroup's at the end. Then
// thread blocks merge (merge_few_sm90.cuh).
#include "mla/consume_few_sm90.cuh"
#include "ptx/registers.cuh"

namespace mla {

// Requests Q in 16-byte pieces, with zeros in columns that do not exist, and puts zeros into rows
// that do not. A warp has whole rows, so that where one lies is worked out once. By the warps that
// do not load keys.
__device__ __forceinline__ void request_queries(Smem& smem, const DecodeParams& params,
                                                const MlaParams& mla,
                                                const decoding::Split& split) {
  constexpr int kWarps = 3 * kWarpgroups;
  const int warp = threadIdx.x / 32 - threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
  const int rope_columns = params.head_dim - params.head_dim_v;
  const int rows = split.seq.seqlen_q * params.group;
  constexpr int kHalf = kHalfPanels * kRows * 128;
#pragma unroll
  for (int i = 0; i < (kRows + kWarps - 1) / kWarps; ++i) {
    const int row = warp + i * kWarps;
    if (row >= kRows) break;
    unsigned char* const target = smem.q[lane / 8] + Panel::at(row, lane % 8);
    if (row >= rows) {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<uint4*>(target + kHalf) = {};
      if (lane < 8) *reinterpret_cast<uint4*>(target + 2 * kHalf) = {};
      continue;
    }
    const int token = divided_by_group(params, row);
    const int head = split.head * params.group + row - token * params.group;
    const auto row_of = [&](const void* q, const Strides& stride) {
      return static_cast<const T*>(q) + split.seq.index * stride.batch +
             (split.seq.begin_q + token) * stride.seq + head * stride.head + lane * 8;
    };
    const T* const latent = row_of(params.q, params.q_stride);
    const unsigned address = ptx::shared_address(target);
    ptx::cp_async_16(address, latent, lane * 8 < params.head_dim_v);
    ptx::cp_async_16(address + kHalf, latent + kLatent / 2,
                     lane * 8 + kLatent / 2 < params.head_dim_v);
    if (lane < 8)
      ptx::cp_async_16(address + 2 * kHalf, row_of(mla.q_rope, mla.q_rope_stride),
                       lane * 8 < rope_columns);
  }
}

}  // namespace mla

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    mla_decode_few_sm90(const __grid_constant__ DecodeParams params,
                        const __grid_constant__ MlaParams mla_params,
                        const __grid_constant__ Maps maps) {
  using namespace mla;
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  Smem& smem = *reinterpret_cast<Smem*>(dynamic_smem);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  // Reads with long latency are requested first: the sequence's length, the pages of the first
  // blocks, and Q. A page that lies beyond the length may be any number. TMA gives zeros where
  // there is no such page, and what it reads otherwise is hidden and cleared with the keys beyond
  // the end.
  decoding::Split split;
  const int length = params.seq_lens == nullptr ? params.capacity : params.seq_lens[blockIdx.z];
  split.seq = {static_cast<int>(blockIdx.z), 0, params.seqlen_q, 0};
  split.row_tile = 0;
  split.head = blockIdx.y;
  split.origin = params.first_key & -kKeys;
  const Loader loader = {{params, maps}};
  const bool loads = threadIdx.x / 32 % 4 == 0;
  int first = 0, page = 0, next_page = 0;
  const auto ask_pages = [&] {
    first = split.origin + Deal::first(warpgroup) * kKeys;
    page = loader.page_of_lane(first, params.capacity);
    next_page = loader.page_of_lane(first + Deal::step() * kKeys, params.capacity);
  };
  if (loads) {
    ask_pages();
    if (threadIdx.x % 32 == 0) {
      ptx::prefetch_tensormap(maps.latent);
      ptx::prefetch_tensormap(maps.rope);
      for (ptx::Mbarrier& full : smem.full[warpgroup]) ptx::mbarrier_init(full, 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
  } else {
    request_queries(smem, params, mla_params, split);
  }
  // As decoding::count_keys(), in two steps, and opaque: the compiler would wait for the length
  // before anything else is asked for.
  split.seq.seqlen_k = tile::clamped(static_cast<int>(ptx::opaque(length)), 0, params.capacity);
  split.begin = decoding::visible_keys(params, split.seq, 0).begin;
  split.end = max(split.begin, decoding::visible_keys(params, split.seq, params.seqlen_q - 1).end);
  if (params.window_left != kUnbounded) {  // other pages than those that were asked for
    split.origin = split.begin & -kKeys;
    if (loads) ask_pages();
  }
  const Deal deal(split);
  const int blocks = deal.blocks();
  if (blockIdx.x >= blocks) {
    ptx::cp_async_wait_all();
    return;
  }
  if (loads && deal.has(warpgroup)) {
    loader.load<0>(smem, warpgroup, first, page);
    loader.load<1>(smem, warpgroup, first, page);
  }
  if (threadIdx.x < kRows)
    smem.visible[threadIdx.x] = keys_of_row<kRows>(params, split, threadIdx.x);
  const FewMerge merge = {smem, params, split, split.seq.seqlen_q * params.group, blocks};
  if (threadIdx.x == 0) merge.begin();
  ptx::cp_async_wait_all();
  ptx::fence_proxy_async();
  __syncthreads();
  Warpgroup computing = {{}, smem, params, split, loader, warpgroup, deal};
  computing.run(next_page);
  computing.put(merge);
  if (blocks == 1) return;
  __syncthreads();
  merge.send();
  merge.run();
}
