// Rows of queries and keys in shared memory, as TMA writes them for the kernels of plain latents:
// in panels of 64 columns.
#pragma once

#include "tile/swizzle.cuh"

namespace mla {

constexpr int kLatent = 512;  // width of a value
constexpr int kLatentPanels = kLatent / 64;
constexpr int kPanels = kLatentPanels + 1;  // of a row; the last is what is rotated
constexpr int kRopePanel = kLatentPanels;
constexpr int kPanelBytes = 64 * 128;  // of 64 keys

using Panel = tile::Swizzled<8>;  // as wgmma reads it: rows of 128 bytes

}  // namespace mla
