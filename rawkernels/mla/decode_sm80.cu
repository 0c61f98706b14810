// Latent attention on tensor cores (mma.sync), for Ampere and newer: tiles of 16 rows against tiles
// of 32 keys, O shared by the warps column by column.
//
//   q_latent, out (batch, seqlen_q, heads, latent) or (total, heads, latent), q_rope with rope_dim
//   in place of latent; pages of latents and of rotated parts, of any size, or chosen tokens;
//   float16 or bfloat16, latent a multiple of 8 up to kLatent, rope_dim up to 64, everything
//   16-byte aligned. DecodeParams and MlaParams have the rest. The operands are swapped: keys fill
//   the 16 rows of an mma and query rows its 8 columns.
//     Sᵀ (keys × rows) = K Qᵀ: a warp has 16 keys and a quarter of the columns; the quarters are
//     summed in shared memory by threads that have a row's softmax.
//     Oᵀ (latent × rows) += Vᵀ Pᵀ: a warp has 64 columns, V is the same tile as K.
//   O of 16 rows would take a warp 256 registers; so it takes each of eight 32. Tiles of keys
//   arrive by cp.async in a ring of stages.
#include "decoding/last_merge.cuh"
#include "mla/params.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "tile/fragment.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"

using T = Config::dtype;
constexpr int kRows = Config::rows;
constexpr int kKeys = Config::tile_keys;
constexpr int kStages = Config::stages;
constexpr int kLatent = Config::latent;
constexpr int kWarps = Config::threads / 32;
constexpr int kLatentPanels = kLatent / 64;
constexpr int kPanels = kLatentPanels + 1;  // 64 columns each; the last is what is rotated
constexpr int kQuarters = 4;                // of the columns, for scores
constexpr int kSteps = kPanels * 4 / kQuarters;
constexpr int kScoreStride = kKeys + 4;  // of rows: without bank conflicts
constexpr int kPStride = kKeys + 8;
constexpr int kRowLanes = Config::threads / kRows;  // that have a row's softmax
constexpr int kStoreColumns = 128;                  // of O that are written at a time
static_assert(kRows == 16 && kKeys == 32 && kWarps == 8 && kLatent == 64 * kWarps,
              "two blocks of keys, four quarters of columns and 64 columns of O are 8 warps' work");

using Tile = tile::Swizzled<8, kKeys * 128>;
using QTile = tile::Swizzled<8, kRows * 128>;
using Schedule = decoding::Schedule<kRows, kKeys>;
using Writer = decoding::Writer<T, kRows, kLatent, true, 1>;

struct Smem {
  alignas(1024) unsigned char q[kPanels][kRows * 128];
  alignas(1024) unsigned char k[kStages][kPanels][kKeys * 128];
  union {
    alignas(16) float scores[kQuarters][kRows][kScoreStride];
    alignas(16) float o[kRows][kStoreColumns];
  };
  alignas(16) T p[kRows][kPStride];
  float factor[kRows];  // of O, where a maximum has moved
  float2 max_sum[kRows];
  unsigned char exists[kStages][kKeys];
  decoding::LastMerge last;
};
static_assert(sizeof(Smem) <= Config::smem_bytes, "Config has to ask for all of it");

__device__ __forceinline__ void load_queries(Smem& smem, const DecodeParams& params,
                                             const MlaParams& mla, const decoding::Split& split) {
  const int rows = mla::rows_from<kRows>(params, split);
  for (int i = threadIdx.x; i < kRows * kPanels * 8; i += Config::threads) {
    const int row = i / (kPanels * 8), chunk = i % (kPanels * 8);
    const int index = split.row_tile * kRows + min(row, rows - 1);
    const int token = divided_by_group(params, index);
    const bool rotated = chunk >= kLatentPanels * 8;
    const Strides& stride = rotated ? mla.q_rope_stride : params.q_stride;
    const int column = (rotated ? chunk - kLatentPanels * 8 : chunk) * 8;
    const int columns = rotated ? params.head_dim - params.head_dim_v : params.head_dim_v;
    const T* source = static_cast<const T*>(rotated ? mla.q_rope : params.q) +
                      split.seq.index * stride.batch + (split.seq.begin_q + token) * stride.seq +
                      (split.head * params.group + index - token * params.group) * stride.head +
                      column;
    ptx::cp_async_16(ptx::shared_address(smem.q) + QTile::at(row, chunk), source,
                     row < rows && column < columns);
  }
}

