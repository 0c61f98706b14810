// A tile of attention/forward_sm90.cu: 64 * Config::warpgroups rows of queries, and the keys that
// they see. Where TMA finds them, where results go, and what else the kernel is told about a call.
#pragma once

#include "attention/params.cuh"
#include "kvcache/pages.cuh"
#include "ptx/tma.cuh"
#include "tile/divisor.cuh"
#include "tile/dropout.cuh"
#include "tile/ragged.cuh"
#include "tile/visibility.cuh"

using Params = tile::ParamsOf<ForwardParams, Config::dropout>::Type;
using Out = Config::out_dtype;  // of what is written: the inputs' type, or float

constexpr int kTileM = 64 * Config::warpgroups;

// Scores are those of cuattn.flash_attention, which attention/score_sm90.cuh computes in its own
// way, with rows of bias and mask in shared memory (Config::elementwise). A variant's own functor
// (tile/score_mod.cuh) finds everything in global memory.
constexpr bool kContractScores = tile::IsContract<ScoreMod<Config::dtype, true, false>>::value;
constexpr bool kMayMask = Config::elementwise || !kContractScores;
static_assert(kContractScores || (Config::score && !Config::elementwise),
              "a functor of the variant's own takes the place of softcap and ALiBi, and reads bias "
              "and mask itself");

// Rows of k and v lie as cu_seqlens_k says.
constexpr bool kRaggedKeys = Config::varlen && !Config::paged_kv && !Config::seq_lens;
// Sequences whose lengths only the device knows: thread blocks take tiles as they get free.
constexpr bool kDynamic = Config::varlen || Config::seq_lens;

struct Sm90Params {
  // Dimensions (head_dim, row, head, outer), see tile::TmaRows; with Config::pack_gqa q's are
  // (head_dim, head, row, outer), with Config::paged_kv those of k and v (head_dim, slot, head,
  // page), with Config::key_groups (column of a panel, slot of a group, panel, group, head and
  // page).
  ptx::TensorMap q, k, v;
  ptx::TensorMap bias, mask;      // (key, query, head, batch), of length 1 where broadcast
  ptx::TensorMap k_pair, v_pair;  // pairs_of_boxes: k and v, in boxes of twice as many keys
  // The dynamic scheduler's: next_tile holds once `initialised` is the launch's launch_id. Any
  // content will do before.
  struct Scheduler {
    unsigned long long initialised;
    unsigned next_tile;
  }* scheduler;
  unsigned long long launch_id;  // a random number of this launch's own
  int section;  // heads that are worked on together; 0: fixed-length tiles cost the same
  // Scores are softcap * tanh(cap_scale * q·k), or scale * q·k where cap_scale is 0. The last
  // factor waits: kernels keep scores over score_scale, unless there is a bias, and exp(x) is
  // exp2(x * log2(e)). A functor of the variant's own gives them in natural units.
  float cap_scale, score_scale, scale_log2;
  // Config::paged_kv: a kvcache::PageTable. One TMA box has 2^box_shift keys, or fewer where one
  // is a whole block.
  const int* page_table;
  unsigned char page_shift, box_shift;
  bool bias_mapped, mask_mapped;  // whether TMA can address them
  bool pairs_of_boxes;            // pages have room for two of the boxes that a block consists of
  // Config::split_kv: the keys of each tile are cut into as many parts, with a result each. Those
  // of a part follow those of the part before: out is (num_splits, <what it is without>).
  int num_splits;
  const int* seq_lens;  // Config::seq_lens: (batch,), how many keys each sequence has
  int table_stride, num_pages;
  tile::Divisor by_queries_of_tile;  // Config::pack_gqa
  int min_queries;  // ragged rows over caches: sequences of fewer are left to another launch
  int blocks;       // where some of them begin when that launch has ended; else 0
  int page_heads;   // Config::key_groups: the stride of a page in those of a head
  // Config::rope_panel: the last panel of q's columns, and of k's, which all heads share. In q and
  // k these are then missing.
  ptx::TensorMap q_rope, k_rope;
};

