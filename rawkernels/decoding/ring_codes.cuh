// Copies codes of K and V, and their scales, by cp.async from a cache to a stage of a ring, and
// reads the scales there.
#pragma once

#include "decoding/ring.cuh"
#include "tile/expand.cuh"
#include "tile/fragment.cuh"

namespace decoding {

// A word of a key's scale, as it lies in memory: a float; or two bfloat16, of which one is the
// scale, or both are scale and minimum.
template <int kKeys, int kGroups>
using ScaleWords = unsigned[kGroups][kKeys];

// Of a tile's keys and values.
template <int kKeys, int kKGroups, int kVGroups>
struct TileScales {
  ScaleWords<kKeys, kKGroups> k;
  ScaleWords<kKeys, kVGroups> v;
};

template <int kKFormat, int kVFormat, int kKeys, int kHeadDim>
struct CodeTiles {
  static constexpr int kKRowBytes = kHeadDim * tile::Codes<kKFormat>::kBits / 8;
  static constexpr int kVRowBytes = kHeadDim * tile::Codes<kVFormat>::kBits / 8;
  using KTile = tile::Swizzled<kKRowBytes / 16>;
  using VTile = tile::Swizzled<kVRowBytes / 16>;

  unsigned char k[kKeys * kKRowBytes];
  unsigned char v[kKeys * kVRowBytes];

  static constexpr bool kKnowsLanes = false;
};

// Rows of kRowBytes of kHeads neighbouring heads, which lie side by side in memory, as TMA copies
// them: in panels of at most 128 bytes, of one head or several.
template <int kRowBytes, int kHeads, int kKeys>
struct HeadPanels {
  static constexpr int kPanelBytes = kHeads * kRowBytes < 128 ? kHeads * kRowBytes : 128;
  static constexpr int kPanels = kHeads * kRowBytes / kPanelBytes;
  static constexpr int kPanelHeads = kPanelBytes / kRowBytes;
  using Tile = tile::Swizzled<kPanelBytes / 16>;
  static_assert(kPanelBytes % kRowBytes == 0, "a head's rows must lie in one panel");

  unsigned char panels[kPanels][kKeys * kPanelBytes];

  // Where a 16-byte chunk of a head's row lies, in bytes.
  __device__ __forceinline__ static unsigned offset(int head, int row, int chunk) {
    return head / kPanelHeads * sizeof(panels[0]) +
           Tile::at(row, head % kPanelHeads * (kRowBytes / 16) + chunk);
  }
};

// Codes of several heads, and those of one of them.
template <int kKFormat, int kVFormat, int kKeys, int kHeadDim, int kHeads>
struct CodePanels {
  HeadPanels<kHeadDim * tile::Codes<kKFormat>::kBits / 8, kHeads, kKeys> k;
  HeadPanels<kHeadDim * tile::Codes<kVFormat>::kBits / 8, kHeads, kKeys> v;

  // Of which a lane's addresses for ldmatrix are known, as offsets.
  struct OfHead {
    static constexpr bool kKnowsLanes = true;
    using KTile = typename decltype(CodePanels::k)::Tile;
    using VTile = typename decltype(CodePanels::v)::Tile;

    unsigned k_lane, v_lane;

