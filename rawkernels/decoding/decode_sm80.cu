// Decoding on tensor cores (mma.sync), for Ampere and newer: attention of a few query tokens of
// each sequence over a long cache, at the speed that the cache can be read.
//
//   q, out (batch, seqlen_q, heads_q, head_dim) or (total, heads_q, head_dim); caches contiguous or
//   in pages; float16 or bfloat16, head_dims multiples of 8 up to kHeadDim, everything 16-byte
//   aligned. K and V may be codes (Config::k_format, v_format: slice_codes.cuh), rows of which are
//   multiples of 16 bytes. DecodeParams has the rest. A tile's rows are query tokens times the
//   query heads that share a key head, so that K and V are read once for all of them. The operands
//   are swapped: keys fill the 16 rows of an mma and query rows its 8 columns, so that few queries
//   waste little:
//     Sᵀ (keys × rows) = K Qᵀ,   Oᵀ (head_dim × rows) += Vᵀ Pᵀ.
//   kWarpsK slices of a tile's keys each have their own softmax and O, and their own ring of
//   kStages stages of K and V, so nothing in the main loop waits for the block; kWarpsQ warps share
//   a slice and have kWarpRows rows each, or with Config::heads of 2 the rows of one of two
//   neighbouring key heads, which are copied together: rows that split lines of 128 bytes are read
//   faster so. Of rows that are shorter than kHeadDim the first Config::columns columns are copied
//   and multiplied. The rings run ahead over the ends of splits (schedule.cuh): the next split's
//   keys arrive during the epilogue of the one before.
#include "decoding/combine.cuh"
#include "decoding/ring.cuh"
#include "decoding/slice.cuh"
#include "decoding/storage.cuh"
#include "ptx/bar.cuh"

using T = Config::dtype;
constexpr int kHeadDim = Config::head_dim;
constexpr int kWarpRows = Config::warp_rows;
constexpr int kWarpKeys = Config::warp_keys;
constexpr int kWarpsQ = Config::warps_q;
constexpr int kWarpsK = Config::warps_k;
constexpr int kStages = Config::stages;
constexpr int kColumns = Config::columns == 0 ? kHeadDim : Config::columns;

constexpr int kRows = kWarpRows * kWarpsQ;
constexpr int kTileKeys = kWarpKeys * kWarpsK;
constexpr int kSliceThreads = 32 * kWarpsQ;
constexpr int kRowBlocks = kWarpRows / 8;
constexpr bool kCodes = Config::k_format != tile::kPlain;
static_assert(kCodes == (Config::v_format != tile::kPlain), "both are codes, or neither is");
static_assert(!kCodes || kColumns == kHeadDim, "all columns of codes are expanded");

// That registers hold.
constexpr int kMergeBatch = kHeadDim < 256 && kRows / Config::heads == 8 ? 4
                            : kHeadDim < 256 || !kCodes                  ? 2
                                                                         : 1;
static_assert(kRows <= Config::threads && Config::threads == 32 * kWarpsQ * kWarpsK,
              "warps share slices and rows evenly, and each row has a thread to locate it");

constexpr bool kElementwise = Config::mask || Config::bias;
static_assert(!kElementwise || !kCodes, "bias and mask are for plain keys");

constexpr int kHeads = Config::heads;
using HeadRows = decoding::HeadRows<kRows, kHeads>;
static_assert(kHeads == 1 || (kHeads == 2 && kWarpsQ == 2 && !kElementwise && !kCodes),
              "of two plain key heads each has a warp of a slice");

using Params = DecodeParamsOf<kElementwise>::Type;
using Tile = decoding::SwizzledRows<kHeads * kHeadDim>;
using ScoreTile = decoding::ScoreTile<kRows, kWarpKeys, Config::bias>;
using Storage = decoding::Storage<
    decoding::Stage<T, kWarpKeys, kHeadDim, Config::whole_lines, kHeads, kColumns>,
    decoding::Slice<T, Tile, kHeadDim, kWarpRows, kWarpKeys, kColumns>, Config::k_format,
    Config::v_format, kHeadDim, kRows, kWarpRows, kWarpKeys, Config::k_groups, Config::v_groups>;
using Stage = decoding::StageOf<Storage::Stage, ScoreTile, kElementwise>::Type;
using Slice = Storage::Slice;
using Schedule = decoding::Schedule<HeadRows::kEach, kTileKeys, kHeads>;
using Loader =
    decoding::Loader<T, Stage, Schedule, kRows, kHeadDim, kWarpKeys, kWarpsQ, kWarpsK, kStages,
                     Config::query_buffers, Config::table, kElementwise, kHeads>;
