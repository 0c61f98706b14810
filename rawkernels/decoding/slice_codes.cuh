// Attention of one warp over a slice of keys and values that are codes: slice.cuh's, with operands
// expanded to float16 in registers (tile/expand.cuh), whatever type the queries have. No element is
// scaled. A key's scale and minimum are applied to its score, a value's scale to the key's weight:
//
//   q·k̂ = scale · (q·code) + minimum · Σq + q·offset,
//   o   = Σ p·scale · code + Σ p·minimum.
//
// What operands exceed codes by (tile/expand.cuh) is taken out of a score, and out of O at the end.
// Where features are in groups with scales of their own, so are these sums. A rotation of the keys
// is done to the queries instead. Queries become float16 times a power of two for each row, which
// leaves what 16-bit queries are as it is, but for channels 2^-28 below the row's largest.
#pragma once

#include "decoding/fold.cuh"
#include "decoding/query_rows.cuh"
#include "decoding/ring_codes.cuh"
#include "decoding/slice.cuh"
#include "ptx/registers.cuh"

namespace decoding {

template <int kKFormat, int kVFormat, int kHeadDim, int kWarpRows, int kWarpKeys, int kKGroups,
          int kVGroups>
struct CodeSlice : Slice<__half, void, kHeadDim, Fold<kWarpRows, kWarpKeys>::kRows,
                         Fold<kWarpRows, kWarpKeys>::kKeys> {
  static constexpr bool kFolded = Fold<kWarpRows, kWarpKeys>::kFolded;
  using Base = Slice<__half, void, kHeadDim, Fold<kWarpRows, kWarpKeys>::kRows,
                     Fold<kWarpRows, kWarpKeys>::kKeys>;
  using Tiles = CodeTiles<kKFormat, kVFormat, kWarpKeys, kHeadDim>;
  using Scales = TileScales<kWarpKeys, kKGroups, kVGroups>;
  using KCodes = tile::Codes<kKFormat>;
  using VCodes = tile::Codes<kVFormat>;
  using Scores = typename Base::Scores;
  using QTile = typename Base::QTile;
  using QueryRows = QueryRow<kKGroups>;
  using Base::kKeyBlocks;
  using Base::kRowBlocks;
  using Base::kSteps;
  static constexpr int kTileBlocks = kWarpKeys / 16;  // of keys; of a lane's scores: kKeyBlocks
  static constexpr bool kVHasMinimum = kVFormat == tile::kInt4;
  static constexpr int kKGroupSteps = kSteps / kKGroups, kVGroupSteps = kSteps / kVGroups;
  static_assert(kSteps % kKGroups == 0 && kSteps % kVGroups == 0, "groups must be whole steps");
  static constexpr bool kVHasExcess = VCodes::value_excess(0) != 0;
  // Whether the call's scale is in the keys' scales, of which there are fewer than of scores.
  static constexpr bool kScaled = tile::IsContract<ScoreMod<__half, true, true>>::value;

  // Σ p·minimum of each row and group, of this lane's keys.
  float o_minimum[kRowBlocks][2][kVGroups];
  // What O's columns exceed sums over codes by: two rows of a block of columns.
  float o_excess[kRowBlocks][kVGroups][4];

  __device__ __forceinline__ void clear() {
    Base::clear();
#pragma unroll
    for (int i = 0; i < kRowBlocks * 2 * kVGroups; ++i) (&o_minimum[0][0][0])[i] = 0;
#pragma unroll
    for (int i = 0; i < kRowBlocks * kVGroups * 4; ++i) (&o_excess[0][0][0])[i] = 0;
  }

  // Of which nothing that is computed from it is kept: registers are for operands.
  __device__ __forceinline__ static int this_lane() { return ptx::opaque(threadIdx.x) % 32; }

  template <class T, int kRows, int kWarps>
  __device__ __forceinline__ static void prepare_queries(const DecodeParams& params,
                                                         const Split& split, T* queries,
                                                         QueryRows* query_rows,
                                                         int warp = threadIdx.x / 32) {
    decoding::prepare_queries<KCodes, QTile, kHeadDim, kRows, kWarps, kScaled>(
        params, split, queries, query_rows, warp);
  }

  // Products with the keys, scaled. query_rows are the tile's, q_rows this warp's, first_row on.
  template <class AnyTiles, class AnyScales, class Reader>
  __device__ __forceinline__ static void multiply_scores(Scores& s, const AnyTiles& tiles,
                                                         const AnyScales& scales,
                                                         const Reader& reader, unsigned q_rows,
                                                         const QueryRows* query_rows,
                                                         int first_row) {
    using Tile = typename AnyTiles::KTile;
    const int lane = this_lane();
    unsigned k_lane;
    if constexpr (AnyTiles::kKnowsLanes)
      k_lane = tiles.k_lane;
    else
      k_lane = ptx::shared_address(tiles.k) + Tile::at(lane & 15, lane >> 4);
    const unsigned q_lane = q_rows + (kFolded ? QTile::at((first_row & 7) + (lane & 3), lane >> 3)
                                      : kRowBlocks == 1 ? QTile::at(lane & 7, lane >> 3)
                                                        : QTile::lane_column_major());
    const QueryRows* const rows = query_rows + first_row + (lane & (kFolded ? 1 : 3)) * 2;
    float product[kTileBlocks][kRowBlocks][4];
    unsigned q[kRowBlocks == 1 ? 1 : kRowBlocks / 2][4];
    unsigned k[kTileBlocks][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      constexpr int kLoadSteps = 2 * KCodes::kWordSteps;  // of one ldmatrix
      if (step % kLoadSteps == 0) {
#pragma unroll
        for (int j = 0; j < kTileBlocks; ++j)
          ptx::ldmatrix_x4(k[j],
                           Tile::at_chunks(k_lane + j * 16 * Tile::kRowBytes, step / kLoadSteps));
      }
      if (kRowBlocks > 1 || step % 2 == 0) {
#pragma unroll
        for (int r = 0; r < (kRowBlocks + 1) / 2; ++r)
          ptx::ldmatrix_x4(q[r], QTile::at_chunks(q_lane + r * 16 * QTile::kRowBytes, step));
      }
      const int group = step / kKGroupSteps;
      if (step % kKGroupSteps == 0) {
#pragma unroll
        for (int j = 0; j < kTileBlocks; ++j)
#pragma unroll
          for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
            for (int i = 0; i < 4; ++i) product[j][r][i] = 0;
      }
      const int chunk = step % kLoadSteps / KCodes::kWordSteps;
      const int first = 2 * (step % KCodes::kWordSteps);
#pragma unroll
      for (int j = 0; j < kTileBlocks; ++j) {
        unsigned upper[2 * KCodes::kWordSteps], lower[2 * KCodes::kWordSteps];  // keys g and g + 8
        KCodes::expand_keys(upper, k[j][2 * chunk]);
        KCodes::expand_keys(lower, k[j][2 * chunk + 1]);
        const unsigned a[4] = {upper[first], lower[first], upper[first + 1], lower[first + 1]};
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
          const int q_first = kRowBlocks == 1 ? step % 2 * 2 : r % 2 * 2;
          ptx::mma_m16n8k16<__half>(product[j][r], a, q[r / 2][q_first], q[r / 2][q_first + 1]);
        }
      }
      if (step % kKGroupSteps == kKGroupSteps - 1) {
        if constexpr (kFolded) {
#pragma unroll
          for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              product[j][0][i] = has_last_keys() ? product[kKeyBlocks + j][0][i] : product[j][0][i];
        }
        add_scaled(s, scales, reader, rows, product, group);
      }
    }
  }

