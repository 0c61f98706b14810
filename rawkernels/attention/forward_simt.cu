// Attention forward in plain CUDA C++: every call of the contract, on any architecture. The kernel
// to read first.
//
//   q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim) and v likewise,
//   of any strides, or (total, heads, head_dim) of sequences end to end; float16, bfloat16,
//   float32, float64. Sums, softmax and shared memory are float, or double for float64.
//
//   One block computes kTileM queries of one head: it iterates over the keys that they may see,
//   kTileN at a time, and keeps for each query the running maximum m, the sum l of exp(s - m) and O
//   = sum of exp(s - m) * v.
//
//   A thread has kRows queries, kThreadRows apart, with every sixteenth column of their scores and
//   every sixteenth vector of O: both products are outer products of registers, fed from slabs in
//   shared memory. Each is a sum of chains of kChain products, since one chain over all would round
//   too often. The 16 threads that share a query are half a warp, so that a row's maximum takes
//   four shuffles. At most 48 KiB of shared memory, all static.
//
//   H200, 2026-11-22: float32, 2048 queries and keys, 30.6 TFLOP/s at head_dim 64, 30.0 at
//   128, 25.9 at 256, where a cuBLAS product of float32 matrices, without TF32, reaches 50.6.
#include "attention/product_simt.cuh"
#include "tile/dropout.cuh"
#include "tile/fragment.cuh"
#include "tile/ragged.cuh"
#include "tile/score_mod.cuh"
#include "tile/visibility.cuh"

constexpr int kTileM = Config::tile_m;
constexpr int kTileN = Config::tile_n;
constexpr int kHeadDimV = Config::head_dim_v;  // padded; head_dim is a loop at run time
constexpr int kThreadRows = Config::thread_rows;
constexpr int kRows = kTileM / kThreadRows;
constexpr int kCols = kTileN / kThreadCols;
constexpr int kVecsV = kHeadDimV / (kThreadCols * kVec);
constexpr int kDepth = sizeof(Acc) == 4 ? 32 : 16;  // columns in a slab of Q and of K

// Keys in a slab of V: 16 KiB, or a chain.
constexpr int kSlabV = 16384 / (kHeadDimV * static_cast<int>(sizeof(Acc)));
constexpr int kDepthV = kSlabV < kChain ? kChain : least(kSlabV, kTileN);

static_assert(kTileM % kThreadRows == 0 && kTileN % kThreadCols == 0,
              "threads must share the scores evenly");
static_assert(kHeadDimV % (kThreadCols * kVec) == 0, "threads must share O evenly");
static_assert(kTileN % kDepthV == 0, "a tile must be whole slabs of V");
static_assert(kDepth % kChain == 0 && kDepthV % kChain == 0, "chains must end with a slab");
static_assert(Config::threads == kThreadRows * kThreadCols,
              "Config::threads must be a thread for each place");

struct Smem {
  alignas(16) Acc p[kTileM][kTileN];
  union {
    struct {  // a vector more: 8 consecutive rows lie in different banks
      alignas(16) Acc q[kTileM][kDepth + kVec];
      alignas(16) Acc k[kTileN][kDepth + kVec];
    };
    alignas(16) Acc v[kDepthV][kHeadDimV];
  };
  // Used once for each slab or tile; registers are too few for it.
  Acc row_max[kTileM];
  Acc row_sum[kRows][Config::threads];  // each thread's own
  tile::Sequence seq;
  tile::Visibility visibility;  // of the tile's rows
  Matrix from_q, from_k, from_v;
  int dropout_head;  // of all in the batch
};

static_assert(sizeof(Smem) <= 48 * 1024, "static shared memory that every architecture has");

// Calls change(score, row, column) for each score of this thread, the first of which is in `row`
// and `column`.
template <class Change>
__device__ __forceinline__ void each_score(Acc (&s)[kRows][kCols], int row, int column,
                                           Change change) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kCols; ++j)
      change(s[i][j], row + i * kThreadRows, column + j * kThreadCols);
}