using Rows = decoding::RowsOf<T, decoding::Rows<T, kRows, kHeads>, ScoreTile, kElementwise>::Type;
using Writer =
    decoding::Writer<T, kRows, kHeadDim, true, kMergeBatch, Config::threads / 32, kHeads>;

struct Smem {
  alignas(128) Stage ring[kWarpsK][kStages];
  alignas(128) Loader::Queries queries;
  // Four rows of each warp at a time, columns permuted.
  float o[kWarpsK][4 * kWarpsQ][kHeadDim];
  float2 max_sum[kWarpsK][4 * kWarpsQ];
  int pages[kStages][Config::threads / 32]
           [kWarpKeys];  // page numbers of the tile that each warp loads into a stage next
  Loader::Table table;
  Rows rows;
  // Where the rings' loads are. Aligned, since the compiler reads 16 bytes at a time, and would
  // read a word that another warp writes along with a warp's own.
  alignas(16) Schedule ahead[Config::threads / 32];
  Schedule schedule;              // one split after the one that is computed
  decoding::Split splits[2];      // the one that is computed, and the next, in turn
  bool exists[2];                 // whether there is that split
  Storage::QueryRows query_rows;  // of the split that is computed
  decoding::SplitPlace place;     // of the split that is computed
  decoding::Split last_split;     // of a work tile that other blocks began: to be merged at the end
  decoding::SplitPlace last_place;
};
static_assert(sizeof(Smem) <= Config::smem_bytes, "Config has to ask for all of it");
static_assert(sizeof(Schedule) % 16 == 0, "every warp's has to be aligned");

// The barrier of the warps that share a ring.
__device__ __forceinline__ void sync_slice() {
  if (kWarpsQ == 1)
    __syncwarp();
  else
    ptx::bar_sync(1 + threadIdx.x / kSliceThreads, kSliceThreads);
}

// Merges four rows of each row warp, from `first` on, over the slices, and writes them.
__device__ __forceinline__ void combine_rows(const Writer& writer, const Smem& smem, int first) {
  for (int i = threadIdx.x; i < 4 * kWarpsQ * Writer::kVecs; i += Config::threads) {
    const int from = i / Writer::kVecs, column = i % Writer::kVecs * 4;
    const int row = from / 4 * kWarpRows + first + from % 4;
    if (!writer.exists(row) || column >= writer.params.head_dim_v) continue;
    float2 max_sum[kWarpsK];
    decoding::Partial<T> whole;
#pragma unroll
    for (int slice = 0; slice < kWarpsK; ++slice) {
      max_sum[slice] = smem.max_sum[slice][from];
      whole.max = fmaxf(whole.max, max_sum[slice].x);
    }
#pragma unroll
    for (int slice = 0; slice < kWarpsK; ++slice)
      whole.add(reinterpret_cast<const decoding::FourColumns<float>&>(
                    smem.o[slice][from][decoding::permuted_column(from, column)]),
                max_sum[slice].x, max_sum[slice].y);
    writer.put(row, column, whole);
  }
}

// Brings the queries of split `number` into the form that codes are multiplied with.
template <class AnySlice>
__device__ __forceinline__ void prepare_queries(const DecodeParams& params, Smem& smem,
                                                int number) {
  if constexpr (kCodes) {
    AnySlice::template prepare_queries<T, kRows, Config::threads / 32>(
        params, smem.splits[number % 2], smem.queries[number % Config::query_buffers],
        smem.query_rows);
    __syncthreads();
  }
}

// Adds a tile of keys, in `stage`, to a warp's rows of split `number`.
template <class AnySlice, class AnyStage>
__device__ __forceinline__ void attend(AnySlice& acc, const Params& params, const Smem& smem,
                                       const AnyStage& stage, int number,
                                       const tile::Range& common_keys, int key, int first_row) {
  const decoding::Split& split = smem.splits[number & 1];
  const unsigned q_rows = ptx::shared_address(smem.queries[number % Config::query_buffers]) +
                          first_row * decoding::SwizzledRows<kHeadDim>::kRowBytes;
  // Where the columns of this warp's head begin in a row of the tile.
  const unsigned columns = HeadRows::head_of(first_row) * sizeof(T) * kHeadDim;
  typename AnySlice::Scores s;
  if constexpr (kCodes)
    AnySlice::multiply_scores(s, stage, stage.scales,
                              decoding::ScaleReader::of_keys(params, split.head), q_rows,
                              smem.query_rows, first_row);
  else
    AnySlice::multiply_scores(s, ptx::shared_address(stage.k) + columns, q_rows);
  const bool masked = !common_keys.contains(key, kWarpKeys);
  if constexpr (kElementwise)
    AnySlice::finish_scores(s, params, smem.rows, stage.elements, split, key, first_row, masked);
  else
    AnySlice::finish_scores(s, params, smem.rows, split, key, first_row, masked);
  if constexpr (kCodes) {
    acc.add_values(s, stage, stage.scales, decoding::ScaleReader::of_values(params, split.head));
  } else if constexpr (kElementwise) {
    const typename AnySlice::SeenValues seen(s);
    acc.update_softmax(s);
    acc.multiply_values(s, ptx::shared_address(stage.v), seen);
  } else {
    acc.update_softmax(s);
    acc.multiply_values(s, ptx::shared_address(stage.v) + columns);
  }
}

