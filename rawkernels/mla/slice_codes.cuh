// A warp's work in mla/decode_codes.cu: scores, softmax and products.
#pragma once

#include "mla/layout_codes.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/movmatrix.cuh"
#include "tile/fragment.cuh"
#include "tile/softmax.cuh"

namespace mla {

// A warp's work on a split: with g = lane / 4 and t = lane % 4, its scores s[r] are of keys g (and
// + 8 in the last two) of its own and rows 8 r + 2 t (and + 1 in every second), o[block][r] of
// columns 16 block + 2 g (and + 1 in the last two) of its quarter and these rows.
template <class Smem>
struct Slice {
  Smem& smem;
  const DecodeParams& params;
  const MlaParams& mla;
  const int group = threadIdx.x / kGroupThreads, warp = threadIdx.x / 32 % 4,
            lane = threadIdx.x % 32;
  // Which of smem.p this warp's values take: one for all where tokens have one scale.
  const bool scaled_alike = params.v_group > 2 * kScaleColumns;
  const float scale_log2 = static_cast<float>(params.scale) * tile::kLog2e;
  tile::Range common;  // keys that all rows see
  float row_max[kRowBlocks][2], row_sum[kRowBlocks][2];
  float o[kSteps][kRowBlocks][4];
  float o_excess[kRowBlocks][4];

  __device__ __forceinline__ void start() {
    const decoding::Split& split = smem.split;
    common = {keys_of(split, kRows - 1).begin, keys_of(split, 0).end};
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      row_max[r][0] = row_max[r][1] = tile::negative_infinity();
      row_sum[r][0] = row_sum[r][1] = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        o_excess[r][i] = 0.0f;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) o[step][r][i] = 0.0f;
      }
    }
  }

  // The keys of a split that a row of its tile sees; rows that do not exist do as the last one.
  __device__ __forceinline__ tile::Range keys_of(const decoding::Split& split, int row) const {
    const int last = split.seq.seqlen_q * params.group - 1;
    const int token = divided_by_group(params, min(split.row_tile * kRows + row, last));
    const tile::Range keys = decoding::visible_keys(params, split.seq, token);
    return {max(keys.begin, split.begin), min(keys.end, split.end)};
  }

  // Sᵀ of this warp's keys, in log2 units.
  __device__ __forceinline__ void multiply_keys(Scores& s, const Stage& stage) const {
    const unsigned q = ptx::shared_address(smem.q) + column_major<QTile>();
    const int row_bytes = warp * kWarpKeys * Tile::kRowBytes;
    const unsigned k = ptx::shared_address(stage.codes) + row_major<Tile>() + row_bytes;
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[r][i] = 0.0f;
    // Of each quarter, in turns: so no product waits for the one before.
    float product[kQuarters][kRowBlocks][4];
#pragma unroll
    for (int quarter = 0; quarter < kQuarters; ++quarter)
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          product[quarter][r][i] =
              kHasExcess ? smem.query_rows[own_row(r, i)].minus_excess[quarter] : 0.0f;
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair)
#pragma unroll
      for (int quarter = 0; quarter < kQuarters; ++quarter) {
        unsigned codes[4];  // of keys g and g + 8, of one step and of the next
        ptx::ldmatrix_x4(codes, Tile::at_chunks(k + quarter * kKeys * Tile::kRowBytes, pair));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          unsigned b[4], upper[2], lower[2];
          ptx::ldmatrix_x4(b, QTile::at_chunks(q, quarter * kSteps + 2 * pair + i));
          Codes::expand_keys(upper, codes[2 * i]);
          Codes::expand_keys(lower, codes[2 * i + 1]);
          const unsigned a[4] = {upper[0], lower[0], upper[1], lower[1]};
#pragma unroll
          for (int r = 0; r < kRowBlocks; ++r)
            ptx::mma_m16n8k16<__half>(product[quarter][r], a, b[2 * r], b[2 * r + 1]);
        }
      }
