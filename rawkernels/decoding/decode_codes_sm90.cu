// Decoding over quantised caches on Hopper, at the speed that the codes can be read: decode_sm80.cu
// with four warps that load for all others.
//
//   q, out (batch, seqlen_q, heads_q, head_dim) or (total, heads_q, head_dim); K and V are codes,
//   contiguous or in pages of at least 16 keys; float16 or bfloat16, head_dims of exactly
//   kHeadDim, everything 16-byte aligned. Scales are bfloat16 by token and head, those of a head's
//   neighbouring tokens side by side, with minima behind them where codes are kInt4. DecodeParams
//   has the rest; rows, products and partial results are decode_sm80.cu's. Codes are a half or a
//   quarter of the bytes of 16-bit elements, but no less work: a warp has 8 to 16 bytes a clock to
//   expand, and no time to find out where its next keys lie. So each of the last warps walks
//   through the splits (schedule.cuh), ahead of the others, and keeps the rings of some of them
//   full, kStages tiles each: codes by TMA, scales and queries by cp.async. The first of them also
//   writes down what the others need to know about a split (Work). Those that compute do both for
//   the first split themselves: its tiles are on their way meanwhile.
//
//   A block has kHeads neighbouring key heads side by side, where their codes lie side by side:
//   unit u of warps has kHeads warps, one for each head, with the same keys. TMA copies rows of 128
//   bytes then where a head's are 32 or 64, and a block has fewer and longer splits. To the
//   schedule they are one key head, with kHeads times as many rows.
//
//   Barriers in shared memory: full[u][s] (1 + kScaleLanes * kHeads arrivals, of a loading warp;
//   waited for by the warps of unit u), empty[u][s] (kHeads, by these warps; waited for by the
//   loading warp), full_queries[i] (33, by the first loading warp, or thread 0's) and
//   empty_queries[i] (1, by thread 0).
#include "decoding/produce_codes_sm90.cuh"
#include "ptx/bar.cuh"
#include "ptx/setmaxnreg.cuh"

// Of the warps that compute.
__device__ __forceinline__ void sync_all() { ptx::bar_sync(1, kThreads); }

// Of a block's heads, that of a row: each has as many neighbouring rows.
__device__ __forceinline__ int head_of(const DecodeParams& params, int row) {
  int head = 0;
#pragma unroll
  for (int i = 1; i < kHeads; ++i) head += row >= i * (params.group / kHeads) ? 1 : 0;
  return head;
}
// The first of the rows that a head's warps compute, of which its own are some: all are the tile's.
__device__ __forceinline__ int first_row(const DecodeParams& params, int head) {
  if (kHeads == 1 || kRows == kWarpRows) return 0;
  const int first = head * (params.group / kHeads);
  if (kWarpRows != 4) return first & -kWarpRows;
  return kHeads * kWarpRows > kRows ? min(first, kRows - kWarpRows) : first;
}

// Merges four or eight of each warp's rows, from `first` on, and writes them.
__device__ __forceinline__ void combine_rows(const Writer& writer, const Smem& smem, int first) {
  constexpr bool kByHeads = kWarpRows == 4;  // else by tiles of warps' rows
  constexpr int kEach = 4 * Writer::kVecs, kParts = kByHeads ? kHeads : kRows / kWarpRows;
  for (int i = threadIdx.x; i < kHalves * kParts * kEach; i += kThreads) {
    const int half = i / (kParts * kEach), part = i / kEach % kParts;
    const int from = i / Writer::kVecs % 4, column = i % Writer::kVecs * 4;
    const int row =
        (kByHeads ? first_row(writer.params, part) : part * kWarpRows) + first + 4 * half + from;
    if (row >= writer.rows() || column >= writer.params.head_dim_v) continue;
    const int head = head_of(writer.params, row);
    if (kByHeads && head != part) continue;
    decoding::Partial<T> whole;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit)
      whole.max = fmaxf(whole.max, smem.max_sum[unit * kHeads + head][half][from].x);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int warp = unit * kHeads + head;
      whole.add(reinterpret_cast<const decoding::FourColumns<float>&>(
                    smem.o[warp][half][from][decoding::permuted_column(from, column)]),
                smem.max_sum[warp][half][from].x, smem.max_sum[warp][half][from].y);
    }
    writer.put(row, column, whole);
  }
}

