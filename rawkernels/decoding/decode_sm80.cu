// Decoding on tensor cores (mma.sync), for Ampere and later: a few query tokens a sequence over a
// long cache, at the speed the cache can be read.
//
//   q, out (batch, seqlen_q, heads_q, head_dim) or (total, heads_q, head_dim); caches contiguous or
//   in pages; float16 or bfloat16, head_dims multiples of 8 up to kHeadDim, everything 16-byte
//   aligned. DecodeParams has the rest. A tile's rows are query tokens times the query heads that
//   share a key head, so that K and V are read once for all. A & B are swapped: keys fill the 16
//   rows of an mma, 8 query rows its columns, so few queries waste little:
//     Sᵀ (keys × rows) = K Qᵀ,   Oᵀ (head_dim × rows) += Vᵀ Pᵀ.
//   kWarpsK slices of a tile's keys each have their own softmax and O, and their own ring of
//   kStages stages of K and V, so nothing in the main loop waits for the block; kWarpsQ warps share
//   a slice and have kWarpRows rows each. The rings run ahead over the ends of pieces
//   (schedule.cuh): while a piece is finished the next one's keys arrive.
#include "decoding/combine.cuh"
#include "decoding/ring.cuh"
#include "decoding/slice.cuh"
#include "ptx/bar.cuh"

using T = Config::dtype;
constexpr int kHeadDim = Config::head_dim;
constexpr int kWarpRows = Config::warp_rows;
constexpr int kWarpKeys = Config::warp_keys;
constexpr int kWarpsQ = Config::warps_q;
constexpr int kWarpsK = Config::warps_k;
constexpr int kStages = Config::stages;

constexpr int kRows = kWarpRows * kWarpsQ;
constexpr int kTileKeys = kWarpKeys * kWarpsK;
constexpr int kSliceThreads = 32 * kWarpsQ;
constexpr int kRowBlocks = kWarpRows / 8;
constexpr int kChunks = kHeadDim / 8;
static_assert(kRows <= Config::threads && Config::threads == 32 * kWarpsQ * kWarpsK,
              "a warp for each part, a thread for each row");

using Tile = decoding::SwizzledRows<kHeadDim>;
using Stage = decoding::Stage<T, kWarpKeys, kHeadDim>;
using Slice = decoding::Slice<T, kHeadDim, kWarpRows, kWarpKeys>;
using Work = decoding::Schedule<kRows, kTileKeys>;
using Loader = decoding::Loader<T, Work, kHeadDim, kWarpKeys, kWarpsQ, kWarpsK, kStages>;
using Writer = decoding::Writer<T, kRows, kHeadDim, true>;

struct Smem {
  alignas(128) Stage ring[kWarpsK][kStages];
  union {
    alignas(128) T q[kRows * kHeadDim];
    float o[kWarpsK][8 * kWarpsQ][kHeadDim];  // eight rows of each warp at a time, columns permuted
  };
  int pages[kStages][Config::threads / 32]
           [kWarpKeys];  // of the tile that each warp loads into a stage next
  float max_sum[kWarpsK][8 * kWarpsQ][2];
  decoding::Rows<kRows> rows;
  Work ahead[Config::threads / 32];  // where the rings' loads are
  Work work;                         // where the computation is
  decoding::Piece piece;
  decoding::Parts parts;
  decoding::Piece last_piece;  // of an item that other blocks began: to be merged at the end
  decoding::Parts last_parts;
  bool more;
};
static_assert(sizeof(Smem) <= Config::smem_bytes, "Config has to ask for all of it");

// The barrier of the warps that share a ring.
__device__ __forceinline__ void sync_slice() {
  if (kWarpsQ == 1)
    __syncwarp();
  else
    ptx::bar_sync(1 + threadIdx.x / kSliceThreads, kSliceThreads);
}

// Rows of Q, and the position of each.
__device__ __forceinline__ void load_rows(const DecodeParams& params, Smem& smem) {
  const decoding::Piece& piece = smem.piece;
  const int group = params.group;
  const int rows = min(kRows, piece.seq.seqlen_q * group - piece.tile * kRows);
  const unsigned q_tile = ptx::shared_address(smem.q);
  for (int i = threadIdx.x; i < kRows * kChunks; i += Config::threads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int index = piece.tile * kRows + row;
    const int token = divided_by_group(params, index);
    const T* source = static_cast<const T*>(params.q) + piece.seq.index * params.q_stride.batch +
                      (piece.seq.begin_q + token) * params.q_stride.seq +
                      (piece.head * group + index - token * group) * params.q_stride.head +
                      chunk * 8;
    uint4 values = {};
    if (row < rows && chunk * 8 < params.head_dim) values = *reinterpret_cast<const uint4*>(source);
    reinterpret_cast<uint4*>(smem.q)[row * kChunks + Tile::permuted(row, chunk)] = values;
  }
  if (threadIdx.x < kRows) {
    const int row = min(static_cast<int>(threadIdx.x),
                        rows - 1);  // rows that do not exist do as the last one does
    const int index = piece.tile * kRows + row;
    const int token = divided_by_group(params, index);
    smem.rows.position[threadIdx.x] = piece.seq.length - piece.seq.seqlen_q + token;
    if (params.alibi_slopes != nullptr)
      smem.rows.slope[threadIdx.x] =
          tile::kLog2e * static_cast<const float*>(
                             params.alibi_slopes)[piece.seq.index * params.alibi_batch_stride +
                                                  piece.head * group + index - token * group];
  }
}

