// Philox4x32-10: random numbers as a pure function of (seed, offset, stream, index).
// cuattn/_philox.py draws the same bits.
//
// Four numbers come from one counter. They go to indices 32 apart, so that a warp which takes 128
// consecutive indices, lane by lane, evaluates one counter a lane and reads memory coalesced,
// whatever the alignment of the row.
#pragma once

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

__device__ __forceinline__ uint4 philox_counter(unsigned block, unsigned stream, PhiloxKey key) {
  return {block, stream, unsigned(key.offset), unsigned(key.offset >> 32)};
}

__device__ __forceinline__ unsigned philox_block(int index) {
  return unsigned(index >> 7) << 5 | unsigned(index & 31);
}

__device__ __forceinline__ unsigned philox_word(uint4 words, int index) {
  const int word = index >> 5 & 3;
  return word == 0 ? words.x : word == 1 ? words.y : word == 2 ? words.z : words.w;
}

// Strictly between 0 and 1: the float nearest to (bits + 1/2) / 2^32, but never 1.
__device__ __forceinline__ float philox_unit(unsigned bits) {
  return fminf(fmaf(__uint2float_rn(bits), 0x1p-32f, 0x1p-33f), 0x1.fffffep-1f);
}

__device__ __forceinline__ float philox_uniform(PhiloxKey key, unsigned stream, int index) {
  uint4 numbers[1] = {philox_counter(philox_block(index), stream, key)};
  philox4x32(numbers, key.seed);
  return philox_unit(philox_word(numbers[0], index));
}
