// What the passes of the backward kernels need of each row, and gradients that are sums over rows:
// small kernels.
//
//   delta_simt        delta = sum(dout * out) - dlse, of lse's shape: eight lanes a row. 0 in rows
//                     that belong to no sequence, whatever lies there.
//   clear_dq_simt     dq = 0, for gradients/backward_fused_simt.cu: a thread an element.
//   sinks_simt        dsinks = -sum(exp(sink - lse) * delta) over a head's rows: a block a head.
//   alibi_simt        dalibi, from what the blocks of the dq pass found: a block for each slope.
//
// Every sum has one order: the same bits in every run.
#include "attention/slab_simt.cuh"
#include "gradients/params.cuh"
#include "tile/ragged.cuh"

constexpr int kWarps = Config::threads / 32;
constexpr int kDeltaLanes = 8;  // of delta_simt, for each row
constexpr int kPacked16 = 16 / sizeof(T);
using Packed16 = tile::Vec<T, kPacked16>;

// a / b of numbers that are not negative; of short ones in few instructions.
__device__ __forceinline__ long long quotient(long long a, int b) {
  return a >> 32 == 0 ? static_cast<unsigned>(a) / static_cast<unsigned>(b) : a / b;
}

// Where the rows of sequences end in a ragged array; else its length.
__device__ __forceinline__ int end_of_rows(const ForwardParams& params) {
  return params.cu_seqlens_q == nullptr
             ? params.seqlen_q
             : tile::clamped(params.cu_seqlens_q[params.batch], 0, params.seqlen_q);
}

template <class Number>
__device__ __forceinline__ Number warp_sum(Number x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

// Over the block; thread 0 has the result.
__device__ __forceinline__ double block_sum(double x) {
  __shared__ double sums[kWarps];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp];
  return sum;
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    delta_simt(const __grid_constant__ ForwardParams params,
               const __grid_constant__ BackwardParams backward) {
  // Heads go fastest: neighbouring warps read neighbouring memory.
  const bool ragged = params.cu_seqlens_q != nullptr;
  const int lane = threadIdx.x % kDeltaLanes;
  const long long number = static_cast<long long>(blockIdx.x) * (Config::threads / kDeltaLanes) +
                           threadIdx.x / kDeltaLanes;
  const long long row = quotient(number, params.heads_q);  // of all sequences
  const int head = static_cast<int>(number - row * params.heads_q);
  const int batch = ragged ? 0 : static_cast<int>(quotient(row, params.seqlen_q));
  const int query = static_cast<int>(row - static_cast<long long>(batch) * params.seqlen_q);
  if (row >= static_cast<long long>(ragged ? 1 : params.batch) * params.seqlen_q) return;

  const T* out = static_cast<const T*>(params.out) + batch * params.out_stride.batch +
                 query * params.out_stride.seq + head * params.out_stride.head;
  const T* dout = static_cast<const T*>(backward.dout) + batch * backward.dout_stride.batch +
                  query * backward.dout_stride.seq + head * backward.dout_stride.head;
  // Whole vectors where they are aligned; the order of the sum is the same where they are not.
  const bool aligned =
      (reinterpret_cast<size_t>(out) | reinterpret_cast<size_t>(dout)) % sizeof(Packed16) == 0 &&
      params.head_dim_v % kPacked16 == 0;
  Acc sum = 0;
  for (int d = lane * kPacked16; d < params.head_dim_v; d += kDeltaLanes * kPacked16) {
    Packed16 a, b;
    if (aligned) {
      a = *reinterpret_cast<const Packed16*>(out + d);
      b = *reinterpret_cast<const Packed16*>(dout + d);
    } else {
      for (int e = 0; e < kPacked16; ++e) {
        const bool inside = d + e < params.head_dim_v;
        a.x[e] = inside ? out[d + e] : static_cast<T>(0.0f);
        b.x[e] = inside ? dout[d + e] : static_cast<T>(0.0f);
      }
    }
#pragma unroll
    for (int e = 0; e < kPacked16; ++e)
      sum = fma(static_cast<Acc>(a.x[e]), static_cast<Acc>(b.x[e]), sum);
  }
  const unsigned lanes = ((1u << kDeltaLanes) - 1) << (threadIdx.x % 32 - lane);  // of the row
#pragma unroll
  for (int distance = kDeltaLanes / 2; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(lanes, sum, distance);
  if (lane != 0) return;
  const long long at =
      (static_cast<long long>(batch) * params.heads_q + head) * params.seqlen_q + query;
  if (backward.dlse != nullptr) sum -= static_cast<const Acc*>(backward.dlse)[at];
  static_cast<Acc*>(backward.delta)[at] = query < end_of_rows(params) ? sum : 0;
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    clear_dq_simt(const __grid_constant__ ForwardParams params,
                  const __grid_constant__ BackwardParams backward) {
  const long long batch = params.cu_seqlens_q != nullptr ? 1 : params.batch;
  const long long i = static_cast<long long>(blockIdx.x) * Config::threads + threadIdx.x;
  if (i < batch * params.seqlen_q * params.heads_q * params.head_dim)
    static_cast<T*>(backward.dq)[i] = 0;
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    sinks_simt(const __grid_constant__ ForwardParams params,
               const __grid_constant__ BackwardParams backward) {
  const int head = blockIdx.x;
  const int batches = params.cu_seqlens_q != nullptr ? 1 : params.batch;
  const int end = end_of_rows(params);
  const Acc sink = static_cast<const Acc*>(params.sinks)[head];
  double sum = 0;
  for (int batch = 0; batch < batches; ++batch) {
    const long long begin =
        (static_cast<long long>(batch) * params.heads_q + head) * params.seqlen_q;
    for (int i = threadIdx.x; i < end; i += Config::threads) {
      const Acc lse = static_cast<const Acc*>(params.lse)[begin + i];
      const Acc p = lse == tile::negative_infinity<Acc>() ? 0 : exp(sink - lse);
      if (p != 0)
        sum -= static_cast<double>(p) * static_cast<const Acc*>(backward.delta)[begin + i];
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) static_cast<Acc*>(backward.dsinks)[head] = static_cast<Acc>(sum);
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    alibi_simt(const __grid_constant__ ForwardParams params,
               const __grid_constant__ BackwardParams backward) {
  const int head = blockIdx.x % params.heads_q;
  const int slots = backward.alibi_slots;
  const bool ragged = params.cu_seqlens_q != nullptr;
  // A slope is a sequence's own, or that of all.
  const int batch = backward.alibi_batched ? blockIdx.x / params.heads_q : 0;
  const int end_batch = backward.alibi_batched ? batch + 1 : params.batch;
  double sum = 0;
  if (ragged) {
    // The dq pass gives sequence b the slots from cu_seqlens_q[b] / tile_m + b on.
    const int* cu = params.cu_seqlens_q;
    const int total = params.seqlen_q;
    const int begin = tile::clamped(cu[batch], 0, total) / backward.alibi_tile + batch;
    const int end =
        min(tile::clamped(cu[end_batch], 0, total) / backward.alibi_tile + end_batch, slots);
    for (int i = begin + threadIdx.x; i < end; i += Config::threads)
      sum += backward.alibi_parts[static_cast<long long>(head) * slots + i];
  } else {
    for (int b = batch; b < end_batch; ++b)
      for (int i = threadIdx.x; i < slots; i += Config::threads)
        sum +=
            backward.alibi_parts[(static_cast<long long>(b) * params.heads_q + head) * slots + i];
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) static_cast<Acc*>(backward.dalibi)[blockIdx.x] = static_cast<Acc>(sum);
}
