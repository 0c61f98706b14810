// Decoding for few sequences on Hopper, where latency is what a call takes: a cluster of blocks for
// each sequence and key head, which share out its keys and merge through each other's shared
// memory.
//
//   q, out (batch, seqlen_q, heads_q, head_dim), at most 8 rows (query heads that share a key head,
//   times query tokens); caches contiguous or in pages of at least kWarpKeys; float16 or bfloat16,
//   head_dims of exactly kHeadDim, everything 16-byte aligned. DecodeParams has the rest. The copy
//   engine brings tiles of kWarpKeys keys, a ring of kStages for each warp; a warp's products are
//   decode_sm80.cu's. Grid: (kCluster, key heads, batch).
#include "decoding/combine.cuh"
#include "decoding/slice.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"

using T = Config::dtype;
constexpr int kHeadDim = Config::head_dim;
constexpr int kWarpKeys = Config::warp_keys;
constexpr int kWarps = Config::warps;
constexpr int kStages = Config::stages;
constexpr int kCluster = Config::cluster;
constexpr int kRows = 8;
constexpr int kChunks = kHeadDim / 8;
constexpr int kOwnColumns = kHeadDim / kCluster;  // of O, which a block merges for the cluster

using QTile = decoding::SwizzledRows<kHeadDim>;
using Tile = decoding::Panels<8, kWarpKeys * 128>;  // as the copy engine writes them
using Stage = decoding::Stage<T, kWarpKeys, kHeadDim>;
using Slice = decoding::Slice<T, Tile, kHeadDim, kRows, kWarpKeys>;
using Writer = decoding::Writer<T, kRows, kHeadDim, true, 1>;
using Vec = decoding::Vec<float>;

struct Staged {  // a warp's O
  float o[2][4][kHeadDim];
};
static_assert(sizeof(Staged) <= kStages * sizeof(Stage), "it takes the place of the ring");
static_assert(kOwnColumns % 4 == 0 && 32 % kCluster == 0, "whole vectors; parts are lanes");
static_assert(kRows * kHeadDim / 4 % Config::threads == 0 || kHeadDim == 64, "whole warps merge");

struct Smem {
  union {
    alignas(1024) Stage ring[kStages];
    Staged staged;
  } of_warp[kWarps];
  alignas(128) T q[kRows * kHeadDim];
  Vec parts[kCluster][kRows][kOwnColumns / 4];  // written by the cluster's blocks
  float2 part_max_sum[kCluster][kRows];
  float2 max_sum[kWarps][2][4];
  ptx::Mbarrier full[kWarps][kStages];
  decoding::Rows<kRows> rows;
};
static_assert(sizeof(Smem) <= Config::smem_bytes, "Config has to ask for all of it");

struct Maps {
  ptx::TensorMap k, v;
};

__device__ __forceinline__ void load_queries(const DecodeParams& params, Smem& smem, int rows,
                                             int head) {
  for (int i = threadIdx.x; i < kRows * kChunks; i += Config::threads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int token = divided_by_group(params, row);
    const T* source = static_cast<const T*>(params.q) + blockIdx.z * params.q_stride.batch +
                      token * params.q_stride.seq +
                      (head * params.group + row - token * params.group) * params.q_stride.head +
                      chunk * 8;
    ptx::cp_async_16(ptx::shared_address(smem.q) + QTile::at(row, chunk), source, row < rows);
  }
}

__device__ __forceinline__ void locate_rows(const DecodeParams& params,
                                            const decoding::Piece& piece, int rows,
                                            decoding::Rows<kRows>& located) {
  if (threadIdx.x >= kRows) return;
  const int row = min(static_cast<int>(threadIdx.x), rows - 1);
  const int token = divided_by_group(params, row);
  located.position[threadIdx.x] = piece.seq.length - piece.seq.seqlen_q + token;
  if (params.alibi_slopes != nullptr)
    located.slope[threadIdx.x] =
        tile::kLog2e *
        static_cast<const float*>(
            params.alibi_slopes)[piece.seq.index * params.alibi_batch_stride +
                                 piece.head * params.group + row - token * params.group];
}

// Zeros for values of keys that the sequence or the window does not have: they may be NaN, and
// 0 · NaN is NaN.
__device__ __forceinline__ void clear_values(T* v, int key, int begin, int end) {
  for (int i = threadIdx.x % 32; i < kWarpKeys * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (key + row < begin || key + row >= end)
      *reinterpret_cast<uint4*>(reinterpret_cast<char*>(v) + Tile::at(row, chunk)) = {};
  }
  ptx::fence_proxy_async();
  __syncwarp();
}

