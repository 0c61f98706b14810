// The warps of attention/forward_codes_sm90.cu that load codes of keys and values, and that expand
// them: codes of a block come by TMA, as they lie in memory, into a ring of stages of shared
// memory; each of Config::expand_warps warps makes numbers of some of its keys, and writes them
// where wgmma reads them. Scales come by ordinary loads, a block ahead, a key's to a lane.
//
// Every tile of queries expands its keys anew, also where others have the same: that takes about a
// quarter of the issue slots beside a tile of 128 queries, and half of the bytes from L2 that
// 16-bit keys take.
#pragma once

#include "attention/produce_sm90.cuh"
#include "tile/eight_numbers.cuh"

template <>
struct CodeWarps<true> {
  using Options = CodeOptions<Config>;
  static constexpr int kWarpKeys = kTileN / kExpandWarps;  // of a block, a warp's
  static_assert(kTileN % (8 * kExpandWarps) == 0 && kWarpKeys <= 32, "a lane has a key's scales");
  static_assert(kHeadDim == kHeadDimV, "keys and values are shared out alike");

  // ------------------------------------------------------------------------------------- loading

  // Loads the codes of a block of keys, or of values: lane i knows the page of box i.
  template <int kRowCodeBytes>
  __device__ __forceinline__ static void load_codes(Smem& smem,
                                                    tile::PipelineState<kCodeStages>& stage,
                                                    const ptx::TensorMap& map,
                                                    const Sm90Params& sm90, int block, int head,
                                                    int page) {
    unsigned char* place = smem.codes[stage.index];
    ptx::Mbarrier& full = smem.full_codes[stage.index];
    ptx::mbarrier_wait(smem.empty_codes[stage.index], stage.parity ^ 1);
    if (ptx::elect_one()) ptx::mbarrier_arrive_expect_tx(full, kTileN * kRowCodeBytes);
    const kvcache::PageTable table = page_table(sm90);
    int slot = table.slot(block * kTileN);
#pragma unroll 1
    for (int first = 0, box = 0; first < kTileN; first += 1 << sm90.box_shift, ++box) {
      const int page_of_box = __shfl_sync(~0u, page, box);
      if (ptx::elect_one())
        ptx::tma_load(place, map, full, 0, slot, head, page_of_box, ptx::kEvictLast);
      slot = table.slot(slot + (1 << sm90.box_shift));
      place += kRowCodeBytes << sm90.box_shift;
    }
    __syncwarp();
    stage.advance();
  }

  // Loads the codes of all tiles: values of a block after the keys of the next, as consumers ask
  // for them.
  __device__ __forceinline__ static void load(Smem& smem, const Sm90Params& sm90) {
    tile::PipelineState<kCodeStages> stage;
    tile::PipelineState<TileQueue::kSize> queue;
    for (Tile tile = read_tile(smem, queue); tile.row >= 0; tile = read_tile(smem, queue)) {
      if (tile.empty()) continue;
      int next_entry = entry_of_lane(sm90, tile, tile.block_end - 1), last_page = -1;
      for (int block = tile.block_end - 1; block >= tile.block_begin; --block) {
        const int page = page_of_lane(sm90, tile.keys.length, block, next_entry);
        next_entry = entry_of_lane(sm90, tile, max(block - 1, tile.block_begin));
        load_codes<kKeyCodeBytes>(smem, stage, sm90.k, sm90, block, tile.head_kv, page);
        if (block + 1 < tile.block_end)
          load_codes<kValueCodeBytes>(smem, stage, sm90.v, sm90, block + 1, tile.head_kv,
                                      last_page);
        last_page = page;
      }
      load_codes<kValueCodeBytes>(smem, stage, sm90.v, sm90, tile.block_begin, tile.head_kv,
                                  last_page);
    }
  }

  // ----------------------------------------------------------------------------------- expanding

