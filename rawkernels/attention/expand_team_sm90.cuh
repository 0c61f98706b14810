// The warps of attention/forward_team_codes_sm90.cu that expand codes of keys and values, and that
// load their numbers: thread blocks with neighbouring tiles of a key head are a team, and each
// expands every so many blocks of keys for all of them.
//
// Numbers go to a ring of slots in global memory that is small enough to stay in L2: one slot for
// each block, in which its keys and its values lie as they are to lie in shared memory. Who expands
// is ahead of who loads by as many slots as are free, so that no thread block waits for another in
// step.
//
// A thread block waits for all others of its team. Their numbers follow each other, and thread
// blocks begin in the order of their numbers, so that only the last team which has begun may lack
// some. The other teams end without it, and make room for what it lacks.
#pragma once

#include "attention/code_rows_sm90.cuh"
#include "attention/produce_sm90.cuh"
#include "ptx/acquire_release.cuh"
#include "ptx/bulk.cuh"
#include "tile/quantized.cuh"

constexpr int kMostTeam = 32 / kExpandWarps;  // a lane looks at each warp that expands

// What a team shares in global memory. Blocks are numbered over all tiles, and dealt out to thread
// blocks in turn. Slots follow.
struct alignas(128) TeamMemory {
  // The rest holds once `initialised` is the launch's launch_id. Any content will do before.
  unsigned long long initialised;
  unsigned entered;            // how many warps have found it so
  unsigned loaded[kMostTeam];  // blocks whose slots each thread block has done with
  unsigned expanded[kMostTeam * kExpandWarps];  // the number of each warp's next block
};
struct alignas(128) TeamSlot {
  unsigned char k[kPanelsK * kPanelBytesK], v[kPanelsK * kPanelBytesK];
};

// One warp's view of it; all lanes together.
struct Team {
  const int size, rank, ring_slots;
  TeamMemory& memory;

  __device__ __forceinline__ explicit Team(const Sm90Arguments& sm90)
      : size(team_size(sm90)),
        rank(blockIdx.x % size),
        ring_slots(sm90.scales.ring_slots),
        memory(*reinterpret_cast<TeamMemory*>(
            reinterpret_cast<char*>(sm90.scheduler) +
            blockIdx.x / size * (sizeof(TeamMemory) + ring_slots * sizeof(TeamSlot)))) {}

  __device__ __forceinline__ TeamSlot& slot(int number) const {
    return reinterpret_cast<TeamSlot*>(&memory + 1)[number & (ring_slots - 1)];
  }

  // By the loading warp of a team's first thread block: others wait for it.
  __device__ __forceinline__ void open(const Sm90Params& sm90) const {
    const int lane = threadIdx.x % 32;
    memory.expanded[lane] = lane / kExpandWarps;
    if (lane < kMostTeam) memory.loaded[lane] = 0;
    __syncwarp();
    if (lane == 0) {
      memory.entered = 0;
      ptx::store_release(&memory.initialised, sm90.launch_id);
    }
  }

  // By every warp that expands or loads numbers, before it says anything.
  __device__ __forceinline__ void enter(const Sm90Params& sm90) const {
    if (threadIdx.x % 32 == 0) {
      while (ptx::load_acquire(&memory.initialised) != sm90.launch_id) {
      }
      // The last of all: a replay of this launch in a CUDA graph must not find the launch_id.
      if (atomicAdd(&memory.entered, 1) == size * (kExpandWarps + 1) - 1)
        memory.initialised = ~sm90.launch_id;
    }
    __syncwarp();
  }

  // How many blocks all warps have expanded, and all thread blocks have loaded.
  __device__ __forceinline__ int expanded() const {
    return least(memory.expanded, size * kExpandWarps);
  }
  __device__ __forceinline__ int loaded() const { return least(memory.loaded, size); }

  __device__ __forceinline__ void say_expanded(int warp, unsigned next) const {
    if (threadIdx.x % 32 == 0)
      ptx::store_release(&memory.expanded[rank * kExpandWarps + warp], next);
  }
  // To be called when the copies from these blocks' slots have come, by waits for their stages: no
  // later write can change what has come, so that there is nothing to release.
  __device__ __forceinline__ void say_loaded(unsigned blocks) const {
    if (threadIdx.x % 32 == 0) ptx::store_relaxed(&memory.loaded[rank], blocks);
  }

 private:
  __device__ __forceinline__ static int least(const unsigned* counts, int number) {
    const int lane = threadIdx.x % 32;
    return __reduce_min_sync(~0u, lane < number ? ptx::load_acquire(&counts[lane]) : ~0u);
  }
};

template <>
struct CodeWarps<true> : CodeRows {
  static constexpr int kKeys = kTeamKeys;  // of a block, a warp's
  static constexpr int kNumberBytes = kPanelsK * kPanelBytesK;
  using KeyRows = Expander<Options::k_format, kKeys>;
  using ValueRows = Expander<Options::v_format, kKeys>;
  using Codes = TeamCodes<kTeamKeys>::OfWarp;

