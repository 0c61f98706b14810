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

  // Requests the first `count` rows, `stride` bytes apart in memory; the others become zeros.
  __device__ __forceinline__ void request(const void* first, long long stride, int count) {
    request_from(first_chunk(first, stride), stride, count);
  }
  // Where this lane's first chunk of the rows lies; and the same request from there.
  __device__ __forceinline__ static const char* first_chunk(const void* first, long long stride) {
    return static_cast<const char*>(first) + row_of_chunk(0) * stride + byte_of_chunk();
  }
  __device__ __forceinline__ void request_from(const char* chunk, long long stride, int count) {
#pragma unroll
    for (int i = 0; i < kLaneChunks; ++i)
      ptx::cp_async_16(ptx::shared_address(own_chunk(i)), chunk + i * kRowsApart * stride,
                       row_of_chunk(i) < count);
  }
  // The same of all rows.
  __device__ __forceinline__ void request_all_from(const char* chunk, long long stride) {
#pragma unroll
    for (int i = 0; i < kLaneChunks; ++i)
      ptx::cp_async_16(ptx::shared_address(own_chunk(i)), chunk + i * kRowsApart * stride);
  }
  // Writes this lane's chunks of rows to where `address(i)` says; null: nowhere.
  template <class Address>
  __device__ __forceinline__ void write_chunks(const Address& address) {
#pragma unroll
    for (int i = 0; i < kLaneChunks; ++i) {
      void* const target = address(i);
      if (target != nullptr)
        __stcs(static_cast<uint4*>(target), *reinterpret_cast<const uint4*>(own_chunk(i)));
    }
  }

  static constexpr int kLaneChunks = kRows * kRowChunks / 32;
  static constexpr int kRowsApart = 32 / kRowChunks;  // from one of a lane's chunks to the next
  // The row that has this lane's chunk i, and where in it.
  __device__ __forceinline__ static int row_of_chunk(int i) {
    return i * kRowsApart + static_cast<int>(threadIdx.x) % 32 / kRowChunks;
  }
  __device__ __forceinline__ static int byte_of_chunk() {
    return threadIdx.x % 32 % kRowChunks * 16;
  }

 private:
  __device__ __forceinline__ unsigned char* own_chunk(int i) {
    return row(row_of_chunk(i)) + byte_of_chunk();
  }
};

}  // namespace tile