// The block's warps' parts of a row's four columns, and those of its maximum and sum.
__device__ __forceinline__ decoding::Partial<T> part_of_block(const Smem& smem, int row,
                                                              int column) {
  decoding::Partial<T> whole;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp)
    whole.max = fmaxf(whole.max, smem.max_sum[warp][row / 4][row % 4].x);
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const float2 max_sum = smem.max_sum[warp][row / 4][row % 4];
    const float* o = smem.of_warp[warp].staged.o[row / 4][row % 4];
    whole.add(reinterpret_cast<const Vec&>(o[decoding::permuted_column(row % 4, column)]),
              max_sum.x, max_sum.y);
  }
  return whole;
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(Config::threads, 1)
    decode_sm90(const __grid_constant__ DecodeParams params, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  Smem& smem = *reinterpret_cast<Smem*>(dynamic_smem);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x, head = blockIdx.y;
  const int rows = params.seqlen_q * params.group;
  ptx::cluster_arrive();  // awaited before others' shared memory is written

  // What takes long to come is asked for first.
  decoding::Piece piece = {decoding::sequence_at(params, blockIdx.z), head, 0};
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(maps.k);
    ptx::prefetch_tensormap(maps.v);
  }
  load_queries(params, smem, rows, head);
  ptx::Mbarrier* const full = smem.full[warp];
  if (lane < kStages) ptx::mbarrier_init(full[lane], 1);
  ptx::fence_mbarrier_init();

  // The block's share of the keys: whole rounds of tiles for its warps, but for the last block.
  piece.begin = decoding::visible_keys(params, piece.seq, 0).begin;
  piece.end =
      max(piece.begin, decoding::visible_keys(params, piece.seq, piece.seq.seqlen_q - 1).end);
  piece.origin = piece.begin & -kWarpKeys;
  constexpr int kRound = kWarpKeys * kWarps;
  const int rounds = (piece.end - piece.origin + kRound - 1) / kRound;
  int key = piece.origin + (rounds * rank / kCluster * kWarps + warp) * kWarpKeys;
  const int last = min(piece.end, piece.origin + rounds * (rank + 1) / kCluster * kRound);

  // Pages of this warp's next 32 tiles, a lane each, and of the 32 after them.
  const int* table = nullptr;
  if (params.page_table != nullptr)
    table = params.page_table + piece.seq.index * params.table_stride;
  const auto look_up = [&](int first) {
    const int mine = first + lane * kRound;
    return table != nullptr && mine < last ? table[max(mine, piece.begin) >> params.page_shift]
                                           : piece.seq.index;
  };
  int pages = look_up(key), later_pages = look_up(key + 32 * kRound);
  int place = 0;  // in `pages`, of the next tile to be asked for
  const auto load = [&](Stage& stage, ptx::Mbarrier& barrier, int first) {
    const int page = __shfl_sync(~0u, pages, place);
    if (lane == 0) {
      const int slot = first & ((1 << params.page_shift) - 1);
      ptx::mbarrier_arrive_expect_tx(barrier, sizeof(Stage));
      ptx::tma_load(stage.k, maps.k, barrier, 0, slot, 0, head, page, ptx::kEvictFirst);
      ptx::tma_load(stage.v, maps.v, barrier, 0, slot, 0, head, page, ptx::kEvictFirst);
    }
    if (++place == 32) {
      place = 0;
      pages = later_pages;
      later_pages = look_up(first + 33 * kRound);
    }
  };
  Stage(&ring)[kStages] = smem.of_warp[warp].ring;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kStages; ++i)
    if (key + i * kRound < last) load(ring[i], full[i], key + i * kRound);

  locate_rows(params, piece, rows, smem.rows);
  ptx::cp_async_wait_all();
  __syncthreads();
  const decoding::KeyRange all_see = {smem.rows.keys(params, piece, kRows - 1).begin,
                                      smem.rows.keys(params, piece, 0).end};
  Slice acc;
  acc.clear();
  int stage = 0, phase = 0;
#pragma unroll 1
  for (; key < last; key += kRound) {
    Stage& current = ring[stage];
    ptx::mbarrier_wait(full[stage], phase);
    Slice::Scores s;
    Slice::multiply_scores(s, ptx::shared_address(current.k), ptx::shared_address(smem.q));
    const bool masked = key < all_see.begin || key + kWarpKeys > all_see.end;
    Slice::finish_scores(s, params, smem.rows, piece, key, 0, masked);
    acc.update_softmax(s);
    if (masked) clear_values(current.v, key, piece.begin, piece.end);
    acc.multiply_values(s, ptx::shared_address(current.v));
    __syncwarp();
    if (key + kStages * kRound < last) load(current, full[stage], key + kStages * kRound);
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  acc.add_up();
#pragma unroll
  for (int half = 0; half < 2; ++half)
    acc.put_rows(0, half, smem.of_warp[warp].staged.o[half], smem.max_sum[warp][half], 0);
  __syncthreads();
  ptx::cluster_wait();
  constexpr int kVecs = kHeadDim / 4;
  for (int i = threadIdx.x; i < kRows * kVecs; i += Config::threads) {
    const int row = i / kVecs, vec = i % kVecs, owner = vec / (kOwnColumns / 4);
    const decoding::Partial<T> part = part_of_block(smem, row, vec * 4);
    *ptx::mapa(&smem.parts[rank][row][vec % (kOwnColumns / 4)], owner) = part.o;
    if (vec < kCluster)
      *ptx::mapa(&smem.part_max_sum[rank][row], vec) = make_float2(part.max, part.sum);
  }
  ptx::cluster_barrier();

  // This block's columns, with the cluster's parts in neighbouring lanes.
  const decoding::Parts alone = {0, 1, false, false, false, 0};
  const Writer writer = {params, piece, alone};
  for (int i = threadIdx.x; i < kRows * kVecs; i += Config::threads) {
    const int part = i % kCluster, vec = i / kCluster % (kOwnColumns / 4), row = i / kVecs;
    const float2 max_sum = smem.part_max_sum[part][row];
    decoding::Partial<T> whole;
    whole.max = max_sum.x;
#pragma unroll
    for (int distance = 1; distance < kCluster; distance *= 2)
      whole.max = fmaxf(whole.max, __shfl_xor_sync(~0u, whole.max, distance));
    whole.add(smem.parts[part][row][vec], max_sum.x, max_sum.y);
#pragma unroll
    for (int distance = 1; distance < kCluster; distance *= 2) {
      whole.sum += __shfl_xor_sync(~0u, whole.sum, distance);
#pragma unroll
      for (int e = 0; e < 4; ++e) whole.o.x[e] += __shfl_xor_sync(~0u, whole.o.x[e], distance);
    }
    if (part == 0 && row < rows) writer.put(row, rank * kOwnColumns + vec * 4, whole);
  }
}