#pragma unroll
    for (int quarter = 0; quarter < kQuarters; ++quarter)
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[r][i] = fmaf(product[quarter][r][i], stage.scales[own_key(i / 2)][quarter], s[r][i]);
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[r][i] *= smem.query_rows[own_row(r, i)].worth;
    const unsigned rope = ptx::shared_address(stage.rope) + row_major<Tile>() + row_bytes;
    const unsigned q_rope = ptx::shared_address(smem.q_rope) + column_major<QTile>();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      unsigned a[4], b[4];
      ptx::ldmatrix_x4(a, Tile::at_chunks(rope, step));
      ptx::ldmatrix_x4(b, QTile::at_chunks(q_rope, step));
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) ptx::mma_m16n8k16<T>(s[r], a, b[2 * r], b[2 * r + 1]);
    }
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[r][i] *= scale_log2;
  }

  // Scores of keys that a row does not see, or that do not exist, become -inf.
  __device__ __forceinline__ void hide_keys(Scores& s, const Stage& stage, int first) const {
    const unsigned exist = stage.exist[warp];
    if (exist != (1 << kWarpKeys) - 1) {
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[r][i] = exist >> (lane / 4 + i / 2 * 8) & 1 ? s[r][i] : tile::negative_infinity();
    }
    if (common.contains(first, kKeys)) return;
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const tile::Range keys = keys_of(smem.split, own_row(r, c));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int key = first + own_key(h);
          if (key < keys.begin || key >= keys.end) s[r][2 * h + c] = tile::negative_infinity();
        }
      }
  }

  // Softmax of a tile's scores: probabilities to shared memory. Times a token's scale they become
  // float16: the maximum follows that product, which may lag behind (tile/softmax.cuh). Not farther
  // than 2^96 from the probabilities, whose sum has to be a float, too. Maxima are the same in all
  // warps of the group. Few tiles move one: so it is tried without, and done again where any warp
  // finds that one has to.
  __device__ __forceinline__ void soften(const Scores& s, const Stage& stage, int first) {
    float level[2];
    bool grown = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 scales = reinterpret_cast<const float4&>(stage.scales[own_key(h)]);
      const float largest =
          fmaxf(fmaxf(fabsf(scales.x), fabsf(scales.y)), fmaxf(fabsf(scales.z), fabsf(scales.w)));
      level[h] = fmaxf(ptx::lg2(largest * Codes::kUnit), -96.0f);
    }
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        grown |=
            s[r][i] + level[i / 2] - row_max[r][i % 2] > tile::OnlineSoftmax::kRescaleThreshold;
    if (__any_sync(~0u, grown) && lane == 0) smem.raised[group] = first;
    float sum[kRowBlocks][2];
    put_probabilities(s, stage, sum);
    sync_group(group);
    if (smem.raised[group] == first) {
      raise(s, level);
      put_probabilities(s, stage, sum);
      sync_group(group);
    }
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) row_sum[r][c] += sum[r][c];
  }

  __device__ __forceinline__ void put_probabilities(const Scores& s, const Stage& stage,
                                                    float (&sum)[kRowBlocks][2]) const {
    float p[kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float shift = tile::OnlineSoftmax::offset(row_max[r][c], 1.0f);
#pragma unroll
        for (int h = 0; h < 2; ++h) p[r][2 * h + c] = ptx::ex2(s[r][2 * h + c] - shift);
        sum[r][c] = p[r][c] + p[r][2 + c];
      }
#pragma unroll 1
    for (int quarter = 0; quarter < (scaled_alike ? 1 : kQuarters); ++quarter) {
      unsigned char* const panel = smem.p[group][quarter];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float scale = stage.scales[own_key(h)][quarter] * Codes::kUnit;
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
          const float* const pair = &p[r][2 * h];
          // Of row 8 r + g and keys 2 t and 2 t + 1.
          *reinterpret_cast<unsigned*>(panel + QTile::at(8 * r + lane / 4, warp * 2 + h) +
                                       lane % 4 * 4) =
              ptx::movmatrix_trans(tile::pack<__half>(pair[0] * scale, pair[1] * scale));
        }
      }
    }
  }

  // Moves the maxima of all rows. By all warps of the group.
  __device__ __forceinline__ void raise(const Scores& s, const float (&level)[2]) {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float largest = fmaxf(s[r][c] + level[0], s[r][2 + c] + level[1]);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        if (lane < 4) smem.tile_max[group][warp][own_row(r, c)] = largest;
      }
    sync_group(group);
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float largest = row_max[r][c];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          largest = fmaxf(largest, smem.tile_max[group][i][own_row(r, c)]);
        const float factor = ptx::ex2(row_max[r][c] - tile::OnlineSoftmax::offset(largest, 1.0f));
        row_max[r][c] = largest;
        row_sum[r][c] *= factor;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (kHasExcess) o_excess[r][2 * h + c] *= factor;