// What a Config says of keys and values that are codes (attention/forward_codes_sm90.cu): fields
// that those of other kernels do not have.
template <class Any, class = void>
struct CodeOptions {
  static constexpr int k_format = 0, v_format = 0;        // as tile::Format
  static constexpr int k_row_bytes = 0, v_row_bytes = 0;  // of codes
  static constexpr int expand_warps = 0;                  // that make numbers of codes
  static constexpr int expand_registers = 0;              // of their threads
  static constexpr int code_stages = 0;                   // of a block's codes
  static constexpr bool shares = false;                   // with other thread blocks
  static constexpr bool rotates_queries = false;          // as keys are
};
template <class Any>
struct CodeOptions<Any, decltype(void(Any::expand_warps))> : Any {};

constexpr int kExpandWarps = CodeOptions<Config>::expand_warps;
constexpr bool kReadsCodes = kExpandWarps > 0;
constexpr bool kSharesCodes = CodeOptions<Config>::shares;
constexpr bool kRotatesQueries = CodeOptions<Config>::rotates_queries;

// Scales of rows of codes, bfloat16, by page (or sequence), token and head; with codes of 4 bits a
// minimum lies behind each, both in an aligned word.
struct CodeScales {
  const void *k_scale, *v_scale;
  ScaleStrides k_scale_stride, v_scale_stride;
  int team;        // Config::shares: how many thread blocks expand codes together
  int ring_slots;  // of a team, a power of two: for the numbers of a block's keys and values
};
struct Sm90CodesParams : Sm90Params {
  CodeScales scales;
};
template <bool kOfCodes>
struct Sm90ArgumentsOf {
  using Type = Sm90Params;
};
template <>
struct Sm90ArgumentsOf<true> {
  using Type = Sm90CodesParams;
  static_assert(sizeof(Type) == (sizeof(Sm90Params) + sizeof(CodeScales) + 63) / 64 * 64,
                "the launching code packs the one after the other");
};
using Sm90Arguments = Sm90ArgumentsOf<kReadsCodes>::Type;

// How many thread blocks work on tiles together.
__device__ __forceinline__ int team_size(const Sm90Params&) { return 1; }
__device__ __forceinline__ int team_size(const Sm90CodesParams& sm90) { return sm90.scales.team; }

__device__ __forceinline__ kvcache::PageTable page_table(const Sm90Params& sm90) {
  return {sm90.page_table, sm90.table_stride, sm90.page_shift, sm90.num_pages};
}

// With Config::pack_gqa the rows of a tile are those of all query heads that share a key head: a
// warpgroup's 64 rows are as many queries as fit with all of these heads, query after query, and
// the rest idle.
__device__ __forceinline__ int queries_of_tile(const ForwardParams& params) {
  if constexpr (Config::pack_gqa) return params.queries_of_64_rows * Config::warpgroups;
  return kTileM;
}
// n / queries_of_tile, rounded down, for n >= 0.
__device__ __forceinline__ int divided_by_tile(const Sm90Params& sm90, int n) {
  if constexpr (Config::pack_gqa) return tile::divided(n, sm90.by_queries_of_tile);
  return n / kTileM;
}

__device__ __forceinline__ int num_splits(const Sm90Params& sm90) {
  if constexpr (Config::split_kv) return sm90.num_splits;
  return 1;
}

// Which part of the keys a tile has, as a base that is empty where keys are not split.
template <bool kIsSplit>
struct SplitOfTile {
  __device__ __forceinline__ int split() const { return 0; }
  __device__ __forceinline__ void set_split(int) {}
};
template <>
struct SplitOfTile<true> {
  int part;
  __device__ __forceinline__ int split() const { return part; }
  __device__ __forceinline__ void set_split(int split) { part = split; }
};

// Config::even_keys: which thread blocks have the tile's keys between them, as a base that is empty
// where one has all.
template <bool kIsEven>
struct EvenPartsOfTile {
  __device__ __forceinline__ int first_block() const { return 0; }
  __device__ __forceinline__ int parts() const { return 1; }
  __device__ __forceinline__ void set_parts(int, int) {}
};
template <>
struct EvenPartsOfTile<true> {
  int first, count;  // each is Sm90Params::section thread blocks behind the one before
  __device__ __forceinline__ int first_block() const { return first; }
  __device__ __forceinline__ int parts() const { return count; }
  __device__ __forceinline__ void set_parts(int first_block, int parts) {
    first = first_block;
    count = parts;
  }
};

