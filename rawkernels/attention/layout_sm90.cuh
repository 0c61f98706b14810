// Constants and shared memory of attention/forward_sm90.cu.
#pragma once

#include "attention/team_scheduler_sm90.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/pipeline.cuh"

using T = Config::dtype;

constexpr int kWarpgroups = Config::warpgroups;  // that consume
constexpr int kTileN = Config::tile_n;
constexpr int kHeadDim = Config::head_dim;  // of q and k, padded: TMA fills with zeros
constexpr int kHeadDimV = Config::head_dim_v;
// A tile lies in shared memory as panels of 64 columns, 128 bytes a row. With Config::key_groups
// keys lie as groups of eight rows of each panel, so that one TMA copy brings all columns of some.
constexpr int kPanelColumns = 64;
constexpr int kRowBytes = 128;
constexpr int kPanelsK = (kHeadDim + 63) / 64;
constexpr int kPanelsV = (kHeadDimV + 63) / 64;
constexpr int kPanelBytesQ = 64 * kRowBytes;
constexpr int kPanelBytesK = kTileN * kRowBytes;
constexpr int kGroupKeys = 8;
template <int kPanels>
struct KeyLayout {
  static constexpr int kPanelBytes = Config::key_groups ? kGroupKeys * kRowBytes : kPanelBytesK;
  static constexpr int kKeyBytes = Config::key_groups ? kPanels * kRowBytes : kRowBytes;
  static constexpr int kGroupBytes = kGroupKeys * kKeyBytes;
};
using Keys = KeyLayout<kPanelsK>;
using Values = KeyLayout<kPanelsV>;
constexpr int kStages = Config::stages;
constexpr int kStagesQ = Config::q_stages;

// Warps of the nonfinite filter (attention/filter_sm90.cuh), where some query of a tile may not see
// some of its keys, or none at all.
constexpr int kFilterWarps =
    Config::bound_left || Config::bound_right || kMayMask || Config::varlen || Config::seq_lens ? 2
                                                                                                : 0;

// Where pages are small a block takes dozens of TMA boxes: where a warp is free for it, V has one
// of its own.
constexpr int kValueWarps = Config::paged_kv && kFilterWarps == 0 ? 1 : 0;

// A consumer skips a block of keys that none of its own 64 queries sees: the last consumer the
// first block of a tile, the others the last. One at a time, as its values wait for the next
// scores, and a second would take their stage.
constexpr bool kSkipsBlocks = (Config::bound_left || Config::bound_right) && !Config::elementwise;

// Where costs are unknown a thread block takes a tile when it begins the one before, not earlier:
// of tiles that it had taken already no other block could relieve it. With one stage of queries it
// takes them earlier, as keys would wait for the tile.
constexpr bool kTakesLate = kDynamic && !Config::even_keys && !kSharesCodes && kStagesQ > 1;

// A consumer's turn to issue products ends when its scores are there, not as soon as its products
// are issued. Else three consumers whose products take no longer than their exponentials can get
// into step, all waiting for the tensor cores and then all taking exponentials (3% at head_dim 64;
// at 128 waiting costs 4%).
constexpr bool kKeepsTurn = kWarpgroups == 3 && kHeadDim == 64;

// Registers of a thread: the block has 65536, and gets them evenly at first. With one consumer
// there are more than it and the producers need.
constexpr int kProducerRegisters = Config::elementwise || kWarpgroups == 1 ? 56
                                   : kWarpgroups == 2                      ? 40
                                                                           : 32;
constexpr int kExpandRegisters = CodeOptions<Config>::expand_registers;
constexpr int kSharedRegisters =  // of a thread of each warpgroup together, where codes are read
    65536 / Config::threads / 8 * 8 * (Config::threads / 128) - kProducerRegisters -
    kExpandWarps / 4 * kExpandRegisters;
constexpr int kConsumerRegisters = (kReadsCodes        ? kSharedRegisters / kWarpgroups / 8 * 8
                                    : kWarpgroups == 1 ? 248
                                    : kWarpgroups == 2 ? 232
                                                       : 160) -
                                   (Config::elementwise ? 8 : 0);

// Codes of blocks of keys and of values in turn, as they lie in memory.
constexpr int kKeyCodeBytes = CodeOptions<Config>::k_row_bytes;
constexpr int kValueCodeBytes = CodeOptions<Config>::v_row_bytes;
constexpr int kCodeStages = CodeOptions<Config>::code_stages;
constexpr int kOwnCodeStages = kSharesCodes ? 0 : kCodeStages;  // of whole blocks
constexpr int kCodeBytes =
    kSharesCodes ? 0 : kTileN * (kKeyCodeBytes > kValueCodeBytes ? kKeyCodeBytes : kValueCodeBytes);
