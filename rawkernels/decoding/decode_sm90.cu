// Decoding for few sequences on Hopper, where latency decides: a cluster of blocks for each
// sequence and key head, whose blocks share the keys and merge through distributed shared memory.
// Where there are fewer such pairs than clusters can run, each pair has several clusters, the last
// of which merges the partial results that they leave in global memory.
//
//   q, out (batch, seqlen_q, heads_q, head_dim), at most kRows rows, 8 or 16 (query heads that
//   share a key head, times query tokens), or several tiles of as many where Config::row_tiles;
//   caches contiguous or in pages of at least kBoxKeys;
//   float16 or bfloat16, head_dims of exactly kHeadDim where Config::whole_rows, else multiples of
//   8 up to it; everything 16-byte aligned. K and V may be codes (Config::k_format, v_format:
//   slice_codes.cuh). DecodeParams has the rest. TMA loads tiles of kWarpKeys keys into a ring of
//   kStages for each warp; a warp's products are decode_sm80.cu's. Grid: (kCluster times clusters,
//   key heads times tiles of rows, batch). Each tile of rows reads the keys for itself: few tiles
//   find them in L2.
//
//   No deadlock: the blocks of a cluster are resident together, every thread of each arrives at the
//   barrier of the cluster, and every block sends to all before it waits. The last cluster of a
//   pair waits for the partial results of the pair's other clusters, which come before it in the
//   grid, wait for nobody, and are resident or have ended.
#include "decoding/cluster_merge.cuh"
#include "decoding/copied_scales.cuh"
#include "decoding/slice.cuh"
#include "decoding/storage.cuh"
#include "ptx/tma.cuh"

using T = Config::dtype;
constexpr int kHeadDim = Config::head_dim;
constexpr int kWarpKeys = Config::warp_keys;
constexpr int kWarps = Config::warps;
constexpr int kStages = Config::stages;
constexpr int kCluster = Config::cluster;
constexpr int kRows = Config::rows;
constexpr int kChunks = kHeadDim / 8;
constexpr int kBoxKeys = 16;  // that TMA copies at a time where pages have no more
constexpr int kBoxes = kWarpKeys / kBoxKeys;
constexpr int kOwnColumns = kHeadDim / kCluster;  // of O: a block merges these for the cluster
constexpr int kVecs = kHeadDim / 4;
// Rows that the threads merge at a time, four columns each.
constexpr int kPassRows = Config::threads * 4 / kHeadDim;
constexpr int kPasses = kRows > kPassRows ? kRows / kPassRows : 1;

using QTile = decoding::SwizzledRows<kHeadDim>;
using Tile = tile::Swizzled<8, kWarpKeys * 128>;  // as TMA writes them
using Storage =
    decoding::Storage<decoding::Stage<T, kWarpKeys, kHeadDim>,
                      decoding::Slice<T, Tile, kHeadDim, kRows, kWarpKeys, kHeadDim, 2>,
                      Config::k_format, Config::v_format, kHeadDim, kRows, kRows, kWarpKeys, 1, 1>;
using Stage = Storage::Tiles;
using Slice = Storage::Slice;
constexpr bool kCodes = Config::k_format != tile::kPlain;
static_assert(kCodes == (Config::v_format != tile::kPlain), "both are codes, or neither is");
static_assert(kCodes || kBoxes == 1, "a box of columns is a panel of a whole tile");
static_assert(!kCodes || Config::whole_rows, "rows of codes are not cut into panels");
using Scales =
    decoding::CopiedScales<Config::k_format, Config::v_format, kWarpKeys, Config::packed_scales>;
using Writer = decoding::Writer<T, kRows, kHeadDim, true, 1>;
using Inbox = decoding::Inbox<kRows, kHeadDim, kCluster>;
using ClusterPartials = decoding::ClusterPartials<T, kRows, kHeadDim, kCluster>;
static_assert(sizeof(ClusterPartials::Row) * kCluster == 16 * (kHeadDim / 2 + kCluster),
              "part_bytes of the Config must have room for it");

struct Staged {  // a warp's O
  float o[kRows][kHeadDim];
};
static_assert(sizeof(Staged) <= kStages * sizeof(Stage), "a warp's O takes the place of its ring");
static_assert(kOwnColumns % 4 == 0 && 32 % kCluster == 0,
              "columns are shared in whole vectors, and the cluster's blocks are lanes");
static_assert(kPassRows * kPasses == kRows || kPassRows > kRows,
              "the rows of a tile take a whole number of passes, or less than one");

