// Products of queries and of probabilities with codes, for mla/decode_codes_sm90.cu.
//
// Operands are swapped: keys, and columns of values, fill the 64 rows of wgmma's A, which a warp
// makes from codes in its registers, and the rows of the tile are the columns of B. So no code is
// expanded in shared memory.
#pragma once

#include "mla/descriptors_sm90.cuh"
#include "mla/layout_codes_sm90.cuh"
#include "ptx/cvt_e4m3x4.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/wgmma.cuh"

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
  static constexpr int kScores = kRows / 2;                               // of a lane
  static constexpr int kProducts = kLatent / (kSharesValues ? 128 : 64);  // of 64 columns of O
  static constexpr int kBuffers = Config::operand_buffers;  // of operands of two steps each
  using Scores = float[kScores];

  Smem& smem;
  const DecodeParams& params;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;

  float o[kProducts][kScores];

  // What products read of a block: as keys this warp's codes, and queries; as values codes from
  // some column on, and probabilities. Codes from where this lane reads them first.
  struct Keys {
    static constexpr int kBatches = kLatent / 32;
    unsigned from;
    unsigned long long q;
    const Stage& stage;
  };
  struct Values {
    static constexpr int kBatches = 2 * kProducts;
    unsigned from;
    unsigned long long p;
    int first_column;
    const Stage& stage;
    ptx::Mbarrier (&empty)[2];  // halves of the keys, whose place is free when they are read
  };
  struct Nothing {
    static constexpr int kBatches = 0;
  };
  __device__ __forceinline__ Keys keys_in(const Stage& stage) const {
    return {
        ptx::shared_address(stage.panels[0]) + Panel::at(warp * kWarpKeys + lane % 16, lane / 16),
        uniform_base(smem.q), stage};
  }
  __device__ __forceinline__ Values values_in(const Stage& stage, int first_column,
                                              const unsigned char* probabilities,
                                              ptx::Mbarrier (&empty)[2]) const {
    return {ptx::shared_address(stage.panels[first_column / 128]) + Panel::at(lane, warp),
            uniform_base(probabilities), first_column, stage, empty};
  }

  // A batch is two steps: of keys 32 channels, of values 32 keys and 64 columns. All batches of
  // values are of the first half of the keys, then of the second.
  using Batch = unsigned[2][4];

  __device__ __forceinline__ static void load(unsigned (&codes)[4], const Keys& keys, int batch) {
    ptx::ldmatrix_x4(codes, (keys.from ^ batch % 4 * 32) + batch / 4 * kKeyPanelBytes);
  }
  __device__ __forceinline__ static void load(unsigned (&codes)[4], const Values& values,
                                              int batch) {
    const int product = batch % kProducts;
    ptx::ldmatrix_x4_trans(codes, (values.from ^ product % 2 * 64) + product / 2 * kKeyPanelBytes +
                                      batch / kProducts * 32 * Panel::kRowBytes);
  }
  __device__ __forceinline__ static void load(unsigned (&)[4], const Nothing&, int) {}

  // Quotients of scales for batches of the same quarter, when the first of them comes: of keys one
  // pair, of values one for each eight keys.
  using Factors = __half2[4];
  __device__ __forceinline__ void load_factors(Factors& factors, const Keys& keys,
                                               int batch) const {
    constexpr int kBatches = kScaleColumns / 32;
    if (batch % kBatches != 0) return;
    factors[0] = reinterpret_cast<const __half2&>(
        keys.stage.key_factors[warp * 8 + lane / 4][batch / kBatches]);
  }
  __device__ __forceinline__ void load_factors(Factors& factors, const Values& values,
                                               int batch) const {
    if (batch % 2 != 0) return;
    const int quarter = (values.first_column + batch % kProducts * 64) / kScaleColumns;
    reinterpret_cast<uint4&>(factors) = reinterpret_cast<const uint4&>(
        values.stage.value_factors[quarter][batch / kProducts * 32 + lane % 4 * 8]);
  }
  __device__ __forceinline__ static void load_factors(Factors&, const Nothing&, int) {}

  __device__ __forceinline__ static void expand(Batch& a, const unsigned (&codes)[4], const Keys&) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      unsigned upper[2], lower[2];
      Codes::expand_keys(upper, codes[2 * step]);
      Codes::expand_keys(lower, codes[2 * step + 1]);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        a[step][2 * pair] = upper[pair];
        a[step][2 * pair + 1] = lower[pair];
      }
    }
  }
  __device__ __forceinline__ static void expand(Batch& a, const unsigned (&codes)[4],
                                                const Values&) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      unsigned first[2], last[2];
      Codes::expand_values(first, codes[2 * step]);
      Codes::expand_values(last, codes[2 * step + 1]);
      unsigned (&x)[4] = a[step];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        x[h] = first[h];
        x[2 + h] = last[h];
      }
    }
  }
  __device__ __forceinline__ static void expand(Batch&, const unsigned (&)[4], const Nothing&) {}

  // Operands times the quotients of scales.
  __device__ __forceinline__ static void scale(Batch& a, const Factors& factors, const Keys&) {
    const __half2 both[2] = {__low2half2(factors[0]), __high2half2(factors[0])};
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = scaled(a[i / 4][i % 4], both[i % 2]);
  }
  __device__ __forceinline__ static void scale(Batch& a, const Factors& factors, const Values&) {
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = scaled(a[i / 4][i % 4], factors[i / 2]);
  }

  // O += Vᵀ Pᵀ of a block, and behind it Sᵀ = K Qᵀ of another's codes, as one sequence, in which
  // tensor cores do not wait where the two meet. One of them may be Nothing. Issued: finish()
  // waits.
  template <class OfValues, class OfKeys>
  __device__ __forceinline__ void multiply(const OfValues& values, Scores& products,
                                           const OfKeys& keys) {
    constexpr bool kHasValues = OfValues::kBatches > 0, kHasKeys = OfKeys::kBatches > 0;
    constexpr int kOfValues = OfValues::kBatches;
    constexpr int kBatches = kOfValues + OfKeys::kBatches;
    const auto load_batch = [&](unsigned (&codes)[4], int i) {
      if (i < kOfValues)
        load(codes, values, i);
      else
        load(codes, keys, i - kOfValues);
    };
    // Batches whose codes are read ahead; more would spill.
    constexpr int kAhead =
        kSharesValues && (Config::latent_format == tile::kInt8 || Config::several_scales) ? 1 : 2;
    unsigned codes[kAhead + 1][4];
    Batch a[kBuffers];
    Factors factors;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_batch(codes[i], i);
    if (kHasValues) keep_values();
    if (kHasKeys) ptx::wgmma_keep(products);
#pragma unroll
    for (int i = 0; i < kBatches; ++i) {
      if (i + kAhead < kBatches) load_batch(codes[(i + kAhead) % (kAhead + 1)], i + kAhead);
      const bool of_values = i < kOfValues;
      // Before the wait, which they are on their way in.
      if (kScalesOperands && of_values) load_factors(factors, values, i);
      if (kScalesOperands && !of_values) load_factors(factors, keys, i - kOfValues);
      if (i >= kBuffers) ptx::wgmma_wait_group<kBuffers - 1>();
      Batch& x = a[i % kBuffers];
      if constexpr (kHasValues) {
        if (of_values) {
          expand(x, codes[i % (kAhead + 1)], values);
          if (kScalesOperands) scale(x, factors, values);
          const int product = i % kProducts, copy = kCopies * product / kProducts;
          issue<__half>(o[product], x, values.p, copy * kPanelBytes + i / kProducts * 64, true);
          if (product == kProducts - 1) tile::arrive_warp(values.empty[i / kProducts]);
        }
      }
      if constexpr (kHasKeys) {
        if (!of_values) {
          const int batch = i - kOfValues;
          expand(x, codes[i % (kAhead + 1)], keys);
          if (kScalesOperands) scale(x, factors, keys);
          issue<__half>(products, x, keys.q, offset_in_q(batch), batch > 0);
        }
      }
    }
  }
  // Of a batch of keys, in bytes.
  __device__ __forceinline__ static int offset_in_q(int batch) {
    return batch / 2 * kPanelBytes + batch % 2 * 64;
  }

  // Sᵀ of a block whose tokens have several scales: first what is rotated, then the products of
  // each quarter of the columns by themselves, which are added times their scales. Operands of the
  // next quarter's first batch are made before these are waited for.
  __device__ __forceinline__ void multiply_quarters(Scores& s, const Keys& keys) const {
    // More batches ahead, or two sets of accumulators, would spill.
    constexpr int kAhead = 1, kOfQuarter = Keys::kBatches / kQuarters;
    unsigned codes[kAhead + 1][4];
    Batch a[kBuffers];
    Scores products;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 0; step < 2; ++step) load_rotated(a[i][step], keys, 2 * i + step);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(codes[i], keys, i);
    ptx::wgmma_keep(s);
