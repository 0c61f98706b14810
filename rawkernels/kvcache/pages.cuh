// Where the keys and values of a token lie in a cache: pages (num_pages, page_size, heads,
// head_dim) of any strides with contiguous features. Token j of a sequence is in slot j % page_size
// of the page that entry j / page_size of the sequence's row of the page table names. A contiguous
// cache is one page for each sequence, and has no table.
#pragma once

// In elements.
struct PageStrides {
  long long page, seq, head;
};

// Of scales, in elements; 0 along an axis that all share a scale on.
struct ScaleStrides {
  long long page, seq, head, group;
};

namespace kvcache {

struct PageTable {
  const int* entries;  // null: the page of a sequence has the sequence's number
  long long stride;    // of a sequence's row
  int page_shift;      // log2 of the page size
  int num_pages;

  __device__ __forceinline__ int slot(int token) const { return token & ((1 << page_shift) - 1); }
  __device__ __forceinline__ const int* entry(int sequence, int token) const {
    return entries + sequence * stride + (token >> page_shift);
  }
  // An entry that names no page is read as the last page: its content is wrong, but no address is.
  __device__ __forceinline__ int existing(int page) const {
    return static_cast<int>(min(static_cast<unsigned>(page), num_pages - 1u));
  }
  __device__ __forceinline__ int page(int sequence, int token) const {
    return entries == nullptr ? sequence : existing(*entry(sequence, token));
  }
};

// All pages of keys, or of values.
template <class T>
struct Pages {
  T* data;
  PageStrides stride;

  __device__ __forceinline__ T* row(int page, int slot, int head) const {
    return data + page * stride.page + slot * stride.seq + head * stride.head;
  }
};

}  // namespace kvcache
