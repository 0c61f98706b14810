// What a computing warpgroup of mla/decode_codes_sm90.cu does with a split's keys: it takes every
// kWarpgroups-th block of them, and has all of O for these (multiply_codes_sm90.cuh), so that
// warpgroups meet at the end of a split only.
#pragma once

#include "mla/multiply_codes_sm90.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "tile/accumulator.cuh"
#include "tile/softmax.cuh"

namespace mla {

struct Warpgroup : CodeProducts {
  static constexpr int kSums = kScores / 2;  // of a lane's rows

  const MlaParams& mla;
  const int number;  // of the warpgroup

  unsigned tiles = 0;  // blocks of the splits before
  int blocks = 0;      // of the split
  float row_sum;       // of the warp's keys, and one row
  float o[kProducts][kScores];

  __device__ __forceinline__ void run() {
    while (start()) {
#pragma unroll 1
      for (int block = number; block < blocks; block += kWarpgroups) {
        Stage& stage = await_stage(block);
        const int turn = block / kWarpgroups % 2;
        make_probabilities(stage, block, turn);
        add_values(o, stage, smem.p[number][turn], smem.empty[(tiles + block) % kStages]);
      }
      merge_sums();
      move_values();
      collect();
      if (number == 0) put_values();
    }
  }

  // Takes a split, whose queries are in shared memory then; false where there is none.
  __device__ __forceinline__ bool start() {
    sync_warpgroups();  // what the split before has left in shared memory has been read
    if (threadIdx.x == 0) {
      smem.exists = smem.schedule.next(params, smem.split);
      if (smem.exists) smem.place = smem.schedule.place_of(params, smem.split);
    }
    sync_warpgroups();
    if (!smem.exists) return false;
    tiles += blocks;
    blocks = __shfl_sync(~0u, count_blocks(smem.split), 0);
    put_queries(smem, params, mla);
    if (threadIdx.x < kRows) {
      const tile::Range keys = keys_of(smem.split, threadIdx.x);
      smem.visible[threadIdx.x] = keys;
      if (threadIdx.x == 0) smem.bounds.end = keys.end;
      if (threadIdx.x == kRows - 1) smem.bounds.begin = keys.begin;
    }
    if (threadIdx.x == 0) smem.bounds.origin = smem.split.origin;
    ptx::fence_proxy_async();
    row_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kProducts; ++i)
#pragma unroll
      for (int j = 0; j < kScores; ++j) o[i][j] = 0.0f;
    sync_warpgroups();
    return true;
  }

  // The keys of a split that a row of its tile sees; rows that do not exist do as the last one.
  __device__ __forceinline__ tile::Range keys_of(const decoding::Split& split, int row) const {
    const int last = split.seq.seqlen_q * params.group - 1;
    const int token = divided_by_group(params, min(split.row_tile * kRows + row, last));
    const tile::Range keys = decoding::visible_keys(params, split.seq, token);
    return {max(keys.begin, split.begin), min(keys.end, split.end)};
  }

  __device__ __forceinline__ Stage& await_stage(int block) {
    const unsigned tile = tiles + block;
    Stage& stage = smem.ring[tile % kStages];
    ptx::mbarrier_wait(smem.full[tile % kStages], tile / kStages % 2);
    return stage;
  }

  // Probabilities of a block. Times their tokens' scales they become float16: the maximum follows
  // that product, which may lag behind (tile/softmax.cuh). Not farther than 2^96 from the
  // probabilities, whose sum has to be a float, too. Few blocks move a maximum: so it is tried
  // without, and done again where any warp finds that one has to.
  __device__ __forceinline__ void make_probabilities(Stage& stage, int block, int turn) {
    const Scale scales[2] = {scale_of(stage, 0), scale_of(stage, 1)};
    if (Config::several_scales) put_factors(stage, scales);
    Scores s;
    multiply_keys(s, stage);
    hide_keys(s, stage, block);
    float sum[kSums], largest[2];
    unsigned char* const p = smem.p[number][turn];
    put_probabilities(s, scales, p, sum, largest);
    const unsigned id = tiles + block + 1;
    unsigned& raised = smem.raised[number][turn];
    if (has_grown(largest, scales) && lane == 0) raised = id;
    sync_own();
    if (raised == id) {
      put_largest(s, scales);
      sync_own();
      if (threadIdx.x % 128 < kRows) raise_row(threadIdx.x % 128);
      sync_own();
      move_sums();
      move_values();
      put_probabilities(s, scales, p, sum, largest);
      sync_own();
    }
    add_sums(sum);
  }

