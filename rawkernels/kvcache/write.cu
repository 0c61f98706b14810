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
#include "kvcache/pages.cuh"
#include "tile/accumulator.cuh"
#include "tile/divisor.cuh"
#include "tile/vec.cuh"

using T = Config::dtype;
constexpr int kVec = Config::vec_bytes / sizeof(T);

using Acc = tile::Accumulator<T>;  // of angles

struct WriteParams {
  const void* k;
  const void* v;
  void* k_pages;
  void* v_pages;
  const int* page_table;
  const int* seq_lens;
  const int* cu_new;
  const void* cos;  // null: no rotation
  const void* sin;
  long long k_token, k_head, v_token, v_head;  // strides
  PageStrides k_page, v_page;
  long long table_stride;
  int total, batch, heads, head_dim, head_dim_v, page_shift, num_pages;
  int capacity;     // tokens that a sequence's row of the page table has entries for
  int uniform;      // new tokens of each sequence, where all have as many; else 0
  int lanes_shift;  // of a block's threads for a token
  int pairs;        // that are rotated
  int interleaved;  // pairs are features (2i, 2i + 1), not (i, i + pairs)
  // The divisions would come before the first load. The latter two: a head's vectors.
  tile::Divisor by_uniform, by_k_vecs, by_v_vecs;
  // With Config::any_cache:
  const int* slots;         // (total,): page * page_slots + slot; negative: no slot. null: as above
  const int* left_padding;  // (batch,): slots at the beginning that are not written; null: none
  int page_slots;           // of a page, or of a sequence's cache
  int max_position;         // rows of cos and sin
};

using Vec = tile::Vec<T, kVec>;

struct Slot {
  int position;  // by which a key is rotated
  int page, slot;
  bool exists;
};

// Where token `token` goes, which is at `position` of a sequence.
__device__ __forceinline__ Slot any_slot(const WriteParams& params, int token, int sequence,
                                         int position) {
  const int padding = params.left_padding != nullptr ? params.left_padding[sequence] : 0;
  Slot at = {position - padding, sequence, position, position >= max(padding, 0)};
  at.exists &= params.cos == nullptr || at.position < params.max_position;
  if (params.slots != nullptr) {
    const int place = params.slots[token];
    at.page = place / params.page_slots;
    at.slot = place - at.page * params.page_slots;
    at.exists &= place >= 0;
  } else {
    at.exists &= position < params.capacity;
    if (params.page_table != nullptr && at.exists) {
      const kvcache::PageTable table = {params.page_table, params.table_stride, params.page_shift,
                                        params.num_pages};
      at.page = *table.entry(sequence, position);
      at.slot = table.slot(position);
    }
  }
  at.exists &= static_cast<unsigned>(at.page) < static_cast<unsigned>(params.num_pages);
  return at;
}

__device__ __forceinline__ Slot find_slot(const WriteParams& params, int token) {
  if constexpr (Config::any_cache) {
    if (params.cu_new != nullptr && token >= params.cu_new[params.batch]) return {0, 0, 0, false};
    if (params.seq_lens == nullptr) return any_slot(params, token, 0, 0);
  }
  int sequence, end;
  if (params.uniform > 0) {
    sequence = tile::divided(token, params.by_uniform);
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
  if constexpr (Config::any_cache) return any_slot(params, token, sequence, position);
  if (static_cast<unsigned>(position) >= static_cast<unsigned>(params.capacity))
    return {position, 0, 0, false};
  const kvcache::PageTable table = {params.page_table, params.table_stride, params.page_shift,
                                    params.num_pages};
  const int page = *table.entry(sequence, position);
  return {position, page, table.slot(position), table.existing(page) == page};
}

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