template <int kNumber, int kBytes>
struct CodeStages {
  alignas(1024) unsigned char codes[kNumber][kBytes];
};
template <>
struct CodeStages<0, 0> {};
// TMA's bytes -> the warps that expand codes; these -> the loading warp.
template <int kNumber>
struct CodeBarriers {
  ptx::Mbarrier full_codes[kNumber], empty_codes[kNumber];
  alignas(
      16) unsigned scales[kTileN];  // of the block that is expanded: each warp's of its own rows
};
template <>
struct CodeBarriers<0> {};

// With a team: codes of those keys of a block, and of their values, that a warp expands.
constexpr int kTeamKeys = kSharesCodes ? kTileN / kExpandWarps : 0;
template <int kKeys>
struct TeamCodes {
  struct OfWarp {
    alignas(128) unsigned char k[kKeys * kKeyCodeBytes], v[kKeys * kValueCodeBytes];
    alignas(16) unsigned k_scales[kKeys];
    alignas(16) unsigned v_scales[kKeys];
    ptx::Mbarrier full_k, full_v;  // TMA's bytes -> the warp
  } of_warp[kTileN / kKeys];
  ptx::Mbarrier rotated_q[kStagesQ][kWarpgroups];  // warps that have rotated queries -> a consumer
};
template <>
struct TeamCodes<0> {};

struct AnySmem : CodeStages<kOwnCodeStages, kCodeBytes> {
  alignas(1024) unsigned char q[kStagesQ][kWarpgroups][kPanelsK * kPanelBytesQ];
  alignas(1024) unsigned char k[kStages][kPanelsK * kPanelBytesK];
  alignas(1024) unsigned char v[kStages][kPanelsV * kPanelBytesK];
  // TMA's bytes -> all consumers, or the filter warps for V where there are any; every consumer
  // warp, and every filter warp for V -> the loading warp. Where keys are codes, warps that expand
  // them are in the place of TMA and of the loading warp.
  ptx::Mbarrier full_k[kStages], empty_k[kStages];
  ptx::Mbarrier full_v[kStages], empty_v[kStages];
  // TMA's bytes -> one consumer; its warps -> the scheduler's warp.
  ptx::Mbarrier full_q[kStagesQ][kWarpgroups], empty_q[kStagesQ][kWarpgroups];
  ptx::Mbarrier filtered_v[kStages];  // every filter warp -> all consumers
  // By a filter warp: it has replaced values of a tile. Filter warps are one tile ahead of
  // consumers at most, as values of a third would need a third stage. Volatile, since a consumer
  // that skips the block its tile ends with may ask while the filter is still at it: that block, of
  // which none of its rows sees a key, can only add to what is said.
  volatile bool replaced[2][2];
  TileQueue queue;
  SortedTiles::Shared sorted;  // of the scheduler's warp alone
};
struct Smem : AnySmem, CodeBarriers<kOwnCodeStages>, TeamCodes<kTeamKeys> {};

// Bias and mask of a consumer's 64 queries and a block of keys, row by row. Rows of bias are 8
// elements longer than the block, so that what eight rows' quads read side by side lies in
// different banks.
constexpr int kBiasPitch = kTileN + 8;
struct ScoreRows {
  alignas(128) unsigned char bias[64 * kBiasPitch * sizeof(float)];
  alignas(128) unsigned char mask[64 * kTileN];
  // The lanes of a filter warp, and TMA's bytes -> the consumer; its warps -> the filter warp.
  ptx::Mbarrier full, empty;
};
static_assert(!Config::elementwise || kTileN % 32 == 16,
              "rows of the mask are to lie in different banks as well");
constexpr int kScoreRows = Config::elementwise ? kWarpgroups : 0;  // they follow Smem

// Masks of dropout (attention/dropout_sm90.cuh): words of a lane's two rows and 64 keys each.
constexpr int kKeysOfMask = 64;
struct DropoutMasks {
  unsigned words[(Config::mask_blocks * kTileN + 63) / kKeysOfMask][128 * kWarpgroups];
};
static_assert(!Config::dropout ||
                  (Config::mask_blocks * kTileN % (2 * kKeysOfMask) == 0 && kScoreRows == 0),
              "masks are computed by two words, and follow Smem, as rows of bias would");

static_assert(sizeof(Smem) + kScoreRows * sizeof(ScoreRows) +
                      (Config::dropout ? sizeof(DropoutMasks) : 0) <=
                  Config::smem_bytes,
              "Config::smem_bytes must hold Smem and what follows it");
static_assert(Config::threads == 128 * (kWarpgroups + 1) + 32 * kExpandWarps,
              "one warpgroup produces, the others consume, or expand codes");
static_assert(!Config::dropout || !(Config::score || Config::pack_gqa), "rows are of one head");
static_assert(kWarpgroups >= 1 && kWarpgroups <= 3,
              "consumers take turns, and have the registers that up to three can have");
