// Attention forward on mma.sync: any GPU from Ampere on, float16 and bfloat16. The whole of ForwardParams' contract.
#include "attention/params.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "tile/score.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"
#include "tile/varlen.cuh"

using T = Config::dtype;
constexpr int kDim = Config::head_dim, kDimV = Config::head_dim_v;
constexpr int kTileM = Config::tile_m, kTileN = Config::tile_n;
constexpr int kThreads = Config::threads, kWarps = kThreads / 32;
constexpr int kSlots = Config::slots;
constexpr int kRows = kTileM / kWarps;  // of a warp
constexpr int kBlocksM = kRows / 16;
constexpr bool kGeneral = Config::general;

static_assert(kRows % 16 == 0, "a warp's rows are whole m16 blocks");
static_assert(kTileN % 16 == 0 && kTileN <= 64, "whole k16 steps of P·V");

using TileQ = tile::SwizzledTile<T, kDim>;
using TileK = tile::SwizzledTile<T, kDim>;
using TileV = tile::SwizzledTile<T, kDimV>;

constexpr int kMaxDim = kDim > kDimV ? kDim : kDimV;
constexpr int kBytesQ = kTileM * kMaxDim * 2;  // O leaves through it
constexpr int kBytesSlot = kTileN * kMaxDim * 2;
static_assert(kBytesQ + kSlots * kBytesSlot <= Config::smem_bytes, "Q and the ring");

extern __shared__ __align__(128) unsigned char smem[];

struct Problem {
  int batch, head, tile;
  long long begin_q, begin_k;
  int seqlen_q, seqlen_k;
};

__device__ __forceinline__ Problem problem(const ForwardParams& params) {
  if (params.cu_seqlens_q != nullptr) {
    const int slot = gridDim.x - 1 - blockIdx.x;
    const tile::Sequence s = tile::varlen_sequence<kTileM>(params, slot);
    return {s.index, static_cast<int>(blockIdx.y), s.tile, s.begin_q, s.begin_k, s.seqlen_q, s.seqlen_k};
  }
  const unsigned tiles = (params.seqlen_q + kTileM - 1) / kTileM;
  const unsigned group = gridDim.x / tiles;
  const long long head = static_cast<long long>(blockIdx.y) * group + blockIdx.x % group;
  const bool exists = head < static_cast<long long>(params.batch) * params.heads_q;
  const unsigned h = static_cast<unsigned>(head);
  return {static_cast<int>(h / params.heads_q), static_cast<int>(h % params.heads_q), exists ? static_cast<int>(tiles - 1 - blockIdx.x / group) : -1, 0, 0, params.seqlen_q, params.seqlen_k};
}

