// Merges the partial results that mla/decode_sm90.cu, or a kernel for codes, has left for the tiles
// of rows whose keys were split.
//
//   DecodeParams and MlaParams are those of the launch before; grid: (tasks, pieces of their tiles'
//   rows, pieces of kColumns columns). In large calls, whose tiles have few partial results, a warp
//   has a row or a piece of one; in small ones (Config::shared_rows) a block has a piece of a row,
//   and each warp a share of its many partial results. With splits that do not depend on the batch
//   both do the same additions in the same order, all relative to the largest maximum.
#include "mla/partial.cuh"

namespace mla {

using T = Config::dtype;
constexpr int kRows = Config::rows;
constexpr int kLatent = Config::latent;
constexpr int kWarps = Config::threads / 32;
constexpr int kColumns = Config::columns;
constexpr int kVecs = kColumns / 128;  // of four columns, of a lane
// Partial results on their way to a lane. Where a row is in two pieces, two tiles may have those of
// 132 thread blocks, so that a warp's share is up to 9.
constexpr int kOnTheirWay = kVecs == 2 ? 9 : Config::half_parts && kVecs == 4 ? 3 : 16 / kVecs;
using Tile = PartialTile<kRows, kLatent, Config::half_parts>;

// The vector of four columns that a lane has as its i-th, of its block's columns: of float16 two
// that lie side by side.
constexpr bool kPairs = Config::half_parts && kVecs > 1;
__device__ __forceinline__ int vec_of_lane(int lane, int i) {
  if (!kPairs) return lane + 32 * i;
  return Tile::kFragments ? (i / 2 * 8 + lane / 4) * 8 + i % 2 * 4 + lane % 4
                          : (i / 2 * 32 + lane) * 2 + i % 2;
}

struct Smem {
  float4 o[kWarps][kColumns / 4];
  float2 max_sum[kWarps];
};

// The sum of a warp's share, relative to 2^max.
struct Sum {
  float4 o[kVecs] = {};
  float max = tile::negative_infinity(), sum = 0.0f;

  __device__ __forceinline__ void add(const float4 (&other)[kVecs], float factor) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      o[i].x = fmaf(factor, other[i].x, o[i].x);
      o[i].y = fmaf(factor, other[i].y, o[i].y);
      o[i].z = fmaf(factor, other[i].z, o[i].z);
      o[i].w = fmaf(factor, other[i].w, o[i].w);
    }
  }
  __device__ __forceinline__ void move(float new_max) {
    const float factor = ptx::ex2(max - offset(new_max));
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      o[i] = {o[i].x * factor, o[i].y * factor, o[i].z * factor, o[i].w * factor};
    sum *= factor;
    max = new_max;
  }
  // Adds another share relative to the same maximum.
  __device__ __forceinline__ void add(const Sum& share) {
    sum += share.sum;
    add(share.o, 1.0f);
  }
  // What exponents are relative to: nothing where no key has been seen, which then count 0.
  __device__ __forceinline__ static float offset(float max) {
    return max == tile::negative_infinity() ? 0.0f : max;
  }
};

// The largest maximum of a row's partial results. By all lanes of a warp.
__device__ __forceinline__ float largest_max(const Tile* parts, const CombineTask& task, int row) {
  float max = tile::negative_infinity();
  for (int i = threadIdx.x % 32; i < task.count; i += 32)
    max = fmaxf(max, parts[task.slot(i)].max_sum[row].x);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    max = fmaxf(max, __shfl_xor_sync(~0u, max, distance));
  return max;
}

// Of the partial results begin, begin + step, …, relative to 2^max at least.
template <int kBatch>
__device__ __forceinline__ Sum sum_share(const Tile* parts, const CombineTask& task, int row,
                                         int begin, int step, float max) {
  const int lane = threadIdx.x % 32;
  Sum whole;
  whole.max = max;
#pragma unroll 1
  for (int first = begin; first < task.count; first += step * kBatch) {
    alignas(16) Tile::Vec o[kBatch][kVecs];
    float2 max_sum[kBatch];
    float new_max = whole.max;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      // What does not exist is read as the last is, and not added.
      const Tile& part = parts[task.slot(min(first + i * step, task.count - 1))];
      max_sum[i] = part.max_sum[row];
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
        const int vec = blockIdx.z * (kColumns / 4) + vec_of_lane(lane, j);
        if constexpr (!kPairs)
          o[i][j] = part.o[Tile::at(row, vec)];
        else if (j % 2 == 0)
          reinterpret_cast<uint4&>(o[i][j]) =
              reinterpret_cast<const uint4&>(part.o[Tile::at(row, vec)]);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * step >= task.count) max_sum[i] = {tile::negative_infinity(), 0.0f};
      new_max = fmaxf(new_max, max_sum[i].x);
    }
    whole.move(new_max);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float factor = ptx::ex2(max_sum[i].x - Sum::offset(new_max));
      whole.sum = fmaf(factor, max_sum[i].y, whole.sum);
      float4 numbers[kVecs];
