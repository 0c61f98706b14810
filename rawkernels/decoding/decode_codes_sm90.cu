// Decoding over quantised caches on Hopper, at the speed that the codes can be read: decode_sm80.cu
// with four warps that load for all others.
//
//   q, out (batch, seqlen_q, heads_q, head_dim) or (total, heads_q, head_dim); K and V are codes,
//   contiguous or in pages of at least 16 keys; float16 or bfloat16, head_dims of exactly
//   kHeadDim, everything 16-byte aligned. Scales are bfloat16 by token and head, those of a head's
//   neighbouring tokens side by side, with minima behind them where codes are kInt4. DecodeParams
//   has the rest; rows, products and partial results are decode_sm80.cu's. Codes are a half or a
//   quarter of the bytes of 16-bit elements, but no less work: a warp has 8 to 16 bytes a clock to
//   expand, and no time to find out where its next keys lie. So each of the last four warps walks
//   through the splits (schedule.cuh), ahead of the others, and keeps the rings of a quarter of
//   them full, kStages tiles each: codes by TMA, scales and queries by cp.async.
//
//   Barriers in shared memory: full[w][s] (1 + kScaleLanes arrivals, of a loading warp; waited for
//   by warp w), empty[w][s] (1, by warp w; waited for by its loading warp), full_queries[i] (32, by
//   the first loading warp) and empty_queries[i] (1, by thread 0).
#include "decoding/combine.cuh"
#include "decoding/slice_codes.cuh"
#include "ptx/bar.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"

using T = Config::dtype;
constexpr int kHeadDim = Config::head_dim;
constexpr int kRows = Config::rows;
constexpr int kWarpKeys = Config::warp_keys;
constexpr int kWarps = Config::warps;
constexpr int kStages = Config::stages;
constexpr int kThreads = 32 * kWarps;  // that compute
constexpr int kTileKeys = kWarps * kWarpKeys;
constexpr int kBlockKeys = Config::tile_keys;  // by which work is shared out
constexpr int kChunks = kHeadDim / 8;
static_assert(Config::threads == kThreads + 128, "registers are given to whole warpgroups");
// Of the 128 or 168 that a thread has at first.
constexpr int kLoadRegisters = kWarps == 12 ? 80 : 88;
constexpr int kComputeRegisters = kWarps == 12 ? 144 : 208;
static_assert(kWarps == 8 || kWarps == 12, "registers are shared out for these");
constexpr int kLoadedWarps = kWarps / 4;  // by each warp of the loading warpgroup
static_assert(kWarps % 4 == 0 && kWarpKeys == 32, "warps have tiles of one or two boxes");
static_assert(kRows * kChunks % 32 == 0, "lanes load queries in whole rounds");

using QTile = decoding::SwizzledRows<kHeadDim>;
using Slice =
    decoding::CodeSlice<Config::k_format, Config::v_format, kHeadDim, kRows, kWarpKeys, 1, 1>;
using Tiles = Slice::Tiles;
using KScale = decoding::PackedScale<Config::k_format>;
using VScale = decoding::PackedScale<Config::v_format>;
using Scales = decoding::PackedScales<Config::k_format, Config::v_format, kWarpKeys>;
constexpr int kKScaleLanes = sizeof(Scales::k) / 16, kVScaleLanes = sizeof(Scales::v) / 16;
constexpr int kScaleLanes = kKScaleLanes > kVScaleLanes ? kKScaleLanes : kVScaleLanes;
static_assert(kLoadedWarps * kScaleLanes <= 32, "each 16 bytes of scales have a lane");
using Schedule = decoding::Schedule<kRows, kBlockKeys>;
using Writer = decoding::Writer<T, kRows, kHeadDim, true, 2, kWarps>;

struct Smem {
  alignas(1024) Tiles ring[kWarps][kStages];
  alignas(128) T queries[2][kRows * kHeadDim];
  Scales scales[kWarps][kStages];
  // Four rows of each warp at a time, columns permuted.
  float o[kWarps][4][kHeadDim];
  float2 max_sum[kWarps][4];
  ptx::Mbarrier full[kWarps][kStages], empty[kWarps][kStages], full_queries[2], empty_queries[2];
  Slice::QueryRows query_rows[kRows];  // of the split that is computed
  decoding::Rows<T, kRows> rows;
  tile::Range common_keys;     // of the split that is computed: all rows see these
  Schedule schedule;           // one split after the one that is computed
  decoding::Split splits[2];   // the one that is computed, and the next, in turn
  bool exists[2];              // whether there is that split
  decoding::SplitPlace place;  // of the split that is computed
  decoding::Split last_split;  // of a work tile that other blocks began: to be merged at the end
  decoding::SplitPlace last_place;
};
static_assert(sizeof(Smem) <= Config::smem_bytes, "Config has to ask for all of it");

