"""What kernels are built from, one piece at a time: tile/visibility.cuh, tile/score_mod.cuh,
tile/eight_numbers.cuh."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cuattn import flash_attention
from cuattn._spec import attention_spec

cupy = pytest.importorskip("cupy")

from cuattn.gpu import attention, compiler, dispatch  # noqa: E402
from cuattn.gpu.params import UNBOUNDED  # noqa: E402

pytestmark = pytest.mark.gpu


@dataclasses.dataclass(frozen=True)
class Example(compiler.Config):
    """Of a kernel of these tests."""

    @property
    def threads(self) -> int:
        return 32


@pytest.fixture
def launch(tmp_path):
    """Compile a kernel from its text and launch one thread of it."""

    def run(text: str, *arguments) -> None:
        file = tmp_path / "example.cu"
        file.write_text(text, encoding="utf-8")
        variant = compiler.Variant(str(file), "example", Example())
        compiler.kernel(variant, cupy.cuda.Device().id)((1,), (1,), arguments)

    yield run
    compiler.resolve.cache_clear()
    compiler.kernel.cache_clear()


VISIBILITY = """
#include "tile/visibility.cuh"
// begin and end of what each row and each key, and each pair of neighbours, sees
extern "C" __global__ void example(int first_row, int rows, int left, int right, int seqlen_q,
                                   int seqlen_k, int2* keys, int2* pairs_of_rows, int2* seeing,
                                   int2* pairs_of_keys) {
  const auto visibility =
      tile::Visibility::from_row(first_row, rows, left, right, seqlen_q, seqlen_k);
  const auto put = [](int2& to, tile::Range range) { to = {range.begin, range.end}; };
  for (int row = 0; row < rows; ++row) {
    put(keys[row], visibility.keys(row));
    put(pairs_of_rows[2 * row], visibility.keys_of_any(row, row + 1));
    put(pairs_of_rows[2 * row + 1], visibility.keys_of_all(row, row + 1));
  }
  for (int key = 0; key < seqlen_k; ++key) {
    put(seeing[key], visibility.rows(key));
    put(pairs_of_keys[2 * key], visibility.rows_of_any(key, key + 1));
    put(pairs_of_keys[2 * key + 1], visibility.rows_of_all(key, key + 1));
  }
}
"""


@pytest.mark.parametrize("seed", range(30))
def test_rows_see_keys_and_keys_are_seen_by_rows(launch, seed):
    rng = np.random.default_rng(seed)
    seqlen_q, seqlen_k = (int(n) for n in rng.integers(1, 60, 2))
    first_row = int(rng.integers(seqlen_q))
    rows = int(rng.integers(1, seqlen_q - first_row + 1))
    left, right = (int(n) for n in rng.integers(-70, 70, 2))  # causal, top left: negative
    left, right = (UNBOUNDED if rng.random() < 0.3 else n for n in (left, right))

    def ranges(count):
        return cupy.full((count, 2), -(1 << 20), np.int32)

    keys, pairs_of_rows = ranges(rows), ranges(2 * rows)
    seeing, pairs_of_keys = ranges(seqlen_k), ranges(2 * seqlen_k)
    numbers = map(np.int32, (first_row, rows, left, right, seqlen_q, seqlen_k))
    launch(VISIBILITY, *numbers, keys, pairs_of_rows, seeing, pairs_of_keys)

    row, key = np.arange(rows)[:, None], np.arange(seqlen_k)
    diagonal = first_row + row + seqlen_k - seqlen_q
    sees = np.ones((rows, seqlen_k), bool)
    if left != UNBOUNDED:
        sees &= key >= diagonal - left
    if right != UNBOUNDED:
        sees &= key <= diagonal + right

    def spread(array, count):
        begin, end = array.get().T[..., None]
        return (np.arange(count) >= begin) & (np.arange(count) < end)

    assert (spread(keys, seqlen_k) == sees).all()
    assert (spread(seeing, rows).T == sees).all()
    some, every = spread(pairs_of_rows[:-2], seqlen_k).reshape(-1, 2, seqlen_k).swapaxes(0, 1)
    assert (every == (sees[:-1] & sees[1:])).all()
    assert (some >= (sees[:-1] | sees[1:])).all()
    some, every = spread(pairs_of_keys[:-2], rows).reshape(-1, 2, rows).swapaxes(0, 1)
    assert (every == (sees.T[:-1] & sees.T[1:])).all()
    assert (some >= (sees.T[:-1] | sees.T[1:])).all()


SCORES = """
#include "tile/score_mod.cuh"
struct Result {
  double score, derivative;
};
template <class T, bool kFast, bool kLog2>
__device__ Result evaluate(const tile::ScoreInputs& inputs, double product, int head, int query,
                           int key) {
  using Acc = tile::Accumulator<T>;
  const ScoreMod<T, kFast, kLog2> score_mod = {inputs.of_head<T>(1, head)};
  const tile::ScoreRow<Acc> row = {1, head, query, query + inputs.cols - inputs.rows,
                                   score_mod.slope(1, head)};
  Acc score = static_cast<Acc>(product), derivative = 1;
  score_mod.terms([&](const auto& term) {
    derivative *= term.derivative(score, row, key);
    score = term(score, row, key);
  });
  return {score, derivative};
}
extern "C" __global__ void example(const double* products, int queries, int keys, double scale,
                                   double softcap, const double* bias, const unsigned char* mask,
                                   const double* slopes, const float* float_slopes,
                                   Result* results) {
  tile::ScoreInputs inputs = {scale, softcap, bias, mask, slopes};
  inputs.bias_stride = inputs.mask_stride = {3 * queries * keys, queries * keys, keys, 1};
  inputs.alibi_batch_stride = 3;
  inputs.rows = queries;
  inputs.cols = keys;
  tile::ScoreInputs floats = inputs;
  floats.alibi_slopes = float_slopes;
  floats.bias = nullptr;
  for (int i = 0; i < 3 * queries * keys; ++i) {
    const int head = i / (queries * keys), query = i / keys % queries, key = i % keys;
    results[3 * i] = evaluate<double, false, false>(inputs, products[i], head, query, key);
    results[3 * i + 1] = evaluate<__half, true, false>(floats, products[i], head, query, key);
    results[3 * i + 2] = evaluate<__half, true, true>(floats, products[i], head, query, key);
  }
}
"""


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("has_alibi", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
def test_scores_and_their_derivatives_by_the_contract(launch, softcap, has_alibi, has_mask):
    rng = np.random.default_rng(0)
    queries, keys, scale = 5, 7, 0.3
    products = 20 * rng.standard_normal((3, queries, keys))
    bias = rng.standard_normal((2, 3, queries, keys))
    mask, slopes = rng.random((2, 3, queries, keys)) < 0.7, rng.random((2, 3))
    results = cupy.full((3, queries, keys, 3, 2), np.nan)
    launch(
        SCORES,
        *(cupy.asarray(products), np.int32(queries), np.int32(keys)),
        *(np.float64(scale), np.float64(softcap), cupy.asarray(bias)),
        cupy.asarray(mask) if has_mask else np.uint64(0),
        cupy.asarray(slopes) if has_alibi else np.uint64(0),
        cupy.asarray(slopes.astype(np.float32)) if has_alibi else np.uint64(0),
        results,
    )
    scores, derivatives = np.moveaxis(results.get(), (-2, -1), (1, 0))  # of the three functors

    want, slope = scale * products, np.full_like(products, scale)
    if softcap:
        slope = scale * (1 - np.tanh(want / softcap) ** 2)
        want = softcap * np.tanh(want / softcap)
    if has_alibi:
        distance = np.abs(np.arange(queries)[:, None] + keys - queries - np.arange(keys))
        want = want - slopes[1][:, None, None] * distance
    hidden = ~mask[1] if has_mask else np.zeros_like(mask[1])
    log2e = 1 / np.log(2)
    for i, (unit, rounding) in enumerate(((1, 1e-14), (1, 3e-5), (log2e, 3e-5))):
        expected = np.where(hidden, -np.inf, unit * (want + (bias[1] if i == 0 else 0)))
        np.testing.assert_allclose(scores[i], expected, rtol=rounding, atol=rounding)
        np.testing.assert_allclose(derivatives[i], unit * slope, rtol=rounding, atol=rounding)


USER_SCORES = """
template <class T, bool kFast, bool kLog2>
struct ScoreMod {
  using Acc = tile::Accumulator<T>;
  tile::ScoreInputs inputs;