#pragma unroll
      for (int j = 0; j < kVecs; ++j) numbers[j] = Tile::numbers(o[i][j]);
      whole.add(numbers, factor);
    }
  }
  return whole;
}

// Writes a lane's vector of a row: four neighbouring columns. Of fragments, which have pairs of
// columns, two lanes exchange one of theirs. By all lanes of a warp, whose vectors lie side by
// side.
__device__ __forceinline__ void put_vec(const DecodeParams& params, const OutputRow& row, int vec,
                                        const float4& o) {
  if (!Tile::kFragments)
    return put_columns<T>(params, row, vec * 4, tile::Vec<float, 4>{o.x, o.y, o.z, o.w});
  const bool odd = vec % 2;
  const float x = __shfl_xor_sync(~0u, odd ? o.x : o.z, 1);
  const float y = __shfl_xor_sync(~0u, odd ? o.y : o.w, 1);
  const int column = vec / 4 * 16 + vec % 2 * 8 + vec % 4 / 2 * 4;
  if (odd)
    put_columns<T>(params, row, column, tile::Vec<float, 4>{x, y, o.z, o.w});
  else
    put_columns<T>(params, row, column, tile::Vec<float, 4>{o.x, o.y, x, y});
}

}  // namespace mla

extern "C" __global__ void __launch_bounds__(Config::threads, mla::kColumns < mla::kLatent ? 2 : 3)
    mla_combine(const __grid_constant__ DecodeParams params,
                const __grid_constant__ MlaParams mla_params) {
  using namespace mla;
  const CombineTask task = mla_params.tasks[blockIdx.x];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = Config::shared_rows ? blockIdx.y : blockIdx.y * kWarps + warp;
  if (task.call_id != mla_params.call_id || row >= task.rows) return;
  // A replay of a CUDA graph may have other tiles than the one before, whose task this then is.
  if (params.cu_seqlens_q != nullptr) {
    const decoding::CachedSequence now = decoding::sequence_at(params, task.sequence);
    if (now.begin_q != task.begin_q || task.row_tile * kRows >= now.seqlen_q * params.group) return;
  }
  decoding::Split split = {};
  split.seq.index = task.sequence;
  split.seq.begin_q = task.begin_q;
  split.head = task.head;
  split.row_tile = task.row_tile;
  const Tile* const parts = static_cast<const Tile*>(mla_params.parts);
  // Up to kWarps partial results a share is a single one, which is summed as it is.
  const bool fixed = params.fixed_splits != 0, in_shares = fixed && task.count > kWarps;
  if constexpr (!Config::shared_rows) {
    const float max = fixed ? largest_max(parts, task, row) : tile::negative_infinity();
    Sum whole;
    if (in_shares) {
#pragma unroll 1
      for (int i = 0; i < kWarps; ++i)  // less at a time: another sum is in registers
        whole.add(sum_share<(kOnTheirWay + 3) / 4>(parts, task, row, i, kWarps, max));
      whole.max = max;
    } else {
      whole = sum_share<kOnTheirWay>(parts, task, row, 0, 1, max);
    }
    const OutputRow result = output_row<T, kRows>(params, split, row, whole.max, whole.sum);
#pragma unroll
    for (int j = 0; j < kVecs; ++j)
      put_vec(params, result,
              (kColumns < kLatent ? blockIdx.z * (kColumns / 4) : 0) + vec_of_lane(lane, j),
              whole.o[j]);
  } else {
    __shared__ Smem smem;
    float max = tile::negative_infinity();
    if (in_shares) max = largest_max(parts, task, row);
    const Sum share = sum_share<kOnTheirWay>(parts, task, row, warp, kWarps, max);
#pragma unroll
    for (int j = 0; j < kVecs; ++j) smem.o[warp][vec_of_lane(lane, j)] = share.o[j];
    if (lane == 0) smem.max_sum[warp] = {share.max, share.sum};
    __syncthreads();
    if (threadIdx.x >= kColumns / 4) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) max = fmaxf(max, smem.max_sum[i].x);
    float4 o = {};
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const float factor = ptx::ex2(smem.max_sum[i].x - Sum::offset(max));
      const float4 other = smem.o[i][threadIdx.x];
      sum = fmaf(factor, smem.max_sum[i].y, sum);
      o = {fmaf(factor, other.x, o.x), fmaf(factor, other.y, o.y), fmaf(factor, other.z, o.z),
           fmaf(factor, other.w, o.w)};
    }
    const OutputRow result = output_row<T, kRows>(params, split, row, max, sum);
    put_vec(params, result, blockIdx.z * (kColumns / 4) + threadIdx.x, o);
  }
}
