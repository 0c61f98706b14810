// Attention forward on Hopper: out = softmax(scale * Q K^T) V with wgmma, TMA and specialised warps.
//
//   q (batch, seqlen_q, heads_q, head_dim), k and v with heads_kv heads, out; float16 or bfloat16; 16-byte strides.
//   One block an SM, walking over tiles of 64 * Config::warpgroups queries of one head (attention/work_sm90.cuh).
//   Warpgroup 0 produces: warp 0 finds tiles and brings K and V, block after block of keys, through a ring of stages; warp
//   1 + w brings the 64 queries of consumer w. Warpgroups 1 and on consume: 64 queries each, scores and O in registers.
//
// A consumer never drains: while P V of one block runs, so does Q K^T of the next, be it of the same tile or of the next
// one, and the next block's exponentials hide behind the products of this and of the other consumers.
#include "attention/params.cuh"
#include "attention/work_sm90.cuh"
#include "ptx/bar.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/score.cuh"
#include "tile/softmax.cuh"

using T = Config::dtype;

constexpr int kWarpgroups = Config::warpgroups;  // that consume
constexpr int kTileN = Config::tile_n;
constexpr int kHeadDim = Config::head_dim;  // of q and k, padded: the copy engine fills with zeros
constexpr int kHeadDimV = Config::head_dim_v;
constexpr int kPanelColumns = 64;  // a tile lies in shared memory as panels of 64 columns, 128 bytes a row
constexpr int kRowBytes = 128;
constexpr int kPanelsK = (kHeadDim + 63) / 64;
constexpr int kPanelsV = (kHeadDimV + 63) / 64;
constexpr int kPanelBytesQ = 64 * kRowBytes;
constexpr int kPanelBytesK = kTileN * kRowBytes;
constexpr int kStages = Config::stages;
constexpr int kSlots = Config::q_slots;

// Registers of a thread: the block has 65536, and gets them evenly at first.
constexpr int kProducerRegisters = kWarpgroups == 1 ? 56 : kWarpgroups == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kWarpgroups == 1 ? 256 : kWarpgroups == 2 ? 232 : 160;

struct Smem {
  alignas(1024) unsigned char q[kSlots][kWarpgroups][kPanelsK * kPanelBytesQ];
  alignas(1024) unsigned char k[kStages][kPanelsK * kPanelBytesK];
  alignas(1024) unsigned char v[kStages][kPanelsV * kPanelBytesK];
  ptx::Mbarrier full_k[kStages], full_v[kStages];                        // the copy engine's bytes -> all consumers
  ptx::Mbarrier empty_k[kStages], empty_v[kStages];                      // every consumer warp -> warp 0
  ptx::Mbarrier full_q[kSlots][kWarpgroups], empty_q[kSlots][kWarpgroups];  // the same between a consumer and its warp
  TileQueue queue;
};

static_assert(sizeof(Smem) <= Config::smem_bytes, "Config::smem_bytes must hold Smem");
static_assert(Config::threads == 128 * (kWarpgroups + 1), "one warpgroup produces, the others consume");
static_assert(kWarpgroups <= 3, "warps 1 to 3 of the producing warpgroup serve one consumer each");
static_assert(kStages >= 2, "a consumer holds one stage while it waits for the next");
static_assert(kTileN % 16 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "wgmma multiplies by steps of 16");

