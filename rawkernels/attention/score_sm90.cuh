// What happens to q·k in attention/forward_sm90.cu before the softmax: softcap, bias, ALiBi, masks,
// or a functor of the variant's own.
// Scores are wgmma's accumulators, in rows of a consumer and columns of a block of keys as
// tile/fragment.cuh has them.
#pragma once

#include "attention/layout_sm90.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"
#include "tile/softmax.cuh"

// Products alone are never so large that their maxima need care: bias and ALiBi may make them so.
using Softmax = tile::OnlineSoftmaxOf<Config::score>;

constexpr bool kSoftcapAlibi = Config::score && !Config::elementwise && kContractScores;

// The first of a lane's two rows among its consumer's 64, and the first of its columns.
__device__ __forceinline__ int lane_row() {
  return threadIdx.x % 128 / 32 * 16 + tile::lane_row(threadIdx.x % 32);
}
__device__ __forceinline__ int lane_column() { return tile::lane_column(threadIdx.x % 32); }

// Rows of a lane that may have slopes of their own: both, where rows are of several heads.
constexpr int kSlopes = Config::pack_gqa ? 2 : 1;

// From products to scores by the variant's own functor; the lane's first are of `row` and `column`.
__device__ __forceinline__ void apply_score_mod(float (&s)[kTileN / 2], const ForwardParams& params,
                                                const Tile& tile, int row, int column) {
  const ScoreMod<T, true, false> score_mod = {
      score_inputs(params).of_head<T>(tile.batch, tile.head)};
  const float slope = score_mod.slope(tile.batch, tile.head);
  score_mod.terms([&](const auto& term) {
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) {
      const int query = row + tile::fragment_row(i);
      const tile::ScoreRow<float> score_row = {tile.batch, tile.head, query,
                                               query + tile.diagonal(), slope};
      s[i] = term(s[i], score_row, column + tile::fragment_column(i));
    }
  });
}

// Softcap and ALiBi, but for a factor of score_scale, which `slope` has been divided by. `distance`
// is that from the lane's queries to its first key. The tanh is an instruction with an error of
// 2^-11, which is what rounding scores to 16 bits costs.
__device__ __forceinline__ void apply_softcap_and_alibi(float (&s)[kTileN / 2], float cap_scale,
                                                        const float (&slope)[kSlopes],
                                                        const float (&distance)[kSlopes]) {
  if (cap_scale != 0.0f) {
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) s[i] = ptx::tanh(s[i] * cap_scale);
  }
  if constexpr (Config::pack_gqa) {
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i)
      s[i] = fmaf(-slope[i / 2 % 2],
                  fabsf(distance[i / 2 % 2] - static_cast<float>(tile::fragment_column(i))), s[i]);
  } else if (slope[0] != 0.0f) {
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i)
      s[i] = fmaf(
          -slope[0],
          fabsf(distance[0] + static_cast<float>(tile::fragment_row(i) - tile::fragment_column(i))),
          s[i]);
  }
}

// Sets scores of keys after the last that a query sees to -inf, and of those before the first.
__device__ __forceinline__ void hide_later_keys(float (&s)[kTileN / 2], const ForwardParams& params,
                                                const Tile& tile, int row, int column) {
  int end[2] = {tile.end_key(params, row) - column, tile.end_key(params, row + 8) - column};
  if constexpr (Config::pack_gqa) {
    end[0] = tile.end_key(params, tile.query_of(params, row)) - column;
    end[1] = tile.end_key(params, tile.query_of(params, row + 8)) - column;
  }
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i)
    if (tile::fragment_column(i) >= end[i / 2 % 2]) s[i] = tile::negative_infinity();
}
__device__ __forceinline__ void hide_earlier_keys(float (&s)[kTileN / 2],
                                                  const ForwardParams& params, const Tile& tile,
                                                  int row, int column) {
  int first[2] = {tile.first_key(params, row) - column, tile.first_key(params, row + 8) - column};
  if constexpr (Config::pack_gqa) {
    first[0] = tile.first_key(params, tile.query_of(params, row)) - column;
    first[1] = tile.first_key(params, tile.query_of(params, row + 8)) - column;
  }
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i)
    if (tile::fragment_column(i) < first[i / 2 % 2]) s[i] = tile::negative_infinity();
}

__device__ __forceinline__ constexpr bool has_range_of_float(const __half*) { return false; }
__device__ __forceinline__ constexpr bool has_range_of_float(const __nv_bfloat16*) { return true; }