  __device__ __forceinline__ void put_probabilities(const Scores& s, const Scale (&scales)[2],
                                                    unsigned char* panel, float (&sum)[kSums],
                                                    float (&largest)[2]) const {
    const unsigned to =
        ptx::shared_address(panel) + Panel::at(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
    largest[0] = largest[1] = kLeast;
    const auto scales_of = [&](int j) {
      return reinterpret_cast<const float4&>(smem.row_scales[number][own_row(j)]);
    };
    float4 rows[2] = {scales_of(0), scales_of(1)};
#pragma unroll
    for (int pair = 0; pair < kRows / 16; ++pair) {
      unsigned words[4];
      float4 next[2] = {};
      if (pair + 1 < kRows / 16)
        for (int i = 0; i < 2; ++i) next[i] = scales_of(2 * pair + 2 + i);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = 2 * pair + i;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float x = fmaf(s[4 * j + 2 * h], rows[i].x, -rows[i].y);
          const float y = fmaf(s[4 * j + 2 * h + 1], rows[i].z, -rows[i].w);
          largest[h] = fmaxf(largest[h], fmaxf(x, y));
          const float of_x = ptx::ex2(x), of_y = ptx::ex2(y);
          sum[2 * j] = h == 0 ? of_x : sum[2 * j] + of_x;
          sum[2 * j + 1] = h == 0 ? of_y : sum[2 * j + 1] + of_y;
          words[2 * i + h] = tile::pack<__half>(of_x * scales[h].factor, of_y * scales[h].factor);
        }
      }
      ptx::stmatrix_x4_trans(to + pair * 16 * Panel::kRowBytes, words);
      rows[0] = next[0];
      rows[1] = next[1];
    }
    ptx::fence_proxy_async();
  }

  // Whether a product of a probability and its scale is too far beyond the maximum, in any lane.
  __device__ __forceinline__ static bool has_grown(const float (&largest)[2],
                                                   const Scale (&scales)[2]) {
    return __any_sync(~0u, fmaxf(largest[0] + scales[0].level, largest[1] + scales[1].level) >
                               tile::OnlineSoftmax::kRescaleThreshold);
  }

  // To shared memory: the largest of this warp's keys that each row has.
  __device__ __forceinline__ void put_largest(const Scores& s, const Scale (&scales)[2]) const {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float worth = smem.row_scales[number][own_row(j) + e].worth;
        float largest = fmaxf(fmaf(s[4 * j + e], worth, scales[0].level),
                              fmaf(s[4 * j + 2 + e], worth, scales[1].level));
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        if (lane < 4) smem.warp_max[number][warp][own_row(j) + e] = largest;
      }
  }
  // A row's new maximum, when all warps have put theirs, and what sums are multiplied by.
  __device__ __forceinline__ void raise_row(int row) const {
    RowScale& own = smem.row_scales[number][row];
    float largest = own.max;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = fmaxf(largest, smem.warp_max[number][i][row]);
    smem.moved_by[number][row] = ptx::ex2(own.max - largest);
    own.max = largest;
  }
  __device__ __forceinline__ void move_sums() { row_sum *= smem.moved_by[number][row_of_sum()]; }
  __device__ __forceinline__ void move_values() {
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      const float factor = smem.moved_by[number][own_row(j / 2) + j % 2];
#pragma unroll
      for (int i = 0; i < kProducts; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) o[i][j / 2 * 4 + 2 * h + j % 2] *= factor;
    }
  }

  // Adds up a block's probabilities over the eight lanes that have the same rows, each of which
  // ends with one of these.
  __device__ __forceinline__ void add_sums(float (&sum)[kSums]) {
#pragma unroll
    for (int level = 0; level < 3; ++level) {
      const int distance = 16 >> level, count = kSums >> (level + 1);
      const bool last = lane & distance;
      if (count == 0) sum[0] += __shfl_xor_sync(~0u, sum[0], distance);
#pragma unroll
      for (int i = 0; i < kSums / 2; ++i) {
        if (i >= count) continue;
        const float kept = last ? sum[count + i] : sum[i];
        const float sent = last ? sum[i] : sum[count + i];
        sum[i] = kept + __shfl_xor_sync(~0u, sent, distance);
      }
    }
    row_sum += sum[0];
  }
  // Of row_sum; with 16 rows two lanes have the same.
  __device__ __forceinline__ int row_of_sum() const {
    const int sum = lane / 4 / (8 / kSums);
    return own_row(sum / 2) + sum % 2;
  }

  // Scores of keys that a row does not see, or that do not exist, become -inf.
  __device__ __forceinline__ void hide_keys(Scores& s, const Stage& stage, int block) const {
    if (mla.indices != nullptr) {
      const unsigned exist = stage.exist[warp] >> lane / 4;
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        s[i] = exist >> i / 2 % 2 * 8 & 1 ? s[i] : tile::negative_infinity();
    }
    const Bounds& all = smem.bounds;
    const int first = all.origin + block * kKeys;
    if (first >= all.begin && first + kKeys <= all.end) return;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const tile::Range& keys = smem.visible[own_row(i / 4) + i % 2];
      const int key = first + warp * kWarpKeys + i / 2 % 2 * 8 + lane / 4;
      if (key < keys.begin || key >= keys.end) s[i] = tile::negative_infinity();
    }
  }

  // A split's sums to shared memory, and what becomes of its rows.
  __device__ __forceinline__ void merge_sums() const {
    smem.warp_sum[number][warp][row_of_sum()] = row_sum;
    sync_warpgroups();
    if (threadIdx.x < kRows) merge_row(threadIdx.x, threadIdx.x < rows());
    if (threadIdx.x == 0 && smem.place.index + 1 == smem.place.count)
      put_task<kRows>(params, mla, smem.split, smem.place);
    sync_warpgroups();
  }
  // The first warpgroup adds the others' O to its own, 64 columns after 64, by way of the queries'
  // place.
  __device__ __forceinline__ void collect() {
    constexpr int kVecs = kScores / 4;
    using Lanes = float4[128];
    auto* const sent = reinterpret_cast<Lanes(*)[kWarpgroups - 1][kVecs]>(smem.q);
    static_assert(2 * (kWarpgroups - 1) * kVecs * sizeof(Lanes) <= sizeof(smem.q),
                  "two products of all");
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      if (number > 0) {
#pragma unroll
        for (int j = 0; j < kVecs; ++j)
          sent[i % 2][number - 1][j][thread] = {o[i][4 * j], o[i][4 * j + 1], o[i][4 * j + 2],
                                                o[i][4 * j + 3]};
      }
      sync_warpgroups();
      if (number > 0) continue;
#pragma unroll
      for (int from = 0; from < kWarpgroups - 1; ++from)
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
          const float4 its = sent[i % 2][from][j][thread];
          o[i][4 * j] += its.x;
          o[i][4 * j + 1] += its.y;
          o[i][4 * j + 2] += its.z;
          o[i][4 * j + 3] += its.w;
        }
    }
  }

  // How many rows of the tile exist.
  __device__ __forceinline__ int rows() const {
    const decoding::Split& split = smem.split;
    return min(kRows, split.seq.seqlen_q * params.group - split.row_tile * kRows);
  }
  __device__ __forceinline__ bool is_part() const { return smem.place.count > 1; }

  // What warpgroups' sums of a row are multiplied by, and where the row goes.
  __device__ __forceinline__ void merge_row(int row, bool exists) const {
    float max = kLeast, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarpgroups; ++i) max = fmaxf(max, smem.row_scales[i][row].max);
