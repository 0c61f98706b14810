// The draw after top-p and min-p, in one pass for nearly every row: all tokens race as the row is
// read, the few that come first are listed, and mass is tallied in bins about the logit where the
// nucleus should end. The token is the first of the listed that the filters keep: min-p asks for
// the largest logit, top-p for the mass of the tokens that rank before, and the bins tell enough of
// it unless the token is in the very bin in which the nucleus ends. Then the row is read again.
//
// A survey of the row sets the stage, while the row's first tokens are on their way. Whatever it
// made of the row, the draw is the same: a list that is too long or holds nothing that is kept is
// made anew by what is known of the row by then.
#pragma once

#include "sampling/mass.cuh"

constexpr int kAtOnce = 2;  // groups whose random numbers are drawn together
constexpr int kQuads = kTile / 4;

// Where min-p keeps few tokens, the quads that may have one wait until there is one for each lane:
// 64 peaked rows of 128256 take 15.7 us, 18.1 where a warp drew for all of its quads if it had one.
constexpr int kWaiting = 32 * (kQuads + 1);  // a tile's, and fewer than 32 from before

struct Waiting {
  float4 quads[kWaiting];
  int firsts[kWaiting];  // the first token of each
};
constexpr bool kMayWait = sizeof(Waiting) * kWarps <= Config::smem_bytes;  // in place of the bins

// Whether one of four tokens may come first: hardly ever would the largest of them with the
// smallest of their numbers, which are one half of a counter's or the other.
__device__ __forceinline__ bool stand_out(const Raced& row, float top, uint4 words, int half) {
  return !(half_plus(least_halves(words), half) > fmaf(row.mass(top), row.chance, 0.5f));
}

// Which of four tokens may come first; bit j is token j.
__device__ __forceinline__ unsigned may_be_first(const Raced& row, const float* quad, uint4 words,
                                                 int half) {
  const unsigned bits[4] = {words.x, words.y, words.z, words.w};
  unsigned close = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (!(half_plus(bits[j], half) > fmaf(row.mass(quad[j]), row.chance, 0.5f))) close |= 1u << j;
  }
  return close;
}

// Lists the tokens that come first, and finds the largest logit. kMass: and the mass of each bin.
// kSparse: of rows of which min-p keeps little.
template <bool kMass, bool kSparse>
__device__ __forceinline__ void race_row(const Tiles<kTile>& tiles, float (&ahead)[kTile],
                                         PhiloxKey key, ListSmem& list, RacedSmem& smem) {
  const Raced row = smem.row;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Waiting& waiting = reinterpret_cast<Waiting*>(own_bins)[warp];
  int num_waiting = 0;
  float high = -kInfinity;
  if constexpr (kMass) {
#pragma unroll
    for (int b = 0; b < kMassBins; ++b) own_bins[b][threadIdx.x] = 0.0f;
  }
  clear_list(list);
  const auto add = [&](int i, float x) {
    const float value = x + 0.0f;  // -0 becomes 0: they are equal
    if (!(value < kInfinity)) list.bad[rank_in_cluster()] = 1;
    const Key token = rank_key(value, i);
    if (!(value < smem.row.least) && token > smem.row.out) add_to_list(token, list);
  };
  for_each_tile(tiles, ahead, [&](int base, const float (&x)[kTile]) {
    float tops[kQuads];
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      tops[n] = largest_of_four(x + 4 * n);
      high = fmaxf(high, tops[n]);
    }
    if constexpr (kSparse) {
#pragma unroll
      for (int n = 0; n < kQuads; ++n) {
        const bool may = !(tops[n] < row.least);
        const unsigned all = __ballot_sync(0xffffffffu, may);
        if (may) {
          const int place = num_waiting + __popc(all & ((1u << lane) - 1));
          waiting.quads[place] = make_float4(x[4 * n], x[4 * n + 1], x[4 * n + 2], x[4 * n + 3]);
          waiting.firsts[place] = tile_index(base, 4 * n);
        }
        num_waiting += __popc(all);
      }
      const bool last = base + 32 * kTile * kWarps >= tiles.segment.end;
#pragma unroll 1
      while (num_waiting >= (last ? 1 : 32)) {
        __syncwarp();
        const int taken = min(num_waiting, 32);
        num_waiting -= taken;
        if (lane >= taken) continue;
        const int first = waiting.firsts[num_waiting + lane];
        const float4 four = waiting.quads[num_waiting + lane];
        const float quad[4] = {four.x, four.y, four.z, four.w};
        uint4 words[1] = {philox_counter(philox_block(first), kTokenStream, kUpper, key)};
        philox4x32(words, key.seed);
        const int half = philox_side(first);
        if (!stand_out(row, largest_of_four(quad), words[0], half)) continue;
        const unsigned close = may_be_first(row, quad, words[0], half);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (close >> j & 1) add(first + 32 * j, quad[j]);
        }
      }
      return;
    }
    const unsigned block = philox_block(tile_index(base, 0));  // 32 more for each group
    unsigned close = 0;                                        // bit j: token j may come first
#pragma unroll
    for (int first = 0; first < kUnroll; first += kAtOnce) {
      uint4 words[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        words[n] = philox_counter(block + 32 * (first + n), kTokenStream, kUpper, key);
      }
      philox4x32(words, key.seed);
      bool out[2 * kAtOnce], any = false;
#pragma unroll
      for (int n = 0; n < 2 * kAtOnce; ++n) {
        const float* const quad = x + 4 * (2 * first + n);
        if constexpr (kMass) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float log_mass = row.log_mass(quad[j]);
            // Each thread has a column.
            char* const column = reinterpret_cast<char*>(&own_bins[0][threadIdx.x]);
            const unsigned offset = __float_as_uint(row.bin(log_mass)) * sizeof(own_bins[0]);
            *reinterpret_cast<float*>(column + offset) += ptx::ex2(log_mass);
          }
        }
        out[n] = stand_out(row, tops[2 * first + n], words[n / 2], n % 2);
        any |= out[n];
      }
      if (!any) continue;
