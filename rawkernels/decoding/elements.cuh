// Bias and mask of a tile of scores in decoding: copied by cp.async to the tile's stage of a ring
// beside its keys, and read from there by the score functor, as if they were arrays.
//
// Behind the ring's traffic a read takes microseconds: so these are requested as early as the keys.
// Elements of neighbouring keys lie side by side; along other axes any strides will do. What a row
// has of a tile may begin anywhere in an aligned word of memory, and the words are copied as they
// are. Where all rows have the same elements, as with a mask of keys, they are copied once.
#pragma once

#include "decoding/schedule.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"

namespace decoding {

// Words of the elements of kRows rows and kKeys keys. With kBias there is room for a bias, of
// floats or of 16-bit numbers; else there is none.
template <int kRows, int kKeys, bool kBias>
struct ScoreTile {
  static constexpr int kMaskWords = kKeys / 4 + 1;
  static constexpr int kBiasWords = kBias ? kKeys + 4 : 1;  // lanes read without bank conflicts

  unsigned mask[kRows][kMaskWords];
  unsigned bias[kBias ? kRows : 1][kBiasWords];
};

// A stage of a ring, with a tile's bias and mask where there are some.
template <class Stage, class Elements>
struct alignas(128) ScoredStage : Stage {
  Elements elements;
};
template <class Stage, class Elements, bool kElementwise>
struct StageOf {
  using Type = Stage;
};
template <class Stage, class Elements>
struct StageOf<Stage, Elements, true> {
  using Type = ScoredStage<Stage, Elements>;
};

// The rows of queries that a tile of keys is for.
struct TileRows {
  int sequence, row_tile, seqlen_q;

  __device__ __forceinline__ static TileRows of(const Split& split) {
    return {split.seq.index, split.row_tile, split.seq.seqlen_q};
  }
  // How many rows there are.
  template <int kRows>
  __device__ __forceinline__ int count(const DecodeParams& params) const {
    return min(kRows, seqlen_q * params.group - row_tile * kRows);
  }
};

// A bias or a mask in global memory.
struct Elements {
  const void* data;
  const ScoreStrides& stride;
  int bytes;  // of an element

  __device__ __forceinline__ static Elements bias(const ScoreParams& scores, int bytes) {
    return {scores.bias, scores.bias_stride, scores.bias_is_float32 ? 4 : bytes};
  }
  __device__ __forceinline__ static Elements mask(const ScoreParams& scores) {
    return {scores.mask, scores.mask_stride, 1};
  }

  // Whether all rows of a sequence have the same.
  __device__ __forceinline__ bool same_for_all_rows() const {
    return (stride.head | stride.row) == 0;
  }
  // That of key 0, in row `row` of a tile.
  template <int kRows>
  __device__ __forceinline__ const char* row_begin(const DecodeParams& params,
                                                   const ScoreParams& scores, const TileRows& rows,
                                                   int head, int row) const {
    const int index = rows.row_tile * kRows + row, token = divided_by_group(params, index);
    const long long element = rows.sequence * stride.batch +
                              (head * params.group + index - token * params.group) * stride.head +
                              min(token, scores.score_rows - 1) * stride.row;
    return static_cast<const char*>(data) + element * bytes;
  }
};

// The first key of the elements that a tile has which begins with `key`: as a rule that one. Keys
// that there are no elements for have the last one's.
template <int kKeys>
__device__ __forceinline__ int first_element(const ScoreParams& scores, int key) {
  return min(key, scores.score_cols - 1 & -kKeys);
}

template <int kThreads, int kRows, int kKeys, int kPitch>
__device__ __forceinline__ void copy_elements(const DecodeParams& params, const ScoreParams& scores,
                                              const Elements& elements,
                                              const unsigned (&words)[kRows][kPitch],
                                              const TileRows& rows, int head, int key) {
  constexpr int kSlots = kPitch < kKeys ? kKeys / 2 : kKeys;  // words of a row, or more
  const int first = first_element<kKeys>(scores, key);
  const int bytes = min(kKeys, scores.score_cols - first) * elements.bytes;
  const int count = elements.same_for_all_rows() ? 1 : rows.count<kRows>(params);
#pragma unroll 1
  for (int i = threadIdx.x % kThreads; i < count * kSlots; i += kThreads) {
    const int row = i / kSlots, word = i % kSlots;
    const char* const begin = elements.row_begin<kRows>(params, scores, rows, head, row) +
                              static_cast<long long>(first) * elements.bytes;
    const int before = static_cast<int>(reinterpret_cast<unsigned long long>(begin) & 3);
    const int left = before + bytes - 4 * word;
    if (left > 0)
      ptx::cp_async_4_of(ptx::shared_address(&words[row][word]), begin - before + 4 * word,
                         min(left, 4));
  }
}

// Copies what a tile of keys, from `key` on, has of bias and mask; by kThreads threads. T is the
// type of a bias that is not float.
template <class T, int kThreads, int kRows, int kKeys, bool kBias>
__device__ __forceinline__ void copy_elements(const ScoredDecodeParams& params,
                                              const ScoreTile<kRows, kKeys, kBias>& target,
                                              const TileRows& rows, int head, int key) {
  const ScoreParams& scores = params.scores;
  if constexpr (kBias)
    if (scores.bias != nullptr)
      copy_elements<kThreads, kRows, kKeys>(params, scores, Elements::bias(scores, sizeof(T)),
                                            target.bias, rows, head, key);
  if (scores.mask != nullptr)
    copy_elements<kThreads, kRows, kKeys>(params, scores, Elements::mask(scores), target.mask, rows,
                                          head, key);
}

// Rows (slice.cuh) of which each has its own bias and mask.
template <class T, class Rows, class ScoreTile>
struct ScoredRows;
template <class T, class Rows, int kRows, int kKeys, bool kBias>
struct ScoredRows<T, Rows, ScoreTile<kRows, kKeys, kBias>> : Rows {
  using Tile = ScoreTile<kRows, kKeys, kBias>;