#pragma unroll
    for (int i = 0; i < kWarpgroups; ++i) {
      const float factor = ptx::ex2(smem.row_scales[i][row].max - max);
      smem.moved_by[i][row] = factor;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) sum = fmaf(factor, smem.warp_sum[i][warp][row], sum);
    }
    if (!exists) return;
    if (max == kLeast) max = tile::negative_infinity();
    if (is_part()) {
      part().max_sum[row] = {max, sum};
      return;
    }
    smem.results[row] = output_row<T, kRows>(params, smem.split, row, max, sum);
    put_lse(params, smem.results[row]);
  }

  using Part = PartialTile<kRows, kLatent>;
  __device__ __forceinline__ Part& part() const {
    return static_cast<Part*>(mla.parts)[smem.place.slot(smem.place.index)];
  }

  // O as the result, or as a partial one: a lane has two columns of a row in each product.
  __device__ __forceinline__ void put_values() const {
    const int thread = ptx::thread_index();  // nothing is worked out ahead of all blocks
    const int column = thread / 32 % 4 * 16 + thread % 32 / 4 * 2, first_row = thread % 4 * 2;
    const int existing = rows() - first_row;
    const auto pair = [&](int row, int i) {
      const int at = row / 8 * 4 + row % 8;
      return float2{o[i][at], o[i][at + 2]};
    };
    if (is_part()) {
      float2* const to =
          reinterpret_cast<float2*>(&part().o[Part::at(first_row, column / 4)]) + column / 2 % 2;
#pragma unroll
      for (int j = 0; j < kSums; ++j) {
        const int row = j / 2 * 8 + j % 2;
        if (row >= existing) continue;
#pragma unroll
        for (int i = 0; i < kProducts; ++i) to[2 * Part::at(row, 16 * i)] = pair(row, i);
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      const int row = j / 2 * 8 + j % 2;
      if (row >= existing) continue;
      const OutputRow& result = smem.results[first_row + row];
      T* const to = static_cast<T*>(params.out) + result.at + column;
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        const float2 own = pair(row, i);
        if (column + 64 * i < params.head_dim_v)
          *reinterpret_cast<unsigned*>(to + 64 * i) =
              tile::pack<T>(own.x * result.factor, own.y * result.factor);
      }
    }
  }

  __device__ __forceinline__ void sync_own() const { ptx::bar_sync(1 + number, 128); }
  // The first of this lane's two rows of block j.
  __device__ __forceinline__ int own_row(int j) const { return 8 * j + lane % 4 * 2; }
};

}  // namespace mla