    __device__ __forceinline__ static OfHead offsets(int head, int thread) {
      const int lane = thread % 32;
      const unsigned v = sizeof(CodePanels::k);
      return {
          decltype(CodePanels::k)::offset(head, lane & 15, lane >> 4),
          v + decltype(CodePanels::v)::offset(head, (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1)};
    }
    __device__ __forceinline__ OfHead in(unsigned tiles) const {
      return {tiles + k_lane, tiles + v_lane};
    }
  };
};

template <int kKFormat, int kVFormat, int kKeys, int kHeadDim, int kKGroups, int kVGroups>
struct CodeStage : CodeTiles<kKFormat, kVFormat, kKeys, kHeadDim> {
  TileScales<kKeys, kKGroups, kVGroups> scales;
};

// Where the tile that is copied lies.
struct TileSource {
  int key, begin, end, head;
  int page;  // of key threadIdx.x % kKeys
  int page_mask;
};

// Rows of codes; zeros for keys outside [begin, end).
template <class Tile, int kKeys, int kThreads>
__device__ __forceinline__ void copy_rows(unsigned tile, const void* data,
                                          const PageStrides& stride, int row_bytes,
                                          const TileSource& source, unsigned long long policy) {
  constexpr int kChunks = Tile::kRowBytes / 16;
  constexpr int kPassRows = kThreads / kChunks < kKeys ? kThreads / kChunks : kKeys;
  // Consecutive keys of a pass, or of several, that lie in one page, where pages have 16 or more.
  constexpr int kSpan = kPassRows > 16 ? kPassRows : 16;
  static_assert(kThreads % kChunks == 0 && kKeys % kSpan == 0 && kSpan % kPassRows == 0,
                "passes of 16-byte copies must be whole rows, and tiles whole passes");
  const int thread = threadIdx.x % kThreads;
  const int row = thread / kChunks, chunk = thread % kChunks;
  if (kPassRows * kChunks < kThreads && row >= kPassRows) return;
  const kvcache::Pages<const unsigned char> pages = {
      static_cast<const unsigned char*>(data) + chunk * 16, stride};
  const unsigned first = tile + Tile::at(row, chunk);
  const bool exists = chunk * 16 < row_bytes;
  const unsigned from_begin = source.key + row - source.begin;
  const unsigned count = source.end - source.begin;
  const auto copy = [&](int i, const unsigned char* from) {
    // Rows are permuted by what they are modulo 8.
    const unsigned permuted = kPassRows % 8 == 0 ? 0 : i % 8 / (8 / Tile::kGroup) * 16;
    ptx::cp_async_16((first ^ permuted) + i * Tile::kRowBytes, from,
                     exists && from_begin + i < count, policy);
  };
  if (source.page_mask >= 15) {
    const int row_span = row & ~15;  // where a pass has several spans of 16
#pragma unroll
    for (int span = 0; span < kKeys; span += kSpan) {
      const int lane = max(source.begin - source.key, span + row_span) % 32;
      const int page = __shfl_sync(~0u, source.page, lane);
      const int slot = (source.key + span + row_span & source.page_mask) + row % 16;
      const unsigned char* from = pages.row(page, slot, source.head);
#pragma unroll
      for (int i = span; i < span + kSpan; i += kPassRows) {
        copy(i, from);
        from += kPassRows * stride.seq;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kKeys; i += kPassRows) {
      const int page = __shfl_sync(~0u, source.page, (i + row) % 32);
      const int slot = source.key + i + row & source.page_mask;
      copy(i, pages.row(page, slot, source.head));
    }
  }
}

// The words that hold the scales of a tile's keys; zeros for keys outside [begin, end), so that
// what lies there, NaN perhaps, stays out.
template <int kKeys, int kGroups>
__device__ __forceinline__ void copy_scales(const ScaleWords<kKeys, kGroups>& words,
                                            const void* scales, const ScaleStrides& stride,
                                            bool is_float, const TileSource& source) {
  const int own_key = source.key + static_cast<int>(threadIdx.x) % kKeys;
  const bool inside = own_key >= source.begin && own_key < source.end;
  const long long at = source.page * stride.page + (own_key & source.page_mask) * stride.seq +
                       source.head * stride.head;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const long long byte = at + group * stride.group << (is_float ? 2 : 1);
    ptx::cp_async_4(ptx::shared_address(&words[group][threadIdx.x % kKeys]),
                    static_cast<const char*>(scales) + (byte & ~3), inside);
  }
}

template <int kKeys, int kKGroups, int kVGroups>
__device__ __forceinline__ void copy_scales(const DecodeParams& params,
                                            const TileScales<kKeys, kKGroups, kVGroups>& scales,
                                            const TileSource& source) {
  copy_scales<kKeys, kKGroups>(scales.k, params.k_scale, params.k_scale_stride,
                               params.k_scale_is_float, source);
  copy_scales<kKeys, kVGroups>(scales.v, params.v_scale, params.v_scale_stride,
                               params.v_scale_is_float, source);
}

// As ring.cuh's, of codes.
template <int kThreads, bool kPolicy, int kKFormat, int kVFormat, int kKeys, int kHeadDim,
          int kKGroups, int kVGroups>
__device__ __forceinline__ void copy_tile(
    const DecodeParams& params,
    const CodeStage<kKFormat, kVFormat, kKeys, kHeadDim, kKGroups, kVGroups>& stage, int key,
    int begin, int end, int head, int page, bool read_once) {
  using Stage = CodeStage<kKFormat, kVFormat, kKeys, kHeadDim, kKGroups, kVGroups>;
  const TileSource source = {key, begin, end, head, page, (1 << params.page_shift) - 1};
  const unsigned long long policy =
      read_once ? ptx::createpolicy_evict_first() : ptx::createpolicy_evict_normal();
  const auto row_bytes = [](int head_dim, int bits) { return head_dim * bits / 8; };
  copy_rows<typename Stage::KTile, kKeys, kThreads>(
      ptx::shared_address(stage.k), params.k, params.k_stride,
      row_bytes(params.head_dim, tile::Codes<kKFormat>::kBits), source, policy);
  copy_rows<typename Stage::VTile, kKeys, kThreads>(
      ptx::shared_address(stage.v), params.v, params.v_stride,
      row_bytes(params.head_dim_v, tile::Codes<kVFormat>::kBits), source, policy);
  if (threadIdx.x % kThreads >= kKeys) return;
  copy_scales(params, stage.scales, source);
}

// How to read words of scales, of a head's keys or values; __byte_perm picks the bytes of a float,
// those of 1 where channels have scales of their own, which are in the queries.
struct ScaleReader {
  unsigned scale_bytes, minimum_bytes;
  unsigned odd_group;  // to be flipped in scale_bytes for odd groups
  float middle;        // what unsigned codes are counted from, here

