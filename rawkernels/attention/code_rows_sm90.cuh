// Rows of codes with a scale each, and the numbers that are made of them in shared memory where
// wgmma reads them: for attention/expand_sm90.cuh and attention/expand_team_sm90.cuh.
#pragma once

#include "attention/layout_sm90.cuh"
#include "tile/eight_numbers.cuh"

struct CodeRows {
  using Options = CodeOptions<Config>;
  static_assert(kHeadDim == kHeadDimV, "keys and values are shared out alike");

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

  __device__ __forceinline__ static Scales scales_of_key(const Sm90Arguments& sm90,
                                                         const Tile& tile, int key, int page) {
    if (key >= tile.keys.length) return {0, 0};
    const CodeScales& scales = sm90.scales;
    const int slot = page_table(sm90).slot(key);
    return {scale_of_row<Options::k_format>(scales.k_scale, scales.k_scale_stride, page, slot,
                                            tile.head_kv),
            scale_of_row<Options::v_format>(scales.v_scale, scales.v_scale_stride, page, slot,
                                            tile.head_kv)};
  }

  // The page table's entry for a key, and the page that it stands for.
  __device__ __forceinline__ static int entry_of_key(const Sm90Params& sm90, const Tile& tile,
                                                     int key) {
    if (sm90.page_table == nullptr || key < 0 || key >= tile.keys.length) return tile.batch;
    return *page_table(sm90).entry(tile.batch, key);
  }
  __device__ __forceinline__ static int page_of_entry(const Sm90Params& sm90, int entry) {
    return sm90.page_table == nullptr ? entry : page_table(sm90).existing(entry);
  }

  // A warp makes numbers of kKeys rows of codes: lanes have eight neighbouring features each, of
  // some rows at a time.
  template <int kFormat, int kKeys>
  struct Expander {
    static constexpr int kRowLanes = kHeadDim / 8, kRows = 32 / kRowLanes, kSteps = kKeys / kRows;
    static constexpr int kChunkBytes = kFormat == tile::kInt4 ? 4 : 8;
    static constexpr bool kHasShort = tile::kHasShortNumbers<T, kFormat>;
    static_assert(kRows <= 8 && kKeys % 8 == 0, "the swizzle repeats every eight rows");
    static_assert(kKeys <= 32, "a lane has a key's scales");

    // Passes each lane's key's scale to the lanes that need it, for which they lie side by side.
    __device__ __forceinline__ static void put_scale(unsigned* scales, unsigned scale) {
      const int lane = threadIdx.x % 32;
      if (lane < kKeys)
        scales[lane % kRows * kSteps + lane / kRows] =
            tile::EightNumbers<T, kFormat>::prepared(scale);
    }

    // `numbers` and `codes` are those of the first row, whose number is a multiple of eight; panels
    // of numbers are `panel_bytes` apart.
    __device__ __forceinline__ static void expand(unsigned char* numbers, int panel_bytes,
                                                  const unsigned char* codes,
                                                  const unsigned* scales) {
      bool is_short = false;
      if constexpr (kHasShort) {
        const unsigned scale = scales[threadIdx.x % kKeys];
        is_short = __all_sync(~0u, tile::EightNumbers<T, kFormat, true>::is_short(scale));
      }
      if (is_short)
        expand_as<kHasShort>(numbers, panel_bytes, codes, scales);
      else
        expand_as<false>(numbers, panel_bytes, codes, scales);
    }

   private:
    template <bool kShort>
    __device__ __forceinline__ static void expand_as(unsigned char* numbers, int panel_bytes,
                                                     const unsigned char* codes,
                                                     const unsigned* scales) {
      const int lane = threadIdx.x % 32, chunk = lane % kRowLanes, row = lane / kRowLanes;
      const unsigned char* const from =
          codes + row * (kRowLanes * kChunkBytes) + chunk * kChunkBytes;
      unsigned char* const to = numbers + chunk / 8 * panel_bytes + row * kRowBytes;
      const int place = (chunk % 8 ^ row) * 16;
      // What some steps need is read before the numbers of the steps before are written: the
      // compiler must not move a read to before a write, and would wait for each.
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
  };

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