// Copies tiles of a split's keys to the ring, a row by eight threads each.
struct Loader {
  Smem& smem;
  const DecodeParams& params;
  const MlaParams& mla;
  const kvcache::PageTable table = page_table(params);
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
  mla::Tokens tokens;
  int begin, end, next;          // keys of the split, and the next tile's first
  long long latent_at, rope_at;  // of the next tile's key of this thread
  bool has;                      // … which exists

  __device__ __forceinline__ void start(const decoding::Split& split) {
    tokens = mla::tokens_of(params, mla, split.seq.index);
    begin = split.begin;
    end = split.end;
    next = split.origin;
    find();
  }
  __device__ __forceinline__ void find() {
    const int key = next + row;
    has = key >= begin && key < end;
    const int token = has ? tokens.of_key(key) : 0;
    has = has && tokens.has(token);
    const int page = has ? table.page(tokens.sequence, token) : 0;
    const int slot = has ? table.slot(token) : 0;
    latent_at = page * params.k_stride.page + slot * params.k_stride.seq;
    rope_at = page * mla.rope_stride.page + slot * mla.rope_stride.seq;
  }
  // The next tile, if there is one; a group of copies in any case.
  __device__ __forceinline__ void load(int stage) {
    if (next < end) {
      const unsigned to = ptx::shared_address(smem.k[stage]);
      const T* const latent = static_cast<const T*>(params.k) + latent_at;
      const T* const rope = static_cast<const T*>(mla.rope) + rope_at;
      const int rope_dim = params.head_dim - params.head_dim_v;
#pragma unroll
      for (int panel = 0; panel < kLatentPanels; ++panel) {
        const int column = panel * 64 + chunk * 8;
        ptx::cp_async_16(to + Tile::at(row, panel * 8 + chunk), latent + column,
                         has && column < params.head_dim_v);
      }
      ptx::cp_async_16(to + Tile::at(row, kLatentPanels * 8 + chunk), rope + chunk * 8,
                       has && chunk * 8 < rope_dim);
      if (chunk == 0) smem.exists[stage][row] = has;
      next += kKeys;
      find();
    }
    ptx::cp_async_commit();
  }
};

// A block's work on a split.
struct Slice {
  Smem& smem;
  const DecodeParams& params;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int key_block = warp % 2, quarter = warp / 2;  // of this warp's scores
  // This thread's row of the softmax, and the first of its two keys of a tile.
  const int row = threadIdx.x / kRowLanes, key = threadIdx.x % kRowLanes * 2;
  tile::Range visible;  // of that row
  float row_max = tile::negative_infinity(), row_sum = 0.0f;
  float o[4][2][4] = {};  // 16 columns each, by 8 rows

  __device__ __forceinline__ void find_visible(const decoding::Split& split) {
    const int last = split.seq.seqlen_q * params.group - 1;
    const int token = divided_by_group(params, min(split.row_tile * kRows + row, last));
    const tile::Range keys = decoding::visible_keys(params, split.seq, token);
    visible = {max(keys.begin, split.begin), min(keys.end, split.end)};
  }

