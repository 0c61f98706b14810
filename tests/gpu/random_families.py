"""How random calls of each function of cuattn are drawn and judged."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn import sampling
from cuattn._quantized import FORMATS
from cuattn.reference.quantization import rotated
from tests import appending, formulas
from tests.gpu import random_calls as calls
from tests.gpu.calls import Call, precisions
from tests.gpu.random_calls import (
    GARBAGE,
    OPTIONS,
    Drawn,
    Generator,
    Sequence_,
    draw_kind,
    draw_options,
    draw_out,
    ends_of,
    given,
    given_options,
    judge_attention,
    lengths,
    numbers,
    of_sequence,
    pick,
    results_of,
)
from tests.gpu.test_dropout import factors
from tests.gpu.test_gradients import judge as judge_gradients

cupy = pytest.importorskip("cupy")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def heads_of(rng: Generator, group: int) -> tuple[int, int]:
    heads_kv = int(rng.integers(1, 4)) if group < 16 else 1
    return heads_kv * group, heads_kv


def fitting(rng: Generator, draw: Callable[[], Any], size: Callable[[Any], int], most: int) -> Any:
    """What is drawn, and small enough: of forty the smallest, unless an earlier one is. Now and
    then it may be of no size at all."""
    least = 0 if rng.random() < 0.05 else 1
    drawn = []
    for _ in range(40):
        drawn.append(draw())
        if least <= size(drawn[-1]) <= most:
            return drawn[-1]
    return min(drawn, key=lambda each: size(each) or 1 << 60)


def limit(most: int, dtype: np.dtype) -> int:
    """The wider type that judges float64 is slow."""
    return most // 6 if dtype == np.float64 else most


def peaked(rng: Generator) -> float:
    """The size of queries: of large ones a single key decides a row, and a wrong one shows."""
    return pick(rng, [1.0, 1.0, 3.0])


# ------------------------------------------------------------------------------ attention of arrays


def draw_arrays(kind_rng: Generator, rng: Generator, most: int, names=OPTIONS, largest=512):
    """The kind, and q, k, v and options of whole sequences."""
    kind = draw_kind(kind_rng, names, largest=largest)
    heads_q, heads_kv = heads_of(rng, kind.group)
    batch, seqlen_q, seqlen_k = fitting(
        rng,
        lambda: (int(rng.integers(1, 4)), *map(int, lengths(rng, 2, 700))),
        lambda shape: int(np.prod(shape)) * heads_q,
        limit(most, kind.dtype),
    )
    q = numbers(rng, (batch, seqlen_q, heads_q, kind.head_dim), kind.dtype, peaked(rng))
    k = numbers(rng, (batch, seqlen_k, heads_kv, kind.head_dim), kind.dtype)
    v = numbers(rng, (batch, seqlen_k, heads_kv, kind.head_dim_v), kind.dtype)
    return kind, q, k, v, draw_options(rng, kind, batch, heads_q, seqlen_q, seqlen_k)


def of_formula(options: dict[str, Any], *arrays: np.ndarray) -> dict[str, Any]:
    """Options as the formula has them: dropout's factors in place of its seed."""
    own = {name: value for name, value in options.items() if name not in ("dropout", "seed")}
    if options.get("dropout") and all(a.size for a in arrays):
        own["z"] = factors(*arrays, options)
    return own


def with_z(options: dict[str, Any], b: int, rows: int, keys: int) -> dict[str, Any]:
    own = of_sequence(options, b, rows, keys)
    if "z" in own:
        own["z"] = own["z"][b : b + 1, :, :rows, :keys]
    return own


