// How a warp goes on with the scores of its rows, where these are few.
#pragma once

namespace decoding {

// Of four rows, products have each twice, in columns n and n + 4: the lanes of the ones go on with
// the first half of the keys, those of the others with the last, as if they were eight rows of half
// as many keys. They are added up at the end.
template <int kWarpRows, int kWarpKeys>
struct Fold {
  static constexpr bool kFolded = kWarpRows == 4;
  static constexpr int kRows = kFolded ? 8 : kWarpRows;
  static constexpr int kKeys = kFolded ? kWarpKeys / 2 : kWarpKeys;
  static_assert(!kFolded || kWarpKeys % 32 == 0, "half of the keys must be whole mma tiles");
};

}  // namespace decoding