extern "C" __global__ void __launch_bounds__(kThreads, Config::blocks_per_sm) forward(const __grid_constant__ ForwardParams params) {
  const Problem p = problem(params);
  if (p.tile < 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head_kv = p.head / (params.heads_q / params.heads_kv);
  const bool varlen = params.cu_seqlens_q != nullptr;
  const T* q = static_cast<const T*>(params.q) + p.head * params.q_stride.head + (varlen ? 0 : p.batch) * params.q_stride.batch + p.begin_q * params.q_stride.seq;
  const T* k = static_cast<const T*>(params.k) + head_kv * params.k_stride.head + (varlen ? 0 : p.batch) * params.k_stride.batch + p.begin_k * params.k_stride.seq;
  const T* v = static_cast<const T*>(params.v) + head_kv * params.v_stride.head + (varlen ? 0 : p.batch) * params.v_stride.batch + p.begin_k * params.v_stride.seq;

  const int first_row = p.tile * kTileM;
  const int last_row = min(first_row + kTileM, p.seqlen_q) - 1;
  const tile::Band band = tile::band<kTileM>(params, first_row, p.seqlen_q, p.seqlen_k);
  const int key_begin = max(band.begin, 0);
  const int key_end = min(band.end + last_row - first_row, p.seqlen_k);
  const int tile_begin = key_begin / kTileN;
  const int tiles = key_end > key_begin ? (key_end + kTileN - 1) / kTileN - tile_begin : 0;
  const bool aligned = !kGeneral || true;

  const int warp_row = warp * kRows;  // of the tile
  const int row = warp_row + lane / 4;

  const unsigned smem_q = ptx::shared_address(smem);
  const unsigned ring = smem_q + kBytesQ;

  // Half step h of tile h / 2 from the end: K for even h, V for odd.
  auto load = [&](int h, unsigned slot) {
    const int n0 = (tile_begin + tiles - 1 - h / 2) * kTileN;
    if (h / 2 < tiles) {
      if (h % 2 == 0)
        TileK::load<kTileN, kThreads>(ring + slot * kBytesSlot, k, params.k_stride.seq, params.head_dim, n0, key_begin, key_end, aligned);
      else
        TileV::load<kTileN, kThreads>(ring + slot * kBytesSlot, v, params.v_stride.seq, params.head_dim_v, n0, key_begin, key_end, aligned);
    }
    ptx::cp_async_commit();
  };

  TileQ::load<kTileM, kThreads>(smem_q, q, params.q_stride.seq, params.head_dim, first_row, 0, p.seqlen_q, aligned);
#pragma unroll
  for (int h = 0; h < kSlots - 1; ++h) load(h, h);

  const float scale_log2 = kGeneral ? tile::kLog2e : static_cast<float>(params.scale) * tile::kLog2e;
  float acc_o[kBlocksM][kDimV / 2] = {};
  tile::OnlineSoftmax softmax[kBlocksM];
  const unsigned q_address = smem_q + warp * kRows * TileQ::kRowBytes + TileQ::lane_offset_row_major();

  unsigned frag_q[Config::q_in_registers ? kDim / 16 : 1][kBlocksM][4];
  if (Config::q_in_registers) {
    ptx::cp_async_wait<kSlots - 2>();
    __syncthreads();
#pragma unroll
    for (int kk = 0; kk < kDim / 16; ++kk)
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m)
        ptx::ldmatrix_x4(frag_q[kk][m], TileQ::at_chunks(q_address, kk) + m * 16 * TileQ::kRowBytes);
  }

  int slot = 0;
  auto next = [](int s, int by) { s += by; return s >= kSlots ? s - kSlots : s; };
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    const int n0 = (tile_begin + tiles - 1 - i) * kTileN;
    const bool active = band.sees_any(warp_row, warp_row + kRows - 1, n0, kTileN);
    ptx::cp_async_wait<kSlots - 2>();
    __syncthreads();
    load(2 * i + kSlots - 1, next(slot, kSlots - 1));

    float acc_s[kBlocksM][kTileN / 2];
    if (active) {
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m)
#pragma unroll
        for (int j = 0; j < kTileN / 2; ++j) acc_s[m][j] = 0.0f;
      const unsigned k_address = ring + slot * kBytesSlot + TileK::lane_offset_column_major();
#pragma unroll
      for (int kk = 0; kk < kDim / 16; ++kk) {
        if (!Config::q_in_registers) {
#pragma unroll
          for (int m = 0; m < kBlocksM; ++m)
            ptx::ldmatrix_x4(frag_q[0][m], TileQ::at_chunks(q_address, kk) + m * 16 * TileQ::kRowBytes);
        }
#pragma unroll
        for (int j = 0; j < kTileN / 16; ++j) {
          unsigned frag_k[4];
          ptx::ldmatrix_x4(frag_k, TileK::at_chunks(k_address, kk) + j * 16 * TileK::kRowBytes);
#pragma unroll
          for (int m = 0; m < kBlocksM; ++m) {
            const unsigned(&a)[4] = frag_q[Config::q_in_registers ? kk : 0][m];
            ptx::mma_m16n8k16<T>(&acc_s[m][8 * j], a, frag_k[0], frag_k[1]);
            ptx::mma_m16n8k16<T>(&acc_s[m][8 * j + 4], a, frag_k[2], frag_k[3]);
          }
        }
      }
    }
    slot = next(slot, 1);
    ptx::cp_async_wait<kSlots - 2>();
    __syncthreads();
    load(2 * i + kSlots, next(slot, kSlots - 1));
    if (active) {
      unsigned kept = ~0u;
      const int column = n0 + lane % 4 * 2;
      if (kGeneral) {
        const tile::ScoreTerms<T> terms(params, p.batch, p.head, p.seqlen_q, p.seqlen_k);
        kept = 0;
#pragma unroll
        for (int m = 0; m < kBlocksM; ++m) kept |= terms.apply(acc_s[m], params, first_row + row + 16 * m, column);
#pragma unroll
        for (int i = 4; i < 32; i *= 2) kept |= __shfl_xor_sync(~0u, kept, i);
      }
      if (!band.sees_all(warp_row, warp_row + kRows - 1, n0, kTileN)) {
#pragma unroll
        for (int m = 0; m < kBlocksM; ++m) tile::mask_band(acc_s[m], band, row + 16 * m, column);
      }
      unsigned frag_p[kBlocksM][kTileN / 4];
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) {
        float correction[2];
        if (softmax[m].update(acc_s[m], scale_log2, correction)) tile::scale_rows(acc_o[m], correction);
        tile::pack_fragment<T>(frag_p[m], acc_s[m]);
      }
      const unsigned v_address = ring + slot * kBytesSlot + TileV::lane_offset_row_major();
