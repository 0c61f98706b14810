// Decoding in plain CUDA C++: every call of the contract, on any architecture. The kernel to read
// first.
//
//   q, out (batch, seqlen_q, heads_q, head_dim) or (total, heads_q, head_dim); caches contiguous or
//   in pages, any strides; float16, bfloat16, float32, float64; head_dims up to kHeadDim.
//   DecodeParams has the rest. Arithmetic is in float, or double for float64. A tile's rows are
//   kRows pairs of a query token and one of the query heads that share a key head. The warps of a
//   block take keys in turn, kBatch at a time, a row of K and V spread over a warp's lanes; each
//   warp keeps the running maximum, sum and O of every row (online softmax), and the block merges
//   its warps' when a piece (schedule.cuh) is done.
#include "decoding/combine.cuh"

using T = Config::dtype;
using Acc = tile::Accumulator<T>;
constexpr int kHeadDim = Config::head_dim;
constexpr int kRows = Config::rows;
constexpr int kWarps = Config::threads / 32;
constexpr int kTileKeys = 64;                                  // of a unit of work
constexpr int kBatch = kHeadDim * sizeof(Acc) < 2048 ? 4 : 2;  // keys on their way at a time
constexpr int kLaneDims = kHeadDim / 32;                       // lane l has columns l, l + 32, …

using Work = decoding::Schedule<kRows, kTileKeys>;
using Writer = decoding::Writer<T, kRows, kHeadDim, false, 1>;

static_assert(kHeadDim % 32 == 0, "lanes share a row evenly");

struct Smem {
  alignas(16) Acc o[kWarps][kRows][kHeadDim];
  Acc max_sum[kWarps][kRows][2];
  decoding::Piece last_piece;  // of an item that other blocks began: to be merged at the end
  decoding::Parts last_parts;
};
static_assert(sizeof(Smem) <= 48 * 1024, "static shared memory that every architecture has");

struct Slice {
  Acc q[kRows][kLaneDims];
  Acc o[kRows][kLaneDims] = {};
  Acc row_max[kRows], row_sum[kRows] = {};
  tile::Range visible[kRows];
  tile::ScoreRow<Acc> score_row[kRows];

  __device__ __forceinline__ Slice(const DecodeParams& params, const decoding::Piece& piece) {
    const ScoreMod<T, false, false> score_mod = {score_inputs(params)};
    const int group = params.group, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // Rows that do not exist do as the last one does.
      const int index = min(piece.tile * kRows + r, piece.seq.seqlen_q * group - 1);
      const int token = divided_by_group(params, index);
      const int head = piece.head * group + index - token * group;
      const T* source = static_cast<const T*>(params.q) + piece.seq.index * params.q_stride.batch +
                        (piece.seq.begin_q + token) * params.q_stride.seq +
                        head * params.q_stride.head;
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i)
        q[r][i] = lane + 32 * i < params.head_dim ? static_cast<Acc>(source[lane + 32 * i]) : 0;
      visible[r] = visible_keys(params, piece.seq, token);
      const int position = piece.seq.length - piece.seq.seqlen_q + token;
      score_row[r] = {piece.seq.index, head, token, position,
                      score_mod.slope(piece.seq.index, head)};
      row_max[r] = tile::negative_infinity<Acc>();
    }
  }

  // Keys first … first + kBatch - 1, as far as they come before `end`.
  __device__ __forceinline__ void see(const DecodeParams& params, int first, int end,
                                      const Acc (&k)[kBatch][kLaneDims],
                                      const Acc (&v)[kBatch][kLaneDims]) {
    const ScoreMod<T, false, false> score_mod = {score_inputs(params)};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Acc s[kBatch], new_max = row_max[r];
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
        new_max = fmax(new_max, ceil(s[j] * static_cast<Acc>(1.4426950408889634)));
      }
      const Acc shift = new_max == tile::negative_infinity<Acc>() ? 0 : new_max;
      const Acc factor = decoding::power_of_two(row_max[r] - shift);
      Acc sum = 0, weighted[kLaneDims] = {};
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const Acc weight = decoding::weight(s[j], shift);
        if (weight == 0) continue;  // a key that is not seen may hold anything
        sum += weight;
#pragma unroll
        for (int i = 0; i < kLaneDims; ++i) weighted[i] = fma(weight, v[j][i], weighted[i]);
      }
      row_max[r] = new_max;
      row_sum[r] = fma(row_sum[r], factor, sum);
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) o[r][i] = fma(o[r][i], factor, weighted[i]);
    }
  }
};

// A row of K or V, spread over the warp.
__device__ __forceinline__ void load_row(Acc (&row)[kLaneDims], const void* pages,
                                         const PageStrides& strides, int page, int slot, int head,
                                         int dims) {
  const T* source =
      static_cast<const T*>(pages) + page * strides.page + slot * strides.seq + head * strides.head;
#pragma unroll
  for (int i = 0; i < kLaneDims; ++i) {
    const int column = threadIdx.x % 32 + 32 * i;
    row[i] = column < dims ? static_cast<Acc>(source[column]) : 0;
  }
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    decode_simt(const __grid_constant__ DecodeParams params) {
  __shared__ Smem smem;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Work work;
  if (!work.start(params)) return;
  decoding::Piece piece;
  if (threadIdx.x == 0) smem.last_parts.merges = false;
  while (work.next(params, piece)) {
    const decoding::Parts parts = work.place_of(params, piece);
    Slice slice(params, piece);
    for (int first = piece.begin + warp * kBatch; first < piece.end; first += kWarps * kBatch) {
      Acc k[kBatch][kLaneDims], v[kBatch][kLaneDims];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int key = min(first + i, piece.end - 1);
        const int page = params.page_table == nullptr
                             ? piece.seq.index
                             : params.page_table[piece.seq.index * params.table_stride +
                                                 (key >> params.page_shift)];
        const int slot = key & ((1 << params.page_shift) - 1);
        load_row(k[i], params.k, params.k_stride, page, slot, piece.head, params.head_dim);
        load_row(v[i], params.v, params.v_stride, page, slot, piece.head, params.head_dim_v);
      }
      slice.see(params, first, piece.end, k, v);
    }

    __syncthreads();  // the piece before has been combined
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) smem.o[warp][r][lane + 32 * i] = slice.o[r][i];
      if (lane == 0) {
        smem.max_sum[warp][r][0] = slice.row_max[r];
        smem.max_sum[warp][r][1] = slice.row_sum[r];
      }
    }
    __syncthreads();
    const Writer writer = {params, piece, parts};
    for (int i = threadIdx.x; i < writer.rows() * Writer::kVecs; i += Config::threads) {
      const int row = i / Writer::kVecs, column = i % Writer::kVecs * 4;
      if (column >= params.head_dim_v) continue;
      decoding::Partial<T> whole;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) whole.max = fmax(whole.max, smem.max_sum[w][row][0]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w)
        whole.add(reinterpret_cast<const decoding::Vec<Acc>&>(smem.o[w][row][column]),
                  smem.max_sum[w][row][0], smem.max_sum[w][row][1]);
      writer.put(row, column, whole);
    }
    if (parts.merges && parts.alone) {
      writer.merge_parts();
    } else if (parts.merges && threadIdx.x == 0) {
      smem.last_piece = piece;
      smem.last_parts = parts;
    }
  }
  __syncthreads();
  if (smem.last_parts.merges) Writer{params, smem.last_piece, smem.last_parts}.merge_parts();
}
