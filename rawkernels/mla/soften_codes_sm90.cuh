// What both kinds of computing warpgroups of mla/decode_codes_sm90.cu have in common: the softmax
// of a block, and the end of a split.
#pragma once

#include "mla/clear_row.cuh"
#include "mla/multiply_codes_sm90.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "tile/accumulator.cuh"
#include "tile/softmax.cuh"

namespace mla {

struct Warpgroup : CodeProducts {
  static constexpr int kSums = kScores / 2;             // of a lane's rows
  static constexpr int kOwnSums = kRows == 64 ? 2 : 1;  // of the warp's keys, that a lane has

  const MlaParams& mla;
  const int number;                               // of the warpgroup
  const int maxima = kSharesValues ? 0 : number;  // which of those in shared memory are its own
  const int first_column = kSharesValues ? number * (kLatent / 2) : 0;

  // Opaque, or they would be set, and take registers, before the roles part.
  unsigned tiles = ptx::opaque(0);  // blocks of the splits before
  int blocks = ptx::opaque(0);      // of the split
  int first_whole, end_whole;       // between these, blocks of which all rows see all keys
  float row_sum[kOwnSums];

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
    if (threadIdx.x < kRows) smem.visible[threadIdx.x] = keys_of(smem.split, threadIdx.x);
    ptx::fence_proxy_async();
#pragma unroll
    for (float& sum : row_sum) sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kProducts; ++i)
#pragma unroll
      for (int j = 0; j < kScores; ++j) o[i][j] = 0.0f;
    sync_warpgroups();
    // The last row's first key and the first row's last one bound what all rows see.
    const int origin = smem.split.origin;
    const int before = max(smem.visible[kRows - 1].begin - origin, 0);
    const int end = max(smem.visible[0].end - origin, 0);
    first_whole = __shfl_sync(~0u, (before + kKeys - 1) / kKeys, 0);
    end_whole = __shfl_sync(~0u, end / kKeys, 0);
    return true;
  }

  // The keys of a split that a row of its tile sees; rows that do not exist do as the last one.
  __device__ __forceinline__ tile::Range keys_of(const decoding::Split& split, int row) const {
    const int last = split.seq.seqlen_q * params.group - 1;
    const int token = divided_by_group(params, min(split.row_tile * kRows + row, last));
    const tile::Range keys = decoding::visible_keys(params, split.seq, token);
    return {max(keys.begin, split.begin), min(keys.end, split.end)};
  }

  __device__ __forceinline__ Stage& stage_of(int block) const {
    return smem.ring[(tiles + block) % kStages];
  }
  __device__ __forceinline__ Stage& await_stage(int block) {
    const unsigned tile = tiles + block;
    ptx::mbarrier_wait(smem.full[tile % kStages], tile / kStages % 2);
    return stage_of(block);
  }
  __device__ __forceinline__ ptx::Mbarrier (&empty_of(int block) const)[2] {
    return smem.empty[(tiles + block) % kStages];
  }

  __device__ __forceinline__ void put_probabilities(const Scores& s, const Scale (&scales)[2],
                                                    const Stage& stage, unsigned char* panel,
                                                    float (&sum)[kSums],
                                                    float (&largest)[2]) const {
    const unsigned to =
        ptx::shared_address(panel) + Panel::at(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
    largest[0] = largest[1] = kLeast;
    const auto scales_of = [&](int j) {
      return reinterpret_cast<const float4&>(smem.row_scales[maxima][own_row(j)]);
    };
    // All are read before anything is written, which the compiler would not read them before.
    float4 rows[kRows / 8];
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) rows[j] = scales_of(j);
    __half2 factors[kTokenScales];  // of each quarter that of both keys
    if constexpr (kByQuarter)
      reinterpret_cast<uint4&>(factors) =
          reinterpret_cast<const uint4&>(stage.key_factors[warp * 8 + lane / 4]);
#pragma unroll
    for (int pair = 0; pair < kRows / 16; ++pair) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = 2 * pair + i;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float x = fmaf(s[4 * j + 2 * h], rows[j].x, -rows[j].y);
          const float y = fmaf(s[4 * j + 2 * h + 1], rows[j].z, -rows[j].w);
          largest[h] = fmaxf(largest[h], fmaxf(x, y));
          const float of_x = ptx::ex2(x), of_y = ptx::ex2(y);
          sum[2 * j] = h == 0 ? of_x : sum[2 * j] + of_x;
          sum[2 * j + 1] = h == 0 ? of_y : sum[2 * j + 1] + of_y;
          words[2 * i + h] = tile::pack<__half>(of_x * scales[h].factor, of_y * scales[h].factor);
        }
      }
      const unsigned to_pair = to + pair * 16 * Panel::kRowBytes;
      if constexpr (kByQuarter) {
#pragma unroll
        for (int copy = 0; copy < kCopies; ++copy) {
          const __half2 both[2] = {__low2half2(factors[copy]), __high2half2(factors[copy])};
          unsigned own[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) own[i] = scaled(words[i], both[i % 2]);
          ptx::stmatrix_x4_trans(to_pair + copy * kPanelBytes, own);
        }
      } else {
        ptx::stmatrix_x4_trans(to_pair, words);
      }
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
        const float worth = smem.row_scales[maxima][own_row(j) + e].worth;
        float largest = fmaxf(fmaf(s[4 * j + e], worth, scales[0].level),
                              fmaf(s[4 * j + 2 + e], worth, scales[1].level));
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        if (lane < 4) smem.warp_max[maxima][warp][own_row(j) + e] = largest;
      }
  }
  // A row's new maximum, when all warps have put theirs, and what sums are multiplied by.
  __device__ __forceinline__ void raise_row(int row) const {
    RowScale& own = smem.row_scales[maxima][row];
    float largest = own.max;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = fmaxf(largest, smem.warp_max[maxima][i][row]);
    smem.moved_by[maxima][row] = ptx::ex2(own.max - largest);
    own.max = largest;
  }
  __device__ __forceinline__ void move_sums() {
#pragma unroll
    for (int i = 0; i < kOwnSums; ++i) row_sum[i] *= smem.moved_by[maxima][row_of_sum(i, lane)];
  }
  __device__ __forceinline__ void move_values() {
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      const float factor = smem.moved_by[maxima][own_row(j / 2) + j % 2];
#pragma unroll
      for (int i = 0; i < kProducts; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) o[i][j / 2 * 4 + 2 * h + j % 2] *= factor;
    }
  }

  // Adds up a block's probabilities over the eight lanes that have the same rows, each of which
  // ends with the sums of some of these.
  __device__ __forceinline__ void add_up(float (&sum)[kSums]) const {
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
  }
  __device__ __forceinline__ void add_sums(const float (&sum)[kSums]) {
#pragma unroll
    for (int i = 0; i < kOwnSums; ++i) row_sum[i] += sum[i];
  }
  // Of row_sum[i]; with 16 rows two lanes have the same.
  __device__ __forceinline__ static int row_of_sum(int i, int lane) {
    const int sum = lane / 4 * kSums / 8 + i;
    return sum / 2 * 8 + lane % 4 * 2 + sum % 2;
  }

  // Scores of keys that a row does not see, or that do not exist, become -inf.
  __device__ __forceinline__ void hide_keys(Scores& s, Stage& stage, int block) const {
    if (mla.indices != nullptr) {
      const unsigned exist = stage.exist[warp] >> lane / 4;
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        s[i] = exist >> i / 2 % 2 * 8 & 1 ? s[i] : tile::negative_infinity();
    }
    if (block >= first_whole && block < end_whole) return;
    const int first = smem.split.origin + block * kKeys;
    clear_values(stage, first);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const tile::Range& keys = smem.visible[own_row(i / 4) + i % 2];
      const int key = first + warp * kWarpKeys + i / 2 % 2 * 8 + lane / 4;
      if (key < keys.begin || key >= keys.end) s[i] = tile::negative_infinity();
    }
  }

  // Zeros for those of the warp's codes that TMA has copied though their keys are not the split's,
  // and that may be NaN: 0 times NaN is NaN. The warp has read them as keys.
  __device__ __forceinline__ void clear_values(Stage& stage, int first) const {
    if (mla.key_rows == 0) return;
    const int own = warp * kWarpKeys + lane % kWarpKeys;
    if (first + own >= smem.split.begin && first + own < smem.split.end) return;
    clear_half_row<kKeyPanels, kKeyPanelBytes>(stage.panels[0], own, lane / kWarpKeys);
    ptx::fence_proxy_async();
  }

  // A split's sums to shared memory, and what becomes of its rows.
  __device__ __forceinline__ void merge_sums() const {
#pragma unroll
    for (int i = 0; i < kOwnSums; ++i)
      smem.warp_sum[number][warp][row_of_sum(i, ptx::thread_index() % 32)] = row_sum[i];
    sync_warpgroups();
    if (threadIdx.x < kRows) merge_row(threadIdx.x, threadIdx.x < rows());
    if (threadIdx.x == 0 && smem.place.index + 1 == smem.place.count)
      put_task<kRows>(params, mla, smem.split, smem.place);
    sync_warpgroups();
  }
  // How many rows of the tile exist.
  __device__ __forceinline__ int rows() const {
    const decoding::Split& split = smem.split;
    return min(kRows, rows_from<kRows>(params, split));
  }
  __device__ __forceinline__ bool is_part() const { return smem.place.count > 1; }

  // What warpgroups' sums of a row are multiplied by, and where the row goes.
  __device__ __forceinline__ void merge_row(int row, bool exists) const {
    float max = kLeast, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMaxima; ++i) max = fmaxf(max, smem.row_scales[i][row].max);
#pragma unroll
    for (int i = 0; i < kWarpgroups; ++i) {
      const int own = kSharesValues ? 0 : i;
      const float factor = ptx::ex2(smem.row_scales[own][row].max - max);
      smem.moved_by[own][row] = factor;
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
    const int column = first_column + thread / 32 % 4 * 16 + thread % 32 / 4 * 2;
    const int first_row = thread % 4 * 2;
    const int existing = rows() - first_row;
    const auto pair = [&](int row, int i) {
      const int at = row / 8 * 4 + row % 8;
      return float2{o[i][at], o[i][at + 2]};
    };
    if (is_part()) {
      // In fragments, columns 2t and 2t + 1 of the 8 from 16m on, then of the next 8.
      const int vec = Part::kFragments ? column / 16 * 4 + column / 2 % 4 : column / 4;
      const int half = Part::kFragments ? column / 8 % 2 : column / 2 % 2;
      float2* const to = reinterpret_cast<float2*>(&part().o[Part::at(first_row, vec)]) + half;
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
