"""Calls that a type checker refuses: each line that ends in "# error: CODE", with mypy's code, and
no other. Nothing here runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import cuattn

Floats = NDArray[np.float32]


def attention(q: Floats, lengths: NDArray[np.int32]) -> None:
    cuattn.flash_attention(q, q, q, causl=True)  # error: call-overload
    cuattn.flash_attention(q, q, q, window=3)  # error: call-overload
    cuattn.flash_attention(q, q, q, softmax_scale=0.1)  # error: call-overload
    cuattn.flash_attention(q, q, q, True)  # error: call-overload
    cuattn.flash_attention(q, q)  # error: call-overload
    cuattn.flash_attention([[1.0]], q, q)  # error: call-overload
    print(cuattn.flash_attention(q, q, q, return_lse=True).shape)  # error: attr-defined
    cuattn.flash_attention_varlen(q, q, q)  # error: call-overload
    cuattn.flash_attention_varlen(q, q, q, lengths, key_mask=5)  # error: call-overload
    cuattn.scaled_dot_product_attention(q, q, q, scale="small")  # error: call-overload
    cuattn.flash_decode(q, q, q)  # error: call-overload
    cuattn.flash_decode(q, q, q, 5)  # error: call-overload
    cuattn.paged_attention(q, q, q, lengths, lengths, prefix="shared")  # error: call-overload
    cuattn.merge_attention(q)  # error: call-overload


def cache(q: Floats) -> None:
    pages = cuattn.PagedKVCache(8, 4, 2, 8)  # error: call-arg
    pages.extend(["a"], 1)  # error: list-item
    pages.write(0, [0], [1.0], q)  # error: arg-type


def sampling(logits: Floats) -> None:
    cuattn.sampling.sample(logits, top_k="many")  # error: arg-type
    cuattn.sampling.sample(logits, top_k=0.5)  # error: call-overload
    cuattn.sampling.sample(logits, temprature=0.5)  # error: call-overload
    cuattn.sampling.sample()  # error: call-overload
    cuattn.sampling.top_k(logits, k="5")  # error: call-overload
    cuattn.sampling.greedy(logits, 1)  # error: call-overload
    cuattn.sampling.softmax("logits")  # error: call-overload
    int(cuattn.sampling.greedy(logits).upper())  # error: attr-defined
    cuattn.sampling.beam_step(logits, logits).shape()  # error: attr-defined
