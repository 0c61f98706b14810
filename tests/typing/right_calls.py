"""A user's program that a type checker accepts, and that runs: `tests/test_typing.py` does both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import cuattn

if TYPE_CHECKING:
    from typing_extensions import assert_type
else:

    def assert_type(value, expected):
        return value


Floats = NDArray[np.float32]


class Foreign:
    """An array of some other library."""

    def __init__(self, array: Floats) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def attention(q: Floats) -> None:
    out = cuattn.flash_attention(q, q, q, causal=True, window=(4, None), scale=1, softcap=30.0)
    assert_type(out, Floats)
    both = cuattn.flash_attention(q, q, q, bias=q[..., 0, :1], sinks=q[0, 0, :, 0], return_lse=True)
    assert_type(both[0], Floats)
    cuattn.merge_attention([both[0], out], [both[1], both[1]])
    cuattn.flash_attention(q, q, q, out=out)
    (either,) = [cuattn.flash_attention(q, q, q, return_lse=flag) for flag in (bool(q.ndim),)]
    assert isinstance(either, tuple)
    foreign: Any = cuattn.flash_attention(Foreign(q), Foreign(q), q)
    assert isinstance(foreign, np.ndarray)
    rows: Floats = q[0]
    cu_seqlens = np.array([0, 3, 5], np.int32)
    assert_type(cuattn.flash_attention_varlen(rows, rows, rows, cu_seqlens), Floats)
    keep = np.ones((2, 3), bool)
    cuattn.flash_attention_varlen(rows, rows, rows, cu_seqlens, key_mask=keep, mask=keep[:, None])
    assert_type(cuattn.scaled_dot_product_attention(q, q, q, None, 0.0, True), Floats)


def decoding(q: Floats) -> None:
    lengths = np.array([5], np.int32)
    assert_type(cuattn.flash_decode(q, q, q, lengths, num_splits="fixed"), Floats)
    out, lse = cuattn.flash_decode(q, q, q, lengths, return_lse=True)
    assert_type(out, Floats)
    assert lse.dtype == np.float32
    cache = cuattn.PagedKVCache(8, 4, 2, 8, dtype=np.float32)
    sequence = cache.add_sequence([1, 2, 3])
    cache.extend([sequence], 5, tokens=[1, 2, 3, 4, 5])
    cache.write(0, [sequence], q[0], q[0])
    k, v = cache.pages(0)
    table, lengths = cache.page_table([sequence]), cache.seq_lens([sequence])
    assert_type(cuattn.paged_attention(q, k, v, table, lengths, prefix=0), Floats)


def latents(q: Floats) -> None:
    table, lengths = np.zeros((1, 1), np.int32), np.array([2], np.int32)
    pages: Floats = q[:, :, :1]
    out = cuattn.mla_decode(q, q, pages, pages, table, lengths, scale=0.1, window=(4, None))
    assert_type(out, Floats)
    both = cuattn.mla_decode(q, q, pages, pages, table, lengths, scale=1, return_lse=True)
    assert_type(both[0], Floats)


def quantized(k: Floats) -> None:
    codes = cuattn.quantize(k, "int8", granularity="group", group_size=4)
    assert_type(codes, cuattn.QuantizedArray)
    q, lens = k[:, -1], np.full(k.shape[0], k.shape[1], np.int32)
    assert_type(cuattn.flash_decode(q, codes, k, lens), Floats)
    cuattn.PagedKVCache(4, 4, 2, 8, dtype=np.float32, quantization=cuattn.KVQuantization("int8"))


def sampling(logits: Floats) -> None:
    assert_type(cuattn.sampling.softmax(logits, temperature=[0.5, 1]), Floats)
    assert_type(cuattn.sampling.greedy(logits), NDArray[np.int32])
    values, indices = cuattn.sampling.top_k(logits, 2)
    assert_type(values, Floats)
    assert_type(indices, NDArray[np.int32])
    kept = cuattn.sampling.filter_logits(logits, top_k=np.array([1, 2]), top_p=np.float32(0.9))
    assert_type(kept, Floats)
    tokens = cuattn.sampling.sample(logits, temperature=0.7, top_k=3, seed=1, offset=2)
    assert_type(tokens, NDArray[np.int32])
    history = np.zeros((2, 1), np.int32)
    assert_type(cuattn.sampling.apply_penalties(logits, history, presence=1), Floats)
    chosen, _, _ = cuattn.sampling.logprobs(logits, tokens)
    assert chosen is not None
    assert_type(chosen, Floats)


def main() -> None:
    rng = np.random.default_rng()
    attention(rng.standard_normal((1, 5, 2, 8), dtype=np.float32))
    decoding(rng.standard_normal((1, 5, 2, 8), dtype=np.float32))
    quantized(rng.standard_normal((1, 5, 2, 8), dtype=np.float32))
    latents(rng.standard_normal((1, 2, 2, 8), dtype=np.float32))
    sampling(rng.standard_normal((2, 4), dtype=np.float32))


if __name__ == "__main__":
    main()