struct Smem : Storage::Extra<kWarps, kStages, Scales> {
  union {
    alignas(1024) Stage ring[kStages];
    Staged staged;
  } of_warp[kWarps];
  alignas(128) T q[kRows * kHeadDim];
  Inbox inbox;
  float2 max_sum[kWarps][kRows];
  ptx::Mbarrier full[kWarps][kStages];
  decoding::Rows<T, kRows> rows;
};
static_assert(sizeof(Smem) <= Config::smem_bytes, "Config has to ask for all of it");

struct Maps {
  ptx::TensorMap k, v;
};

__device__ __forceinline__ void load_queries(const DecodeParams& params, Smem& smem, int rows,
                                             const decoding::Split& split) {
  constexpr int kCopies = kRows * kChunks;
#pragma unroll
  for (int first = 0; first < kCopies; first += Config::threads) {
    const unsigned i = first + threadIdx.x;
    if (kCopies % Config::threads != 0 && i >= kCopies) return;
    const int row = i / kChunks, chunk = i % kChunks;
    const int index = split.row_tile * kRows + row, token = divided_by_group(params, index);
    const int head = split.head * params.group + index - token * params.group;
    const T* source = static_cast<const T*>(params.q) + blockIdx.z * params.q_stride.batch +
                      token * params.q_stride.seq + head * params.q_stride.head + chunk * 8;
    ptx::cp_async_16(ptx::shared_address(smem.q) + QTile::at(row, chunk), source,
                     row < rows && (Config::whole_rows || chunk * 8 < params.head_dim));
  }
}

// Adds a tile of keys, in a warp's stage `number`, to its rows.
template <class AnySlice, class AnySmem>
__device__ __forceinline__ void attend(AnySlice& acc, const DecodeParams& params, AnySmem& smem,
                                       Stage& stage, int number, const decoding::Split& split,
                                       const tile::Range& common_keys, int key) {
  const unsigned q_rows = ptx::shared_address(smem.q);
  typename AnySlice::Scores s;
  if constexpr (kCodes) {
    Scales& scales = smem.scales[threadIdx.x / 32][number];
    if (!common_keys.contains(key, kWarpKeys)) scales.clear(key, split.begin, split.end);
    AnySlice::multiply_scores(s, stage, scales, Scales::of_keys(params, split.head), q_rows,
                              smem.query_rows, 0);
  } else {
    AnySlice::multiply_scores(s, ptx::shared_address(stage.k), q_rows);
  }
  const bool masked = !common_keys.contains(key, kWarpKeys);
  AnySlice::finish_scores(s, params, smem.rows, split, key, 0, masked);
  if constexpr (kCodes) {
    using VTile = typename AnySlice::Tiles::VTile;
    // Integers are harmless beside a scale of 0.
    if (masked && (Config::v_format == tile::kE4m3 || Config::v_format == tile::kE5m2))
      decoding::clear_values<VTile, kWarpKeys, VTile::kRowBytes / 16>(stage.v, key, split.begin,
                                                                      split.end);
    acc.add_values(s, stage, smem.scales[threadIdx.x / 32][number],
                   Scales::of_values(params, split.head));
  } else {
    acc.update_softmax(s);
    if (masked)
      decoding::clear_values<Tile, kWarpKeys, kChunks>(stage.v, key, split.begin, split.end);
    acc.multiply_values(s, ptx::shared_address(stage.v));
  }
}

// Brings the queries into the form that codes are multiplied with.
template <class AnySlice, class AnySmem>
__device__ __forceinline__ void prepare_queries(const DecodeParams& params, AnySmem& smem,
                                                const decoding::Split& split) {
  if constexpr (kCodes) {
    AnySlice::template prepare_queries<T, kRows, kWarps>(params, split, smem.q, smem.query_rows);
    __syncthreads();
  }
}

// Requests the scales of a tile of keys, which a warp loads into stage `number`.
template <class AnySmem>
__device__ __forceinline__ void load_scales(const DecodeParams& params, const AnySmem& smem,
                                            int number, const decoding::Split& split, int key,
                                            const int (&page)[kBoxes]) {
  if constexpr (kCodes) {
    const int own_page = page[Scales::first_key() < kBoxKeys ? 0 : kBoxes - 1];
    smem.scales[threadIdx.x / 32][number].copy(
        params, {key, split.begin, split.end, split.head, page_table(params).existing(own_page),
                 (1 << params.page_shift) - 1});
  }
}

