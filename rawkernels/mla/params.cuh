// What the kernels of latent attention are told about one call beside DecodeParams. Declared as
// MLA_PARAMS in cuattn/gpu/params.py too.
//
// A token's row is its latent, head_dim_v wide, and its rotated part, head_dim - head_dim_v wide.
// DecodeParams has the latents as k (and as v), the queries' latent parts as q, and one key head.
//
// With `indices` every query is a sequence of DecodeParams of its own: its keys are the entries of
// its row of `indices`, `capacity` of them, each the position of a token in the sequence that the
// query belongs to.
#pragma once

#include "decoding/schedule.cuh"
#include "tile/ragged.cuh"
#include "tile/visibility.cuh"

// Partial results of a tile of rows that combine.cu merges, left by a block that has one of them.
// It is this call's if it has its id.
struct alignas(16) CombineTask {
  unsigned long long call_id;
  int count;                                 // of partial results
  int first_slot, second_slot, slot_stride;  // where they are
  int sequence, begin_q, row_tile, rows, head;

  __device__ __forceinline__ int slot(int i) const {
    return i == 0 ? first_slot : second_slot + (i - 1) * slot_stride;
  }
};
static_assert(sizeof(CombineTask) == 48, "TASK_BYTES of cuattn/gpu/dispatch/mla.py");

struct MlaParams {
  const void* q_rope;
  const void* rope;            // pages of the rotated parts
  const int* indices;          // (queries, capacity); null: all tokens of a sequence are its keys
  const int* lengths;          // of the sequences that `indices` are about
  const int* cu_tokens;        // of them: where each one's queries begin; null: `tokens` of each
  void* parts;                 // for partial results, PartialTile each
  unsigned long long call_id;  // a random number of this call's own
  CombineTask* tasks;          // null: nothing is to be merged
  Strides q_rope_stride;
  PageStrides rope_stride;
  long long index_stride;
  int tokens, sequences;
  int row_tiles;                  // of a sequence, where all have as many queries
  int window_left, window_right;  // with `indices`, where DecodeParams has none
  int capacity;                   // tokens that a sequence's pages have room for
  int query_rows;    // of a tile, that TMA loads as one box; 0: rows are copied one by one
  int key_rows;      // of a box of codes: keys of a page that TMA copies at a time; 0: it cannot
  int merges_parts;  // thread blocks merge partial results, which lie in DecodeParams::workspace
};

namespace mla {

// Where the keys of a work tile are: a sequence's row of the page table, and the tokens that a
// query with a row of indices may see.
struct Tokens {
  const int* indices;  // null: key j is token j
  int sequence;
  int begin, end;  // tokens outside are not seen

  __device__ __forceinline__ int of_key(int key) const {
    return indices == nullptr ? key : indices[key];
  }
  __device__ __forceinline__ bool has(int token) const { return token >= begin && token < end; }
};

// The sequence that a query of all sequences' end to end belongs to, the last one for queries that
// belong to none.
__device__ __forceinline__ int sequence_of_query(const MlaParams& mla, int query) {
  if (mla.cu_tokens == nullptr) return query / mla.tokens;
  int low = 0, high = mla.sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (mla.cu_tokens[middle] <= query)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// The keys of sequence `index` of DecodeParams.
__device__ __forceinline__ Tokens tokens_of(const DecodeParams& params, const MlaParams& mla,
                                            int index) {
  if (mla.indices == nullptr) return {nullptr, index, 0, kUnbounded};
  const int sequence = sequence_of_query(mla, index);
  const int begin = mla.cu_tokens == nullptr ? sequence * mla.tokens : mla.cu_tokens[sequence];
  const int end = mla.cu_tokens == nullptr ? begin + mla.tokens : mla.cu_tokens[sequence + 1];
  const int length = tile::clamped(mla.lengths[sequence], 0, mla.capacity);
  const tile::Visibility visibility = {-mla.window_left, mla.window_right + 1, length};
  const tile::Range keys = visibility.keys(length - (end - index));
  return {mla.indices + index * mla.index_stride, sequence, max(keys.begin, 0), keys.end};
}

// How many rows a sequence has from a tile's first on: the tile's, and those of tiles behind it.
template <int kRows>
__device__ __forceinline__ int rows_from(const DecodeParams& params, const decoding::Split& split) {
  return split.seq.seqlen_q * params.group - split.row_tile * kRows;
}

}  // namespace mla
