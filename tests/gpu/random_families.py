"""The functions of which random calls are made."""

from __future__ import annotations

from collections.abc import Callable

from tests.gpu.random_arrays import flash_attention, flash_attention_varlen
from tests.gpu.random_caches import flash_decode, paged_attention
from tests.gpu.random_calls import Drawn, Generator
from tests.gpu.random_codes import quantize
from tests.gpu.random_gradients import flash_attention_backward, flash_attention_varlen_backward
from tests.gpu.random_latents import flashmla_pages, mla_decode, mla_prefill
from tests.gpu.random_layers import flash_attention_jvp, merge_attention, multi_head_attention, rope
from tests.gpu.random_nonfinite import (
    with_nonfinite,
    with_nonfinite_pages,
    with_nonfinite_ragged,
)
from tests.gpu.random_sampling import (
    apply_penalties,
    filter_logits,
    sample,
    softmax,
    speculative_sample,
    top_k,
)
from tests.gpu.random_writing import append_kv, paged_kv_cache

FAMILIES: dict[str, Callable[[Generator, Generator, int], Drawn | None]] = {
    function.__name__: function
    for function in (
        flash_attention,
        flash_attention_varlen,
        flash_attention_backward,
        flash_attention_varlen_backward,
        flash_decode,
        paged_attention,
        flash_attention_jvp,
        mla_decode,
        flashmla_pages,
        mla_prefill,
        multi_head_attention,
        merge_attention,
        rope,
        quantize,
        sample,
        apply_penalties,
        filter_logits,
        top_k,
        softmax,
        speculative_sample,
        append_kv,
        paged_kv_cache,
        with_nonfinite,
        with_nonfinite_ragged,
        with_nonfinite_pages,
    )
}
