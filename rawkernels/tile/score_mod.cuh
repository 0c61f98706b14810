// What happens to a product q·k before the masks by position and the softmax: the score functor.
//
// A functor is a list of terms. functor.terms(visit) calls visit(term) for each term that the call
// has, in order, and term(score, row, key) is the score after it. A kernel so branches on a term
// once for all scores that a thread holds, wherever they lie: accumulators of mma.sync or wgmma, or
// shared memory. term.derivative(score, row, key), with the same arguments, is the derivative of
// the result by `score`; the backward pass multiplies a gradient by the derivatives of all terms.
//
// Kernels call the functor ScoreMod. Its text is a part of the variant (Variant.score_mod in
// cuattn/gpu/compiler.py), and so of the kernel's place in the cache: by default ContractScores.
#pragma once

#include "tile/accumulator.cuh"
#include "tile/softmax.cuh"

namespace tile {

// Of an array that broadcasts to (batch, query heads, queries, keys), in elements: 0 along an axis
// where it does.
struct ScoreStrides {
  long long batch, head, row, col;
};

// What a call says about its scores. Each kernel fills this from its own params; what it has not is
// null, and costs nothing.
struct ScoreInputs {
  double scale;               // of q·k
  double softcap;             // 0: none
  const void* bias;           // of the inputs' type, or float where bias_is_float32; null: none
  const unsigned char* mask;  // one byte a score, nonzero keeps; null: none
  const void* alibi_slopes;   // of the accumulators' type; null: none
  ScoreStrides bias_stride, mask_stride;
  long long alibi_batch_stride;  // 0 for slopes of shape (heads_q,)
  int bias_is_float32;
  int rows, cols;  // queries and keys that bias and mask have elements for

  // The same with `bias` and `mask` at a query head's first element. Their terms want this, once
  // for the rows of a head: in every element's offset it would be four more 64-bit operations.
  template <class T>
  __device__ __forceinline__ ScoreInputs of_head(int batch, int head) const {
    ScoreInputs inputs = *this;
    if (bias != nullptr)
      inputs.bias =
          static_cast<const char*>(bias) + (batch * bias_stride.batch + head * bias_stride.head) *
                                               (bias_is_float32 ? sizeof(float) : sizeof(T));
    if (mask != nullptr) inputs.mask += batch * mask_stride.batch + head * mask_stride.head;
    return inputs;
  }
};

// What is the same for all scores of a query.
template <class Acc>
struct ScoreRow {
  int batch, head;  // query head
  int query;        // within its sequence
  int position;     // of the query among the keys: query + seqlen_k - seqlen_q
  Acc slope;        // of ALiBi, as ContractScores::slope gives it
};

// cap * tanh(x / cap) by two of the device's fast instructions. The quotient loses digits where x
// is small beside cap, the series where it is not.
__device__ __forceinline__ float fast_softcap(float x, float cap, float inverse_cap) {
  const float y = x * inverse_cap;
  const float y2 = y * y;
  const float series = x * fmaf(y2, fmaf(y2, 2.0f / 15.0f, -1.0f / 3.0f), 1.0f);
  const float quotient = fmaf(__fdividef(-2.0f, 1.0f + ptx::ex2(2.0f * kLog2e * y)), cap, cap);
  return y2 < 0.01f ? series : quotient;
}

// The terms of cuattn.flash_attention: scale, softcap, bias, ALiBi, mask.
//
// kFast: float32 sums of 16-bit inputs, whose tanh may have an error of 2^-21. kLog2: results are
// in units of 1 / log2(e), which exp2 wants.
template <class T, bool kFast, bool kLog2>
struct ContractScores {
  using Acc = Accumulator<T>;
  using Row = ScoreRow<Acc>;

  ScoreInputs inputs;

  // Of a query head, for its ScoreRow; 0 without ALiBi.
  __device__ __forceinline__ Acc slope(int batch, int head) const {
    if (inputs.alibi_slopes == nullptr) return 0;
    return kUnit *
           static_cast<const Acc*>(inputs.alibi_slopes)[batch * inputs.alibi_batch_stride + head];
  }

  template <class Visit>
  __device__ __forceinline__ void terms(const Visit& visit) const {
    visit(Scale{scale_factor()});
    terms_after_scale(visit);
  }

