// Attention forward in plain CUDA C++: every call of the contract, on any architecture. The kernel
// to read first.
//
//   q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim) and v likewise,
//   of any strides, or (total, heads, head_dim) of sequences end to end; float16, bfloat16,
//   float32, float64. Sums, softmax and shared memory are float, or double for float64.
//
//   One block computes kTileM queries of one head: it walks over the keys they may see, kTileN at a
//   time, and keeps for each query the running maximum m, the sum l of exp(s - m) and O = sum of
//   exp(s - m) * v.
//
//   A thread has kRows queries, kThreadRows apart, and every sixteenth column of the scores, of O
//   every sixteenth vector: both products are outer products of registers, fed from shared memory
//   in slabs. The 16 threads that share a query are half a warp, so a row's maximum is four
//   shuffles away. At most 48 KiB of shared memory, all static.
//
//   H200, 2026-11-21: float32, 2048 queries and keys, 32.8 TFLOP/s at head_dim 64, 28.3 at
//   128, 26.9 at 256, where a cuBLAS product of float32 matrices, without TF32, reaches 50.6.
#include "attention/params.cuh"
#include "tile/varlen.cuh"

using T = Config::dtype;

template <class>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
using Acc = Accumulator<T>::type;

constexpr int kVec = 16 / sizeof(Acc);  // shared memory is read and written 16 bytes at a time
constexpr int kTileM = Config::tile_m;
constexpr int kTileN = Config::tile_n;
constexpr int kHeadDimV = Config::head_dim_v;  // padded; head_dim is walked over at run time
constexpr int kThreadCols = 16;
constexpr int kThreadRows = Config::thread_rows;
constexpr int kRows = kTileM / kThreadRows;
constexpr int kCols = kTileN / kThreadCols;
constexpr int kVecsV = kHeadDimV / (kThreadCols * kVec);
constexpr int kDepth = sizeof(Acc) == 4 ? 32 : 8;  // columns in a slab of Q and of K
constexpr int kSlabV = 16384 / (kHeadDimV * sizeof(Acc));
constexpr int kDepthV = kTileN < kSlabV ? kTileN : kSlabV;  // keys in a slab of V: 16 KiB
constexpr int kChain = 64;  // products added one by one: the error grows with their number

struct Smem {
  Acc p[kTileM][kTileN];
  union {
    struct {
      Acc q[kTileM][kDepth + kVec];  // a vector more: 8 consecutive rows lie in different banks
      Acc k[kTileN][kDepth + kVec];
    };
    Acc v[kDepthV][kHeadDimV];
  };
};

static_assert(sizeof(Smem) <= 48 * 1024, "static shared memory that every architecture has");
static_assert(kTileM % kThreadRows == 0 && kTileN % kThreadCols == 0,
              "threads cover the scores evenly");
static_assert(kHeadDimV % (kThreadCols * kVec) == 0, "threads cover O evenly");
static_assert(kTileN % kDepthV == 0 && kDepthV % kVec == 0, "whole slabs of V");
static_assert(kChain % kDepth == 0, "chains end with a slab");
static_assert(Config::threads == kThreadRows * kThreadCols, "a thread for each place");

struct alignas(16) Vec {
  Acc x[kVec];
};

struct alignas(kVec * sizeof(T)) Packed {  // kVec elements as they are in global memory
  T x[kVec];
};

__device__ __forceinline__ Acc infinity() { return static_cast<Acc>(__int_as_float(0x7f800000)); }

__device__ __forceinline__ const Vec& vec(const Acc& first) {
  return reinterpret_cast<const Vec&>(first);
}

// Rows of one head of one sequence in global memory.
struct Matrix {
  const T* data;
  long long stride;
  int rows, columns;
  bool packed;  // every row starts where a Packed may, and holds a whole number of them

  __device__ Matrix(const void* base, const Strides& strides, int batch, long long first_row,
                    int head, int rows, int columns)
      : data(static_cast<const T*>(base) + batch * strides.batch + first_row * strides.seq +
             head * strides.head),
        stride(strides.seq),
        rows(rows),
        columns(columns) {
    const long long bytes =
        reinterpret_cast<long long>(data) | stride * static_cast<long long>(sizeof(T));
    packed = bytes % static_cast<long long>(sizeof(Packed)) == 0 && columns % kVec == 0;
  }
};

