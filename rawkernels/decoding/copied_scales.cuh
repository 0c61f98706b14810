// Scales of a tile of codes, as a warp copies them by cp.async and reads them.
#pragma once

#include "decoding/ring_codes.cuh"

namespace decoding {

// A word for each key, wherever in memory it is.
template <int kKFormat, int kVFormat, int kKeys, bool kPacked>
struct CopiedScales : TileScales<kKeys, 1, 1> {
  // Of a tile's keys, the one whose page a lane has to know.
  __device__ __forceinline__ static int first_key() { return threadIdx.x % kKeys; }

  __device__ __forceinline__ void copy(const DecodeParams& params, const TileSource& source) const {
    copy_scales(params, *this, source);
  }
  // Nothing: zeros have been copied for keys outside.
  __device__ __forceinline__ void clear(int, int, int) {}

  __device__ __forceinline__ static ScaleReader of_keys(const DecodeParams& params, int head) {
    return ScaleReader::of_keys(params, head);
  }
  __device__ __forceinline__ static ScaleReader of_values(const DecodeParams& params, int head) {
    return ScaleReader::of_values(params, head);
  }
};

// 16 bytes for each lane, of neighbouring keys, whose scales lie side by side in memory.
template <int kKFormat, int kVFormat, int kKeys>
struct CopiedScales<kKFormat, kVFormat, kKeys, true> : PackedScales<kKFormat, kVFormat, kKeys> {
  using Packed = PackedScales<kKFormat, kVFormat, kKeys>;
  using KWord = typename PackedScale<kKFormat>::Word;
  using VWord = typename PackedScale<kVFormat>::Word;
  static constexpr int kKLanes = sizeof(Packed::k) / 16, kVLanes = sizeof(Packed::v) / 16;
  static_assert(kKLanes + kVLanes <= 32, "a warp copies them at a time");

  __device__ __forceinline__ static bool has_keys() { return threadIdx.x % 32 < kKLanes; }
  __device__ __forceinline__ static int first_key() {
    const int lane = threadIdx.x % 32;
    return has_keys() ? lane * (kKeys / kKLanes) : (lane - kKLanes) * (kKeys / kVLanes);
  }

  __device__ __forceinline__ void copy(const DecodeParams& params, const TileSource& source) const {
    const int lane = threadIdx.x % 32, key = source.key + first_key();
    if (lane >= kKLanes + kVLanes) return;
    const ScaleStrides& stride = has_keys() ? params.k_scale_stride : params.v_scale_stride;
    const int size = (has_keys() ? sizeof(KWord) : sizeof(VWord)) / 2;  // strides are of bfloat16
    const auto* const from =
        static_cast<const unsigned short*>(has_keys() ? params.k_scale : params.v_scale) +
        source.page * stride.page + source.head * stride.head + (key & source.page_mask) * size;
    ptx::cp_async_16(ptx::shared_address(this) + lane * 16, from, key < source.end);
  }
  // Zeros for keys outside [begin, end): what lies there may be NaN. By a warp.
  __device__ __forceinline__ void clear(int key, int begin, int end) {
    for (int i = threadIdx.x % 32; i < kKeys; i += 32)
      if (key + i < begin || key + i >= end) this->k[0][i] = this->v[0][i] = 0;
    __syncwarp();
  }

  __device__ __forceinline__ static PackedScale<kKFormat> of_keys(const DecodeParams&, int) {
    return {};
  }
  __device__ __forceinline__ static PackedScale<kVFormat> of_values(const DecodeParams&, int) {
    return {};
  }
};

}  // namespace decoding
