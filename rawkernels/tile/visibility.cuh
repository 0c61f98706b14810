// Which keys a query sees by its position, and which queries see a key: causal masks, windows and
// the end of the keys.
#pragma once

#include "tile/accumulator.cuh"
#include "tile/fragment.cuh"

constexpr int kUnbounded = 1 << 30;  // a side of a window that has no limit

namespace tile {

// Keys or rows from `begin` to before `end`; none where end <= begin.
struct Range {
  int begin, end;

  __device__ __forceinline__ bool overlaps(int first, int count) const {
    return first + count > begin && first < end;
  }
  __device__ __forceinline__ bool contains(int first, int count) const {
    return first >= begin && first + count <= end;
  }
};

// Row r sees the keys from begin + r to before end + r, and none from seqlen_k on. Rows are counted
// from any origin: the first query of a tile, of a sequence, or the one that stands beside key 0.
// Ranges may reach below key 0 or row 0, and rows beyond the last one: the caller clips.
struct Visibility {
  int begin, end, seqlen_k;

  // Rows counted from query `first_row` of a sequence, of which `rows` will be asked for. Limits
  // that lie farther out than these rows can see are moved in, so that int is wide enough.
  __device__ __forceinline__ static Visibility from_row(int first_row, int rows, int window_left,
                                                        int window_right, int seqlen_q,
                                                        int seqlen_k) {
    const long long diagonal = static_cast<long long>(first_row) + seqlen_k - seqlen_q;
    const long long lowest = -rows, highest = seqlen_k;
    long long begin = window_left == kUnbounded ? lowest : diagonal - window_left;
    long long end = window_right == kUnbounded ? highest : diagonal + window_right + 1;
    begin = min(max(begin, lowest), highest);
    end = min(max(end, lowest), highest);
    return {static_cast<int>(begin), static_cast<int>(end), seqlen_k};
  }

  // The same with rows counted from `row`.
  __device__ __forceinline__ Visibility counted_from(int row) const {
    return {begin + row, end + row, seqlen_k};
  }

  __device__ __forceinline__ Range keys(int row) const { return keys_of_all(row, row); }
  // Of the rows from `first` to `last`: the keys that some row sees, and those that every row sees.
  __device__ __forceinline__ Range keys_of_any(int first, int last) const {
    return {begin + first, min(end + last, seqlen_k)};
  }
  __device__ __forceinline__ Range keys_of_all(int first, int last) const {
    return {begin + last, min(end + first, seqlen_k)};
  }

  // The same turned round, for existing keys: the rows that see a key, some key or every key.
  __device__ __forceinline__ Range rows(int key) const { return rows_of_all(key, key); }
  __device__ __forceinline__ Range rows_of_any(int first, int last) const {
    return {first - end + 1, last - begin + 1};
  }
  __device__ __forceinline__ Range rows_of_all(int first, int last) const {
    return {last - end + 1, first - begin + 1};
  }
};

// Sets scores of keys that their row does not see to -inf. The fragment's rows are queries, its
// columns keys; this lane's first element is in `row` and `column`.
template <int n>
__device__ __forceinline__ void hide_keys(float (&s)[n], const Visibility& visibility, int row,
                                          int column) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Range keys = visibility.counted_from(row).keys(8 * r);
    const int begin = keys.begin - column;
    const unsigned count = max(keys.end - column - begin, 0);
#pragma unroll
    for (int j = 0; j < n / 4; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = 4 * j + 2 * r + e;
        s[i] =
            static_cast<unsigned>(fragment_column(i) - begin) < count ? s[i] : negative_infinity();
      }
  }
}

}  // namespace tile
