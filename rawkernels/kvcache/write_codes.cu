// Quantises new keys, rotated where asked (RoPE), and values into the slots of a paged cache.
// Memory-bound; where keys are rotated, by instructions nearly as much.
//
//   As write_quantized.cu, of the usual calls, with its bytes: both formats are known, each row has
//   one scale, which is found, there is no offset, values have no rotation, RoPE turns all features
//   or none, and there are as many tokens as a warp has at a time, or more. A warp has neighbouring
//   tokens, of some heads one after the other; the last warp's may be the one before's too, which
//   writes the same bytes.
#include "kvcache/new_tokens.cuh"
#include "kvcache/quantized_params.cuh"
#include "ptx/registers.cuh"
#include "tile/row_block.cuh"
#include "tile/whole_row.cuh"

using T = Config::dtype;

constexpr int kLanes = Config::lanes, kRows = 32 / kLanes, kHeadDim = 32 * kLanes;
constexpr int kWarps = Config::threads / 32;

using Fetched = tile::FetchedRow<T, kLanes>;
using Key = tile::WholeRow<T, kLanes, Config::k_format>;
using Value = tile::WholeRow<T, kLanes, Config::v_format>;
using Numbers = tile::RowBlock<kHeadDim * sizeof(T), kRows>;

template <int kFormat>
using Codes = tile::RowBlock<kFormat == tile::kInt4 ? kHeadDim / 2 : kHeadDim, kRows>;

struct WarpMemory {
  Numbers k, v;
  Codes<Config::k_format> k_codes;
  Codes<Config::v_format> v_codes;
};

// Where a warp's rows of keys or of values come from and go to, of one head after the other.
template <int kFormat>
struct Rows {
  using Staged = Codes<kFormat>;

  const char* from;                           // this lane's first chunk of numbers
  unsigned char* codes[Staged::kLaneChunks];  // its chunks of codes

  __device__ __forceinline__ Rows(const T* first, long long token_stride)
      : from(Numbers::first_chunk(first, token_stride * static_cast<int>(sizeof(T)))) {}

  __device__ __forceinline__ void find_places(unsigned char* pages, const PageStrides& stride,
                                              const Slot& at, int head) {
    const auto row = reinterpret_cast<unsigned long long>(
        pages + at.page * stride.page + at.slot * stride.seq + head * stride.head);
#pragma unroll
    for (int i = 0; i < Staged::kLaneChunks; ++i)
      codes[i] = reinterpret_cast<unsigned char*>(
                     __shfl_sync(~0u, row, Staged::row_of_chunk(i) * kLanes)) +
                 Staged::byte_of_chunk();
  }

  __device__ __forceinline__ void request(Numbers& numbers, long long token_stride) const {
    numbers.request_all_from(from, token_stride * static_cast<int>(sizeof(T)));
    ptx::cp_async_commit();
  }

  // Writes what is staged, of the rows that exist, and goes on to the next head.
  __device__ __forceinline__ void write(Staged& staged, unsigned exist, long long head_stride) {
    staged.write_chunks([&](int i) -> void* {
      return exist >> Staged::row_of_chunk(i) * kLanes & 1 ? codes[i] : nullptr;
    });
#pragma unroll
    for (int i = 0; i < Staged::kLaneChunks; ++i) codes[i] += head_stride;
  }
};

__device__ __forceinline__ unsigned short* first_scale(void* scales, const ScaleStrides& stride,
                                                       const Slot& at, int head) {
  return static_cast<unsigned short*>(scales) + at.page * stride.page + at.slot * stride.seq +
         head * stride.head;
}

// One of a row's, of keys or of values.
__device__ __forceinline__ void put_scale(unsigned short* to, const tile::FoundScale& found,
                                          bool is_value) {
  constexpr bool kOfKeys = Config::k_format == tile::kInt4,
                 kOfValues = Config::v_format == tile::kInt4;
  if (is_value ? kOfValues : kOfKeys)  // with a minimum behind it
    *reinterpret_cast<unsigned*>(to) =
        tile::bfloat16_bits(found.scale) | static_cast<unsigned>(tile::bfloat16_bits(found.minimum))
                                               << 16;
  else
    *to = tile::bfloat16_bits(found.scale);
}