// Which stage of a ring, and the parity of its current use.
template <int kSize>
struct Ring {
  int index = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kSize) {
      index = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ void arrive_warp(ptx::Mbarrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// Brings `kPanels` panels of rows of one head when the consumers have left their place. All lanes of a warp together.
template <int kPanels, int kPanelBytes>
__device__ __forceinline__ void load(unsigned char* place, const ptx::TensorMap& map, ptx::Mbarrier& full, ptx::Mbarrier& empty,
                                     unsigned parity, const Sequence& sequence, int row, int head, unsigned long long cache_hint) {
  ptx::mbarrier_wait(empty, parity ^ 1);
  if (threadIdx.x % 32 == 0) {
    ptx::mbarrier_arrive_expect_tx(full, kPanels * kPanelBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      ptx::tma_load(place + panel * kPanelBytes, map, full, panel * kPanelColumns, sequence.shift + row, head, sequence.outer,
                    cache_hint);
  }
  __syncwarp();
}

__device__ __forceinline__ void load_keys_and_values(Smem& smem, const ForwardParams& params, const Sm90Params& sm90) {
  Ring<kStages> ring_k, ring_v;
  Ring<TileQueue::kSize> ring;
  int pending = -1;  // the block whose keys have been asked for, and whose values have not
  Sequence keys;
  int head;
  const auto load_values = [&] {
    load<kPanelsV, kPanelBytesK>(smem.v[ring_v.index], sm90.v, smem.full_v[ring_v.index], smem.empty_v[ring_v.index],
                                 ring_v.parity, keys, pending * kTileN, head, ptx::kEvictLast);
    ring_v.advance();
  };
  WalkOf<Config::varlen>::Type walk(params, sm90);
  while (true) {
    const Tile tile = walk.next();
    ptx::mbarrier_wait(smem.queue.empty[ring.index], ring.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      smem.queue.tiles[ring.index] = tile;
      ptx::mbarrier_arrive(smem.queue.full[ring.index]);
    }
    __syncwarp();
    ring.advance();
    if (tile.row < 0) break;
    for (int block = tile.block_end - 1; block >= tile.block_begin; --block) {
      load<kPanelsK, kPanelBytesK>(smem.k[ring_k.index], sm90.k, smem.full_k[ring_k.index], smem.empty_k[ring_k.index],
                                   ring_k.parity, tile.keys, block * kTileN, tile.head_kv, ptx::kEvictLast);
      ring_k.advance();
      if (pending >= 0) load_values();  // consumers ask for the values of a block after the keys of the next
      pending = block;
      keys = tile.keys;
      head = tile.head_kv;
    }
  }
  if (pending >= 0) load_values();
}

// The next tile that the finding warp has put into the queue.
__device__ __forceinline__ Tile read_tile(Smem& smem, Ring<TileQueue::kSize>& ring) {
  ptx::mbarrier_wait(smem.queue.full[ring.index], ring.parity);
  Tile tile = smem.queue.tiles[ring.index];
  int(&words)[sizeof(Tile) / 4] = reinterpret_cast<int(&)[sizeof(Tile) / 4]>(tile);
#pragma unroll
  for (int& word : words) word = __shfl_sync(~0u, word, 0);  // the compiler is to know that it is the warp's
  arrive_warp(smem.queue.empty[ring.index]);
  ring.advance();
  return tile;
}

__device__ __forceinline__ void load_queries(Smem& smem, const Sm90Params& sm90, int consumer) {
  Ring<kSlots> slots;
  Ring<TileQueue::kSize> ring;
  for (Tile tile = read_tile(smem, ring); tile.row >= 0; tile = read_tile(smem, ring)) {
    if (tile.empty()) continue;
    load<kPanelsK, kPanelBytesQ>(smem.q[slots.index][consumer], sm90.q, smem.full_q[slots.index][consumer],
                                 smem.empty_q[slots.index][consumer], slots.parity, tile.queries, tile.row + 64 * consumer,
                                 tile.head, ptx::kEvictFirst);
    slots.advance();
  }
}

// S = Q K^T for 64 queries and a block of keys: issued, not waited for.
__device__ __forceinline__ void multiply_keys(float (&s)[kTileN / 2], const unsigned char* q, const unsigned char* k) {
  const unsigned long long a = ptx::wgmma_descriptor(q, 0, 1024);
  const unsigned long long b = ptx::wgmma_descriptor(k, 0, 1024);
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step)
    ptx::Wgmma<kTileN, T>::shared_shared<false, false>(s, ptx::wgmma_advance(a, step / 4 * kPanelBytesQ + step % 4 * 32),
                                                       ptx::wgmma_advance(b, step / 4 * kPanelBytesK + step % 4 * 32), step > 0);
  ptx::wgmma_commit_group();
}

// O += P V for a block of keys: issued, not waited for.
__device__ __forceinline__ void multiply_values(float (&o)[kHeadDimV / 2], const unsigned (&p)[kTileN / 4],
                                                const unsigned char* v) {
  const unsigned long long b = ptx::wgmma_descriptor(v, kPanelBytesK, 1024);
#pragma unroll
  for (int step = 0; step < kTileN / 16; ++step)
    ptx::Wgmma<kHeadDimV, T>::register_shared<true>(o, p + 4 * step, ptx::wgmma_advance(b, step * 16 * kRowBytes), true);
  ptx::wgmma_commit_group();
}

// Sets scores that a query must not see to -inf.
__device__ __forceinline__ void mask_scores(float (&s)[kTileN / 2], const ForwardParams& params, const Tile& tile, int row,
                                            int column) {
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) {
    const int query = row + 8 * (i / 2 % 2), key = i / 4 * 8 + i % 2;
    if (key >= tile.end_key(params, query) - column || (Config::bound_left && key < tile.first_key(params, query) - column))
      s[i] = tile::negative_infinity();
  }
}

// Divides O by the sums of exponentials and writes it and lse. Lanes 2i and 2i + 1 exchange halves, so that each writes four
// columns side by side and a row's writes fill whole 32-byte sectors.
__device__ __forceinline__ void write_output(float (&o)[kHeadDimV / 2], const tile::OnlineSoftmax& softmax, float scale_log2,
                                             const ForwardParams& params, const Tile& tile, int row) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane % 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = tile::quad_sum(softmax.row_sum[i]);
    float max = tile::OnlineSoftmax::offset(softmax.row_max[i], scale_log2);
    float rescale = 1.0f;
    if (params.sinks != nullptr) {
      const float sink = static_cast<const float*>(params.sinks)[tile.head] * tile::kLog2e;
      const float larger = sum == 0.0f ? sink : fmaxf(max, sink);
      rescale = ptx::ex2(max - larger);
      sum = sum * rescale + ptx::ex2(sink - larger);
      max = larger;
    }
    const float inverse = sum == 0.0f ? 0.0f : rescale * ptx::rcp(sum);
    const bool exists = row + 8 * i < tile.queries.length;
    T* const out = static_cast<T*>(params.out) + tile.out_offset(params, row + 8 * i) + (odd ? 6 : 0) + lane % 4 * 2;
#pragma unroll
    for (int step = 0; step < kHeadDimV / 16; ++step) {
      const float(&d)[kHeadDimV / 2] = o;
      const unsigned low = tile::pack<T>(d[8 * step + 2 * i] * inverse, d[8 * step + 2 * i + 1] * inverse);
      const unsigned high = tile::pack<T>(d[8 * step + 2 * i + 4] * inverse, d[8 * step + 2 * i + 5] * inverse);
      const unsigned other = __shfl_xor_sync(~0u, odd ? low : high, 1);
      if (exists && 16 * step + (odd ? 8 : 0) < params.head_dim_v)
        *reinterpret_cast<uint2*>(out + 16 * step) = odd ? make_uint2(other, high) : make_uint2(low, other);
    }
    if (exists && params.lse != nullptr && lane % 4 == 0)
      static_cast<float*>(params.lse)[tile.lse_offset(params, row + 8 * i)] = (max + ptx::lg2(sum)) * tile::kLn2;
  }
}

