// Writes new keys, rotated where asked (RoPE), and values into the slots of a cache.
// Memory-bound.
//
//   k (total, heads, head_dim), v (total, heads, head_dim_v): the new tokens of all sequences, one
//   after the other, strides over tokens and heads free; pages (num_pages, page_size, heads, ...),
//   strides free. Sequence b's new tokens are cu_new[b] … cu_new[b + 1] - 1 and the last of its
//   seq_lens[b]. cos, sin (max_position, pairs) float, or double. A token's keys of all heads are
//   cut into vectors of vec_bytes, its values likewise: 1 << lanes_shift neighbouring threads copy
//   one of each. A token whose position or page does not exist is not written. 8192 tokens of 8
//   heads of 128, bfloat16: 18.2 to 18.5 µs on an H200 (2026-11-21), 85 to 86% of the copy ceiling.
//
//   With Config::any_cache, for cuattn.append_kv: a cache may also be contiguous, one page for each
//   sequence, and slots and left_padding may be given.
#include "kvcache/new_tokens.cuh"
#include "tile/accumulator.cuh"
#include "tile/vec.cuh"

using T = Config::dtype;
constexpr int kVec = Config::vec_bytes / sizeof(T);

using Acc = tile::Accumulator<T>;  // of angles

using Vec = tile::Vec<T, kVec>;

template <int n>
__device__ __forceinline__ tile::Vec<Acc, n> load_angles(const void* table, long long at) {
  return *reinterpret_cast<const tile::Vec<Acc, n>*>(static_cast<const Acc*>(table) + at);
}

// x holds features first … of a key at `key`, not rotated yet.
__device__ __forceinline__ void rotate(Vec& x, const WriteParams& params, const T* key, int first,
                                       int position) {
  const long long row = position * static_cast<long long>(params.pairs);
  if (kVec > 1 && params.pairs % kVec == 0) {  // whole vectors are rotated, or not at all
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

// Streaming loads and stores: the input is not read again, the cache not before all of it is
// written.
__device__ __forceinline__ Vec load(const T* source) {
  if constexpr (sizeof(Vec) == 16) {
    const uint4 x = __ldcs(reinterpret_cast<const uint4*>(source));
    return reinterpret_cast<const Vec&>(x);
  } else {
    return *reinterpret_cast<const Vec*>(source);
  }
}

__device__ __forceinline__ void store(T* target, const Vec& x) {
  if constexpr (sizeof(Vec) == 16)
    __stcs(reinterpret_cast<uint4*>(target), reinterpret_cast<const uint4&>(x));
  else
    *reinterpret_cast<Vec*>(target) = x;
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    write(const __grid_constant__ WriteParams params) {
  const int rows = Config::threads >> params.lanes_shift;
  const int token = blockIdx.x * rows + (threadIdx.x >> params.lanes_shift);
  const int vec =
      (blockIdx.y << params.lanes_shift) + (threadIdx.x & ((1 << params.lanes_shift) - 1));
  if (token >= params.total) return;
  const Slot at = find_slot(params, token);
  const int k_head = tile::divided(vec, params.by_k_vecs),
            v_head = tile::divided(vec, params.by_v_vecs);
  const int k_column = kVec * vec - k_head * params.head_dim;
  const int v_column = kVec * vec - v_head * params.head_dim_v;
  const T* const k =
      static_cast<const T*>(params.k) + token * params.k_token + k_head * params.k_head;
  const T* const v =
      static_cast<const T*>(params.v) + token * params.v_token + v_head * params.v_head;
  Vec keys, values;
  if (k_head < params.heads) keys = load(k + k_column);
  if (v_head < params.heads) values = load(v + v_column);
  if (!at.exists) return;  // not sooner: the loads do not wait for the page table
  if (k_head < params.heads) {
    if (params.cos != nullptr) rotate(keys, params, k, k_column, at.position);
    const kvcache::Pages<T> pages = {static_cast<T*>(params.k_pages), params.k_page};
    store(pages.row(at.page, at.slot, k_head) + k_column, keys);
  }
  if (v_head < params.heads) {
    const kvcache::Pages<T> pages = {static_cast<T*>(params.v_pages), params.v_page};
    store(pages.row(at.page, at.slot, v_head) + v_column, values);
  }
}
