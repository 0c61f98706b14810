// Products of queries and of probabilities with codes, for mla/decode_codes_sm90.cu.
//
// Operands are swapped: keys, and columns of values, fill the 64 rows of wgmma's A, which a warp
// makes from codes in its registers, and the rows of the tile are the columns of B. So no code is
// expanded in shared memory.
#pragma once

#include "mla/layout_codes_sm90.cuh"
#include "ptx/cvt_e4m3x4.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/wgmma_narrow.cuh"

namespace mla {

// Codes -> float16, exactly: pairs of a word of four of a key, in order, or of two of each of two
// keys, of the first columns and of the second.
template <int kFormat>
struct WholeCodes : tile::Codes<kFormat> {};
template <>
struct WholeCodes<tile::kE4m3> {
  __device__ __forceinline__ static void expand_keys(unsigned (&pairs)[2], unsigned word) {
    ptx::cvt_e4m3x4(pairs, word);
  }
  __device__ __forceinline__ static void expand_values(unsigned (&pairs)[2], unsigned word) {
    ptx::cvt_e4m3x4(pairs, __byte_perm(word, 0, 0x3120));
  }
};
template <>
struct WholeCodes<tile::kInt8> {
  __device__ __forceinline__ static unsigned pair(unsigned from_128, unsigned selector) {
    return tile::subtract_pair(__byte_perm(from_128, 0x64646464, selector), 0x6480);
  }
  __device__ __forceinline__ static void expand_keys(unsigned (&pairs)[2], unsigned word) {
    const unsigned from_128 = word ^ 0x80808080;
    pairs[0] = pair(from_128, 0x4140);
    pairs[1] = pair(from_128, 0x4342);
  }
  __device__ __forceinline__ static void expand_values(unsigned (&pairs)[2], unsigned word) {
    const unsigned from_128 = word ^ 0x80808080;
    pairs[0] = pair(from_128, 0x4240);
    pairs[1] = pair(from_128, 0x4341);
  }
};

// What a key's products and its probabilities are multiplied by, and the same in log2.
struct Scale {
  float factor, level;
};

// With g = lane / 4 and t = lane % 4: scores s[4j + 2h + e] are of key 16 warp + 8 h + g of a block
// and row 8 j + 2 t + e; o[i][4j + 2h + e] of column 64 i + 16 warp + 2 g + h and that row.
struct CodeProducts {
  using Codes = WholeCodes<Config::latent_format>;
  static constexpr int kScores = kRows / 2;                 // of a lane
  static constexpr int kProducts = kLatent / 64;            // of 64 columns of O each
  static constexpr int kBuffers = Config::operand_buffers;  // of operands of two steps each
  using Scores = float[kScores];

  Smem& smem;
  const DecodeParams& params;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;