struct Maps {
  ptx::TensorMap k, v;
};

// Of the warps that compute.
__device__ __forceinline__ void sync_all() { ptx::bar_sync(1, kThreads); }

__device__ __forceinline__ void load_queries(const DecodeParams& params, T* queries,
                                             const decoding::Split& split) {
  const int group = params.group, rows = split.seq.seqlen_q * group - split.row_tile * kRows;
  const unsigned target = ptx::shared_address(queries);
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < kRows * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int index = split.row_tile * kRows + row;
    const int token = divided_by_group(params, index);
    const T* source = static_cast<const T*>(params.q) + split.seq.index * params.q_stride.batch +
                      (split.seq.begin_q + token) * params.q_stride.seq +
                      (split.head * group + index - token * group) * params.q_stride.head +
                      chunk * 8;
    ptx::cp_async_16(target + QTile::at(row, chunk), source, row < rows);
  }
}

// Queries of split `number`, by the first loading warp.
__device__ __forceinline__ void load_queries(const DecodeParams& params, Smem& smem,
                                             const decoding::Split& split, int number) {
  if (number >= 2) ptx::mbarrier_wait(smem.empty_queries[number % 2], number / 2 - 1 & 1);
  load_queries(params, smem.queries[number % 2], split);
  ptx::mbarrier_arrive_after_copies(smem.full_queries[number % 2]);
}

// Copies 16 bytes of scales, from those of a box's key `first` on: of keys that exist.
template <class Word>
__device__ __forceinline__ void copy_scales(const Word* words, const void* scales,
                                            const ScaleStrides& stride, int head, int page,
                                            int slot, bool exists) {
  // Strides are of bfloat16.
  const auto* const from = static_cast<const unsigned short*>(scales) + page * stride.page +
                           head * stride.head + slot * static_cast<int>(sizeof(Word) / 2);
  ptx::cp_async_16(ptx::shared_address(words), from, exists);
}

