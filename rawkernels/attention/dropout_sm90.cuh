// Dropout of attention/forward_sm90.cu: which of a consumer's probabilities are kept.
//
// The masks of Config::mask_blocks blocks of keys are computed together, before a consumer's turn
// to issue products: a product of Philox takes some 11 cycles of its scheduler while wgmma is in
// flight, and 2 to 4 else; and while so many masks are computed, the other consumers' products come
// to an end. Masks lie in shared memory, a bit a score, where a lane reads what it has written
// itself, so that nobody waits for them.
#pragma once

#include "attention/layout_sm90.cuh"
#include "ptx/registers.cuh"
#include "tile/fragment.cuh"

// Words that are computed side by side, of two counters of Philox each: as registers suffice for.
constexpr int kMasksAtOnce = kHeadDimV == 256 || (kHeadDimV == 128 && kWarpgroups == 3) ? 1 : 2;

// Bit 7 - i of byte j: the lane keeps score j of its four in the i-th eight keys.
__device__ __forceinline__ unsigned mask_of(const uint4& first, const uint4& second) {
  const unsigned signs[8] = {first.x,  first.y,  first.z,  first.w,
                             second.x, second.y, second.z, second.w};
  unsigned mask = signs[0] & 0x80808080u;
#pragma unroll
  for (int i = 1; i < 8; ++i) mask |= (signs[i] & 0x80808080u) >> i;
  return mask;
}

// The masks of a warp's rows, of `last` and the blocks before it, from the first of
// Config::mask_blocks or from `first` on.
__device__ __forceinline__ void compute_masks(DropoutMasks& masks, const tile::DropoutRow& of_row,
                                              const DropoutParams& dropout, int first, int last,
                                              int thread) {
  const int begin = last / Config::mask_blocks * Config::mask_blocks;  // its masks lie in words[0]
  int word = max(first - begin, 0) * kTileN / kKeysOfMask / kMasksAtOnce * kMasksAtOnce;
#pragma unroll 1
  for (; word * kKeysOfMask < (last + 1 - begin) * kTileN; word += kMasksAtOnce) {
    uint4 signs[2 * kMasksAtOnce];
    of_row.kept_signs(signs, dropout, begin * kTileN / 32 + 2 * word);
#pragma unroll
    for (int i = 0; i < kMasksAtOnce; ++i)
      masks.words[word + i][thread] = mask_of(signs[2 * i], signs[2 * i + 1]);
  }
}

// Clears in P of a block what is dropped; the sums of exponentials have it.
__device__ __forceinline__ void clear_dropped(unsigned (&p)[kTileN / 4], const DropoutMasks& masks,
                                              int block) {
  constexpr int kGroups = kTileN / 8;  // of eight keys; a word has eight groups
  constexpr int kWords = (kGroups + 7) / 8;
  static_assert(!Config::dropout || kGroups % 8 <= 4,
                "a block's masks lie in as many words wherever it begins");
  const int first = block % Config::mask_blocks * kGroups;
  unsigned words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = masks.words[first / 8 + i][threadIdx.x - 128];
  // Where blocks begin within words, bits are moved within each byte.
  const int shift = first % 8;
  const unsigned own = (0xffu << shift & 0xffu) * 0x01010101u;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    unsigned kept = words[i];
    if (kGroups % 8 != 0) {
      const unsigned next = i + 1 < kWords ? words[i + 1] : 0;
      kept = (kept << shift & own) | (next >> (8 - shift) & ~own);
    }
#pragma unroll
    for (int group = 8 * i; group < min(8 * i + 8, kGroups); ++group)
      tile::clear_dropped(p[2 * group], p[2 * group + 1], kept << group % 8);
  }
}
