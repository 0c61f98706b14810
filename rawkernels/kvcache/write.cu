// Puts new keys, rotated where asked (RoPE), and values into the slots that a page table says. Bound by memory.
//
//   k (total, heads, head_dim), v (total, heads, head_dim_v): the new tokens of all sequences, one after the other, strides
//   over tokens and heads free; pages (num_pages, page_size, heads, ...), strides free. Sequence b's new tokens are
//   cu_new[b] … cu_new[b + 1] - 1 and the last of its seq_lens[b]. cos, sin (max_position, pairs) float, or double.
//   A thread copies kLoads pieces of vec_bytes, Config::threads apart, so that neighbouring threads have neighbouring
//   pieces. A rotated piece reads its partners too, which another thread has brought into L1.
#include "decoding/params.cuh"

using T = Config::dtype;
constexpr int kVec = Config::vec_bytes / sizeof(T);
constexpr int kLoads = Config::loads;

template <class>
struct Angle {
  using type = float;
};
template <>
struct Angle<double> {
  using type = double;
};
using Acc = Angle<T>::type;

struct WriteParams {
  const void* k;
  const void* v;
  void* k_pages;
  void* v_pages;
  const int* page_table;
  const int* seq_lens;
  const int* cu_new;  // null: as many for each sequence
  const void* cos;    // null: no rotation
  const void* sin;
  long long k_token, k_head, v_token, v_head;  // strides
  PageStrides k_page, v_page;
  long long table_stride;
  int total, batch, heads, head_dim, head_dim_v, page_shift;
  int pairs;        // that are rotated
  int interleaved;  // pairs are features (2i, 2i + 1), not (i, i + pairs)
};

struct alignas(Config::vec_bytes) Vec {
  T x[kVec];
};

__device__ __forceinline__ int sequence_of(const WriteParams& params, int token) {
  if (params.cu_new == nullptr) return token / (params.total / params.batch);
  int low = 0, count = params.batch;  // the sequence is in [low, low + count)
  while (count > 1) {
    const int first = count / 2;
    const bool later = params.cu_new[low + first] <= token;
    low = later ? low + first : low;
    count = later ? count - first : first;
  }
  return low;
}

__device__ __forceinline__ int position_of(const WriteParams& params, int token, int sequence) {
  const int end = params.cu_new == nullptr ? (sequence + 1) * (params.total / params.batch) : params.cu_new[sequence + 1];
  return params.seq_lens[sequence] - (end - token);
}

// x holds features first … of the key at `key`, not rotated yet.
__device__ __forceinline__ void rotate(Vec& x, const WriteParams& params, const T* key, int first, int position) {
  const Acc* cos = static_cast<const Acc*>(params.cos) + position * static_cast<long long>(params.pairs);
  const Acc* sin = static_cast<const Acc*>(params.sin) + position * static_cast<long long>(params.pairs);
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    const int feature = first + e;
    if (feature >= 2 * params.pairs) continue;
    const bool second = params.interleaved ? feature % 2 : feature >= params.pairs;
    const int distance = params.interleaved ? 1 : params.pairs;
    const int pair = params.interleaved ? feature / 2 : feature - (second ? params.pairs : 0);
    const Acc own = static_cast<Acc>(x.x[e]);
    const Acc other = static_cast<Acc>(key[second ? feature - distance : feature + distance]);
    x.x[e] = static_cast<T>(own * cos[pair] + (second ? other : -other) * sin[pair]);
  }
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    write(const __grid_constant__ WriteParams params) {
  const int k_vecs = params.head_dim / kVec, vecs = k_vecs + params.head_dim_v / kVec;
  const int token_vecs = params.heads * vecs;
  const long long base = blockIdx.x * static_cast<long long>(kLoads * Config::threads);
  const int first_token = static_cast<int>(base / token_vecs), first_rest = static_cast<int>(base % token_vecs);
  Vec x[kLoads];
  const T* source[kLoads];
  T* target[kLoads];
  int position[kLoads];  // to rotate by; -1: not a key
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int rest = first_rest + i * Config::threads + static_cast<int>(threadIdx.x);
    const int token = first_token + rest / token_vecs, head = rest % token_vecs / vecs, vec = rest % vecs;
    target[i] = nullptr;
    if (token >= params.total) continue;
    const bool is_key = vec < k_vecs;
    const int column = (is_key ? vec : vec - k_vecs) * kVec;
    source[i] = is_key ? static_cast<const T*>(params.k) + token * params.k_token + head * params.k_head + column
                       : static_cast<const T*>(params.v) + token * params.v_token + head * params.v_head + column;
    x[i] = *reinterpret_cast<const Vec*>(source[i]);
    const int sequence = sequence_of(params, token);
    const int at = position_of(params, token, sequence);
    const long long page = params.page_table[sequence * params.table_stride + (at >> params.page_shift)];
    const int slot = at & ((1 << params.page_shift) - 1);
    const PageStrides& stride = is_key ? params.k_page : params.v_page;
    target[i] = static_cast<T*>(is_key ? params.k_pages : params.v_pages) + page * stride.page + slot * stride.seq +
                head * stride.head + column;
    position[i] = is_key ? at : -1;
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (target[i] == nullptr) continue;
    if (params.cos != nullptr && position[i] >= 0) {
      const int first = static_cast<int>((base + i * Config::threads + threadIdx.x) % vecs) * kVec;
      rotate(x[i], params, source[i] - first, first, position[i]);
    }
    *reinterpret_cast<Vec*>(target[i]) = x[i];
  }
}
