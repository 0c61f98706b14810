// What the emulator keeps in a CUtensorMap, in a layout of its own: 128 bytes as NVIDIA's, and the
// array's address first, as there. tests/emulator/cupy encodes it in place of the driver's
// cuTensorMapEncodeTiled.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

constexpr int kMaxTensorRank = 5;
constexpr uint32_t kTensorMapMagic = 0x50414D54;  // "TMAP"

struct TensorMap {
  uint64_t address;
  uint32_t magic;
  uint8_t dtype;                            // a CUtensorMapDataType
  uint8_t rank;                             // 1 to 5
  uint8_t swizzle;                          // a CUtensorMapSwizzle: none, 32, 64, 128 bytes
  uint8_t interleave;                       // 0: none
  uint64_t shape[kMaxTensorRank];           // innermost first; 1 beyond the rank
  uint64_t strides[kMaxTensorRank - 1];     // in bytes, of axis 1 and further; 0 beyond the rank
  uint32_t box[kMaxTensorRank];             // 1 beyond the rank
  uint8_t element_strides[kMaxTensorRank];  // 1
  uint8_t fill;                             // 0: elements out of bounds are zeros
  uint8_t unused[14];
};
static_assert(sizeof(TensorMap) == 128 && offsetof(TensorMap, box) == 88);

// Bytes of an element of a CUtensorMapDataType; 0 for a number that is none.
constexpr int tensor_element_bytes(int dtype) {
  constexpr int kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  return dtype >= 0 && dtype < 13 ? kBytes[dtype] : 0;
}

}  // namespace emulator