// With a team, the end of the blocks of keys that some of its tiles sees, as a base that is empty
// where a thread block expands codes for itself.
template <bool kIsShared>
struct TeamOfTile {
  __device__ __forceinline__ void set_team_end(int) {}
};
template <>
struct TeamOfTile<true> {
  int team_end;
  __device__ __forceinline__ void set_team_end(int block) { team_end = block; }
};

struct Tile : SplitOfTile<Config::split_kv>,
              EvenPartsOfTile<Config::even_keys>,
              TeamOfTile<kSharesCodes> {
  tile::TmaRows queries, keys;
  int row;                     // the first of the tile's rows; negative: no tiles are left
  int head, head_kv, batch;    // with pack_gqa, `head` is the first of the group
  int block_begin, block_end;  // blocks of keys that some query of the tile sees

  __device__ __forceinline__ bool empty() const { return block_begin == block_end; }

  // Of a part: all keys.
  __device__ __forceinline__ Tile with_all_keys() const {
    Tile all = *this;
    all.block_begin = 0;
    all.block_end = (keys.length + Config::tile_n - 1) / Config::tile_n;
    return all;
  }

  __device__ __forceinline__ int diagonal() const { return keys.length - queries.length; }

  // ------------------------------------------------------------------------- rows: (query, head)

  struct Packed {
    int query, head;
    bool used;
  };
  __device__ __forceinline__ Packed packed(const ForwardParams& params, int row) const {
    const int index = row % 64, query = index * params.group_magic >> 16;
    return {row / 64 * params.queries_of_64_rows + query, head + index - query * params.group,
            query < params.queries_of_64_rows};
  }

  // Rows are queries where they are not packed. (Said with `if constexpr` wherever consumers ask: a
  // function for it makes NVRTC 13.5 order their code differently, and spill.)
  __device__ __forceinline__ int query_of(const ForwardParams& params, int row) const {
    if constexpr (Config::pack_gqa) return packed(params, row).query;
    return row;
  }

  __device__ __forceinline__ bool exists(const ForwardParams& params, int row) const {
    if constexpr (Config::pack_gqa) {
      const Packed at = packed(params, row);
      return at.used && at.query < queries.length;
    }
    return row < queries.length;
  }

  // ------------------------------------------------------- the keys that a query sees by position

  // A query's row is its position among the keys.
  __device__ __forceinline__ tile::Visibility visibility(const ForwardParams& params) const {
    return {-params.window_left, params.window_right + 1, keys.length};
  }

  // From first_key to before end_key.
  __device__ __forceinline__ int first_key(const ForwardParams& params, int query) const {
    return Config::bound_left ? visibility(params).keys(query + diagonal()).begin : 0;
  }

  __device__ __forceinline__ int end_key(const ForwardParams& params, int query) const {
    return Config::bound_right ? visibility(params).keys(query + diagonal()).end : keys.length;
  }

  // Whether none of a consumer's 64 rows sees the tile's first block, or its last.
  __device__ __forceinline__ bool hides_first_block(const ForwardParams& params,
                                                    int consumer) const {
    int first = row + 64 * consumer;
    if constexpr (Config::pack_gqa) first = query_of(params, first);
    return first_key(params, first) >= (block_begin + 1) * Config::tile_n &&
           block_end - block_begin > 1;
  }
  __device__ __forceinline__ bool hides_last_block(const ForwardParams& params,
                                                   int consumer) const {
    int end = row + 64 * consumer + 64;
    if constexpr (Config::pack_gqa) end = query_of(params, end);
    const int last = min(end, queries.length) - 1;
    return end_key(params, last) <= (block_end - 1) * Config::tile_n && block_end - block_begin > 1;
  }

  // Blocks in which some of the rows from `first` to before `end`, multiples of 64, does not see
  // some key: those before `before`, and from `from` on.
  struct Partial {
    int before, from;

    __device__ __forceinline__ bool has(int block) const {
      return block >= from || (Config::bound_left && block < before);
    }
  };
  __device__ __forceinline__ Partial partial(const ForwardParams& params, int first,
                                             int end) const {
    if constexpr (Config::pack_gqa) {
      first = query_of(params, first);
      end = query_of(params, end);
    }
    const int first_key_of_last = max(first_key(params, end - 1), 0);
    return {(first_key_of_last + Config::tile_n - 1) / Config::tile_n,
            max(end_key(params, first), 0) / Config::tile_n};
  }

  // Blocks whose values the nonfinite filter goes through: those that are hidden from some query of
  // the tile. Slots past a sequence's end hold anything with Config::seq_lens; else TMA gives zeros
  // for them.
  __device__ __forceinline__ Partial filtered(const ForwardParams& params) const {
    if ((kMayMask && params.mask != nullptr)) return {0, 0};
    Partial filtered = partial(params, row, row + kTileM);
    int first = row;
    if constexpr (Config::pack_gqa) first = query_of(params, row);
    if (!Config::seq_lens && end_key(params, first) == keys.length) filtered.from = block_end;
    return filtered;
  }

  __device__ __forceinline__ bool sees(const Params& params, int row, int key) const {
    int query = row;
    if constexpr (Config::pack_gqa) {
      if (!packed(params, row).used) return false;
      query = packed(params, row).query;
    }
    if (query >= queries.length || key < first_key(params, query) || key >= end_key(params, query))
      return false;
    if constexpr (Config::dropout)
      if (tile::is_dropped(tile::dropout_of(params), query, key, batch * params.heads_q + head))
        return false;
    const ScoreStrides& stride = params.mask_stride;
    return !kMayMask || params.mask == nullptr ||
           params.mask[batch * stride.batch + head * stride.head + query * stride.row +
                       key * stride.col];
  }

  // ----------------------------------------------------------------------------- where things lie

  __device__ __forceinline__ long long value_offset(const ForwardParams& params,
                                                    const Sm90Params& sm90, int key) const {
    if constexpr (Config::paged_kv) {
      const kvcache::PageTable table = page_table(sm90);
      return table.page(batch, key) * params.v_stride.batch + head_kv * params.v_stride.head +
             table.slot(key) * params.v_stride.seq;
    }
    const int first = kRaggedKeys ? keys.outer - keys.length : 0;
    return batch * (kRaggedKeys ? 0 : params.v_stride.batch) + head_kv * params.v_stride.head +
           (first + key) * params.v_stride.seq;
  }

  // Where a row's results lie, in elements of out and of lse.
  __device__ __forceinline__ long long out_offset(const ForwardParams& params, int row) const {
    int query = row, head = this->head;
    if constexpr (Config::pack_gqa) {
      query = packed(params, row).query;
      head = packed(params, row).head;
    }
    const int first = Config::varlen ? queries.outer - queries.length : 0;
    long long offset = batch * (Config::varlen ? 0 : params.out_stride.batch) +
                       head * params.out_stride.head + (first + query) * params.out_stride.seq;
    if constexpr (Config::split_kv)
      offset += split() * (Config::varlen ? params.seqlen_q * params.out_stride.seq
                                          : params.batch * params.out_stride.batch);
    return offset;
  }

  __device__ __forceinline__ long long lse_offset(const ForwardParams& params, int row) const {
    int query = row, head = this->head;
    if constexpr (Config::pack_gqa) {
      query = packed(params, row).query;
      head = packed(params, row).head;
    }
    const int first = Config::varlen ? queries.outer - queries.length : 0;
    long long outer = Config::varlen ? 0 : batch;
    if constexpr (Config::split_kv)
      outer += split() * static_cast<long long>(Config::varlen ? 1 : params.batch);
    return (outer * params.heads_q + head) * params.seqlen_q + first + query;
  }

  // ------------------------------------------------------------------------------------- blocks

  // Finds the blocks of keys once everything else is known.
  __device__ __forceinline__ void find_blocks(const ForwardParams& params, const Sm90Params& sm90) {
    int first_query = row, end_query = row + kTileM;
    if constexpr (Config::pack_gqa) {
      first_query = query_of(params, first_query);
      end_query = query_of(params, end_query);
    }
    const int end = max(0, end_key(params, min(end_query, queries.length) - 1));
    const int first = max(0, first_key(params, first_query));
    block_end = (end + Config::tile_n - 1) / Config::tile_n;
    block_begin = first < end ? first / Config::tile_n : block_end;
    if constexpr (Config::split_kv) {
      const long long blocks = block_end - block_begin;
      block_end = block_begin + blocks * (split() + 1) / sm90.num_splits;
      block_begin += blocks * split() / sm90.num_splits;
    }
  }
};