  // What the first term multiplies by, and the other terms: for kernels that do the first on their
  // own.
  __device__ __forceinline__ Acc scale_factor() const {
    const Acc scale = static_cast<Acc>(inputs.scale);
    return static_cast<Acc>(inputs.softcap) == 0 ? scale * kUnit : scale;
  }
  template <class Visit>
  __device__ __forceinline__ void terms_after_scale(const Visit& visit) const {
    const Acc cap = static_cast<Acc>(inputs.softcap);
    if (cap != 0) visit(Softcap{cap, 1 / cap});
    if (inputs.bias != nullptr) {
      if (inputs.bias_is_float32)
        visit(Bias<float>{inputs});
      else
        visit(Bias<T>{inputs});
    }
    if (inputs.alibi_slopes != nullptr) visit(Alibi{});
    if (inputs.mask != nullptr) visit(Mask{inputs});
  }

 private:
  static constexpr Acc kUnit = kLog2 ? static_cast<Acc>(1.4426950408889634) : 1;

  struct Scale {
    Acc factor;

    __device__ __forceinline__ Acc operator()(Acc score, const Row&, int) const {
      return score * factor;
    }
    __device__ __forceinline__ Acc derivative(Acc, const Row&, int) const { return factor; }
  };

  struct Softcap {
    Acc cap, inverse_cap;

    __device__ __forceinline__ Acc operator()(Acc score, const Row&, int) const {
      return capped(score) * kUnit;
    }
    // 1 - tanh²
    __device__ __forceinline__ Acc derivative(Acc score, const Row&, int) const {
      const Acc tanh = capped(score) * inverse_cap;
      return fma(-tanh, tanh, static_cast<Acc>(1)) * kUnit;
    }
    __device__ __forceinline__ Acc capped(Acc score) const {
      if constexpr (kFast)
        return fast_softcap(score, cap, inverse_cap);
      else
        return cap * tanh(score / cap);
    }
  };

  // Terms that are added.
  struct Shift {
    __device__ __forceinline__ Acc derivative(Acc, const Row&, int) const { return 1; }
  };

  template <class Element>
  struct Bias : Shift {
    const ScoreInputs& inputs;

    __device__ __forceinline__ Bias(const ScoreInputs& inputs) : inputs(inputs) {}
    __device__ __forceinline__ Acc operator()(Acc score, const Row& row, int key) const {
      const Element* const bias = static_cast<const Element*>(inputs.bias);
      const Acc term = static_cast<Acc>(bias[offset(inputs, inputs.bias_stride, row, key)]);
      // As large as floats are it stands for a mask that a row may see nothing but.
      return score + (kLog2 ? in_log2(term) : term);
    }
  };

  struct Alibi : Shift {
    __device__ __forceinline__ Acc operator()(Acc score, const Row& row, int key) const {
      return fma(-row.slope, fabs(static_cast<Acc>(row.position - key)), score);
    }
  };

  struct Mask {
    const ScoreInputs& inputs;

    __device__ __forceinline__ Acc operator()(Acc score, const Row& row, int key) const {
      const bool keep = inputs.mask[offset(inputs, inputs.mask_stride, row, key)] != 0;
      return keep ? score : negative_infinity<Acc>();
    }
    // A score of -inf gets no gradient: its weight is 0.
    __device__ __forceinline__ Acc derivative(Acc, const Row&, int) const { return 1; }
  };

  // Of bias and mask. Tiles reach beyond the last query and key, and so may sequences whose lengths
  // the host does not know: there the last one's element is read, since a branch around each read
  // would make them wait for one another.
  __device__ __forceinline__ static long long offset(const ScoreInputs& inputs,
                                                     const ScoreStrides& stride, const Row& row,
                                                     int key) {
    return min(row.query, inputs.rows - 1) * stride.row + min(key, inputs.cols - 1) * stride.col;
  }
};

}  // namespace tile

#include "variant/score_mod.cuh"

namespace tile {

// Whether a functor is ContractScores, whose terms a kernel may compute in ways of its own.
template <class Functor>
struct IsContract {
  static constexpr bool value = false;
};
template <class T, bool kFast, bool kLog2>
struct IsContract<ContractScores<T, kFast, kLog2>> {
  static constexpr bool value = true;
};

}  // namespace tile