// Copies kSlabRows x kColumns elements from (row, column) on into a slab; zeros where the matrix
// has ended, so that nothing beyond it is multiplied. Returns whether this thread saw an infinity
// or a NaN.
template <int kColumns, int kSlabRows, int kPitch>
__device__ __forceinline__ bool load_slab(Acc (&slab)[kSlabRows][kPitch], const Matrix& from,
                                          int row, int column) {
  bool odd = false;
  if (from.packed) {
    constexpr int kRowVecs = kColumns / kVec;
    constexpr int kRowsAtOnce = Config::threads / kRowVecs;
    constexpr int kLoads = (kSlabRows + kRowsAtOnce - 1) / kRowsAtOnce;
    const int r = threadIdx.x / kRowVecs, c = threadIdx.x % kRowVecs * kVec;
    const T* source = from.data + (row + r) * from.stride + column + c;
    Packed loaded[kLoads];  // all on their way before the first is used
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool inside = row + r + i * kRowsAtOnce < from.rows && column + c < from.columns;
      loaded[i] = inside ? *reinterpret_cast<const Packed*>(source) : Packed{};
      source += kRowsAtOnce * from.stride;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      Vec values;
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        values.x[e] = static_cast<Acc>(loaded[i].x[e]);
        odd |= !isfinite(values.x[e]);
      }
      if (r + i * kRowsAtOnce < kSlabRows)
        reinterpret_cast<Vec&>(slab[r + i * kRowsAtOnce][c]) = values;
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < kSlabRows * kColumns; i += Config::threads) {
      const int r = i / kColumns, c = i % kColumns;
      const bool inside = row + r < from.rows && column + c < from.columns;
      const Acc value =
          inside ? static_cast<Acc>(from.data[(row + r) * from.stride + column + c]) : 0;
      odd |= !isfinite(value);
      slab[r][c] = value;
    }
  }
  return odd;
}

// S += Q K^T over `depth` columns of the slabs.
__device__ __forceinline__ void multiply_scores(Acc (&s)[kRows][kCols], const Smem& smem,
                                                int depth) {
  const int row = threadIdx.x / kThreadCols, col = threadIdx.x % kThreadCols;
#pragma unroll 1
  for (int d = 0; d < depth; d += kVec) {
    Vec k[kCols];
#pragma unroll
    for (int j = 0; j < kCols; ++j) k[j] = vec(smem.k[col + j * kThreadCols][d]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Vec q = vec(smem.q[row + i * kThreadRows][d]);
#pragma unroll
      for (int j = 0; j < kCols; ++j)
#pragma unroll
        for (int e = 0; e < kVec; ++e) s[i][j] = fma(q.x[e], k[j].x[e], s[i][j]);
    }
  }
}

// O += P V over the slab of V, whose first key is column `key` of P. kGuarded: V holds infinities
// or NaN, which a key that a query does not see must not pass on, since 0 * NaN is NaN.
template <bool kGuarded>
__device__ __forceinline__ void multiply_values(Acc (&o)[kRows][kVecsV][kVec], const Smem& smem,
                                                int key) {
  const int row = threadIdx.x / kThreadCols, col = threadIdx.x % kThreadCols;
#pragma unroll 1
  for (int n = 0; n < kDepthV; n += kVec) {
    Vec p[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) p[i] = vec(smem.p[row + i * kThreadRows][key + n]);
#pragma unroll
    for (int e = 0; e < kVec; ++e)
#pragma unroll
      for (int c = 0; c < kVecsV; ++c) {
        const Vec v = vec(smem.v[n + e][(col + c * kThreadCols) * kVec]);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int f = 0; f < kVec; ++f)
            if (!kGuarded || p[i].x[e] != 0) o[i][c][f] = fma(p[i].x[e], v.x[f], o[i][c][f]);
      }
  }
}

// A query sees the keys with low <= key - query <= high.
struct Band {
  int low, high;

  __device__ Band(const ForwardParams& params, const tile::Sequence& seq)
      : low(-kNoLimit), high(kNoLimit) {
    const long long diagonal = static_cast<long long>(seq.seqlen_k) - seq.seqlen_q;
    const long long limit = kNoLimit;
    if (params.window_left < kUnbounded)
      low = max(-limit, min(diagonal - params.window_left, limit));
    if (params.window_right < kUnbounded)
      high = max(-limit, min(diagonal + params.window_right, limit));
  }