// Requests a box of keys or values, without scales. Rows that are shorter than kHeadDim come panel
// by panel, of 64 columns, with zeros past their end.
template <class Element>
__device__ __forceinline__ void load_box(Element* tile, const ptx::TensorMap& map,
                                         ptx::Mbarrier& barrier, int slot, int head, int page) {
  if constexpr (Config::whole_rows) {
    ptx::tma_load(tile, map, barrier, 0, slot, 0, head, page, ptx::kEvictFirst);
  } else {
#pragma unroll
    for (int column = 0; column < kHeadDim; column += 64)
      ptx::tma_load(tile + column * kWarpKeys, map, barrier, column, slot, head, page,
                    ptx::kEvictFirst);
  }
}

// Where a tile's next keys lie, which another box brings.
template <class Element, int n>
__device__ __forceinline__ Element* box_of(Element (&tile)[n], int box) {
  return tile + box * (n / kBoxes);
}

// Four columns of a row, merged over this block's warps.
__device__ __forceinline__ decoding::Partial<T> merged_over_warps(const Smem& smem, int row,
                                                                  int column) {
  decoding::Partial<T> whole;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) whole.max = fmaxf(whole.max, smem.max_sum[warp][row].x);
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const float2 max_sum = smem.max_sum[warp][row];
    const float* o = smem.of_warp[warp].staged.o[row];
    whole.add(reinterpret_cast<const decoding::FourColumns<float>&>(
                  o[decoding::permuted_column<8>(row, column)]),
              max_sum.x, max_sum.y);
  }
  return whole;
}

__device__ __forceinline__ bool exists(const DecodeParams& params, int column) {
  return Config::whole_rows || column < params.head_dim_v;
}

template <class AnySmem>
__device__ __forceinline__ void open_inbox(AnySmem& smem) {
  if constexpr (kCluster > 1) smem.inbox.open();
}

// Merges what the blocks of a cluster, and of other clusters, have of their rows, and writes it.
template <class AnySmem>
__device__ __forceinline__ void merge_cluster(const DecodeParams& params, AnySmem& smem,
                                              const Writer& writer, int rank, int rows,
                                              decoding::Partial<T> (&whole)[kPasses]) {
  const int row = threadIdx.x / kVecs, column_vec = threadIdx.x % kVecs;
#pragma unroll
  for (int i = 0; i < kPasses; ++i)
    smem.inbox.send(rank, row + i * kPassRows, column_vec, whole[i]);
  ptx::mbarrier_wait_cluster(smem.inbox.received, 0);
  // This block's columns; a lane has a block's partial result.
  const int vec = column_vec / kCluster, peer = column_vec % kCluster;
#pragma unroll
  for (int i = 0; i < kPasses; ++i)
    whole[i] = smem.inbox.template merged<T>(row + i * kPassRows, vec, peer);
  if (kVecs <= 32 && gridDim.x > kCluster) {  // a row's threads are of one warp
    const ClusterPartials partials = {params};
#pragma unroll
    for (int i = 0; i < kPasses; ++i) partials.put(row + i * kPassRows, vec, peer, whole[i]);
    if (blockIdx.x + kCluster < gridDim.x) return;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) whole[i] = partials.merged(row + i * kPassRows, vec, peer);
  }
  // All lanes have the results of all passes: each writes those of every kCluster-th.