// Softcap or ALiBi without bias or mask. Consumers are latency-bound, and a branch costs them about
// 20 instructions. The common case of a block is therefore decided before its scores arrive, and
// costs one branch.
template <bool kAny>
struct SoftcapAlibi {
  // A softcap bounds scores, so no maxima are needed where exponents relative to half the cap, from
  // -1.5 to 0.5 times this, are in range: of float, which bfloat16 shares.
  static constexpr float kBoundLog2 = 75.0f;
  static constexpr float kBoundMax = 0.5f;
  // Of ALiBi, over score_scale. Slopes as in the paper are up to 17 at head_dim 256.
  static constexpr float kLargestSlope = 64.0f;
  // The same range lets maxima lag behind further: under ALiBi they grow block by block up to the
  // diagonal.
  static constexpr float kRescaleThreshold =
      has_range_of_float(static_cast<T*>(nullptr)) ? 40.0f : Softmax::kRescaleThreshold;

  // A block needs the general path, a softcap alone, or ALiBi alone with all of its keys on one
  // side of all queries.
  enum Kind { kGeneral, kCapped, kOneSide };

  const Sm90Params& sm90;
  const bool bounded;     // the softcap bounds scores: maxima are not needed
  Kind kind = kGeneral;   // of the block
  float pending[2] = {};  // what is yet to be subtracted from the scores of each row
  float slope;            // ALiBi's, negative for keys after the queries

  __device__ __forceinline__ SoftcapAlibi(const ForwardParams& params, const Sm90Params& sm90)
      : sm90(sm90),
        bounded(has_range_of_float(static_cast<T*>(nullptr)) && params.alibi_slopes == nullptr &&
                sm90.cap_scale != 0.0f && sm90.scale_log2 <= kBoundLog2) {}

  // Decides on a block while its products are computed, from the distance of its first key to the
  // consumer's first query and whether some of its keys are hidden from some of the queries. What
  // is linear in the distance must not be so large that it rounds scores to others.
  __device__ __forceinline__ void expect(int block_distance, bool partial, float head_slope) {
    const bool one_side = block_distance >= kTileN - 1 || block_distance <= -63;
    kind = partial                                                                    ? kGeneral
           : bounded                                                                  ? kCapped
           : sm90.cap_scale == 0.0f && one_side && fabsf(head_slope) <= kLargestSlope ? kOneSide
                                                                                      : kGeneral;
    if (Config::pack_gqa && kind == kOneSide) kind = kGeneral;  // rows have slopes of their own
    slope = block_distance > 0 ? head_slope : -head_slope;
  }

  // Applies a block's special case, and says whether it was one; else the caller applies
  // apply_softcap_and_alibi, with the same `distance`, and hides keys.
  __device__ __forceinline__ bool apply(float (&s)[kTileN / 2], float distance) {
    pending[0] = pending[1] = 0.0f;
    if (kind == kCapped) {
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i) s[i] = ptx::tanh(s[i] * sm90.cap_scale);
      return true;
    }
    if (kind == kOneSide) {
      // All keys are on one side of all queries, so the distance is linear in both.
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i)
        s[i] = fmaf(slope, static_cast<float>(tile::fragment_column(i)), s[i]);
      pending[0] = slope * distance;
      pending[1] = fmaf(slope, 8.0f, pending[0]);
      return true;
    }
    return false;
  }

  // Prepares the softmax of a new tile.
  __device__ __forceinline__ void start(Softmax& softmax) const {
    if (bounded) softmax.row_max[0] = softmax.row_max[1] = kBoundMax;
  }

  // The steps of OnlineSoftmax.
  __device__ __forceinline__ void update(Softmax& softmax, float (&s)[kTileN / 2], float scale_log2,
                                         float (&correction)[2]) const {
    start(softmax);
    if (bounded)
      softmax.exponentiate(s, scale_log2);
    else
      softmax.update(s, scale_log2, correction);
  }
  __device__ __forceinline__ bool needs_rescale(const Softmax& softmax,
                                                const float (&s)[kTileN / 2], float scale_log2,
                                                float (&block_max)[2]) const {
    return !bounded && __any_sync(~0u, softmax.needs_rescale(
                                           s, scale_log2, block_max,
                                           [&](float max, int row) { return max - pending[row]; },
                                           kRescaleThreshold));
  }
  __device__ __forceinline__ void rescale(Softmax& softmax, const float (&block_max)[2],
                                          float scale_log2, float (&correction)[2]) const {
    softmax.rescale(block_max, scale_log2, correction, kRescaleThreshold);
  }

  __device__ __forceinline__ void exponentiate(Softmax& softmax, float (&s)[kTileN / 2],
                                               float scale_log2) const {
    softmax.exponentiate(s, scale_log2,
                         {softmax.row_max[0] + pending[0], softmax.row_max[1] + pending[1]});
  }
};

