"""Calls that must copy some of their arguments, captured in a CUDA graph: a replay copies what the
arrays hold by then, and touches no memory that is somebody else's."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from cuattn import sampling
from cuattn.kvcache import PagedKVCache

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

PATTERN = 0x7FC0_1234  # NaN, as float32


@pytest.fixture
def stream():
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        yield stream


def spread(array):
    """A device array of the same values, with no axis contiguous."""
    wide = cupy.empty((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    view = wide[..., ::2]
    view[...] = cupy.asarray(array)
    return view


def captured(stream, call):
    """A graph of the call, and its result; the call has been made before, so all is compiled."""
    cupy.get_default_memory_pool().free_all_blocks()
    stream.synchronize()
    stream.begin_capture()
    result = call()
    return stream.end_capture(), result


class EverythingElse:
    """All memory that the pool would still give to this stream, given to arrays."""

    def __init__(self):
        pool, self.arrays = cupy.get_default_memory_pool(), []
        total = pool.total_bytes()
        while pool.total_bytes() == total:
            self.arrays.append(cupy.full(128, PATTERN, np.uint32))  # the smallest piece

    def check(self):
        assert bool((cupy.stack(self.arrays) == PATTERN).all())


def arrays_of(result):
    return [a for a in (result if isinstance(result, tuple) else (result,)) if a is not None]


def normal(*shape, dtype=np.float16):
    return lambda rng: rng.standard_normal(shape).astype(dtype)


def uniform(*shape, low=0.0, high=1.0):
    return lambda rng: rng.uniform(low, high, shape)


def integers(low, high, *shape, dtype=np.int64):
    return lambda rng: rng.integers(low, high, shape, dtype)


def probabilities(*shape):
    return lambda rng: rng.dirichlet(np.ones(shape[-1]), shape[:-1]).astype(np.float32)


def lengths(total, count):
    """Cumulative lengths of `count` sequences."""
    return lambda rng: np.r_[0, np.sort(rng.integers(0, total + 1, count - 1)), total]


def logit_bias(sampler):
    return lambda logits, tokens, where, token, value, **options: sampler(
        logits, tokens=tokens, logit_bias=(where, token, value), **options
    )


PENALTIES = {
    "logits": normal(3, 500),
    "tokens": integers(-1, 500, 3, 20),
    "repetition": uniform(3, low=1.0, high=1.5),
    "frequency": uniform(3),
}
TRIPLES = {
    "where": integers(0, 3, 6),
    "token": integers(0, 500, 6),
    "value": normal(6, dtype=np.float64),
}
SEEDS = {"seed": integers(0, 99, 3, dtype=np.int32), "offset": integers(0, 99, 3, dtype=np.uint64)}
HEADS = {"sinks": normal(4, dtype=np.float64), "alibi_slopes": uniform(4)}
PAGES = {
    "q": normal(2, 1, 4, 64),
    "k_pages": normal(12, 16, 2, 64),
    "v_pages": normal(12, 16, 2, 64),
    "page_table": lambda rng: np.r_[[[0, 1]] * 2, 2 + rng.permutation(10).reshape(5, 2)].T,
    "seq_lens": integers(40, 112, 2),
}

#: Function, its options, and how to draw each of its arrays.
CALLS = {
    "flash_attention": (
        cuattn.flash_attention,
        {"causal": True, "return_lse": True},
        {
            **{name: normal(2, 70, heads, 64) for name, heads in (("q", 4), ("k", 2), ("v", 2))},
            "bias": normal(4, 70, 70, dtype=np.float64),
            "out": normal(2, 70, 4, 64),
            **HEADS,
        },
    ),
    "flash_attention_varlen": (
        cuattn.flash_attention_varlen,
        {"causal": True},
        {
            **{name: normal(200, heads, 64) for name, heads in (("q", 4), ("k", 2), ("v", 2))},
            "cu_seqlens_q": lengths(200, 5),
            "out": normal(200, 4, 64),
            **HEADS,
        },
    ),
    "scaled_dot_product_attention": (
        cuattn.scaled_dot_product_attention,
        {},
        {
            **{
                name: normal(2, 3, 4, 30, 32, dtype=np.float32)
                for name in ("query", "key", "value")
            },
            "attn_mask": normal(3, 1, 30, 30, dtype=np.float32),
        },
    ),
    "flash_decode": (
        cuattn.flash_decode,
        {"return_lse": True},
        {
            "q": normal(2, 1, 4, 128),
            "k_cache": normal(2, 900, 2, 128),
            "v_cache": normal(2, 900, 2, 128),
            "seq_lens": integers(1, 900, 2),
            "out": normal(2, 1, 4, 128),
            **HEADS,
        },
    ),
    "paged_attention": (
        cuattn.paged_attention,
        {},
        {
            **PAGES,
            "q": normal(9, 4, 64),
            "cu_seqlens_q": lengths(9, 2),
            "out": normal(9, 4, 64),
            **HEADS,
        },
    ),
    "paged_attention of a shared prefix": (
        lambda *, k, v, **arrays: cuattn.paged_attention(**arrays, prefix=(k, v)),
        {"num_splits": 4},
        {
            **PAGES,
            "k": normal(50, 2, 64),
            "v": normal(50, 2, 64),
            "out": normal(2, 1, 4, 64),
            "sinks": HEADS["sinks"],
        },
    ),
    "merge_attention": (
        cuattn.merge_attention,
        {},
        {"outs": normal(40, 2, 5, 4, 64), "lses": normal(40, 2, 4, 5, dtype=np.float32)},
    ),
    "softmax": (
        sampling.softmax,
        {},
        {"logits": normal(3, 500), "temperature": uniform(3, low=0.5)},
    ),
    "greedy": (sampling.greedy, {}, {"logits": normal(3, 500)}),
    "top_k": (sampling.top_k, {"k": 7}, {"logits": normal(3, 500)}),
    "filter_logits": (
        sampling.filter_logits,
        {},
        {
            "logits": normal(3, 500),
            "top_k": integers(1, 500, 3),
            "min_p": uniform(3, high=0.1),
        },
    ),
    "sample": (
        sampling.sample,
        {},
        {
            "logits": normal(3, 500),
            "temperature": uniform(3),
            "top_k": integers(1, 500, 3),
            "min_p": uniform(3, high=0.1),
            **SEEDS,
        },
    ),
    "sample with penalties": (
        logit_bias(sampling.sample),
        {},
        {**PENALTIES, **TRIPLES, **SEEDS},
    ),
    "sample with penalties and filters": (
        logit_bias(sampling.sample),
        {"top_k": 20},
        {**PENALTIES, **TRIPLES, **SEEDS},
    ),
    "apply_penalties": (
        sampling.apply_penalties,
        {},
        {
            **PENALTIES,
            "logit_bias": normal(3, 500),
            "allowed": lambda rng: rng.random(500) < 0.7,
            "out": normal(3, 500),
        },
    ),
    "speculative_sample": (
        sampling.speculative_sample,
        {},
        {
            "draft_tokens": integers(0, 200, 3, 4),
            "draft_probs": probabilities(3, 4, 200),
            "target_probs": probabilities(3, 5, 200),
            **SEEDS,
        },
    ),
    "speculative_sample_tree": (
        sampling.speculative_sample_tree,
        {},
        {
            "draft_tokens": integers(0, 200, 3, 4),
            "parents": lambda rng: rng.integers(-1, np.arange(4), (3, 4)),
            "draft_probs": probabilities(3, 4, 200),
            "target_probs": probabilities(3, 5, 200),
            **SEEDS,
        },
    ),
    "logprobs": (
        sampling.logprobs,
        {"top_n": 5},
        {"logits": normal(3, 500), "tokens": integers(0, 500, 3, 2)},
    ),
    "beam_step": (
        sampling.beam_step,
        {},
        {"logits": normal(3, 4, 500), "scores": normal(3, 4, dtype=np.float64)},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_copies_are_the_graphs_own(rng, stream, name):
    function, options, draw = CALLS[name]
    there = {label: spread(array(rng)) for label, array in draw.items()}

    def call():
        return function(**there, **options)

    call()
    graph, result = captured(stream, call)
    others = EverythingElse()
    for _ in range(3):
        now = {label: array(rng) for label, array in draw.items()}
        for label, array in now.items():
            there[label][...] = cupy.asarray(array)
        want = arrays_of(function(**now, **options))
        stream.synchronize()
        graph.launch(stream)
        stream.synchronize()
        others.check()
        found = arrays_of(result)
        assert len(found) == len(want)
        for got, expected in zip(found, want, strict=True):
            assert got.shape == expected.shape
            got, expected = (a.astype(np.float64) for a in (got.get(), np.asarray(expected)))
            np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-3)


def test_cache_writes_copies_of_the_graphs_own(rng, stream):
    """Keys that no kernel can read as they are, and tables of a rotation that begin anywhere."""
    layout = {"page_size": 16, "num_kv_heads": 2, "head_dim": 64, "dtype": np.float16}
    caches = [PagedKVCache(20, max_seqlen=64, xp=xp, **layout) for xp in (np, cupy)]
    ids = [[cache.add_sequence() for _ in range(3)] for cache in caches]
    k, v = spread(np.zeros((3, 2, 2, 64), np.float16)), spread(np.zeros((3, 2, 2, 64), np.float16))
    angle = rng.random((64, 32)).astype(np.float32)
    tables = np.cos(angle), np.sin(angle)
    rope = [cupy.empty(1 + angle.size, np.float32)[1:].reshape(angle.shape) for _ in tables]
    for array, table in zip(rope, tables, strict=True):
        array[...] = cupy.asarray(table)

    def step():
        for cache, of_cache in zip(caches, ids, strict=True):
            cache.extend(of_cache, 2)
        caches[1].page_table(ids[1])

    step()
    caches[1].write(0, ids[1], k, v, rope=tuple(rope))
    graph, _ = captured(stream, lambda: caches[1].write(0, ids[1], k, v, rope=tuple(rope)))
    others = EverythingElse()
    for _ in range(3):
        new = rng.standard_normal((2, 3, 2, 2, 64)).astype(np.float16)
        k[...], v[...] = cupy.asarray(new[0]), cupy.asarray(new[1])
        caches[0].write(0, ids[0], *new, rope=tables)
        stream.synchronize()
        graph.launch(stream)
        stream.synchronize()
        others.check()
        length = int(caches[0].seq_lens(ids[0])[0])
        slots = [divmod(position, 16) for position in range(length - 2, length)]
        for of_cpu, of_gpu in zip(caches[0].pages(0), caches[1].pages(0), strict=True):
            for column, slot in slots:
                page = caches[0].page_table(ids[0])[:, column]
                other = caches[1].page_table(ids[1]).get()[:, column]
                want, got = of_cpu[page, slot], of_gpu.get()[other, slot]
                np.testing.assert_allclose(got, want, atol=2e-3)
        step()


def test_what_comes_from_the_host_is_refused(rng, stream):
    """A replay would copy from the host's memory again, whatever is there by then."""
    logits = cupy.asarray(rng.standard_normal((3, 500)).astype(np.float32))
    cache = PagedKVCache(20, 16, 2, 64, dtype=np.float16, xp=cupy)
    ids = [cache.add_sequence()]
    cache.extend(ids, 1)
    k = cupy.zeros((1, 2, 64), np.float16)
    sampling.sample(logits, temperature=np.ones(3), seed=np.arange(3))
    stream.synchronize()
    stream.begin_capture()
    with pytest.raises(ValueError, match=r"sample: temperature is an array on the host"):
        sampling.sample(logits, temperature=np.ones(3))
    with pytest.raises(ValueError, match=r"sample: seed is an array on the host"):
        sampling.sample(logits, seed=np.arange(3))
    with pytest.raises(ValueError, match=r"sample: seed must be an integer or an array on the dev"):
        sampling.sample(logits)
    with pytest.raises(RuntimeError, match=r"the page table would change"):
        cache.write(0, ids, k, k)
    stream.end_capture()
    cache.write(0, ids, k, k)  # afterwards all is as it was
