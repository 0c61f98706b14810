// Some rows of a warp on their way between global memory and its lanes, through shared memory: in
// whole lines of 128 bytes, where each lane's own pieces of a row (tile/lane_row.cuh) lie apart.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"

namespace tile {

// kRows rows of kRowBytes, so far apart that chunks of 16 bytes of a row, and the same quarter of
// several rows, lie in different banks.
template <int kRowBytes, int kRows>
struct RowBlock {
  static constexpr int kPitch = kRowBytes + (kRowBytes < 64 ? 16 : kRowBytes / 4);
  static constexpr int kRowChunks = kRowBytes / 16;
  static_assert(kRowBytes % 16 == 0 && kRows * kRowChunks % 32 == 0 && 32 % kRowChunks == 0,
                "lanes must have whole chunks of 16 bytes, and each as many");

  alignas(16) unsigned char bytes[kRows * kPitch];

  __device__ __forceinline__ unsigned char* row(int row) { return bytes + row * kPitch; }

  // Requests the first `count` rows, `stride` bytes apart in memory; in the place of others the
  // last one of these.
  __device__ __forceinline__ void request(const void* first, long long stride, int count) {
    each_chunk([&](int, int row, int byte, unsigned char* chunk) {
      ptx::cp_async_16(ptx::shared_address(chunk),
                       static_cast<const char*>(first) + min(row, count - 1) * stride + byte);
    });
  }
  // Writes the first `count` rows.
  __device__ __forceinline__ void write(void* first, long long stride, int count) {
    write_chunks([&](int, int row) -> void* {
      return row < count ? static_cast<char*>(first) + row * stride : nullptr;
    });
  }
  // Writes rows to where `address(i, row)` says that the one begins which has this lane's chunk i;
  // null: nowhere.
  template <class Address>
  __device__ __forceinline__ void write_chunks(const Address& address) {
    each_chunk([&](int i, int row, int byte, unsigned char* chunk) {
      void* const target = address(i, row);
      if (target != nullptr)
        __stcs(reinterpret_cast<uint4*>(static_cast<char*>(target) + byte),
               *reinterpret_cast<const uint4*>(chunk));
    });
  }

  static constexpr int kLaneChunks = kRows * kRowChunks / 32;
  // The row that has this lane's chunk i.
  __device__ __forceinline__ static int row_of_chunk(int i) {
    return (i * 32 + static_cast<int>(threadIdx.x) % 32) / kRowChunks;
  }

 private:
  template <class Visit>
  __device__ __forceinline__ void each_chunk(const Visit& visit) {
#pragma unroll
    for (int i = 0; i < kLaneChunks; ++i) {
      const int row = row_of_chunk(i), byte = threadIdx.x % 32 % kRowChunks * 16;
      visit(i, row, byte, bytes + row * kPitch + byte);
    }
  }
};

}  // namespace tile
