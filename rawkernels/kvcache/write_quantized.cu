// Quantises new keys, rotated where asked (RoPE), and values into the slots of a paged cache.
// Memory-bound.
//
//   As write.cu; pages hold codes, or one side plain numbers, and scales, which are found for each
//   token, head and group of features, or given. QuantizedWriteParams says how. A row is a token's
//   key or value of a head; kLanes neighbouring threads have one, as in quantization/quantize.cu,
//   and blockIdx.y is 1 for values. With formats in Config a warp has neighbouring tokens, of some
//   heads one after the other, whose slots and angles it looks up once; scales are found and kInt4
//   has minima. RoPE's result is rounded to T, as the plain cache would store it, and then
//   quantised: the bytes are those of cuattn/reference/kvcache.py.
#include "kvcache/new_tokens.cuh"
#include "kvcache/quantized_params.cuh"
#include "ptx/registers.cuh"
#include "tile/row_block.cuh"
#include "tile/rows.cuh"

using T = Config::dtype;
using Acc = tile::Accumulator<T>;
using Row = tile::RowOf<Config::lanes>::type;

// Of keys or of values.
struct Side {
  const T* source;
  unsigned char* pages;
  PageStrides stride;
  void* scale;
  void* minimum;
  const float* offset;
  ScaleStrides scale_stride, minimum_stride;
  int format, group, group_shift, scale_is_float, rotated, is_static, head_dim;

  template <int kFormat>
  __device__ __forceinline__ tile::CodeRow<kFormat> row(const Slot& at, int head) const {
    const auto scale_at = [&](void* scales, const ScaleStrides& stride) -> void* {
      if (scales == nullptr) return nullptr;
      const long long element = at.page * stride.page + at.slot * stride.seq + head * stride.head;
      return static_cast<char*>(scales) + element * (scale_is_float ? 4 : 2);
    };
    return {pages + at.page * stride.page + at.slot * stride.seq + head * stride.head,
            scale_at(scale, scale_stride),
            scale_at(minimum, minimum_stride),
            scale_stride.group,
            minimum_stride.group,
            offset == nullptr ? nullptr : offset + head * head_dim,
            format,
            group,
            group_shift,
            scale_is_float,
            rotated,
            is_static};
  }
};

__device__ __forceinline__ Side keys(const WriteParams& params, const QuantizedWriteParams& codes,
                                     int token, int head) {
  return {static_cast<const T*>(params.k) + token * params.k_token + head * params.k_head,
          static_cast<unsigned char*>(params.k_pages),
          params.k_page,
          codes.k_scale,
          codes.k_minimum,
          codes.k_offset,
          codes.k_scale_stride,
          codes.k_minimum_stride,
          codes.k_format,
          codes.k_group,
          codes.k_group_shift,
          codes.k_scale_is_float,
          codes.k_rotated,
          codes.k_is_static,
          params.head_dim};
}

__device__ __forceinline__ Side values(const WriteParams& params, const QuantizedWriteParams& codes,
                                       int token, int head) {
  return {static_cast<const T*>(params.v) + token * params.v_token + head * params.v_head,
          static_cast<unsigned char*>(params.v_pages),
          params.v_page,
          codes.v_scale,
          codes.v_minimum,
          codes.v_offset,
          codes.v_scale_stride,
          codes.v_minimum_stride,
          codes.v_format,
          codes.v_group,
          codes.v_group_shift,
          codes.v_scale_is_float,
          codes.v_rotated,
          codes.v_is_static,
          params.head_dim_v};
}

__device__ __forceinline__ tile::RowRope<T> rope_of(const WriteParams& params, const Slot& at) {
  if (params.cos == nullptr || !at.exists) return {};
  const long long angles = at.position * static_cast<long long>(params.pairs);
  return {static_cast<const Acc*>(params.cos) + angles,
          static_cast<const Acc*>(params.sin) + angles, params.pairs, params.interleaved};
}

