// Attention forward on Hopper: out = softmax(scale * Q K^T) V with wgmma, TMA and specialised
// warps.
//
//   q (batch, seqlen_q, heads_q, head_dim), k and v with heads_kv heads, out, or varlen (total,
//   heads, head_dim); float16 or bfloat16; strides of 16 bytes; scale > 0.
//   One block an SM, walking over tiles of 64 * Config::warpgroups queries of one head
//   (attention/work_sm90.cuh). Warpgroup 0 produces (attention/produce_sm90.cuh): warp 0 brings K
//   and V, block after block of keys, through a ring of stages; warp 1 finds tiles and brings their
//   queries; the others guard (kGuards). Warpgroups 1 and on consume: 64 queries each, scores
//   (attention/score_sm90.cuh) and O in registers.
//   A prefix that many sequences share (Config::prefix) is one sequence's keys, in pages: its tiles
//   pack query heads, and parts of the keys have float32 results (attention/prefix_sm90.cuh).
//   701 TFLOP/s at head_dim 128, seqlen 16384 on an H200 (2026-11-21), where cuBLAS reached 682.
//
// A consumer never drains: while P V of one block runs, so does Q K^T of the next, be it of the
// same tile or of the next one, and the next block's exponentials hide behind the products of this
// and of the other consumers.
#include "attention/layout_sm90.cuh"
#include "attention/prefix_sm90.cuh"
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
  const unsigned long long b = ptx::wgmma_descriptor(k, 0, 1024);
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step)
    ptx::Wgmma<kTileN, T>::shared_shared<false, false>(
        s, ptx::wgmma_advance(a, step / 4 * kPanelBytesQ + step % 4 * 32),
        ptx::wgmma_advance(b, step / 4 * kPanelBytesK + step % 4 * 32), step > 0);
  ptx::wgmma_commit_group();
}

// O += P V for a block of keys: issued, not waited for.
__device__ __forceinline__ void multiply_values(float (&o)[kHeadDimV / 2],
                                                const unsigned (&p)[kTileN / 4],
                                                const unsigned char* v) {
  const unsigned long long b = ptx::wgmma_descriptor(v, kPanelBytesK, 1024);
#pragma unroll
  for (int step = 0; step < kTileN / 16; ++step)
    ptx::Wgmma<kHeadDimV, T>::register_shared<true>(
        o, p + 4 * step, ptx::wgmma_advance(b, step * 16 * kRowBytes), true);
  ptx::wgmma_commit_group();
}

// Divides O by the sums of exponentials and writes it and lse. Lanes 2i and 2i + 1 exchange halves,
// so that each writes four columns side by side and a row's writes fill whole 32-byte sectors.
__device__ __forceinline__ void write_output(const float (&o)[kHeadDimV / 2],
                                             const tile::OnlineSoftmax& softmax, float scale_log2,
                                             const ForwardParams& params, const Tile& tile,
                                             int row) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane % 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = tile::quad_sum(softmax.row_sum[i]);
    float max = tile::OnlineSoftmax::offset(softmax.row_max[i], scale_log2);
    if (kBent && sum == 0.0f) max = 0.0f;  // a bound may stand for the maximum of no keys
    float rescale = 1.0f;
    if (params.sinks != nullptr) {
      const float sink = static_cast<const float*>(params.sinks)[tile.head] * tile::kLog2e;
      if (sum == 0.0f) max = fmaxf(sink, -3.402823466e38f);  // no keys: it weighs nothing
      const float larger = fmaxf(max, sink);
      rescale = ptx::ex2(max - larger);
      sum = sum * rescale + ptx::ex2(sink - larger);
      max = larger;
    }
    const float inverse = sum == 0.0f ? 0.0f : rescale * ptx::rcp(sum);
    const bool exists = tile.exists(params, row + 8 * i);
    const long long offset = tile.out_offset(params, row + 8 * i) + lane % 4 * 2;
    if constexpr (Config::prefix) {
      float* const out = static_cast<float*>(params.out) + offset;
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; ++j)
        if (exists && 8 * j < params.head_dim_v)
          *reinterpret_cast<float2*>(out + 8 * j) =
              make_float2(o[4 * j + 2 * i] * inverse, o[4 * j + 2 * i + 1] * inverse);
    } else {
      T* const out = static_cast<T*>(params.out) + offset + (odd ? 6 : 0);
#pragma unroll
      for (int step = 0; step < kHeadDimV / 16; ++step) {
        const unsigned low =
            tile::pack<T>(o[8 * step + 2 * i] * inverse, o[8 * step + 2 * i + 1] * inverse);
        const unsigned high =
            tile::pack<T>(o[8 * step + 2 * i + 4] * inverse, o[8 * step + 2 * i + 5] * inverse);
        const unsigned other = __shfl_xor_sync(~0u, odd ? low : high, 1);
        if (exists && 16 * step + (odd ? 8 : 0) < params.head_dim_v)
          *reinterpret_cast<uint2*>(out + 16 * step) =
              odd ? make_uint2(other, high) : make_uint2(low, other);
      }
    }
    if (exists && params.lse != nullptr && lane % 4 == 0)
      static_cast<float*>(params.lse)[tile.lse_offset(params, row + 8 * i)] =
          (max + ptx::lg2(sum)) * tile::kLn2;
  }
}

