// What goes before and after gradients/backward_sm90.cu: 64 rows of queries of a head a thread
// block.
//
//   prepare_sm90      delta = sum(dout * out) - dlse of each row, the starts of S and dP that
//                     follow from it (over dropout's scale) and from lse, and zeros: as sums of dq
//                     (Config::sums) or for none of them begun, as counter of tiles, and for
//                     nothing that is not finite.
//   finish_sm90       dq = scale * sums.
//
// Rows that a sequence's last 128 rows of statistics are padded with start at 0: their q and dout
// are zeros, and so is what they add to any gradient.
#include "gradients/layout_sm90.cuh"
#include "gradients/write_sm90.cuh"

// Columns of dq's sums, and how they are cut.
constexpr int kSums = Config::sums == 0 ? kDim : Config::sums;
constexpr int kPartColumns = part_columns(kSums);
constexpr int kParts = kSums / kPartColumns;

using Params = tile::ParamsOf<BackwardParams, Config::dropout>::Type;

// 64 rows of queries of a sequence.
struct Rows {
  int batch, head, first_row, seqlen_q;
  long long row_q;       // of the sequence's first query in arrays of rows
  long long statistics;  // row of statistics of the first of the 64
};

// False where there is nothing to do. The same for all threads; whole warps together.
__device__ __forceinline__ bool find_rows(Rows& rows, const ForwardParams& params,
                                          const Sm90BackwardParams& sm90) {
  // Heads go fastest: neighbouring blocks read and write neighbouring memory. From the last rows to
  // the first: what this kernel touched last, or the pass before it, is still in L2.
  const int number = gridDim.x - 1 - blockIdx.x, slot = number / params.heads_q;
  rows.head = number % params.heads_q;
  if constexpr (Config::varlen) {
    const tile::Sequence found = tile::varlen_sequence<kStatisticsPad>(params, slot / 2);
    if (found.tile < 0) return false;
    rows.batch = found.index;
    rows.first_row = found.tile * kStatisticsPad + slot % 2 * 64;
    rows.seqlen_q = found.seqlen_q;
    rows.row_q = found.begin_q;
    const int first =
        (static_cast<int>(found.begin_q) / kStatisticsPad + found.index) * kStatisticsPad;
    rows.statistics = statistics_row(params, sm90, found.index, rows.head, first + rows.first_row);
  } else {
    rows.batch = gridDim.z * gridDim.y - 1 - (blockIdx.z * gridDim.y + blockIdx.y);
    if (rows.batch >= params.batch) return false;
    rows.first_row = slot * 64;
    rows.seqlen_q = params.seqlen_q;
    rows.row_q = static_cast<long long>(rows.batch) * params.seqlen_q;
    rows.statistics = statistics_row(params, sm90, rows.batch, rows.head, rows.first_row);
  }
  return true;
}

// 16 bytes of a row in float, or zeros.
struct Chunk {
  uint4 words = make_uint4(0, 0, 0, 0);
  __device__ __forceinline__ float operator[](int i) const {
    return static_cast<float>(reinterpret_cast<const T*>(&words)[i]);
  }
};

constexpr int kLanes = kDim / 8;  // of a row of out
constexpr int kRowsAtOnce = Config::threads / kLanes;
constexpr int kRowsEach = 2;  // that a thread reads at a time
static_assert(64 % (kRowsAtOnce * kRowsEach) == 0, "every thread has as many rows");

extern "C" __global__ void __launch_bounds__(Config::threads, 1024 / Config::threads)
    prepare_sm90(const __grid_constant__ ForwardParams params,
                 const __grid_constant__ Params backward,
                 const __grid_constant__ Sm90BackwardParams sm90) {
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) {
    *backward.nonfinite = 0;
    *sm90.next_tile = 0;
  }
  Rows rows;
  if (!find_rows(rows, params, sm90)) return;

  if (Config::sums && sm90.opened != nullptr) {
    if (threadIdx.x < kParts) sm90.opened[rows.statistics / 64 * kParts + threadIdx.x] = kUnopened;
  } else if (Config::sums) {
    float4* const sums = reinterpret_cast<float4*>(sm90.dq_sums + rows.statistics * kSums);
#pragma unroll
    for (int i = 0; i < 16 * kSums; i += Config::threads)
      sums[i + threadIdx.x] = make_float4(0, 0, 0, 0);
  }

  const int lane = threadIdx.x % kLanes;
  const bool ragged = Config::varlen;
  const T* const out = static_cast<const T*>(params.out) +
                       (ragged ? 0 : rows.batch * params.out_stride.batch) +
                       rows.head * params.out_stride.head + lane * 8;
  const T* const dout = static_cast<const T*>(backward.dout) +
                        (ragged ? 0 : rows.batch * backward.dout_stride.batch) +
                        rows.head * backward.dout_stride.head + lane * 8;
  const long long head =
      ragged ? rows.head : static_cast<long long>(rows.batch) * params.heads_q + rows.head;