// Dropout of a tile of probabilities, whose first query and key are multiples of 16: a warp takes a
// block of the mask, a lane eight of its entries. `head` counts over the batch.
__device__ __forceinline__ void drop(Acc (&p)[kTileM][kTileN], const DropoutParams& dropout,
                                     int head, int query, int key) {
  static_assert(kTileM % 16 == 0 && kTileN % 16 == 0, "tiles are whole blocks of the mask");
  const int lane = threadIdx.x % 32;
  constexpr int kBlocks = kTileN / 16;
#pragma unroll 1
  for (int n = threadIdx.x / 32; n < kTileM / 16 * kBlocks; n += Config::threads / 32) {
    const int i = n / kBlocks, j = n % kBlocks;
    const tile::DropoutBits bits(dropout, query / 16 + i, key / 16 + j, lane, head);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      Acc& entry = p[16 * i + tile::lane_row(lane) + tile::fragment_row(e)]
                    [16 * j + tile::lane_column(lane) + tile::fragment_column(e)];
      entry = bits.drops(e) ? 0 : entry * static_cast<Acc>(dropout.scale);
    }
  }
}

// Over the 16 threads of a row.
template <class Combine>
__device__ __forceinline__ Acc row_reduce(Acc x, Combine combine) {
#pragma unroll
  for (int distance = kThreadCols / 2; distance > 0; distance /= 2)
    x = combine(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

extern "C" __global__ void __launch_bounds__(Config::threads, Config::blocks_per_sm)
    forward_simt(const __grid_constant__ ForwardParams params,
                 const __grid_constant__ DropoutParams dropout) {
  __shared__ Smem smem;
  const int slots = gridDim.x / params.heads_q;
  const int head = blockIdx.x / slots, slot = blockIdx.x % slots;
  tile::Sequence found;
  if (params.cu_seqlens_q != nullptr) {
    found = tile::varlen_sequence<kTileM>(params, slot);
  } else {
    const int batch = blockIdx.z * gridDim.y + blockIdx.y;
    // The last queries first: with a causal mask theirs is the most work.
    found = {batch, 0, 0, params.seqlen_q, params.seqlen_k, slots - 1 - slot};
  }
  if (found.tile < 0 || found.index >= params.batch) return;

  const tile::Sequence& seq = smem.seq;
  if (threadIdx.x == 0) {
    const int kv_head = head / (params.heads_q / params.heads_kv);
    smem.seq = found;
    smem.dropout_head = found.index * params.heads_q + head;
    smem.visibility =
        tile::Visibility::from_row(found.tile * kTileM, kTileM, params.window_left,
                                   params.window_right, found.seqlen_q, found.seqlen_k);
    smem.from_q = matrix(params.q, params.q_stride, seq.index, seq.begin_q, head, seq.seqlen_q,
                         params.head_dim);
    smem.from_k = matrix(params.k, params.k_stride, seq.index, seq.begin_k, kv_head, seq.seqlen_k,
                         params.head_dim);
    smem.from_v = matrix(params.v, params.v_stride, seq.index, seq.begin_k, kv_head, seq.seqlen_k,
                         params.head_dim_v);
  }
  __syncthreads();

  const int row = threadIdx.x / kThreadCols, col = threadIdx.x % kThreadCols;
  const int first_query = seq.tile * kTileM;
  const int last_row = min(kTileM, seq.seqlen_q - first_query) - 1;
  const tile::Range keys = smem.visibility.keys_of_any(0, last_row);
  const tile::Range common_keys = smem.visibility.keys_of_all(0, last_row);

  Acc o[kRows][kVecsV][kVec] = {};
  const Acc sink = params.sinks != nullptr ? static_cast<const Acc*>(params.sinks)[head]
                                           : tile::negative_infinity<Acc>();
// A sink is a key that comes before all others and has no value.
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (col == 0) smem.row_max[row + i * kThreadRows] = sink;
    smem.row_sum[i][threadIdx.x] = sink > tile::negative_infinity<Acc>() && col == 0 ? 1 : 0;
  }

  for (int key = max(keys.begin, 0) / kTileN * kTileN; key < keys.end; key += kTileN) {
    Acc s[kRows][kCols] = {};
    for (int d = 0; d < params.head_dim; d += kDepth) {
      __syncthreads();  // the slabs before these have been used
      load_slab<kDepth>(smem.q, smem.from_q, first_query, d);
      load_slab<kDepth>(smem.k, smem.from_k, key, d);
      __syncthreads();
      multiply_scores(s, smem.q, smem.k, min(kDepth, params.head_dim - d));
    }

    if (Config::has_score) {
      const ScoreMod<T, false, false> score_mod = {
          score_inputs(params).of_head<T>(seq.index, head)};
      const Acc slope = score_mod.slope(seq.index, head);
      // By way of shared memory, where a loop can index them: 32 copies of this code would not fit
      // in registers.
      each_score(s, row, col, [&](Acc& score, int i, int j) { smem.p[i][j] = score; });
#pragma unroll(sizeof(Acc) == 4 ? 4 : 2)
      for (int n = 0; n < kRows * kCols; ++n) {
        const int i = row + n / kCols * kThreadRows, j = col + n % kCols * kThreadCols;
        const int query = first_query + i;
        const tile::ScoreRow<Acc> score_row = {seq.index, head, query,
                                               query + seq.seqlen_k - seq.seqlen_q, slope};
        Acc score = smem.p[i][j];
        score_mod.terms([&](const auto& term) { score = term(score, score_row, key + j); });
        smem.p[i][j] = score;
      }
      each_score(s, row, col, [&](Acc& score, int i, int j) { score = smem.p[i][j]; });
    } else {
      const Acc scale = static_cast<Acc>(params.scale);
      each_score(s, row, col, [&](Acc& score, int, int) { score *= scale; });
    }
    if (!common_keys.contains(key, kTileN)) {
      each_score(s, row, key + col, [&](Acc& score, int i, int j) {
        const tile::Range seen = smem.visibility.keys(i);
        if (j < seen.begin || j >= seen.end) score = tile::negative_infinity<Acc>();
      });
    }

#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Acc old_max = smem.row_max[row + i * kThreadRows];
      Acc new_max = old_max;
#pragma unroll
      for (int j = 0; j < kCols; ++j) new_max = fmax(new_max, s[i][j]);
      new_max = row_reduce(new_max, [](Acc a, Acc b) { return fmax(a, b); });
      const Acc shift =
          new_max == tile::negative_infinity<Acc>() ? 0 : new_max;  // or -inf - -inf would be NaN
      const Acc rescale = exp(old_max - shift);
      __syncwarp();  // all threads of the row have read the old one
      if (col == 0) smem.row_max[row + i * kThreadRows] = new_max;
      Acc sum = smem.row_sum[i][threadIdx.x] * rescale;
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        const Acc p = exp(s[i][j] - shift);
        sum += p;
        smem.p[row + i * kThreadRows][col + j * kThreadCols] = p;
      }
      smem.row_sum[i][threadIdx.x] = sum;
#pragma unroll
      for (int c = 0; c < kVecsV; ++c)
#pragma unroll
        for (int f = 0; f < kVec; ++f) o[i][c][f] *= rescale;
    }
    if (Config::has_score && dropout.threshold != 0) {
      __syncthreads();  // P is complete
      drop(smem.p, dropout, smem.dropout_head, seq.tile * kTileM, key);
    }

    for (int n = 0; n < kTileN; n += kDepthV) {
      __syncthreads();  // K, or the slab of V before this, has been used
      const bool nonfinite = load_slab<kHeadDimV>(smem.v, smem.from_v, key + n, 0);
      if (__syncthreads_or(nonfinite))
        multiply_values<true, 32, 1>(o, smem.p, smem.v, n);  // rare: less at a time will do
      else
        multiply_values<false>(o, smem.p, smem.v, n);
    }
  }

