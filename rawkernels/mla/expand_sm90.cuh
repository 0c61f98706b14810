// The producing warps of mla/decode_sm90.cu where latents are codes: eight, for both buffers in
// turn. A warp has 8 keys of each block, whose codes it expands to 16-bit numbers with their scale,
// and stores as TMA would have. What is rotated is copied by cp.async.
//
// A warp reads rows of codes, 16 a lane. The first rows of its next block are on their way to
// registers while the buffer is in use. The others are copied into the buffer itself by cp.async as
// soon as it is free: a lane's codes to where the same lane expands later rows to, so that lanes
// need not wait for each other. A warp finds the keys of four blocks at a time, a key for each
// lane, and tells L2 of their lines, lane by lane: a bulk prefetch takes its address from a uniform
// register, for which the lanes of a warp would take turns.
#pragma once

#include "mla/codes.cuh"
#include "mla/lookup.cuh"
#include "mla/produce_sm90.cuh"
#include "ptx/load.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/registers.cuh"

namespace mla {

// The keys of a split: tokens of a sequence, or of a query's list of them. Registers are short, so
// pointers are kept in place of what they are computed from.
struct KeysOfSplit {
  const int* list;   // of the query's tokens; null: key j is token j
  const int* pages;  // of the sequence that has the tokens
  int begin, end;    // of the tokens that are keys
  int last;          // the split's last key, and one more

  __device__ __forceinline__ KeysOfSplit(const DecodeParams& params, const MlaParams& mla,
                                         const decoding::Split& split) {
    const Tokens tokens = tokens_of(params, mla, split.seq.index);
    list = tokens.indices;
    pages = page_table(params).entry(tokens.sequence, 0);
    // Keys that are places in a list begin where a split does.
    begin = list == nullptr ? split.begin : tokens.begin;
    end = list == nullptr ? split.end : tokens.end;
    last = split.end;
  }
  // The token that a key is, which may be none of the split's.
  __device__ __forceinline__ int token(const MlaParams& mla, int key) const {
    return mla.indices == nullptr ? key : key < last ? list[key] : -1;
  }
  __device__ __forceinline__ bool has(int token) const { return token >= begin && token < end; }
  // The entry of the page table for a token.
  __device__ __forceinline__ int entry(const DecodeParams& params, int token) const {
    return pages[token >> params.page_shift];
  }
};

// What a warp does not need while it loads keys, and its first lane counts on: codes take the
// registers.
struct BetweenSplits {
  Schedule schedule;
  tile::PipelineState<kQueue> queue;
  unsigned blocks = 0;  // so far
};
struct ExpanderSmem : Smem {
  BetweenSplits warps[kProducers];
  decoding::Split splits[kProducers];
  KeysOfSplit keys[kProducers];
  // Of the keys that each warp has found, of 128 columns each: as many more to a row that lanes
  // with different columns read other banks.
  alignas(16) float scales[kProducers][kLatent / kScaleColumns][32 + 4];
};

template <int kFormat>
struct Expander {
  static constexpr int kBatch = 4;          // rows that are expanded at a time
  static constexpr int kHeldRows = kBatch;  // a block's first, requested in advance
  static constexpr int kCopiedRows = kWarpKeys - kHeldRows;
  static constexpr int kFound = 32 / kWarpKeys;  // blocks, at a time
  static constexpr int kPieces = kLatent / kScaleColumns;
  static_assert(kLatent == 32 * 16, "a lane has 16 codes of a row");
  static_assert(!kExpands || kWarpKeys == 8, "which of a warp's keys exist is a byte");

  ExpanderSmem& smem;
  const DecodeParams& params;
  const MlaParams& mla;
  unsigned thread;      // read anew for each block: nothing that is worked out from it is kept
  uint4 codes[kBatch];  // of the rows that are expanded next
  // Where a key has its codes, in 16 bytes, or kNowhere; and where what is rotated is.
  static constexpr unsigned kNowhere = ~0u;
  struct Row {
    unsigned chunk, rope_chunk;
  };
  Row here;             // of this lane's key of the present blocks
  unsigned first_lane;  // which has the present block's first key
  // This lane's key of the blocks that follow, and what has been found out about it, in the same
  // registers: its token and the entry of the page table, or kNowhere and nothing; then its row.
  int key;
  Row later;
  StoredScale scales[kPieces];

  // Of all producing warps.
  __device__ __forceinline__ unsigned warp() const { return thread / 32 % kProducers; }
  __device__ __forceinline__ unsigned first_key() const { return warp() * kWarpKeys; }
  __device__ __forceinline__ unsigned lane() const { return thread % 32; }
  __device__ __forceinline__ bool has_columns() const {
    return static_cast<int>(lane() * 16) < params.head_dim_v;
  }

  // Which row is this lane's `row`-th: two neighbouring rows are swapped in every second panel, so
  // that no two lanes that store at the same time meet in a bank.
  __device__ __forceinline__ unsigned own_row(unsigned row) const { return row ^ lane() / 4 % 2; }