  struct Wave {
    Acc scale;
    __device__ Acc operator()(Acc score, const tile::ScoreRow<Acc>& row, int key) const {
      return score * scale * (1 + Acc(0.1) * cos(static_cast<Acc>(row.position - key)));
    }
  };
  struct Shift {
    __device__ Acc operator()(Acc score, const tile::ScoreRow<Acc>& row, int key) const {
      const int number = row.head % 3 - 2 * row.batch + (5 * row.query + key) % 7;
      return (score + static_cast<Acc>(number)) * (kLog2 ? Acc(1.4426950408889634) : 1);
    }
  };
  __device__ Acc slope(int, int) const { return 0; }
  template <class Visit>
  __device__ void terms(const Visit& visit) const {
    visit(Wave{static_cast<Acc>(inputs.scale)});
    visit(Shift{});
  }
};
"""


def user_bias(q, k):
    """What USER_SCORES adds to a sequence's scaled scores: (heads, queries, keys)."""
    q, k = (a.astype(np.float64).swapaxes(0, 1) for a in (q, k))
    k = k.repeat(len(q) // len(k), 0)
    h, i, j = np.ogrid[: len(q), : q.shape[1], : k.shape[1]]
    wave = 0.1 * np.cos(i + k.shape[1] - q.shape[1] - j)
    return q @ k.swapaxes(1, 2) / np.sqrt(q.shape[2]) * wave + h % 3 + (5 * i + j) % 7


def user_attention(q, k, v, batch, **options):
    """Attention with USER_SCORES of sequence `batch` of a call, in float64."""
    wide = [a.astype(np.float64) for a in (q, k, v)]
    return flash_attention(*wide, bias=user_bias(q, k) - 2 * batch, **options)


TOLERANCE = {2: 4e-3, 4: 1e-5, 8: 1e-12}


@pytest.mark.parametrize("window", [None, (None, 0), (40, 3)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("tier", ["forward_sm90", "forward_sm80", "forward_simt"])
def test_scores_of_a_functor_of_ones_own(tier, dtype, window, rng):
    """A call whose tiles are ragged; on Hopper, whatever other tiers do, by its own kernel."""
    q, k, v = (rng.standard_normal((2, n, 6, 64)).astype(dtype) for n in (150, 270, 270))
    spec = attention_spec(
        "flash_attention", q.shape, k.shape, v.shape, *[q.dtype] * 3, window=window
    )
    with dispatch.use_tiers(tier, "forward_simt"):
        out, _ = attention.forward(*map(cupy.asarray, (q, k, v)), spec, score_mod=USER_SCORES)
    for b in range(2):
        want = user_attention(q[b], k[b], v[b], b, window=window)
        np.testing.assert_allclose(out[b].get(), want, atol=TOLERANCE[q.itemsize])


@pytest.mark.parametrize("head_dims", [(64, 64), (72, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("tier", ["forward_sm90", "forward_sm80", "forward_simt"])
def test_scores_of_a_functor_of_ones_own_in_ragged_rows(tier, head_dims, rng):
    lengths = [5, 0, 300, 129]
    q, k, v = (
        rng.standard_normal((sum(lengths), heads, dim)).astype(np.float16)
        for heads, dim in zip((4, 2, 2), (*head_dims[:1] * 2, head_dims[1]), strict=True)
    )
    spec = attention_spec(
        "flash_attention_varlen",
        *(q.shape, k.shape, v.shape),
        *[q.dtype] * 3,
        causal=True,
        sequences=len(lengths),
    )
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    with dispatch.use_tiers(tier, "forward_simt"):
        out, lse = attention.forward(
            *map(cupy.asarray, (q, k, v)),
            spec,
            cu_seqlens_q=cupy.asarray(ends),
            cu_seqlens_k=cupy.asarray(ends),
            return_lse=True,
            score_mod=USER_SCORES,
        )
    for b, (first, n) in enumerate(zip(ends, lengths, strict=False)):
        rows = slice(first, first + n)
        want, want_lse = user_attention(q[rows], k[rows], v[rows], b, causal=True, return_lse=True)
        np.testing.assert_allclose(out[rows].get(), want, atol=TOLERANCE[2])
        np.testing.assert_allclose(lse[:, rows].get(), want_lse, atol=TOLERANCE[2])


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("tier", ["decode_sm90", "decode_sm80", "decode_simt", "forward_sm90"])
def test_scores_of_a_functor_of_ones_own_in_decoding(tier, tokens, rng):
    lens = np.array([130, 600], np.int32)
    q = rng.standard_normal((2, tokens, 6, 64)).astype(np.float16)
    k, v = (rng.standard_normal((2, 600, 2, 64)).astype(np.float16) for _ in "kv")
    spec = attention_spec(
        "flash_decode", q.shape, k.shape, v.shape, *[q.dtype] * 3, causal=True, keys="cached"
    )
    with dispatch.use_tiers(tier, "decode_simt"):
        out, _ = attention.forward(
            *map(cupy.asarray, (q, k, v)),
            spec,
            seq_lens=cupy.asarray(lens),
            score_mod=USER_SCORES,
        )
    for b, n in enumerate(lens):
        want = user_attention(q[b], k[b, :n], v[b, :n], b, causal=True)
        np.testing.assert_allclose(out[b].get(), want, atol=TOLERANCE[2])


NUMBERS = """
#include "tile/eight_numbers.cuh"
// whether scales with minima allow for the short way, and all codes' numbers in both ways
extern "C" __global__ void example(const unsigned* scales, int count, bool* is_short,
                                   uint4* numbers) {
  const tile::EightNumbers<__nv_bfloat16, tile::kInt4> plain;
  const tile::EightNumbers<__nv_bfloat16, tile::kInt4, true> other;
  const unsigned words[2][2] = {{0x76543210}, {0xfedcba98}};
  for (int i = 0; i < count; ++i) {
    is_short[i] = other.is_short(scales[i]);
    for (int half = 0; half < 2; ++half) {
      numbers[4 * i + half] = plain(words[half], plain.prepared(scales[i]));
      numbers[4 * i + 2 + half] = other(words[half], other.prepared(scales[i]));
    }
  }
}
"""


def test_codes_of_4_bits_are_the_same_numbers_in_fewer_instructions(launch):
    """Wherever `is_short` says so: in most of what there is, and in all of what is usual."""
    rng = np.random.default_rng(4)
    some, more = np.arange(3), np.arange(-30, 31)
    exponents = np.array([0, 1, 2, 12, 100, 127, 230, 240, 249, 250, 251, 254, 255])
    axes = np.meshgrid(some, exponents, some, more, [0, 1], indexing="ij")
    of_scale, exponent, of_minimum, more, sign = (axis.ravel() for axis in axes)
    # Mantissas are 0, the largest, or any.
    of_scale, of_minimum = (
        np.choose(which, [0, 0x7F, rng.integers(0, 0x80, which.size)])
        for which in (of_scale, of_minimum)
    )
    minimum = sign << 15 | np.clip(exponent + more, 0, 255) << 7 | of_minimum
    given = (minimum << 16 | exponent << 7 | of_scale).astype(np.uint32)
    scales = np.concatenate([given, rng.integers(0, 1 << 32, 4096, np.uint32)])
    is_short = cupy.zeros(scales.size, bool)
    numbers = cupy.zeros((scales.size, 2, 16), np.uint16)
    launch(NUMBERS, cupy.asarray(scales), np.int32(scales.size), is_short, numbers)
    is_short, numbers = is_short.get(), numbers.get()
    np.testing.assert_array_equal(numbers[is_short, 0], numbers[is_short, 1])
    usual = (more >= -11) & (more <= 14) & (exponent > 11) & (exponent < 241)
    assert is_short[: usual.size][usual].all()
