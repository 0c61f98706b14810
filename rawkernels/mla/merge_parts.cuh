// Who merges the partial results of a tile of rows in the launch that makes them: the thread block
// that leaves the last one.
//
// Nobody waits. In params.workspace each slot has a partial result, and behind all of them a word.
// Those who leave the partial results of a list meet in pairs, as in a knockout: at a word that
// both exchange for the launch's id. The first one to come ends there; the second one, which gets
// the id, takes it away and goes on, for both. Who has met all others merges. Many partial results
// are merged in two steps: of every 2^shift, whoever leaves the last one merges them into one
// (decoding::SplitPlace). What is added up in which order depends on no time.
#pragma once

#include "mla/partial.cuh"
#include "ptx/atom.cuh"

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
  // those of list(). By one thread, when all have written theirs.
  __device__ __forceinline__ bool claim(unsigned own) const {
    const unsigned long long id = params.launch_id | 1;
    const decoding::MergeList all = list();
    int number = 0;
    while (all.slot_of(number) != own) ++number;
#pragma unroll 1
    for (int span = 1; span < all.count; span *= 2) {
      const int middle = (number & -2 * span) + span;  // of the two runs that meet
      if (middle >= all.count) continue;
      unsigned long long* const place = word(all.slot_of(middle));
      if (ptx::atom_exch(place, id) != id) return false;
      *place = 0;  // a replay in a CUDA graph has the same id
    }
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
