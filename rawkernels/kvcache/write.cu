// Puts new keys, rotated where asked (RoPE), and values into the slots that a page table says.
// Bound by memory.
//
//   k (total, heads, head_dim), v (total, heads, head_dim_v): the new tokens of all sequences, one
//   after the other, strides over tokens and heads free; pages (num_pages, page_size, heads, ...),
//   strides free. Sequence b's new tokens are cu_new[b] … cu_new[b + 1] - 1 and the last of its
//   seq_lens[b]. cos, sin (max_position, pairs) float, or double. A token's features are cut into
//   pieces of vec_bytes, K's of all heads and then V's, which 1 << lanes_shift neighbouring threads
//   copy; a thread has the same piece of kLoads tokens on its way at a time.
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
  const int* cu_new;
  const void* cos;  // null: no rotation; Config::rope has to be set for one
  const void* sin;
  long long k_token, k_head, v_token, v_head;  // strides
  PageStrides k_page, v_page;
  long long table_stride;
  int total, batch, heads, head_dim, head_dim_v, page_shift;
  int uniform;      // new tokens of each sequence, where all have as many; else 0
  int lanes_shift;  // of threads for a token
  int pairs;        // that are rotated
  int interleaved;  // pairs are features (2i, 2i + 1), not (i, i + pairs)
};

template <class Number, int n>
struct alignas(n * sizeof(Number) < 16 ? n * sizeof(Number) : 16) Pack {
  Number x[n];
};
using Vec = Pack<T, kVec>;

struct Slot {
  int position, page, slot;
};

__device__ __forceinline__ Slot find_slot(const WriteParams& params, int token) {
  int sequence, end;
  if (params.uniform > 0) {
    sequence = token / params.uniform;
    end = (sequence + 1) * params.uniform;
  } else {
    int count = params.batch;  // the sequence is in [sequence, sequence + count)
    sequence = 0;
    while (count > 1) {
      const int first = count / 2;
      const bool later = params.cu_new[sequence + first] <= token;
      sequence = later ? sequence + first : sequence;
      count = later ? count - first : first;
    }
    end = params.cu_new[sequence + 1];
  }
  const int position = params.seq_lens[sequence] - (end - token);
  const int page =
      params.page_table[sequence * params.table_stride + (position >> params.page_shift)];
  return {position, page, position & ((1 << params.page_shift) - 1)};
}

template <int n>
__device__ __forceinline__ Pack<Acc, n> load_angles(const void* table, long long at) {
  return *reinterpret_cast<const Pack<Acc, n>*>(static_cast<const Acc*>(table) + at);
}

// x holds features first … of a key at `key`, not rotated yet.
__device__ __forceinline__ void rotate(Vec& x, const WriteParams& params, const T* key, int first,
                                       int position) {
  const long long row = position * static_cast<long long>(params.pairs);
  if (kVec > 1 && params.pairs % kVec == 0) {  // whole pieces are rotated, or not at all
    if (first >= 2 * params.pairs) return;
    if (params.interleaved) {
      constexpr int kPairs = kVec > 1 ? kVec / 2 : 1;
      const auto cos = load_angles<kPairs>(params.cos, row + first / 2);
      const auto sin = load_angles<kPairs>(params.sin, row + first / 2);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const Acc a = static_cast<Acc>(x.x[2 * i]), b = static_cast<Acc>(x.x[(2 * i + 1) % kVec]);
        x.x[2 * i] = static_cast<T>(a * cos.x[i] - b * sin.x[i]);
        x.x[(2 * i + 1) % kVec] = static_cast<T>(b * cos.x[i] + a * sin.x[i]);
      }
    } else {
      const bool second = first >= params.pairs;
      const int pair = second ? first - params.pairs : first;
      const Vec other = *reinterpret_cast<const Vec*>(key + (second ? pair : first + params.pairs));
      const auto cos = load_angles<kVec>(params.cos, row + pair);
      const auto sin = load_angles<kVec>(params.sin, row + pair);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const Acc turned = static_cast<Acc>(other.x[i]) * sin.x[i];
        x.x[i] = static_cast<T>(static_cast<Acc>(x.x[i]) * cos.x[i] + (second ? turned : -turned));
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const int feature = first + i;
    if (feature >= 2 * params.pairs) continue;
    const bool second = params.interleaved ? feature % 2 : feature >= params.pairs;
    const int distance = params.interleaved ? 1 : params.pairs;
    const int pair = params.interleaved ? feature / 2 : feature - (second ? params.pairs : 0);
    const Acc turned = static_cast<Acc>(key[second ? feature - distance : feature + distance]) *
                       static_cast<const Acc*>(params.sin)[row + pair];
    const Acc cos = static_cast<const Acc*>(params.cos)[row + pair];
    x.x[i] = static_cast<T>(static_cast<Acc>(x.x[i]) * cos + (second ? turned : -turned));
  }
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    write(const __grid_constant__ WriteParams params) {
  __shared__ Slot slots[Config::threads / 32 * kLoads];
  const int lanes = 1 << params.lanes_shift;  // at least 32
  const int rows = Config::threads >> params.lanes_shift;
  const int first = blockIdx.x * rows * kLoads;
  const int lane = threadIdx.x & (lanes - 1), row = threadIdx.x >> params.lanes_shift;
  const int k_vecs = params.head_dim / kVec, vecs = k_vecs + params.head_dim_v / kVec;
  if (threadIdx.x < rows * kLoads && first + threadIdx.x < params.total)
    slots[threadIdx.x] = find_slot(params, first + threadIdx.x);
  bool ready = false;
  for (int piece = lane; piece < (params.heads * vecs + lanes - 1 & -lanes); piece += lanes) {
    const int k_pieces = params.heads * k_vecs;
    const bool is_key = piece < k_pieces, inside = piece < params.heads * vecs;
    const int head = is_key ? piece / k_vecs : (piece - k_pieces) / (vecs - k_vecs);
    const int column =
        kVec * (is_key ? piece - head * k_vecs : piece - k_pieces - head * (vecs - k_vecs));
    const T* source = is_key ? static_cast<const T*>(params.k) + head * params.k_head
                             : static_cast<const T*>(params.v) + head * params.v_head;
    const long long stride = is_key ? params.k_token : params.v_token;
    Vec x[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int token = first + row + i * rows;
      if (inside && token < params.total)
        x[i] = *reinterpret_cast<const Vec*>(source + token * stride + column);
    }
    if (!ready) __syncthreads();
    ready = true;
    const PageStrides& to = is_key ? params.k_page : params.v_page;
    T* target = static_cast<T*>(is_key ? params.k_pages : params.v_pages) + head * to.head + column;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int token = first + row + i * rows;
      if (!inside || token >= params.total) continue;
      const Slot at = slots[row + i * rows];
      if (Config::rope && is_key && params.cos != nullptr)
        rotate(x[i], params, source + token * stride, column, at.position);
      *reinterpret_cast<Vec*>(target + at.page * to.page + at.slot * to.seq) = x[i];
    }
  }
}
