// Attention forward on Hopper: out = softmax(scale * Q K^T) V with wgmma, TMA and specialised
// warps, after FlashAttention-3 (Shah et al., 2024).
//
//   q (batch, seqlen_q, heads_q, head_dim), k and v with heads_kv heads, out, or varlen (total,
//   heads, head_dim); float16 or bfloat16; strides of 16 bytes; scale > 0. k and v may also lie in
//   pages, with lengths that the device knows (Config::paged_kv, Config::seq_lens).
//   One persistent block an SM, which works on tile after tile of 64 * Config::warpgroups rows
//   (attention/scheduler_sm90.cuh). Warpgroup 0 produces (attention/produce_sm90.cuh): warp 0 loads
//   K and V, block after block of keys, into a ring of stages; warp 1 finds tiles and loads their
//   queries; the others filter values that are not finite, where masks may hide them
//   (attention/filter_sm90.cuh). Warpgroups 1 and on consume: 64 rows each, scores
//   (attention/score_sm90.cuh) and O in registers.
//   Rows of a tile are queries of one head, or of all heads that share a key head
//   (Config::pack_gqa); the keys of a tile may be cut into parts, with a result each
//   (Config::split_kv), or by the thread blocks' even ranges of all keys (Config::even_keys).
//
// Software pipelining: P V of one block of keys and Q K^T of the next are in flight together,
// across tile boundaries too, and the next block's exponentials hide behind the products of this
// and of the other consumers.
#include "attention/dropout_sm90.cuh"
#include "attention/epilogue_sm90.cuh"
#include "attention/even_merge_sm90.cuh"
#include "attention/filter_sm90.cuh"
#include "attention/layout_sm90.cuh"
#include "attention/produce_sm90.cuh"
#include "attention/score_sm90.cuh"
#include "ptx/bar.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"
#include "tile/softmax.cuh"

// S = Q K^T for 64 queries and a block of keys: issued, not waited for.
__device__ __forceinline__ void multiply_keys(float (&s)[kTileN / 2], const unsigned char* q,
                                              const unsigned char* k) {
  const unsigned long long a = ptx::wgmma_descriptor(q, 0, 1024);
  const unsigned long long b = ptx::wgmma_descriptor(k, 0, Keys::kGroupBytes);
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step)
    ptx::Wgmma<kTileN, T>::shared_shared<false, false>(
        s, ptx::wgmma_advance(a, step / 4 * kPanelBytesQ + step % 4 * 32),
        ptx::wgmma_advance(b, step / 4 * Keys::kPanelBytes + step % 4 * 32), step > 0);
  ptx::wgmma_commit_group();
}

// O += P V for a block of keys: issued, not waited for.
__device__ __forceinline__ void multiply_values(float (&o)[kHeadDimV / 2],
                                                const unsigned (&p)[kTileN / 4],
                                                const unsigned char* v) {
  const unsigned long long b = ptx::wgmma_descriptor(v, Values::kPanelBytes, Values::kGroupBytes);
#pragma unroll
  for (int step = 0; step < kTileN / 16; ++step)
    ptx::Wgmma<kHeadDimV, T>::register_shared<true>(
        o, p + 4 * step, ptx::wgmma_advance(b, step * 16 * Values::kKeyBytes), true);
  ptx::wgmma_commit_group();
}

// A consuming warpgroup: 64 rows of every tile of its thread block. Blocks of keys are worked on
// from the last to the first. While P V of one block is in flight so is Q K^T of the next, also of
// the next tile's first: O of a tile is complete one step into the next tile.
struct Consumer {
  Smem& smem;
  const Params& params;
  const Sm90Params& sm90;
  const int consumer;                                // which of kWarpgroups
  const int first_row = 64 * consumer + lane_row();  // this lane's first row of a tile

  tile::PipelineState<kStages> stage_k, stage_v;
  tile::PipelineState<kStagesQ> stage_q;
  tile::PipelineState<TileQueue::kSize> queue;
  unsigned rows_parity = 0;  // of score_rows
  int number = 0;            // of the tile, modulo 2: which of Smem::replaced

  Tile tile;             // whose scores come next
  Tile::Partial hidden;  // its blocks that call for a mask
  int block, last_block;
  bool skips = false;         // one block before the next scores
  float slope[kSlopes] = {};  // ALiBi's