#pragma unroll
    for (int i = 0; i < 2; ++i) issue<T>(s, a[i], keys.q, kPanels * kPanelBytes + i * 64, i > 0);
#pragma unroll
    for (int i = 0; i < Keys::kBatches; ++i) {
      const int quarter = i / kOfQuarter;
      if (i + kAhead < Keys::kBatches) load(codes[(i + kAhead) % (kAhead + 1)], keys, i + kAhead);
      ptx::wgmma_wait_group<kBuffers - 1>();
      expand(a[i % kBuffers], codes[i % (kAhead + 1)], keys);
      if (quarter > 0 && i % kOfQuarter == 0) {
        ptx::wgmma_wait_group<0>();
        add_quarter(s, products, keys, quarter - 1);
      }
      issue<__half>(products, a[i % kBuffers], keys.q, offset_in_q(i), i % kOfQuarter > 0);
    }
    ptx::wgmma_wait_group<0>();
    add_quarter(s, products, keys, kQuarters - 1);
  }
  __device__ __forceinline__ void add_quarter(Scores& s, Scores& products, const Keys& keys,
                                              int quarter) const {
    const float2 scales = reinterpret_cast<const float2&>(
        keys.stage.quarter_scales[quarter][2 * (warp * 8 + lane / 4)]);
    ptx::wgmma_keep(s);
    ptx::wgmma_keep(products);
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      s[i] = fmaf(products[i], i / 2 % 2 == 0 ? scales.x : scales.y, s[i]);
  }
  template <bool kHasValues, bool kHasKeys>
  __device__ __forceinline__ void finish(Scores& products) {
    ptx::wgmma_wait_group<0>();
    if (kHasValues) keep_values();
    if (kHasKeys) ptx::wgmma_keep(products);
  }
  __device__ __forceinline__ void keep_values() {
#pragma unroll
    for (int i = 0; i < kProducts; ++i) ptx::wgmma_keep(o[i]);
  }

  // Products of codes -> scores: times the scales of keys 8 h + g.
  __device__ __forceinline__ void scale(Scores& s, const Stage& stage) const {
    const float scales[2] = {scale_of(stage, 0), scale_of(stage, 1)};
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] *= scales[i / 2 % 2];
  }

  // S += products with what is rotated: issued.
  __device__ __forceinline__ void multiply_rotated(Scores& s, unsigned (&rotated)[4][4],
                                                   const Keys& keys) const {
#pragma unroll
    for (int step = 0; step < 4; ++step) load_rotated(rotated[step], keys, step);
    ptx::wgmma_keep(s);
    issue<T>(s, rotated, keys.q, kPanels * kPanelBytes, true);
  }
  __device__ __forceinline__ static void load_rotated(unsigned (&rotated)[4], const Keys& keys,
                                                      int step) {
    ptx::ldmatrix_x4(rotated, (keys.from ^ step * 32) + kKeyPanels * kKeyPanelBytes);
  }

  // Of key 8 h + g of this warp's.
  __device__ __forceinline__ float scale_of(const Stage& stage, int h) const {
    return stage.scales[warp * kWarpKeys + 8 * h + lane / 4];
  }
  __device__ __forceinline__ void scales_of(Scale (&scales)[2], const Stage& stage) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float factor = scale_of(stage, h);
      scales[h] = {factor, fmaxf(ptx::lg2(fabsf(factor)), -96.0f)};
    }
  }
  __device__ __forceinline__ static unsigned scaled(unsigned pair, __half2 factors) {
    const __half2 product = __hmul2(reinterpret_cast<const __half2&>(pair), factors);
    return reinterpret_cast<const unsigned&>(product);
  }

  // D += A B, or D = A B, for steps of A in registers and of B that lie side by side, `bytes` after
  // `base`: issued.
  template <class Operand, int kSteps>
  __device__ __forceinline__ static void issue(Scores& d, unsigned (&a)[kSteps][4],
                                               unsigned long long base, int bytes,
                                               bool accumulate) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ptx::wgmma_keep(a[step]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      ptx::Wgmma<kRows, Operand>::template register_shared<false>(
          d, a[step], descriptor(base, bytes + step * 32), accumulate || step > 0);
    ptx::wgmma_commit_group();
  }

  // The descriptor of an operand of kRows rows of 128 bytes, in registers that all lanes share, as
  // ptxas knows of a reduction; and that of what lies `bytes` further. Others would be computed in
  // each lane, and moved for each product; so would the upper half, were it added each time.
  __device__ __forceinline__ static unsigned long long uniform_base(const void* operand) {
    return kSwizzledRows | reduced_base(operand);
  }
  __device__ __forceinline__ static unsigned long long descriptor(unsigned long long base,
                                                                  int bytes) {
    return base + static_cast<unsigned>(bytes >> 4);
  }
};

}  // namespace mla
