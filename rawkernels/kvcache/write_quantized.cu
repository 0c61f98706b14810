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
#include "ptx/registers.cuh"
#include "tile/row_block.cuh"
#include "tile/rows.cuh"

using T = Config::dtype;
using Acc = tile::Accumulator<T>;
using Row = tile::RowOf<Config::lanes>::type;

struct QuantizedWriteParams {
  void* k_scale;
  void* k_minimum;
  void* v_scale;
  void* v_minimum;
  const float* k_offset;  // (heads, head_dim); null: none
  const float* v_offset;
  ScaleStrides k_scale_stride, k_minimum_stride, v_scale_stride, v_minimum_stride;
  int k_format, v_format, k_group, v_group, k_group_shift, v_group_shift;
  int k_scale_is_float, v_scale_is_float, k_rotated, v_rotated, k_is_static, v_is_static;
  tile::Divisor by_heads;
};

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

// Where a row's codes go.
struct Target {
  int page, slot;
  bool exists;

  // That of another lane's row.
  __device__ __forceinline__ Target of_lane(int lane) const {
    return {__shfl_sync(~0u, page, lane), __shfl_sync(~0u, slot, lane),
            __shfl_sync(~0u, exists ? 1 : 0, lane) != 0};
  }
};

// A warp's rows of keys or of values, and their codes.
template <class AnyRow, int kFormat>
struct Rows {
  static constexpr int kRows = 32 / AnyRow::kRowLanes;
  static constexpr int kBits = kFormat == tile::kInt4 ? 4 : 8;
  using Codes = tile::RowBlock<AnyRow::kHeadDim * kBits / 8, kRows>;

  tile::RowBlock<AnyRow::kHeadDim * sizeof(T), kRows> numbers;
  Codes codes;

  // Where each of this lane's chunks of codes goes.
  struct Targets {
    Target of[Codes::kLaneChunks];

    __device__ __forceinline__ explicit Targets(const Target& own) {
#pragma unroll
      for (int i = 0; i < Codes::kLaneChunks; ++i)
        of[i] = own.of_lane(Codes::row_of_chunk(i) * AnyRow::kRowLanes);
    }
  };

  __device__ __forceinline__ void request(const T* first, long long stride, int count) {
    numbers.request(first, stride * static_cast<int>(sizeof(T)), count);
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ const T* own_row() {
    return reinterpret_cast<const T*>(numbers.row(threadIdx.x % 32 / AnyRow::kRowLanes));
  }
  // Quantises the rows, of which this lane has a part of one, and writes them.
  __device__ __forceinline__ void write(AnyRow& row, const Side& side, const Slot& at, int head,
                                        bool exists, const Targets& targets) {
    tile::StagedCodeRow<kFormat> to = {side.row<kFormat>(at, head)};
    to.codes = codes.row(threadIdx.x % 32 / AnyRow::kRowLanes);
    row.quantize(to, side.head_dim, exists);
    __syncwarp();
    codes.write_chunks([&](int i, int) -> void* {
      const Target& to = targets.of[i];
      return to.exists ? side.pages + to.page * side.stride.page + to.slot * side.stride.seq +
                             head * side.stride.head
                       : nullptr;
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
  constexpr int kWarps = Config::threads / 32, kRows = 32 / AnyRow::kRowLanes;
  __shared__ WarpMemory<AnyRow> memory[kWarps];
  WarpMemory<AnyRow>& own = memory[threadIdx.x / 32];
  const int first = (blockIdx.x * kWarps + threadIdx.x / 32) * kRows;
  if (first >= params.total) return;
  const int heads = params.heads / gridDim.y, begin = blockIdx.y * heads;
  const int count = min(kRows, params.total - first);
  const auto request_key = [&](int head) {
    own.k.request(static_cast<const T*>(params.k) + first * params.k_token + head * params.k_head,
                  params.k_token, count);
  };
  const auto request_value = [&](int head) {
    own.v.request(static_cast<const T*>(params.v) + first * params.v_token + head * params.v_head,
                  params.v_token, count);
  };
  request_key(begin);
  request_value(begin);
  const int token = first + min(static_cast<int>(threadIdx.x) % 32 / AnyRow::kRowLanes, count - 1);
  const Slot at = find_slot(params, token);
  const bool exists = at.exists && threadIdx.x % 32 / AnyRow::kRowLanes < count;
  const Target target = {at.page, at.slot, exists};
  const typename Rows<AnyRow, Config::k_format>::Targets k_targets(target);
  const typename Rows<AnyRow, Config::v_format>::Targets v_targets(target);
#pragma unroll 1
  for (int head = begin; head < begin + heads; ++head) {
    const bool more = head + 1 < begin + heads;
    AnyRow row;
    typename AnyRow::template Fetched<T> fetched;
    ptx::cp_async_wait<1>();
    __syncwarp();
    fetched.read(own.k.own_row());
    // Angles are read again for each head: registers are for the row.
    Slot here = at;
    here.position = static_cast<int>(ptx::opaque(at.position));
    row.load(fetched, own.k.own_row(), rope_of(params, here));
    __syncwarp();
    if (more)
      request_key(head + 1);
    else
      ptx::cp_async_commit();
    own.k.write(row, keys(params, codes, token, head), at, head, exists, k_targets);
    ptx::cp_async_wait<1>();
    __syncwarp();
    fetched.read(own.v.own_row());
    __syncwarp();
    if (more)
      request_value(head + 1);
    else
      ptx::cp_async_commit();
    row.unpack(fetched);
    own.v.write(row, values(params, codes, token, head), at, head, exists, v_targets);
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
