// Quantises rows to int8, 4-bit integers, e4m3 or e5m2, with scales that are found for each row or
// group of its features, or given. Memory-bound.
//
//   x (pages, tokens, heads, head_dim) of any strides with contiguous features; float16, bfloat16,
//   float32, float64. QuantizeParams has the rest. kLanes neighbouring threads have a row: head_dim
//   is 32 * kLanes, pointers and strides are multiples of 16 bytes and groups powers of two; with 0
//   lanes a warp has a row of any kind. With a format in Config, scales are found and kInt4 has
//   minima; else QuantizeParams says. Offset, rotation, scale and codes are those of
//   cuattn/reference/quantization.py, bit for bit.
//
//   With a format, a warp's next rows are on their way while it has others. With in_blocks these
//   are neighbouring tokens of a head, whose scales lie side by side, and both numbers and codes
//   pass through shared memory.
#include "quantization/params.cuh"
#include "tile/row_block.cuh"

using T = Config::dtype;
using Row = tile::RowOf<Config::lanes>::type;

constexpr int kRows = Config::threads / Row::kRowLanes;

__device__ __forceinline__ const T* row_of_x(const QuantizeParams& params,
                                             const quantization::Place& at) {
  const PageStrides& stride = params.x_stride;
  return static_cast<const T*>(params.x) + at.page * stride.page + at.token * stride.seq +
         at.head * stride.head;
}

// A thread block's rows in turn: the next one is on its way while a row becomes codes.
template <class AnyRow>
__device__ __forceinline__ void quantize_in_turn(const QuantizeParams& params) {
  int first = blockIdx.x * kRows;
  quantization::Place at = quantization::place_of<AnyRow>(params, first);
  typename AnyRow::template Fetched<T> fetched;
  fetched.fetch(row_of_x(params, at));
#pragma unroll 1
  while (true) {
    const quantization::Place here = at;
    const auto codes = quantization::codes_of<Config::format>(params, here);
    const bool has_signs = codes.rotated && codes.offset == nullptr;
    if (has_signs) fetched.change_signs();
    AnyRow row;
    row.unpack(fetched);
    first += gridDim.x * kRows;
    const bool more = first < params.rows;
    if (more) {
      at = quantization::place_of<AnyRow>(params, first);
      fetched.fetch(row_of_x(params, at));
    }
    row.quantize(codes, params.head_dim, here.exists, has_signs);
    if (!more) return;
  }
}

template <class AnyRow>
struct Warp {
  static constexpr int kRows = 32 / AnyRow::kRowLanes;
  static constexpr int kStages = 2;
  static constexpr int kBits = Config::format == tile::kInt4 ? 4 : 8;
  using Numbers = tile::RowBlock<AnyRow::kHeadDim * sizeof(T), kRows>;
  using Codes = tile::RowBlock<AnyRow::kHeadDim * kBits / 8, kRows>;

  Numbers numbers[kStages];
  Codes codes;
};

template <class AnyRow>
__device__ __forceinline__ void quantize_blocks(const QuantizeParams& params) {
  using Memory = Warp<AnyRow>;
  constexpr int kWarps = Config::threads / 32, kStages = Memory::kStages;
  __shared__ Memory memory[kWarps];
  Memory& own = memory[threadIdx.x / 32];
  const int row = static_cast<int>(threadIdx.x) % 32 / AnyRow::kRowLanes;
  const int step = gridDim.x * kWarps;
  const auto request = [&](int index, int stage) {
    if (index < params.rows) {
      const quantization::Tokens at = quantization::tokens_of<Memory::kRows>(params, index);
      const PageStrides& stride = params.x_stride;
      own.numbers[stage].request(static_cast<const T*>(params.x) + at.page * stride.page +
                                     at.first * stride.seq + at.head * stride.head,
                                 stride.seq * static_cast<int>(sizeof(T)), at.count);
    }
    ptx::cp_async_commit();
  };
  int index = blockIdx.x * kWarps + threadIdx.x / 32, stage = 0;
#pragma unroll
  for (int i = 0; i < kStages; ++i) request(index + i * step, i);
#pragma unroll 1
  for (; index < params.rows; index += step) {
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
    typename AnyRow::template Fetched<T> fetched;
    fetched.read(reinterpret_cast<const T*>(own.numbers[stage].row(row)));
    __syncwarp();
    request(index + kStages * step, stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    AnyRow numbers;
    numbers.unpack(fetched);
    const quantization::Tokens at = quantization::tokens_of<Memory::kRows>(params, index);
    const bool exists = row < at.count;
    tile::StagedCodeRow<Config::format> codes = {quantization::codes_of<Config::format>(
        params, {at.page, at.first + (exists ? row : 0), at.head, exists})};
    codes.codes = own.codes.row(row);
    numbers.quantize(codes, params.head_dim, exists);
    __syncwarp();
    const PageStrides& stride = params.codes_stride;
    own.codes.write(static_cast<unsigned char*>(params.codes) + at.page * stride.page +
                        at.first * stride.seq + at.head * stride.head,
                    stride.seq, at.count);
    __syncwarp();
  }
}

// Of the usual formats; for the others registers are missing.
constexpr bool kInTurn = Config::format != tile::kAnyFormat;

extern "C" __global__ void __launch_bounds__(Config::threads, Config::in_blocks ? 5
                                                              : kInTurn         ? 2
                                                                                : 3)
    quantize_rows(const __grid_constant__ QuantizeParams params) {
  if constexpr (Config::in_blocks) {
    quantize_blocks<Row>(params);
  } else if constexpr (kInTurn) {
    quantize_in_turn<Row>(params);
  } else {
    const quantization::Place at = quantization::place_of<Row>(params, blockIdx.x * kRows);
    Row row;
    row.load(row_of_x(params, at), params.head_dim, tile::RowRope<T>{});
    row.quantize(quantization::codes_of<>(params, at), params.head_dim, at.exists);
  }
}
