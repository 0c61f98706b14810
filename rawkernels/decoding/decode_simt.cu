// Decoding in plain CUDA C++: every call of the contract, on any architecture. The kernel to read
// first.
//
//   q, out (batch, seqlen_q, heads_q, head_dim) or (total, heads_q, head_dim); caches contiguous or
//   in pages, any strides; float16, bfloat16, float32, float64; head_dims up to kHeadDim.
//   DecodeParams has the rest. Keys and values may be codes of any format (Config::quantized),
//   which become numbers as they are read. Arithmetic is in float, or double for float64. A tile's
//   rows are kRows pairs of a query token and one of the query heads that share a key head. The
//   warps of a block take keys in turn, kBatch at a time, a row of K and V spread over a warp's
//   lanes; each warp keeps the running maximum, sum and O of every row (online softmax), and the
//   block merges its warps' results at the end of a split (schedule.cuh).
#include "decoding/rows_simt.cuh"
#include "kvcache/stored.cuh"
#include "tile/operands.cuh"

using T = Config::dtype;
using Acc = tile::Accumulator<T>;
constexpr int kHeadDim = Config::head_dim;
constexpr int kRows = Config::rows;
constexpr int kWarps = Config::threads / 32;
constexpr int kTileKeys = 64;  // the fewest of a block of keys
// Keys on their way at a time: fewer where codes take instructions and registers to expand.
constexpr int kRowBytes = kHeadDim * sizeof(Acc);
constexpr int kPlainBatch = kRowBytes < 2048 ? 4 : kRowBytes < 4096 ? 2 : 1;
constexpr int kDivisor = Config::quantized ? (Config::elementwise ? 4 : 2) : 1;
constexpr int kBatch = kPlainBatch > kDivisor ? kPlainBatch / kDivisor : 1;
constexpr int kLaneDims = kHeadDim / 32;  // lane l has columns l, l + 32, …

using Schedule = decoding::Schedule<kRows, kTileKeys>;
using Writer = decoding::Writer<T, kRows, kHeadDim, false, 1>;

static_assert(kHeadDim % 32 == 0, "lanes must share a row evenly");

struct Smem {
  decoding::WarpResults<Acc, kWarps, kRows, kHeadDim> results;
  decoding::LastMerge last;
};
static_assert(sizeof(Smem) <= 48 * 1024, "static shared memory that every architecture has");

// A warp's share of a split.
struct Slice {
  Acc q[kRows][kLaneDims];
  decoding::WarpRows<Acc, kRows, kLaneDims, Config::elementwise> rows;
  tile::Range visible[kRows];
  tile::ScoreRow<Acc> score_row[kRows];

  __device__ __forceinline__ Slice(const DecodeParams& params, const decoding::Split& split) {
    const ScoreMod<T, false, false> score_mod = {score_inputs(params)};
    const int group = params.group, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // Rows that do not exist do as the last one does.
      const int index = min(split.row_tile * kRows + r, split.seq.seqlen_q * group - 1);
      const int token = divided_by_group(params, index);
      const int head = split.head * group + index - token * group;
      const T* source = static_cast<const T*>(params.q) + split.seq.index * params.q_stride.batch +
                        (split.seq.begin_q + token) * params.q_stride.seq +
                        head * params.q_stride.head;
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i)
        q[r][i] = lane + 32 * i < params.head_dim ? static_cast<Acc>(source[lane + 32 * i]) : 0;
      visible[r] = visible_keys(params, split.seq, token);
      const int position = split.seq.seqlen_k - split.seq.seqlen_q + token;
      score_row[r] = {split.seq.index, head, token, position,
                      score_mod.slope(split.seq.index, head)};
    }
  }

  // Adds keys first … first + kBatch - 1, as far as they come before `end`.
  __device__ __forceinline__ void attend(const DecodeParams& params, const ScoreParams& scores,
                                         int first, int end, const Acc (&k)[kBatch][kLaneDims],
                                         const Acc (&v)[kBatch][kLaneDims]) {
    const tile::ScoreInputs inputs =
        Config::elementwise ? score_inputs(params, scores) : score_inputs(params);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const ScoreMod<T, false, false> score_mod = {
          Config::elementwise ? inputs.of_head<T>(score_row[r].batch, score_row[r].head) : inputs};
      Acc s[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int key = first + j;
        s[j] = 0;
#pragma unroll
        for (int i = 0; i < kLaneDims; ++i) s[j] = fma(q[r][i], k[j][i], s[j]);
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
          s[j] += __shfl_xor_sync(~0u, s[j], distance);
        score_mod.terms([&](const auto& term) { s[j] = term(s[j], score_row[r], key); });
        if (key < visible[r].begin || key >= min(visible[r].end, end))
          s[j] = tile::negative_infinity<Acc>();
      }
      rows.add(r, s, v);
    }
  }
};