#pragma unroll 1
  for (int first = 0; first < 64; first += kRowsEach * kRowsAtOnce) {
    Chunk o[kRowsEach], d[kRowsEach];
    float lse_of[kRowsEach], dlse_of[kRowsEach];  // asked for with the rows, not after their sums
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int query = rows.first_row + first + i * kRowsAtOnce + threadIdx.x / kLanes;
      const long long row = (ragged ? rows.row_q : 0) + query;
      if (query < rows.seqlen_q && lane * 8 < params.head_dim_v) {
        o[i].words = *reinterpret_cast<const uint4*>(out + row * params.out_stride.seq);
        d[i].words = *reinterpret_cast<const uint4*>(dout + row * backward.dout_stride.seq);
      }
      lse_of[i] = dlse_of[i] = 0.0f;
      if (query < rows.seqlen_q && lane == 0) {
        const long long at = head * params.seqlen_q + row;
        lse_of[i] = static_cast<const float*>(params.lse)[at];
        if (backward.dlse != nullptr) dlse_of[i] = static_cast<const float*>(backward.dlse)[at];
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int e = 0; e < 8; ++e) sum = fmaf(o[i][e], d[i][e], sum);
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(~0u, sum, distance);
      if (lane != 0) continue;
      const int in_tile = first + i * kRowsAtOnce + threadIdx.x / kLanes;
      const int query = rows.first_row + in_tile;
      float score_start = 0.0f;
      if (query < rows.seqlen_q) {
        sum -= dlse_of[i];
        static_cast<float*>(
            backward.delta)[head * params.seqlen_q + (ragged ? rows.row_q : 0) + query] = sum;
        const float lse = lse_of[i];
        // In a row that sees no key, every p is to be 0.
        score_start =
            lse == tile::negative_infinity() ? lse : lse * (-tile::kLog2e / sm90.scale_log2);
      }
      sm90.score_start[rows.statistics + in_tile] = score_start;
      if constexpr (Config::dropout) sum /= static_cast<float>(tile::dropout_of(backward).scale);
      sm90.dp_start[rows.statistics + in_tile] = -sum;
    }
  }
}

// Scales a thread's sums of kColumns columns of dq, from `column` on, and writes them. Returns 0,
// or NaN where a value is not finite.
template <int kColumns>
__device__ __forceinline__ float finish_columns(const float4* sums, bool is_open,
                                                const ForwardParams& params, T* dq, int column,
                                                int rows) {
  float x[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    float4 four = sums[128 * i];
    if (!is_open) four = make_float4(0, 0, 0, 0);
    x[4 * i] = four.x;
    x[4 * i + 1] = four.y;
    x[4 * i + 2] = four.z;
    x[4 * i + 3] = four.w;
  }
  return write_gradient<T, kColumns>(x, static_cast<float>(params.scale), dq + column,
                                     static_cast<long long>(params.heads_q) * params.head_dim, rows,
                                     params.head_dim - column);
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    finish_sm90(const __grid_constant__ ForwardParams params,
                const __grid_constant__ BackwardParams backward,
                const __grid_constant__ Sm90BackwardParams sm90) {
  Rows rows;
  if (!find_rows(rows, params, sm90)) return;
  // A warpgroup has a part, in the order of its accumulators.
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int query = rows.first_row + thread / 32 * 16 + tile::lane_row(threadIdx.x % 32);
  T* const dq = static_cast<T*>(backward.dq) +
                ((rows.row_q + query) * params.heads_q + rows.head) * params.head_dim;
  float zeros = 0.0f;
#pragma unroll
  for (int part = warpgroup; part < kParts; part += Config::threads / 128) {
    const float4* const sums =
        reinterpret_cast<const float4*>(sm90.dq_sums + rows.statistics * kSums) +
        part * (16 * kPartColumns) + thread;
    const bool is_open =
        sm90.opened == nullptr || sm90.opened[rows.statistics / 64 * kParts + part] == kOpen;
    zeros += finish_columns<64>(sums, is_open, params, dq, 64 * part, rows.seqlen_q - query);
    if constexpr (kPartColumns > 64)
      zeros += finish_columns<kPartColumns - 64>(sums + 8 * 128, is_open, params, dq,
                                                 64 * kParts + (kPartColumns - 64) * part,
                                                 rows.seqlen_q - query);
  }
  if (zeros != 0.0f) *backward.nonfinite = 1;
}
