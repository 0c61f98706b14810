// Attention backward on mma.sync in one pass: dk and dv, and dq added up in global memory; scores
// that are only scaled and masked by position, float16 and bfloat16. For GPUs whose
// multiprocessors have 228 KiB of shared memory.
//
//   Arrays as in gradients/backward_sm80.cu. sums_sm80.cu clears and rounds the sums of dq.
//
//   A block owns kTileM keys and walks over the queries that see them, kTileN at a time. Its eight
//   warps are kGroups groups of kHalves warps each; a group has 32 keys. For a tile of queries:
//
//     S^T = K Q^T, dP^T = V dout^T   a warp has its group's keys and 1 / kHalves of the queries;
//     dv += P^T dout, dk += dS^T Q   … and 1 / kHalves of the features, by P and dS of its group;
//     dq += dS K                     a warp has 32 queries and some features, by dS of all groups.
//
//   Where four warps share a group's keys (kSplit) two of them have S, P and dv, the other two dP,
//   dS and dk, half of the queries or features each: with larger tiles of a warp a fragment serves
//   more products. dS is made of P as it is rounded for dv.
//
//   So P and dS go through shared memory. Nobody waits for the whole block at once: a warp
//   says that it has written dS before it goes on to dv and dk, and that it has read a stage before
//   it goes on to dq. dS has two places, so that it can be written while slower warps read the
//   last one.
//
//   0 · NaN is NaN, and a mask hides NaN: where a result is not finite, BackwardParams::nonfinite
//   is set, and kernels that come after this one compute everything anew.
#include "gradients/products_sm80.cuh"
#include "ptx/bar.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/red.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"

constexpr int kWarps = kThreads / 32;
constexpr int kGroups = kTileM / 32, kHalves = kWarps / kGroups;
constexpr bool kSplit = kHalves == 4 && kDim == kDimV;
constexpr int kParts = kSplit ? kHalves / 2 : kHalves;  // warps that share a product of a group
constexpr int kColumns = kTileN / kParts;               // queries of a warp's scores
constexpr int kCols0PerWarp = kDim / kParts, kCols1PerWarp = kDimV / kParts;  // of dk, of dv
constexpr int kDqGroups = kTileN / 32;                                        // of 32 queries
constexpr int kDqColumns = kDim / (kWarps / kDqGroups);  // features of dq that a warp has
constexpr int kBytesP = kTileM * TileP::kRowBytes;
constexpr int kStages = kRows0 + kRows1;  // where the queries' stages begin
constexpr int kP = kStages + 2 * kStageBytes, kDs = kP + kBytesP;

static_assert(kGroups * kHalves == kWarps && kWarps % kDqGroups == 0, "warps cover the tiles");
static_assert(kColumns % 16 == 0 && kCols0PerWarp % 16 == 0 && kCols1PerWarp % 16 == 0 &&
                  kDqColumns % 16 == 0,
              "fragments of B are read in pairs");
static_assert(kDs + 2 * kBytesP == Config::smem_bytes, "the host knows the size");

extern __shared__ __align__(128) unsigned char smem[];

// Stores a warp's scores, rounded. `tile`: a lane's address in the warp's first 16 rows.
__device__ __forceinline__ void store_scores(unsigned tile, const float (&s)[2][kColumns / 2],
                                             int column) {
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      unsigned p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        p[i] = tile::pack<T>(s[m][8 * n + 2 * i], s[m][8 * n + 2 * i + 1]);
      ptx::stmatrix_x4(TileP::at_chunks(tile, column / 16 + n) + m * 16 * TileP::kRowBytes, p);
    }
}

// Stores a warp's part of a result where the block gathers it, rounded.
template <class Tile, int kN>
__device__ __forceinline__ void stage_result(unsigned char* tile, const float (&o)[2][kN / 2],
                                             float scale, int row, int chunk) {
  const int lane = ptx::thread_index() % 32;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const int at = Tile::at(row + 16 * m + lane / 4 + i % 2 * 8, chunk + i / 2);
      *reinterpret_cast<unsigned*>(tile + at + lane % 4 * 4) =
          tile::pack<T>(o[m][2 * i] * scale, o[m][2 * i + 1] * scale);
    }
}

