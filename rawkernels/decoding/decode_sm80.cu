// Decoding on tensor cores (mma.sync), for Ampere and later: a few query tokens a sequence over a long cache, at the speed
// the cache can be read.
//
//   q, out (batch, seqlen_q, heads_q, head_dim) or (total, heads_q, head_dim); caches contiguous or in pages; float16 or
//   bfloat16, head_dims multiples of 8 up to kHeadDim, everything 16-byte aligned. DecodeParams has the rest.
//   A tile's rows are query tokens times the query heads that share a key head, so that K and V are read once for all.
//   A & B are swapped: keys fill the 16 rows of an mma, 8 query rows its columns, so few queries waste little:
//     Sᵀ (keys × rows) = K Qᵀ,   Oᵀ (head_dim × rows) += Vᵀ Pᵀ.
//   kWarpsK slices of a tile's keys each have their own softmax and O, and their own ring of kStages stages of K and V, so
//   nothing in the main loop waits for the block; kWarpsQ warps share a slice and have kWarpRows rows each.
//   The rings run ahead over the ends of pieces (schedule.cuh): while a piece is finished the next one's keys arrive.
#include "decoding/combine.cuh"
#include "decoding/ring.cuh"
#include "ptx/bar.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/movmatrix.cuh"
#include "tile/score.cuh"

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
constexpr int kKeyBlocks = kWarpKeys / 16;
constexpr int kSteps = kHeadDim / 16;
constexpr int kChunks = kHeadDim / 8;
// Chains of dependent products that Sᵀ is summed up in: one alone would wait for the tensor cores each time.
constexpr int kChains = kRowBlocks * kKeyBlocks == 1 ? 2 : 1;

static_assert(kWarpRows % 8 == 0 && kWarpKeys % 16 == 0 && kWarpKeys <= 32, "whole mma tiles, and a lane for each key");
static_assert(kRowBlocks * kSteps * 4 <= 128, "O fits in registers");
static_assert(kRows <= Config::threads && Config::threads == 32 * kWarpsQ * kWarpsK, "a warp for each part, a thread for each row");

using Tile = decoding::SwizzledRows<kHeadDim>;
using Stage = decoding::Stage<T, kWarpKeys, kHeadDim>;
using Work = decoding::Schedule<kRows, kTileKeys>;
using Loader = decoding::Loader<T, Work, kHeadDim, kWarpKeys, kWarpsQ, kWarpsK, kStages>;
using Writer = decoding::Writer<T, kRows, kHeadDim, true>;

struct Smem {
  alignas(128) Stage ring[kWarpsK][kStages];
  union {
    alignas(128) T q[kRows * kHeadDim];
    float o[kWarpsK][8 * kWarpsQ][kHeadDim];  // eight rows of each warp at a time, columns permuted
  };
  int pages[kStages][Config::threads / 32][kWarpKeys];  // of the tile that each warp loads into a stage next
  float max_sum[kWarpsK][8 * kWarpsQ][2];
  int position[kRows];
  float slope[kRows];
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

// Where a column of a row of O lies in shared memory: lanes 4g + t, with rows 2t and columns g, hit 32 banks.
__device__ __forceinline__ int permuted_column(int row, int column) { return column ^ (row / 2 % 4 * 8); }

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
                      (piece.head * group + index - token * group) * params.q_stride.head + chunk * 8;
    uint4 values = {};
    if (row < rows && chunk * 8 < params.head_dim) values = *reinterpret_cast<const uint4*>(source);
    reinterpret_cast<uint4*>(smem.q)[row * kChunks + Tile::permuted(row, chunk)] = values;
  }
  if (threadIdx.x < kRows) {
    const int row = min(static_cast<int>(threadIdx.x), rows - 1);  // rows that do not exist do as the last one does
    const int index = piece.tile * kRows + row;
    const int token = divided_by_group(params, index);
    smem.position[threadIdx.x] = piece.seq.length - piece.seq.seqlen_q + token;
    if (params.alibi_slopes != nullptr)
      smem.slope[threadIdx.x] = tile::kLog2e * static_cast<const float*>(params.alibi_slopes)[
          piece.seq.index * params.alibi_batch_stride + piece.head * group + index - token * group];
  }
}

// What a row sees of the piece.
__device__ __forceinline__ decoding::KeyRange keys_of_row(const DecodeParams& params, const Smem& smem, int row) {
  const decoding::KeyRange window = decoding::window_at(params, smem.position[row]);
  return {max(window.begin, smem.piece.begin), min(window.end, smem.piece.end)};
}