  // ------------------------------------------------------------------------------------- loading

  // Loads the numbers of all tiles: values of a block after the keys of the next, as consumers ask
  // for them. Blocks that none of the thread block's own queries sees are passed over.
  __device__ __forceinline__ static void load(Smem& smem, const Sm90Arguments& sm90) {
    const Team team(sm90);
    if (team.rank == 0) team.open(sm90);
    team.enter(sm90);
    tile::PipelineState<kStages> stage_k, stage_v;
    tile::PipelineState<TileQueue::kSize> queue;
    int first = 0, expanded = 0;  // blocks of the tiles before; those that the team has expanded
    const auto wait_expanded = [&](int count) {
      while (expanded < count) expanded = team.expanded();
      ptx::fence_proxy_async_global();
      __syncwarp();
    };
    const auto load_numbers = [&](unsigned char* place, const unsigned char* numbers,
                                  ptx::Mbarrier& full, ptx::Mbarrier& empty,
                                  tile::PipelineState<kStages>& stage) {
      ptx::mbarrier_wait(empty, stage.parity ^ 1);
      if (ptx::elect_one()) {
        ptx::mbarrier_arrive_expect_tx(full, kNumberBytes);
        ptx::bulk_load(place, numbers, kNumberBytes, full);
      }
      __syncwarp();
      stage.advance();
    };
    // Waits for what has been asked for into all stages: copies come in any order.
    const auto wait_loaded = [](ptx::Mbarrier(&full)[kStages], tile::PipelineState<kStages> stage) {
      for (int i = 0; i < kStages; ++i, stage.advance())
        ptx::mbarrier_wait(full[stage.index], stage.parity ^ 1);
    };
    for (Tile tile = read_tile(smem, queue); tile.row >= 0; tile = read_tile(smem, queue)) {
      tile::PipelineState<kStages> last_v = stage_v;  // of the values that were asked for last
      int number = first + tile.team_end - tile.block_end;
      if (number > first) team.say_loaded(number);
      for (int block = tile.block_end - 1; block >= 0; --block, ++number) {
        wait_expanded(number + 1);
        load_numbers(smem.k[stage_k.index], team.slot(number).k, smem.full_k[stage_k.index],
                     smem.empty_k[stage_k.index], stage_k);
        if (block + 1 == tile.block_end) continue;
        if (block + 2 < tile.block_end) {
          // Keys of that block have come, as their stage has been free for this one's.
          ptx::mbarrier_wait(smem.full_v[last_v.index], last_v.parity);
          team.say_loaded(number - 1);
        }
        last_v = stage_v;
        load_numbers(smem.v[stage_v.index], team.slot(number - 1).v, smem.full_v[stage_v.index],
                     smem.empty_v[stage_v.index], stage_v);
      }
      first += tile.team_end;
      if (!tile.empty()) {
        load_numbers(smem.v[stage_v.index], team.slot(number - 1).v, smem.full_v[stage_v.index],
                     smem.empty_v[stage_v.index], stage_v);
        wait_loaded(smem.full_k, stage_k);
        wait_loaded(smem.full_v, stage_v);
      }
      team.say_loaded(first);
    }
  }

  // ----------------------------------------------------------------------------------- expanding

  // Asks for the codes of a warp's keys of a block, or of their values: lanes know their keys'
  // pages.
  template <int kRowCodeBytes>
  __device__ __forceinline__ static void ask(unsigned char* codes, ptx::Mbarrier& full,
                                             const ptx::TensorMap& map, const Sm90Params& sm90,
                                             const Tile& tile, int first_key, int page) {
    if (ptx::elect_one()) ptx::mbarrier_arrive_expect_tx(full, kKeys * kRowCodeBytes);
    const kvcache::PageTable table = page_table(sm90);
#pragma unroll 1
    for (int key = 0; key < kKeys; key += 1 << sm90.box_shift) {
      const int slot = table.slot(first_key + key);
      // What lies past the last key is of a page that does not exist, and reads as zeros.
      const int of_key = __shfl_sync(~0u, page, key);
      const int page_of_box = first_key + key < tile.keys.length ? of_key : -1;
      if (ptx::elect_one())
        ptx::tma_load(codes + key * kRowCodeBytes, map, full, 0, slot, tile.head_kv, page_of_box,
                      ptx::kEvictNormal);
    }
    __syncwarp();
  }

