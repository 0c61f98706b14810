// New tokens of a batch, and the slots of a cache that they go to. Declared as CACHE_WRITE_PARAMS
// in cuattn/gpu/params.py too.
#pragma once

#include "kvcache/pages.cuh"
#include "tile/divisor.cuh"

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
