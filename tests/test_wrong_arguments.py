"""Every argument of every public function in turn is something that it may not be: what is raised
names the function, and the argument's message is not NumPy's."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import cuattn
from cuattn import sampling

RNG = np.random.default_rng(0)


def some(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


Q, K, PAGES = some(2, 3, 4, 8), some(2, 5, 2, 8), some(6, 4, 2, 8)
TABLE, LENS = np.arange(6, dtype=np.int32).reshape(2, 3), ints(5, 12)
OUT, LSE = cuattn.flash_attention(Q, K, K, return_lse=True)
ENDS = ints(0, 1, 3)
RAGGED_OUT, RAGGED_LSE = cuattn.flash_attention_varlen(Q[0], Q[0], Q[0], ENDS, return_lse=True)
LOGITS, PROBS = some(2, 10), np.full((2, 3, 4), 0.25, np.float32)
DRAFTS = np.zeros((2, 2), np.int32)

SCORES: dict[str, Any] = {
    **{"causal": True, "window": (2, 1), "scale": 0.3, "softcap": 2.0},
    **{"alibi_slopes": some(4), "sinks": some(4)},
}
DROPOUT: dict[str, Any] = {"dropout": 0.1, "seed": 3}
TERMS: dict[str, Any] = {
    **{"bias": some(4, 3, 5), "mask": np.ones((3, 5), bool), "key_mask": np.ones((2, 5), bool)}
}
CACHED: dict[str, Any] = {"num_splits": 2, "return_lse": True}
FILTERS: dict[str, Any] = {
    **{"temperature": 0.5, "top_k": 3, "top_p": 0.4, "min_p": 0.1, "typical_p": 0.5}
}
PENALTIES: dict[str, Any] = {
    **{"repetition": 1.2, "frequency": 0.1, "presence": 0.2},
    **{"logit_bias": some(10), "allowed": np.ones(10, bool)},
}
SEEDS: dict[str, Any] = {"seed": 3, "offset": 1}

#: The arguments that each function must have, and those that it may have.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "flash_attention": (
        {"q": Q, "k": K, "v": K},
        {**SCORES, **TERMS, **DROPOUT, "return_lse": True, "out": np.zeros_like(Q)},
    ),
    "flash_attention_varlen": (
        {"q": Q[0], "k": Q[0], "v": Q[0], "cu_seqlens_q": ENDS},
        {**SCORES, **TERMS, **DROPOUT, "cu_seqlens_k": ENDS, "out": np.zeros_like(Q[0])},
    ),
    "scaled_dot_product_attention": (
        {"query": Q, "key": Q, "value": Q},
        {
            **{"attn_mask": np.ones((4, 4), bool), "dropout_p": 0.1, "is_causal": True},
            **{"scale": 0.3, "enable_gqa": True, "seed": 3},
        },
    ),
    "flash_attention_backward": (
        {"dout": OUT, "q": Q, "k": K, "v": K, "out": OUT, "lse": LSE},
        {
            **{**SCORES, **TERMS, **DROPOUT, "dlse": LSE},
            **{"deterministic": True, "grad_bias": True, "grad_alibi": True},
        },
    ),
    "flash_attention_varlen_backward": (
        {
            **{"dout": RAGGED_OUT, "q": Q[0], "k": Q[0], "v": Q[0]},
            **{"out": RAGGED_OUT, "lse": RAGGED_LSE, "cu_seqlens_q": ENDS},
        },
        {**SCORES, **TERMS, "cu_seqlens_k": ENDS, "dlse": RAGGED_LSE, "grad_alibi": True},
    ),
    "flash_attention_vjp": (
        {"q": Q, "k": K, "v": K},
        {"return_lse": True, "deterministic": True, "grad_bias": True},
    ),
    "multi_head_attention": (
        {
            **{"x": some(2, 3, 8), "wq": some(8, 16), "wk": some(8, 8), "wv": some(8, 8)},
            **{"wo": some(16, 8), "heads": 4, "kv_heads": 2},
        },
        {
            **{**SCORES, **DROPOUT, "context": some(2, 5, 8), "rope": {}, "bq": some(16)},
            **{"bk": some(8), "bv": some(8), "bo": some(8), "bias": some(4, 3, 3)},
            **{"mask": np.ones((3, 3), bool), "key_mask": np.ones((2, 3), bool)},
            **{"return_lse": True, "out": np.zeros((2, 3, 8), np.float32)},
        },
    ),
    "flash_attention_jvp": (
        {"q": Q, "k": K, "v": K, "dq": Q, "dk": K, "dv": K},
        {**SCORES, **TERMS, **DROPOUT},
    ),
    "flash_decode": (
        {"q": Q, "k_cache": K, "v_cache": K, "seq_lens": ints(3, 5)},
        {**SCORES, **TERMS, **CACHED, "out": np.zeros_like(Q)},
    ),
    "paged_attention": (
        {"q": Q, "k_pages": PAGES, "v_pages": PAGES, "page_table": TABLE, "seq_lens": LENS},
        {**SCORES, **CACHED, "cu_seqlens_q": ENDS, "prefix": 0, "out": np.zeros_like(Q)},
    ),
    "merge_attention": ({"outs": np.stack([OUT, OUT]), "lses": np.stack([LSE, LSE])}, {}),
    "mla_decode": (
        {
            **{"q_latent": some(2, 4, 8), "q_rope": some(2, 4, 2), "latent_pages": some(6, 4, 8)},
            **{"rope_pages": some(6, 4, 2), "page_table": TABLE, "seq_lens": LENS, "scale": 0.4},
        },
        {
            **{"cu_seqlens_q": ENDS, "indices": np.zeros((2, 3), np.int32), "causal": True},
            **{"window": (2, 1), "sinks": some(4), "out": np.zeros((2, 4, 8), np.float32)},
            **CACHED,
        },
    ),
    "mla_prefill": (
        {
            **{"q_nope": some(2, 3, 4, 6), "q_rope": some(2, 3, 4, 2)},
            **{"latent_pages": some(6, 4, 8), "rope_pages": some(6, 4, 2), "page_table": TABLE},
            **{"seq_lens": LENS, "w_uk": some(4, 6, 8), "w_uv": some(4, 5, 8), "scale": 0.4},
        },
        {
            **{"cu_seqlens_q": ENDS, "absorbed": False, "chunk": 8, "max_prefix": 12},
            **{"return_lse": True},
        },
    ),
    "flashmla_pages": ({"rows": np.zeros((2, 4, 656), np.uint8)}, {}),
    "rope": (
        {"x": Q, "positions": np.arange(3)},
        {"base": 1e4, "rotary_dim": 4, "interleaved": True, "scaling": None},
    ),
    "append_kv": (
        {
            **{"k_cache": K.copy(), "v_cache": K.copy(), "k": some(2, 1, 2, 8)},
            **{"v": some(2, 1, 2, 8), "seq_lens": ints(3, 5)},
        },
        {
            **{"page_table": TABLE, "slots": ints(1, 2), "cu_seqlens": ENDS},
            **{"left_padding": ints(0, 1), "rope": None, "interleaved": True},
        },
    ),
    "quantize": (
        {"x": Q, "dtype": "int8"},
        {
            **{"granularity": "group", "group_size": 4, "symmetric": False, "offset": some(4, 8)},
            **{"rotate": True, "scale": np.abs(some(2, 3, 4, 1))},
        },
    ),
    "dequantize": ({"qx": cuattn.quantize(Q, "int8")}, {"dtype": np.float16}),
    "sampling.softmax": ({"logits": LOGITS}, {"temperature": 0.5}),
    "sampling.greedy": ({"logits": LOGITS}, {}),
    "sampling.top_k": ({"logits": LOGITS, "k": 3}, {}),
    "sampling.filter_logits": ({"logits": LOGITS}, FILTERS),
    "sampling.sample": (
        {"logits": LOGITS, "tokens": DRAFTS},
        {**FILTERS, **PENALTIES, **SEEDS},
    ),
    "sampling.apply_penalties": (
        {"logits": LOGITS, "tokens": DRAFTS},
        {**PENALTIES, "out": np.zeros_like(LOGITS)},
    ),
    "sampling.speculative_sample": (
        {"draft_tokens": DRAFTS, "draft_probs": PROBS[:, :2], "target_probs": PROBS},
        SEEDS,
    ),
    "sampling.speculative_sample_tree": (
        {
            **{"draft_tokens": DRAFTS, "parents": ints([-1, 0], [-1, -1])},
            **{"draft_probs": PROBS[:, :2], "target_probs": PROBS},
        },
        SEEDS,
    ),
    "sampling.logprobs": ({"logits": LOGITS}, {"tokens": ints(1, 2), "top_n": 3}),
    "sampling.beam_step": ({"logits": some(2, 3, 10), "scores": some(2, 3)}, {}),
}

#: Some of these are right for some arguments.
WRONG: list[Any] = [
    *(None, "x", b"x", 3, -1, 0, 1.5, float("nan"), float("inf"), -float("inf"), True, 2**70, 1j),
    *(np.nan, np.int8(3), [], [1, 2], [[1], [2, 3]], (), (1,), (1, 2), (1, 2, 3), {}, {"a": 1}),
    *(object(), slice(3), type, np.float32, len, range(3), (None, None), (2, "a"), (3.5, 1)),
    *(np.array(3), np.array(3.5), np.zeros(0, np.float32), np.zeros(0, np.int32), "int3"),
    *(np.zeros((0,) * 4, np.float32), np.zeros((2, 0, 4, 8), np.float32), np.ones((1,) * 10)),
    *(np.ones((2, 3, 4, 8)), np.ones((2, 3, 4, 8), np.int32), np.ones((2, 3, 4, 8), complex)),
    *(np.array([2**40, 2**62]), np.array([-5, -7]), np.array([2**63], np.uint64)),
    *(np.zeros(2, object), np.array(["a", "b"]), np.zeros(2, [("a", "f4")]), np.zeros(2, "M8[s]")),
    *(np.ma.zeros((2, 3, 4, 8)), np.ma.zeros(2), (np.zeros(2), np.zeros(2))),
]


def wrong_for(right: Any) -> list[Any]:
    """What to put in place of an argument that is right."""
    if not isinstance(right, np.ndarray):
        return WRONG
    swapped = right.astype(right.dtype.newbyteorder())
    return [*WRONG, swapped, right[..., None], right[None], right[:1], right.astype(object)]


@pytest.mark.parametrize(
    ("function", "argument"),
    [(name, argument) for name, parts in CALLS.items() for part in parts for argument in part],
)
def test_errors_name_the_function(function, argument):
    required, optional = CALLS[function]
    right = (required | optional)[argument]
    call = getattr(sampling if "." in function else cuattn, function.rpartition(".")[2])
    for wrong in wrong_for(right):
        arguments = {
            name: value.copy() if isinstance(value, np.ndarray) else value
            for name, value in required.items()
        }
        message = f"{function}:"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                call(**arguments | {argument: wrong})
            except (TypeError, ValueError, IndexError) as error:
                message = str(error)
        assert message.startswith(f"{function}:"), repr(wrong)
