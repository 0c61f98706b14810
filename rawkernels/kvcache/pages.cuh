// Where the keys and values of a token lie in a cache: pages (num_pages, page_size, heads,
// head_dim) of any strides with contiguous features. Token j of a sequence is in slot j % page_size
// of the page that entry j / page_size of the sequence's row of the page table names.
#pragma once

// In elements.
struct PageStrides {
  long long page, seq, head;
};
