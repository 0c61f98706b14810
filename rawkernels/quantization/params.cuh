// Arguments of the kernels that quantise and dequantise. Declared as QUANTIZE_PARAMS in
// cuattn/gpu/params.py too.
//
// x is (pages, tokens, heads, head_dim), of any strides with contiguous features; codes likewise,
// with strides in bytes, and scales (pages, tokens, heads, groups).
#pragma once

#include "kvcache/pages.cuh"
#include "tile/code_row.cuh"
#include "tile/divisor.cuh"
#include "tile/rows.cuh"

struct QuantizeParams {
  void* x;
  void* codes;
  void* scale;
  void* minimum;          // null: none
  const float* offset;    // (heads, head_dim); null: none
  const int* page_table;  // of the codes; null: a page has the page's number
  const int* seq_lens;    // tokens of each of x's pages that are wanted; null: all
  PageStrides x_stride, codes_stride;
  ScaleStrides scale_stride, minimum_stride;
  long long table_stride;
  int rows;  // of all heads; or of blocks of rows, where a warp has neighbouring tokens of a head
  int tokens, heads, head_dim;
  int page_shift, num_pages;
  int format, group, group_shift, scale_is_float, rotated, is_static;
  tile::Divisor by_heads, by_tokens;  // the latter of blocks of tokens, where `rows` is of blocks
};

namespace quantization {

// The row that this thread works on, with others: of those that a block has at a time, the first is
// `first`.
struct Place {
  int page, token, head;
  bool exists;  // else it is the last row, which another has
};

template <class Row>
__device__ __forceinline__ Place place_of(const QuantizeParams& params, int first) {
  const int index = first + static_cast<int>(threadIdx.x) / Row::kRowLanes;
  const int row = min(index, params.rows - 1);
  const int token = tile::divided(row, params.by_heads),
            page = tile::divided(token, params.by_tokens);
  return {page, token - page * params.tokens, row - token * params.heads, index < params.rows};
}

// Neighbouring tokens of a head: what a warp has at a time where `rows` counts blocks of rows.
struct Tokens {
  int page, first, head, count;
};

template <int kBlockRows>
__device__ __forceinline__ Tokens tokens_of(const QuantizeParams& params, int index) {
  const int block = tile::divided(index, params.by_heads);
  const int page = tile::divided(block, params.by_tokens);
  const int blocks = (params.tokens + kBlockRows - 1) / kBlockRows;  // of a page
  const int first = (block - page * blocks) * kBlockRows;
  return {page, first, index - block * params.heads, min(kBlockRows, params.tokens - first)};
}

template <int kFormat = tile::kAnyFormat>
__device__ __forceinline__ tile::CodeRow<kFormat> codes_of(const QuantizeParams& params, Place at) {
  int page = at.page, slot = at.token;
  if (params.page_table != nullptr) {
    const kvcache::PageTable table = {params.page_table, params.table_stride, params.page_shift,
                                      params.num_pages};
    page = table.page(at.page, at.token);
    slot = table.slot(at.token);
  }
  const auto scale_at = [&](void* scales, const ScaleStrides& stride) -> void* {
    if (scales == nullptr) return nullptr;
    const long long element = page * stride.page + slot * stride.seq + at.head * stride.head;
    return static_cast<char*>(scales) + element * (params.scale_is_float ? 4 : 2);
  };
  const PageStrides& stride = params.codes_stride;
  return {static_cast<unsigned char*>(params.codes) + page * stride.page + slot * stride.seq +
              at.head * stride.head,
          scale_at(params.scale, params.scale_stride),
          scale_at(params.minimum, params.minimum_stride),
          params.scale_stride.group,
          params.minimum_stride.group,
          params.offset == nullptr ? nullptr : params.offset + at.head * params.head_dim,
          params.format,
          params.group,
          params.group_shift,
          params.scale_is_float,
          params.rotated,
          params.is_static};
}

}  // namespace quantization
