// Philox4x32-10 (Salmon et al., SC 2011): random numbers as a pure function of seed, offset, stream
// and index. cuattn/_philox.py computes the same bits.
//
// A number has 32 bits: its upper half is from one counter, its lower half from another. A counter
// gives halves to eight indices that are 32 apart. So a warp that covers 256 consecutive indices
// evaluates one counter in each lane for the upper halves, and its loads are coalesced whatever the
// alignment of the row. Where the upper half suffices, as for nearly all tokens of a Gumbel-max
// draw, the lower one is not computed.
#pragma once

// The distance between the seeds of a call's rows: ROW_STEP of cuattn/_philox.py.
constexpr unsigned long long kPhiloxRowStep = 0x9E3779B97F4A7C15ull;

struct PhiloxKey {
  unsigned long long seed, offset;
};

constexpr unsigned long long kPhiloxMultiplier0 = 0xD2511F53ull, kPhiloxMultiplier1 = 0xCD9E8D57ull;

// The two keys of a round.
__device__ __forceinline__ uint2 philox_round_keys(unsigned long long seed, int round) {
  return {unsigned(seed) + round * 0x9E3779B9u, unsigned(seed >> 32) + round * 0xBB67AE85u};
}

// Replaces the counters c[n] by their random numbers. They advance together, round by round, so
// that they share the keys of a round.
template <int kCounters>
__device__ __forceinline__ void philox4x32(uint4 (&c)[kCounters], unsigned long long seed) {
  unsigned k0 = unsigned(seed), k1 = unsigned(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
#pragma unroll
    for (int n = 0; n < kCounters; ++n) {
      const unsigned long long product0 = kPhiloxMultiplier0 * c[n].x;
      const unsigned long long product1 = kPhiloxMultiplier1 * c[n].z;
      c[n] = {unsigned(product1 >> 32) ^ c[n].y ^ k0, unsigned(product1),
              unsigned(product0 >> 32) ^ c[n].w ^ k1, unsigned(product0)};
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

enum PhiloxHalf : unsigned { kUpper, kLower };

__device__ __forceinline__ uint4 philox_counter(unsigned block, unsigned stream, PhiloxHalf half,
                                                PhiloxKey key) {
  return {block, 2 * stream + half, unsigned(key.offset), unsigned(key.offset >> 32)};
}

__device__ __forceinline__ unsigned philox_block(int index) {
  return unsigned(index >> 8) << 5 | unsigned(index & 31);
}

// Whether an index's 16 bits are the lower (0) or the upper (1) half of a word of its counter.
__device__ __forceinline__ int philox_side(int index) { return index >> 7 & 1; }

// The 16 bits that an index gets from its counter's four words.
__device__ __forceinline__ unsigned philox_half(uint4 words, int index) {
  const int number = index >> 5 & 3;
  const unsigned word = number == 0   ? words.x
                        : number == 1 ? words.y
                        : number == 2 ? words.z
                                      : words.w;
  return word >> philox_side(index) * 16 & 0xffffu;
}

// Strictly between 0 and 1: the float nearest to (bits + 1/2) / 2^32, but never 1.
__device__ __forceinline__ float philox_unit(unsigned bits) {
  return fminf(fmaf(__uint2float_rn(bits), 0x1p-32f, 0x1p-33f), 0x1.fffffep-1f);
}

__device__ __forceinline__ float philox_uniform(PhiloxKey key, unsigned stream, int index) {
  const unsigned block = philox_block(index);
  uint4 words[2] = {philox_counter(block, stream, kUpper, key),
                    philox_counter(block, stream, kLower, key)};
  philox4x32(words, key.seed);
  return philox_unit(philox_half(words[0], index) << 16 | philox_half(words[1], index));
}
