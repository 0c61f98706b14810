// What goes before and after a pass of gradients/backward_sm80.cu that adds up dq in memory.
//
//   clear_sums_sm80    dq_sums = 0, and nothing is known to be not finite.
//   finish_sums_sm80   dq = dq_sums, rounded, eight elements a thread.
//
// Both are as long as q, whose rows are whole chunks of eight elements.
#include "gradients/params.cuh"
#include "tile/softmax.cuh"

using T = Config::dtype;

// The chunk of eight elements that this thread has, of `count`.
__device__ __forceinline__ long long chunk_of_thread(const ForwardParams& params,
                                                     long long& count) {
  const long long batch = params.cu_seqlens_q != nullptr ? 1 : params.batch;
  count = batch * params.seqlen_q * params.heads_q * (params.head_dim / 8);
  return static_cast<long long>(blockIdx.x) * Config::threads + threadIdx.x;
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    clear_sums_sm80(const __grid_constant__ ForwardParams params,
                    const __grid_constant__ BackwardParams backward) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *backward.nonfinite = 0;
  long long count;
  const long long chunk = chunk_of_thread(params, count);
  if (chunk >= count) return;
  float4* const sums = reinterpret_cast<float4*>(backward.dq_sums) + 2 * chunk;
  sums[0] = sums[1] = make_float4(0, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    finish_sums_sm80(const __grid_constant__ ForwardParams params,
                     const __grid_constant__ BackwardParams backward) {
  long long count;
  const long long chunk = chunk_of_thread(params, count);
  if (chunk >= count) return;
  const float4* const sums = reinterpret_cast<const float4*>(backward.dq_sums) + 2 * chunk;
  const float4 a = sums[0], b = sums[1];
  const float zeros = a.x * 0.0f + a.y * 0.0f + a.z * 0.0f + a.w * 0.0f + b.x * 0.0f + b.y * 0.0f +
                      b.z * 0.0f + b.w * 0.0f;
  if (zeros != 0.0f) *backward.nonfinite = 1;
  reinterpret_cast<uint4*>(backward.dq)[chunk] =
      make_uint4(tile::pack<T>(a.x, a.y), tile::pack<T>(a.z, a.w), tile::pack<T>(b.x, b.y),
                 tile::pack<T>(b.z, b.w));
}