// Neither softcap nor ALiBi, or together with bias or mask: OnlineSoftmax as it is.
template <>
struct SoftcapAlibi<false> {
  __device__ __forceinline__ SoftcapAlibi(const ForwardParams&, const Sm90Params&) {}
  __device__ __forceinline__ void expect(int, bool, float) {}
  __device__ __forceinline__ bool apply(float (&)[kTileN / 2], float) { return false; }
  __device__ __forceinline__ void start(Softmax&) const {}
  __device__ __forceinline__ void update(Softmax& softmax, float (&s)[kTileN / 2], float scale_log2,
                                         float (&correction)[2]) const {
    softmax.update(s, scale_log2, correction);
  }
  __device__ __forceinline__ bool needs_rescale(const Softmax& softmax,
                                                const float (&s)[kTileN / 2], float scale_log2,
                                                float (&block_max)[2]) const {
    return __any_sync(~0u, softmax.needs_rescale(s, scale_log2, block_max));
  }
  __device__ __forceinline__ void rescale(Softmax& softmax, const float (&block_max)[2],
                                          float scale_log2, float (&correction)[2]) const {
    softmax.rescale(block_max, scale_log2, correction);
  }
  __device__ __forceinline__ void exponentiate(Softmax& softmax, float (&s)[kTileN / 2],
                                               float scale_log2) const {
    softmax.exponentiate(s, scale_log2);
  }
};

template <class Element>
__device__ __forceinline__ void copy_elements(unsigned char* to, const void* from, long long stride,
                                              int first, int count) {
#pragma unroll 4
  for (int i = first; i < count; i += 8)
    reinterpret_cast<Element*>(to)[i] = static_cast<const Element*>(from)[i * stride];
}

// Copies a consumer's rows of bias or of mask for a block of keys to shared memory, eight lanes of
// a warp a row. `head` is the first element of this sequence and head, `size` that of an element in
// bytes. Places of queries and keys that do not exist are left as they are. Returns whether copies
// are still under way.
__device__ __forceinline__ bool copy_rows(unsigned char* rows, int pitch, const void* head,
                                          int size, const ScoreStrides& stride, const Tile& tile,
                                          int row, int column) {
  const int lane = threadIdx.x % 8;
  const int count = min(tile.queries.length - row, 64);
  const int keys = min(tile.keys.length - column, kTileN);
  const char* from =
      static_cast<const char*>(head) + (tile.batch * stride.batch + tile.head * stride.head) * size;
  const unsigned alignment =
      static_cast<unsigned>(reinterpret_cast<unsigned long long>(from) | stride.row * size);
  // The last vector of a row may reach beyond it, but not beyond memory: vectors are aligned.
  const int vector_bytes = stride.col != 1       ? 0
                           : alignment % 16 == 0 ? 16
                           : alignment % 4 == 0  ? 4
                                                 : 0;
  int r = threadIdx.x % 32 / 8;
  from += ((row + r) * stride.row + column * stride.col) * size;
  for (; r < count; r += 4, from += 4 * stride.row * size) {
    unsigned char* const to = rows + r * pitch * size;
    if (vector_bytes == 16) {
      for (int at = lane * 16; at < keys * size; at += 128)
        ptx::cp_async_16(ptx::shared_address(to + at), from + at);
    } else if (vector_bytes == 4) {
      for (int at = lane * 4; at < keys * size; at += 32)
        ptx::cp_async_4(ptx::shared_address(to + at), from + at);
    } else if (size == 4) {
      copy_elements<unsigned>(to, from, stride.col, lane, keys);
    } else if (size == 2) {
      copy_elements<unsigned short>(to, from, stride.col, lane, keys);
    } else {
      copy_elements<unsigned char>(to, from, stride.col, lane, keys);
    }
  }
  return vector_bytes != 0;
}