  // Rotates a warp's part of the rows of a tile, as rows of keys are rotated that become codes: a
  // lane has four neighbouring features of each row.
  __device__ __forceinline__ static void rotate_queries(Smem& smem,
                                                        const tile::PipelineState<kStagesQ>& stage,
                                                        int warp) {
    static_assert(kHeadDim == 128, "a row is a warp's");
    constexpr int kRows = kTileM / kExpandWarps;  // of a warp
    static_assert(64 % kRows == 0, "they are of one consumer");
    // Opaque, else what depends on it is kept in registers from tile to tile.
    const int lane = ptx::opaque(static_cast<int>(threadIdx.x % 32));
    const int consumer = warp * kRows / 64, first = warp * kRows % 64;
    ptx::mbarrier_wait(smem.full_q[stage.index][consumer], stage.parity);
    unsigned char* const queries =
        smem.q[stage.index][consumer] + lane / 16 * kPanelBytesQ + first * kRowBytes + lane % 2 * 8;
#pragma unroll 2
    for (int row = 0; row < kRows; ++row) {
      using Four = tile::Vec<T, 4>;
      Four& four = reinterpret_cast<Four&>(
          queries[row * kRowBytes + (lane % 16 / 2 ^ (first + row) % 8) * 16]);
      const Four read = four;
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        x[e] = tile::with_rotation_sign(static_cast<float>(read.x[e]), 4 * lane + e);
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (e & distance) continue;
          const float a = x[e], b = x[e + distance];
          x[e] = ptx::add_rn(a, b);
          x[e + distance] = ptx::sub_rn(a, b);
        }
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const float sign = lane & distance ? -1.0f : 1.0f;
#pragma unroll
        for (int e = 0; e < 4; ++e)
          x[e] = ptx::fma_rn(x[e], sign, __shfl_xor_sync(~0u, x[e], distance));
      }
      const float scale = tile::hadamard_scale(kHeadDim);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = ptx::mul_rn(x[e], scale);
      reinterpret_cast<uint2&>(four) =
          make_uint2(tile::pack<T>(x[0], x[1]), tile::pack<T>(x[2], x[3]));
    }
    ptx::fence_proxy_async();
    tile::arrive_warp(smem.rotated_q[stage.index][consumer]);
  }

  // Expands one warp's keys, and values, of those blocks of all tiles that are the thread
  // block's share.
  __device__ __forceinline__ static void expand(Smem& smem, const Sm90Arguments& sm90, int warp) {
    const Team team(sm90);
    Codes& codes = smem.of_warp[warp];
    const int lane = threadIdx.x % 32, first_of_warp = warp * kKeys;
    tile::PipelineState<TileQueue::kSize> queue;
    tile::PipelineState<kStagesQ> stage_q;
    unsigned parity = 0;
    // Numbers of blocks over all tiles: the warp's next one, the tile's first; and how many the
    // team has loaded.
    int number = team.rank, first = 0, loaded = 0;
    for (Tile tile = read_tile(smem, queue); tile.row >= 0; tile = read_tile(smem, queue)) {
      const int end = first + tile.team_end;
      // The lane's key of a block.
      const auto key_of = [&](int number) {
        return (end - 1 - number) * kTileN + first_of_warp + lane;
      };
      const auto look_up = [&](int number) {
        return entry_of_key(sm90, tile, number < end ? key_of(number) : -1);
      };
      const auto ask_keys = [&](int number, int page) {
        ask<kKeyCodeBytes>(codes.k, codes.full_k, sm90.k, sm90, tile, key_of(number) - lane, page);
      };
      const auto ask_values = [&](int number, int page) {
        ask<kValueCodeBytes>(codes.v, codes.full_v, sm90.v, sm90, tile, key_of(number) - lane,
                             page);
      };
      // Queries are rotated once the first block is on its way.
      bool rotates = kRotatesQueries && !tile.empty();
      const auto rotate = [&] {
        if (!rotates) return;
        rotate_queries(smem, stage_q, warp);
        stage_q.advance();
        rotates = false;
      };
      int page = 0, entry = 0;
      Scales next = {0, 0};
      if (number < end) {
        page = page_of_entry(sm90, look_up(number));
        ask_keys(number, page);
        ask_values(number, page);
        next = scales_of_key(sm90, tile, key_of(number), page);
        entry = look_up(number + team.size);
      }
      for (; number < end; number += team.size) {
        TeamSlot& slot = team.slot(number);
        KeyRows::put_scale(codes.k_scales, next.k);
        ValueRows::put_scale(codes.v_scales, next.v);
        while (number >= loaded + team.ring_slots) loaded = team.loaded();
        ptx::mbarrier_wait(codes.full_k, parity);
        __syncwarp();
        KeyRows::expand(slot.k + first_of_warp * kRowBytes, kPanelBytesK, codes.k, codes.k_scales);
        __syncwarp();
        const int after = number + team.size;
        page = page_of_entry(sm90, entry);
        if (after < end) {
          ask_keys(after, page);
          next = scales_of_key(sm90, tile, key_of(after), page);
          entry = look_up(after + team.size);
        }
        ptx::mbarrier_wait(codes.full_v, parity);
        parity ^= 1;
        ValueRows::expand(slot.v + first_of_warp * kRowBytes, kPanelBytesK, codes.v,
                          codes.v_scales);
        __syncwarp();
        if (after < end) ask_values(after, page);
        if (number < team.size) team.enter(sm90);
        team.say_expanded(warp, after);
        rotate();
      }
      rotate();
      first = end;
    }
    if (number < team.size) team.enter(sm90);
  }
};
