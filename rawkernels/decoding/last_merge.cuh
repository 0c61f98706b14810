// The merge of a work tile that other thread blocks began: left for the end, so that a thread block
// writes all its own splits, for which others may wait, before it waits for theirs.
#pragma once

#include "decoding/combine.cuh"

namespace decoding {

// In shared memory.
struct LastMerge {
  Split split;
  SplitPlace place;

  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) place.merges = false;
  }

  // After a split has been written: merges at once what this thread block has computed alone.
  template <class Writer>
  __device__ __forceinline__ void merge_or_keep(const Writer& writer) {
    if (writer.place.merges && writer.place.alone) {
      writer.merge_partials();
    } else if (writer.place.merges && threadIdx.x == 0) {
      split = writer.split;
      place = writer.place;
    }
  }

  template <class Writer>
  __device__ __forceinline__ void finish(const DecodeParams& params) const {
    __syncthreads();
    if (place.merges) Writer{params, split, place}.merge_partials();
  }
};

}  // namespace decoding