#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int query = first_query + row + i * kThreadRows;
    const Acc sum = row_reduce(smem.row_sum[i][threadIdx.x], [](Acc a, Acc b) { return a + b; });
    if (query >= seq.seqlen_q) continue;
    const long long out_row = seq.begin_q + query;
    T* out = static_cast<T*>(params.out) + seq.index * params.out_stride.batch +
             out_row * params.out_stride.seq + head * params.out_stride.head;
    const Acc divisor = sum == 0 ? 1 : sum;  // 0: no key was seen, and O is 0
#pragma unroll
    for (int c = 0; c < kVecsV; ++c)
#pragma unroll
      for (int f = 0; f < kVec; ++f) {
        const int column = (col + c * kThreadCols) * kVec + f;
        if (column < params.head_dim_v) out[column] = static_cast<T>(o[i][c][f] / divisor);
      }
    if (params.lse != nullptr && col == 0) {
      const bool varlen = params.cu_seqlens_q != nullptr;  // then (heads_q, total)
      const long long lse_row =
          varlen ? head : static_cast<long long>(seq.index) * params.heads_q + head;
      static_cast<Acc*>(params.lse)[lse_row * params.seqlen_q + out_row] =
          smem.row_max[row + i * kThreadRows] + log(sum);
    }
  }
}