// Keys or values, of any format.
template <class AnyRow>
__device__ __forceinline__ void write_side(const Side& side, const Slot& at, int head,
                                           const tile::RowRope<T>& rope, bool exists) {
  if (side.format == tile::kPlain) {
    T* const target = reinterpret_cast<T*>(side.pages) + at.page * side.stride.page +
                      at.slot * side.stride.seq + head * side.stride.head;
    for (int i = threadIdx.x % AnyRow::kRowLanes; exists && i < side.head_dim;
         i += AnyRow::kRowLanes)
      target[i] = rope.column(side.source, i);
    return;
  }
  AnyRow row;
  row.load(side.source, side.head_dim, rope);
  row.quantize(side.row<tile::kAnyFormat>(at, head), side.head_dim, exists);
}

// A warp's rows of keys or of values, and their codes, of one head after the other.
template <class AnyRow, int kFormat>
struct Rows {
  static constexpr int kRows = 32 / AnyRow::kRowLanes;
  static constexpr int kBits = kFormat == tile::kInt4 ? 4 : 8;
  using Numbers = tile::RowBlock<AnyRow::kHeadDim * sizeof(T), kRows>;
  using Codes = tile::RowBlock<AnyRow::kHeadDim * kBits / 8, kRows>;

  Numbers numbers;
  Codes codes;

  // What is the same for all heads: places of the first one's, from which those of others are
  // whole strides away.
  struct Places {
    const char* numbers;                       // of this lane's first chunk
    unsigned char* codes[Codes::kLaneChunks];  // of its chunks; null: nowhere
    tile::CodeRow<kFormat> row;

    __device__ __forceinline__ Places(const Side& side, const T* first, long long token_stride,
                                      const Slot& at, bool exists, int head)
        : numbers(Numbers::first_chunk(first, token_stride * static_cast<int>(sizeof(T)))),
          row(side.row<kFormat>(at, head)) {
      const auto own = reinterpret_cast<unsigned long long>(exists ? row.codes : nullptr);
#pragma unroll
      for (int i = 0; i < Codes::kLaneChunks; ++i) {
        const int lane = Codes::row_of_chunk(i) * AnyRow::kRowLanes;
        const auto its_row = __shfl_sync(~0u, own, lane);
        codes[i] = its_row == 0
                       ? nullptr
                       : reinterpret_cast<unsigned char*>(its_row) + Codes::byte_of_chunk();
      }
    }
  };