#pragma unroll
      for (int n = 0; n < 2 * kAtOnce; ++n) {
        const int token = 4 * (2 * first + n);
        if (out[n]) close |= may_be_first(row, x + token, words[n / 2], n % 2) << token;
      }
    }
    for (; close != 0; close &= close - 1) {
      const int j = __ffs(close) - 1;
      const int i = tile_index(base, j);
      if (i < tiles.segment.end) add(i, pick(x, j));
    }
  });
  if constexpr (kMass) {
    __syncthreads();
#pragma unroll 1
    for (int bin = warp; bin < kMassBins; bin += 2 * kWarps) {
      const int other = min(bin + kWarps, kMassBins - 1);
      float2 sum = {0.0f, 0.0f};
#pragma unroll
      for (int t = lane; t < Config::threads; t += 32) {
        sum = sum + float2{own_bins[bin][t], own_bins[other][t]};
      }
      sum = reduce_warp(sum, Add());
      if (lane < Config::cluster) {
        float* const bins = of_rank(smem.bins[rank_in_cluster()], lane);
        bins[bin] = sum.x;
        if (bin + kWarps < kMassBins) bins[other] = sum.y;
      }
    }
  }
  high = largest_of_warp(high);
  if (lane < Config::cluster) *of_rank(&smem.highs[rank_in_cluster()][warp], lane) = high;
  share_list(list);
}