// Four thread blocks on a multiprocessor: RoPE's angles take 32 of a thread's 128 registers. Five,
// with angles in shared memory, are slower.
extern "C" __global__ void __launch_bounds__(Config::threads, 4)
    write_codes(const __grid_constant__ WriteParams params,
                const __grid_constant__ QuantizedWriteParams codes) {
  __shared__ WarpMemory memory[kWarps];
  __shared__ uint4 signs[4][kLanes];  // of a lane's words, by slots
  if (threadIdx.x < 4 * kLanes)
    signs[threadIdx.x / kLanes][threadIdx.x % kLanes] =
        Fetched::signs_of(Fetched::Columns::quarter_of(threadIdx.x / kLanes));
  __syncthreads();
  WarpMemory& own = memory[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  int first = (blockIdx.x * kWarps + threadIdx.x / 32) * kRows;
  if (first >= params.total) return;
  first = min(first, params.total - kRows);
  const int heads = params.heads / gridDim.y, begin = blockIdx.y * heads;
  Rows<Config::k_format> k(
      static_cast<const T*>(params.k) + first * params.k_token + begin * params.k_head,
      params.k_token);
  Rows<Config::v_format> v(
      static_cast<const T*>(params.v) + first * params.v_token + begin * params.v_head,
      params.v_token);
  k.request(own.k, params.k_token);
  v.request(own.v, params.v_token);
  const Slot at = find_slot(params, first + lane / kLanes);
  const unsigned exist = __ballot_sync(~0u, at.exists);
  k.find_places(static_cast<unsigned char*>(params.k_pages), params.k_page, at, begin);
  v.find_places(static_cast<unsigned char*>(params.v_pages), params.v_page, at, begin);
  // Two lanes of a row find its scales, one the key's, one the value's.
  const bool is_value = lane % 2;
  unsigned short* scale = is_value ? first_scale(codes.v_scale, codes.v_scale_stride, at, begin)
                                   : first_scale(codes.k_scale, codes.k_scale_stride, at, begin);
  const long long scale_stride = is_value ? codes.v_scale_stride.head : codes.k_scale_stride.head;
  const bool puts_scale = at.exists && lane % kLanes < 2;
  // RoPE's angles, of any head.
  typename Fetched::Angles angles[4];
  if (params.cos != nullptr) {
    const unsigned place = (at.exists ? at.position : 0) * params.pairs;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      angles[i] = Fetched::slot_angles(static_cast<const float*>(params.cos) + place,
                                       static_cast<const float*>(params.sin) + place, i,
                                       params.interleaved);
  }
  const auto angles_of = [&](int fourth) { return angles[fourth]; };
#pragma unroll 1
  for (int left = heads; left > 0; --left) {
    Fetched fetched;
    ptx::cp_async_wait<1>();
    __syncwarp();
    fetched.read_slots(reinterpret_cast<const T*>(own.k.row(lane / kLanes)));
    __syncwarp();
    k.from += params.k_head * static_cast<int>(sizeof(T));
    if (left > 1)
      k.request(own.k, params.k_token);
    else
      ptx::cp_async_commit();
    float most, least, v_most, v_least;
    if (params.cos != nullptr && params.interleaved)
      fetched.turn(angles_of, true);
    else if (params.cos != nullptr)
      fetched.turn(angles_of, false);
    Key key;
    if (codes.k_rotated) {
#pragma unroll
      for (int part = 0; part < 4; ++part) fetched.change_signs(part, signs[part][lane % kLanes]);
      fetched.exchange();
      key.unpack(fetched);
      key.transform(most, least);
    } else {
      key.ends_of(fetched, most, least);
      key.unpack(fetched);
    }
    ptx::cp_async_wait<1>();
    __syncwarp();
    fetched.read(reinterpret_cast<const T*>(own.v.row(lane / kLanes)));
    __syncwarp();
    v.from += params.v_head * static_cast<int>(sizeof(T));
    if (left > 1)
      v.request(own.v, params.v_token);
    else
      ptx::cp_async_commit();
    Value::ends_of(fetched, v_most, v_least);
    const tile::FoundScale found = tile::found_scale_of_either<Config::k_format, Config::v_format>(
        is_value, most, least, v_most, v_least);
    if (puts_scale) put_scale(scale, found, is_value);
    scale += scale_stride;
    const auto of_both = [&](float own, float& of_key, float& of_value) {
      const float other = __shfl_xor_sync(~0u, own, 1);
      of_key = is_value ? other : own;
      of_value = is_value ? own : other;
    };
    float k_inverse, v_inverse, k_minimum = 0, v_minimum = 0;
    of_both(found.inverse, k_inverse, v_inverse);
    if (Config::v_format == tile::kInt4) of_both(found.minimum, k_minimum, v_minimum);
    if (__any_sync(~0u, found.scale != found.scale)) {  // rows whose numbers are not all finite
      if (k_inverse != k_inverse) {
        key.clear();
        k_inverse = 0;
      }
      if (v_inverse != v_inverse) {
        fetched.clear();
        v_inverse = 0;
      }
    }
    unsigned char* const k_row = own.k_codes.row(lane / kLanes);
    unsigned char* const v_row = own.v_codes.row(lane / kLanes);
    key.divide<true>(k_inverse, k_minimum, [&](int at, auto words) {
      *reinterpret_cast<decltype(words)*>(k_row + at) = words;
    });
    __syncwarp();
    k.write(own.k_codes, exist, params.k_page.head);
    Value value;
    value.unpack(fetched);
    value.divide<false>(v_inverse, v_minimum, [&](int at, auto words) {
      *reinterpret_cast<decltype(words)*>(v_row + at) = words;
    });
    __syncwarp();
    v.write(own.v_codes, exist, params.v_page.head);
  }
}
