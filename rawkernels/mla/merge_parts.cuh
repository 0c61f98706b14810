// Who merges the partial results of a tile of rows in the launch that makes them: the thread block
// that leaves the last one.
//
// Nobody waits. In params.workspace each slot has a partial result, and behind all of them a word,
// which is the launch's id while there is a complete one. A thread block that has left one looks
// for the others. Of two that leave theirs at the same time one or both see all, by a fence each
// between the two, and one claims them: the first one's word, which it takes away. Many partial
// results are merged in two steps: of every 2^shift, whoever leaves the last one merges them into
// one (decoding::SplitPlace). What is added up in which order depends on no time.
#pragma once

#include "mla/partial.cuh"
#include "ptx/acquire_release.cuh"

namespace mla {

template <class Part>
struct PartMerger {
  const DecodeParams& params;
  decoding::SplitPlace place;  // of a split; then of what its partial result has been merged into

  // Whether all of the tile's partial results are to be merged next; else those of its 2^shift.
  __device__ __forceinline__ bool ends() const {
    return place.index >> place.shift == place.count - 1 >> place.shift;
  }
  __device__ __forceinline__ decoding::MergeList list() const { return last_one().merge_list(); }

  // Goes on to what they have been merged into: its slot, if they are not all.
  __device__ __forceinline__ unsigned advance() {
    const decoding::SplitPlace last = last_one();
    place.index = place.count - 1;
    return last.merged_slot(last.index);
  }

  // Says that the partial result in slot `own` is complete; whether this thread block is to merge
  // those of list(). By a warp, when all have written theirs.
  __device__ __forceinline__ bool claim(unsigned own) const {
    const unsigned long long id = params.launch_id | 1;
    const decoding::MergeList others = list();
    const int lane = threadIdx.x % 32;
    if (lane == 0) ptx::store_release(word(own), id);
    __syncwarp();
    __threadfence();
    bool has_all = true;
#pragma unroll 1
    for (int i = lane; i < others.count; i += 32)
      has_all &= ptx::load_acquire(word(others.slot_of(i))) == id;
    has_all = __all_sync(~0u, has_all);
    if (has_all && lane == 0) has_all = atomicCAS(word(others.slot_of(0)), id, 0ull) == id;
    has_all = __shfl_sync(~0u, has_all, 0);
    if (!has_all) return false;
    // A replay in a CUDA graph has the same id.
#pragma unroll 1
    for (int i = 1 + lane; i < others.count; i += 32) *word(others.slot_of(i)) = 0;
    return true;
  }

 private:
  // The place of the last of the partial results that are merged next.
  __device__ __forceinline__ decoding::SplitPlace last_one() const {
    decoding::SplitPlace last = place;
    last.index = ends() ? place.count - 1 : place.index | (1 << place.shift) - 1;
    return last;
  }
  __device__ __forceinline__ unsigned long long* word(unsigned slot) const {
    Part* const parts = static_cast<Part*>(params.workspace);
    return reinterpret_cast<unsigned long long*>(parts + 2 * gridDim.x * gridDim.y) + slot;
  }
};

}  // namespace mla