  // Where a chunk of the warp's rows lies in a panel, as Panel::at has it.
  __device__ __forceinline__ unsigned at(unsigned row, unsigned chunk) const {
    return (first_key() + row) * Panel::kRowBytes + (chunk ^ row) * 16;
  }
  // Where this lane's `row`-th row begins in the buffer, less that of its first, where
  // the bits of a row and of a chunk are apart. To be combined by xor.
  __device__ __forceinline__ static constexpr unsigned row_bits(int row) {
    return row * Panel::kRowBytes | row % 8 * 16;
  }
  // The same of a row's codes: of two rows in the place of one, the last ones. A row is expanded to
  // where codes are of rows before it, or its own.
  __device__ __forceinline__ static constexpr unsigned code_bits(int row) {
    const int copied = row - kHeldRows;
    return row_bits(kWarpKeys - kCopiedRows / 2 + copied / 2) ^ copied % 2 * 16;
  }

  // Requests this lane's codes of the first rows; something else where they do not exist.
  __device__ __forceinline__ void request() {
#pragma unroll
    for (int i = 0; i < kHeldRows; ++i) {
      const unsigned its_chunk = __shfl_sync(~0u, here.chunk, first_lane + own_row(i));
      const unsigned at = its_chunk == kNowhere ? 0 : its_chunk;
      codes[i] =
          ptx::load_16(static_cast<const uint4*>(params.k) + (at + (has_columns() ? lane() : 0)));
    }
  }

  // Keys of a split come next.
  __device__ __forceinline__ void start(const decoding::Split& split) {
    if (lane() == 0) keys() = KeysOfSplit(params, mla, split);
    __syncwarp();
    key = split.origin + lane() / kWarpKeys * kBlockKeys + first_key() + lane() % kWarpKeys;
    ask_token();
    ask_page();
    ask_row();
    take_found();
    request();
  }
  __device__ __forceinline__ KeysOfSplit& keys() const { return smem.keys[warp()]; }
  // Finds the blocks that follow, a step while each block is loaded: no step waits for a load.
  __device__ __forceinline__ void ask_token() {
    later.chunk = keys().token(mla, key);
    key += kFound * kBlockKeys;
  }
  __device__ __forceinline__ void ask_page() {
    if (keys().has(later.chunk))
      later.rope_chunk = keys().entry(params, later.chunk);
    else
      later.chunk = kNowhere;
  }
  __device__ __forceinline__ void ask_row() {
    const bool exists = later.chunk != kNowhere;
    const kvcache::PageTable table = page_table(params);
    const Place place = {exists ? table.existing(later.rope_chunk) : 0, table.slot(later.chunk),
                         exists};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) scales[i].load(params, place.page, place.slot, i, exists);
    if (!exists) return;
    later = {place.in_chunks(params.k_stride, 4), place.in_chunks(mla.rope_stride, 3)};
    const uint4* const codes = static_cast<const uint4*>(params.k) + later.chunk;
#pragma unroll
    for (int column = 0; column < kLatent; column += 128)
      if (column < params.head_dim_v) ptx::prefetch_l2(codes + column / 16);
    if (params.head_dim > params.head_dim_v)
      ptx::prefetch_l2(static_cast<const uint4*>(mla.rope) + later.rope_chunk);
  }
  // Goes on to the blocks that have been found.
  __device__ __forceinline__ void take_found() {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      smem.scales[warp()][i][lane()] = scales[i].value(params) * tile::Codes<kFormat>::kUnit;
    here = later;
    first_lane = 0;
  }
  // Goes on to the next block.
  __device__ __forceinline__ void advance() {
    first_lane += kWarpKeys;
    if (first_lane == kWarpKeys)
      ask_token();
    else if (first_lane == 2 * kWarpKeys)
      ask_page();
    else if (first_lane == 3 * kWarpKeys)
      ask_row();
    else
      take_found();
    request();
  }

  __device__ __forceinline__ void copy_rope(int buffer) const {
    const unsigned column_chunk = lane() % 8, first_row = lane() / 8;
    const bool rotated = static_cast<int>(column_chunk * 8) < params.head_dim - params.head_dim_v;
    const unsigned to =
        ptx::shared_address(smem.k[buffer][kRopePanel]) + at(first_row, column_chunk);
#pragma unroll
    for (int group = 0; group < kWarpKeys / 4; ++group) {
      const unsigned row = first_lane + group * 4 + first_row;
      const bool exists = __shfl_sync(~0u, here.chunk, row) != kNowhere;
      const unsigned its_chunk = __shfl_sync(~0u, here.rope_chunk, row) + column_chunk;
      // Rows r and r + 4 differ in where their chunks lie, rows r and r + 8 do not.
      ptx::cp_async_16((to ^ group % 2 * 64) + group * 4 * Panel::kRowBytes,
                       static_cast<const T*>(mla.rope) + its_chunk * 8ull, exists && rotated);
    }
  }