static_assert(kStages == 2,
              "a consumer holds one stage while it waits for the next; Smem::replaced");
static_assert(!Config::rope_panel || !(Config::paged_kv || Config::pack_gqa),
              "rows of q and k, and those of their last panels, are found alike");
static_assert(!Config::key_groups || Config::paged_kv, "rows in pages alone are loaded in groups");
static_assert(!Config::even_keys || (Config::seq_lens && Config::pack_gqa && !Config::varlen &&
                                     !Config::split_kv && !Config::bound_left && kWarpgroups == 1),
              "a tile has all rows of a sequence, which see all blocks of its keys");
static_assert(!(Config::pack_gqa && kMayMask), "bias and mask are read as rows of one head");
static_assert(kTileN % 16 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 16 == 0,
              "wgmma multiplies by steps of 16");

// What consumers wait for queries at.
template <class AnySmem>
__device__ __forceinline__ ptx::Mbarrier& queries_barrier(AnySmem& smem, int stage, int consumer) {
  if constexpr (kRotatesQueries)
    return smem.rotated_q[stage][consumer];
  else
    return smem.full_q[stage][consumer];
}

// The warps of attention/forward_codes_sm90.cu and forward_team_codes_sm90.cu, in the place of
// those that load keys and values: attention/expand_sm90.cuh and expand_team_sm90.cuh have them.
template <bool kOfCodes>
struct CodeWarps {
  __device__ static void load(Smem& smem, const Sm90Params& sm90);
  __device__ static void expand(Smem& smem, const Sm90Params& sm90, int warp);
  __device__ static uint4 values(const Params& params, const Sm90Params& sm90, const Tile& tile,
                                 int key, int column);
};

__device__ __forceinline__ DropoutMasks& dropout_masks(Smem& smem) {
  return *reinterpret_cast<DropoutMasks*>(&smem + 1);
}
__device__ __forceinline__ ScoreRows& score_rows(Smem& smem, int consumer) {
  return reinterpret_cast<ScoreRows*>(&smem + 1)[consumer];
}

template <int kNumber>
__device__ __forceinline__ void init_code_barriers(CodeBarriers<kNumber>& smem) {
  for (int i = 0; i < kNumber; ++i) {
    ptx::mbarrier_init(smem.full_codes[i], 1);
    ptx::mbarrier_init(smem.empty_codes[i], kExpandWarps);
  }
}
__device__ __forceinline__ void init_code_barriers(CodeBarriers<0>&) {}
template <int kKeys>
__device__ __forceinline__ void init_code_barriers(TeamCodes<kKeys>& smem) {
  for (auto& of_warp : smem.of_warp) {
    ptx::mbarrier_init(of_warp.full_k, 1);
    ptx::mbarrier_init(of_warp.full_v, 1);
  }
  for (int i = 0; i < kStagesQ * kWarpgroups; ++i)
    ptx::mbarrier_init(smem.rotated_q[i / kWarpgroups][i % kWarpgroups],
                       kExpandWarps / kWarpgroups);
}
__device__ __forceinline__ void init_code_barriers(TeamCodes<0>&) {}

// By one thread.
__device__ __forceinline__ void init_barriers(Smem& smem) {
  for (int i = 0; i < kStages; ++i) {
    ptx::mbarrier_init(smem.full_k[i], kOwnCodeStages > 0 ? kExpandWarps : 1);
    ptx::mbarrier_init(smem.full_v[i], kOwnCodeStages > 0 ? kExpandWarps : 1);
    ptx::mbarrier_init(smem.empty_k[i], 4 * kWarpgroups);
    ptx::mbarrier_init(smem.empty_v[i], 4 * kWarpgroups + kFilterWarps);
    if (kFilterWarps > 0) ptx::mbarrier_init(smem.filtered_v[i], kFilterWarps);
  }
  for (int i = 0; i < kStagesQ * kWarpgroups; ++i) {
    ptx::mbarrier_init(smem.full_q[i / kWarpgroups][i % kWarpgroups], 1);
    ptx::mbarrier_init(smem.empty_q[i / kWarpgroups][i % kWarpgroups], 4);
  }
  for (int i = 0; i < kScoreRows; ++i) {
    ptx::mbarrier_init(score_rows(smem, i).full, 32);
    ptx::mbarrier_init(score_rows(smem, i).empty, 4);
  }
  for (int i = 0; i < TileQueue::kSize; ++i) {
    ptx::mbarrier_init(smem.queue.full[i], 1);
    ptx::mbarrier_init(smem.queue.empty[i],
                       4 * kWarpgroups + 1 + kFilterWarps + kValueWarps + kExpandWarps);
  }
  init_code_barriers(static_cast<CodeBarriers<kOwnCodeStages>&>(smem));
  init_code_barriers(static_cast<TeamCodes<kTeamKeys>&>(smem));
  ptx::fence_mbarrier_init();
}