  // This warp's part of Sᵀ, to shared memory.
  __device__ __forceinline__ void multiply_keys(int stage) {
    float s[2][4] = {};
    const unsigned k = ptx::shared_address(smem.k[stage]) + Tile::lane_row_major() +
                       key_block * 16 * Tile::kRowBytes;
    const unsigned q = ptx::shared_address(smem.q) + QTile::lane_column_major();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int step = quarter * kSteps + i;
      unsigned a[4], b[4];
      ptx::ldmatrix_x4(a, Tile::at_chunks(k, step));
      ptx::ldmatrix_x4(b, QTile::at_chunks(q, step));
#pragma unroll
      for (int r = 0; r < 2; ++r) ptx::mma_m16n8k16<T>(s[r], a, b[2 * r], b[2 * r + 1]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        smem.scores[quarter][8 * r + tile::lane_column(lane) + i % 2]
                   [16 * key_block + tile::lane_row(lane) + tile::fragment_row(i)] = s[r][i];
  }

  // Two scores of this thread's row become probabilities; whether O has to be scaled.
  __device__ __forceinline__ bool update_softmax(int stage, int first) {
    float s[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int part = 0; part < kQuarters; ++part) sum += smem.scores[part][row][key + i];
      const int at = first + key + i;
      const bool seen = smem.exists[stage][key + i] && at >= visible.begin && at < visible.end;
      s[i] =
          seen ? sum * static_cast<float>(params.scale) * tile::kLog2e : tile::negative_infinity();
    }
    float largest = fmaxf(fmaxf(s[0], s[1]), row_max);
#pragma unroll
    for (int distance = 1; distance < kRowLanes; distance *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    const bool moves = largest - row_max > tile::OnlineSoftmax::kRescaleThreshold;
    const float factor = moves ? ptx::ex2(row_max - largest) : 1.0f;
    row_max = moves ? largest : row_max;
    const float shift = tile::OnlineSoftmax::offset(row_max, 1.0f);
    const float p[2] = {ptx::ex2(s[0] - shift), ptx::ex2(s[1] - shift)};
    row_sum = fmaf(row_sum, factor, p[0] + p[1]);
    *reinterpret_cast<unsigned*>(&smem.p[row][key]) = tile::pack<T>(p[0], p[1]);
    if (key == 0) smem.factor[row] = factor;
    return moves;
  }

  __device__ __forceinline__ void multiply_values(int stage, bool scale) {
    if (scale) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float factor = smem.factor[8 * r + tile::lane_column(lane) + c];
#pragma unroll
          for (int step = 0; step < 4; ++step) {
            o[step][r][c] *= factor;
            o[step][r][2 + c] *= factor;
          }
        }
    }
    const unsigned v = ptx::shared_address(smem.k[stage]) + Tile::lane_column_major();
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      unsigned b[2][2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          b[r][half] = *reinterpret_cast<const unsigned*>(
              &smem.p[8 * r + tile::lane_row(lane)][16 * j + 8 * half + tile::lane_column(lane)]);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        unsigned a[4];
        ptx::ldmatrix_x4_trans(
            a, Tile::at_chunks(v + j * 16 * Tile::kRowBytes + warp * (kKeys * 128), step));
#pragma unroll
        for (int r = 0; r < 2; ++r) ptx::mma_m16n8k16<T>(o[step][r], a, b[r][0], b[r][1]);
      }
    }
  }

  // The split's result, some columns at a time by way of shared memory.
  __device__ __forceinline__ void put(const Writer& writer) {
#pragma unroll
    for (int distance = 1; distance < kRowLanes; distance *= 2)
      row_sum += __shfl_xor_sync(~0u, row_sum, distance);
    __syncthreads();  // scores are not read any more
    if (key == 0) smem.max_sum[row] = {row_max, row_sum};
#pragma unroll 1
    for (int first = 0; first < kLatent; first += kStoreColumns) {
      if (warp * 64 / kStoreColumns * kStoreColumns == first) {
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
          for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              smem.o[8 * r + tile::lane_column(lane) + i % 2]
                    [warp * 64 % kStoreColumns + 16 * step + tile::lane_row(lane) +
                     tile::fragment_row(i)] = o[step][r][i];
      }
      __syncthreads();
      for (int i = threadIdx.x; i < writer.rows() * kStoreColumns / 4; i += Config::threads) {
        const int its_row = i / (kStoreColumns / 4), column = i % (kStoreColumns / 4) * 4;
        if (first + column >= params.head_dim_v) continue;
        decoding::Partial<T> whole;
        whole.o = reinterpret_cast<const decoding::FourColumns<float>&>(smem.o[its_row][column]);
        whole.max = smem.max_sum[its_row].x;
        whole.sum = smem.max_sum[its_row].y;
        writer.put(its_row, first + column, whole);
      }
      __syncthreads();
    }
  }
};

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    mla_decode_sm80(const __grid_constant__ DecodeParams params,
                    const __grid_constant__ MlaParams mla) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  Smem& smem = *reinterpret_cast<Smem*>(dynamic_smem);
  Schedule schedule;
  if (!schedule.start(params)) return;
  Loader loader = {smem, params, mla};
  decoding::Split split;
  smem.last.init();
  while (schedule.next(params, split)) {
    const decoding::SplitPlace place = schedule.place_of(params, split);
    Slice slice = {smem, params};
    slice.find_visible(split);
    loader.start(split);
    load_queries(smem, params, mla, split);
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) loader.load(stage);
    int stage = 0;
#pragma unroll 1
    for (int first = split.origin; first < split.end; first += kKeys) {
      ptx::cp_async_wait<kStages - 2>();
      __syncthreads();  // the tile is there, and the one before has been used
      loader.load(stage == 0 ? kStages - 1 : stage - 1);
      slice.multiply_keys(stage);
      __syncthreads();
      const bool moves = slice.update_softmax(stage, first);
      slice.multiply_values(stage, __syncthreads_or(moves));
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    ptx::cp_async_wait_all();
    const Writer writer = {params, split, place};
    slice.put(writer);
    smem.last.merge_or_keep(writer);
  }
  smem.last.finish<Writer>(params);
}