// Gives the values of a tile that the guards have replaced by 0 to the outputs of a warp's 16
// queries, of which `row` is the first, where they see them: as many lanes as there are pieces of
// 16 bytes in a row of V go through the keys. Rarely called.
__device__ __forceinline__ void restore_values(const ForwardParams& params, const Tile& tile,
                                               int row) {
  const Tile::Partial guarded = tile.guarded(params);
  const int column = threadIdx.x % 32 * 8;
  __syncwarp();
  if (column >= params.head_dim_v) return;
#pragma unroll 1
  for (int key = tile.block_begin * kTileN; key < min(tile.block_end * kTileN, tile.keys.length);
       ++key) {
    if (!guarded.has(key / kTileN)) continue;
    const uint4 values = *reinterpret_cast<const uint4*>(static_cast<const T*>(params.v) +
                                                         tile.value_offset(params, key) + column);
    if (finite_halves(values.x) == values.x && finite_halves(values.y) == values.y &&
        finite_halves(values.z) == values.z && finite_halves(values.w) == values.w)
      continue;
#pragma unroll 1
    for (int query = row; query < row + 16; ++query) {
      if (!tile.sees(params, query, key)) continue;
      T* const out = static_cast<T*>(params.out) + tile.out_offset(params, query) + column;
#pragma unroll 1
      for (int i = 0; i < 8; ++i) {
        const float value = static_cast<float>(reinterpret_cast<const T*>(&values)[i]);
        if (!isfinite(value)) out[i] = static_cast<T>(static_cast<float>(out[i]) + value);
      }
    }
  }
}