// Begins the block's split `number`, unless there are no more.
__device__ __forceinline__ bool begin_split(const Params& params, Smem& smem, Loader& loader,
                                            int number) {
  const int turn = number % 2, next = 1 - turn;
  if (smem.exists[turn]) {
    smem.rows.locate(params, smem.splits[turn]);
    loader.wait_for_queries(smem.splits[turn], number);
  }
  __syncthreads();  // also: nobody reads the split before any more
  if (!smem.exists[turn]) return false;
  if (threadIdx.x == 0) {  // read after other barriers
    smem.place = smem.schedule.place_of(params, smem.splits[turn]);
    smem.exists[next] = smem.schedule.next(params, smem.splits[next]);
  }
  prepare_queries<Slice>(params, smem, number);
  return true;
}

// Epilogue of a split: merges the slices and writes the rows. Whether partial results are to be
// merged right away.
__device__ __forceinline__ bool end_split(const Writer& writer, Smem& smem, Slice& acc, int slice,
                                          int row_warp, int number) {
  acc.sum_over_lanes();
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll 1
    for (int half = 0; half < 2 && 8 * r + 4 * half < writer.rows(); ++half) {
      __syncthreads();  // the rows before have been read
      acc.put_rows(r, half, smem.o[slice], smem.max_sum[slice], row_warp * 4);
      __syncthreads();
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

extern "C" __global__ void __launch_bounds__(Config::threads, Config::blocks_per_sm)
    decode_sm80(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  Smem& smem = *reinterpret_cast<Smem*>(dynamic_smem);
  const int warp = threadIdx.x / 32, slice = warp / kWarpsQ, row_warp = warp % kWarpsQ;
  const int first_row = row_warp * kWarpRows;

  const bool has_table = Loader::has_table(params);
  if (has_table) Loader::fetch_table(params, smem.table);
  Schedule schedule;
  decoding::Split first;
  if (!schedule.start(params) || !schedule.here(params, first)) return ptx::cp_async_wait_all();
  Loader loader(params, smem.ahead[warp], smem.queries, smem.table, first, smem.pages);
  if (threadIdx.x % 32 == 0) smem.ahead[warp] = schedule;
  if (threadIdx.x == 0) {
    smem.schedule = schedule;
    smem.splits[0] = first;
    smem.exists[0] = true;
    smem.last_place.merges = false;
  }
  if (has_table) {
    ptx::cp_async_wait_all();
    __syncthreads();
  }
  __syncwarp();
  Slice acc;
  bool computing = false;
  int number = -1;                  // of the split that is computed
  tile::Range common_keys;          // of it: all rows see these
  int key = 0, end = 0, stage = 0;  // keys of this slice's share of it
  int filling = loader.depth;       // tiles are looked up and loaded before the first is computed
#pragma unroll 1
  while (true) {
    const Stage& current = smem.ring[slice][stage];
    if (filling > 0) {
      if (--filling == 0) __syncthreads();  // all threads know the first split
    } else {
#pragma unroll 1
      while (key >= end) {
        const decoding::Split* split = &smem.splits[number & 1];
        const decoding::SplitPlace* place = &smem.place;
        const bool merges =
            computing && end_split({params, *split, *place}, smem, acc, slice, row_warp, number);
        computing = !merges && begin_split(params, smem, loader, number + 1);
        if (computing) {
          split = &smem.splits[++number & 1];
          key = split->origin + slice * kWarpKeys;
          end = split->end;
          common_keys = {smem.rows.keys(params, *split, kRows - 1).begin,
                         smem.rows.keys(params, *split, 0).end};
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
      ptx::cp_async_wait<kStages - 1>();
      sync_slice();
      attend(acc, params, smem, current, number, common_keys, key, first_row);
      key += kTileKeys;
      sync_slice();
    }
    loader.load(current, smem.pages[stage][warp], number + 1);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}