// Writes a result that lies in shared memory.
template <class Tile, int kN>
__device__ __forceinline__ void write_result(void* result, const unsigned char* tile, int rows,
                                             long long row, int heads, int head, int columns) {
  T* const out = static_cast<T*>(result) + (row * heads + head) * columns;
  for (int i = ptx::thread_index(); i < kTileM * (kN / 8); i += kThreads) {
    const int r = i / (kN / 8), chunk = i % (kN / 8);
    if (r < rows && chunk * 8 < columns)
      *reinterpret_cast<uint4*>(out + static_cast<long long>(r) * heads * columns + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile + Tile::at(r, chunk));
  }
}

// dq of 32 queries of the tile += dS K, `first` being the first of its features.
__device__ __forceinline__ void add_dq(const ForwardParams& params, const BackwardParams& backward,
                                       const Block& block, unsigned ds, unsigned keys,
                                       const Columns& columns, int row, int first, float scale) {
  float x[2][kDqColumns / 2] = {};
  multiply<kTileM / 16, kDqColumns>(
      x,
      [&](unsigned (&frag)[4], int step, int m) {
        ptx::ldmatrix_x4_trans(frag,
                               TileP::at_chunks(ds, row / 16 + m) + step * 16 * TileP::kRowBytes);
      },
      [&](unsigned (&frag)[4], int step, int n) {
        ptx::ldmatrix_x4_trans(
            frag, Tile0::at_chunks(keys, first / 16 + n) + step * 16 * Tile0::kRowBytes);
      });
  const int lane = ptx::thread_index() % 32;
  const int query = columns.first + row + tile::lane_row(lane);
  const long long index = params.cu_seqlens_q != nullptr ? 0 : block.seq.index;
  const long long row_stride = static_cast<long long>(params.heads_q) * params.head_dim;
  float* const sums = backward.dq_sums +
                      (index * params.seqlen_q + block.seq.begin_q + query) * row_stride +
                      columns.head * params.head_dim + first + tile::lane_column(lane);
  const auto add = [&](int columns) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int down = 16 * m + 8 * half;
        float* const to = sums + down * row_stride;
        if (query + down < block.seq.seqlen_q)
#pragma unroll
          for (int n = 0; n < kDqColumns / 8; ++n)
            if (columns == kDim || first + 8 * n < columns)
              ptx::red_add(to + 8 * n, x[m][4 * n + 2 * half] * scale,
                           x[m][4 * n + 2 * half + 1] * scale);
      }
  };
  if (params.head_dim == kDim)
    add(kDim);  // asks no questions
  else
    add(params.head_dim);
}

// Sets scores of keys that their query does not see, or that are not there, to -inf. This lane's
// first element is of `key` and `query`.
__device__ __forceinline__ void hide(float (&s)[2][kColumns / 2], const Block& block, int key,
                                     int query) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const tile::Range seen = block.visibility.keys(query + tile::fragment_column(i));
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int at = key + 16 * m + tile::fragment_row(i);
      if (at < seen.begin || at >= seen.end) s[m][i] = tile::negative_infinity();
    }
  }
}

// From S to P.
__device__ __forceinline__ void exponentiate(float (&s)[2][kColumns / 2], float scale_log2,
                                             const float4* statistics) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const float4 known = statistics[i / 4 * 4];  // lse and delta of two queries
    const float lse = i % 2 == 0 ? known.x : known.z;
#pragma unroll
    for (int m = 0; m < 2; ++m) s[m][i] = exponential(s[m][i], scale_log2, lse);
  }
}