// Loads the queries of all splits (the first loading warp), and this warp's share of their tiles.
__device__ __forceinline__ void load_all(const DecodeParams& params, const Maps& maps, Smem& smem,
                                         Schedule& schedule, decoding::Split& split) {
  const int lane = threadIdx.x % 32, loader = (threadIdx.x - kThreads) / 32;
  const int first_warp = loader * kLoadedWarps;  // of those that this warp loads for
  // TMA copies a tile at a time, or the halves of one where pages have 16 keys: a box for each
  // lane.
  const int box_shift = params.page_shift < 5, boxes = kLoadedWarps << box_shift;
  const int warp = first_warp + (lane >> box_shift), box = lane & box_shift;
  const int box_keys = kWarpKeys >> box_shift,
            key_of_lane = first_warp * kWarpKeys + lane * box_keys;
  const bool has_box = lane < boxes;
  // 16 bytes of scales are of some keys of one of the boxes.
  const int scale_warp = lane / kScaleLanes, part = lane % kScaleLanes;
  const int k_part = part * (kWarpKeys / kKScaleLanes), v_part = part * (kWarpKeys / kVScaleLanes);
  const kvcache::PageTable table = page_table(params);
  const bool read_once = params.cu_seqlens_q == nullptr && params.seqlen_q * params.group <= kRows;
  const unsigned long long hint = read_once ? ptx::kEvictFirst : ptx::kEvictNormal;
  int stage = 0;
  unsigned phase = 0;
#pragma unroll 1
  for (int number = 0;; ++number) {
    const auto look_up = [&](int key) {
      if (table.entries == nullptr) return split.seq.index;
      return has_box && key < min(split.end, params.capacity) ? *table.entry(split.seq.index, key)
                                                              : -1;
    };
    int page = look_up(split.origin + key_of_lane);
#pragma unroll 1
    for (int first = split.origin; first < split.end; first += kTileKeys) {
      const int key = first + key_of_lane;
      const int next_page = look_up(key + kTileKeys);
      const bool exists = has_box && first + warp * kWarpKeys < split.end;
      if (exists) {
        ptx::Mbarrier& full = smem.full[warp][stage];
        Tiles& tiles = smem.ring[warp][stage];
        const int slot = table.slot(key);
        ptx::mbarrier_wait(smem.empty[warp][stage], phase ^ 1);
        if (box == 0) ptx::mbarrier_arrive_expect_tx(full, sizeof(Tiles));
        ptx::tma_load(tiles.k + box * (sizeof(tiles.k) / 2), maps.k, full, 0, slot, 0, split.head,
                      page, hint);
        ptx::tma_load(tiles.v + box * (sizeof(tiles.v) / 2), maps.v, full, 0, slot, 0, split.head,
                      page, hint);
      }
      __syncwarp();
      const int its_lane = scale_warp << box_shift;
      const int its_stage = __shfl_sync(~0u, stage, its_lane);
      const int k_page = __shfl_sync(~0u, page, its_lane + (k_part >> 4 & box_shift));
      const int v_page = __shfl_sync(~0u, page, its_lane + (v_part >> 4 & box_shift));
      const int its_key = first + (first_warp + scale_warp) * kWarpKeys;
      if (scale_warp < kLoadedWarps && its_key < split.end) {
        Scales& scales = smem.scales[first_warp + scale_warp][its_stage];
        if (part < kKScaleLanes)
          copy_scales(scales.k[0] + k_part, params.k_scale, params.k_scale_stride, split.head,
                      table.existing(k_page), table.slot(its_key + k_part),
                      its_key + k_part < split.end);
        if (part < kVScaleLanes)
          copy_scales(scales.v[0] + v_part, params.v_scale, params.v_scale_stride, split.head,
                      table.existing(v_page), table.slot(its_key + v_part),
                      its_key + v_part < split.end);
        ptx::mbarrier_arrive_after_copies(smem.full[first_warp + scale_warp][its_stage]);
      }
      if (exists && ++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
      page = next_page;
      // After the first tiles, which take longer to arrive.
      if (loader == 0 && first == split.origin) load_queries(params, smem, split, number);
    }
    if (loader == 0 && split.origin >= split.end) load_queries(params, smem, split, number);
    if (!schedule.next(params, split)) return;
  }
}

// Merges four rows of the warps, from `first` on, and writes them.
__device__ __forceinline__ void combine_rows(const Writer& writer, const Smem& smem, int first) {
  for (int i = threadIdx.x; i < 4 * Writer::kVecs; i += kThreads) {
    const int from = i / Writer::kVecs, column = i % Writer::kVecs * 4, row = first + from;
    if (row >= writer.rows() || column >= writer.params.head_dim_v) continue;
    decoding::Partial<T> whole;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp)
      whole.max = fmaxf(whole.max, smem.max_sum[warp][from].x);
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp)
      whole.add(reinterpret_cast<const decoding::FourColumns<float>&>(
                    smem.o[warp][from][decoding::permuted_column(from, column)]),
                smem.max_sum[warp][from].x, smem.max_sum[warp][from].y);
    writer.put(row, column, whole);
  }
}

// Begins the block's split `number`, unless there are no more.
__device__ __forceinline__ bool begin_split(const DecodeParams& params, Smem& smem, int number) {
  const int turn = number % 2, next = 1 - turn;
  if (smem.exists[turn]) {
    smem.rows.locate(params, smem.splits[turn]);
    ptx::mbarrier_wait(smem.full_queries[turn], number / 2 & 1);
  }
  sync_all();  // also: nobody reads the split before any more
  if (!smem.exists[turn]) return false;
  if (threadIdx.x == 0) {  // read after other barriers
    if (number > 0) ptx::mbarrier_arrive(smem.empty_queries[next]);
    smem.place = smem.schedule.place_of(params, smem.splits[turn]);
    smem.exists[next] = smem.schedule.next(params, smem.splits[next]);
    smem.common_keys = {smem.rows.keys(params, smem.splits[turn], kRows - 1).begin,
                        smem.rows.keys(params, smem.splits[turn], 0).end};
  }
  Slice::prepare_queries<T, kRows, kWarps>(params, smem.splits[turn], smem.queries[turn],
                                           smem.query_rows);
  sync_all();
  return true;
}

