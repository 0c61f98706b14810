// Attention of one warp over a slice of the keys, on tensor cores (mma.sync).
#pragma once

#include "decoding/ring.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/movmatrix.cuh"
#include "ptx/tma.cuh"
#include "tile/operands.cuh"
#include "tile/score_mod.cuh"
#include "tile/visibility.cuh"

namespace decoding {

// Where a column of a row of O lies in shared memory, where kRows rows are written at a time:
// without bank conflicts, although lanes 4g + t write column g of kRows / 2 rows.
template <int kRows = 4>
__device__ __forceinline__ int permuted_column(int row, int column) {
  return column ^ (row / 2 % (kRows / 2) * 8);
}

// What the scores of a tile's rows depend on.
template <class T, int kRows, int kHeads = 1>
struct Rows {
  using HeadRows = decoding::HeadRows<kRows, kHeads>;

  int position[kRows];
  float slope[kRows];  // as ScoreRow's

  // Fills in the rows of a split, by the first kRows threads. Rows past the last are like it.
  __device__ __forceinline__ void locate(const DecodeParams& params, const Split& split) {
    if (threadIdx.x >= kRows) return;
    const int row = threadIdx.x;
    const int index = min(split.row_tile * HeadRows::kEach + HeadRows::in_head(row),
                          split.seq.seqlen_q * params.group - 1);
    const int token = divided_by_group(params, index);
    position[threadIdx.x] = split.seq.seqlen_k - split.seq.seqlen_q + token;
    if (params.alibi_slopes != nullptr)
      slope[threadIdx.x] = score_mod(params).slope(
          split.seq.index,
          (split.head + HeadRows::head_of(row)) * params.group + index - token * params.group);
  }

  __device__ __forceinline__ static ScoreMod<T, true, true> score_mod(const DecodeParams& params) {
    return {score_inputs(params)};
  }

  __device__ __forceinline__ tile::ScoreRow<float> score_row(const DecodeParams& params,
                                                             const Split& split, int row) const {
    const int index = split.row_tile * HeadRows::kEach + HeadRows::in_head(row);
    const int token = divided_by_group(params, index);
    const int head =
        (split.head + HeadRows::head_of(row)) * params.group + index - token * params.group;
    return {split.seq.index, head, token, position[row], slope[row]};
  }

  // The keys of a split that a row sees.
  __device__ __forceinline__ tile::Range keys(const DecodeParams& params, const Split& split,
                                              int row) const {
    const tile::Range keys = visibility(params, split.end).keys(position[row]);
    return {max(keys.begin, split.begin), keys.end};
  }
};

// Zeros for values of keys that the sequence or the window does not have, in a tile that TMA has
// written; by a warp. They may be NaN, and 0 · NaN is NaN.
template <class Tile, int kKeys, int kChunks>
__device__ __forceinline__ void clear_values(void* v, int key, int begin, int end) {
  for (int i = threadIdx.x % 32; i < kKeys * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (key + row < begin || key + row >= end)
      *reinterpret_cast<uint4*>(static_cast<char*>(v) + Tile::at(row, chunk)) = {};
  }
  ptx::fence_proxy_async();
  __syncwarp();
}

// A slice's share of a split, for this warp's rows; Tile is how K and V lie in shared memory.
// With g = lane / 4, t = lane % 4, scores s[j][r] are of keys 16 j + g (and + 8 in the last two)
// and rows 8 r + 2 t (and + 1 in every second). Sᵀ is summed up in kChains chains of dependent
// products: with one chain each product would wait for the one before. Of a tile's kHeadDim columns
// the first kColumns are multiplied: others are zeros.
template <class T, class Tile, int kHeadDim, int kWarpRows, int kWarpKeys, int kColumns = kHeadDim,
          int kChains = kWarpRows == 8 && kWarpKeys == 16 ? 2 : 1>
struct Slice {
  static constexpr int kRowBlocks = kWarpRows / 8;
  static constexpr int kKeyBlocks = kWarpKeys / 16;
  static constexpr int kSteps = kColumns / 16;
  static_assert(kWarpRows % 8 == 0 && kWarpKeys % 16 == 0 && kWarpKeys <= 32,
                "a warp's rows and keys must be whole mma tiles, and each key must have a lane");
  static_assert(kRowBlocks * kSteps * 4 <= 128, "O must fit in registers");
  static_assert(kColumns % 16 == 0 && kColumns <= kHeadDim, "columns must be whole mma tiles");

  using QTile = SwizzledRows<kHeadDim>;
  using Scores = float[kKeyBlocks][kRowBlocks][4];

  float o[kSteps][kRowBlocks][4];
  float row_max[kRowBlocks][2], row_sum[kRowBlocks][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      row_max[r][0] = row_max[r][1] = tile::negative_infinity();
      row_sum[r][0] = row_sum[r][1] = 0.0f;
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[step][r][i] = 0.0f;
    }
  }