// A row of K or V, spread over the warp.
__device__ __forceinline__ void load_row(Acc (&row)[kLaneDims], const T* source, int dims) {
#pragma unroll
  for (int i = 0; i < kLaneDims; ++i) {
    const int column = threadIdx.x % 32 + 32 * i;
    row[i] = column < dims ? tile::to_operand<Acc>(source[column]) : 0;
  }
}
__device__ __forceinline__ void load_row(Acc (&row)[kLaneDims],
                                         const kvcache::Pages<const T>& pages, int page, int slot,
                                         int head, int dims) {
  load_row(row, pages.row(page, slot, head), dims);
}
__device__ __forceinline__ void load_row(Acc (&row)[kLaneDims], const kvcache::Stored<T>& stored,
                                         int page, int slot, int head, int) {
  stored.load(row, page, slot, head);
}

__device__ __forceinline__ auto pages_of_k(const DecodeParams& params) {
  if constexpr (Config::quantized)
    return kvcache::Stored<T>{
        params.k,        params.k_stride,         params.k_scale,          params.k_minimum,
        params.k_offset, params.k_scale_stride,   params.k_minimum_stride, params.k_format,
        params.k_group,  params.k_scale_is_float, params.k_rotated,        params.head_dim};
  else
    return kvcache::Pages<const T>{static_cast<const T*>(params.k), params.k_stride};
}

__device__ __forceinline__ auto pages_of_v(const DecodeParams& params) {
  if constexpr (Config::quantized)
    return kvcache::Stored<T>{
        params.v,        params.v_stride,         params.v_scale,          params.v_minimum,
        params.v_offset, params.v_scale_stride,   params.v_minimum_stride, params.v_format,
        params.v_group,  params.v_scale_is_float, params.v_rotated,        params.head_dim_v};
  else
    return kvcache::Pages<const T>{static_cast<const T*>(params.v), params.v_stride};
}

// Two blocks: the compiler would spill to fit three.
constexpr int kMinBlocks = Config::quantized && Config::elementwise ? 2 : 0;

extern "C" __global__ void __launch_bounds__(Config::threads, kMinBlocks)
    decode_simt(const __grid_constant__ DecodeParams params,
                const __grid_constant__ ScoreParams scores) {
  __shared__ Smem smem;
  const int warp = threadIdx.x / 32;
  const kvcache::PageTable table = page_table(params);
  const auto k_pages = pages_of_k(params);
  const auto v_pages = pages_of_v(params);
  Schedule schedule;
  if (!schedule.start(params)) return;
  decoding::Split split;
  smem.last.init();
  while (schedule.next(params, split)) {
    const decoding::SplitPlace place = schedule.place_of(params, split);
    Slice slice(params, split);
    for (int first = split.begin + warp * kBatch; first < split.end; first += kWarps * kBatch) {
      Acc k[kBatch][kLaneDims], v[kBatch][kLaneDims];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int key = min(first + i, split.end - 1);
        const int page = table.page(split.seq.index, key), slot = table.slot(key);
        load_row(k[i], k_pages, page, slot, split.head, params.head_dim);
        load_row(v[i], v_pages, page, slot, split.head, params.head_dim_v);
      }
      slice.attend(params, scores, first, split.end, k, v);
    }
    const Writer writer = {params, split, place};
    smem.results.write(slice.rows, writer);
    smem.last.merge_or_keep(writer);
  }
  smem.last.finish<Writer>(params);
}