// Epilogue of a split: merges the warps' rows and writes them. Whether partial results are to be
// merged right away.
__device__ __forceinline__ bool end_split(const Writer& writer, Smem& smem, Slice& acc,
                                          int number) {
  const int warp = threadIdx.x / 32;
  acc.sum_over_lanes();
#pragma unroll
  for (int r = 0; r < kRows / 8; ++r)
#pragma unroll 1
    for (int half = 0; half < 2 && 8 * r + 4 * half < writer.rows(); ++half) {
      sync_all();  // the rows before have been read
      acc.put_rows(r, half, smem.o[warp], smem.max_sum[warp], 0);
      sync_all();
      combine_rows(writer, smem, 8 * r + 4 * half);
    }
  if (!writer.place.merges) return false;
  if (writer.place.alone || !smem.exists[1 - number % 2]) return true;
  if (threadIdx.x == 0) {
    smem.last_split = writer.split;
    smem.last_place = writer.place;
  }
  return false;
}

// Zeros for the scales of keys that a split has not: they may be NaN. By a warp.
__device__ __forceinline__ void clear_scales(Scales& scales, int key,
                                             const decoding::Split& split) {
  const int lane = threadIdx.x % 32;
  if (lane < kWarpKeys && (key + lane < split.begin || key + lane >= split.end))
    scales.k[0][lane] = scales.v[0][lane] = 0;
  __syncwarp();
}

__device__ __forceinline__ void compute(const DecodeParams& params, Smem& smem) {
  const int warp = threadIdx.x / 32;
  Slice acc;
  bool computing = false;
  int number = -1;       // of the split that is computed
  int key = 0, end = 0;  // of this warp's share of it
  int stage = 0, phase = 0;
#pragma unroll 1
  while (true) {
#pragma unroll 1
    while (key >= end) {
      const decoding::Split* split = &smem.splits[number & 1];
      const decoding::SplitPlace* place = &smem.place;
      const bool merges = computing && end_split({params, *split, *place}, smem, acc, number);
      computing = !merges && begin_split(params, smem, number + 1);
      if (computing) {
        split = &smem.splits[++number & 1];
        key = split->origin + warp * kWarpKeys;
        end = split->end;
      } else {
        if (!merges) {  // nothing else is left
          if (!smem.last_place.merges) return;
          split = &smem.last_split;
          place = &smem.last_place;
        }
        Writer{params, *split, *place}.merge_partials();
        if (!merges) return;
      }
      acc.clear();  // also where nothing follows: so O needs no registers during the merge
    }
    Tiles& tiles = smem.ring[warp][stage];
    Scales& scales = smem.scales[warp][stage];
    const decoding::Split& split = smem.splits[number & 1];
    const bool masked = !smem.common_keys.contains(key, kWarpKeys);
    ptx::mbarrier_wait(smem.full[warp][stage], phase);
    if (masked) clear_scales(scales, key, split);
    Slice::Scores s;
    Slice::multiply_scores(s, tiles, scales, KScale(),
                           ptx::shared_address(smem.queries[number & 1]), smem.query_rows, 0);
    Slice::finish_scores(s, params, smem.rows, split, key, 0, masked);
    using VTile = Tiles::VTile;
    // Integers are harmless beside a scale of 0.
    if (masked && (Config::v_format == tile::kE4m3 || Config::v_format == tile::kE5m2))
      decoding::clear_values<VTile, kWarpKeys, VTile::kRowBytes / 16>(tiles.v, key, split.begin,
                                                                      split.end);
    acc.add_values(s, tiles, scales, VScale());
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.empty[warp][stage]);
    key += kTileKeys;
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    decode_codes_sm90(const __grid_constant__ DecodeParams params,
                      const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  Smem& smem = *reinterpret_cast<Smem*>(dynamic_smem);
  if (threadIdx.x == kThreads) {
    ptx::prefetch_tensormap(maps.k);
    ptx::prefetch_tensormap(maps.v);
  }
  Schedule schedule;
  decoding::Split first;
  if (!schedule.start(params) || !schedule.here(params, first)) return;
  if (threadIdx.x == 0) {
    smem.schedule = schedule;
    smem.splits[0] = first;
    smem.exists[0] = true;
    smem.last_place.merges = false;
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(smem.full_queries[i], 32);
      ptx::mbarrier_init(smem.empty_queries[i], 1);
    }
  }
  for (int i = threadIdx.x; i < kWarps * kStages; i += Config::threads) {
    ptx::mbarrier_init(smem.full[0][i], 1 + kScaleLanes);
    ptx::mbarrier_init(smem.empty[0][i], 1);
  }
  ptx::fence_mbarrier_init();
  __syncthreads();
  if (threadIdx.x >= kThreads) {
    ptx::setmaxnreg_dec<kLoadRegisters>();
    load_all(params, maps, smem, schedule, first);
  } else {
    ptx::setmaxnreg_inc<kComputeRegisters>();
    compute(params, smem);
  }
}