  __device__ __forceinline__ static ScaleReader of_keys(const DecodeParams& params, int head) {
    return {params.k_minimum,
            params.k_scale_stride,
            params.k_scale_is_float != 0,
            params.page_shift,
            head,
            params.k_group == 1};
  }
  __device__ __forceinline__ static ScaleReader of_values(const DecodeParams& params, int head) {
    return {params.v_minimum,
            params.v_scale_stride,
            params.v_scale_is_float != 0,
            params.page_shift,
            head,
            false};
  }

  // A lane's keys are all odd or all even, and pages begin with whole words.
  __device__ __forceinline__ ScaleReader(const void* minimum, const ScaleStrides& stride,
                                         bool is_float, int page_shift, int head, bool by_channel) {
    const bool paired = minimum != nullptr;
    const int odd_key = page_shift > 0 ? tile::lane_row(threadIdx.x % 32) & 1 : 0;
    const bool upper =
        (odd_key * static_cast<int>(stride.seq) + head * static_cast<int>(stride.head) & 1) != 0;
    scale_bytes = is_float ? 0x3210 : upper && !paired ? 0x3244 : 0x1044;
    minimum_bytes = paired && !by_channel ? 0x3244 : 0x4444;
    if (by_channel) scale_bytes = 0x7654;
    odd_group = is_float || paired || stride.group % 2 == 0 ? 0 : 0x2200;
    middle = paired ? 8.0f : 0.0f;
  }
  __device__ __forceinline__ float scale(unsigned word, int group = 0) const {
    return __uint_as_float(
        __byte_perm(word, 0x3f800000, group % 2 == 0 ? scale_bytes : scale_bytes ^ odd_group));
  }
  // Of codes that are counted from the middle.
  __device__ __forceinline__ float minimum(unsigned word, float scale) const {
    return fmaf(scale, middle, __uint_as_float(__byte_perm(word, 0x3f800000, minimum_bytes)));
  }
};

// Scales of a tile as a cache has them, those of neighbouring keys side by side: bfloat16, of kInt4
// with the minimum behind it.
template <int kFormat>
struct PackedScale {
  using Word = unsigned short;
  __device__ __forceinline__ static float scale(unsigned word, int = 0) {
    return __uint_as_float(word << 16);
  }
  __device__ __forceinline__ static float minimum(unsigned, float) { return 0; }
};
template <>
struct PackedScale<tile::kInt4> {
  using Word = unsigned;
  __device__ __forceinline__ static float scale(unsigned word, int = 0) {
    return __uint_as_float(word << 16);
  }
  // Of codes that are counted from the middle.
  __device__ __forceinline__ static float minimum(unsigned word, float scale) {
    return fmaf(scale, 8.0f, __uint_as_float(word & 0xffff0000));
  }
};
template <int kKFormat, int kVFormat, int kKeys>
struct PackedScales {
  alignas(16) typename PackedScale<kKFormat>::Word k[1][kKeys];
  alignas(16) typename PackedScale<kVFormat>::Word v[1][kKeys];
};

}  // namespace decoding