// Merges the slices' eight rows of each row warp, and puts them where they belong.
__device__ __forceinline__ void combine_rows(const Writer& writer, const Smem& smem, int r) {
  for (int i = threadIdx.x; i < 8 * kWarpsQ * Writer::kVecs; i += Config::threads) {
    const int from = i / Writer::kVecs, column = i % Writer::kVecs * 4;
    const int row = from / 8 * kWarpRows + 8 * r + from % 8;
    if (row >= writer.rows() || column >= writer.params.head_dim_v) continue;
    decoding::Partial<float> whole;
#pragma unroll
    for (int slice = 0; slice < kWarpsK; ++slice)
      whole.max = fmaxf(whole.max, smem.max_sum[slice][from][0]);
#pragma unroll
    for (int slice = 0; slice < kWarpsK; ++slice)
      whole.add(reinterpret_cast<const decoding::Vec<float>&>(
                    smem.o[slice][from][decoding::permuted_column(from, column)]),
                smem.max_sum[slice][from][0], smem.max_sum[slice][from][1]);
    writer.put(row, column, whole);
  }
}

// The block's next piece, with its rows of Q. When there is none any more: false, and the item that
// is left to be merged.
__device__ __forceinline__ bool open_piece(const DecodeParams& params, Smem& smem) {
  __syncthreads();  // the piece before, and what was kept for it, are done with
  if (threadIdx.x == 0) {
    smem.more = smem.work.next(params, smem.piece, &smem.parts);
    if (!smem.more) {
      smem.piece = smem.last_piece;
      smem.parts = smem.last_parts;
    }
  }
  __syncthreads();
  if (!smem.more) return false;
  load_rows(params, smem);
  __syncthreads();
  return true;
}

// Whether the item is to be merged right away.
__device__ __forceinline__ bool close_piece(const Writer& writer, Smem& smem, const Slice& acc,
                                            int slice, int row_warp) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
    __syncthreads();  // Q, or the rows before, have been read
    acc.put_rows(r, smem.o[slice], smem.max_sum[slice], row_warp * 8);
    __syncthreads();
    combine_rows(writer, smem, r);
  }
  writer.finish();
  if (!smem.parts.merges) return false;
  if (smem.parts.alone || smem.work.step == smem.work.end) return true;
  if (threadIdx.x == 0) {
    smem.last_piece = smem.piece;
    smem.last_parts = smem.parts;
  }
  return false;
}

extern "C" __global__ void __launch_bounds__(Config::threads, Config::blocks_per_sm)
    decode_sm80(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  Smem& smem = *reinterpret_cast<Smem*>(dynamic_smem);
  const int warp = threadIdx.x / 32, slice = warp / kWarpsQ, row_warp = warp % kWarpsQ;
  const int first_row = row_warp * kWarpRows;

  Work work;
  work.start(params);
  if (work.step == work.end) return;
  if (threadIdx.x % 32 == 0) smem.ahead[warp] = work;
  if (threadIdx.x == 0) {
    smem.work = work;
    smem.last_parts.merges = false;
  }
  __syncwarp();
  Loader loader(params, smem.ahead[warp]);
  Slice acc;
  bool open = false;
  int key = 0, end = 0, stage = 0;  // keys of this slice's share of the piece
  int filling =
      Loader::depth(params);  // tiles are looked up and loaded before the first is computed
#pragma unroll 1
  while (true) {
    const Stage& current = smem.ring[slice][stage];
    if (filling > 0) {
      --filling;
    } else {
#pragma unroll 1
      while (key >= end) {
        const Writer writer = {params, smem.piece, smem.parts};
        bool merges = open && close_piece(writer, smem, acc, slice, row_warp);
        if (!merges) {
          open = open_piece(params, smem);
          if (!open && !smem.parts.merges) return;
          merges = !open;
        }
        if (merges) {
          writer.merge_parts();
          if (!open) return;
          open = false;
        } else {
          key = smem.piece.origin + slice * kWarpKeys;
          end = smem.piece.end;
        }
        acc.clear();  // also where nothing follows: what is not kept needs no registers while parts
                      // are merged
      }
      ptx::cp_async_wait<kStages - 1>();
      sync_slice();
      Slice::Scores s;
      Slice::multiply_scores(s, ptx::shared_address(current.k),
                             ptx::shared_address(smem.q) + first_row * Tile::kRowBytes);
      // Every row sees what is between the last row's first key and the first row's last.
      const bool masked = key < smem.rows.keys(params, smem.piece, kRows - 1).begin ||
                          key + kWarpKeys > smem.rows.keys(params, smem.piece, 0).end;
      Slice::finish_scores(s, params, smem.rows, smem.piece, key, first_row, masked);
      acc.update_softmax(s);
      acc.multiply_values(s, ptx::shared_address(current.v));
      key += kTileKeys;
      sync_slice();
    }
    loader.load(current, smem.pages[stage][warp]);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}
