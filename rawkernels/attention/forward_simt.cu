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
#include "attention/slab_simt.cuh"
#include "tile/ragged.cuh"
#include "tile/score_mod.cuh"
#include "tile/visibility.cuh"

constexpr int kTileM = Config::tile_m;
constexpr int kTileN = Config::tile_n;
constexpr int kHeadDimV = Config::head_dim_v;  // padded; head_dim is a loop at run time
constexpr int kThreadCols = 16;
constexpr int kThreadRows = Config::thread_rows;
constexpr int kRows = kTileM / kThreadRows;
constexpr int kCols = kTileN / kThreadCols;
constexpr int kVecsV = kHeadDimV / (kThreadCols * kVec);
constexpr int kChain = 16;  // products added one by one: the error grows with their number
constexpr int kDepth = sizeof(Acc) == 4 ? 32 : 16;  // columns in a slab of Q and of K

__device__ constexpr int least(int a, int b) { return a < b ? a : b; }

// Keys in a slab of V: 16 KiB, or a chain.
constexpr int kSlabV = 16384 / (kHeadDimV * static_cast<int>(sizeof(Acc)));
constexpr int kDepthV = kSlabV < kChain ? kChain : least(kSlabV, kTileN);
// Columns of S, and vectors of O, that a thread sums at a time: as many chains as registers hold
// beside all of S and O.
constexpr int kColsAtOnce = least(kCols, 4);
constexpr int kVecsAtOnce = least(kVecsV, 32 / (kRows * kVec));

static_assert(kTileM % kThreadRows == 0 && kTileN % kThreadCols == 0,
              "threads must share the scores evenly");
static_assert(kHeadDimV % (kThreadCols * kVec) == 0, "threads must share O evenly");
static_assert(kTileN % kDepthV == 0, "a tile must be whole slabs of V");
static_assert(kCols % kColsAtOnce == 0 && kVecsV % kVecsAtOnce == 0, "chains must cover S and O");
static_assert(kDepth % kChain == 0 && kDepthV % kChain == 0, "chains must end with a slab");
static_assert(Config::threads == kThreadRows * kThreadCols,
              "Config::threads must be a thread for each place");

__device__ __forceinline__ const Vec& vec(const Acc& first) {
  return reinterpret_cast<const Vec&>(first);
}

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
};

static_assert(sizeof(Smem) <= 48 * 1024, "static shared memory that every architecture has");

// S += Q K^T over `depth` columns of the slabs, or a few more, which are zeros.
__device__ __forceinline__ void multiply_scores(Acc (&s)[kRows][kCols], const Smem& smem,
                                                int depth) {
  const int row = threadIdx.x / kThreadCols, col = threadIdx.x % kThreadCols;
#pragma unroll 1
  for (int begin = 0; begin < depth; begin += kChain)
#pragma unroll
    for (int first = 0; first < kCols; first += kColsAtOnce) {
      Acc chain[kRows][kColsAtOnce];
#pragma unroll
      for (int d = 0; d < kChain; d += kVec) {
        Vec k[kColsAtOnce];
#pragma unroll
        for (int j = 0; j < kColsAtOnce; ++j)
          k[j] = vec(smem.k[col + (first + j) * kThreadCols][begin + d]);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const Vec q = vec(smem.q[row + i * kThreadRows][begin + d]);
#pragma unroll
          for (int j = 0; j < kColsAtOnce; ++j)
#pragma unroll
            for (int e = 0; e < kVec; ++e)
              chain[i][j] = d + e == 0 ? q.x[e] * k[j].x[e] : fma(q.x[e], k[j].x[e], chain[i][j]);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kColsAtOnce; ++j) s[i][first + j] += chain[i][j];
    }
}

// O += P V over the slab of V, whose first key is column `key` of P. kNonfinite: V holds
// infinities or NaN, which must not reach a query that does not see their key: 0 * NaN is NaN.
template <bool kNonfinite>
__device__ __forceinline__ void multiply_values(Acc (&o)[kRows][kVecsV][kVec], const Smem& smem,
                                                int key) {
  constexpr int kKeys = kNonfinite ? 1 : kVec;  // of P at a time: the rare case can do with less
  struct alignas(kKeys * sizeof(Acc)) Keys {
    Acc x[kKeys];
  };
  const int row = threadIdx.x / kThreadCols, col = threadIdx.x % kThreadCols;
#pragma unroll 1
  for (int begin = 0; begin < kDepthV; begin += kChain)
#pragma unroll
    for (int first = 0; first < kVecsV; first += kVecsAtOnce) {
      Acc chain[kRows][kVecsAtOnce][kVec] = {};
#pragma unroll(kNonfinite ? 1 : kChain / kVec)
      for (int n = 0; n < kChain; n += kKeys) {
        Keys p[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          p[i] = reinterpret_cast<const Keys&>(smem.p[row + i * kThreadRows][key + begin + n]);
#pragma unroll
        for (int e = 0; e < kKeys; ++e)
#pragma unroll
          for (int c = 0; c < kVecsAtOnce; ++c) {
            const Vec v = vec(smem.v[begin + n + e][(col + (first + c) * kThreadCols) * kVec]);
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
              for (int f = 0; f < kVec; ++f)
                if (!kNonfinite && n + e == 0)
                  chain[i][c][f] = p[i].x[e] * v.x[f];
                else if (!kNonfinite || p[i].x[e] != 0)
                  chain[i][c][f] = fma(p[i].x[e], v.x[f], chain[i][c][f]);
          }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int c = 0; c < kVecsAtOnce; ++c)
#pragma unroll
          for (int f = 0; f < kVec; ++f) o[i][first + c][f] += chain[i][c][f];
    }
}

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

// Over the 16 threads of a row.
template <class Combine>
__device__ __forceinline__ Acc row_reduce(Acc x, Combine combine) {
#pragma unroll
  for (int distance = kThreadCols / 2; distance > 0; distance /= 2)
    x = combine(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

extern "C" __global__ void __launch_bounds__(Config::threads, Config::blocks_per_sm)
    forward_simt(const __grid_constant__ ForwardParams params) {
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
      multiply_scores(s, smem, min(kDepth, params.head_dim - d));
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

    for (int n = 0; n < kTileN; n += kDepthV) {
      __syncthreads();  // K, or the slab of V before this, has been used
      const bool nonfinite = load_slab<kHeadDimV>(smem.v, smem.from_v, key + n, 0);
      if (__syncthreads_or(nonfinite))
        multiply_values<true>(o, smem, n);
      else
        multiply_values<false>(o, smem, n);
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