  __device__ __forceinline__ static void multiply_scores(Scores& sum, unsigned k_tile,
                                                         unsigned q_rows) {
    float s[kChains][kKeyBlocks][kRowBlocks][4] = {};
    const int lane = threadIdx.x % 32;
    const unsigned k_lane = k_tile + Tile::lane_row_major();
    // One ldmatrix loads Q of 16 rows and one step, or of 8 rows and two steps.
    const unsigned q_lane =
        q_rows + (kRowBlocks == 1 ? QTile::at(lane % 8, lane / 8) : QTile::lane_column_major());
    unsigned q[kRowBlocks == 1 ? 1 : kRowBlocks / 2][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (kRowBlocks > 1 || step % 2 == 0) {
#pragma unroll
        for (int r = 0; r < (kRowBlocks + 1) / 2; ++r)
          ptx::ldmatrix_x4(q[r], QTile::at_chunks(q_lane + r * 16 * QTile::kRowBytes, step));
      }
#pragma unroll
      for (int j = 0; j < kKeyBlocks; ++j) {
        unsigned k[4];
        tile::keys_to_operand(k, Tile::at_chunks(k_lane + j * 16 * Tile::kRowBytes, step));
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
          const int first = kRowBlocks == 1 ? step % 2 * 2 : r % 2 * 2;
          ptx::mma_m16n8k16<T>(s[step % kChains][j][r], k, q[r / 2][first], q[r / 2][first + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kKeyBlocks * kRowBlocks * 4; ++i)
      (&sum[0][0][0])[i] =
          kChains == 1 ? (&s[0][0][0][0])[i] : (&s[0][0][0][0])[i] + (&s[kChains - 1][0][0][0])[i];
  }

  // Scores in log2 units, -inf for keys that a row does not see.
  template <class Rows>
  __device__ __forceinline__ static void finish_scores(Scores& s, const DecodeParams& params,
                                                       const Rows& rows, const Split& split,
                                                       int key, int first_row, bool masked) {
    rows.score_mod(params).terms([&](const auto& term) {
      each_score(s, first_row, key, [&](float& score, int row, int key) {
        score = term(score, rows.score_row(params, split, row), key);
      });
    });
    if (masked) hide_keys(s, params, rows, split, key, first_row);
  }

  // The same with a tile's bias and mask.
  template <class Params, class Rows, class Elements>
  __device__ __forceinline__ static void finish_scores(Scores& s, const Params& params,
                                                       const Rows& rows, const Elements& elements,
                                                       const Split& split, int key, int first_row,
                                                       bool masked) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = first_row + 8 * r + tile::lane_column(lane) + c;
        const tile::ScoreRow<float> score_row = rows.score_row(params, split, row);
        rows.score_mod(params, elements, row, key).terms([&](const auto& term) {
#pragma unroll
          for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
              s[j][r][2 * h + c] =
                  term(s[j][r][2 * h + c], score_row, key + 16 * j + 8 * h + tile::lane_row(lane));
        });
      }
    if (masked) hide_keys(s, params, rows, split, key, first_row);
  }

  // Sets scores of keys that a row does not see, by its position or that of the split, to -inf.
  template <class Rows>
  __device__ __forceinline__ static void hide_keys(Scores& s, const DecodeParams& params,
                                                   const Rows& rows, const Split& split, int key,
                                                   int first_row) {
    each_score(s, first_row, key, [&](float& score, int row, int key) {
      const tile::Range keys = rows.keys(params, split, row);
      if (key < keys.begin || key >= keys.end) score = tile::negative_infinity();
    });
  }

  // Calls change(score, row, key) for each of this lane's scores.
  template <class Change>
  __device__ __forceinline__ static void each_score(Scores& s, int first_row, int first_key,
                                                    const Change& change) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            change(s[j][r][2 * h + c], first_row + 8 * r + tile::lane_column(lane) + c,
                   first_key + 16 * j + 8 * h + tile::lane_row(lane));
  }

  // s becomes exp2(s - row_max). row_max lags by up to kRescaleThreshold, as in tile/softmax.cuh,
  // and lanes compare only when it must move.
  __device__ __forceinline__ void update_softmax(Scores& s) {
    update_softmax(s, [](float score, int, int) { return score; }, [](int, int, float) {});
  }

