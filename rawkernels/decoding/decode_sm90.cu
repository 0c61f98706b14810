// Decoding for few sequences on Hopper, where latency is what a call takes: a cluster of blocks for
// each sequence and key head, which share out its keys and merge through each other's shared
// memory. Where there are fewer of these than clusters can run, each has several, the last of which
// merges what they leave in global memory.
//
//   q, out (batch, seqlen_q, heads_q, head_dim), at most kRows rows, 8 or 16 (query heads that
//   share a key head, times query tokens); caches contiguous or in pages of at least kWarpKeys;
//   float16 or bfloat16, head_dims of exactly kHeadDim, everything 16-byte aligned. DecodeParams
//   has the rest. The copy engine brings tiles of kWarpKeys keys, a ring of kStages for each warp;
//   a warp's products are decode_sm80.cu's. Grid: (kCluster times clusters, key heads, batch).
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
constexpr int kRows = Config::rows;
constexpr int kChunks = kHeadDim / 8;
constexpr int kOwnColumns = kHeadDim / kCluster;  // of O, which a block merges for the cluster
// Rows that the threads merge at a time, four columns each.
constexpr int kPassRows = Config::threads * 4 / kHeadDim;
constexpr int kPasses = kRows > kPassRows ? kRows / kPassRows : 1;
static_assert(kPasses <= kCluster, "a lane for each");

using QTile = decoding::SwizzledRows<kHeadDim>;
using Tile = decoding::Panels<8, kWarpKeys * 128>;  // as the copy engine writes them
using Stage = decoding::Stage<T, kWarpKeys, kHeadDim>;
using Slice = decoding::Slice<T, Tile, kHeadDim, kRows, kWarpKeys, 2>;
using Writer = decoding::Writer<T, kRows, kHeadDim, true, 1>;
using Vec = decoding::Vec<float>;

struct Staged {  // a warp's O
  float o[kRows][kHeadDim];
};
static_assert(sizeof(Staged) <= kStages * sizeof(Stage), "it takes the place of the ring");
static_assert(kOwnColumns % 4 == 0 && 32 % kCluster == 0, "whole vectors; parts are lanes");
static_assert(kPassRows * kPasses == kRows || kPassRows > kRows, "whole warps merge");

struct Smem {
  union {
    alignas(1024) Stage ring[kStages];
    Staged staged;
  } of_warp[kWarps];
  alignas(128) T q[kRows * kHeadDim];
  Vec parts[kCluster][kRows][kOwnColumns / 4];  // written by the cluster's blocks
  float2 part_max_sum[kCluster][kRows];
  float2 max_sum[kWarps][kRows];
  ptx::Mbarrier full[kWarps][kStages];
  decoding::Rows<T, kRows> rows;
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
  for (int warp = 0; warp < kWarps; ++warp) whole.max = fmaxf(whole.max, smem.max_sum[warp][row].x);
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const float2 max_sum = smem.max_sum[warp][row];
    const float* o = smem.of_warp[warp].staged.o[row];
    whole.add(reinterpret_cast<const Vec&>(o[decoding::permuted_column<8>(row, column)]), max_sum.x,
              max_sum.y);
  }
  return whole;
}

// Four of this block's columns of a row, merged from the cluster's parts, of which each of kCluster
// lanes has one.
__device__ __forceinline__ decoding::Partial<T> part_of_cluster(const Smem& smem, int row, int vec,
                                                                int part) {
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
  return whole;
}

// What a block of one of several clusters leaves of its columns of a row, in units of 16 bytes that
// each hold the launch's ticket, as combine.cuh's do.
struct Part {
  ptx::B128 max_sum;
  ptx::B128 o[kOwnColumns / 4][2];
};
static_assert(sizeof(Part) * kCluster == 16 * (kHeadDim / 2 + kCluster),
              "as part_bytes of Config's");

__device__ __forceinline__ Part& part_at(const DecodeParams& params, int cluster, int row) {
  const unsigned pair = blockIdx.z * gridDim.y + blockIdx.y;
  const unsigned block = pair * gridDim.x + cluster * kCluster + blockIdx.x % kCluster;
  return static_cast<Part*>(params.partials)[block * kRows + row];
}

// By kCluster lanes, which all have the whole.
__device__ __forceinline__ void put_part(const DecodeParams& params, int row, int vec, int lane,
                                         const decoding::Partial<T>& whole) {
  Part& part = part_at(params, blockIdx.x / kCluster, row);
  const auto put = [&](ptx::B128& unit, float x, float y) {
    const float2 numbers = {x, y};
    ptx::store_relaxed(&unit,
                       {reinterpret_cast<const unsigned long long&>(numbers), params.ticket});
  };
  if (lane == 0) put(part.o[vec][0], whole.o.x[0], whole.o.x[1]);
  if (lane == 1) put(part.o[vec][1], whole.o.x[2], whole.o.x[3]);
  if (lane == 2 && vec == 0) put(part.max_sum, whole.max, whole.sum);
}