// From dP to dS, with P as the warp at the same scores has stored it.
__device__ __forceinline__ void multiply_gradients(float (&dp)[2][kColumns / 2], unsigned p_tile,
                                                   int column, const float4* statistics) {
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      unsigned words[4];
      ptx::ldmatrix_x4(words,
                       TileP::at_chunks(p_tile, column / 16 + n) + m * 16 * TileP::kRowBytes);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 known = statistics[4 * (2 * n + i / 4)];
        const float p = static_cast<float>(reinterpret_cast<const T*>(words)[i]);
        float& x = dp[m][8 * n + i];
        x = p * (x - (i % 2 == 0 ? known.y : known.w));
      }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    backward_fused_sm80(const __grid_constant__ ForwardParams params,
                        const __grid_constant__ BackwardParams backward) {
  __shared__ Block block;
  __shared__ ptx::Mbarrier stage_ready, ds_ready;  // eight warps arrive for each tile of queries
  {
    const Block found =
        find_block(params, blockIdx.x, gridDim.x, blockIdx.z * gridDim.y + blockIdx.y);
    if (found.seq.index >= params.batch || found.seq.tile < 0) return;
    if (threadIdx.x == 0) {
      block = found;
      ptx::mbarrier_init(stage_ready, kWarps);
      ptx::mbarrier_init(ds_ready, kWarps);
    }
    __syncthreads();
  }
  const unsigned keys = ptx::shared_address(smem), values = keys + kRows0;
  const int warp = threadIdx.x / 32, group = warp % kGroups,
            half = kSplit ? warp / kGroups % kParts : warp / kGroups;
  const bool at_gradients = kSplit && warp >= kWarps / 2;  // at dP, dS and dk
  const int warp_row = group * 32, warp_column = half * kColumns;
  const int dq_row = warp % kDqGroups * 32, dq_column = warp / kDqGroups * kDqColumns;
  const int count = block.heads * block.columns;
  const float scale = static_cast<float>(params.scale), scale_log2 = scale * tile::kLog2e;
  const int last_row = min(block.first_row + warp_row + 31, block.rows - 1);
  const tile::Range some = block.visibility.rows_of_any(block.first_row + warp_row, last_row);

  const auto load_columns = [&](int n, const Columns& columns) {
    const unsigned stage = keys + kStages + n % 2 * kStageBytes;
    load_pair<false, kTileN>(params, backward, block, stage, stage + kCols0, columns.head,
                             columns.first);
  };
  const auto load_column = [&](const Columns& columns) {
    return load_statistics(params, backward, block, columns.head, columns.first + threadIdx.x);
  };
  const auto store_column = [&](int n, const float2& loaded) {
    float2* const statistics =
        reinterpret_cast<float2*>(smem + kStages + n % 2 * kStageBytes + kCols0 + kCols1);
    statistics[threadIdx.x] = for_exponential(loaded);
  };

  load_pair<true, kTileM>(params, backward, block, keys, values, block.head, block.first_row);
  Columns columns(block);
  ColumnSource source(params, backward, block, columns.head, columns.first);
  const bool has_column = threadIdx.x < kTileN;
  const bool whole_rows = params.head_dim == kDim && params.head_dim_v == kDimV;
  if (count > 0) {
    load_columns(0, columns);
    if (has_column) store_column(0, load_column(columns));
  }
  ptx::cp_async_wait_all();
  tile::arrive_warp(stage_ready);

  // Where roles are split dv is what a warp has, whichever it is.
  float dk[2][kCols0PerWarp / 2] = {}, dv[2][kCols1PerWarp / 2] = {};
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const unsigned stage = keys + kStages + n % 2 * kStageBytes;
    const unsigned ds_tile = keys + kDs + n % 2 * kBytesP;
    const unsigned lane_p = warp_row * TileP::kRowBytes + TileP::lane_row_major();
    ptx::mbarrier_wait(stage_ready, n % 2);
    float2 loaded;
    if (n + 1 < count) {
      const Columns next = columns.after(block);
      if (next.first > columns.first)
        source.advance(params, backward);
      else
        source = ColumnSource(params, backward, block, next.head, next.first);
      if (whole_rows && next.first + kTileN <= block.seq.seqlen_q) {
        const unsigned to = keys + kStages + (n + 1) % 2 * kStageBytes;
        source.load(params, backward, to, to + kCols0);
      } else {
        load_columns(n + 1, next);
      }
      if (has_column) loaded = load_column(next);
    }

    const int row = block.first_row + warp_row, column = columns.first + warp_column;
    // Warps of a group go on together.
    const bool active = row < block.rows && some.overlaps(columns.first, kTileN);
    if (active) {
      const unsigned k = keys + warp_row * Tile0::kRowBytes + Tile0::lane_row_major();
      const unsigned q = stage + warp_column * Tile0::kRowBytes + Tile0::lane_column_major();
      const unsigned v = values + warp_row * Tile1::kRowBytes + Tile1::lane_row_major();
      const unsigned dout =
          stage + kCols0 + warp_column * Tile1::kRowBytes + Tile1::lane_column_major();
      float s[2][kColumns / 2] = {}, dp[2][kColumns / 2] = {};
      if constexpr (kSplit) {
        multiply_rows<Tile0, kDim / 16, kColumns>(s, at_gradients ? v : k, at_gradients ? dout : q);
      } else if constexpr (kDim == kDimV && kColumns <= 32) {
        multiply_rows_in_turns<Tile0, kDim / 16, kColumns>(s, dp, k, q, v, dout);
      } else {
        multiply_rows<Tile0, kDim / 16, kColumns>(s, k, q);
        multiply_rows<Tile1, kDimV / 16, kColumns>(dp, v, dout);
      }
      const int lane = ptx::thread_index() % 32;
      const float4* const statistics =
          reinterpret_cast<const float4*>(smem + kStages + n % 2 * kStageBytes + kCols0 + kCols1) +
          (warp_column + tile::lane_column(lane)) / 2;
      const tile::Range all = block.visibility.rows_of_all(row, row + 31);
      const bool whole = all.contains(column, kColumns) && row + 32 <= block.rows;
      if (!whole && !at_gradients)
        hide(s, block, row + tile::lane_row(lane), column + tile::lane_column(lane));
      if constexpr (kSplit) {
        if (!at_gradients) {
          exponentiate(s, scale_log2, statistics);
          store_scores(keys + kP + lane_p, s, warp_column);
        }
        ptx::bar_sync(1 + group, 32 * kHalves);  // P of the group's keys is there
        if (at_gradients) {
          multiply_gradients(s, keys + kP + lane_p, warp_column, statistics);
          store_scores(ds_tile + lane_p, s, warp_column);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          const float4 known = statistics[4 * j];  // lse and delta of two queries
#pragma unroll
          for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int i = 4 * j + e;
              const float lse = e % 2 == 0 ? known.x : known.z;
              const float delta = e % 2 == 0 ? known.y : known.w;
              s[m][i] = exponential(s[m][i], scale_log2, lse);
              dp[m][i] = s[m][i] * (dp[m][i] - delta);
            }
        }
        store_scores(keys + kP + lane_p, s, warp_column);
        store_scores(ds_tile + lane_p, dp, warp_column);
      }
    } else if (!kSplit || at_gradients) {
      const float zeros[2][kColumns / 2] = {};
      store_scores(ds_tile + lane_p, zeros, warp_column);
    }
    tile::arrive_warp(ds_ready);
    if (active && kSplit) {
      if (at_gradients) ptx::bar_sync(1 + kGroups + group, 32 * kParts);  // dS of the group's keys
      multiply_columns<Tile1, kCols1PerWarp>(
          dv, (at_gradients ? ds_tile : keys + kP) + lane_p,
          stage + (at_gradients ? 0 : kCols0) + Tile1::lane_row_major(),
          half * (kCols1PerWarp / 16));
    } else if (active) {
      ptx::bar_sync(1 + group, 32 * kHalves);  // P and dS of the group's keys are there
      multiply_columns<Tile1, kCols1PerWarp>(dv, keys + kP + lane_p,
                                             stage + kCols0 + Tile1::lane_row_major(),
                                             half * (kCols1PerWarp / 16));
      multiply_columns<Tile0, kCols0PerWarp>(dk, ds_tile + lane_p, stage + Tile0::lane_row_major(),
                                             half * (kCols0PerWarp / 16));
    }
    if (n + 1 < count) {
      if (has_column) store_column(n + 1, loaded);
      ptx::cp_async_wait_all();
      tile::arrive_warp(stage_ready);
    }
    ptx::mbarrier_wait(ds_ready, n % 2);
    add_dq(params, backward, block, ds_tile + TileP::lane_column_major(),
           keys + Tile0::lane_row_major(), columns, dq_row, dq_column, scale);
    columns = columns.after(block);
  }

  float zeros = 0.0f;  // NaN where a result is not finite
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < kCols0PerWarp / 2; ++i) zeros = fmaf(dk[m][i], 0.0f, zeros);
#pragma unroll
    for (int i = 0; i < kCols1PerWarp / 2; ++i) zeros = fmaf(dv[m][i], 0.0f, zeros);
  }
  if (zeros != 0.0f) *backward.nonfinite = 1;
  ptx::cp_async_wait_all();
  __syncthreads();  // keys and values have been read
  if (!kSplit)
    stage_result<Tile0, kCols0PerWarp>(smem, dk, scale, warp_row, half * (kCols0PerWarp / 8));
  stage_result<Tile1, kCols1PerWarp>(smem + (at_gradients ? 0 : kRows0), dv,
                                     at_gradients ? scale : 1.0f, warp_row,
                                     half * (kCols1PerWarp / 8));
  __syncthreads();
  const long long index = params.cu_seqlens_q != nullptr ? 0 : block.seq.index;
  const long long first = index * params.seqlen_k + block.seq.begin_k + block.first_row;
  const int rows = min(kTileM, block.rows - block.first_row);
  write_result<Tile0, kDim>(backward.dk, smem, rows, first, params.heads_kv, block.head,
                            params.head_dim);
  write_result<Tile1, kDimV>(backward.dv, smem + kRows0, rows, first, params.heads_kv, block.head,
                             params.head_dim_v);
}
