"""How random calls over caches and pages are drawn and judged."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cuattn
from cuattn._quantized import FORMATS
from cuattn.reference.quantization import rotated
from tests.gpu import random_calls as calls
from tests.gpu.graphs import captured
from tests.gpu.random_arrays import (
    fitting,
    given_ints,
    heads_of,
    limit,
    peaked,
    slices,
)
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
    results_of,
)

cupy = pytest.importorskip("cupy")


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


CACHE_OPTIONS = tuple(name for name in OPTIONS if name != "dropout")


def cache_lengths(rng: Generator, most: int) -> np.ndarray:
    """Short sequences, or one long one beside them."""
    batch = int(rng.choice([1, 2, 3, 4, 5, 9, 20]))
    lens = lengths(rng, batch, 300)
    if rng.random() < 0.4:
        lens[int(rng.integers(batch))] = int(rng.integers(300, 5000))
    return lens


def told_lengths(rng: Generator, lens: np.ndarray, capacity: int) -> Any:
    """Lengths on the device, where now and then more than there is room for stands for that, and
    less than nothing for nothing."""
    told = lens.astype(np.int32)
    told[lens >= capacity] += rng.choice([0, 0, 1, 1 << 20]).astype(np.int32)
    told[lens <= 0] -= rng.choice([0, 0, 1, 1 << 20]).astype(np.int32)
    return given_ints(rng, told)


def draw_queries(rng: Generator, lens: np.ndarray, heads_q: int, most: int) -> np.ndarray:
    """How many each sequence has."""
    return fitting(
        rng,
        lambda: rng.choice([np.full(len(lens), int(rng.choice([1, 1, 1, 2, 3, 5, 17, 64, 130]))),
                            rng.choice([0, 1, 1, 2, 5, 16, 40], len(lens))]),
        lambda n: int((n * lens).sum()) * heads_q,
        most,
    )  # fmt: skip


def draw_lengths(rng: Generator, heads_q: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """How many keys and how many queries each sequence has."""

    def draw() -> tuple[np.ndarray, np.ndarray]:
        lens = cache_lengths(rng, most)
        return lens, draw_queries(rng, lens, heads_q, most)

    return fitting(rng, draw, lambda drawn: int((drawn[0] * drawn[1]).sum()) * heads_q, most)


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
    return cached_call(
        rng,
        cuattn.flash_decode,
        kind,
        [given(rng, q[:, 0] if single else q), k.given, v.given],
        [told_lengths(rng, lens, capacity)],
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
            check_other_lengths(drawn, rng)
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


def check_other_lengths(drawn: Drawn, rng: Generator) -> None:
    """A graph that is replayed after lengths were made shorter in place, and longer again: what a
    replay leaves in memory does not serve the next one."""
    if "prefix" in drawn.options:
        return
    lens = drawn.arrays[-1]
    before = lens.copy()
    out = drawn.options.get("out")
    replay, result = captured(lambda: drawn.function(*drawn.arrays, **drawn.options))
    for chances in ((0, 0.3, 0.8), (0.0, 0.5, 1.0), (1.0,), (0.9, 1.0)):
        shorter = np.minimum(before.get(), 1 << 19) * rng.choice(chances, before.shape)
        lens[...] = cupy.asarray(shorter.astype(before.dtype))
        for part in result:
            part[...] = np.nan
        replay()
        replayed = drawn.results(result)
        if out is not None:
            out[...] = np.nan
        ordinary = drawn()
        assert calls.same_bits(replayed, ordinary), "replayed with other lengths: other bits"
    lens[...] = before


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
    lens, counts = draw_lengths(rng, heads_q, most)
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
        [given_ints(rng, table), told_lengths(rng, lens, table.shape[1] * page_size)],
        options,
        sequences,
        shape,
        parts_of,
    )
    drawn.options |= extra
    if ragged:
        drawn.defined = lambda results: within_sequences(results, int(ends[-1]))
    return drawn
