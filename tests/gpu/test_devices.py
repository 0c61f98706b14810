"""Calls on arrays of a GPU that is not the current one: the same results, on the arrays' GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn import sampling

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(0)


def normal(*shape, dtype=ml_dtypes.bfloat16):
    return RNG.standard_normal(shape).astype(dtype)


def integers(high, *shape, dtype=np.int32):
    return RNG.integers(0, high, shape, dtype)


Q, K, V = normal(2, 40, 8, 128), normal(2, 300, 2, 128), normal(2, 300, 2, 128)
PAGES = normal(40, 16, 2, 128), normal(40, 16, 2, 128)
TABLE = RNG.permutation(40)[:38].reshape(2, 19).astype(np.int32)
LENS = np.array([200, 300])
LOGITS = normal(3, 5000, dtype=np.float32)
SINKS, BIAS, MASK = normal(8), normal(8, 40, 300), integers(2, 2, 1, 40, 300) > 0
PARTS = normal(3, 4, 8, 64, dtype=np.float32), normal(3, 8, 4, dtype=np.float32)
TOKENS, SCORES = integers(5000, 3, 20), normal(1, 3, dtype=np.float32)
DRAFT = integers(50, 2, 3)
PROBS = RNG.dirichlet(np.ones(50), (2, 4)).astype(np.float32)

CALLS = {
    "attention": lambda a: cuattn.flash_attention(a(Q), a(K), a(V), causal=True, return_lse=True),
    "copies": lambda a: cuattn.flash_attention(
        a(Q)[..., ::2], a(K)[..., ::2], a(V)[..., ::2], sinks=a(SINKS)
    ),
    "layouts": lambda a: cuattn.scaled_dot_product_attention(
        *(a(x.reshape(2, 1, -1, 8, 64).repeat(3, 1)).transpose(1, 0, 3, 2, 4) for x in (Q, K, K))
    ),
    "bias": lambda a: cuattn.flash_attention(a(Q), a(K), a(V), bias=a(BIAS), mask=a(MASK)),
    "varlen": lambda a: cuattn.flash_attention_varlen(
        a(Q[0]), a(K[0, :40]), a(V[0, :40]), a(np.array([0, 25, 40])), causal=True
    ),
    "decode": lambda a: cuattn.flash_decode(a(Q[:, :1]), a(K), a(V), a(LENS), sinks=a(SINKS)),
    "paged": lambda a: cuattn.paged_attention(a(Q[:, :1]), *map(a, PAGES), a(TABLE), a(LENS)),
    "prefix": lambda a: cuattn.paged_attention(
        a(Q[:, :1]), *map(a, PAGES), a(TABLE), a(LENS), prefix=(a(K[0]), a(V[0]))
    ),
    "merge": lambda a: cuattn.merge_attention(*map(a, PARTS)),
    "softmax": lambda a: sampling.softmax(a(LOGITS)),
    "top_k": lambda a: sampling.top_k(a(LOGITS), 7),
    "long top_k": lambda a: sampling.top_k(a(LOGITS), 3000),
    "sample": lambda a: sampling.sample(
        a(LOGITS), seed=[1, 2, 3], temperature=a(np.full(3, 0.8)), top_k=50, top_p=0.9
    ),
    "typical": lambda a: sampling.filter_logits(a(LOGITS), typical_p=0.9),
    "penalties": lambda a: sampling.sample(
        a(LOGITS), tokens=a(TOKENS), repetition=1.3, top_p=0.9, seed=3
    ),
    "logprobs": lambda a: sampling.logprobs(a(LOGITS), a(TOKENS[:, 0]), top_n=3),
    "speculation": lambda a: sampling.speculative_sample(
        a(DRAFT), a(PROBS[:, :3]), a(PROBS), seed=3
    ),
    "beams": lambda a: sampling.beam_step(a(LOGITS[None]), a(SCORES)),
}


@pytest.fixture(autouse=True)
def two_gpus():
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")


def on_the_other(array):
    with cupy.cuda.Device(1):
        return cupy.asarray(array)


def several(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", CALLS)
def test_other_device_than_the_current(name):
    expected = several(CALLS[name](cupy.asarray))
    results = several(CALLS[name](on_the_other))
    assert cupy.cuda.runtime.getDevice() == 0
    for result, array in zip(results, expected, strict=True):
        assert result.device.id == 1
        assert result.get().tobytes() == array.get().tobytes()


def test_cache():
    """A cache stays where it was made."""
    results = []
    for device in (0, 1):
        with cupy.cuda.Device(device):
            cache = cuattn.PagedKVCache(20, 16, 2, 128, dtype=np.dtype(ml_dtypes.bfloat16), xp=cupy)
            q, k, v = map(cupy.asarray, (Q[:, 0], K[0], V[0]))
        ids = [cache.add_sequence(), cache.add_sequence()]
        cache.extend(ids, [30, 40])
        cache.write(0, ids, k[:70], v[:70])
        ids[0] = cache.fork(ids[1])
        cache.extend(ids, 1)
        cache.write(0, ids, k[:2], v[:2])
        arrays = cache.page_table(ids), cache.seq_lens(ids)
        results.append(cuattn.paged_attention(q[:, None], *cache.pages(0), *arrays))
    assert [result.device.id for result in results] == [0, 1]
    assert results[0].get().tobytes() == results[1].get().tobytes()


@pytest.mark.parametrize("parameter", ["seed", "temperature"])
def test_parameters_of_another_device(parameter):
    values = on_the_other(np.ones(3, np.uint64 if parameter == "seed" else np.float32))
    with pytest.raises(ValueError, match=f"{parameter} is on GPU 1"):
        sampling.sample(cupy.asarray(LOGITS), **{parameter: values})