__device__ __forceinline__ void consume(Smem& smem, const ForwardParams& params, int consumer) {
  // Consumers take turns in issuing products, so that one's exponentials run beside another's products.
  const int turn = 1 + consumer, next_turn = 1 + (consumer + 1) % kWarpgroups;
  const auto wait_turn = [&] { ptx::bar_sync(turn, 256); };
  const auto pass_turn = [&] { ptx::bar_arrive(next_turn, 256); };
  if (consumer == kWarpgroups - 1) pass_turn();

  const int lane_row = 64 * consumer + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const int lane_column = threadIdx.x % 4 * 2;
  const float scale_log2 = Config::score ? tile::kLog2e : static_cast<float>(params.scale) * tile::kLog2e;
  Ring<kStages> ring_k, ring_v;
  Ring<kSlots> ring_q;
  Ring<TileQueue::kSize> ring;
  tile::OnlineSoftmax softmax;
  float s[kTileN / 2], o[kHeadDimV / 2], block_max[2], correction[2];
  unsigned p[kTileN / 4];

  const auto clear = [&] {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) o[i] = 0.0f;
  };
  // The next tile that has keys. Rows that see no key are zeros.
  const auto find_tile = [&] {
    Tile tile = read_tile(smem, ring);
    for (; tile.row >= 0 && tile.empty(); tile = read_tile(smem, ring)) {
      clear();
      write_output(o, tile::OnlineSoftmax(), scale_log2, params, tile, tile.row + lane_row);
    }
    return tile;
  };
  Tile tile = find_tile();
  if (tile.row < 0) return;
  int block = tile.block_end - 1;

  // What becomes of the products of Q and K, before and while exponentials are taken.
  const auto receive_scores = [&] {
    ptx::wgmma_keep(s);
    arrive_warp(smem.empty_k[ring_k.index]);
    ring_k.advance();
    if (block == tile.block_begin) {
      arrive_warp(smem.empty_q[ring_q.index][consumer]);
      ring_q.advance();
    }
    const int row = tile.row + lane_row, column = block * kTileN + lane_column;
    if constexpr (Config::score) {
      const tile::ScoreTerms<T> terms(params, tile.batch, tile.head, tile.queries.length, tile.keys.length);
      terms.apply(s, params, row, column);
    }
    if (tile.hides_keys(params, block, 64 * consumer)) mask_scores(s, params, tile, row, column);
  };

  // The first scores, with nothing beside them.
  ptx::mbarrier_wait(smem.full_q[0][consumer], 0);
  ptx::mbarrier_wait(smem.full_k[0], 0);
  ptx::wgmma_keep(s);
  ptx::wgmma_fence();
  multiply_keys(s, smem.q[0][consumer], smem.k[0]);
  ptx::wgmma_wait_group<0>();
  receive_scores();
  softmax.update(s, scale_log2, correction);
  tile::pack_fragment<T>(p, s);
  clear();

  while (true) {
    const Tile finished = tile;
    const bool fresh = block == tile.block_begin;  // the next scores are of another tile
    if (fresh) {
      tile = find_tile();
      if (tile.row < 0) {
        tile = finished;
        break;
      }
      block = tile.block_end;
      ptx::mbarrier_wait(smem.full_q[ring_q.index][consumer], ring_q.parity);
    }
    --block;
    ptx::mbarrier_wait(smem.full_k[ring_k.index], ring_k.parity);
    ptx::mbarrier_wait(smem.full_v[ring_v.index], ring_v.parity);
    wait_turn();
    ptx::wgmma_keep(s);
    ptx::wgmma_keep(o);
    ptx::wgmma_fence();
    multiply_keys(s, smem.q[ring_q.index][consumer], smem.k[ring_k.index]);
    multiply_values(o, p, smem.v[ring_v.index]);
    pass_turn();
    ptx::wgmma_wait_group<1>();
    receive_scores();
    const tile::OnlineSoftmax before = softmax;
    if (fresh) softmax = tile::OnlineSoftmax();
    const bool grown = __any_sync(~0u, softmax.outgrown(s, scale_log2, block_max));
    if (grown) softmax.raise(block_max, scale_log2, correction);
    // Exponentials wait for P V: the tensor cores have the other consumers' products by now, and the packing of P into the
    // registers that P V reads hides behind the exponentials (5% faster than exponentials first, on an H200).
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_keep(o);
    arrive_warp(smem.empty_v[ring_v.index]);
    ring_v.advance();
    if (fresh) {
      write_output(o, before, scale_log2, params, finished, finished.row + lane_row);
      clear();
    } else if (grown) {
      tile::scale_rows(o, correction);
    }
    softmax.exponentiate(s, scale_log2);
    tile::pack_fragment<T>(p, s);
  }

  ptx::mbarrier_wait(smem.full_v[ring_v.index], ring_v.parity);
  ptx::wgmma_keep(o);
  ptx::wgmma_fence();
  multiply_values(o, p, smem.v[ring_v.index]);
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_keep(o);
  write_output(o, softmax, scale_log2, params, tile, tile.row + lane_row);
}

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    forward_sm90(const __grid_constant__ ForwardParams params, const __grid_constant__ Sm90Params sm90) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Smem& smem = *reinterpret_cast<Smem*>(shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(sm90.q);
    ptx::prefetch_tensormap(sm90.k);
    ptx::prefetch_tensormap(sm90.v);
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(smem.full_k[i], 1);
      ptx::mbarrier_init(smem.full_v[i], 1);
      ptx::mbarrier_init(smem.empty_k[i], 4 * kWarpgroups);
      ptx::mbarrier_init(smem.empty_v[i], 4 * kWarpgroups);
    }
    for (int i = 0; i < kSlots * kWarpgroups; ++i) {
      ptx::mbarrier_init(smem.full_q[i / kWarpgroups][i % kWarpgroups], 1);
      ptx::mbarrier_init(smem.empty_q[i / kWarpgroups][i % kWarpgroups], 4);
    }
    for (int i = 0; i < TileQueue::kSize; ++i) {
      ptx::mbarrier_init(smem.queue.full[i], 1);
      ptx::mbarrier_init(smem.queue.empty[i], 5 * kWarpgroups);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) {
      load_keys_and_values(smem, params, sm90);
    } else if (warp <= kWarpgroups) {
      load_queries(smem, sm90, warp - 1);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume(smem, params, warpgroup - 1);
  }
}