  static constexpr int kNoLimit = 0x7fffff00;
};

// Calls change(score, query, key) for each score of this thread.
template <class Change>
__device__ __forceinline__ void each_score(Acc (&s)[kRows][kCols], int query, int key,
                                           Change change) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kCols; ++j) change(s[i][j], query + i * kThreadRows, key + j * kThreadCols);
}

// Softcap, bias, ALiBi and mask, which only some calls have, for one score.
__device__ __forceinline__ Acc changed(Acc score, const ForwardParams& params,
                                       const tile::Sequence& seq, int head, int query, int key) {
  if (params.softcap != 0) {
    const Acc softcap = static_cast<Acc>(params.softcap);
    score = softcap * tanh(score / softcap);
  }
  if (params.bias != nullptr) {
    const ScoreStrides& stride = params.bias_stride;
    const long long at =
        seq.index * stride.batch + head * stride.head + query * stride.row + key * stride.col;
    score += params.bias_is_float32 ? static_cast<Acc>(static_cast<const float*>(params.bias)[at])
                                    : static_cast<Acc>(static_cast<const T*>(params.bias)[at]);
  }
  if (params.alibi_slopes != nullptr) {
    const Acc slope =
        static_cast<const Acc*>(params.alibi_slopes)[seq.index * params.alibi_batch_stride + head];
    const long long diagonal = static_cast<long long>(query) + seq.seqlen_k - seq.seqlen_q;
    score -= slope * static_cast<Acc>(abs(diagonal - key));
  }
  if (params.mask != nullptr) {
    const ScoreStrides& stride = params.mask_stride;
    const long long at =
        seq.index * stride.batch + head * stride.head + query * stride.row + key * stride.col;
    if (!params.mask[at]) score = -infinity();
  }
  return score;
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
  tile::Sequence seq;
  if (params.cu_seqlens_q != nullptr) {
    seq = tile::varlen_sequence<kTileM>(params, slot);
  } else {
    const int batch = blockIdx.z * gridDim.y + blockIdx.y;
    // The last queries first: with a causal mask theirs is the most work.
    seq = {batch, 0, 0, params.seqlen_q, params.seqlen_k, slots - 1 - slot};
  }
  if (seq.tile < 0 || seq.index >= params.batch) return;

  const int kv_head = head / (params.heads_q / params.heads_kv);
  const Matrix q(params.q, params.q_stride, seq.index, seq.begin_q, head, seq.seqlen_q,
                 params.head_dim);
  const Matrix k(params.k, params.k_stride, seq.index, seq.begin_k, kv_head, seq.seqlen_k,
                 params.head_dim);
  const Matrix v(params.v, params.v_stride, seq.index, seq.begin_k, kv_head, seq.seqlen_k,
                 params.head_dim_v);

  const int row = threadIdx.x / kThreadCols, col = threadIdx.x % kThreadCols;
  const int first_query = seq.tile * kTileM;
  const int last_query = min(first_query + kTileM, seq.seqlen_q) - 1;
  const Band band(params, seq);
  const int first_key = max(0, first_query + band.low);  // keys that any of these queries sees
  const int end_key = last_query + 1 + min(band.high, seq.seqlen_k - 1 - last_query);
  const int common_begin = last_query + band.low;  // keys that all of these queries see
  const int common_end = first_query + 1 + min(band.high, seq.seqlen_k - 1 - first_query);

  Acc row_max[kRows], row_sum[kRows];
  Acc o[kRows][kVecsV][kVec] = {};
  const Acc sink =
      params.sinks != nullptr ? static_cast<const Acc*>(params.sinks)[head] : -infinity();
// A sink is a key that comes before all others and has no value.
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    row_max[i] = sink;
    row_sum[i] = sink > -infinity() && col == 0 ? 1 : 0;
  }

  for (int key = first_key / kTileN * kTileN; key < end_key; key += kTileN) {
    Acc s[kRows][kCols] = {};
    for (int d = 0; d < params.head_dim; d += kDepth) {
      __syncthreads();  // the slabs before these have been used
      load_slab<kDepth>(smem.q, q, first_query, d);
      load_slab<kDepth>(smem.k, k, key, d);
      __syncthreads();
      multiply_scores(s, smem, min(kDepth, params.head_dim - d));
      if ((d + kDepth) % kChain == 0 && d + kDepth < params.head_dim) {
        each_score(s, row, col, [&](Acc& score, int i, int j) {
          smem.p[i][j] = d < kChain ? score : smem.p[i][j] + score;
          score = 0;
        });
      }
    }
    if (params.head_dim > kChain)
      each_score(s, row, col, [&](Acc& score, int i, int j) { score += smem.p[i][j]; });

    const Acc scale = static_cast<Acc>(params.scale);
    each_score(s, first_query + row, key + col, [&](Acc& score, int, int) { score *= scale; });
    if (Config::has_score) {
      // By way of shared memory, where a loop can index them: 32 copies of this code would not fit
      // in registers.
      each_score(s, row, col, [&](Acc& score, int i, int j) { smem.p[i][j] = score; });
#pragma unroll 4
      for (int n = 0; n < kRows * kCols; ++n) {
        const int i = row + n / kCols * kThreadRows, j = col + n % kCols * kThreadCols;
        if (first_query + i < seq.seqlen_q && key + j < seq.seqlen_k)
          smem.p[i][j] = changed(smem.p[i][j], params, seq, head, first_query + i, key + j);
      }
      each_score(s, row, col, [&](Acc& score, int i, int j) { score = smem.p[i][j]; });
    }
    if (key < common_begin || key > common_end - kTileN) {
      each_score(s, first_query + row, key + col, [&](Acc& score, int i, int j) {
        if (j - i < band.low || j - i > band.high || j >= seq.seqlen_k) score = -infinity();
      });
    }

#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      Acc new_max = row_max[i];
#pragma unroll
      for (int j = 0; j < kCols; ++j) new_max = fmax(new_max, s[i][j]);
      new_max = row_reduce(new_max, [](Acc a, Acc b) { return fmax(a, b); });
      const Acc shift = new_max == -infinity() ? 0 : new_max;  // or -inf - -inf would be NaN
      const Acc rescale = exp(row_max[i] - shift);
      row_max[i] = new_max;
      row_sum[i] *= rescale;
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        const Acc p = exp(s[i][j] - shift);
        row_sum[i] += p;
        smem.p[row + i * kThreadRows][col + j * kThreadCols] = p;
      }