__device__ __forceinline__ void wait_for_work(Smem& smem, int number) {
  ptx::mbarrier_wait(smem.full_queries[number % 2], number / 2 & 1);
}

// Begins the block's split `number`, unless there are no more.
__device__ __forceinline__ bool begin_split(const DecodeParams& params, Smem& smem, int number) {
  const int turn = number % 2;
  wait_for_work(smem, number);
  if (!smem.work[turn].exists) return false;
  // The first warps may still be at the end of the split before.
  Slice::prepare_queries<T, kRows, kWarps>(params, smem.work[turn].split, smem.queries[turn],
                                           smem.query_rows, kWarps - 1 - threadIdx.x / 32);
  sync_all();  // also: nobody reads the split before any more
  if (threadIdx.x == 0 && number > 0) ptx::mbarrier_arrive(smem.empty_queries[1 - turn]);
  return true;
}

// Epilogue of a split: merges the warps' rows and writes them. Whether partial results are to be
// merged right away.
__device__ __forceinline__ bool end_split(const Writer& writer, Smem& smem, Slice& acc,
                                          int number) {
  const int warp = threadIdx.x / 32;
  acc.sum_over_lanes();
#pragma unroll
  for (int r = 0; r < Slice::kRowBlocks; ++r)
#pragma unroll 1
    for (int half = 0; 8 * r + 4 * half < min(8 * (r + 1), min(kWarpRows, writer.rows()));
         half += kHalves) {
      if (r + half > 0) sync_all();  // the rows before have been read
#pragma unroll
      for (int i = 0; i < kHalves; ++i)
        acc.put_rows(r, half + i, smem.o[warp][i], smem.max_sum[warp][i], 0);
      sync_all();
      combine_rows(writer, smem, 8 * r + 4 * half);
    }
  if (!writer.place.merges) return false;
  wait_for_work(smem, number + 1);
  if (writer.place.alone || !smem.work[1 - number % 2].exists) return true;
  if (threadIdx.x == 0) {
    smem.last_split = writer.split;
    smem.last_place = writer.place;
  }
  return false;
}

// Zeros for a head's values of keys that a split has not: codes of floats may be NaN. By a warp.
__device__ __forceinline__ void clear_values(Tiles& tiles, int head, int key,
                                             const decoding::Split& split) {
  constexpr int kRowChunks = kHeadDim * tile::Codes<Config::v_format>::kBits / 128;
  for (int i = threadIdx.x % 32; i < kWarpKeys * kRowChunks; i += 32) {
    const int row = i / kRowChunks;
    const unsigned at = tiles.v.offset(head, row, i % kRowChunks);
    if (key + row < split.begin || key + row >= split.end)
      *reinterpret_cast<uint4*>(&tiles.v.panels[0][0] + at) = {};
  }
  ptx::fence_proxy_async();
  __syncwarp();
}

// Zeros for the scales of keys that a split has not: they may be NaN. By a warp.
__device__ __forceinline__ void clear_scales(Scales& scales, int key,
                                             const decoding::Split& split) {
  for (int i = threadIdx.x % 32; i < kWarpKeys; i += 32)
    if (key + i < split.begin || key + i >= split.end) scales.k[0][i] = scales.v[0][i] = 0;
  __syncwarp();
}