// The clusters' parts of four columns of a row, of which each of kCluster lanes takes every
// kCluster-th. All of them run, or have run, as in combine.cuh.
__device__ __forceinline__ decoding::Partial<T> merge_parts(const DecodeParams& params, int row,
                                                            int vec, int lane) {
  const int parts = gridDim.x / kCluster;
  decoding::Partial<T> whole;
#pragma unroll 1
  for (int first = 0; first < parts; first += kCluster) {
    Part& part = part_at(params, min(first + lane, parts - 1), row);
    ptx::B128 max_sum, o[2];
    do {
      max_sum = ptx::load_relaxed(&part.max_sum);
      o[0] = ptx::load_relaxed(&part.o[vec][0]);
      o[1] = ptx::load_relaxed(&part.o[vec][1]);
    } while (__any_sync(~0u, max_sum.high != params.ticket || o[0].high != params.ticket ||
                                 o[1].high != params.ticket));
    part.o[vec][0].high = part.o[vec][1].high = 0;
    if (vec == 0) part.max_sum.high = 0;  // which all lanes have read
    if (first + lane < parts) {
      const float2 x = reinterpret_cast<const float2&>(max_sum.low);
      whole.raise(fmaxf(whole.max, x.x));
      const float2 columns[2] = {reinterpret_cast<const float2&>(o[0].low),
                                 reinterpret_cast<const float2&>(o[1].low)};
      whole.add({columns[0].x, columns[0].y, columns[1].x, columns[1].y}, x.x, x.y);
    }
  }
#pragma unroll
  for (int distance = 1; distance < kCluster; distance *= 2) whole.add_lane(distance);
  return whole;
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(Config::threads, 1)
    decode_sm90(const __grid_constant__ DecodeParams params, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  Smem& smem = *reinterpret_cast<Smem*>(dynamic_smem);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % kCluster, head = blockIdx.y;
  const int rows = params.seqlen_q * params.group;
  ptx::cluster_arrive();  // awaited before others' shared memory is written

  // What takes long to come is asked for first. Tiles are dealt out in turn to the warps of all
  // blocks, so that where a warp begins, unless a window says, is known before the length is.
  decoding::Piece piece = {decoding::sequence_at(params, blockIdx.z), head, 0};
  piece.origin = params.window_left == kUnbounded
                     ? params.first_key
                     : decoding::visible_keys(params, piece.seq, 0).begin;
  piece.origin &= -kWarpKeys;
  const int round = kWarpKeys * kWarps * gridDim.x;
  int key = piece.origin + (blockIdx.x * kWarps + warp) * kWarpKeys;
  // Pages of this warp's next 32 tiles, a lane each, and of the 32 after them.
  const int* table = nullptr;
  if (params.page_table != nullptr)
    table = params.page_table + piece.seq.index * params.table_stride;
  const auto look_up = [&](int first) {
    const int mine = first + lane * round;
    return table != nullptr && mine < params.capacity ? table[mine >> params.page_shift]
                                                      : piece.seq.index;
  };
  int pages = look_up(key), later_pages = look_up(key + 32 * round);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(maps.k);
    ptx::prefetch_tensormap(maps.v);
  }
  load_queries(params, smem, rows, head);
  ptx::Mbarrier* const full = smem.full[warp];
  if (lane < kStages) ptx::mbarrier_init(full[lane], 1);
  ptx::fence_mbarrier_init();

  piece.begin = decoding::visible_keys(params, piece.seq, 0).begin;
  piece.end =
      max(piece.begin, decoding::visible_keys(params, piece.seq, piece.seq.seqlen_q - 1).end);
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
      later_pages = look_up(first + 33 * round);
    }
  };
  Stage(&ring)[kStages] = smem.of_warp[warp].ring;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kStages; ++i)
    if (key + i * round < piece.end) load(ring[i], full[i], key + i * round);

  smem.rows.locate(params, piece);
  ptx::cp_async_wait_all();
  __syncthreads();
  const tile::Range all_see = {smem.rows.keys(params, piece, kRows - 1).begin,
                               smem.rows.keys(params, piece, 0).end};
  Slice acc;
  acc.clear();
  int stage = 0, phase = 0;
#pragma unroll 1
  for (; key < piece.end; key += round) {
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
    if (key + kStages * round < piece.end) load(current, full[stage], key + kStages * round);
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  acc.add_up();
  acc.put_all_rows(smem.of_warp[warp].staged.o, smem.max_sum[warp]);
  __syncthreads();
  ptx::cluster_wait();
  // Four columns of a row, and of those kPassRows further on: chains of instructions side by side.
  constexpr int kVecs = kHeadDim / 4;
  const int row = threadIdx.x / kVecs;
  decoding::Partial<T> whole[kPasses];
  if (row < kRows) {
    const int column_vec = threadIdx.x % kVecs, owner = column_vec / (kOwnColumns / 4);
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
      whole[i] = part_of_block(smem, row + i * kPassRows, column_vec * 4);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int its_row = row + i * kPassRows;
      *ptx::mapa(&smem.parts[rank][its_row][column_vec % (kOwnColumns / 4)], owner) = whole[i].o;
      if (column_vec < kCluster)
        *ptx::mapa(&smem.part_max_sum[rank][its_row], column_vec) =
            make_float2(whole[i].max, whole[i].sum);
    }
  }
  ptx::cluster_barrier();
  if (row >= kRows) return;

  // This block's columns, with the cluster's parts in the lanes.
  const int vec = threadIdx.x / kCluster % (kOwnColumns / 4), part = threadIdx.x % kCluster;
#pragma unroll
  for (int i = 0; i < kPasses; ++i)
    whole[i] = part_of_cluster(smem, row + i * kPassRows, vec, part);
  if (gridDim.x > kCluster) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) put_part(params, row + i * kPassRows, vec, part, whole[i]);
    if (blockIdx.x + kCluster < gridDim.x) return;
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
      whole[i] = merge_parts(params, row + i * kPassRows, vec, part);
  }
  // All of them have the results: each writes one.
  int its_row = row;
#pragma unroll
  for (int i = 1; i < kPasses; ++i)
    if (part == i) {
      whole[0] = whole[i];
      its_row += i * kPassRows;
    }
  const decoding::Parts alone = {0, 1, false, false, false, 0};
  const Writer writer = {params, piece, alone};
  if (part < kPasses && its_row < rows) writer.put(its_row, rank * kOwnColumns + vec * 4, whole[0]);
}
