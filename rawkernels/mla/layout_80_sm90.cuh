// Shared memory of mla/decode_80_sm90.cu, and where keys are in it.
#pragma once

#include "decoding/combine.cuh"
#include "mla/maps.cuh"
#include "mla/panels_sm90.cuh"
#include "mla/partial.cuh"
#include "mla/schedule.cuh"
#include "ptx/tma.cuh"

namespace mla {

using T = Config::dtype;

constexpr int kRows = Config::rows;             // of a tile: heads times query tokens
constexpr int kKeys = 64;                       // of a block: the rows of a product
constexpr int kHalfPanels = kLatentPanels / 2;  // of which a warpgroup has O
constexpr int kConsumers = 256;                 // threads
constexpr int kProducers = 4;                   // warps

// Queries, first scores and the result of a tile take as long as five blocks of keys.
using Schedule = PieceSchedule<kRows, kKeys, 5, 3, 1>;
using Part = PartialTile<kRows, kLatent, true>;
static_assert(sizeof(Part) == kRows * (kLatent * 2 + 8),
              "part_bytes of the Config must have room for it");

// The place of a panel of keys, of which blocks have kHalfPanels in each half of the columns. Each
// half has a ring of kPlaces, one less than two blocks need. So the first panel of a block's values
// is taken to registers before there are probabilities: in its place comes the last one of the next
// block, all of which is there in time for its scores.
constexpr int kPlaces = 7;
struct Place {
  unsigned panel;  // of all that the thread block has had in the half

  __device__ __forceinline__ static Place of(int block, int panel) {
    return {static_cast<unsigned>(block * kHalfPanels + panel)};
  }
  __device__ __forceinline__ unsigned index() const { return panel % kPlaces; }
  __device__ __forceinline__ unsigned parity() const { return panel / kPlaces % 2; }
};

// A row of O as 16-bit numbers, in the place of Q: 1040 bytes, so that eight rows meet in no bank.
constexpr int kRowBytes = kLatent * 2 + 16;

// The end of a split, in the place of Q behind O: sums of each warpgroup's blocks, the largest |O|
// of each warp's columns, then of rows.
struct End {
  float sum[2][kRows], largest[2][4][kRows];
  float factor[kRows];      // of O
  long long out_at[kRows];  // where the rows of the result are
};

// A split, and the numbers of its blocks of keys among all that the thread block has.
struct Work {
  decoding::Split split;
  decoding::SplitPlace place;
  int first, end;
  bool exists;  // there is one

  __device__ __forceinline__ int first_key(int block) const {
    return split.origin + (block - first) * kKeys;
  }
  // Whether a key of a block is the split's.
  __device__ __forceinline__ bool has(int block, int key) const {
    const int its = first_key(block) + key;
    return its >= split.begin && its < split.end;
  }
};

struct Smem {
  unsigned char q[kPanels][kRows * 128];
  unsigned char k[2][kPlaces][kPanelBytes];
  // What is rotated of each warpgroup's own block of keys, then its probabilities: a row for each
  // query.
  unsigned char rope[2][kRows * 128];
  alignas(8) float row_max[kRows];
  float offset[kRows];         // what exponents are relative to
  float correction[2][kRows];  // of O, for probabilities of a warpgroup that has raised maxima
  float warp_max[4][kRows];    // of a block's keys, where maxima are raised
  tile::Range visible[kRows];  // the split's keys that each row sees
  Work work[2];                // of a split and of the next one
  Schedule schedule;
  // What is rotated of a block comes to rope[block % 2].
  ptx::Mbarrier full_k[2][kPlaces], empty_k[2][kPlaces], full_rope[2], empty_rope[2];
  ptx::Mbarrier full_q, empty_q, full_work[2], empty_work[2];

  __device__ __forceinline__ unsigned char* row_of_o(int row) { return q[0] + row * kRowBytes; }
  __device__ __forceinline__ End& end() { return reinterpret_cast<End&>(*row_of_o(kRows)); }
};
static_assert(sizeof(Smem) <= Config::smem_bytes, "Config has to ask for all of it");
static_assert(kRows * kRowBytes + sizeof(End) <= sizeof(Smem::q), "they take the place of Q");
static_assert(kPanelBytes <= kRows * 128, "probabilities take the place of what is rotated");

// Named barriers.
enum Barrier {
  kProbabilities = 1,         // and 2: a warpgroup's are in shared memory, for the other one
  kOwn = kProbabilities + 2,  // and 4: the warps of a warpgroup
  kBoth = kOwn + 2            // both warpgroups
};

}  // namespace mla