#pragma unroll
  for (int first = 0; first < kPasses; first += kCluster) {
    int its_row = row + first * kPassRows;
#pragma unroll
    for (int i = 1; i < kCluster && first + i < kPasses; ++i)
      if (peer == i) {
        whole[first] = whole[first + i];
        its_row += i * kPassRows;
      }
    const int column = rank * kOwnColumns + vec * 4;
    if (first + peer < kPasses && its_row < rows && exists(params, column))
      writer.put(its_row, column, whole[first]);
  }
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(Config::threads,
                                                                              Config::blocks_per_sm)
    decode_sm90(const __grid_constant__ DecodeParams params, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  Smem& smem = *reinterpret_cast<Smem*>(dynamic_smem);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % kCluster;
  int head = blockIdx.y, row_tile = 0, rows = params.seqlen_q * params.group;
  int first_token = 0, last_token = params.seqlen_q - 1;
  if constexpr (Config::row_tiles) {
#pragma unroll 1
    for (; head >= params.heads_kv; head -= params.heads_kv) ++row_tile;
    rows = min(kRows, rows - row_tile * kRows);
    first_token = divided_by_group(params, row_tile * kRows);
    last_token = divided_by_group(params, row_tile * kRows + rows - 1);
  }

  // Reads with long latency are requested first. The warps of all blocks take tiles in turn, so
  // that where a warp begins, unless a window says, is known before the length is.
  const int index = blockIdx.z;
  decoding::Split split = {
      {index, 0, params.seqlen_q, decoding::count_keys(params, index)}, head, row_tile};
  split.origin = params.window_left == kUnbounded
                     ? params.first_key
                     : decoding::visible_keys(params, split.seq, first_token).begin;
  split.origin &= -kWarpKeys;
  const int round = kWarpKeys * kWarps * gridDim.x;
  int key = split.origin + (blockIdx.x * kWarps + warp) * kWarpKeys;
  // Pages of the boxes of this warp's next tiles, a lane each, and of those after them. TMA gives
  // zeros for a page that does not exist.
  const kvcache::PageTable table = page_table(params);
  const int* const row_of_table = table.entry(index, 0);
  const auto look_up = [&](int first) {
    const int own_key = first + lane / kBoxes * round + lane % kBoxes * kBoxKeys;
    return table.entries != nullptr && own_key < params.capacity
               ? row_of_table[own_key >> table.page_shift]
               : index;
  };
  int pages = look_up(key), later_pages = look_up(key + 32 / kBoxes * round);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(maps.k);
    ptx::prefetch_tensormap(maps.v);
    open_inbox(smem);
  }
  load_queries(params, smem, rows, split);
  ptx::cp_async_commit();
  ptx::Mbarrier* const full = smem.full[warp];
  if (lane < kStages) ptx::mbarrier_init(full[lane], 1);
  ptx::fence_mbarrier_init();

  split.begin = decoding::visible_keys(params, split.seq, first_token).begin;
  split.end = max(split.begin, decoding::visible_keys(params, split.seq, last_token).end);
  const bool in_one_box = 1 << table.page_shift >= kWarpKeys;
  int next_page = 0;  // in `pages`: the next tile's to be loaded
  const auto load = [&](Stage& stage, ptx::Mbarrier& barrier, int number, int first) {
    int page[kBoxes];
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) page[box] = __shfl_sync(~0u, pages, next_page + box);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(barrier, sizeof(Stage));
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        if (box > 0 && in_one_box) break;
        const int slot = table.slot(first + box * kBoxKeys);
        load_box(box_of(stage.k, box), maps.k, barrier, slot, head, page[box]);
        load_box(box_of(stage.v, box), maps.v, barrier, slot, head, page[box]);
      }
    }
    load_scales(params, smem, number, split, first, page);
    next_page += kBoxes;
    if (next_page == 32) {
      next_page = 0;
      pages = later_pages;
      later_pages = look_up(first + (32 / kBoxes + 1) * round);
    }
  };
  Stage(&ring)[kStages] = smem.of_warp[warp].ring;
  __syncwarp();
  if (kCluster > 1) ptx::cluster_arrive_relaxed();  // awaited before anything is sent
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    if (key + i * round < split.end) load(ring[i], full[i], i, key + i * round);
    if (kCodes) ptx::cp_async_commit();
  }
  smem.rows.locate(params, split);
  ptx::cp_async_wait<kCodes ? kStages : 0>();  // for the queries, not for scales
  __syncthreads();
  prepare_queries<Slice>(params, smem, split);
  const tile::Range common_keys = {smem.rows.keys(params, split, kRows - 1).begin,
                                   smem.rows.keys(params, split, 0).end};
  Slice acc;
  acc.clear();
  int stage = 0, phase = 0;
#pragma unroll 1
  for (; key < split.end; key += round) {
    Stage& current = ring[stage];
    ptx::mbarrier_wait(full[stage], phase);
    if (kCodes) {
      ptx::cp_async_wait<kStages - 1>();
      __syncwarp();
    }
    attend(acc, params, smem, current, stage, split, common_keys, key);
    __syncwarp();
    if (key + kStages * round < split.end) load(current, full[stage], stage, key + kStages * round);
    if (kCodes) ptx::cp_async_commit();
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  acc.sum_over_lanes();
  acc.put_all_rows(smem.of_warp[warp].staged.o, smem.max_sum[warp]);
  __syncthreads();
  // Four columns of a row, and of those kPassRows further on: chains of instructions side by side.
  const int row = threadIdx.x / kVecs, column_vec = threadIdx.x % kVecs;
  decoding::Partial<T> whole[kPasses];
  if (row < kRows)
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
      whole[i] = merged_over_warps(smem, row + i * kPassRows, column_vec * 4);
  const Writer writer = {params, split, {0, 1, false, false, false, 0}};
  if constexpr (kCluster > 1) {
    ptx::cluster_wait();
    if (row < kRows) merge_cluster(params, smem, writer, rank, rows, whole);
  } else {
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
      if (row + i * kPassRows < rows && exists(params, column_vec * 4))
        writer.put(row + i * kPassRows, column_vec * 4, whole[i]);
  }
}
