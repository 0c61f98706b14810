// Dropout of attention/forward_sm90.cu. Philox takes about as many instructions as the rest of a
// consumer's work, and consumers are latency-bound: so warps of their own compute, ahead of the
// consumers, which pairs of probabilities are dropped. All that a consumer does is to load a mask
// and to clear bits of P.
#pragma once

#include "attention/produce_sm90.cuh"
#include "tile/fragment.cuh"

// One warp of the dropout warpgroup: it computes the mask of the 16 rows of the same warp of every
// consumer, block after block of keys, of those that the consumer does not skip.
__device__ __forceinline__ void compute_dropout(Smem& smem, const Params& params, int warp) {
  static_assert(!Config::dropout || kTileN % 32 == 0, "blocks of the mask are computed in pairs");
  const int lane = threadIdx.x % 32;
  const DropoutParams dropout = tile::dropout_of(params);
  tile::PipelineState<TileQueue::kSize> queue;
  tile::PipelineState<1> stage[kWarpgroups];
  for (Tile tile = read_tile(smem, queue); tile.row >= 0; tile = read_tile(smem, queue)) {
    if (tile.empty()) continue;
    const int head = tile.batch * params.heads_q + tile.head;
    int begin[kWarpgroups], end[kWarpgroups];
#pragma unroll
    for (int consumer = 0; consumer < kWarpgroups; ++consumer) {
      const bool is_last = consumer == kWarpgroups - 1;
      begin[consumer] =
          tile.block_begin + (kSkipsBlocks && is_last && tile.hides_first_block(params, consumer));
      end[consumer] =
          tile.block_end - (kSkipsBlocks && !is_last && tile.hides_last_block(params, consumer));
    }
    for (int block = tile.block_end - 1; block >= tile.block_begin; --block) {
#pragma unroll
      for (int consumer = 0; consumer < kWarpgroups; ++consumer) {
        if (block < begin[consumer] || block >= end[consumer]) continue;
        DropoutMask& mask = dropout_mask(smem, consumer);
        const tile::DropoutRow row(dropout.seed, (tile.row + 64 * consumer) / 16 + warp, lane,
                                   head);
        ptx::mbarrier_wait(mask.empty, stage[consumer].parity ^ 1);
#pragma unroll
        for (int step = 0; step < kTileN / 16; step += 2) {
          uint4 words[2];
          row.bits(words, dropout.seed, block * (kTileN / 16) + step);
#pragma unroll
          for (int n = 0; n < 2; ++n)
            mask.dropped[warp][step + n][lane] = tile::dropped_pairs(words[n], dropout.threshold);
        }
        tile::arrive_warp(mask.full);
        stage[consumer].advance();
      }
    }
  }
}

// What of a lane's P is dropped, four registers of P at a time.
using DroppedPairs = uint4[kTileN / 16];

__device__ __forceinline__ void load_dropped(DroppedPairs& dropped, const DropoutMask& mask) {
#pragma unroll
  for (int step = 0; step < kTileN / 16; ++step)
    dropped[step] = mask.dropped[threadIdx.x % 128 / 32][step][threadIdx.x % 32];
}

// Clears what is dropped in P; the sums of exponentials have it.
__device__ __forceinline__ void clear_dropped(unsigned (&p)[kTileN / 4],
                                              const DroppedPairs& dropped) {
  if constexpr (Config::dropout) {
#pragma unroll
    for (int step = 0; step < kTileN / 16; ++step) {
      p[4 * step] &= ~dropped[step].x;
      p[4 * step + 1] &= ~dropped[step].y;
      p[4 * step + 2] &= ~dropped[step].z;
      p[4 * step + 3] &= ~dropped[step].w;
    }
  }
}
