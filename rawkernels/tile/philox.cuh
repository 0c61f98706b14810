// Philox4x32-10: random numbers as a pure function of (seed, offset, stream, index).
// cuattn/_philox.py draws the same bits.
//
// A number has 32 bits: its upper half is from one counter, its lower half from another. Each
// counter gives halves to eight indices, which are 32 apart, so that a warp which takes 256
// consecutive indices, lane by lane, evaluates one counter a lane for the upper halves and reads
// memory coalesced, whatever the alignment of the row. Where the upper half tells enough, as for
// nearly all tokens that race, nobody asks for the lower one.
#pragma once

// Seeds of a call's rows are this far apart: ROW_STEP of cuattn/_philox.py.
constexpr unsigned long long kPhiloxRowStep = 0x9E3779B97F4A7C15ull;

struct PhiloxKey {
  unsigned long long seed, offset;
};

// c[n] are counters, and then the numbers. Several go round by round together, so that they share
// the round's keys.
template <int kCounters>
__device__ __forceinline__ void philox4x32(uint4 (&c)[kCounters], unsigned long long seed) {
  unsigned k0 = unsigned(seed), k1 = unsigned(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
#pragma unroll
    for (int n = 0; n < kCounters; ++n) {
      const unsigned long long product0 = 0xD2511F53ull * c[n].x, product1 = 0xCD9E8D57ull * c[n].z;
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

// Which half of a counter's numbers is an index's: 0 is the lower one.
__device__ __forceinline__ int philox_side(int index) { return index >> 7 & 1; }

// What an index has of its counter's numbers, 16 bits.
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