__device__ __forceinline__ void compute(const DecodeParams& params, Smem& smem) {
  ptx::cp_async_wait_all();  // for the first split's queries
  sync_all();
  const int unit = threadIdx.x / 32 / kHeads, head = threadIdx.x / 32 % kHeads;
  // Where there are registers for it, a lane's addresses are kept.
  constexpr bool kKept = kHeadDim == 64 || (kHeads > 1 && Config::k_format == tile::kInt4);
  Tiles::OfHead kept = Tiles::OfHead::offsets(head, threadIdx.x);
  if (kKept) kept = {ptx::opaque(kept.k_lane), ptx::opaque(kept.v_lane)};
  Slice acc;
  bool computing = false;
  int number = -1;       // of the split that is computed
  int key = 0, end = 0;  // of this warp's share of it
  int stage = 0, phase = 0;
#pragma unroll 1
  while (true) {
#pragma unroll 1
    while (key >= end) {
      const decoding::Split* split = &smem.work[number & 1].split;
      const decoding::SplitPlace* place = &smem.work[number & 1].place;
      const bool merges = computing && end_split({params, *split, *place}, smem, acc, number);
      computing = !merges && begin_split(params, smem, number + 1);
      if (computing) {
        split = &smem.work[++number & 1].split;
        key = split->origin + unit * kWarpKeys;
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
    const Tiles::OfHead offsets =
        kKept ? kept : Tiles::OfHead::offsets(head, ptx::opaque(threadIdx.x));
    const Tiles::OfHead tiles =
        offsets.in(ptx::shared_address(smem.ring[unit]) + stage * unsigned(sizeof(Tiles)));
    Scales& scales = smem.scales[unit][stage][head];
    const Work& work = smem.work[number & 1];
    const decoding::Split& split = work.split;
    const bool masked = !work.common_keys.contains(key, kWarpKeys);
    ptx::mbarrier_wait(smem.full[unit][stage], phase);
    if (masked) clear_scales(scales, key, split);
    Slice::Scores s;
    const int first = first_row(params, head);
    Slice::multiply_scores(
        s, tiles, scales, KScale(),
        ptx::shared_address(smem.queries[number & 1]) + (first & -8) * QTile::kRowBytes,
        smem.query_rows, first);
    Slice::finish_scores(s, params, work.rows, split, key, first, masked);
    // Integers are harmless beside a scale of 0.
    if (masked && (Config::v_format == tile::kE4m3 || Config::v_format == tile::kE5m2))
      clear_values(smem.ring[unit][stage], head, key, split);
    acc.add_values(s, tiles, scales, VScale());
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.empty[unit][stage]);
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
  Smem& smem =
      *static_cast<Smem*>(__cvta_shared_to_generic(ptx::opaque(ptx::shared_address(dynamic_smem))));
  if (threadIdx.x == kThreads) {
    ptx::prefetch_tensormap(maps.k);
    ptx::prefetch_tensormap(maps.v);
  }
  // By a lane of each warp: the lanes of one initialise their barriers one after the other.
  if (threadIdx.x % 32 == 0) {
    for (int i = threadIdx.x / 32; i < kUnits * kStages; i += Config::threads / 32) {
      ptx::mbarrier_init(smem.full[0][i], 1 + kScaleLanes * kHeads);
      ptx::mbarrier_init(smem.empty[0][i], kHeads);
    }
  }
  if (threadIdx.x == Config::threads - 32) {
    smem.last_place.merges = false;
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(smem.full_queries[i], 33);
      ptx::mbarrier_init(smem.empty_queries[i], 1);
    }
  }
  Schedule schedule;
  decoding::Split first;
  if (!schedule.start(params) || !schedule.here(params, first)) return;
  if (threadIdx.x < kThreads) load_queries(params, smem.queries[0], first, threadIdx.x, kThreads);
  ptx::fence_mbarrier_init();
  __syncthreads();
  if (threadIdx.x >= kThreads) {
    ptx::setmaxnreg_dec<kLoadRegisters>();
    if (threadIdx.x < kThreads + 32 * kLoaders) load_all(params, maps, smem, schedule, first);
  } else {
    ptx::setmaxnreg_inc<kComputeRegisters>();
    if (threadIdx.x < 32) publish(params, smem, schedule, first, 0);
    compute(params, smem);
  }
}