// One slice's share of a piece, for this warp's rows. With g = lane / 4, t = lane % 4, scores s[j][r] are of keys
// 16 j + g (and + 8 in the last two) and rows 8 r + 2 t (and + 1 in every second).
struct Slice {
  float o[kSteps][kRowBlocks][4];
  float row_max[kRowBlocks][2], row_sum[kRowBlocks][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      row_max[r][0] = row_max[r][1] = tile::negative_infinity();
      row_sum[r][0] = row_sum[r][1] = 0.0f;
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[step][r][i] = 0.0f;
    }
  }

  __device__ __forceinline__ static void multiply_scores(float (&sum)[kKeyBlocks][kRowBlocks][4], unsigned k_tile,
                                                         unsigned q_rows) {
    float s[kChains][kKeyBlocks][kRowBlocks][4] = {};
    const int lane = threadIdx.x % 32;
    const unsigned k_lane = k_tile + Tile::rows_first();
    // One ldmatrix brings Q of 16 rows and one step, or of 8 rows and two steps.
    const unsigned q_lane = q_rows + (kRowBlocks == 1 ? lane % 8 * Tile::kRowBytes + Tile::permuted(lane % 8, lane / 8) * 16
                                                      : Tile::chunks_first());
    unsigned q[kRowBlocks == 1 ? 1 : kRowBlocks / 2][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (kRowBlocks > 1 || step % 2 == 0) {
#pragma unroll
        for (int r = 0; r < (kRowBlocks + 1) / 2; ++r)
          ptx::ldmatrix_x4(q[r], Tile::at_chunks(q_lane + r * 16 * Tile::kRowBytes, step));
      }
#pragma unroll
      for (int j = 0; j < kKeyBlocks; ++j) {
        unsigned k[4];
        ptx::ldmatrix_x4(k, Tile::at_chunks(k_lane + j * 16 * Tile::kRowBytes, step));
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
          const int first = kRowBlocks == 1 ? step % 2 * 2 : r % 2 * 2;
          ptx::mma_m16n8k16<T>(s[step % kChains][j][r], k, q[r / 2][first], q[r / 2][first + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kKeyBlocks * kRowBlocks * 4; ++i)
      (&sum[0][0][0])[i] = kChains == 1 ? (&s[0][0][0][0])[i] : (&s[0][0][0][0])[i] + (&s[kChains - 1][0][0][0])[i];
  }

  // Scores in log2 units, -inf where a row does not see a key.
  __device__ __forceinline__ static void finish_scores(float (&s)[kKeyBlocks][kRowBlocks][4], const DecodeParams& params,
                                                       const Smem& smem, int key, int first_row, bool masked) {
    const float scale = static_cast<float>(params.scale), softcap = static_cast<float>(params.softcap);
    const float factor = softcap == 0.0f ? scale * tile::kLog2e : scale;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kKeyBlocks * kRowBlocks * 4; ++i) (&s[0][0][0])[i] *= factor;
    if (softcap != 0.0f)
#pragma unroll
      for (int i = 0; i < kKeyBlocks * kRowBlocks * 4; ++i)
        (&s[0][0][0])[i] = tile::softcapped((&s[0][0][0])[i], softcap, 1.0f / softcap) * tile::kLog2e;
    if (!masked && params.alibi_slopes == nullptr) return;
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = first_row + 8 * r + lane % 4 * 2 + c;
        const decoding::KeyRange keys = keys_of_row(params, smem, row);
#pragma unroll
        for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int k = key + 16 * j + 8 * h + lane / 4;
            float& x = s[j][r][2 * h + c];
            if (params.alibi_slopes != nullptr)
              x = fmaf(-smem.slope[row], fabsf(static_cast<float>(smem.position[row] - k)), x);
            if (k < keys.begin || k >= keys.end) x = tile::negative_infinity();
          }
      }
  }

  // s becomes exp2(s - row_max). row_max lags by up to kLag, as in tile/softmax.cuh, and lanes compare only when it must move.
  __device__ __forceinline__ void update_softmax(float (&s)[kKeyBlocks][kRowBlocks][4]) {
    float tile_max[kRowBlocks][2];
    bool grown = false;
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        tile_max[r][c] = row_max[r][c];
#pragma unroll
        for (int j = 0; j < kKeyBlocks; ++j)
          tile_max[r][c] = fmaxf(tile_max[r][c], fmaxf(s[j][r][c], s[j][r][2 + c]));
        grown |= tile_max[r][c] - row_max[r][c] > tile::OnlineSoftmax::kLag;
      }
    if (__any_sync(~0u, grown)) {
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float largest = tile_max[r][c];
#pragma unroll
          for (int distance = 4; distance < 32; distance *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
          const float factor = ptx::ex2(row_max[r][c] - offset(largest));
          row_max[r][c] = largest;
          row_sum[r][c] *= factor;
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            o[step][r][c] *= factor;
            o[step][r][2 + c] *= factor;
          }
        }
    }
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float shift = offset(row_max[r][c]);
#pragma unroll
        for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            s[j][r][2 * h + c] = ptx::ex2(s[j][r][2 * h + c] - shift);
            row_sum[r][c] += s[j][r][2 * h + c];
          }
      }
  }

  __device__ __forceinline__ void multiply_values(const float (&p)[kKeyBlocks][kRowBlocks][4], unsigned v_tile) {
    const unsigned v_lane = v_tile + Tile::chunks_first();
#pragma unroll
    for (int j = 0; j < kKeyBlocks; ++j) {
      unsigned b[kRowBlocks][2];
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        b[r][0] = ptx::movmatrix_trans(tile::pack<T>(p[j][r][0], p[j][r][1]));
        b[r][1] = ptx::movmatrix_trans(tile::pack<T>(p[j][r][2], p[j][r][3]));
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        unsigned v[4];
        ptx::ldmatrix_x4_trans(v, Tile::at_chunks(v_lane + j * 16 * Tile::kRowBytes, step));
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) ptx::mma_m16n8k16<T>(o[step][r], v, b[r][0], b[r][1]);
      }
    }
  }

  // Eight rows of this warp to shared memory, unscaled, with their maxima and sums.
  __device__ __forceinline__ void put_rows(int r, Smem& smem, int slice, int first_row) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = first_row + lane % 4 * 2 + c;
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int h = 0; h < 2; ++h) smem.o[slice][row][permuted_column(row, 16 * step + 8 * h + lane / 4)] = o[step][r][2 * h + c];
      float sum = row_sum[r][c];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
      if (lane < 4) {
        smem.max_sum[slice][row][0] = row_max[r][c] * tile::kLn2;
        smem.max_sum[slice][row][1] = sum;
      }
    }
  }

  __device__ __forceinline__ static float offset(float max) { return tile::OnlineSoftmax::offset(max, 1.0f); }
};

