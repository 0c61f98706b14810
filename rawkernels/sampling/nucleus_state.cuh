// What is asked of a row and known of it while a token is drawn from its nucleus: the tokens that
// rank first, until their weights reach an end. For top-p tokens rank by their logits and weigh
// their probabilities. With Config::ranked the same for top-k, where a token weighs 1, and for
// typical-p, where tokens rank by their distance from the mean logit.
#pragma once

#include "sampling/candidates.cuh"

constexpr float kTolerance = 1e-4f;  // of a row's probability, more than rounding amounts to
constexpr int kHistogramBins = Config::histogram_bins;
static_assert(kHistogramBins <= 32, "each bin must have a lane");

constexpr Key kBelowFinite = 0x00800000ull << 32;  // below the keys of all finite logits

// What only variants with Config::ranked know of a row.
template <bool kRanked>
struct RankedState {
  float center;  // typical-p: the mean logit; top-k: a logit that so many should reach, or -inf

  __device__ __forceinline__ void set_center(float x) { center = x; }
};

template <>
struct RankedState<false> {
  static constexpr float center = 0.0f;

  __device__ __forceinline__ void set_center(float) {}
};

// What is asked of a row, and what is known of it or estimated.
struct NucleusState : RankedState<Config::ranked> {
  float temperature, top_p, min_p;  // top_p: the nucleus' share, or top-k's number of tokens
  float reference, slope;
  float bin_scale, bin_shift;  // from log2 of a probability to its bin
  float candidate_scale;       // a token is a candidate if E < probability * candidate_scale,
  float min_logit;             // its logit is at least this,
  Key rejected;                // and its key is above this one
  bool sparse;                 // min-p keeps a token in at most one of sixteen groups of four
  bool estimated;              // all this is from the pilot sample, not yet from the row itself

  __device__ __forceinline__ bool has_nucleus() const { return Config::ranked || top_p < 1.0f; }

  __device__ __forceinline__ bool counts() const { return Config::ranked && top_p >= 1.0f; }

  __device__ __forceinline__ bool typical() const { return Config::ranked && top_p < 1.0f; }

  // What tokens are ranked by: |-log p - entropy| is the distance from the mean logit.
  __device__ __forceinline__ float score(float x) const {
    return typical() ? -fabsf(x - center) : x;
  }

  __device__ __forceinline__ float log2_probability(float x) const {
    return (x - reference) * slope;
  }

  __device__ __forceinline__ float probability(float x) const {
    return ptx::ex2(log2_probability(x));
  }

  // A score as the bins have it.
  __device__ __forceinline__ float log2_score(float score) const {
    return typical() ? score * slope : log2_probability(score);
  }

  // What a token adds to its bin.
  __device__ __forceinline__ float weight(float log2_p) const {
    return counts() ? 1.0f : ptx::ex2(log2_p);
  }

  // The weight before which the nucleus ends, and how exactly that is known: counts are exact.
  __device__ __forceinline__ double end(float total) const {
    return counts() ? double(top_p) : double(top_p) * total;
  }

  __device__ __forceinline__ float tolerance(float total) const {
    return counts() ? 0.0f : kTolerance * total;
  }

  // 2^23 + the bin, so that the bin is in the low bits.
  __device__ __forceinline__ float bin(float log2_p) const {
    return fmaf(__saturatef(fmaf(log2_p, bin_scale, bin_shift)), kHistogramBins - 1.0f, 0x1p23f);
  }
};