#pragma unroll
      for (int kk = 0; kk < kTileN / 16; ++kk) {
        unsigned keep[2];
        if (kGeneral) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int bit = 4 * kk + 2 * half;
            keep[half] = (kept >> bit & 1 ? 0xffffu : 0u) | (kept >> bit & 2 ? 0xffff0000u : 0u);
          }
        }
#pragma unroll
        for (int j = 0; j < kDimV / 16; ++j) {
          unsigned frag_v[4];
          ptx::ldmatrix_x4_trans(frag_v, TileV::at_chunks(v_address, j) + kk * 16 * TileV::kRowBytes);
          if (kGeneral) {
            frag_v[0] &= keep[0];
            frag_v[1] &= keep[1];
            frag_v[2] &= keep[0];
            frag_v[3] &= keep[1];
          }
#pragma unroll
          for (int m = 0; m < kBlocksM; ++m) {
            const unsigned a[4] = {frag_p[m][4 * kk], frag_p[m][4 * kk + 1], frag_p[m][4 * kk + 2], frag_p[m][4 * kk + 3]};
            ptx::mma_m16n8k16<T>(&acc_o[m][8 * j], a, frag_v[0], frag_v[1]);
            ptx::mma_m16n8k16<T>(&acc_o[m][8 * j + 4], a, frag_v[2], frag_v[3]);
          }
        }
      }
    }
    slot = next(slot, 1);
  }

  // Epilogue
  ptx::cp_async_wait<0>();
  __syncthreads();
  const float scale = kGeneral ? 1.0f : static_cast<float>(params.scale);
#pragma unroll
  for (int m = 0; m < kBlocksM; ++m) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = tile::quad_sum(softmax[m].row_sum[r]);
      float max = softmax[m].row_max[r] * scale;
      float rescale = 1.0f;
      if (params.sinks != nullptr) {
        const float sink = static_cast<const float*>(params.sinks)[p.head];
        const float top = fmaxf(max, sink);
        rescale = ptx::ex2((max - top) * tile::kLog2e);
        sum = sum * rescale + ptx::ex2((sink - top) * tile::kLog2e);
        max = top;
      }
      factor[r] = sum > 0.0f || sum != sum ? rescale / sum : 0.0f;
      const int i = first_row + row + 16 * m + 8 * r;
      if (params.lse != nullptr && lane % 4 == 0 && i < p.seqlen_q) {
        const long long head_row = varlen ? p.head : static_cast<long long>(p.batch) * params.heads_q + p.head;
        static_cast<float*>(params.lse)[head_row * params.seqlen_q + p.begin_q + i] = sum == 0.0f ? tile::negative_infinity() : max + ptx::lg2(sum) * tile::kLn2;
      }
    }
    tile::scale_rows(acc_o[m], factor);
    const int smem_row = warp * kRows + 16 * m + lane / 4;
#pragma unroll
    for (int j = 0; j < kDimV / 8; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int sr = smem_row + 8 * r;
        const int at = sr * TileV::kRowBytes + (TileV::permuted(sr, j % TileV::kGroup) + j / TileV::kGroup * TileV::kGroup) * 16 + lane % 4 * 4;
        *reinterpret_cast<unsigned*>(smem + at) = tile::pack<T>(acc_o[m][4 * j + 2 * r], acc_o[m][4 * j + 2 * r + 1]);
      }
  }
  __syncthreads();
  T* out = static_cast<T*>(params.out) + p.head * params.out_stride.head + (varlen ? 0 : p.batch) * params.out_stride.batch + (p.begin_q + first_row) * params.out_stride.seq;
  constexpr int kChunks = kDimV / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < kTileM * kChunks; i += kThreads) {
    const int r = i / kChunks, c = i % kChunks;
    if (first_row + r < p.seqlen_q && c * 8 < params.head_dim_v) {
      const uint4 chunk = *reinterpret_cast<const uint4*>(smem + r * TileV::kRowBytes + (TileV::permuted(r, c % TileV::kGroup) + c / TileV::kGroup * TileV::kGroup) * 16);
      *reinterpret_cast<uint4*>(out + r * params.out_stride.seq + c * 8) = chunk;
    }
  }
}
