// Latent attention in plain CUDA C++: every call of mla_decode, on any architecture. The kernel to
// read first.
//
//   q_latent, out (batch, seqlen_q, heads, latent) or (total, heads, latent), q_rope with rope_dim
//   in place of latent; pages of latents and of rotated parts, any strides; float16, bfloat16,
//   float32, float64; latent up to kLatent, rope_dim up to kRope. Latents may be codes of any
//   format (Config::quantized), which become numbers as they are read. DecodeParams and MlaParams
//   have the rest. All heads share one key a token, its latent and its rotated part side by side,
//   and the latent is the value too: it is read once. A tile's rows are kRows pairs of a query
//   token and a head. The warps of a block take keys in turn, kBatch at a time, a row spread over a
//   warp's lanes; each warp keeps the running maximum, sum and O of every row (online softmax), and
//   the block merges its warps' results at the end of a split (schedule.cuh).
#include "decoding/rows_simt.cuh"
#include "kvcache/stored.cuh"
#include "mla/params.cuh"
#include "tile/operands.cuh"
#include "tile/score_mod.cuh"

using T = Config::dtype;
using Acc = tile::Accumulator<T>;
constexpr int kLatent = Config::latent;
constexpr int kRope = Config::rope;
constexpr int kRows = Config::rows;
constexpr int kBatch = Config::batch_keys;  // keys on their way at a time
constexpr int kWarps = Config::threads / 32;
constexpr int kTileKeys = 64;              // the fewest of a block of keys
constexpr int kLatentDims = kLatent / 32;  // lane l has columns l, l + 32, …
constexpr int kDims = kLatentDims + kRope / 32;

using Schedule = decoding::Schedule<kRows, kTileKeys>;
using Writer = decoding::Writer<T, kRows, kLatent, false, 1>;

static_assert(kLatent % 64 == 0 && kRope % 32 == 0, "lanes must share both parts evenly");

struct Smem {
  decoding::WarpResults<Acc, kWarps, kRows, kLatent> results;
  decoding::LastMerge last;
};
static_assert(sizeof(Smem) <= 48 * 1024, "static shared memory that every architecture has");

// A token's latent and its rotated part, spread over the warp: column 32 i + lane to row[i], the
// rotated part's to those behind.
__device__ __forceinline__ void load_rotated(Acc (&row)[kDims], const T* rope,
                                             const DecodeParams& params) {
  const int lane = threadIdx.x % 32, rope_dim = params.head_dim - params.head_dim_v;
#pragma unroll
  for (int i = kLatentDims; i < kDims; ++i) {
    const int column = lane + 32 * (i - kLatentDims);
    row[i] = column < rope_dim ? tile::to_operand<Acc>(rope[column]) : 0;
  }
}
__device__ __forceinline__ void load_row(Acc (&row)[kDims], const T* latent, const T* rope,
                                         const DecodeParams& params) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kLatentDims; ++i)
    row[i] = lane + 32 * i < params.head_dim_v ? tile::to_operand<Acc>(latent[lane + 32 * i]) : 0;
  load_rotated(row, rope, params);
}
__device__ __forceinline__ void load_key(Acc (&row)[kDims], const kvcache::Pages<const T>& latents,
                                         int page, int slot, const T* rope,
                                         const DecodeParams& params) {
  load_row(row, latents.row(page, slot, 0), rope, params);
}
__device__ __forceinline__ void load_key(Acc (&row)[kDims], const kvcache::Stored<T>& latents,
                                         int page, int slot, const T* rope,
                                         const DecodeParams& params) {
  Acc latent[kLatentDims];
  latents.load(latent, page, slot, 0);
#pragma unroll
  for (int i = 0; i < kLatentDims; ++i) row[i] = latent[i];
  load_rotated(row, rope, params);
}

// As values: of keys the latents are a part.
__device__ __forceinline__ auto pages_of_latents(const DecodeParams& params) {
  if constexpr (Config::quantized)
    return kvcache::Stored<T>{
        params.v,        params.v_stride,         params.v_scale,          params.v_minimum,
        params.v_offset, params.v_scale_stride,   params.v_minimum_stride, params.v_format,
        params.v_group,  params.v_scale_is_float, params.v_rotated,        params.head_dim_v};
  else
    return kvcache::Pages<const T>{static_cast<const T*>(params.k), params.k_stride};
}

// A warp's share of a split.
struct Slice {
  Acc q[kRows][kDims];
  decoding::WarpRows<Acc, kRows, kLatentDims> rows;
  tile::Range visible[kRows];

  __device__ __forceinline__ Slice(const DecodeParams& params, const MlaParams& mla,
                                   const decoding::Split& split) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // Rows that do not exist do as the last one does.
      const int index = min(split.row_tile * kRows + r, split.seq.seqlen_q * params.group - 1);
      const int token = divided_by_group(params, index);
      const int head = index - token * params.group;
      const auto row_at = [&](const void* array, const Strides& stride) {
        return static_cast<const T*>(array) + split.seq.index * stride.batch +
               (split.seq.begin_q + token) * stride.seq + head * stride.head;
      };
      load_row(q[r], row_at(params.q, params.q_stride), row_at(mla.q_rope, mla.q_rope_stride),
               params);
      visible[r] = visible_keys(params, split.seq, token);
    }
  }

  // Adds keys first … first + kBatch - 1, as far as `exists` says and they come before `end`.
  __device__ __forceinline__ void attend(const DecodeParams& params, int first, int end,
                                         const Acc (&k)[kBatch][kDims],
                                         const bool (&exists)[kBatch]) {
    const Acc scale = static_cast<Acc>(params.scale);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Acc s[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int key = first + j;
        s[j] = 0;
#pragma unroll
        for (int i = 0; i < kDims; ++i) s[j] = fma(q[r][i], k[j][i], s[j]);
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
          s[j] += __shfl_xor_sync(~0u, s[j], distance);
        s[j] *= scale;
        if (!exists[j] || key < visible[r].begin || key >= min(visible[r].end, end))
          s[j] = tile::negative_infinity<Acc>();
      }
      rows.add(r, s, k);
    }
  }
};

extern "C" __global__ void __launch_bounds__(Config::threads)
    mla_decode_simt(const __grid_constant__ DecodeParams params,
                    const __grid_constant__ MlaParams mla) {
  __shared__ Smem smem;
  const int warp = threadIdx.x / 32;
  const kvcache::PageTable table = page_table(params);
  const auto latents = pages_of_latents(params);
  const kvcache::Pages<const T> rotated = {static_cast<const T*>(mla.rope), mla.rope_stride};
  Schedule schedule;
  if (!schedule.start(params)) return;
  decoding::Split split;
  smem.last.init();
  while (schedule.next(params, split)) {
    const decoding::SplitPlace place = schedule.place_of(params, split);
    const mla::Tokens tokens = mla::tokens_of(params, mla, split.seq.index);
    Slice slice(params, mla, split);
    for (int first = split.begin + warp * kBatch; first < split.end; first += kWarps * kBatch) {
      Acc k[kBatch][kDims];
      bool exists[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int token = tokens.of_key(min(first + i, split.end - 1));
        exists[i] = tokens.has(token);
        const int there = exists[i] ? token : 0;
        const int page = table.page(tokens.sequence, there), slot = table.slot(there);
        load_key(k[i], latents, page, slot, rotated.row(page, slot, 0), params);
      }
      slice.attend(params, first, split.end, k, exists);
    }
    const Writer writer = {params, split, place};
    smem.results.write(slice.rows, writer);
    smem.last.merge_or_keep(writer);
  }
  smem.last.finish<Writer>(params);
}