#pragma unroll
      for (int c = 0; c < kVecsV; ++c)
#pragma unroll
        for (int f = 0; f < kVec; ++f) o[i][c][f] *= rescale;
    }

    for (int n = 0; n < kTileN; n += kDepthV) {
      __syncthreads();  // K, or the slab of V before this, has been used
      const bool odd = load_slab<kHeadDimV>(smem.v, v, key + n, 0);
      if (__syncthreads_or(odd))
        multiply_values<true>(o, smem, n);
      else
        multiply_values<false>(o, smem, n);
    }
  }

#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int query = first_query + row + i * kThreadRows;
    const Acc sum = row_reduce(row_sum[i], [](Acc a, Acc b) { return a + b; });
    if (query >= seq.seqlen_q) continue;
    const long long out_row = seq.begin_q + query;
    T* out = static_cast<T*>(params.out) + seq.index * params.out_stride.batch +
             out_row * params.out_stride.seq + head * params.out_stride.head;
    const Acc inverse = sum == 0 ? 0 : 1 / sum;  // 0: no key was seen
#pragma unroll
    for (int c = 0; c < kVecsV; ++c)
#pragma unroll
      for (int f = 0; f < kVec; ++f) {
        const int column = (col + c * kThreadCols) * kVec + f;
        if (column < params.head_dim_v) out[column] = static_cast<T>(o[i][c][f] * inverse);
      }
    if (params.lse != nullptr && col == 0) {
      const bool varlen = params.cu_seqlens_q != nullptr;  // then (heads_q, total)
      const long long lse_row =
          varlen ? head : static_cast<long long>(seq.index) * params.heads_q + head;
      static_cast<Acc*>(params.lse)[lse_row * params.seqlen_q + out_row] = row_max[i] + log(sum);
    }
  }
}