// Loads bias and mask of a consumer's rows, the first of which is `row`, and the keys of a block
// from `column` on, by TMA where it can. All lanes of a warp together; each arrives at `full`.
__device__ __forceinline__ void load_score_rows(ScoreRows& rows, const ForwardParams& params,
                                                const Sm90Params& sm90, const Tile& tile, int row,
                                                int column) {
  bool copying = true;
  int bytes = 0;  // that TMA copies
  const auto load = [&](unsigned char* place, int pitch, const ptx::TensorMap& map,
                        const void* array, int mapped, const ScoreStrides& stride, int size) {
    if (array == nullptr) return;
    if (!mapped) {
      copying &= copy_rows(place, pitch, array, size, stride, tile, row, column);
      return;
    }
    bytes += 64 * pitch * size;
    if (threadIdx.x % 32 == 0)
      ptx::tma_load(place, map, rows.full, column, row, stride.head == 0 ? 0 : tile.head,
                    stride.batch == 0 ? 0 : tile.batch, ptx::kEvictNormal);
  };
  load(rows.bias, kBiasPitch, sm90.bias, params.bias, sm90.bias_mapped, params.bias_stride,
       params.bias_is_float32 ? sizeof(float) : sizeof(T));
  load(rows.mask, kTileN, sm90.mask, params.mask, sm90.mask_mapped, params.mask_stride, 1);
  if (!copying) ptx::cp_async_wait_all();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_expect_tx(rows.full, bytes);
  if (copying)
    ptx::mbarrier_arrive_after_copies(rows.full);
  else
    ptx::mbarrier_arrive(rows.full);
}

__device__ __forceinline__ float2 as_floats(unsigned pair, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}
__device__ __forceinline__ float2 as_floats(unsigned pair, __nv_bfloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}

// Turns scores into natural units and adds the bias. ldmatrix loads four pairs of 16-bit bias with
// one instruction: those of a lane's two rows, in two columns 8 apart.
__device__ __forceinline__ void add_bias(float (&s)[kTileN / 2], const ScoreRows& rows,
                                         float scale) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
  const unsigned from =
      ptx::shared_address(rows.bias) + (row * kBiasPitch + lane / 16 * 8) * sizeof(T);
#pragma unroll
  for (int i = 0; i < kTileN / 2; i += 8) {
    unsigned pairs[4];
    ptx::ldmatrix_x4(pairs, from + i * 2 * sizeof(T));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 bias = as_floats(pairs[j], T());
      s[i + 2 * j] = fmaf(s[i + 2 * j], scale, bias.x);
      s[i + 2 * j + 1] = fmaf(s[i + 2 * j + 1], scale, bias.y);
    }
  }
}
__device__ __forceinline__ void add_float_bias(float (&s)[kTileN / 2], const ScoreRows& rows,
                                               float scale) {
  const float* const from =
      reinterpret_cast<const float*>(rows.bias) + lane_row() * kBiasPitch + lane_column();
#pragma unroll
  for (int i = 0; i < kTileN / 2; i += 2) {
    const float2 bias = *reinterpret_cast<const float2*>(from + tile::fragment_row(i) * kBiasPitch +
                                                         tile::fragment_column(i));
    s[i] = fmaf(s[i], scale, bias.x);
    s[i + 1] = fmaf(s[i + 1], scale, bias.y);
  }
}

__device__ __forceinline__ void apply_mask(float (&s)[kTileN / 2], const ScoreRows& rows) {
  const unsigned char* const from = rows.mask + lane_row() * kTileN + lane_column();
#pragma unroll
  for (int i = 0; i < kTileN / 2; i += 2) {
    const unsigned keep = *reinterpret_cast<const unsigned short*>(
        from + tile::fragment_row(i) * kTileN + tile::fragment_column(i));
    s[i] = keep & 0xff ? s[i] : tile::negative_infinity();
    s[i + 1] = keep & 0xff00 ? s[i + 1] : tile::negative_infinity();
  }
}

// Applies bias and mask. With a bias, scores are in natural units afterwards.
__device__ __forceinline__ void add_score_rows(float (&s)[kTileN / 2], const ScoreRows& rows,
                                               const ForwardParams& params, float score_scale) {
  if (params.bias != nullptr) {
    if (params.bias_is_float32)
      add_float_bias(s, rows, score_scale);
    else
      add_bias(s, rows, score_scale);
  }
  if (params.mask != nullptr) apply_mask(s, rows);
}
