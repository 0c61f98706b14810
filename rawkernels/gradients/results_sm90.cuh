// How consumers of gradients/backward_sm90.cu hand dk and dv of a tile over to TMA.
#pragma once

#include "gradients/produce_sm90.cuh"
#include "gradients/write_sm90.cuh"
#include "ptx/tma.cuh"

// Puts a consumer's dk and dv, scaled, where parts of dq wait for the warp that adds them, which
// has TMA write these: a stage each, or at head_dim 64 one for both. In one ring a stage is always
// of the same consumer: who waits until it is empty has filled it before. Returns 0, or NaN where a
// value is not finite.
__device__ __forceinline__ float send_results(Smem& smem, int consumer,
                                              tile::PipelineState<kStagesDq>& stage,
                                              const float (&dk)[kDim / 2], float scale_of_dk,
                                              const float (&dv)[kDim / 2], float scale_of_dv) {
  const int ring = kOneRing ? 0 : consumer;
  float zeros = 0.0f;
#pragma unroll
  for (int n = 0; n < kPanels; ++n) {
    const int now = kOneRing ? consumer : stage.index;
    const bool around = now < stage.index;
    float* const place = smem.dq[ring][now];
    ptx::mbarrier_wait(smem.empty_dq[ring][now], stage.parity ^ 1 ^ around);
    if (kPanels == 1 || n == 0) zeros += stage_gradient<T, kDim>(dv, scale_of_dv, place);
    if (kPanels == 1 || n == 1)
      zeros += stage_gradient<T, kDim>(dk, scale_of_dk, place + (2 - kPanels) * kPartFloats / 2);
    ptx::fence_proxy_async();
    tile::arrive_warp(smem.full_dq[ring][now]);
#pragma unroll
    for (int i = 0; i < (kOneRing ? kConsumers : 1); ++i) stage.advance();
  }
  return zeros;
}
