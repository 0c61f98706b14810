"""Attention by its definition, the whole score matrix at once, to judge every implementation by.

With float64 it is what a result should be. With the dtype of the inputs it is what a program
without special care would get in that precision, and so how large an error may be
(`assert_accurate`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    sinks: np.ndarray | None = None,
    z: np.ndarray | None = None,
    precision: Any = np.float64,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Return out (batch, seqlen_q, heads_q, head_dim_v) and lse (batch, heads_q, seqlen_q).

    Every step is rounded to `precision`; the softmax of 16-bit scores is in float32, as everybody
    has it. What float64 is to be judged by needs np.longdouble. `z`, (batch, heads_q, seqlen_q,
    seqlen_k), is what dropout multiplies the probabilities by.
    """
    rounded, dtype = _rounding(precision)
    s, _ = _scores(q, k, precision=precision, **options)
    seqlen_k = s.shape[3]
    v = np.repeat(v.astype(dtype).swapaxes(1, 2), s.shape[1] // v.shape[2], axis=1)

    if sinks is not None:
        column = sinks.astype(dtype)[None, :, None, None]
        s = np.concatenate([s, np.broadcast_to(column, (*s.shape[:3], 1))], axis=3)
    row_max = s.max(axis=3, keepdims=True, initial=-np.inf)
    row_max[row_max == -np.inf] = 0
    p = np.exp(s - row_max)
    row_sum = p.sum(axis=3, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (row_max + np.log(row_sum))[..., 0]
    p = p / np.where(row_sum == 0, 1, row_sum)
    p = rounded(p[..., :seqlen_k] if z is None else p[..., :seqlen_k] * z.astype(dtype))
    return rounded(p @ v).swapaxes(1, 2), lse


def attention_gradients(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    dlse: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    z: np.ndarray | None = None,
    precision: Any = np.float64,
    given_out: np.ndarray | None = None,
    lse: np.ndarray | None = None,
    sums_of_groups: bool = False,
    cancelled: dict[str, float] | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Return dq, dk, dv, and dbias, dsinks, dalibi of what is given, by the formula: the whole
    score matrix at once, with out, P, dP, dS and results rounded to `precision`.

    With the formula's own out and lse, or the given ones. With `sums_of_groups` dk and dv are one
    sum over all rows of the query heads that share a key head, and else a sum of each head's.

    `cancelled` is given, by name, the size of what dP - delta cancels: the largest term of dq and
    dk, and of dbias the largest term of each row, summed over rows as independent errors are. Of
    dalibi, unless inputs have 16 bits, it is what the rounding of a score adds, summed likewise:
    scores of far keys are large, and the plain formula rounds them alike in all :func:`orders`."""
    rounded, dtype = _rounding(precision)
    is_short = q.dtype.itemsize == 2
    options |= {"bias": bias, "alibi_slopes": alibi_slopes}
    out, own = attention(q, k, v, sinks=sinks, z=z, precision=precision, **options)
    out = out if given_out is None else given_out
    lse = own if lse is None else lse.astype(dtype)
    s, derivative = _scores(q, k, precision=precision, **options)
    heads_kv, head_dim = k.shape[2:]
    heads_q = q.shape[2]
    q, k, v, out, dout = (a.astype(dtype).swapaxes(1, 2) for a in (q, k, v, out, dout))
    k, v = (np.repeat(a, heads_q // heads_kv, axis=1) for a in (k, v))
    scale = options.get("scale")
    scale = dtype(1 / np.sqrt(head_dim) if scale is None else scale)
    lse = lse[..., None]
    delta = (dout * out).sum(axis=3, keepdims=True)
    if dlse is not None:
        delta = delta - dlse.astype(dtype)[..., None]
    seen = (lse > -np.inf) & (s > -np.inf)
    p = np.exp(np.where(seen, s, -np.inf) - np.where(lse > -np.inf, lse, 0))
    z = dtype(1) if z is None else z.astype(dtype)
    dp = z * rounded(dout @ v.swapaxes(2, 3))
    dx = p * (dp - delta)
    ds = rounded(dx * derivative)
    if cancelled is not None:
        of_rows = (p * (np.abs(dp) + np.abs(delta))).max(axis=3, initial=0)
        largest = abs(scale) * of_rows.max(initial=0)
        cancelled["dq"], cancelled["dk"] = (largest * np.abs(a).max(initial=0) for a in (k, q))
        cancelled["dbias"] = np.sqrt((of_rows**2).sum())
        if alibi_slopes is not None and not is_short:
            terms = np.abs(dx) * _distance(*dx.shape[2:]) * np.where(seen, np.abs(s), 0)
            squares = (terms.max(axis=3, initial=0) ** 2).sum(axis=2)
            of_heads = squares if alibi_slopes.ndim == 2 else squares.sum(axis=0)
            cancelled["dalibi"] = np.sqrt(of_heads.max(initial=0))

    def over_rows(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if sums_of_groups:
            x, y = (
                a.reshape(a.shape[0], heads_kv, a.shape[2] * (heads_q // heads_kv), a.shape[3])
                for a in (x, y)
            )
            return x.swapaxes(2, 3) @ y
        product = x.swapaxes(2, 3) @ y
        by_group = product.shape[0], heads_kv, heads_q // heads_kv, *product.shape[2:]
        return product.reshape(by_group).sum(axis=2)

    dq = scale * (ds @ k)
    dk = scale * over_rows(ds, q)
    dv = over_rows(rounded(p * z), dout)
    grads = {name: rounded(x.swapaxes(1, 2)) for name, x in (("dq", dq), ("dk", dk), ("dv", dv))}
    if bias is not None:
        axes = [axis for axis, n in enumerate((1,) * (4 - bias.ndim) + bias.shape) if n == 1]
        grads["dbias"] = rounded(dx.sum(axis=tuple(axes), keepdims=True).reshape(bias.shape))
    if sinks is not None:
        weight = np.exp(sinks.astype(dtype)[:, None, None] - np.where(lse > -np.inf, lse, np.inf))
        grads["dsinks"] = -(weight * delta).sum(axis=(0, 2, 3))
    if alibi_slopes is not None:
        by_head = -(dx * _distance(*dx.shape[2:]).astype(dtype)).sum(axis=(2, 3))
        grads["dalibi"] = by_head if alibi_slopes.ndim == 2 else by_head.sum(axis=0)
    return grads


class Roundings:
    """What the roundings of `out` and `lse`, with which a backward pass begins, add to the `exact`
    gradients: a pass must not be judged by these.

    All terms of a row have the rounding error of its delta, or of its lse. In bfloat16 delta's is
    most of the error of dalibi, a few numbers in which rows cancel, and of dq and dk of rows that
    see a key or two. It is the same in all :func:`orders` of the plain formula: luck decides how
    large.
    """

    def __init__(
        self,
        exact: dict[str, np.ndarray],
        *inputs: np.ndarray,
        out: np.ndarray,
        lse: np.ndarray | None = None,
        **options: Any,
    ) -> None:
        self.exact = exact
        self._gradients = functools.partial(
            attention_gradients, *inputs, given_out=out, lse=lse, **options
        )

    @functools.cached_property
    def given(self) -> dict[str, np.ndarray]:
        """The gradients with these; a whole formula, so only if they are asked for."""
        return self._gradients()

    def __getitem__(self, name: str) -> np.ndarray:
        """Of a gradient."""
        return self.given[name] - self.exact[name]

    def assert_accurate(
        self, name: str, actual: np.ndarray, *plain: np.ndarray, **more: Any
    ) -> None:
        """:func:`assert_gradients_accurate` of a gradient without what roundings add: of a sum over
        rows always, of others where they may be why it fails."""
        exact = self.exact[name]
        if name not in ("dsinks", "dalibi"):
            try:
                return assert_gradients_accurate(actual, exact, *plain, **more)
            except AssertionError:
                pass
        actual = (actual - self[name]).astype(actual.dtype)
        assert_gradients_accurate(actual, exact, *plain, **more)


def orders(length: int, count: int = 8) -> Iterator[np.ndarray]:
    """Yield `count` orders of features, at first their own: a product of queries and keys is the
    same in each and its sums round differently.

    The rounding of a score decides the error of a whole row, and the error of one formula would be
    luck. That of eight is rarely under half of a ninth's.
    """
    yield np.arange(length)
    for seed in range(1, count):
        yield np.random.default_rng(seed).permutation(length)


def plain_gradients(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    lse: np.ndarray | None = None,
    **options: Any,
) -> dict[str, list[np.ndarray]]:
    """Return :func:`attention_gradients` in the precision of the inputs, several times: with
    features in different :func:`orders`, fewer of many numbers, where luck has less to say.

    The last does as a backward pass does: it takes the `lse` that the pass was given, where there
    is one, and sums over the rows of a group, which makes larger partial sums than those of one
    head."""
    count = 8 if max(q.size, k.size, v.size) < 2**14 else 3
    own, *others = zip(orders(q.shape[-1], count), orders(v.shape[-1], count), strict=True)
    given: dict[str, Any] = {"lse": lse, "sums_of_groups": True}
    runs = []
    for (order, order_v), more in [(own, {}), *((other, {}) for other in others), (own, given)]:
        grads = attention_gradients(
            dout[..., order_v], q[..., order], k[..., order], v[..., order_v],
            precision=q.dtype, **more, **options,
        )  # fmt: skip
        for name, back in (("dq", order), ("dk", order), ("dv", order_v)):
            grads[name] = grads[name][..., np.argsort(back)]
        runs.append(grads)
    return {name: [grads[name] for grads in runs] for name in runs[0]}


def _rounding(precision: Any) -> tuple[Callable[[np.ndarray], np.ndarray], Any]:
    """A function that rounds an array to `precision`, and the type that computes."""
    precision = np.dtype(precision)
    dtype = precision.type if precision.itemsize >= 8 else np.float32
    return lambda x: x.astype(precision).astype(dtype), dtype


def _distance(seqlen_q: int, seqlen_k: int) -> np.ndarray:
    return np.abs(np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - np.arange(seqlen_k))


def _scores(
    q: np.ndarray,
    k: np.ndarray,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    precision: Any,
) -> tuple[np.ndarray, Any]:
    """Return the scores (batch, heads_q, seqlen_q, seqlen_k), and the softcap's derivative."""
    rounded, dtype = _rounding(precision)
    q, k = (a.astype(dtype).swapaxes(1, 2) for a in (q, k))
    heads_q, seqlen_q, head_dim = q.shape[1:]
    seqlen_k = k.shape[2]
    k = np.repeat(k, heads_q // k.shape[1], axis=1)
    scale = 1 / np.sqrt(head_dim) if scale is None else scale
    derivative = dtype(1)

    s = rounded(dtype(scale) * (q @ k.swapaxes(2, 3)))
    if softcap is not None:
        tanh = np.tanh(s / dtype(softcap))
        derivative = 1 - tanh * tanh
        s = rounded(dtype(softcap) * tanh)
    if bias is not None:
        s = rounded(s + bias.astype(dtype))
    if alibi_slopes is not None:
        slopes = alibi_slopes.astype(dtype).reshape(-1, heads_q, 1, 1)
        s = rounded(s - slopes * _distance(seqlen_q, seqlen_k).astype(dtype))
    beside = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    j = np.arange(seqlen_k)
    keep = np.ones(s.shape, bool)
    if causal:
        keep &= j <= beside
    left, right = (None, None) if window is None else window
    if left is not None:
        keep &= j >= beside - left
    if right is not None:
        keep &= j <= beside + right
    if mask is not None:
        keep &= mask
    s[~keep] = -np.inf
    return s, derivative


def varlen_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    *,
    alibi_slopes: np.ndarray | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Return out (total, heads_q, head_dim_v) and lse (heads_q, total), NaN in rows of no
    sequence."""
    out = np.full((*q.shape[:2], v.shape[2]), np.nan, np.longdouble)
    lse = np.full((q.shape[1], q.shape[0]), np.nan, np.longdouble)
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        keys = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        slopes = alibi_slopes
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[b]
        out_b, lse_b = attention(
            q[None, rows], k[None, keys], v[None, keys], alibi_slopes=slopes, **options
        )
        out[rows], lse[:, rows] = out_b[0], lse_b[0]
    return out, lse


def assert_accurate(
    actual: np.ndarray, exact: np.ndarray, *plain: np.ndarray, slack: float | None = None
) -> None:
    """Assert ``max|actual - exact| <= 2 max|plain - exact| + slack``; infinities have to be the
    same.

    Of several plain results the worst counts. `slack`, what luck may spare the plain formula, is
    one rounding of a number of exact's size unless given; 256 of them for float64, where `plain`
    may have to be `exact` for want of a wider type.
    """
    actual, exact = np.asarray(actual), np.asarray(exact)
    assert actual.shape == exact.shape
    if not exact.size:
        return
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(actual[~finite].astype(np.float64), exact[~finite])

    def error(result: np.ndarray) -> float:
        return np.abs(result.astype(exact.dtype) - exact)[finite].max(initial=0.0)

    if slack is None:
        roundings = 256 if actual.dtype == np.float64 else 1
        slack = roundings * float(ml_dtypes.finfo(actual.dtype).eps)
        slack *= np.abs(exact[finite]).max(initial=0.0)
    with np.errstate(invalid="ignore"):  # inf - inf, where finite is False
        ours, usual = error(actual), max(error(np.asarray(p)) for p in plain)
    assert ours <= 2 * usual + slack, f"error {ours:.3g}, the formula's {usual:.3g}"


def assert_gradients_accurate(
    actual: np.ndarray,
    exact: np.ndarray,
    *plain: np.ndarray,
    inputs: Any = None,
    lse: np.ndarray | None = None,
    cancelled: float = 0.0,
) -> None:
    """The rule of two for the largest error, and 1.2 for the root of the sum of squares, since a
    wrong tile can hide in a maximum.

    Of few numbers luck decides how exact the plain formula is: they may be as wrong as the rounding
    of a few terms of `inputs`' dtype (actual's, unless given), and only the first rule holds.

    `lse`, as the backward pass was given it, is good to a unit in its last place: the row's largest
    score is rounded, and so is the sum. All probabilities of the row share that factor, so sums do
    not average it out, and of few rows luck decides how large it is in the plain formula.

    Where dP - delta cancels everything, as with a single key or summed over all keys, what is left
    is rounding errors, and luck decides again: they may be a unit of what was `cancelled`.
    """
    unit = float(ml_dtypes.finfo(actual.dtype).eps)
    if lse is not None and lse.size < 256:
        largest_lse = np.abs(lse[np.isfinite(lse)]).max(initial=lse.dtype.type(0))
        unit = max(unit, float(np.spacing(largest_lse)))
    largest = np.abs(exact).max(initial=0.0)
    slack = (256 if actual.dtype == np.float64 else 1) * unit * max(largest, cancelled)
    few = exact.size < 256
    if few:
        of_inputs = float(ml_dtypes.finfo(actual.dtype if inputs is None else inputs).eps)
        slack += of_inputs * max(4.0, 4 * largest, cancelled)
    assert_accurate(actual, exact, *plain, slack=slack)

    def norm(x: np.ndarray) -> float:
        return np.sqrt((np.abs(x.astype(exact.dtype) - exact) ** 2).sum())

    ours, usual = norm(actual), max(map(norm, plain))
    assert few or ours <= 1.2 * usual + slack * np.sqrt(exact.size), (
        f"norm of the error {ours:.3g}, of the formula's {usual:.3g}"
    )
