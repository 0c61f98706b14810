"""Keywords of other libraries: the error says which of ours to use, and how values translate."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

import cuattn
from cuattn import _errors

Q = np.ones((1, 2, 2, 4), np.float32)
LENGTHS = np.array([2], np.int32)
LOGITS = np.zeros((1, 4), np.float32)

CASES = [
    (cuattn.flash_attention, (Q, Q, Q), {"softmax_scale": 0.1}, "flash-attn; use scale"),
    (
        cuattn.flash_attention,
        (Q, Q, Q),
        {"window_size": (-1, -1)},
        "flash-attn; use window: a pair (left, right), None and not -1 for no limit on a side",
    ),
    (
        cuattn.flash_attention,
        (Q, Q, Q),
        {"is_causal": True},
        "torch; use causal: theirs is aligned to the first key, ours to the last",
    ),
    (
        cuattn.flash_attention,
        (Q, Q, Q),
        {"attn_mask": None},
        "torch; use mask or bias: mask where it is boolean (True keeps, as in torch)",
    ),
    (
        cuattn.flash_attention,
        (Q, Q, Q),
        {"key_value_seq_lengths": LENGTHS},
        "JAX; flash_decode, paged_attention, append_kv, mla_decode and mla_prefill have seq_lens",
    ),
    (cuattn.flash_attention, (), {"query": Q, "key": Q, "value": Q}, "torch; use q: with the"),
    (
        cuattn.flash_attention_varlen,
        (Q[0], Q[0], Q[0]),
        {"max_seqlen_q": 2},
        "flash-attn; leave it out",
    ),
    (cuattn.flash_decode, (Q, Q, Q), {"cache_seqlens": LENGTHS}, "flash-attn; use seq_lens: with"),
    (
        cuattn.flash_decode,
        (Q, Q, Q, LENGTHS),
        {"k": Q, "v": Q},
        "flash-attn; use k_cache: append_kv writes new tokens first",
    ),
    (cuattn.flash_decode, (Q, Q, Q, LENGTHS), {"sm_scale": 1.0}, "FlashInfer; use scale"),
    (
        cuattn.flash_decode,
        (Q, Q, Q, LENGTHS),
        {"block_table": LENGTHS},
        "flash-attn; paged_attention, append_kv, mla_decode and mla_prefill have page_table",
    ),
    (cuattn.paged_attention, (Q, Q, Q), {"block_table": LENGTHS}, "flash-attn; use page_table"),
    (cuattn.paged_attention, (Q, Q, Q), {"logits_soft_cap": 0}, "FlashInfer; use softcap: None"),
    (cuattn.sampling.sample, (LOGITS,), {"repetition_penalty": 1.1}, "vLLM; use repetition"),
    (cuattn.sampling.sample, (), {"probs": LOGITS}, "FlashInfer; use logits: of probabilities"),
    (cuattn.sampling.softmax, (LOGITS,), {"dim": -1}, "torch; leave it out: the vocabulary"),
]


@pytest.mark.parametrize(("function", "arguments", "options", "message"), CASES)
def test_foreign_keywords_are_translated(function, arguments, options, message):
    prefix = "sampling." if function.__module__ == "cuattn.sampling" else ""
    said = f"{prefix}{function.__name__}: {next(iter(options))} is a keyword of {message}"
    with pytest.raises(TypeError, match="^" + re.escape(said)):
        function(*arguments, **options)


CACHE = cuattn.PagedKVCache(1, 1, 1, 4, dtype=np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cuattn.flash_attention(Q, Q, Q, casual=True),
            "flash_attention: casual is not one of its keywords; did you mean causal?",
        ),
        (
            lambda: cuattn.flash_attention(Q, Q, Q, alibi=Q),
            "flash_attention: alibi is not one of its keywords; did you mean alibi_slopes?",
        ),
        (
            lambda: cuattn.merge_attention([Q], [Q], xyz=1),
            "merge_attention: xyz is not one of its keywords; they are outs, lses",
        ),
        (
            lambda: cuattn.sampling.sample(LOGITS, topk=3),
            "sampling.sample: topk is not one of its keywords; did you mean top_k?",
        ),
        (
            lambda: cuattn.flash_attention_vjp(Q, Q, Q, determinstic=True),
            "flash_attention_vjp: determinstic is not one of its keywords; did you mean "
            "deterministic?",
        ),
        (
            lambda: cuattn.flash_attention_vjp(Q, Q, Q, softmax_scale=1.0),
            "flash_attention_vjp: softmax_scale is a keyword of flash-attn; use scale",
        ),
        (
            lambda: cuattn.PagedKVCache(1, 1, 1, 4, dtype=np.float32, n_layers=2),
            "PagedKVCache: n_layers is not one of its keywords; did you mean num_layers?",
        ),
        (
            lambda: cuattn.PagedKVCache(num_blocks=1),
            "PagedKVCache: num_blocks is a keyword of vLLM; use num_pages",
        ),
        (
            lambda: CACHE.extend([0], counts=1),
            "PagedKVCache.extend: counts is not one of its keywords; they are ids, n, tokens",
        ),
        (
            lambda: CACHE.extend([0], 1, [2]),
            "PagedKVCache.extend: 3 arguments are given by position, may be ids, n; by name: "
            "tokens",
        ),
        (
            lambda: cuattn.rope(Q, LENGTHS, 1e4),
            "rope: 3 arguments are given by position, may be x, positions; by name: base, "
            "rotary_dim, interleaved, scaling, out",
        ),
        (lambda: cuattn.flash_decode(Q, Q, Q), "flash_decode: seq_lens must be given"),
        (lambda: CACHE.fork(), "PagedKVCache.fork: id must be given"),
        (
            lambda: cuattn.mla_decode(Q, Q, Q, Q, LENGTHS, LENGTHS),
            "mla_decode: scale must be given: that of the heads before absorption, such as "
            "1 / sqrt(192) for DeepSeek-V3",
        ),
    ],
)
def test_what_does_not_fit_the_parameters_is_explained(call, message):
    with pytest.raises(TypeError, match="^" + re.escape(message) + "$"):
        call()


def test_other_errors_stay_as_they_are():
    with pytest.raises(TypeError, match=r"got multiple values for argument 'q'$"):
        cuattn.flash_attention(Q, Q, Q, q=Q)
    with pytest.raises(TypeError, match=r"^flash_attention: k has dtype float64, must be q's"):
        cuattn.flash_attention(Q, Q.astype(np.float64), Q, causal=True)


def test_a_keyword_of_ours_is_never_taken_for_foreign():
    out = cuattn.scaled_dot_product_attention(query=Q, key=Q, value=Q, is_causal=True)
    with pytest.raises(TypeError, match=r"^scaled_dot_product_attention: is_causal must be True"):
        cuattn.scaled_dot_product_attention(query=Q, key=Q, value=Q, is_causal="no")
    assert out.shape == Q.shape


def test_every_counterpart_exists():
    functions = [getattr(cuattn, name) for name in cuattn.__all__]
    functions += [getattr(cuattn.sampling, name) for name in cuattn.sampling.__all__]
    parameters = {
        name
        for function in functions
        if inspect.isfunction(function)
        for name in inspect.signature(function).parameters
    }
    for method in (cuattn.PagedKVCache, cuattn.PagedKVCache.write):
        parameters.update(inspect.signature(method).parameters)
    for keyword, counterpart in _errors.COUNTERPARTS.items():
        assert parameters.issuperset(counterpart.ours), keyword
        assert counterpart.ours or counterpart.note, keyword