// Merges the slices' eight rows of each row warp, and puts them where they belong.
__device__ __forceinline__ void combine_rows(const Writer& writer, const Smem& smem, int r) {
  for (int i = threadIdx.x; i < 8 * kWarpsQ * Writer::kVecs; i += Config::threads) {
    const int from = i / Writer::kVecs, column = i % Writer::kVecs * 4;
    const int row = from / 8 * kWarpRows + 8 * r + from % 8;
    if (row >= writer.rows() || column >= writer.params.head_dim_v) continue;
    decoding::Partial<float> whole;
#pragma unroll
    for (int slice = 0; slice < kWarpsK; ++slice) whole.max = fmaxf(whole.max, smem.max_sum[slice][from][0]);
#pragma unroll
    for (int slice = 0; slice < kWarpsK; ++slice)
      whole.add(reinterpret_cast<const decoding::Vec<float>&>(smem.o[slice][from][permuted_column(from, column)]),
                smem.max_sum[slice][from][0], smem.max_sum[slice][from][1]);
    writer.put(row, column, whole);
  }
}

// The block's next piece, with its rows of Q. When there is none any more: false, and the item that is left to be merged.
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
__device__ __forceinline__ bool close_piece(const Writer& writer, Smem& smem, const Slice& acc, int slice, int row_warp) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
    __syncthreads();  // Q, or the rows before, have been read
    acc.put_rows(r, smem, slice, row_warp * 8);
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
  int filling = Loader::depth(params);  // tiles are looked up and loaded before the first is computed
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
        acc.clear();  // also where nothing follows: what is not kept needs no registers while parts are merged
      }
      ptx::cp_async_wait<kStages - 1>();
      sync_slice();
      float s[kKeyBlocks][kRowBlocks][4];
      Slice::multiply_scores(s, ptx::shared_address(current.k),
                             ptx::shared_address(smem.q) + first_row * Tile::kRowBytes);
      // Every row sees what is between the last row's first key and the first row's last.
      const bool masked = key < keys_of_row(params, smem, kRows - 1).begin || key + kWarpKeys > keys_of_row(params, smem, 0).end;
      Slice::finish_scores(s, params, smem, key, first_row, masked);
      acc.update_softmax(s);
      acc.multiply_values(s, ptx::shared_address(current.v));
      key += kTileKeys;
      sync_slice();
    }
    loader.load(current, smem.pages[stage][warp]);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}