def poisoned_keys(rng: Generator, options: dict[str, Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """Keys and values with NaN and infinities where key_mask hides them."""
    if "key_mask" not in options or rng.random() < 0.5:
        return list(arrays)
    poison = rng.choice([np.nan, np.inf, -np.inf])
    result = []
    for array in arrays:
        array = array.copy()
        array[:, : options["key_mask"].shape[1]][~options["key_mask"]] = poison
        result.append(array)
    return result


def flash_attention(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    kind, q, k, v, options = draw_arrays(kind_rng, rng, most)
    meaning = of_formula(options, q, k, v)

    def judge(results: list[np.ndarray]) -> None:
        out, *lse = results
        parts = list(zip(out, lse[0] if lse else nothing(out), strict=True))
        sequences = [
            Sequence_(q[b], k[b], v[b], with_z(meaning, b, q.shape[1], k.shape[1]))
            for b in range(len(q))
        ]
        judge_outs(kind.dtype, parts, sequences, bool(lse))

    out, border = draw_out(rng, (*q.shape[:-1], v.shape[-1]), kind.dtype)
    more = {**out, "return_lse": bool(rng.random() < 0.7)}
    arrays = [given(rng, a) for a in (q, *poisoned_keys(rng, options, k, v))]
    return Drawn(
        cuattn.flash_attention,
        arrays,
        {**given_options(rng, options), **more},
        judge,
        border=border,
    )


def nothing(out: np.ndarray) -> list[np.ndarray]:
    return [np.empty(0)] * len(out)


def judge_outs(dtype, parts, sequences, with_lse: bool) -> None:
    if not with_lse:  # the exact one in its place
        wide, _ = precisions(dtype)
        acc = np.float64 if dtype == np.float64 else np.float32
        parts = [
            (
                out,
                formulas.attention(s.q[None], s.k[None], s.v[None], precision=wide, **s.options)[1][
                    0
                ].astype(acc),
            )
            for (out, _), s in zip(parts, sequences, strict=True)
        ]
    judge_attention(dtype, parts, sequences)


def ragged(kind_rng: Generator, rng: Generator, most: int, names, largest=512):
    """The same of sequences end to end, with their ends, and rows of no sequence behind."""
    kind = draw_kind(kind_rng, names, largest=largest)
    heads_q, heads_kv = heads_of(rng, kind.group)
    counts = fitting(
        rng,
        lambda: lengths(rng, 2 * int(rng.integers(1, 7)), 400).reshape(2, -1),
        lambda n: int((n[0] * n[1]).sum()) * heads_q,
        limit(most, kind.dtype),
    )
    same = rng.random() < 0.2
    if same:
        counts = counts[[0, 0]]
    ends = [ends_of(n) for n in counts]
    spare = int(rng.choice([0, 0, 1, 40]))
    q = numbers(rng, (ends[0][-1] + spare, heads_q, kind.head_dim), kind.dtype, peaked(rng))
    k, v = (
        numbers(rng, (ends[1][-1] + spare, heads_kv, dim), kind.dtype)
        for dim in (kind.head_dim, kind.head_dim_v)
    )
    sizes = [int(n.max()) + int(rng.integers(0, 4)) for n in counts]
    options = draw_options(rng, kind, counts.shape[1], heads_q, *sizes)
    return kind, q, k, v, ends, same, options


def sequences_of(q, k, v, ends, options) -> list[Sequence_]:
    sequences = []
    for b, (rows, keys) in enumerate(zip(*map(slices, ends), strict=True)):
        part = q[rows], k[keys], v[keys]
        sequences.append(Sequence_(*part, of_sequence(options, b, len(part[0]), len(part[1]))))
    return sequences


def slices(ends: np.ndarray) -> list[slice]:
    return [slice(*pair) for pair in itertools.pairwise(ends.tolist())]


VARLEN_OPTIONS = tuple(name for name in OPTIONS if name != "dropout")


def flash_attention_varlen(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    kind, q, k, v, ends, same, options = ragged(kind_rng, rng, most, VARLEN_OPTIONS)
    sequences = sequences_of(q, k, v, ends, options)

    def judge(results: list[np.ndarray]) -> None:
        out, lse = results
        parts = [(out[rows], lse[:, rows]) for rows in slices(ends[0])]
        judge_attention(kind.dtype, parts, sequences)

    for array, end in ((q, ends[0]), (k, ends[1]), (v, ends[1])):
        array[end[-1] :] = np.nan
    out, border = draw_out(rng, (*q.shape[:-1], v.shape[-1]), kind.dtype)
    arrays = [given(rng, a) for a in (q, k, v)]
    arrays += [given_ints(rng, e) for e in (ends[:1] if same and rng.random() < 0.7 else ends)]
    options = given_options(rng, options)
    return Drawn(
        cuattn.flash_attention_varlen, arrays, {**options, **out, "return_lse": True}, judge,
        border=border,
    )  # fmt: skip


def given_ints(rng: Generator, array: np.ndarray) -> Any:
    if rng.random() < 0.1:
        array = array.astype(np.int64)
    return given(rng, array) if rng.random() < 0.3 else cupy.asarray(array)


# --------------------------------------------------------------------------------------- gradients


def flash_attention_backward(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    kind, q, k, v, options = draw_arrays(kind_rng, rng, most // 2, largest=256)
    tame(options)
    meaning = of_formula(options, q, k, v)
    if "key_mask" in meaning:
        own = meaning.pop("key_mask")[:, None, None]
        meaning["mask"] = meaning.get("mask", True) & own
    on_device = given_options(rng, options)
    arrays = [given(rng, a) for a in (q, k, v)]
    out, lse = cuattn.flash_attention(*arrays, **on_device, return_lse=True)
    dout = numbers(rng, out.shape, kind.dtype)
    acc = np.float64 if kind.dtype == np.float64 else np.float32
    dlse = numbers(rng, lse.shape, acc) if rng.random() < 0.3 else None
    host_out, host_lse = out.get(), lse.get()
    call = Call(q, k, v, options, rng)

    def judge(results: list[Any]) -> None:
        grads = cuattn.AttentionGrads(*(None if x is None else OnHost(x) for x in results))
        judge_gradients(grads, host_out, dout, call, lse=host_lse, dlse=dlse, **meaning)

    deterministic = bool(kind_rng.random() < 0.4)
    if dlse is not None:
        on_device["dlse"] = given(rng, dlse)
    on_device |= {
        "deterministic": deterministic,
        "grad_bias": "bias" in options,
        "grad_alibi": "alibi_slopes" in options,
    }
    arrays = [given(rng, dout), *arrays, given(rng, host_out), given(rng, host_lse)]
    drawn = Drawn(cuattn.flash_attention_backward, arrays, on_device, judge, deterministic)
    # What sums over the batch, or belongs to a place in it, is left out.
    of_batch = {"bias", "mask", "key_mask", "alibi_slopes", "sinks", "dropout"}
    if deterministic and not of_batch & set(options):
        drawn.also = lambda results: check_batch_of_gradients(drawn, rng)
    return drawn


def check_batch_of_gradients(drawn: Drawn, rng: Generator) -> None:
    """Some of the sequences, in any order and often: deterministic calls give each the same bits.
    Arrays are contiguous in both calls."""
    options = dict(drawn.options)
    count = len(drawn.arrays[0])
    order = rng.integers(0, count, int(rng.integers(1, 3 * count + 1)))
    parts = []
    for which in map(cupy.asarray, (np.arange(count), order)):
        if "dlse" in options:
            options["dlse"] = drawn.options["dlse"][which]
        grads = drawn.function(*(a[which] for a in drawn.arrays), **options)
        parts.append(results_of(grads)[:3])
    whole, some = parts
    for name, a, b in zip(("dq", "dk", "dv"), whole, some, strict=True):
        assert same_values(a[order], b), f"{name} of sequences {order.tolist()}: other bits"


def tame(options: dict[str, Any]) -> None:
    """Of gradients luck decides where a softmax has a single key."""
    if abs(options.get("scale", 0.0)) > 1:
        options["scale"] = 0.3
    if "bias" in options:
        options["bias"][np.isneginf(options["bias"])] = -2


class OnHost:
    """An array on the host, for functions that fetch it from a device."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def get(self) -> np.ndarray:
        return self.array


def flash_attention_varlen_backward(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    names = [name for name in VARLEN_OPTIONS if name not in ("sinks", "alibi_slopes")]
    kind, q, k, v, ends, same, options = ragged(kind_rng, rng, most // 2, names, largest=256)
    tame(options)
    sequences = sequences_of(q, k, v, ends, options)
    dout = numbers(rng, (*q.shape[:-1], v.shape[-1]), kind.dtype)
    for array, end in ((q, ends[0]), (k, ends[1]), (v, ends[1]), (dout, ends[0])):
        array[end[-1] :] = np.nan
    arrays = [given(rng, a) for a in (q, k, v)]
    cu = [given_ints(rng, e) for e in (ends[:1] if same and rng.random() < 0.7 else ends)]
    on_device = given_options(rng, options)
    out, lse = cuattn.flash_attention_varlen(*arrays, *cu, **on_device, return_lse=True)
    host_out, host_lse = out.get(), lse.get()

    def judge(results: list[Any]) -> None:
        dq, dk, dv = results[:3]
        assert not dq[ends[0][-1] :].any() and not dk[ends[1][-1] :].any()
        for s, rows, keys in zip(sequences, *map(slices, ends), strict=True):
            grads = cuattn.AttentionGrads(
                OnHost(dq[None, rows]), OnHost(dk[None, keys]), OnHost(dv[None, keys])
            )
            own = {name: value for name, value in s.options.items() if name != "bias"}
            if "bias" in s.options:
                own["bias"] = s.options["bias"]
                # Nobody asks for its gradient here: the formula's own in its place.
                exact = formulas.attention_gradients(
                    dout[None, rows], s.q[None], s.k[None], s.v[None],
                    precision=precisions(kind.dtype)[0], **own,
                )["dbias"]  # fmt: skip
                grads = grads._replace(dbias=OnHost(exact.astype(kind.dtype)))
            call = Call(s.q[None], s.k[None], s.v[None], s.options, rng)
            judge_gradients(
                grads, host_out[None, rows], dout[None, rows], call, lse=host_lse[None, :, rows],
                **own,
            )  # fmt: skip

    deterministic = bool(kind_rng.random() < 0.4)
    arrays = [given(rng, dout), *arrays, out, lse, *cu]
    on_device["deterministic"] = deterministic
    return Drawn(cuattn.flash_attention_varlen_backward, arrays, on_device, judge, deterministic)


# ------------------------------------------------------------------------------------------- caches


class Rows:
    """Keys or values of a cache: on the device with what spoils a result wherever nothing is to be
    read, and on the host what they stand for."""

    def __init__(
        self, kind_rng: Generator, rng: Generator, shape, dtype, format: str, used: np.ndarray
    ) -> None:
        x = numbers(rng, shape, dtype if not format else np.float32)
        self.dtype = dtype
        self.codes: cuattn.QuantizedArray | None = None
        if not format:
            self.values = x
            spoilt = x.copy()
            spoilt[~used] = np.nan
            self.given = given(rng, spoilt)
            return
        x = (x * np.exp(rng.standard_normal((*shape[:-1], 1)) / 2)).astype(np.float32)
        options = code_options(kind_rng, rng, format, shape)
        codes = cuattn.quantize(x, format, **options)
        self.values = cuattn.dequantize(codes, np.float32)
        self.codes = codes
        arrays = [codes.data, codes.scale, codes.minimum]
        for i, array in enumerate(arrays):
            if array is not None and array.shape[:2] == used.shape:
                arrays[i] = array = array.copy()
                array[~used] = np.nan if i else 0x7F
        side_by_side = rng.random() < 0.5
        data, scale, minimum = arrays
        placed = [given(rng, data), *scales(rng, scale, minimum, side_by_side)]
        self.given = cuattn.QuantizedArray(
            placed[0],
            placed[1],
            dtype=format,
            minimum=placed[2],
            offset=None if codes.offset is None else cupy.asarray(codes.offset),
            rotation=codes.rotation,
        )

    def others(self, q: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Queries and keys of the same products, as kernels may round them."""
        codes = self.codes
        if codes is None:
            return None
        group = q.shape[1] // rows.shape[1]
        scale = codes.scale.astype(np.float32)
        if codes.rotation is not None:
            offset = np.zeros(codes.shape[-2:], np.float32)
            offset = offset if codes.offset is None else codes.offset
            turned = rotated(q.astype(np.float32)).astype(q.dtype)
            keys = rotated(rows - offset)
            by_offset = np.broadcast_to(offset, rows.shape)
            return np.concatenate([turned, q], -1), np.concatenate([keys, by_offset], -1)
        if scale.shape[:2] == (1, 1) and codes.offset is None:
            by_channel = np.repeat(scale[0], group, axis=1)
            if by_channel.shape[1] == group:  # of the tensor
                by_channel = np.broadcast_to(by_channel[:, :1], (1, q.shape[1], scale.shape[3]))
            features = rows.shape[-1] // scale.shape[-1]
            by_channel = np.repeat(by_channel, features, axis=2)
            own = np.repeat(scale[0], features, axis=2)
            least = np.float32(0)
            if codes.minimum is not None:
                least = np.repeat(codes.minimum[0].astype(np.float32), features, axis=2)
            elif codes.dtype == "int4":
                least = 8 * own
            queries = (q.astype(np.float32) * by_channel).astype(q.dtype)
            added = np.broadcast_to(least, rows.shape)
            return (
                np.concatenate([queries, q], axis=-1),
                np.concatenate([(rows - added) / own, added], axis=-1),
            )
        return None


def scales(rng: Generator, scale, minimum, side_by_side: bool) -> tuple[Any, Any]:
    """As caches have them, a minimum behind each scale and tokens side by side; or somehow."""
    if not side_by_side:
        return given(rng, scale), None if minimum is None else given(rng, minimum)
    if minimum is None:
        return cupy.asarray(np.ascontiguousarray(scale.swapaxes(1, 2))).swapaxes(1, 2), None
    pair = np.ascontiguousarray(np.stack([scale, minimum], axis=-1).swapaxes(1, 2))
    pair = cupy.asarray(pair).swapaxes(1, 2)
    return pair[..., 0], pair[..., 1]


def code_options(kind_rng: Generator, rng: Generator, format: str, shape) -> dict[str, Any]:
    """Of quantize."""
    options: dict[str, Any] = {}
    granularity = str(
        kind_rng.choice(
            ["token", "head", "tensor", "channel", "group"], p=[0.5, 0.1, 0.1, 0.1, 0.2]
        )
    )
    if kind_rng.random() < 0.9 or format != "int4":
        options["granularity"] = granularity
        sizes = [n for n in (2, 16, 32, 64, 128) if shape[-1] % n == 0]
        if granularity == "group":
            if sizes:
                options["group_size"] = int(kind_rng.choice(sizes))
            else:
                options["granularity"] = "token"
    if format == "int4":
        options["symmetric"] = bool(kind_rng.random() < 0.4)
    if kind_rng.random() < 0.2:
        options["rotate"] = True
    if kind_rng.random() < 0.2:
        options["offset"] = rng.standard_normal(shape[-2:]).astype(np.float32)
    return options


def draw_formats(kind_rng: Generator, kind: calls.Kind) -> tuple[str, str]:
    if kind_rng.random() < 0.45:
        return "", ""
    formats = [str(kind_rng.choice(["", *FORMATS], p=[0.1, 0.3, 0.3, 0.2, 0.1])) for _ in "kv"]
    if kind_rng.random() < 0.5:
        formats = [formats[0], formats[0]]
    odd = kind.head_dim % 2, kind.head_dim_v % 2
    return tuple(  # type: ignore[return-value]
        "int8" if format == "int4" and is_odd else format
        for format, is_odd in zip(formats, odd, strict=True)
    )


CACHE_OPTIONS = VARLEN_OPTIONS


def cache_lengths(rng: Generator, most: int) -> np.ndarray:
    """Short sequences, or one long one beside them."""
    batch = int(rng.choice([1, 2, 3, 4, 5, 9, 20]))
    lens = lengths(rng, batch, 300)
    if rng.random() < 0.4:
        lens[int(rng.integers(batch))] = int(rng.integers(300, 5000))
    return lens


def draw_queries(rng: Generator, lens: np.ndarray, heads_q: int, most: int) -> np.ndarray:
    """How many each sequence has."""
    return fitting(
        rng,
        lambda: rng.choice([np.full(len(lens), int(rng.choice([1, 1, 1, 2, 3, 5, 17, 64, 130]))),
                            rng.choice([0, 1, 1, 2, 5, 16, 40], len(lens))]),
        lambda n: int((n * lens).sum()) * heads_q,
        most,
    )  # fmt: skip


def flash_decode(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    kind = draw_kind(kind_rng, CACHE_OPTIONS)
    formats = draw_formats(kind_rng, kind)
    heads_q, heads_kv = heads_of(rng, kind.group)
    most = limit(most, kind.dtype)
    lens, tokens = fitting(
        rng,
        lambda: (cache_lengths(rng, most), int(rng.choice([1, 1, 1, 2, 3, 5, 17, 64, 130]))),
        lambda drawn: int(drawn[0].sum()) * drawn[1] * heads_q,
        most,
    )
    batch = len(lens)
    capacity = int(lens.max()) + int(rng.integers(0, 5))
    used = np.arange(capacity) < lens[:, None]
    k, v = (
        Rows(kind_rng, rng, (batch, capacity, heads_kv, dim), kind.dtype, format, used)
        for dim, format in zip((kind.head_dim, kind.head_dim_v), formats, strict=True)
    )
    q = numbers(rng, (batch, tokens, heads_q, kind.head_dim), kind.dtype, peaked(rng))
    options = draw_options(rng, kind, batch, heads_q, tokens, capacity)
    options.setdefault("causal", bool(rng.random() < 0.8))
    rows = [(b, slice(0, int(n))) for b, n in enumerate(lens)]
    sequences = [sequence_of(q[b], k, v, at, options, b) for b, at in enumerate(rows)]
    single = tokens == 1 and rng.random() < 0.6
    lens_given = lens.astype(np.int64)
    lens_given[lens_given == capacity] += int(rng.choice([0, 1 << 20]))
    return cached_call(
        rng,
        cuattn.flash_decode,
        kind,
        [given(rng, q[:, 0] if single else q), k.given, v.given],
        [given_ints(rng, lens_given.astype(np.int32))],
        options,
        sequences,
        (*(q[:, 0] if single else q).shape[:-1], kind.head_dim_v),
        lambda out, lse: [(out[b][None] if single else out[b], lse[b]) for b in range(batch)],
    )


def sequence_of(q, k: Rows, v: Rows, at: Any, options, b: int) -> Sequence_:
    """The queries of a sequence and the keys and values that lie at `at`."""
    keys, values = k.values[at], v.values[at]
    own = of_sequence(options, b, len(q), len(keys))
    others = []
    if k.codes is not None or v.codes is not None:
        rounded = (a.astype(q.dtype).astype(np.float32) for a in (keys, values))
        others.append((q, *rounded))
        turned = k.others(q, keys) if len(keys) else None
        if turned is not None:
            others.append((*turned, values))
            own.setdefault("scale", q.shape[-1] ** -0.5)
    return Sequence_(q, keys, values, own, tuple(others))


def cached_call(rng, function, kind, arrays, ints, options, sequences, shape, parts_of) -> Drawn:
    num_splits = [None, None, "fixed", 1, 3, 64][int(rng.integers(6))]
    out, border = draw_out(rng, shape, kind.dtype)
    more = {**out, "num_splits": num_splits, "return_lse": True}

    def judge(results: list[np.ndarray]) -> None:
        judge_attention(kind.dtype, parts_of(*results), sequences)

    def also(results: list[np.ndarray]) -> None:
        if rng.random() < 0.5:
            check_shorter(drawn, rng)
        elif num_splits == "fixed":
            check_batch(drawn, rng)

    drawn = Drawn(
        function, [*arrays, *ints], {**given_options(rng, options), **more}, judge, border=border,
        also=also,
    )  # fmt: skip
    return drawn


def within_sequences(results: list[np.ndarray], end: int) -> list[np.ndarray]:
    """Of ragged rows those of sequences: what is behind them is anything."""
    out, lse = results
    return [np.ascontiguousarray(out[:end]), np.ascontiguousarray(lse[:, :end])]


def check_shorter(drawn: Drawn, rng: Generator) -> None:
    """A graph that is replayed after lengths were made shorter in place."""
    if "prefix" in drawn.options:
        return
    lens = drawn.arrays[-1]
    before = lens.copy()
    out = drawn.options.get("out")
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        try:
            result = drawn.function(*drawn.arrays, **drawn.options)
        finally:
            graph = stream.end_capture()
        shorter = np.minimum(before.get(), 1 << 19) * rng.choice([0, 0.3, 0.8], before.shape)
        lens[...] = cupy.asarray(shorter.astype(before.dtype))
        for part in result:
            part[...] = np.nan
        graph.launch(stream)
        stream.synchronize()
    replayed = drawn.results(result)
    if out is not None:
        out[...] = np.nan
    ordinary = drawn()
    lens[...] = before
    assert calls.same_bits(replayed, ordinary), "replayed with shorter lengths: other bits"


def check_batch(drawn: Drawn, rng: Generator) -> None:
    """Some of the sequences, in any order and often: fixed splits give each the same bits. Queries
    are contiguous in both calls, since others may be for another kernel."""
    options = dict(drawn.options)
    slopes = options.get("alibi_slopes")
    own = {"bias", "mask", "key_mask"} & set(options)
    if own or (slopes is not None and slopes.ndim == 2) or drawn.function is cuattn.flash_decode:
        return
    options.pop("out", None)
    count = len(drawn.arrays[-1])
    ends = options.pop("cu_seqlens_q", None)
    order = rng.integers(0, count, int(rng.integers(1, 3 * count + 1)))
    latents = drawn.function is cuattn.mla_decode
    q, pages, rest = drawn.arrays[: 1 + latents], drawn.arrays[1 + latents : -2], drawn.arrays[-2:]
    parts = []
    for which in (np.arange(count), order):
        picked = rows = cupy.asarray(which)
        more = dict(options)
        if ends is not None:
            own_rows = [np.arange(*pair) for pair in itertools.pairwise(ends.get().tolist())]
            more["cu_seqlens_q"] = cupy.asarray(ends_of([len(own_rows[b]) for b in which]))
            rows = cupy.asarray(np.concatenate([own_rows[b] for b in which]).astype(np.int64))
        if "indices" in more:
            more["indices"] = more["indices"][rows]
        arrays = [*(a[rows] for a in q), *pages, *(a[picked] for a in rest)]
        out, lse = results_of(drawn.function(*arrays, **more))
        if ends is None:
            parts.append([(out[i], lse[i]) for i in range(len(which))])
        else:
            at = slices(more["cu_seqlens_q"].get())
            parts.append([(out[rows], lse[:, rows]) for rows in at])
    whole, some = parts
    for b, (out, lse) in zip(order.tolist(), some, strict=True):
        assert same_values(out, whole[b][0]) and same_values(lse, whole[b][1]), (
            f"sequence {b} of {order.tolist()}: other bits than in the call"
        )


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def draw_pages(rng: Generator, lens: np.ndarray, page_size: int, prefix: int = 0):
    """A page table, with garbage where no sequence has pages, and which slots are used; pages may
    be shared."""
    counts = -(-lens // page_size)
    width = int(counts.max()) + int(rng.integers(0, 3))
    width = max(width, 1)
    pages = max(int(counts.sum()) + int(rng.integers(0, 3)), 1)
    table = rng.choice(GARBAGE, (len(lens), width)).astype(np.int32)
    shared = rng.random() < 0.3
    order = rng.permutation(pages)
    used = np.zeros((pages, page_size), bool)
    first = 0
    for b, count in enumerate(counts):
        own = rng.integers(0, pages, count) if shared else order[first : first + count]
        first += count
        if prefix:
            own[: prefix // page_size] = (
                table[0, : prefix // page_size] if b else own[: prefix // page_size]
            )
        table[b, :count] = own
    for b, n in enumerate(lens):
        at = np.arange(n)
        used[table[b, at // page_size], at % page_size] = True
    return table, used


def slots_of(table: np.ndarray, lens: np.ndarray, page_size: int) -> list[tuple]:
    result = []
    for b, n in enumerate(lens):
        at = np.arange(n)
        result.append((table[b, at // page_size], at % page_size))
    return result


def paged_attention(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    kind = draw_kind(kind_rng, CACHE_OPTIONS)
    formats = draw_formats(kind_rng, kind)
    heads_q, heads_kv = heads_of(rng, kind.group)
    most = limit(most, kind.dtype)
    lens, counts = fitting(
        rng,
        lambda: (lambda lens: (lens, draw_queries(rng, lens, heads_q, most)))(
            cache_lengths(rng, most)
        ),
        lambda drawn: int((drawn[0] * drawn[1]).sum()) * heads_q,
        most,
    )
    batch = len(lens)
    page_size = int(2 ** rng.integers(0, 9))
    prefix = 0
    if kind_rng.random() < 0.25 and not {"window", "alibi_slopes"} & kind.options:
        prefix = page_size * int(rng.integers(0, 1 + 300 // page_size))
        lens = lens + prefix
        # What is shared comes before all queries.
        lens = np.maximum(lens, prefix + counts)
    table, used = draw_pages(rng, lens, page_size, prefix)
    capacity = table.shape[1] * page_size
    shape = (len(used), page_size, heads_kv)
    k, v = (
        Rows(kind_rng, rng, (*shape, dim), kind.dtype, format, used)
        for dim, format in zip((kind.head_dim, kind.head_dim_v), formats, strict=True)
    )
    ragged = bool((counts != counts[0]).any()) or rng.random() < 0.3
    spare = int(rng.choice([0, 0, 3])) if ragged else 0
    ends = ends_of(counts)
    q = numbers(rng, (int(ends[-1]) + spare, heads_q, kind.head_dim), kind.dtype, peaked(rng))
    options = draw_options(rng, kind, batch, heads_q, max(1, int(counts.max())), capacity)
    options.setdefault("causal", bool(rng.random() < 0.8))
    slots = slots_of(table, lens, page_size)
    sequences = [
        sequence_of(q[rows], k, v, slots[b], options, b) for b, rows in enumerate(slices(ends))
    ]
    q[ends[-1] :] = np.nan
    extra: dict[str, Any] = {}
    if prefix:
        extra["prefix"] = prefix
        plain = k.codes is None and v.codes is None
        if plain and not {"bias", "mask", "key_mask"} & set(options) and rng.random() < 0.5:
            of_prefix = slots[0][0][:prefix], slots[0][1][:prefix]
            extra["prefix"] = tuple(given(rng, x.values[of_prefix]) for x in (k, v))
            table, lens = table[:, prefix // page_size :], lens - prefix
    if ragged:
        extra["cu_seqlens_q"] = given_ints(rng, ends)
        shape = (*q.shape[:-1], kind.head_dim_v)
    else:
        q = q.reshape(batch, -1, *q.shape[1:])
        if q.shape[1] == 1 and rng.random() < 0.6:
            q = q[:, 0]
        shape = (*q.shape[:-1], kind.head_dim_v)

    def parts_of(out, lse):
        if not ragged:
            lse = lse.swapaxes(0, 1).reshape(heads_q, -1)
            out = out.reshape(-1, heads_q, kind.head_dim_v)
        return [(out[rows], lse[:, rows]) for rows in slices(ends)]

    drawn = cached_call(
        rng,
        cuattn.paged_attention,
        kind,
        [given(rng, q), k.given, v.given],
        [given_ints(rng, table), given_ints(rng, lens.astype(np.int32))],
        options,
        sequences,
        shape,
        parts_of,
    )
    drawn.options |= extra
    if ragged:
        drawn.defined = lambda results: within_sequences(results, int(ends[-1]))
    return drawn


# ------------------------------------------------------------------------------------------ latents


def mla_decode(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    kind = draw_kind(kind_rng, ("causal", "window", "sinks"))
    common = kind_rng.random() < 0.6
    latent = 512 if common else int(kind_rng.choice([1, 40, 64, 128, 192, 256, 448, 511, 512]))
    rope = 64 if common else int(kind_rng.choice([0, 1, 24, 32, 63, 64]))
    format = str(kind_rng.choice(["", *FORMATS], p=[0.45, 0.2, 0.1, 0.2, 0.05]))
    if format == "int4" and latent % 2:
        format = "int8"
    sparse = kind_rng.random() < 0.25
    heads = int(rng.choice([1, 3, 8, 16, 32, 40, 64, 128]))
    most = limit(most // 4, kind.dtype)
    lens, counts = fitting(
        rng,
        lambda: (lambda lens: (lens, draw_queries(rng, lens, heads, most)))(
            cache_lengths(rng, most)
        ),
        lambda drawn: int((drawn[0] * drawn[1]).sum()) * heads,
        most,
    )
    batch = len(lens)
    page_size = int(2 ** rng.integers(0, 9))
    table, used = draw_pages(rng, lens, page_size)
    shape = (len(used), page_size, 1)
    rotary = numbers(rng, (*shape, rope), kind.dtype)
    if format:
        c = Rows(kind_rng, rng, (*shape, latent), kind.dtype, format, used)
        spoilt = rotary.copy()
        spoilt[~used] = np.nan
        latent_given, rope_given = c.given, given(rng, spoilt)
    elif rng.random() < 0.6:
        joined = numbers(rng, (*shape, latent + rope), kind.dtype)
        rotary = joined[..., latent:]
        spoilt = joined.copy()
        spoilt[~used] = np.nan
        whole = given(rng, spoilt)
        latent_given, rope_given = whole[..., :latent], whole[..., latent:]
        c = Rows.__new__(Rows)
        c.values, c.codes = joined[..., :latent], None
    else:
        c = Rows(kind_rng, rng, (*shape, latent), kind.dtype, "", used)
        spoilt = rotary.copy()
        spoilt[~used] = np.nan
        latent_given, rope_given = c.given, given(rng, spoilt)
    if not format and rng.random() < 0.3:
        latent_given, rope_given = latent_given[:, :, 0], rope_given[:, :, 0]
    ragged = bool((counts != counts[0]).any()) or rng.random() < 0.3
    ends = ends_of(counts)
    total = int(ends[-1])
    q = numbers(rng, (total, heads, latent + rope), kind.dtype, peaked(rng))
    options = draw_options(rng, kind, batch, heads, 1, 1)
    options.setdefault("causal", bool(rng.random() < 0.8))
    options["scale"] = float(rng.choice([192**-0.5, 0.02, -0.05, 0.2]))
    indices = None
    if sparse:
        most_indices = int(rng.choice([1, 7, 64, 100, 300]))
        indices = np.full((total, most_indices), -1, np.int32)
        for b, rows in enumerate(slices(ends)):
            for row in range(rows.start, rows.stop):
                if lens[b]:
                    indices[row] = rng.integers(0, lens[b], most_indices)
        gone = rng.random(indices.shape) < 0.2
        indices[gone] = rng.choice([-1, 1 << 29, -5], indices.shape)[gone]
    slots = slots_of(table, lens, page_size)
    sequences = []
    for b, rows in enumerate(slices(ends)):
        values, own = c.values[slots[b]], dict(options)
        # What codes stand for is float32, and the rotated part may be wider.
        turned = rotary[slots[b]]
        n = len(values)
        if indices is not None:
            counted = np.zeros((rows.stop - rows.start, n))
            for i, row in enumerate(indices[rows]):
                np.add.at(counted[i], row[(row >= 0) & (row < n)], 1)
            own["mask"] = (counted > 0)[None, None]
            own["bias"] = np.log(np.maximum(counted, 1))[None, None]
        others = []
        if format:
            rounded = values.astype(kind.dtype).astype(np.float32)
            others.append((q[rows], np.concatenate([rounded, turned], -1), rounded))
            if c.codes.rotation is not None:
                offset = 0 if c.codes.offset is None else c.codes.offset
                queries = rotated(q[rows][..., :latent].astype(np.float32)).astype(kind.dtype)
                keys = rotated(values - offset)
                by_offset = np.broadcast_to(np.float32(offset), values.shape)
                others.append((
                    np.concatenate([queries, q[rows]], -1),
                    np.concatenate([keys, by_offset, turned], -1),
                    values,
                ))  # fmt: skip
        sequences.append(
            Sequence_(q[rows], np.concatenate([values, turned], -1), values, own, tuple(others))
        )
    extra: dict[str, Any] = {}
    if ragged:
        extra["cu_seqlens_q"] = given_ints(rng, ends)
    else:
        q = q.reshape(batch, -1, heads, latent + rope)
        if indices is not None:
            indices = indices.reshape(batch, -1, indices.shape[-1])
        if q.shape[1] == 1 and rng.random() < 0.6:
            q = q[:, 0]
            indices = None if indices is None else indices[:, 0]
    if indices is not None:
        extra["indices"] = given_ints(rng, indices)

    def parts_of(out, lse):
        if not ragged:
            lse = lse.swapaxes(0, 1).reshape(heads, -1)
            out = out.reshape(-1, heads, latent)
        return [(out[rows], lse[:, rows]) for rows in slices(ends)]

    if rng.random() < 0.5:
        both = given(rng, q)
        queries = [both[..., :latent], both[..., latent:]]
    else:
        queries = [given(rng, np.ascontiguousarray(x)) for x in np.split(q, [latent], axis=-1)]
    drawn = cached_call(
        rng,
        cuattn.mla_decode,
        kind,
        [*queries, latent_given, rope_given],
        [given_ints(rng, table), given_ints(rng, lens.astype(np.int32))],
        options,
        sequences,
        (*q.shape[:-1], latent),
        parts_of,
    )
    drawn.options |= extra
    if ragged:
        drawn.defined = lambda results: within_sequences(results, int(ends[-1]))
    return drawn


def by_numpy(
    function: Callable, arrays: list[np.ndarray], options: dict[str, Any], units: float
) -> Callable[[list[np.ndarray]], None]:
    """Judge by what the function makes of float64 arrays, and of its own: NumPy rounds less than a
    kernel does, which may be wrong by so many units of the largest number besides."""
    dtype = arrays[0].dtype
    wide = [a.astype(np.float64) if a.dtype == dtype else a for a in arrays]
    exact, usual = (function(*each, **options) for each in (wide, arrays))
    if not isinstance(exact, tuple):
        exact, usual = (exact,), (usual,)

    def judge(results: list[np.ndarray]) -> None:
        for got, right, plain in zip(results, exact, usual, strict=True):
            unit = max(float(ml_dtypes.finfo(dtype).eps), 2.0**-52)
            slack = units * unit * (1e-3 + calls.largest(right))
            formulas.assert_accurate(got, right, plain, slack=slack)

    return judge


def mla_prefill(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    dtype = calls.DTYPES[str(kind_rng.choice([*calls.DTYPES], p=[0.3, 0.4, 0.2, 0.1]))]
    common = kind_rng.random() < 0.5
    latent, rope_dim = (512, 64) if common else (int(kind_rng.choice([40, 64, 128, 256])), 32)
    dim = int(kind_rng.choice([32, 64, 128]))
    heads = int(kind_rng.choice([1, 2, 5, 16]))
    batch, page_size = int(rng.integers(1, 4)), int(2 ** rng.integers(0, 9))
    counts = rng.choice([0, 1, 3, 17, 64, 130], batch)
    if rng.random() < 0.4:
        counts[:] = max(1, counts[0])
    lens = counts + rng.choice([0, 1, 60, 200], batch)
    table, used = draw_pages(rng, lens, page_size)
    shape = (len(used), page_size, latent + rope_dim)
    pages = numbers(rng, shape, dtype)
    pages[~used] = 0.0
    ends = ends_of(counts)
    ragged = bool((counts != counts[0]).any()) or rng.random() < 0.3
    lead = (int(ends[-1]),) if ragged else (batch, int(counts[0]))
    q = numbers(rng, (*lead, heads, dim + rope_dim), dtype)
    w_uk, w_uv = (numbers(rng, (heads, dim, latent), dtype, latent**-0.5) for _ in "kv")
    options: dict[str, Any] = {"scale": (dim + rope_dim) ** -0.5, "return_lse": True}
    options["absorbed"] = pick(kind_rng, [None, False, True])
    options["chunk"] = pick(rng, [16384, 100, 64, 1000])
    if ragged:
        options["cu_seqlens_q"] = ends
    parts = [q[..., :dim], q[..., dim:], pages[..., :latent], pages[..., latent:]]
    rest = [table, lens.astype(np.int32), w_uk, w_uv]
    judge = by_numpy(cuattn.mla_prefill, [*parts, *rest], options, 16)
    spoilt = pages.copy()
    spoilt[~used] = np.nan
    whole, queries = given(rng, spoilt), given(rng, q)
    arrays = [queries[..., :dim], queries[..., dim:], whole[..., :latent], whole[..., latent:]]
    arrays += [given_ints(rng, table), given_ints(rng, rest[1]), given(rng, w_uk), given(rng, w_uv)]
    on_device = given_parameters(rng, options)
    return Drawn(cuattn.mla_prefill, arrays, on_device, judge, captured=False)


def flash_attention_jvp(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    names = tuple(name for name in OPTIONS if name != "dropout")
    kind, q, k, v, options = draw_arrays(kind_rng, rng, most // 2, names, largest=256)
    tame(options)
    arrays = [q, k, v, *(numbers(rng, a.shape, kind.dtype) for a in (q, k, v))]
    judge = by_numpy(cuattn.flash_attention_jvp, arrays, options, 16)
    arrays = [given(rng, a) for a in arrays]
    return Drawn(cuattn.flash_attention_jvp, arrays, given_options(rng, options), judge)


def multi_head_attention(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    names = ("causal", "window", "mask", "key_mask", "sinks", "alibi_slopes")
    kind = draw_kind(kind_rng, names)
    dim = int(kind_rng.choice([16, 32, 64, 128]))
    heads, heads_kv = heads_of(rng, min(kind.group, 4))
    batch, seqlen, features = int(rng.integers(1, 3)), int(rng.integers(1, 90)), 64
    crossed = bool(kind_rng.random() < 0.4)
    seqlen_k = int(rng.integers(1, 90)) if crossed else seqlen
    x = numbers(rng, (batch, seqlen, features), kind.dtype)
    widths = [heads * dim, heads_kv * dim, heads_kv * dim]
    weights = [numbers(rng, (features, n), kind.dtype, features**-0.5) for n in widths]
    weights.append(numbers(rng, (heads * dim, features), kind.dtype, (heads * dim) ** -0.5))
    options = draw_options(rng, kind, batch, heads, seqlen, seqlen_k)
    options |= {"heads": heads, "kv_heads": heads_kv}
    if crossed:
        options["context"] = numbers(rng, (batch, seqlen_k, features), kind.dtype)
    for name, width in zip(("bq", "bk", "bv", "bo"), (*widths, features), strict=True):
        if kind_rng.random() < 0.3:
            options[name] = numbers(rng, (width,), kind.dtype)
    wide = {
        name: value.astype(np.float64)
        if isinstance(value, np.ndarray) and value.dtype == kind.dtype
        else value
        for name, value in options.items()
    }
    arrays = [x, *weights]
    exact = cuattn.multi_head_attention(*(a.astype(np.float64) for a in arrays), **wide)
    usual = cuattn.multi_head_attention(*arrays, **options)

    def judge(results: list[np.ndarray]) -> None:
        slack = 16 * float(ml_dtypes.finfo(kind.dtype).eps) * (1e-3 + calls.largest(exact))
        formulas.assert_accurate(results[0], exact, usual, slack=slack)

    given_arrays = [given(rng, a) for a in arrays]
    on_device = given_options(rng, options)
    return Drawn(cuattn.multi_head_attention, given_arrays, on_device, judge, captured=False)


# ------------------------------------------------------------------------------------ merging, rope


def merge_attention(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    dtype = calls.DTYPES[str(kind_rng.choice([*calls.DTYPES]))]
    acc = np.float64 if dtype == np.float64 else np.float32
    parts, batch, seqlen, heads = (int(rng.integers(1, n)) for n in (9, 4, 40, 5))
    dim = int(kind_rng.choice([1, 3, 8, 40, 64, 128, 300]))
    outs = numbers(rng, (parts, batch, seqlen, heads, dim), dtype)
    lses = numbers(rng, (parts, batch, heads, seqlen), acc, float(rng.choice([1.0, 30.0, 1e4])))
    gone = rng.random(lses.shape) < rng.choice([0.0, 0.3, 0.9])
    lses[gone] = -np.inf
    results = []
    for wide in (np.longdouble, acc):
        each = lses.swapaxes(2, 3).astype(wide)
        top = np.where(np.isneginf(each.max(axis=0)), 0, each.max(axis=0))
        with np.errstate(divide="ignore"):
            merged = np.log(np.exp(each - top).sum(axis=0)) + top
        weights = np.exp(each - np.where(np.isneginf(merged), 0, merged))
        results.append(((weights[..., None] * outs.astype(wide)).sum(axis=0), merged))
    (exact, exact_lse), (plain, plain_lse) = results
    outs[gone.swapaxes(2, 3)] = np.nan

    def judge(results: list[np.ndarray]) -> None:
        out, lse = results
        unit = 4 * float(np.finfo(acc).eps) * (1 + calls.largest(lses))
        slack = unit * calls.largest(outs) + float(ml_dtypes.finfo(dtype).eps) * calls.largest(
            exact
        )
        formulas.assert_accurate(out, exact, plain.astype(dtype), slack=slack)
        formulas.assert_accurate(
            lse, exact_lse.swapaxes(1, 2), plain_lse.swapaxes(1, 2), slack=unit
        )

    if rng.random() < 0.5:
        arrays = [[given(rng, a) for a in outs], [given(rng, a) for a in lses]]
    else:
        arrays = [given(rng, outs), given(rng, lses)]
    return Drawn(cuattn.merge_attention, arrays, {}, judge)


def rope(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    dtype = calls.DTYPES[str(kind_rng.choice([*calls.DTYPES]))]
    dim = 2 * int(kind_rng.choice([1, 2, 5, 16, 32, 40, 64, 128]))
    shape = (int(rng.integers(1, 4)), int(rng.integers(1, 90)), int(rng.integers(1, 9)), dim)
    x = numbers(rng, shape, dtype)
    positions = rng.integers(0, 5000, [(shape[1],), (1, shape[1]), shape[:2]][rng.integers(3)])
    options: dict[str, Any] = {"base": float(rng.choice([10000.0, 500000.0, 3.0]))}
    if kind_rng.random() < 0.5:
        options["rotary_dim"] = 2 * int(rng.integers(1, dim // 2 + 1))
    options["interleaved"] = bool(kind_rng.random() < 0.5)
    wide = cuattn.rope(x.astype(np.float64), positions, **options)
    usual = cuattn.rope(x, positions, **options)

    def judge(results: list[np.ndarray]) -> None:
        unit = 2.0**-22 if dtype != np.float64 else 2.0**-50
        slack = calls.largest(x) * (unit + float(ml_dtypes.finfo(dtype).eps))
        formulas.assert_accurate(results[0], wide, usual, slack=slack)

    out, border = draw_out(rng, shape, dtype)
    arrays = [given(rng, x), given_ints(rng, positions.astype(np.int32))]
    return Drawn(cuattn.rope, arrays, {**options, **out}, judge, border=border)


# ------------------------------------------------------------------------------------------- codes


def awkward(rng: Generator, x: np.ndarray) -> np.ndarray:
    """With rows of zeros of both signs, of subnormal, huge and tiny numbers, NaN and infinities."""
    flat = x.reshape(-1, x.shape[-1])
    kinds: list[Any] = [
        0.0, -0.0, 1e-40, -1e-40, 3e38, 3.4e38, -3.38e38, np.nan, np.inf, -np.inf, 1e-7, 65504.0,
        2.0**-126, 2.0**-133, 5.0,
    ]  # fmt: skip
    with np.errstate(over="ignore"):
        for _ in range(min(len(flat), 12)):
            row, value = int(rng.integers(len(flat))), kinds[int(rng.integers(len(kinds)))]
            part = slice(int(rng.integers(x.shape[-1])), None, int(rng.integers(1, 5)))
            if rng.random() < 0.3:
                flat[row] = 0.0
            flat[row, part] = value
    return x


def quantize(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    dtype = calls.DTYPES[str(kind_rng.choice([*calls.DTYPES]))]
    dim = int(kind_rng.choice([2, 6, 32, 34, 64, 80, 96, 128, 192, 256, 320, 512]))
    shape = (*map(int, rng.integers(1, [4, 70, 5])), dim)[int(rng.integers(0, 2)) :]
    x = numbers(rng, shape, dtype)
    if rng.random() < 0.5:
        x = (x.astype(np.float64) * 10.0 ** rng.integers(-3, 3, (*shape[:-1], 1))).astype(dtype)
    if rng.random() < 0.6:
        x = awkward(rng, x)
    format = str(kind_rng.choice([*FORMATS]))
    options = code_options(kind_rng, rng, format, shape)
    if rng.random() < 0.15:
        options.pop("group_size", None)
        options.pop("granularity", None)
        wide = [1] * len(shape)
        wide[int(rng.integers(len(shape)))] = -1
        wide = [n if side == -1 else 1 for n, side in zip(shape, wide, strict=True)]
        scale = pick(rng, [np.float32, BFLOAT16.type])
        options["scale"] = np.abs(numbers(rng, wide, np.float32)).astype(scale) + scale(1e-3)
        if not options.get("symmetric", True):
            options["scale"] = options["scale"], numbers(rng, wide, scale)
    want = cuattn.quantize(x, format, **options)

    def judge(results: list[np.ndarray]) -> None:
        parts = [part for part in (want.data, want.scale, want.minimum) if part is not None]
        assert len(parts) == len(results)
        for got, wanted in zip(results, parts, strict=True):
            if wanted.dtype.kind in "iu":
                np.testing.assert_array_equal(got, wanted)
            else:
                np.testing.assert_array_equal(got.astype(np.float32), wanted.astype(np.float32))

    def also(results: list[np.ndarray]) -> None:
        """The numbers that the codes stand for."""
        to = calls.DTYPES[str(rng.choice([*calls.DTYPES]))]
        codes = drawn.function(*drawn.arrays, **drawn.options)
        values = results_of(cuattn.dequantize(codes, to))[0].astype(np.float64)
        wanted = cuattn.dequantize(want, to).astype(np.float64)
        np.testing.assert_allclose(values, wanted, rtol=0, atol=2.0**-126)

    on_device = {
        name: tuple(map(cupy.asarray, value))
        if isinstance(value, tuple)
        else cupy.asarray(value)
        if isinstance(value, np.ndarray)
        else value
        for name, value in options.items()
    }
    drawn = Drawn(cuattn.quantize, [given(rng, x), format], on_device, judge, also=also)
    return drawn


# ---------------------------------------------------------------------------------------- sampling


def draw_logits(kind_rng: Generator, rng: Generator) -> np.ndarray:
    vocab = int(rng.choice([1, 2, 31, 128, 129, 257, 1000, 4097, 32768, 50257, 128256]))
    rows = int(rng.integers(1, 6)) if vocab > 5000 else int(rng.choice([1, 3, 20, 127, 200]))
    dtype = [np.float16, BFLOAT16, np.float32][int(kind_rng.integers(3))]
    logits = numbers(rng, (rows, vocab), np.float32, float(rng.choice([0.0, 1.0, 4.0, 30.0])))
    logits = logits.astype(dtype)
    for row in range(rows):
        chance = rng.random()
        if chance < 0.03:
            logits[row] = -np.inf
        elif chance < 0.05:
            logits[row, int(rng.integers(vocab))] = rng.choice([np.nan, np.inf])
        elif chance < 0.1:
            left = logits[row, int(rng.integers(vocab))]
            logits[row] = -np.inf
            logits[row, int(rng.integers(vocab))] = left
        elif chance < 0.2:
            logits[row, rng.random(vocab) < 0.7] = -np.inf
        elif chance < 0.25:
            logits[row] = np.round(logits[row].astype(np.float32)).astype(dtype)  # ties
        elif chance < 0.28:
            logits[row] = rng.choice([0.0, -0.0], vocab).astype(dtype)
    return logits


def draw_filters(kind_rng: Generator, rng: Generator, rows: int, vocab: int) -> dict[str, Any]:
    """Parameters of sampling, numbers or one a row."""
    choices = {
        "temperature": lambda: rng.choice([0.0, 0.3, 1.0, 1.7, 1e-3, 50.0]),
        "top_k": lambda: rng.choice([1, 2, 7, 50, 256, 257, 700, vocab, vocab + 10, 1 << 20]),
        "top_p": lambda: rng.choice([0.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
        "min_p": lambda: rng.choice([0.0, 0.01, 0.3, 1.0]),
        "typical_p": lambda: rng.choice([0.1, 0.5, 0.9, 1.0]),
    }
    options: dict[str, Any] = {}
    for name, draw in choices.items():
        if kind_rng.random() < 0.3:
            dtype = np.int32 if name == "top_k" else np.float32
            if rng.random() < 0.4:
                options[name] = np.array([draw() for _ in range(rows)], dtype)
            else:
                options[name] = int(draw()) if name == "top_k" else float(draw())
    return options


def kept_alike(
    logits: np.ndarray, options: dict[str, Any], on_device: dict[str, Any]
) -> np.ndarray:
    """Rows of which both sides keep the same tokens: at the crossing of a sum of float32
    exponentials they may differ."""
    here = sampling.filter_logits(logits, **options)
    there = sampling.filter_logits(cupy.asarray(logits), **on_device).get()
    with np.errstate(invalid="ignore"):
        differ = ((here > -np.inf) != (there > -np.inf)) & ~(np.isnan(here) & np.isnan(there))
    return ~differ.any(axis=-1)


def sample(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    logits = draw_logits(kind_rng, rng)
    rows, vocab = logits.shape
    filters = draw_filters(kind_rng, rng, rows, vocab)
    options = dict(filters)
    if rng.random() < 0.5:
        options["seed"] = rng.integers(0, 2**62, rows)
    else:
        options["seed"] = pick(rng, [0, 2**64 - 1, int(rng.integers(2**62))])
    if rng.random() < 0.5:
        options["offset"] = rng.integers(0, 2**62, rows)
    elif rng.random() < 0.5:
        options["offset"] = pick(rng, [0, 2**64 - 1, int(rng.integers(2**62))])
    if kind_rng.random() < 0.3:
        options |= draw_penalties(kind_rng, rng, rows, vocab)
    want = sampling.sample(logits, **options)
    place = functools.partial(given_parameters, rng)
    on_device = place(options)
    crossing = {"top_p", "typical_p"} & set(filters)

    def judge(results: list[np.ndarray]) -> None:
        same = results[0] == want
        if crossing and not same.all():
            of = logits
            if "tokens" in options or "logit_bias" in options or "allowed" in options:
                names = set(options) - set(filters) - {"seed", "offset"}
                of = sampling.apply_penalties(
                    logits, options.get("tokens", np.full((rows, 0), -1, np.int32)),
                    **{name: options[name] for name in names if name != "tokens"},
                )  # fmt: skip
            same |= ~kept_alike(of, filters, place(filters))
        assert same.all(), (
            f"rows {np.flatnonzero(~same)[:5]}: {results[0][~same][:5]}, {want[~same][:5]}"
        )

    return Drawn(sampling.sample, [given(rng, logits)], on_device, judge)


def given_parameters(rng: Generator, options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: cupy.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }


def draw_penalties(kind_rng: Generator, rng: Generator, rows: int, vocab: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    length = int(rng.choice([0, 1, 30, 300]))
    tokens = rng.integers(0, vocab, (rows, length)).astype(np.int32)
    if rng.random() < 0.5:
        tokens[rng.random(tokens.shape) < 0.3] = -1
    options["tokens"] = tokens
    for name, low, high in (
        ("repetition", 0.5, 2.0), ("frequency", -1.0, 1.0), ("presence", -1.0, 1.0)
    ):  # fmt: skip
        if kind_rng.random() < 0.6:
            each = rng.uniform(low, high, rows).astype(np.float32)
            options[name] = each if rng.random() < 0.4 else float(each[0])
    if kind_rng.random() < 0.3:
        options["allowed"] = rng.random((rows, vocab)) < 0.7
    if kind_rng.random() < 0.3:
        options["logit_bias"] = numbers(rng, (rows, vocab), np.float32)
    return options


def apply_penalties(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    logits = draw_logits(kind_rng, rng)
    options = draw_penalties(kind_rng, rng, *logits.shape)
    tokens = options.pop("tokens")
    want = sampling.apply_penalties(logits, tokens, **options)

    def judge(results: list[np.ndarray]) -> None:
        unit = float(ml_dtypes.finfo(logits.dtype).eps)  # sums of terms may be fused
        np.testing.assert_allclose(results[0], want, rtol=max(unit, 3e-7), atol=1e-6)

    arrays = [given(rng, logits), cupy.asarray(tokens)]
    return Drawn(sampling.apply_penalties, arrays, given_parameters(rng, options), judge)


def filter_logits(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    logits = draw_logits(kind_rng, rng)
    options = draw_filters(kind_rng, rng, *logits.shape)
    want = sampling.filter_logits(logits, **options)

    def judge(results: list[np.ndarray]) -> None:
        found = results[0]
        differ = ~((found == want) | np.isnan(found) & np.isnan(want))
        if {"top_p", "typical_p"} & set(options):
            # A token at the crossing may fall on either side; what both keep is the same.
            kept = (found > -np.inf) & (want > -np.inf)
            assert not differ[kept].any()
            assert (differ.sum(axis=-1) <= 2 + found.shape[-1] // 10000).all()
        else:
            assert not differ.any(), f"{differ.sum()} of {differ.size} differ"

    on_device = given_parameters(rng, options)
    return Drawn(sampling.filter_logits, [given(rng, logits)], on_device, judge)


def top_k(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    logits = draw_logits(kind_rng, rng)
    k = int(min(logits.shape[1], rng.choice([1, 2, 50, 256, 257, 1000])))
    want = sampling.top_k(logits, k)

    def judge(results: list[np.ndarray]) -> None:
        for got, wanted in zip(results, want, strict=True):
            np.testing.assert_array_equal(got.astype(np.float64), wanted.astype(np.float64))

    return Drawn(sampling.top_k, [given(rng, logits), k], {}, judge)


def softmax(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    logits = draw_logits(kind_rng, rng)
    rows = len(logits)
    temperature = [1.0, 0.3, 0.0, rng.choice([0.0, 0.5, 2.0], rows).astype(np.float32)]
    options = {"temperature": temperature[int(rng.integers(4))]}
    want = sampling.softmax(logits, **options)

    def judge(results: list[np.ndarray]) -> None:
        size = calls.largest(logits) * 4e-7 / 0.3
        np.testing.assert_allclose(results[0], want, rtol=1e-5 + size, atol=1e-37)

    return Drawn(sampling.softmax, [given(rng, logits)], given_parameters(rng, options), judge)


def speculative_sample(kind_rng: Generator, rng: Generator, most: int) -> Drawn:
    rows, tokens = int(rng.integers(1, 9)), int(rng.integers(1, 7))
    vocab = int(rng.choice([1, 2, 40, 1000, 32000]))

    def probabilities(*shape: int) -> np.ndarray:
        p = np.exp(rng.standard_normal(shape) * rng.choice([0.0, 1.0, 5.0]))
        p[rng.random(shape) < rng.choice([0.0, 0.5])] = 0
        p[..., 0] += 1e-3
        return (p / p.sum(axis=-1, keepdims=True)).astype(np.float32)

    draft, target = probabilities(rows, tokens, vocab), probabilities(rows, tokens + 1, vocab)
    if rng.random() < 0.3:
        target[:, :-1] = draft
    drafted = rng.integers(0, vocab, (rows, tokens)).astype(np.int32)
    options = {
        "seed": rng.integers(0, 2**62, rows) if rng.random() < 0.5 else int(rng.integers(2**62)),
        "offset": rng.integers(0, 2**62, rows) if rng.random() < 0.5 else int(rng.integers(2**62)),
    }
    want = sampling.speculative_sample(drafted, draft, target, **options)

    def judge(results: list[np.ndarray]) -> None:
        for got, wanted in zip(results, want, strict=True):
            np.testing.assert_array_equal(got, wanted)

    arrays = [cupy.asarray(drafted), given(rng, draft), given(rng, target)]
    on_device = given_parameters(rng, options)
    return Drawn(sampling.speculative_sample, arrays, on_device, judge)


# ------------------------------------------------------------------------------------------ writing


def append_kv(kind_rng: Generator, rng: Generator, most: int) -> None:
    where = str(kind_rng.choice(appending.KINDS))
    rotation = [None, "halves", "interleaved"][int(kind_rng.integers(3))]
    appending.check(
        rng,
        calls.DTYPES[str(kind_rng.choice([*calls.DTYPES]))],
        where,
        cupy.asarray,
        dims=tuple(int(kind_rng.choice([4, 16, 40, 64, 80, 128])) for _ in "kv"),
        ragged=bool(kind_rng.random() < 0.5),
        padded=bool(kind_rng.random() < 0.3),
        rope=None if where == "slots alone" else rotation,
        strided=bool(kind_rng.random() < 0.3),
    )


def paged_kv_cache(kind_rng: Generator, rng: Generator, most: int) -> None:
    """Writing, forking, truncating: pages on both sides have the same bits."""
    dtype = calls.DTYPES[str(kind_rng.choice(["float16", "bfloat16", "float32"]))]
    dim = int(kind_rng.choice([32, 64, 96, 128, 256]))
    dim_v = dim if kind_rng.random() < 0.7 else int(kind_rng.choice([32, 64, 128]))
    heads, page_size = int(rng.integers(1, 4)), int(2 ** rng.integers(0, 7))
    names = [None, "int8", "float8_e4m3", "float8_e5m2", "int4", "k8v4", "other"]
    quantization: Any = names[int(kind_rng.integers(len(names)))]
    if quantization == "other":
        each = [[None, *FORMATS][int(kind_rng.integers(5))] for _ in "kv"]
        if each == [None, None]:
            each[0] = "int8"
        more: dict[str, Any] = {}
        if kind_rng.random() < 0.3 and "int4" in each:
            more["group_size"] = 32
        if kind_rng.random() < 0.3 and each[0]:
            more["rotate_k"] = bool(kind_rng.random() < 0.5)
        if kind_rng.random() < 0.3 and each[0]:
            more["k_offset"] = rng.standard_normal((heads, dim)).astype(np.float32)
        quantization = cuattn.KVQuantization(*each, **more)
    pages = 40 + 600 // page_size
    caches = [
        cuattn.PagedKVCache(
            pages, page_size, heads, dim, head_dim_v=dim_v, dtype=dtype, quantization=quantization,
            xp=xp,
        )
        for xp in (np, cupy)
    ]  # fmt: skip
    for cache in caches:
        for array in cache._store.arrays.values():
            array[...] = 0
    ids: list[int] = []
    rotary = 2 * int(rng.integers(1, min(dim, 64) // 2 + 1)) if kind_rng.random() < 0.4 else 0
    interleaved = bool(kind_rng.random() < 0.5)
    angles = rng.random((700, rotary // 2)) * 6
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    for _ in range(6):
        chance = rng.random()
        if not ids or chance < 0.3:
            for cache in caches:
                id = cache.add_sequence()
            ids.append(id)
        elif chance < 0.45:
            which = ids[int(rng.integers(len(ids)))]
            for cache in caches:
                id = cache.fork(which)
            ids.append(id)
        elif chance < 0.6:
            which = ids[int(rng.integers(len(ids)))]
            n = int(rng.integers(0, caches[0].num_tokens(which) + 1))
            for cache in caches:
                cache.truncate(which, n)
        counts = rng.choice([0, 1, 1, 3, 8, 17, 40], len(ids))
        if not all(cache.can_extend(ids, counts.tolist()) for cache in caches):
            continue
        if max(caches[0].num_tokens(id) for id in ids) + 40 > 700:
            continue
        total = int(counts.sum())
        k, v = (numbers(rng, (total, heads, d), dtype) for d in (dim, dim_v))
        if rng.random() < 0.3 and total:
            k[int(rng.integers(total))] = 0
            v[int(rng.integers(total))] = -0.0
        options: dict[str, Any] = {}
        exact = True
        for cache, place in zip(caches, (np.asarray, lambda a: given(rng, a)), strict=True):
            cache.extend(ids, counts.tolist())
            if rotary:
                options = {"rope": tuple(cache.xp.asarray(t) for t in tables)} if hasattr(
                    cache, "xp"
                ) else {"rope": tuple(
                    (np if cache is caches[0] else cupy).asarray(t) for t in tables
                )}  # fmt: skip
                options["interleaved"] = interleaved
            cache.write(0, ids, place(k), place(v), **options)
        for name, host in caches[0]._store.arrays.items():
            device = caches[1]._store.arrays[name].get()
            if rotary and not exact:
                continue
            if not np.array_equal(
                np.ascontiguousarray(device).view(np.uint8),
                np.ascontiguousarray(host).view(np.uint8),
            ):
                differ = (device != host) & ~(np.isnan(_f(device)) & np.isnan(_f(host)))
                if rotary and quantization is None:
                    np.testing.assert_allclose(_f(device), _f(host), rtol=0.01, atol=0.02)
                    continue
                assert not differ.any(), f"{name}: {differ.sum()} of {differ.size} differ"


def _f(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32)


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
    )
}