  // Loads the present block, after so many in both buffers.
  __device__ __forceinline__ void load_block(unsigned blocks) {
    thread = ptx::thread_index();
    const unsigned buffer = blocks % 2, parity_before = ~blocks / 2 % 2;
    ptx::mbarrier_wait(smem.empty_first[buffer], parity_before);
    ptx::mbarrier_wait(smem.empty_second[buffer], parity_before);
    unsigned char* const base = smem.k[buffer][0];
    const unsigned to = lane() / 4 * kPanelBytes + at(own_row(0), lane() % 4 * 2);
    const unsigned shared = ptx::shared_address(base);
#pragma unroll
    for (int row = kHeldRows; row < kWarpKeys; ++row) {
      const unsigned its_chunk = __shfl_sync(~0u, here.chunk, first_lane + own_row(row));
      ptx::cp_async_16(shared + (to ^ code_bits(row)),
                       static_cast<const uint4*>(params.k) + (its_chunk + lane()),
                       its_chunk != kNowhere && has_columns());
    }
    copy_rope(buffer);
    ptx::Mbarrier& full = smem.full_k[buffer][panel_in_order(buffer, 0)];
    ptx::mbarrier_arrive_after_copies(full);
    constexpr unsigned kAll = (1u << kWarpKeys) - 1;
    const unsigned exist = __ballot_sync(~0u, here.chunk != kNowhere) >> first_lane & kAll;
    if (lane() == 0) smem.exist[buffer][warp()] = exist;
    if (exist != kAll || params.head_dim_v < kLatent) {
#pragma unroll
      for (int i = 0; i < kHeldRows; ++i)
        if (!(exist >> own_row(i) & 1) || !has_columns()) codes[i] = {};
    }
    __syncwarp();
    const float* const factors = smem.scales[warp()][lane() * 16 / kScaleColumns] + first_lane;
#pragma unroll 1
    for (int first = 0;; first += kBatch) {
      // Where each row is stored is no register of its own.
      const unsigned batch_to = ptx::opaque(to ^ row_bits(first));
      const float4 in_order = *reinterpret_cast<const float4*>(factors + first);
      const bool swapped = own_row(0) != 0;
      const float batch_factors[kBatch] = {
          swapped ? in_order.y : in_order.x, swapped ? in_order.x : in_order.y,
          swapped ? in_order.w : in_order.z, swapped ? in_order.z : in_order.w};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float factor = batch_factors[i];
        const uint2 front = {codes[i].x, codes[i].y}, back = {codes[i].z, codes[i].w};
        const unsigned its_to = batch_to ^ row_bits(i);
        *reinterpret_cast<uint4*>(base + its_to) = expanded<T, kFormat>(front, factor);
        *reinterpret_cast<uint4*>(base + (its_to ^ 16)) = expanded<T, kFormat>(back, factor);
      }
      if (first + kBatch == kWarpKeys) break;
      take_copied(base, to, first + kBatch);
    }
    tile::arrive_warp(full);
    advance();
  }

 private:
  // Takes a batch of rows' codes that have been copied to the buffer.
  __device__ __forceinline__ void take_copied(const unsigned char* base, unsigned to, int first) {
    ptx::cp_async_wait_all();
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      codes[i] = *reinterpret_cast<const uint4*>(base + (to ^ code_bits(first + i)));
  }
};

template <int kFormat>
__device__ __forceinline__ void expand(Smem& common, const DecodeParams& params,
                                       const MlaParams& mla) {
  static_assert(sizeof(ExpanderSmem) <= Config::smem_bytes, "Config has to ask for all of it");
  ExpanderSmem& smem = static_cast<ExpanderSmem&>(common);
  Expander<kFormat> expander = {smem, params, mla, static_cast<unsigned>(ptx::thread_index())};
  BetweenSplits first;
  first.schedule.start(params);  // where there is no split, next() says so
  ptx::bar_sync(kReady, kReadyThreads);
  if (expander.lane() == 0) smem.warps[expander.warp()] = first;
  __syncwarp();
  while (true) {
    expander.thread = ptx::thread_index();
    BetweenSplits& state = smem.warps[expander.warp()];
    decoding::Split& split = smem.splits[expander.warp()];
    const bool found = expander.lane() == 0 && state.schedule.next(params, split);
    const bool exists = __any_sync(~0u, found);
    __syncwarp();
    const int its_blocks = put_work(smem, params, mla, state.schedule, split, exists, state.queue);
    __syncwarp();
    if (its_blocks < 0) return;
    if (its_blocks == 0) continue;
    expander.start(split);
    unsigned blocks = state.blocks;
    const unsigned end = blocks + its_blocks;
#pragma unroll 1
    do expander.load_block(blocks);
    while (++blocks != end);
    __syncwarp();
    if (expander.lane() == 0) state.blocks = end;
    __syncwarp();
  }
}

}  // namespace mla
