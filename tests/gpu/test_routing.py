"""Calls that go to another kernel than their function's first: against the definition in
float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from tests import formulas

cupy = pytest.importorskip("cupy")

from cuattn.gpu import dispatch  # noqa: E402
from cuattn.gpu.plan import Plan  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = {np.dtype(dtype).name: np.dtype(dtype) for dtype in formulas.DTYPES}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def sources(monkeypatch):
    """The kernel files of the launches that were made."""
    launch, found = Plan.launch, []

    def noted(plan, addresses):
        found.append(plan.chosen.variant.source)
        launch(plan, addresses)

    monkeypatch.setattr(Plan, "launch", noted)
    return found


def arrays(rng, batch, tokens, keys, heads, dim, dtype):
    shapes = (batch, tokens, heads[0], dim), *[(batch, keys, heads[1], dim)] * 2
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (1, {}),
        (1, {"causal": True}),
        (1, {"window": (3000, 0), "softcap": 5.0}),
        (2, {"scale": -0.3}),
    ],
)
def test_few_queries_over_long_keys(rng, sources, dtype, tokens, options):
    heads = (2, 2) if tokens == 2 else (4, 2)
    q, k, v = arrays(rng, 3, tokens, 5003, heads, 64, DTYPES[dtype])
    if "window" in options:  # what is outside of it is not read
        k[:, :2002], v[:, :2002] = np.nan, np.nan
    sinks = rng.standard_normal(heads[0]).astype(np.float64 if dtype == "float64" else np.float32)
    slopes = np.abs(sinks) / 100
    more = {"sinks": sinks, "alibi_slopes": slopes}
    out, lse = cuattn.flash_attention(
        *map(cupy.asarray, (q, k, v)),
        **options,
        **{name: cupy.asarray(array) for name, array in more.items()},
        return_lse=True,
    )
    (source,) = sources
    assert source.startswith("decoding/")
    if "window" in options:
        k[:, :2002], v[:, :2002] = 0, 0
    exact, *plain = (
        formulas.attention(
            q[..., ::order], k[..., ::order], v, **options, **more, precision=precision
        )
        for precision, order in [(np.float64, 1), (DTYPES[dtype], 1), (DTYPES[dtype], -1)]
    )
    formulas.assert_accurate(out.get(), exact[0], *(p[0] for p in plain))
    formulas.assert_accurate(lse.get(), exact[1], *(p[1] for p in plain))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_batch_does_not_change_a_bit(rng, sources, dtype):
    q, k, v = map(cupy.asarray, arrays(rng, 40, 1, 9000, (4, 4), 64, DTYPES[dtype]))
    together = cuattn.flash_attention(q, k, v)
    assert {source.split("/")[0] for source in sources} == {"decoding"}
    for b in (0, 7, 39):
        alone = cuattn.flash_attention(*(array[b : b + 1] for array in (q, k, v)))
        assert bool((alone[0] == together[b]).all())


def test_rows_that_see_different_keys_stay_apart(rng, sources):
    """An infinite value reaches the queries that see it, and no other."""
    q, k, v = arrays(rng, 1, 8, 8192, (2, 2), 64, BFLOAT16)
    v[:, 8190:] = np.inf
    out = cuattn.flash_attention(*map(cupy.asarray, (q, k, v)), causal=True).get()
    assert np.isfinite(out[:, :6].astype(np.float32)).all()
    assert not np.isfinite(out[:, 6:].astype(np.float32)).any()
    assert sources[0].startswith("attention/")


def test_every_kernel_gives_the_same(rng):
    """Decoding or forward, one query over keys in plain arrays."""
    q, k, v = map(cupy.asarray, arrays(rng, 2, 1, 6000, (8, 2), 128, BFLOAT16))
    with dispatch.use_tiers("forward_sm90", "forward_sm80", "forward_simt"):
        forward = cuattn.flash_attention(q, k, v).get()
    with dispatch.use_tiers("decode_sm90", "decode_sm80", "decode_simt"):
        decoded = cuattn.flash_attention(q, k, v).get()
    exact, _ = formulas.attention(*(array.get() for array in (q, k, v)))
    plain, _ = formulas.attention(*(array.get() for array in (q, k, v)), precision=BFLOAT16)
    for result in (forward, decoded):
        formulas.assert_accurate(result, exact, plain)