  // Requests the rows of a head, `heads` after the first.
  __device__ __forceinline__ void request(const Places& places, long long token_stride,
                                          long long head_stride, int heads, int count) {
    constexpr int kSize = sizeof(T);
    numbers.request_from(places.numbers + heads * head_stride * kSize, token_stride * kSize, count);
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ const T* own_row() {
    return reinterpret_cast<const T*>(numbers.row(threadIdx.x % 32 / AnyRow::kRowLanes));
  }
  // Quantises the rows, of which this lane has a part of one, and writes them.
  __device__ __forceinline__ void write(AnyRow& row, const Side& side, const Places& places,
                                        int heads, bool exists, bool has_signs) {
    tile::StagedCodeRow<kFormat> to = {places.row};
    to.codes = codes.row(threadIdx.x % 32 / AnyRow::kRowLanes);
    to.scale = static_cast<unsigned short*>(to.scale) + heads * side.scale_stride.head;
    if (to.offset != nullptr) to.offset += heads * side.head_dim;
    row.quantize(to, side.head_dim, exists, has_signs);
    __syncwarp();
    codes.write_chunks([&](int i) -> void* {
      return places.codes[i] == nullptr ? nullptr : places.codes[i] + heads * side.stride.head;
    });
  }
};

template <class AnyRow>
struct WarpMemory {
  Rows<AnyRow, Config::k_format> k;
  Rows<AnyRow, Config::v_format> v;
};

// Keys and values of some neighbouring tokens and of blockIdx.y's share of the heads, of formats
// that are known. While a key becomes codes, the value and the next head's key are on their way.
template <class AnyRow>
__device__ __forceinline__ void write_blocks(const WriteParams& params,
                                             const QuantizedWriteParams& codes) {
  using Fetched = typename AnyRow::template Fetched<T>;
  constexpr int kWarps = Config::threads / 32, kRows = 32 / AnyRow::kRowLanes;
  __shared__ WarpMemory<AnyRow> memory[kWarps];
  WarpMemory<AnyRow>& own = memory[threadIdx.x / 32];
  const int first = (blockIdx.x * kWarps + threadIdx.x / 32) * kRows;
  if (first >= params.total) return;
  const int heads = params.heads / gridDim.y, begin = blockIdx.y * heads;
  const int count = min(kRows, params.total - first);
  const Side k_side = keys(params, codes, first, begin),
             v_side = values(params, codes, first, begin);
  own.k.numbers.request(k_side.source, params.k_token * static_cast<int>(sizeof(T)), count);
  ptx::cp_async_commit();
  own.v.numbers.request(v_side.source, params.v_token * static_cast<int>(sizeof(T)), count);
  ptx::cp_async_commit();
  const int token = first + min(static_cast<int>(threadIdx.x) % 32 / AnyRow::kRowLanes, count - 1);
  const Slot at = find_slot(params, token);
  const bool exists = at.exists && threadIdx.x % 32 / AnyRow::kRowLanes < count;
  const typename Rows<AnyRow, Config::k_format>::Places k_places(k_side, k_side.source,
                                                                 params.k_token, at, exists, begin);
  const typename Rows<AnyRow, Config::v_format>::Places v_places(v_side, v_side.source,
                                                                 params.v_token, at, exists, begin);
  // The signs of a rotation go to two features at once, unless an offset comes before.
  const bool k_has_signs = k_side.rotated && k_side.offset == nullptr;
  const bool v_has_signs = v_side.rotated && v_side.offset == nullptr;
#pragma unroll 1
  for (int head = 0; head < heads; ++head) {
    const bool more = head + 1 < heads;
    AnyRow row;
    Fetched fetched;
    // Angles are read again for each head: registers are for the row.
    Slot here = at;
    here.position = static_cast<int>(ptx::opaque(at.position));
    const tile::RowRope<T> rope = rope_of(params, here);
    const bool turns_all = rope.cos != nullptr && !Fetched::turns_some(rope);
    typename Fetched::Angles angles[4];
    if (turns_all)
#pragma unroll
      for (int i = 0; i < 4; ++i) angles[i] = Fetched::angles_of(rope, i);
    ptx::cp_async_wait<1>();
    __syncwarp();
    fetched.read(own.k.own_row());
    if (Fetched::turns_some(rope)) fetched.turn_some(own.k.own_row(), rope);
    __syncwarp();
    if (more)
      own.k.request(k_places, params.k_token, params.k_head, head + 1, count);
    else
      ptx::cp_async_commit();
    if (turns_all) fetched.turn([&](int fourth) { return angles[fourth]; }, rope.interleaved);
    if (k_has_signs) fetched.change_signs();
    row.unpack(fetched);
    own.k.write(row, k_side, k_places, head, exists, k_has_signs);
    ptx::cp_async_wait<1>();
    __syncwarp();
    fetched.read(own.v.own_row());
    __syncwarp();
    if (more)
      own.v.request(v_places, params.v_token, params.v_head, head + 1, count);
    else
      ptx::cp_async_commit();
    if (v_has_signs) fetched.change_signs();
    row.unpack(fetched);
    own.v.write(row, v_side, v_places, head, exists, v_has_signs);
  }
}

constexpr bool kInBlocks = Config::k_format != tile::kAnyFormat;
#if __CUDA_ARCH__ == 900
constexpr int kBlocksPerSm = kInBlocks && Config::lanes > 2 ? 4 : 3;
#else
constexpr int kBlocksPerSm = 3;  // not timed: as many registers as rows may take
#endif

extern "C" __global__ void __launch_bounds__(Config::threads, kBlocksPerSm)
    write_quantized(const __grid_constant__ WriteParams params,
                    const __grid_constant__ QuantizedWriteParams codes) {
  if constexpr (kInBlocks) {
    write_blocks<Row>(params, codes);
  } else {
    const int index = (blockIdx.x * Config::threads + threadIdx.x) / Row::kRowLanes;
    const int index_of_row = min(index, params.total * params.heads - 1);
    const int token = tile::divided(index_of_row, codes.by_heads);
    const int head = index_of_row - token * params.heads;
    const Slot at = find_slot(params, token);
    const bool exists = at.exists && index == index_of_row;
    if (blockIdx.y == 0)
      write_side<Row>(keys(params, codes, token, head), at, head, rope_of(params, at), exists);
    else
      write_side<Row>(values(params, codes, token, head), at, head, {}, exists);
  }
}