  // The same where the maximum is not that of the scores: it is that of level(score, j, h), of key
  // 16 j + 8 h + g. rescale(r, c, factor) is called for each row when its O is rescaled.
  template <class Level, class Rescale>
  __device__ __forceinline__ void update_softmax(Scores& s, const Level& level,
                                                 const Rescale& rescale) {
    float tile_max[kRowBlocks][2];
    bool grown = false;
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        tile_max[r][c] = row_max[r][c];
#pragma unroll
        for (int j = 0; j < kKeyBlocks; ++j)
          tile_max[r][c] =
              fmaxf(tile_max[r][c], fmaxf(level(s[j][r][c], j, 0), level(s[j][r][2 + c], j, 1)));
        grown |= tile_max[r][c] - row_max[r][c] > tile::OnlineSoftmax::kRescaleThreshold;
      }
    if (__any_sync(~0u, grown)) {
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float largest = tile_max[r][c];
#pragma unroll
          for (int distance = 4; distance < 32; distance *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
          const float factor = ptx::ex2(row_max[r][c] - offset(largest));
          row_max[r][c] = largest;
          row_sum[r][c] *= factor;
          rescale(r, c, factor);
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            o[step][r][c] *= factor;
            o[step][r][2 + c] *= factor;
          }
        }
    }
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float shift = offset(row_max[r][c]);
#pragma unroll
        for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            s[j][r][2 * h + c] = ptx::ex2(s[j][r][2 * h + c] - shift);
            row_sum[r][c] += s[j][r][2 * h + c];
          }
      }
  }

  // Of a tile's values, in operands, those of keys that some row of the warp sees; zeros in the
  // place of others, which may be NaN: 0 · NaN is NaN.
  struct SeenValues {
    unsigned bits[kKeyBlocks][2];  // of keys 16 j + 8 h + 2 t and the next

    __device__ __forceinline__ explicit SeenValues(const Scores& s) {
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          bool seen = false;
#pragma unroll
          for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
            for (int c = 0; c < 2; ++c) seen |= s[j][r][2 * h + c] != tile::negative_infinity();
          const unsigned lanes = __ballot_sync(~0u, seen) >> lane % 4 * 8;
          bits[j][h] = ((lanes & 0xf) != 0 ? 0xffff : 0) | ((lanes & 0xf0) != 0 ? 0xffff0000 : 0);
        }
    }
    __device__ __forceinline__ void operator()(unsigned (&v)[4], int j) const {
      v[0] &= bits[j][0];
      v[1] &= bits[j][0];
      v[2] &= bits[j][1];
      v[3] &= bits[j][1];
    }
  };
  struct AllValues {
    __device__ __forceinline__ void operator()(unsigned (&)[4], int) const {}
  };

  template <class Filter = AllValues>
  __device__ __forceinline__ void multiply_values(const Scores& p, unsigned v_tile,
                                                  const Filter& filter = {}) {
    const unsigned v_lane = v_tile + Tile::lane_column_major();
#pragma unroll
    for (int j = 0; j < kKeyBlocks; ++j) {
      unsigned b[kRowBlocks][2];
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        b[r][0] = ptx::movmatrix_trans(tile::pack<T>(p[j][r][0], p[j][r][1]));
        b[r][1] = ptx::movmatrix_trans(tile::pack<T>(p[j][r][2], p[j][r][3]));
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        unsigned v[4];
        tile::values_to_operand(v, Tile::at_chunks(v_lane + j * 16 * Tile::kRowBytes, step));
        filter(v, j);
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) ptx::mma_m16n8k16<T>(o[step][r], v, b[r][0], b[r][1]);
      }
    }
  }

  // Adds the lanes' parts of the rows' sums.
  __device__ __forceinline__ void sum_over_lanes() {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
        for (int c = 0; c < 2; ++c) row_sum[r][c] += __shfl_xor_sync(~0u, row_sum[r][c], distance);
  }

  // Rows 8 r + 4 half and the three after it, of this warp, to shared memory, unscaled, with their
  // maxima and sums.
  __device__ __forceinline__ void put_rows(int r, int half, float (*o_rows)[kHeadDim],
                                           float2* max_sum, int first_row) const {
    const int lane = threadIdx.x % 32;
    if (lane % 4 / 2 != half) return;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = first_row + lane % 2 * 2 + c;
      put_row<4>(r, c, row, o_rows, max_sum);
    }
  }

  // All rows of this warp, likewise.
  __device__ __forceinline__ void put_all_rows(float (*o_rows)[kHeadDim], float2* max_sum) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * r + lane % 4 * 2 + c;
        put_row<8>(r, c, row, o_rows, max_sum);
      }
  }

  // A lane's columns of this warp's row 8 r + 2 t + c, as `row`; kAtOnce are written at a time.
  template <int kAtOnce>
  __device__ __forceinline__ void put_row(int r, int c, int row, float (*o_rows)[kHeadDim],
                                          float2* max_sum) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        o_rows[row][permuted_column<kAtOnce>(row, 16 * step + 8 * h + lane / 4)] =
            o[step][r][2 * h + c];
    if (lane < 4) max_sum[row] = {row_max[r][c], row_sum[r][c]};
  }

  __device__ __forceinline__ static float offset(float max) {
    return tile::OnlineSoftmax::offset(max, 1.0f);
  }
};

}  // namespace decoding