__device__ __forceinline__ void consume(Smem& smem, const ForwardParams& params,
                                        const Sm90Params& sm90, int consumer) {
  // Consumers take turns in issuing products, so that one's exponentials run beside another's
  // products.
  const int turn = 1 + consumer, next_turn = 1 + (consumer + 1) % kWarpgroups;
  const auto wait_turn = [&] { ptx::bar_sync(turn, 256); };
  const auto pass_turn = [&] { ptx::bar_arrive(next_turn, 256); };
  if (consumer == kWarpgroups - 1) pass_turn();

  const int first_row = 64 * consumer + lane_row();
  const int lane_column = threadIdx.x % 4 * 2;
  ScoreRows& rows = score_rows(smem, consumer);
  unsigned rows_parity = 0;
  const float scale_log2 = sm90.scale_log2;
  Ring<kStages> ring_k, ring_v;
  Ring<kSlots> ring_q;
  Ring<TileQueue::kSize> ring;
  Tile::Partial hidden;  // blocks of the tile that call for a mask
  int number = 0;        // of the tile, modulo 2
  float slope = 0.0f;    // ALiBi's
  tile::OnlineSoftmax softmax;
  float s[kTileN / 2], o[kHeadDimV / 2], block_max[2], correction[2];
  unsigned p[kTileN / 4];
  BentScores<kBent> bent(params, sm90);

  const auto clear = [&] {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) o[i] = 0.0f;
  };
  int block, last_block;  // of keys; they are worked on from the last to the first
  bool skips = false;     // one block before the next scores
  // The next tile that has keys.
  const auto find_tile = [&] {
    Tile tile = read_tile(smem, ring);
    while (kGuards > 0 && tile.row >= 0 && tile.empty()) tile = read_tile(smem, ring);
    if (tile.row < 0) return tile;
    if (Config::score && params.alibi_slopes != nullptr)
      slope = ptx::rcp(sm90.score_scale) *
              static_cast<const float*>(
                  params.alibi_slopes)[tile.batch * params.alibi_batch_stride + tile.head];
    hidden = tile.partial(params, tile.row + 64 * consumer, tile.row + 64 * consumer + 63);
    block = tile.block_end;
    last_block = tile.block_begin;
    if (kSkipsBlocks && consumer == kWarpgroups - 1) {
      last_block += tile.hides_first_block(params, consumer);
    } else if (kSkipsBlocks && tile.hides_last_block(params, consumer)) {
      --block;
      skips = true;
    }
    return tile;
  };
  Tile tile = find_tile();
  if (tile.row < 0) return;

  // As soon as the tile's last scores are there, or a step later, which spares a branch a block:
  // with two slots, and where NVRTC 13.0 has the register for it.
  constexpr bool kReleasesLate = kSlots > 1 && !Config::score;
  const auto release_queries = [&] {
    arrive_warp(smem.empty_q[ring_q.index][consumer]);
    ring_q.advance();
  };
  // What becomes of the products of Q and K, before and while exponentials are taken.
  const auto receive_scores = [&](bool fresh) __attribute__((always_inline)) {
    ptx::wgmma_keep(s);
    arrive_warp(smem.empty_k[ring_k.index]);
    ring_k.advance();
    if (!kReleasesLate && block == last_block) release_queries();
    const int row = tile.row + first_row, column = block * kTileN + lane_column;
    if constexpr (Config::score) {
      const float distance = static_cast<float>(row + tile.diagonal() - column);
      if (bent.bend(s, distance)) return;
      if (kBent || sm90.cap_scale != 0.0f || slope != 0.0f)
        bend_scores(s, sm90.cap_scale, slope, distance);
    }
    if constexpr (Config::elementwise) {
      ptx::mbarrier_wait(rows.full, rows_parity);
      rows_parity ^= 1;
      add_score_rows(s, rows, params, sm90.score_scale);
      arrive_warp(rows.empty);
    }
    if ((fresh || Config::bound_right || Config::bound_left) && hidden.has(block)) {
      if (block >= hidden.from) hide_later_keys(s, params, tile, row, column);
      if (Config::bound_left && block < hidden.before)
        hide_earlier_keys(s, params, tile, row, column);
    }
  };
  const auto await_values = [&] {
    ptx::mbarrier_wait((kGuards > 0 ? smem.checked_v : smem.full_v)[ring_v.index], ring_v.parity);
  };
  const auto release_values = [&] {
    arrive_warp(smem.empty_v[ring_v.index]);
    ring_v.advance();
  };
  // Whether guards have replaced values of the tile; to be asked before its last ones are released.
  const auto was_cleaned = [&] {
    if (kGuards == 0) return false;
    const bool cleaned = smem.cleaned[number][0] || smem.cleaned[number][1];
    number ^= 1;
    return cleaned;
  };
  const auto finish = [&](const tile::OnlineSoftmax& softmax, const Tile& tile, bool cleaned) {
    write_output(o, softmax, scale_log2, params, tile, tile.row + first_row);
    if (cleaned) restore_values(params, tile, tile.row + first_row - threadIdx.x % 32 / 4);
  };

  // The keys of a block that is skipped, in turn, and its values after those of the one before.
  const auto skip_keys = [&] {
    if (!skips) return;
    ptx::mbarrier_wait(smem.full_k[ring_k.index], ring_k.parity);
    arrive_warp(smem.empty_k[ring_k.index]);
    ring_k.advance();
    wait_turn();
    pass_turn();
  };
  const auto skip_values = [&] {
    if (!skips) return;
    await_values();
    release_values();
    skips = false;
  };

  // The first scores, with nothing beside them. They are a turn, as another consumer may skip the
  // block, and as consumers then start apart (2% of plain calls at head_dim 64); with bias or mask
  // they are none, which saves the register that NVRTC 13.5 would spill.
  constexpr bool kFirstTurn = !Config::elementwise;
  skip_keys();
  skip_values();
  --block;
  ptx::mbarrier_wait(smem.full_q[0][consumer], 0);
  ptx::mbarrier_wait(smem.full_k[ring_k.index], ring_k.parity);
  if (kFirstTurn) wait_turn();
  ptx::wgmma_keep(s);
  ptx::wgmma_fence();
  multiply_keys(s, smem.q[0][consumer], smem.k[ring_k.index]);
  if (kFirstTurn) pass_turn();
  ptx::wgmma_wait_group<0>();
  receive_scores(true);
  bent.update(softmax, s, scale_log2, correction);
  tile::pack_fragment<T>(p, s);
  clear();

  // The scores of the next block beside the values of the one before.
  const auto step = [&](bool fresh, const Tile& finished) __attribute__((always_inline)) {
    --block;
    ptx::mbarrier_wait(smem.full_k[ring_k.index], ring_k.parity);
    await_values();
    wait_turn();
    ptx::wgmma_keep(s);
    ptx::wgmma_keep(o);
    ptx::wgmma_fence();
    multiply_keys(s, smem.q[ring_q.index][consumer], smem.k[ring_k.index]);
    multiply_values(o, p, smem.v[ring_v.index]);
    if (!kKeepsTurn) pass_turn();
    // A tile's first block is computed as a block's very first is: who comes before changes no bit.
    bent.expect(tile.row + 64 * consumer + tile.diagonal() - block * kTileN,
                fresh || hidden.has(block), slope);
    ptx::wgmma_wait_group<1>();
    if (kKeepsTurn) pass_turn();
    receive_scores(fresh);
    const tile::OnlineSoftmax before = softmax;
    if (fresh) {
      softmax = tile::OnlineSoftmax();
      bent.start(softmax);
    }
    const bool grown = bent.outgrown(softmax, s, scale_log2, block_max);
    if (grown) bent.raise(softmax, block_max, scale_log2, correction);
    // Exponentials wait for P V: the tensor cores have the other consumers' products by now, and
    // the packing of P into the registers that P V reads hides behind the exponentials (5% faster
    // than exponentials first, on an H200).
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_keep(o);
    const bool cleaned = fresh && was_cleaned();
    release_values();
    if (fresh) {
      skip_values();
      finish(before, finished, cleaned);
      clear();
    } else if (grown) {
      tile::scale_rows(o, correction);
    }
    bent.exponentiate(softmax, s, scale_log2);
    tile::pack_fragment<T>(p, s);
  };
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
    ptx::mbarrier_wait(smem.full_q[ring_q.index][consumer], ring_q.parity);
    step(true, finished);
  }

  await_values();
  ptx::wgmma_keep(o);
  ptx::wgmma_fence();
  multiply_values(o, p, smem.v[ring_v.index]);
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_keep(o);
  const bool cleaned = was_cleaned();
  release_values();
  finish(softmax, tile, cleaned);
}

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    forward_sm90(const __grid_constant__ ForwardParams params,
                 const __grid_constant__ Sm90Params sm90) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Smem& smem = *reinterpret_cast<Smem*>(shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(sm90.q);
    ptx::prefetch_tensormap(sm90.k);
    ptx::prefetch_tensormap(sm90.v);
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(smem.full_k[i], 1);
      ptx::mbarrier_init(smem.full_v[i], 1);
      ptx::mbarrier_init(smem.empty_k[i], 4 * kWarpgroups);
      ptx::mbarrier_init(smem.empty_v[i], 4 * kWarpgroups + kGuards);
      if (kGuards > 0) ptx::mbarrier_init(smem.checked_v[i], kGuards);
    }
    for (int i = 0; i < kSlots * kWarpgroups; ++i) {
      ptx::mbarrier_init(smem.full_q[i / kWarpgroups][i % kWarpgroups], 1);
      ptx::mbarrier_init(smem.empty_q[i / kWarpgroups][i % kWarpgroups], 4);
    }
    for (int i = 0; i < kScoreRows; ++i) {
      ptx::mbarrier_init(score_rows(smem, i).full, 32);
      ptx::mbarrier_init(score_rows(smem, i).empty, 4);
    }
    for (int i = 0; i < TileQueue::kSize; ++i) {
      ptx::mbarrier_init(smem.queue.full[i], 1);
      ptx::mbarrier_init(smem.queue.empty[i], 4 * kWarpgroups + 1 + kGuards + Config::prefix);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if constexpr (Config::prefix) {
      produce_prefix(smem, params, sm90, warp);
    } else if (warp == 0) {
      load_keys_and_values(smem, sm90);
    } else if (warp == 1) {
      load_queries(smem, params, sm90);
    } else if (kGuards > 0) {
      guard_values(smem, params, sm90, warp - 2);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume(smem, params, sm90, warpgroup - 1);
  }
}