  // The scale of a row of codes, with its minimum in the upper half where there is one.
  template <int kFormat>
  __device__ __forceinline__ static unsigned scale_of_row(const void* scales,
                                                          const ScaleStrides& stride, int page,
                                                          int slot, int head) {
    const long long at = page * stride.page + slot * stride.seq + head * stride.head;
    const unsigned short* const from = static_cast<const unsigned short*>(scales) + at;
    if constexpr (kFormat == tile::kInt4) return __ldg(reinterpret_cast<const unsigned*>(from));
    return __ldg(from);
  }

  // Scales of a lane's key of a block, and of its value; 0 for those past the last.
  struct Scales {
    unsigned k, v;
  };

  // Makes numbers of a warp's rows of a block: lanes have eight neighbouring features each, of some
  // rows at a time. `scale` is that of the lane's row; all lanes' go through `scales`, those that a
  // lane needs side by side.
  template <int kFormat, bool kShort>
  __device__ __forceinline__ static void expand_rows(unsigned char* numbers,
                                                     const unsigned char* codes, unsigned* scales,
                                                     unsigned scale, int warp) {
    constexpr int kRowLanes = kHeadDim / 8, kRows = 32 / kRowLanes, kSteps = kWarpKeys / kRows;
    constexpr int kChunkBytes = kFormat == tile::kInt4 ? 4 : 8;
    static_assert(kRows <= 8, "the swizzle repeats every eight rows");
    const int lane = threadIdx.x % 32, chunk = lane % kRowLanes, row = lane / kRowLanes;
    const unsigned char* const from =
        codes + (warp * kWarpKeys + row) * (kRowLanes * kChunkBytes) + chunk * kChunkBytes;
    unsigned char* const to =
        numbers + chunk / 8 * kPanelBytesK + (warp * kWarpKeys + row) * kRowBytes;
    const int place = (chunk % 8 ^ row) * 16;
    scales += warp * kWarpKeys;
    if (lane < kWarpKeys) scales[lane % kRows * kSteps + lane / kRows] = scale;
    __syncwarp();
    // What some steps need is read before the numbers of the steps before are written: the compiler
    // must not move a read to before a write, and would wait for each.
    constexpr int kAhead = 4;
    static_assert(kSteps % kAhead == 0, "steps are read in whole groups");
    struct Group {
      tile::Vec<unsigned, kChunkBytes / 4> words[kAhead];
      tile::Vec<unsigned, kAhead> scales;
    };
    const auto read = [&](int group) {
      Group read;
      read.scales =
          reinterpret_cast<const tile::Vec<unsigned, kAhead>*>(scales + row * kSteps)[group];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        read.words[i] = *reinterpret_cast<const tile::Vec<unsigned, kChunkBytes / 4>*>(
            from + (group * kAhead + i) * (32 * kChunkBytes));
      return read;
    };
    const tile::EightNumbers<T, kFormat, kShort> expander;
    Group next = read(0);
#pragma unroll
    for (int group = 0; group < kSteps / kAhead; ++group) {
      const Group now = next;
      if (group + 1 < kSteps / kAhead) next = read(group + 1);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int first = (group * kAhead + i) * kRows;
        unsigned words[2] = {now.words[i].x[0], now.words[i].x[kChunkBytes / 4 - 1]};
        *reinterpret_cast<uint4*>(to + first * kRowBytes + (place ^ first % 8 * 16)) =
            expander(words, now.scales.x[i]);
      }
    }
  }

  template <int kFormat>
  __device__ __forceinline__ static void expand_block(
      Smem& smem, tile::PipelineState<kCodeStages>& from, tile::PipelineState<kStages>& to,
      unsigned char* numbers, ptx::Mbarrier& full, ptx::Mbarrier& empty, unsigned scale, int warp) {
    constexpr bool kHasShort = tile::kHasShortNumbers<T, kFormat>;
    scale = tile::EightNumbers<T, kFormat>::prepared(scale);
    ptx::mbarrier_wait(smem.full_codes[from.index], from.parity);
    ptx::mbarrier_wait(empty, to.parity ^ 1);
    bool is_short = false;
    if constexpr (kHasShort)
      is_short = __all_sync(~0u, tile::EightNumbers<T, kFormat, true>::is_short(scale));
    if (is_short)
      expand_rows<kFormat, kHasShort>(numbers, smem.codes[from.index], smem.scales, scale, warp);
    else
      expand_rows<kFormat, false>(numbers, smem.codes[from.index], smem.scales, scale, warp);
    ptx::fence_proxy_async();
    tile::arrive_warp(full);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.empty_codes[from.index]);
    from.advance();
    to.advance();
  }

  // Expands one warp's keys, and values, of all tiles.
  __device__ __forceinline__ static void expand(Smem& smem, const Sm90Arguments& sm90, int warp) {
    tile::PipelineState<kCodeStages> stage;
    tile::PipelineState<kStages> stage_k, stage_v;
    tile::PipelineState<TileQueue::kSize> queue;
    const int key_of_lane = warp * kWarpKeys + static_cast<int>(threadIdx.x) % kWarpKeys;
    for (Tile tile = read_tile(smem, queue); tile.row >= 0; tile = read_tile(smem, queue)) {
      if (tile.empty()) continue;
      const kvcache::PageTable table = page_table(sm90);
      // The page table is read two blocks ahead, and scales one.
      const auto look_up = [&](int block) {
        const int key = block * kTileN + key_of_lane;
        if (table.entries == nullptr || block < tile.block_begin || key >= tile.keys.length)
          return tile.batch;
        return *table.entry(tile.batch, key);
      };
      const auto fetch = [&](int block, int entry) {
        const int key = block * kTileN + key_of_lane;
        if (key >= tile.keys.length) return Scales{0, 0};
        const int page = table.entries == nullptr ? entry : table.existing(entry);
        const int slot = table.slot(key);
        const CodeScales& scales = sm90.scales;
        return Scales{scale_of_row<Options::k_format>(scales.k_scale, scales.k_scale_stride, page,
                                                      slot, tile.head_kv),
                      scale_of_row<Options::v_format>(scales.v_scale, scales.v_scale_stride, page,
                                                      slot, tile.head_kv)};
      };
      Scales next = fetch(tile.block_end - 1, look_up(tile.block_end - 1));
      int entry = look_up(tile.block_end - 2);
      unsigned last_v = 0;
      for (int block = tile.block_end - 1; block >= tile.block_begin - 1; --block) {
        const Scales now = next;
        if (block > tile.block_begin) {
          next = fetch(block - 1, entry);
          entry = look_up(block - 2);
        }
        if (block >= tile.block_begin)
          expand_block<Options::k_format>(smem, stage, stage_k, smem.k[stage_k.index],
                                          smem.full_k[stage_k.index], smem.empty_k[stage_k.index],
                                          now.k, warp);
        if (block + 1 < tile.block_end)
          expand_block<Options::v_format>(smem, stage, stage_v, smem.v[stage_v.index],
                                          smem.full_v[stage_v.index], smem.empty_v[stage_v.index],
                                          last_v, warp);
        last_v = now.v;
      }
    }
  }

  // Eight features of a value as 16-bit numbers, from memory.
  __device__ __forceinline__ static uint4 values(const Params& params, const Sm90Params& sm90,
                                                 const Tile& tile, int key, int column) {
    constexpr int kFormat = Options::v_format;
    const kvcache::PageTable table = page_table(sm90);
    const CodeScales& scales = static_cast<const Sm90Arguments&>(sm90).scales;
    // Strides of v are in units of T.
    const unsigned char* const row = static_cast<const unsigned char*>(params.v) +
                                     tile.value_offset(params, sm90, key) * sizeof(T);
    unsigned words[2] = {};
    if constexpr (kFormat == tile::kInt4)
      words[0] = *reinterpret_cast<const unsigned*>(row + column / 2);
    else
      reinterpret_cast<uint2&>(words) = *reinterpret_cast<const uint2*>(row + column);
    const tile::EightNumbers<T, kFormat> expander;
    return expander(words, expander.prepared(scale_of_row<kFormat>(
                               scales.v_scale, scales.v_scale_stride, table.page(tile.batch, key),
                               table.slot(key), tile.head_kv)));
  }
};