  float s[kTileN / 2], o[kHeadDimV / 2];  // scores, later P, and the output
  unsigned p[kTileN / 4];                 // P as 16-bit pairs
  Softmax softmax;
  SoftcapAlibi<kSoftcapAlibi> softcap_alibi{params, sm90};

  // Consumers take turns in issuing products, so that one's exponentials run beside another's
  // products: the ping-pong of FlashAttention-3. A named barrier is one's turn. A consumer that is
  // alone has none.
  __device__ __forceinline__ void wait_turn() const {
    if (kWarpgroups > 1) ptx::bar_sync(1 + consumer, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (kWarpgroups > 1) ptx::bar_arrive(1 + (consumer + 1) % kWarpgroups, 256);
  }

  // A tile's queries are released as soon as its last scores are there, or a step later, which
  // spares a branch a block: with two stages, and where NVRTC 13.0 has the register for it.
  static constexpr bool kReleasesLate = kStagesQ > 1 && !Config::score;

  // The first scores are a turn, as another consumer may skip the block, and as consumers then
  // start apart (2% of plain calls at head_dim 64); with bias or mask they are none, which saves
  // the register that NVRTC 13.5 would spill.
  static constexpr bool kFirstTurn = !Config::elementwise;

  // A consumer that is alone has only its own products to hide exponentials behind.
  static constexpr bool kExponentiatesFirst = kWarpgroups == 1;

  __device__ __forceinline__ void run() {
    if (consumer == kWarpgroups - 1) pass_turn();
    tile = find_tile();
    if (tile.row < 0) return;
    first_scores();
    while (true) {
      while (block > last_block) step(false, tile);
      if (kReleasesLate) release_queries();
      const Tile finished = tile;
      skips = kSkipsBlocks && last_block > tile.block_begin;
      tile = find_tile();
      skip_keys();
      if (tile.row < 0) {
        tile = finished;
        break;
      }
      ptx::mbarrier_wait(queries_barrier(smem, stage_q.index, consumer), stage_q.parity);
      step(true, finished);
    }
    last_values();
  }

  // The very first scores, with no values beside them.
  __device__ __forceinline__ void first_scores() {
    skip_keys();
    skip_values();
    --block;
    prepare_masks();
    ptx::mbarrier_wait(queries_barrier(smem, 0, consumer), 0);
    ptx::mbarrier_wait(smem.full_k[stage_k.index], stage_k.parity);
    if (kFirstTurn) wait_turn();
    ptx::wgmma_keep(s);
    ptx::wgmma_fence();
    multiply_keys(s, smem.q[0][consumer], smem.k[stage_k.index]);
    if (kFirstTurn) pass_turn();
    ptx::wgmma_wait_group<0>();
    receive_scores(true);
    float correction[2];
    softcap_alibi.update(softmax, s, sm90.scale_log2, correction);
    tile::pack_fragment<T>(p, s);
    drop();
    clear_output();
  }

  // The scores of the next block beside the values of the one before. A `fresh` block is a tile's
  // first: the values are the last of the tile that is then `finished`.
  __device__ __forceinline__ void step(bool fresh, const Tile& finished) {
    --block;
    if (!fresh && (block + 1) % Config::mask_blocks == 0) prepare_masks();
    ptx::mbarrier_wait(smem.full_k[stage_k.index], stage_k.parity);
    wait_values();
    wait_turn();
    ptx::wgmma_keep(s);
    ptx::wgmma_keep(o);
    ptx::wgmma_fence();
    multiply_keys(s, smem.q[stage_q.index][consumer], smem.k[stage_k.index]);
    multiply_values(o, p, smem.v[stage_v.index]);
    if (!kKeepsTurn) pass_turn();
    // A tile's first block is computed as a block's very first is: who comes before changes no bit.
    softcap_alibi.expect(tile.row + 64 * consumer + tile.diagonal() - block * kTileN,
                         fresh || hidden.has(block), slope[0]);
    ptx::wgmma_wait_group<1>();
    if (kKeepsTurn) pass_turn();
    receive_scores(fresh);
    const Softmax before = softmax;
    if (fresh) {
      softmax = Softmax();
      softcap_alibi.start(softmax);
    }
    float block_max[2], correction[2];
    const bool rescales = softcap_alibi.needs_rescale(softmax, s, sm90.scale_log2, block_max);
    if (rescales) softcap_alibi.rescale(softmax, block_max, sm90.scale_log2, correction);
    // Of several consumers exponentials wait for P V: the tensor cores have the others' products by
    // now, and the packing of P into the registers that P V reads hides behind the exponentials (5%
    // faster than exponentials first, on an H200).
    // Of one consumer they do not, with a condition that is always true: ptxas would move the wait
    // to before them.
    if (kExponentiatesFirst && block >= 0) exponentiate();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_keep(o);
    const bool replaced = fresh && was_replaced();
    release_values();
    if (fresh) {
      skip_values();
      finish_tile(before, finished, replaced);
      prepare_masks();  // while O takes no registers
      clear_output();
    } else if (rescales) {
      tile::scale_rows(o, correction);
    }
    if (!kExponentiatesFirst) exponentiate();
    tile::pack_fragment<T>(p, s);
    drop();
  }

  __device__ __forceinline__ void exponentiate() {
    softcap_alibi.exponentiate(softmax, s, sm90.scale_log2);
  }

  // The values of the very last block.
  __device__ __forceinline__ void last_values() {
    wait_values();
    ptx::wgmma_keep(o);
    ptx::wgmma_fence();
    multiply_values(o, p, smem.v[stage_v.index]);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_keep(o);
    const bool replaced = was_replaced();
    release_values();
    finish_tile(softmax, tile, replaced);
  }

  // The next tile that has keys.
  __device__ __forceinline__ Tile find_tile() {
    Tile tile = read_tile(smem, queue);
    while (kFilterWarps > 0 && tile.row >= 0 && tile.empty()) tile = read_tile(smem, queue);
    if (tile.row < 0) return tile;
    if (Config::score && kContractScores && params.alibi_slopes != nullptr)
#pragma unroll
      for (int i = 0; i < kSlopes; ++i) {
        int head = tile.head;
        if constexpr (Config::pack_gqa)
          head = tile.packed(params, tile.row + first_row + 8 * i).head;
        slope[i] = ptx::rcp(sm90.score_scale) *
                   static_cast<const float*>(
                       params.alibi_slopes)[tile.batch * params.alibi_batch_stride + head];
      }
    hidden = tile.partial(params, tile.row + 64 * consumer, tile.row + 64 * consumer + 64);
    block = tile.block_end;
    last_block = tile.block_begin;
    if (kSkipsBlocks && consumer == kWarpgroups - 1) {
      last_block += tile.hides_first_block(params, consumer);
    } else if (kSkipsBlocks && tile.hides_last_block(params, consumer)) {
      --block;
      skips = true;
    }
    return tile;
  }

  // From the products of Q and K, once they are there, to the scores that the softmax takes.
  __device__ __forceinline__ void receive_scores(bool fresh) {
    ptx::wgmma_keep(s);
    tile::arrive_warp(smem.empty_k[stage_k.index]);
    stage_k.advance();
    if (!kReleasesLate && block == last_block) release_queries();
    const int row = tile.row + first_row, column = block * kTileN + lane_column();
    if constexpr (!kContractScores) {
      apply_score_mod(s, params, tile, row, column);
    } else if constexpr (Config::score) {
      float distance[kSlopes];
#pragma unroll
      for (int i = 0; i < kSlopes; ++i)
        distance[i] =
            static_cast<float>(tile.query_of(params, row + 8 * i) + tile.diagonal() - column);
      if (softcap_alibi.apply(s, distance[0])) return;
      if (kSoftcapAlibi || sm90.cap_scale != 0.0f || slope[0] != 0.0f)
        apply_softcap_and_alibi(s, sm90.cap_scale, slope, distance);
    }
    if constexpr (Config::elementwise) {
      ScoreRows& rows = score_rows(smem, consumer);
      ptx::mbarrier_wait(rows.full, rows_parity);
      rows_parity ^= 1;
      add_score_rows(s, rows, params, sm90.score_scale);
      tile::arrive_warp(rows.empty);
    }
    if ((fresh || Config::bound_right || Config::bound_left) && hidden.has(block)) {
      if (block >= hidden.from) hide_later_keys(s, params, tile, row, column);
      if (Config::bound_left && block < hidden.before)
        hide_earlier_keys(s, params, tile, row, column);
    }
  }

  // Dropout: computes the masks of the block and of those after it, where it is a tile's first or
  // the first of Config::mask_blocks blocks.
  __device__ __forceinline__ void prepare_masks() const {
    if constexpr (Config::dropout) {
      const DropoutParams dropout = tile::dropout_of(params);
      const int thread = ptx::thread_index() - 128;  // read anew: registers are for the products
      const tile::DropoutRow of_row(dropout.seed, tile.row / 16 + thread / 32, thread % 32,
                                    tile.batch * params.heads_q + tile.head);
      compute_masks(dropout_masks(smem), of_row, dropout, last_block, block, thread);
    }
  }
  __device__ __forceinline__ void drop() {
    if constexpr (Config::dropout) clear_dropped(p, dropout_masks(smem), block);
  }

  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) o[i] = 0.0f;
  }

  __device__ __forceinline__ void finish_tile(const Softmax& softmax, const Tile& tile,
                                              bool replaced) {
    if constexpr (Config::even_keys) {
      Softmax all = softmax;
      const bool merges = tile.parts() > 1;
      if (merges && !merge_parts(o, all, replaced, tile, sm90)) return;
      write_tile(all, merges ? tile.with_all_keys() : tile, replaced);
    } else {
      write_tile(softmax, tile, replaced);
    }
  }

  __device__ __forceinline__ void write_tile(const Softmax& softmax, const Tile& tile,
                                             bool replaced) {
    write_output(o, softmax, params, sm90, tile, tile.row + first_row);
    if (replaced) restore_values(params, sm90, tile, tile.row + first_row - threadIdx.x % 32 / 4);
  }

  __device__ __forceinline__ void release_queries() {
    tile::arrive_warp(smem.empty_q[stage_q.index][consumer]);
    stage_q.advance();
  }

  __device__ __forceinline__ void wait_values() {
    ptx::mbarrier_wait((kFilterWarps > 0 ? smem.filtered_v : smem.full_v)[stage_v.index],
                       stage_v.parity);
  }

  __device__ __forceinline__ void release_values() {
    tile::arrive_warp(smem.empty_v[stage_v.index]);
    stage_v.advance();
  }

  // Whether the nonfinite filter has replaced values of the tile; to be asked before its last ones
  // are released.
  __device__ __forceinline__ bool was_replaced() {
    if (kFilterWarps == 0) return false;
    const bool replaced = smem.replaced[number][0] | smem.replaced[number][1];
    number ^= 1;
    return replaced;
  }

  // The keys of a block that is skipped, in turn, and its values after those of the one before.
  __device__ __forceinline__ void skip_keys() {
    if (!skips) return;
    ptx::mbarrier_wait(smem.full_k[stage_k.index], stage_k.parity);
    tile::arrive_warp(smem.empty_k[stage_k.index]);
    stage_k.advance();
    wait_turn();
    pass_turn();
  }
  __device__ __forceinline__ void skip_values() {
    if (!skips) return;
    wait_values();
    release_values();
    skips = false;
  }
};

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    forward_sm90(const __grid_constant__ Params params,
                 const __grid_constant__ Sm90Arguments sm90) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Smem& smem = *reinterpret_cast<Smem*>(shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(sm90.q);
    ptx::prefetch_tensormap(sm90.k);
    ptx::prefetch_tensormap(sm90.v);
    init_barriers(smem);
  }
  smem.sorted.start(params, sm90);
  __syncthreads();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) {
      if constexpr (kReadsCodes)
        CodeWarps<kReadsCodes>::load(smem, sm90);
      else if constexpr (kValueWarps > 0)
        load_one_of_both<kPanelsK>(smem, smem.k, sm90.k, sm90.k_pair, smem.full_k, smem.empty_k,
                                   sm90);
      else
        load_keys_and_values(smem, sm90);
    } else if (warp == 1) {
      schedule_tiles(smem, params, sm90);
    } else if constexpr (kFilterWarps > 0) {
      filter_values(smem, params, sm90, warp - 2);
    } else if constexpr (kValueWarps > 0) {
      if (warp == 2)
        load_one_of_both<kPanelsV>(smem, smem.v, sm90.v, sm90.v_pair, smem.full_v, smem.empty_v,
                                   sm90);
    }
  } else if (kReadsCodes && warp < 4 + kExpandWarps) {
    ptx::setmaxnreg_dec<kExpandRegisters>();
    if constexpr (kReadsCodes) CodeWarps<kReadsCodes>::expand(smem, sm90, warp - 4);
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    Consumer{smem, params, sm90, warpgroup - 1 - kExpandWarps / 4}.run();
  }
}