// The first of the listed tokens that may be kept and that rank before row.out; 0 if there is none,
// or if one that is not listed might come before. Known to all threads.
__device__ __forceinline__ Key first_listed(const ListSmem& list, int places, float high,
                                            PhiloxKey key, RacedSmem& smem) {
  const Raced& row = smem.row;
  const auto at = [&](int place) -> Key {
    const bool listed =
        place < places && place / Config::cluster < list.found[place % Config::cluster];
    const Key token = listed ? list.keys[place] : 0;
    const bool may = token > row.out && keeps(row, key_score(token), high);
    return may && !out_of_nucleus(token, smem) ? token : 0;
  };
  const auto uniform = [&](Key token) {
    return philox_uniform(key, kTokenStream, key_index(token));
  };
  if (threadIdx.x == 0) smem.first = 0;
  int rivals = 2;
  bool may;
  Key token = 0;
  float near = -kInfinity;
  if (places <= Config::threads) {
    token = at(threadIdx.x);
    if (token != 0) near = near_key(row.log_mass(key_score(token)), uniform(token));
    rivals = near_first(near, may, smem.race);
  }
  if (rivals > 1) {  // too close for float32, or not looked at
    Draw best = {0.0, -1};
#pragma unroll 1
    for (int place = threadIdx.x; place < places; place += Config::threads) {
      const Key other = at(place);
      if (other == 0) continue;
      const Draw draw = {exact_key(key_score(other), row.temperature, uniform(other)),
                         key_index(other)};
      if (!beats(draw, best)) continue;
      best = draw;
      token = other;
    }
    const int own = best.token;
    bool bad = false;
    best_of_block(best, bad, smem.race);
    if (threadIdx.x == 0) smem.race.block_best = best;
    __syncthreads();
    may = own >= 0 && own == smem.race.block_best.token;
    if (may) near = near_key(row.log_mass(key_score(token)), uniform(token));
  }
  if (may) {
    const float others = -ptx::lg2(row.chance);  // the keys of those not listed are below
    if (near - slack(near) > others + slack(others)) smem.first = token;
  }
  __syncthreads();
  return smem.first;
}

// A draw from what top-p and min-p leave of the row, known to all threads; -1 for a bad row or one
// that has nothing to draw.
__device__ __forceinline__ int race_filtered(const Row& logits, int vocab, float temperature,
                                             float top_p, float min_p, PhiloxKey key,
                                             ListSmem& list, RacedSmem& smem) {
  const Tiles<kTile> tiles(logits, own_segment(vocab));
  float ahead[kTile];
  survey_masses(logits, vocab, temperature, top_p, min_p, smem, [&] { tiles.load_ahead(ahead); });
  wait_cluster();
  for (;;) {
    if (smem.row.has_nucleus() && smem.row.surveyed) {
      race_row<true, false>(tiles, ahead, key, list, smem);
      add_up_bins(smem);
    } else if (kMayWait && smem.row.sparse) {
      race_row<false, kMayWait>(tiles, ahead, key, list, smem);
    } else {
      race_row<false, false>(tiles, ahead, key, list, smem);
    }
    float high = -kInfinity;
    for (int slot = threadIdx.x % 32; slot < Config::cluster * kWarps; slot += 32)
      high = fmaxf(high, (&smem.highs[0][0])[slot]);
    high = largest_of_warp(high);
    const Listed listed(list);
    if (listed.bad || high == -kInfinity) return -1;
    // Where the sum is none, masses are out of range, and the list lacks tokens.
    while (listed.whole && smem.total < kInfinity) {
      const Key first = first_listed(list, listed.places, high, key, smem);
      if (first == 0) break;
      if (in_nucleus(first, smem) || !ends_before(logits, vocab, first, smem))
        return key_index(first);
      if (threadIdx.x == 0) smem.row.out = first;
      __syncthreads();
    }
    // Another list, of what is certain now.
    sync_cluster();
    float wanted = 16.0f * kWanted;
    // Min-p keeps too little of a list that should have sufficed, so it keeps little of the row.
    const bool few = smem.row.surveyed && listed.whole && !smem.row.has_nucleus();
    if (smem.row.surveyed) {
      wanted = 2.0f * kWanted;
      __syncthreads();
      if (threadIdx.x == 0) {
        smem.row.surveyed = false;
        // 32 times as much of it, unless its mass is to be summed; from now on in masses about
        // `high`.
        smem.row.chance *= 32.0f * ptx::ex2((high - smem.row.ref) * smem.row.slope);
        smem.row.sparse = smem.row.min_p > 0.0f;
        smem.row.ref = high;
        smem.total = 0.0f;
        smem.row.least = least_logit(high, smem.row.slope, smem.row.min_p);
      }
      __syncthreads();
    }
    if (!few) {
      const Key least = rank_key(fmaxf(smem.row.least, -kMaxFloat), 0x7fffffff);
      const float left = mass_above(logits, vocab, max(smem.row.out, least), smem).x;
      if (threadIdx.x == 0) smem.row.chance = wanted / left;
    }
    tiles.load_ahead(ahead);
    __syncthreads();
  }
}
