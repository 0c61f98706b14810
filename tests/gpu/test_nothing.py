"""Arrays of no size, along each axis in turn: a call on the device ends as NumPy's does, with the
same error or with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuattn
from cuattn import sampling

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

#: Lengths of axes by letter: of the batch, queries, keys, query heads, key heads, features of keys
#: and of values, pages, their slots, a table's columns, rows of logits, tokens of a vocabulary,
#: earlier tokens, parts, rotated features and chosen tokens.
LENGTHS = dict(
    zip("bqkhgdepscrvtnoi", (2, 5, 7, 4, 2, 16, 8, 6, 4, 3, 3, 40, 6, 3, 8, 4), strict=True)
)
INTEGERS = {"lens": 7, "table": 6, "tokens": 40, "indices": 7, "positions": 50}

Axes = dict[str, str]


def arrays_of(rng: np.random.Generator, axes: Axes, lengths: dict[str, int]) -> dict[str, Any]:
    """Random arrays of these axes by name; integers where the name says so."""
    arrays: dict[str, Any] = {}
    for name, letters in axes.items():
        shape = tuple(lengths[letter] for letter in letters)
        if name in INTEGERS:
            arrays[name] = rng.integers(0, INTEGERS[name], shape).astype(np.int32)
        elif name.startswith("cu_"):  # (batch + 1,), of rows that the first letter counts
            (of, batch) = letters
            ends = np.linspace(0, lengths[of], lengths[batch] + 1).astype(np.int32)
            arrays[name] = ends
        else:
            arrays[name] = rng.standard_normal(shape).astype(np.float16)
    return arrays


def gradients(q: Any, k: Any, v: Any, **options: Any) -> Any:
    out, lse = cuattn.flash_attention(q, k, v, return_lse=True, **options)
    xp = cupy if isinstance(q, cupy.ndarray) else np
    return cuattn.flash_attention_backward(xp.ones_like(out), q, k, v, out, lse, **options)


def ragged_gradients(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, **options: Any) -> Any:
    out, lse = cuattn.flash_attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **options)
    xp = cupy if isinstance(q, cupy.ndarray) else np
    arrays = xp.ones_like(out), q, k, v, out, lse, cu_q, cu_k
    return cuattn.flash_attention_varlen_backward(*arrays, **options)


def appended(k: Any, v: Any, new_k: Any, new_v: Any, lens: Any, table: Any) -> Any:
    cuattn.append_kv(k, v, new_k, new_v, lens, page_table=table)
    return k, v


def codes(x: Any, dtype: str) -> Any:
    quantized = cuattn.quantize(x, dtype)
    return quantized.data, quantized.scale, cuattn.dequantize(quantized, np.float32)


def over_codes(q: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
    pages = (cuattn.quantize(x, "int8") for x in (k, v))
    return cuattn.paged_attention(q, *pages, table, lens)


def cached_codes(q: Any, k: Any, v: Any, lens: Any) -> Any:
    k, v = (cuattn.quantize(x, "float8_e4m3", granularity="channel") for x in (k, v))
    return cuattn.flash_decode(q, k, v, lens, return_lse=True)


def after_prefix(q: Any, k: Any, v: Any, table: Any, lens: Any, *prefix: Any) -> Any:
    options = {"prefix": prefix, "causal": False, "return_lse": True}
    return cuattn.paged_attention(q, k, v, table, 0 * lens, **options)


def with_terms(q: Any, k: Any, v: Any, bias: Any, key_mask: Any, slopes: Any, sinks: Any) -> Any:
    terms = {"bias": bias, "key_mask": key_mask > 0, "alibi_slopes": slopes, "sinks": sinks}
    return cuattn.flash_attention(q, k, v, **terms, return_lse=True)


def prefill(q: Any, qr: Any, k: Any, kr: Any, table: Any, lens: Any, *weights: Any) -> Any:
    lens = 0 * lens + q.shape[1]
    return cuattn.mla_prefill(q, qr, k, kr, table, lens, *weights, scale=0.1, return_lse=True)


def sparse(q: Any, qr: Any, k: Any, kr: Any, table: Any, lens: Any, indices: Any) -> Any:
    return cuattn.mla_decode(q, qr, k, kr, table, lens, indices=indices, scale=0.1)


def speculated(probs: Any) -> Any:
    batch, nodes, vocab = probs.shape
    probs = sampling.softmax(probs.reshape(batch * nodes, vocab)).reshape(probs.shape)
    tokens = probs[:, 1:, 0].astype(np.int32)
    return sampling.speculative_sample(tokens, probs[:, 1:], probs, seed=1)


WHOLE = {"q": "bqhd", "k": "bkgd", "v": "bkge"}
RAGGED = {"q": "qhd", "k": "kgd", "v": "kge", "cu_q": "qb", "cu_k": "kb"}
PAGES = {"q": "bqhd", "k": "psgd", "v": "psge", "table": "bc", "lens": "b"}
TERMS = {"bias": "hqk", "key_mask": "bk", "slopes": "bh", "sinks": "h"}
LATENTS = {"q": "bqhd", "qr": "bqho", "k": "ps1d", "kr": "ps1o", "table": "bc", "lens": "b"}
CALLS: dict[str, tuple[Callable, Axes, dict[str, Any]]] = {
    "flash_attention": (cuattn.flash_attention, WHOLE, {"return_lse": True, "causal": True}),
    "varlen": (cuattn.flash_attention_varlen, RAGGED, {"return_lse": True}),
    "gradients": (gradients, WHOLE, {}),
    "deterministic": (gradients, WHOLE, {"softcap": 5.0, "deterministic": True}),
    "ragged_gradients": (ragged_gradients, RAGGED, {}),
    "jvp": (lambda q, k, v: cuattn.flash_attention_jvp(q, k, v, q, k, v), WHOLE, {}),
    "flash_decode": (cuattn.flash_decode, {**WHOLE, "lens": "b"}, {"return_lse": True}),
    "with terms": (with_terms, WHOLE | TERMS, {}),
    "torch": (
        cuattn.scaled_dot_product_attention, {"q": "bhqd", "k": "bhkd", "v": "bhke"}, {},
    ),
    "multi_head_attention": (
        cuattn.multi_head_attention,
        {"x": "bqd", "wq": "dd", "wk": "de", "wv": "de", "wo": "dk"},
        {"heads": 4, "kv_heads": 2, "rope": {}, "causal": True},
    ),
    "cached codes": (cached_codes, {**WHOLE, "lens": "b"}, {}),
    "paged_attention": (cuattn.paged_attention, PAGES, {"return_lse": True}),
    "own prefix": (after_prefix, {**PAGES, "prefix_k": "kgd", "prefix_v": "kge"}, {}),
    "paged codes": (over_codes, PAGES, {}),
    "paged prefix": (cuattn.paged_attention, PAGES, {"prefix": 0}),
    "mla_decode": (cuattn.mla_decode, LATENTS, {"scale": 0.1, "return_lse": True}),
    "sparse": (sparse, {**LATENTS, "indices": "bqi"}, {}),
    "mla_prefill": (prefill, {**LATENTS, "q": "bqhe", "w_uk": "hed", "w_uv": "hgd"}, {}),
    "merge_attention": (cuattn.merge_attention, {"q": "nbqhd", "lse": "nbhq"}, {}),
    "rope": (cuattn.rope, {"q": "bqho", "positions": "q"}, {}),
    "append_kv": (
        appended,
        {"k": "psgd", "v": "psge", "new_k": "bqgd", "new_v": "bqge", "lens": "b", "table": "bc"},
        {},
    ),
    "int8": (codes, {"k": "psgd"}, {"dtype": "int8"}),
    "int4": (codes, {"k": "psgd"}, {"dtype": "int4"}),
    "softmax": (sampling.softmax, {"logits": "rv"}, {}),
    "greedy": (sampling.greedy, {"logits": "rv"}, {}),
    "filter_logits": (sampling.filter_logits, {"logits": "rv"}, {"top_p": 0.9}),
    "top_k": (sampling.top_k, {"logits": "rv"}, {"k": 1}),
    "sample": (sampling.sample, {"logits": "rv"}, {"seed": 1}),
    "sample top_p": (sampling.sample, {"logits": "rv"}, {"seed": 1, "top_p": 0.9}),
    "sample penalized": (
        lambda logits, tokens, bias: sampling.sample(
            logits, tokens=tokens, logit_bias=bias, allowed=bias > 0, presence=0.5, seed=1
        ),
        {"logits": "rv", "tokens": "rt", "bias": "v"},
        {},
    ),
    "beam_step": (sampling.beam_step, {"logits": "rnv", "scores": "rn"}, {}),
    "speculative_sample": (speculated, {"probs": "rnv"}, {}),
    "apply_penalties": (
        sampling.apply_penalties, {"logits": "rv", "tokens": "rt"}, {"repetition": 1.5},
    ),
    "logprobs": (sampling.logprobs, {"logits": "rv", "tokens": "rt"}, {"top_n": 1}),
}  # fmt: skip
CASES = [
    (name, letter)
    for name, (_, axes, _) in CALLS.items()
    for letter in sorted({letter for letters in axes.values() for letter in letters} - {"1"})
]


def outcome(function: Callable, arrays: dict[str, Any], options: dict[str, Any]) -> Any:
    """Results on the host, or the error."""
    try:
        with np.errstate(all="ignore"):
            result = function(*arrays.values(), **options)
    except (TypeError, ValueError, IndexError) as error:
        return type(error), str(error)
    result = result if isinstance(result, tuple) else (result,)
    return [None if x is None else x.get() if hasattr(x, "get") else x for x in result]


@pytest.mark.parametrize(("name", "letter"), CASES)
def test_an_axis_of_no_length(name, letter, rng):
    function, axes, options = CALLS[name]
    arrays = arrays_of(rng, axes, LENGTHS | {letter: 0, "1": 1})
    want = outcome(function, {key: x.copy() for key, x in arrays.items()}, options)
    got = outcome(function, {key: cupy.asarray(x) for key, x in arrays.items()}, options)
    if isinstance(want, tuple) or isinstance(got, tuple):
        # Values, which a device does not read back.
        if want[0] is IndexError or (name, letter) == ("mla_prefill", "c"):
            return
        assert got == want
        return
    if (name, letter) == ("varlen", "b"):  # rows of no sequence are undefined
        got, want = ([x[..., :0] for x in results] for results in (got, want))
    for x, right in zip(got, want, strict=True):
        assert (x is None) == (right is None)
        if right is not None:
            assert x.shape == right.shape and x.dtype == right.dtype
            np.testing.assert_allclose(
                x.astype(float), right.astype(float), rtol=0.02, atol=0.02, equal_nan=True
            )
