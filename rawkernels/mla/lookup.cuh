// Finds out where the keys of a split lie, one of each block for each thread, blocks ahead of their
// use.
#pragma once

#include "decoding/schedule.cuh"
#include "mla/params.cuh"

namespace mla {

// Where a key lies in the pages.
struct Place {
  int page, slot;
  bool has;  // it exists; else it has a page's address, but nothing is to be read there

  // Where its row begins, in chunks of 1 << shift elements.
  __device__ __forceinline__ unsigned in_chunks(const PageStrides& stride, int shift) const {
    return page * static_cast<unsigned>(stride.page >> shift) +
           slot * static_cast<unsigned>(stride.seq >> shift);
  }
};

// The keys of a split: tokens of a sequence, or of a query's list of them.
struct SplitKeys {
  int index, sequence;  // of the split, and of the sequence that has its tokens
  int begin, end;       // of the tokens that are keys
  int last;             // the split's last key, and one more
};

// Each call of next() takes three blocks a step further: the token of one, which a list of tokens
// may have; the page of the one before, for which its token is needed; and the one before that is
// found. So nothing waits for a load of the same call. Blocks begin kStep keys apart.
template <int kStep>
struct KeyLookup {
  const DecodeParams& params;
  const MlaParams& mla;
  int offset;        // of this thread's key in a block, when start() is called
  SplitKeys& split;  // in shared memory, of the thread's warp

  int key;           // whose token comes next
  int token, paged;  // of the last and the last but one that have been asked for
  int entry;         // of the page table, for `paged`
  bool has_page;     // it exists

  // Looks up blocks of a split from its origin on. By all lanes of a warp.
  __device__ __forceinline__ void start(const decoding::Split& of) {
    const Tokens tokens = tokens_of(params, mla, of.seq.index);
    // Keys that are places in a list begin where a split does.
    const bool listed = mla.indices != nullptr;
    if (threadIdx.x % 32 == 0)
      split = {of.seq.index, tokens.sequence, listed ? tokens.begin : of.begin,
               listed ? tokens.end : of.end, of.end};
    __syncwarp();
    key = of.origin + offset;
    ask_token();
    ask_page();
    ask_token();
  }
  __device__ __forceinline__ Place next() {
    const Place place = found();
    ask();
    return place;
  }
  // Its parts, for who uses what was found before more is asked for. Otherwise that is loaded to
  // other registers, and waited for where they are moved, at the end of a loop.
  __device__ __forceinline__ Place found() const {
    const kvcache::PageTable table = page_table(params);
    return {has_page ? table.existing(entry) : 0, table.slot(paged), has_page};
  }
  __device__ __forceinline__ void ask() {
    ask_page();
    ask_token();
  }

 private:
  // -1 where there is no such key.
  __device__ __forceinline__ void ask_token() {
    token = key;
    if (mla.indices != nullptr)
      token = key < split.last ? mla.indices[split.index * mla.index_stride + key] : -1;
    key += kStep;
  }
  __device__ __forceinline__ void ask_page() {
    has_page = token >= split.begin && token < split.end;
    paged = has_page ? token : 0;
    entry = has_page ? *page_table(params).entry(split.sequence, paged) : 0;
  }
};

}  // namespace mla