#pragma unroll
          for (int step = 0; step < kSteps; ++step) o[step][r][2 * h + c] *= factor;
        }
      }
  }

  // The products of a tile's probabilities with this warp's quarter of the values.
  __device__ __forceinline__ void multiply_values(const Stage& stage) {
    const unsigned p =
        ptx::shared_address(smem.p[group][scaled_alike ? 0 : warp]) + column_major<QTile>();
    const unsigned v = ptx::shared_address(stage.codes[warp]) + column_major<Tile>();
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      unsigned b[4];
      ptx::ldmatrix_x4(b, QTile::at_chunks(p, j));
      if (kHasExcess) {
        const unsigned excess[4] = {Codes::value_excess(0), Codes::value_excess(1),
                                    Codes::value_excess(0), Codes::value_excess(1)};
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r)
          ptx::mma_m16n8k16<__half>(o_excess[r], excess, b[2 * r], b[2 * r + 1]);
      }
#pragma unroll
      for (int pair = 0; pair < kSteps / 2; ++pair) {
        unsigned codes[4];  // of keys 0 to 7, of two blocks of columns, then of keys 8 to 15
        ptx::ldmatrix_x4_trans(codes, Tile::at_chunks(v + j * 16 * Tile::kRowBytes, pair));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          unsigned first[2], last[2];
          Codes::expand_values(first, codes[i]);
          Codes::expand_values(last, codes[2 + i]);
          const unsigned a[4] = {first[0], first[1], last[0], last[1]};
#pragma unroll
          for (int r = 0; r < kRowBlocks; ++r)
            ptx::mma_m16n8k16<__half>(o[2 * pair + i][r], a, b[2 * r], b[2 * r + 1]);
        }
      }
    }
  }

  // To shared memory: the maxima and sums of this warp's keys.
  __device__ __forceinline__ void put_sums() {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = own_row(r, c);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          row_sum[r][c] += __shfl_xor_sync(~0u, row_sum[r][c], distance);
        if (lane < 4) smem.max_sum[group][warp][row] = {row_max[r][c], row_sum[r][c]};
      }
  }

  // To shared memory, of the group's keys alone.
  __device__ __forceinline__ void put() {
    put_sums();
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float* const to = smem.o[group][own_row(r, c)] + warp * kQuarter + lane / 4 * 2;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          *reinterpret_cast<float2*>(to + 16 * step) = {column(step, r, c, 0),
                                                        column(step, r, c, 1)};
      }
  }

  // As lane_row_major() and lane_column_major() of tile/swizzle.cuh, from `lane`.
  template <class Swizzled>
  __device__ __forceinline__ unsigned row_major() const {
    return Swizzled::at(lane % 16, lane / 16);
  }
  template <class Swizzled>
  __device__ __forceinline__ unsigned column_major() const {
    return Swizzled::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }
  // Of this lane, among a tile's: its key h and its row c of block r.
  __device__ __forceinline__ int own_key(int h) const {
    return warp * kWarpKeys + 8 * h + lane / 4;
  }
  __device__ __forceinline__ int own_row(int r, int c) const {
    return 8 * r + 2 * (lane % 4) + c % 2;
  }
  __device__ __forceinline__ float column(int step, int r, int c, int h) const {
    const float excess = kHasExcess ? o_excess[r][2 * h + c] : 0.0f;
    return (o[step][r][2 * h + c] - excess) * Codes::column_factor(h);
  }
};

}  // namespace mla