  // Where a row's elements begin in a tile's words, in bytes.
  unsigned short mask_at[kRows], bias_at[kRows];

  __device__ __forceinline__ void locate(const ScoredDecodeParams& params, const Split& split) {
    Rows::locate(params, split);
    if (threadIdx.x >= kRows) return;
    const TileRows rows = TileRows::of(split);
    const int row = min(static_cast<int>(threadIdx.x), rows.count<kRows>(params) - 1);
    const ScoreParams& scores = params.scores;
    const auto at = [&](const Elements& elements, int words) {
      const char* const begin = elements.row_begin<kRows>(params, scores, rows, split.head, row);
      return (elements.same_for_all_rows() ? 0 : 4 * words * row) +
             static_cast<int>(reinterpret_cast<unsigned long long>(begin) & 3);
    };
    mask_at[threadIdx.x] = at(Elements::mask(scores), Tile::kMaskWords);
    if (kBias) bias_at[threadIdx.x] = at(Elements::bias(scores, sizeof(T)), Tile::kBiasWords);
  }

  // The score functor of a row and of the keys of a tile that begins with `key`.
  __device__ __forceinline__ ScoreMod<T, true, true> score_mod(const ScoredDecodeParams& params,
                                                               const Tile& tile, int row,
                                                               int key) const {
    const ScoreParams& scores = params.scores;
    tile::ScoreInputs inputs = score_inputs(params);
    const int first = first_element<kKeys>(scores, key);
    inputs.rows = 1;
    inputs.cols = scores.score_cols;
    if (scores.mask != nullptr) {
      inputs.mask = reinterpret_cast<const unsigned char*>(tile.mask) + mask_at[row] - first;
      inputs.mask_stride = {0, 0, 0, 1};
    }
    if (kBias && scores.bias != nullptr) {
      const Elements bias = Elements::bias(scores, sizeof(T));
      inputs.bias = reinterpret_cast<const char*>(tile.bias) + bias_at[row] - first * bias.bytes;
      inputs.bias_stride = {0, 0, 0, 1};
      inputs.bias_is_float32 = scores.bias_is_float32;
    }
    return ScoreMod<T, true, true>{inputs};
  }
};
template <class T, class Rows, class ScoreTile, bool kElementwise>
struct RowsOf {
  using Type = Rows;
};
template <class T, class Rows, class ScoreTile>
struct RowsOf<T, Rows, ScoreTile, true> {
  using Type = ScoredRows<T, Rows, ScoreTile>;
};

}  // namespace decoding