  // Sᵀ of a block: products with the codes of each scale, then with what is rotated.
  __device__ __forceinline__ void multiply_keys(Scores& s, const Stage& stage) const {
    const unsigned key = warp * kWarpKeys + lane % 16;
    const unsigned from = ptx::shared_address(stage.tokens[key]) + lane / 16 * 16;
    const unsigned q = uniform_base(smem.q);
    constexpr int kBatches = kLatent / 32, kOfPiece = kBatches / kTokenScales;
    unsigned codes[3][4], a[kBuffers][2][4];
    ptx::ldmatrix_x4(codes[0], from);
    ptx::ldmatrix_x4(codes[1], from + 32);
#pragma unroll
    for (int piece = 0; piece < kTokenScales; ++piece) {
      Scores products;
      ptx::wgmma_keep(products);
#pragma unroll
      for (int j = 0; j < kOfPiece; ++j) {
        const int i = piece * kOfPiece + j;
        if (i + 2 < kBatches) ptx::ldmatrix_x4(codes[(i + 2) % 3], from + (i + 2) * 32);
        if (j >= kBuffers) ptx::wgmma_wait_group<kBuffers - 1>();
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          unsigned upper[2], lower[2];
          Codes::expand_keys(upper, codes[i % 3][2 * step]);
          Codes::expand_keys(lower, codes[i % 3][2 * step + 1]);
          unsigned (&x)[4] = a[i % kBuffers][step];
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            x[2 * pair] = upper[pair];
            x[2 * pair + 1] = lower[pair];
          }
        }
        issue<__half>(products, a[i % kBuffers], q, i / 2 * kPanelBytes + i % 2 * 64, j > 0);
      }
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_keep(products);
      const float scales[2] = {stored_scale(stage, 0, piece), stored_scale(stage, 1, piece)};
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const float scale = scales[i / 2 % 2];
        s[i] = piece == 0 ? products[i] * scale : fmaf(products[i], scale, s[i]);
      }
    }
    unsigned rotated[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::ldmatrix_x4(rotated[step], from + kRopeAt + step * 32);
    ptx::wgmma_keep(s);
    issue<T>(s, rotated, q, kPanels * kPanelBytes, true);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_keep(s);
  }

  // O += Vᵀ Pᵀ: of the first half of the keys, whose place is free then, and of the second.
  __device__ __forceinline__ void add_values(float (&o)[kProducts][kScores], const Stage& stage,
                                             const unsigned char* probabilities,
                                             ptx::Mbarrier (&empty)[2]) const {
    const unsigned from = ptx::shared_address(stage.tokens[lane]) + warp * 16;
    const unsigned p = uniform_base(probabilities);
    constexpr int kBatches = 2 * kProducts;  // of 32 keys and one product
    const auto load = [&](unsigned (&codes)[4], int i) {
      ptx::ldmatrix_x4_trans(codes, from + i % kProducts * 64 + i / kProducts * 32 * kTokenBytes);
    };
    unsigned codes[3][4], a[kBuffers][2][4];
    load(codes[0], 0);
    load(codes[1], 1);
#pragma unroll
    for (int i = 0; i < kProducts; ++i) ptx::wgmma_keep(o[i]);
#pragma unroll
    for (int i = 0; i < kBatches; ++i) {
      if (i + 2 < kBatches) load(codes[(i + 2) % 3], i + 2);
      if (i >= kBuffers) ptx::wgmma_wait_group<kBuffers - 1>();
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        unsigned first[2], last[2];
        Codes::expand_values(first, codes[i % 3][2 * step]);
        Codes::expand_values(last, codes[i % 3][2 * step + 1]);
        unsigned (&x)[4] = a[i % kBuffers][step];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          x[h] = first[h];
          x[2 + h] = last[h];
        }
        if constexpr (Config::several_scales) {
          const int quarter = i % kProducts * 64 / kScaleColumns;
          const int key = i / kProducts * 32 + step * 16 + lane % 4 * 2;
#pragma unroll
          for (int j = 0; j < 4; ++j)
            x[j] = scaled(
                x[j], reinterpret_cast<const __half2&>(stage.factors[quarter][key + j / 2 * 8]));
        }
      }
      issue<__half>(o[i % kProducts], a[i % kBuffers], p, i / kProducts * 64, true);
      if (i % kProducts == kProducts - 1) tile::arrive_warp(empty[i / kProducts]);
    }
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < kProducts; ++i) ptx::wgmma_keep(o[i]);
  }

  // A scale of key 8 h + g of this warp's.
  __device__ __forceinline__ float stored_scale(const Stage& stage, int h, int piece) const {
    const int key = warp * kWarpKeys + 8 * h + lane / 4;
    const unsigned word = reinterpret_cast<const unsigned*>(stage.tokens[key] + kScaleAt)[piece];
    if (params.v_scale_is_float) return __uint_as_float(word);
    return __uint_as_float(stage.halves[key] >> piece & 1 ? word & 0xffff0000 : word << 16);
  }
  // Of several scales the largest one, by which the others are divided.
  __device__ __forceinline__ Scale scale_of(const Stage& stage, int h) const {
    float factor = stored_scale(stage, h, 0);
    if constexpr (Config::several_scales) {
      factor = fabsf(factor);
#pragma unroll
      for (int piece = 1; piece < kTokenScales; ++piece)
        factor = fmaxf(factor, fabsf(stored_scale(stage, h, piece)));
    }
    return {factor, fmaxf(ptx::lg2(fabsf(factor)), -96.0f)};
  }
  // To shared memory: lane t of a quad has that of quarter t.
  __device__ __forceinline__ void put_factors(Stage& stage, const Scale (&scales)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float inverse = scales[h].factor == 0.0f ? 0.0f : 1.0f / scales[h].factor;
      stage.factors[lane % 4][warp * kWarpKeys + 8 * h + lane / 4] =
          __float2half_rn(stored_scale(stage, h, lane % 4) * inverse);
    }
    __syncwarp();
  }
  __device__ __forceinline__ static unsigned scaled(unsigned pair, __half2 factors) {
    const __half2 product = __hmul2(reinterpret_cast<const __half2&>(pair), factors);
    return reinterpret_cast<const unsigned&>(product);
  }

  // D += A B, or D = A B, for steps of A in registers and of B that lie side by side, `bytes` after
  // `base`: issued.
  template <class Operand, int kSteps>
  __device__ __forceinline__ static void issue(Scores& d, unsigned (&a)[kSteps][4], unsigned base,
                                               int bytes, bool accumulate) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ptx::wgmma_keep(a[step]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      ptx::Wgmma<kRows, Operand>::template register_shared<false>(
          d, a[step], descriptor(base, bytes + step * 32), accumulate || step > 0);
    ptx::wgmma_commit_group();
  }

  // Where an operand lies, over 16, in a register that all lanes share, as ptxas knows of a
  // reduction; and the descriptor of what lies `bytes` further, of kRows rows of 128 bytes. Others
  // would be computed in each lane, and moved for each product.
  __device__ __forceinline__ static unsigned uniform_base(const void* operand) {
    return __reduce_or_sync(~0u, ptx::shared_address(operand) >> 4);
  }
  __device__ __forceinline__ static unsigned long long descriptor(unsigned base, int bytes) {
    constexpr unsigned long long kHigh = 1ull << 62 | 1024ull >> 4 << 32;  // swizzle, 8 rows apart
    return kHigh | base + static_cast<unsigned>(bytes >> 4);
  }
};

}  // namespace mla