  // As Slice's.
  template <class Rows>
  __device__ __forceinline__ static void finish_scores(Scores& s, const DecodeParams& params,
                                                       const Rows& rows, const Split& split,
                                                       int key, int first_row, bool masked) {
    if constexpr (!kScaled) {
      static_assert(!kFolded, "Base has other rows and keys");
      Base::finish_scores(s, params, rows, split, key, first_row, masked);
    } else {
      if (__double2hiint(params.softcap) != 0 || params.alibi_slopes != nullptr)
        rows.score_mod(params).terms_after_scale([&](const auto& term) {
          each_score(s, first_row, key, [&](float& score, int row, int key) {
            score = term(score, rows.score_row(params, split, row), key);
          });
        });
      if (!masked) return;
      each_score(s, first_row, key, [&](float& score, int row, int key) {
        const tile::Range keys = rows.keys(params, split, row);
        if (key < keys.begin || key >= keys.end) score = tile::negative_infinity();
      });
    }
  }

  // Softmax of the scores, and the products with the values.
  template <class AnyTiles, class AnyScales, class Reader>
  __device__ __forceinline__ void add_values(Scores& s, const AnyTiles& tiles,
                                             const AnyScales& scales, const Reader& reader) {
    using Tile = typename AnyTiles::VTile;
    float scale[kVGroups][kKeyBlocks][2], minimum[kVGroups][kKeyBlocks][2];
    // Weights times a value's scale go to float16: the maximum follows that product. Not farther
    // than 2^96 from the weights, whose sum has to be a float, too.
    float level[kKeyBlocks][2];
#pragma unroll
    for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = 0;
#pragma unroll
        for (int group = 0; group < kVGroups; ++group) {
          const unsigned word = scales.v[group][own_key(j, h)];
          scale[group][j][h] = reader.scale(word, group) * VCodes::kUnit;
          minimum[group][j][h] = kVHasMinimum ? reader.minimum(word, scale[group][j][h]) : 0;
          largest = kVGroups == 1 ? scale[0][j][h] : fmaxf(largest, fabsf(scale[group][j][h]));
        }
        level[j][h] = fmaxf(ptx::lg2(fabsf(largest)), -96.0f);
      }
    Base::update_softmax(
        s, [&](float score, int j, int h) { return score + level[j][h]; },
        [&](int r, int c, float factor) {
#pragma unroll
          for (int group = 0; group < kVGroups; ++group) {
            o_minimum[r][c][group] *= factor;
            if (kVHasExcess) {
              o_excess[r][group][c] *= factor;
              o_excess[r][group][2 + c] *= factor;
            }
          }
        });
    const int lane = this_lane();
    unsigned v_lane;
    if constexpr (AnyTiles::kKnowsLanes)
      v_lane = tiles.v_lane;
    else
      v_lane = ptx::shared_address(tiles.v) + Tile::at((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
    unsigned b[kVGroups][kRowBlocks][2], all[kKeyBlocks][kVGroups][kRowBlocks][2];
#pragma unroll
    for (int j = 0; j < kTileBlocks; ++j) {
#pragma unroll
      for (int group = 0; group < kVGroups; ++group)
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (kFolded && j >= kKeyBlocks) {
              b[group][r][h] = has_last_columns() ? all[j - kKeyBlocks][group][r][h] : 0;
              continue;
            }
            const float* const p = &s[j][r][2 * h];
            const float factor = scale[group][j][h];
            b[group][r][h] = ptx::movmatrix_trans(tile::pack<__half>(p[0] * factor, p[1] * factor));
            if (kVHasMinimum) {
#pragma unroll
              for (int c = 0; c < 2; ++c)
                o_minimum[r][c][group] = fmaf(p[c], minimum[group][j][h], o_minimum[r][c][group]);
            }
            if (kFolded) {
              all[j][group][r][h] = b[group][r][h];
              if (has_last_columns()) b[group][r][h] = 0;
            }
          }
      if (kVHasExcess) {
        const unsigned excess[4] = {VCodes::value_excess(0), VCodes::value_excess(1),
                                    VCodes::value_excess(0), VCodes::value_excess(1)};
#pragma unroll
        for (int group = 0; group < kVGroups; ++group)
#pragma unroll
          for (int r = 0; r < kRowBlocks; ++r)
            ptx::mma_m16n8k16<__half>(o_excess[r][group], excess, b[group][r][0], b[group][r][1]);
      }
      constexpr int kBlocks = VCodes::kWordBlocks;
#pragma unroll
      for (int pair = 0; pair < kSteps / (2 * kBlocks); ++pair) {
        unsigned v[4];
        ptx::ldmatrix_x4_trans(v, Tile::at_chunks(v_lane + j * 16 * Tile::kRowBytes, pair));
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          unsigned first[2 * kBlocks], last[2 * kBlocks];  // of keys 0 to 7, and 8 to 15
          VCodes::expand_values(first, v[chunk]);
          VCodes::expand_values(last, v[2 + chunk]);
#pragma unroll
          for (int i = 0; i < kBlocks; ++i) {
            const int block = (2 * pair + chunk) * kBlocks + i;
            const unsigned a[4] = {first[2 * i], first[2 * i + 1], last[2 * i], last[2 * i + 1]};
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
              const unsigned (&p)[2] = b[block / kVGroupSteps][r];
              ptx::mma_m16n8k16<__half>(this->o[block][r], a, p[0], p[1]);
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ void sum_over_lanes() {
    Base::sum_over_lanes();
    if constexpr (kVHasMinimum)
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
        for (int i = 0; i < kRowBlocks * 2 * kVGroups; ++i)
          (&o_minimum[0][0][0])[i] += __shfl_xor_sync(~0u, (&o_minimum[0][0][0])[i], distance);
    if constexpr (kFolded) add_halves();
  }

  // As Slice's. A lane's columns of a block, or of two, lie side by side.
  __device__ __forceinline__ void put_rows(int r, int half, float (*o_rows)[kHeadDim],
                                           float2* max_sum, int first_row) const {
    const int lane = this_lane();
    if (lane % 4 / 2 != half) return;
#pragma unroll
    for (int c = 0; c < 2; ++c) put_row<4>(r, c, first_row + lane % 2 * 2 + c, o_rows, max_sum);
  }
  __device__ __forceinline__ void put_all_rows(float (*o_rows)[kHeadDim], float2* max_sum) const {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        put_row<8>(r, c, 8 * r + threadIdx.x % 4 * 2 + c, o_rows, max_sum);
  }

 private:
  // Whether this lane goes on with the last half of the keys; and whether the columns of its
  // operands, or rows of its weights, are those.
  __device__ __forceinline__ static bool has_last_keys() { return (this_lane() & 2) != 0; }
  __device__ __forceinline__ static bool has_last_columns() { return (this_lane() & 16) != 0; }

  // Calls change(score, row, key) for each of this lane's scores.
  template <class Change>
  __device__ __forceinline__ static void each_score(Scores& s, int first_row, int first_key,
                                                    const Change& change) {
    if constexpr (!kFolded) {
      Base::each_score(s, first_row, first_key, change);
    } else {
      const int row = first_row + (this_lane() & 1) * 2;
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            change(s[j][0][2 * h + c], row + c, first_key + own_key(j, h));
    }
  }

  // Adds the sums over both halves of the keys.
  __device__ __forceinline__ void add_halves() {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float& max = this->row_max[0][c];
      const float largest = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
      const float factor = ptx::ex2(max - Base::offset(largest));
      max = largest;
      const auto add = [&](float& sum) {
        sum *= factor;
        sum += __shfl_xor_sync(~0u, sum, 2);
      };
      add(this->row_sum[0][c]);
#pragma unroll
      for (int group = 0; group < kVGroups; ++group) {
        if (kVHasMinimum) add(o_minimum[0][c][group]);
        if (kVHasExcess) {
          add(o_excess[0][group][c]);
          add(o_excess[0][group][2 + c]);
        }
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        add(this->o[step][0][c]);
        add(this->o[step][0][2 + c]);
      }
    }
  }

  template <int kAtOnce>
  __device__ __forceinline__ void put_row(int r, int c, int row, float (*o_rows)[kHeadDim],
                                          float2* max_sum) const {
    constexpr int kBlocks = VCodes::kWordBlocks;
    const int lane = this_lane();
#pragma unroll
    for (int block = 0; block < kSteps; ++block)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int column = (block / kBlocks * 8 + lane / 4) * 2 * kBlocks + block % kBlocks * 2 + h;
        float x = this->o[block][r][2 * h + c];
        if (kVHasExcess) x -= o_excess[r][block / kVGroupSteps][2 * h + c];
        x *= VCodes::column_factor(h);
        if (kVHasMinimum) x += o_minimum[r][c][block / kVGroupSteps];
        o_rows[row][permuted_column<kAtOnce>(row, column)] = x;
      }
    if (lane < 4) max_sum[row] = {this->row_max[r][c], this->row_sum[r][c]};
  }

  // Of this lane, among a tile's.
  __device__ __forceinline__ static int own_key(int j, int h) {
    const int first = kFolded ? (this_lane() & 2) * 8 * kKeyBlocks : 0;
    return first + 16 * j + 8 * h + (this_lane() >> 2);
  }

  // Adds a group's products to the scores.
  template <class AnyScales, class Reader>
  __device__ __forceinline__ static void add_scaled(
      Scores& s, const AnyScales& scales, const Reader& reader, const QueryRows* rows,
      const float (&product)[kTileBlocks][kRowBlocks][4], int group) {
#pragma unroll
    for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const unsigned word = scales.k[group][own_key(j, h)];
        const float scale = reader.scale(word, group);
        const float minimum = reader.minimum(word, scale), scaled = scale * rows->scale;
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const QueryRows& row = rows[8 * r + c];
            float& score = s[j][r][2 * h + c];
            const float before = group == 0 ? row.added : score;
            const float of_codes =
                fmaf(product[j][r][2 * h + c], row.factor, row.minus_excess[group]);
            score = fmaf(of_codes, scaled, before);
            if (kKFormat == tile::kInt4) score = fmaf(minimum, row.sum[group], score);
          }
      }
  }
};

}  // namespace decoding
