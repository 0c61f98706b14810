"""Calls of public functions with arguments that are drawn at random: how arrays lie in memory, how
a call is made again, and how results of attention are judged.

A call is drawn by two generators. What a kernel is compiled for (dtypes, head_dims, which options
there are) is drawn from `kind`, all else from `rng`: calls of one kind share kernels, and most of
the time of a call of a new kind is its compiler's.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn._repeat import forget
from tests import formulas
from tests.gpu.calls import BORDER, DTYPES, HEAD_DIMS, SEQLENS, precisions, within
from tests.gpu.graphs import captured

cupy = pytest.importorskip("cupy")

Generator = np.random.Generator
#: Of page tables, in places that no sequence uses.
GARBAGE = (-1, 1 << 30, -(1 << 31), (1 << 31) - 1, 0)


@dataclasses.dataclass
class Drawn:
    """A call on the device, and how its results on the host are judged."""

    function: Callable[..., Any]
    arrays: list[Any]
    options: dict[str, Any]
    judge: Callable[[list[Any]], None]
    #: Whether the same call has the same bits each time.
    same_bits: bool = True
    #: Memory around `out`, which a call has to leave alone.
    border: Any = None
    #: More that holds of the call, once its results are right.
    also: Callable[[list[Any]], None] | None = None
    #: Whether it can be captured in a graph.
    captured: bool = True
    #: What of the results is defined; all, if this is None.
    defined: Callable[[list[Any]], list[Any]] | None = None

    def __str__(self) -> str:
        def of(value: Any) -> str:
            if isinstance(value, cuattn.QuantizedArray):
                parts = value.data, value.scale, value.minimum, value.offset
                inside = ", ".join(of(part) for part in parts)
                return f"{value.dtype}{'~' if value.rotation else ''}({inside})"
            if isinstance(value, tuple) and any(hasattr(x, "strides") for x in value):
                return f"({', '.join(map(of, value))})"
            if not hasattr(value, "strides"):
                return repr(value)
            strides = tuple(stride // value.itemsize for stride in value.strides)
            return f"{value.dtype}{list(value.shape)}:{list(strides)}+{value.data.ptr % 16}"

        given = [of(a) for a in self.arrays]
        given += [f"{name}={of(value)}" for name, value in self.options.items()]
        return f"{self.function.__name__}({', '.join(given)})"

    def __call__(self) -> list[Any]:
        """The results, on the host."""
        return self.results(self.function(*self.arrays, **self.options))

    def results(self, result: Any) -> list[Any]:
        results = results_of(result)
        return results if self.defined is None else self.defined(results)


def results_of(result: Any) -> list[Any]:
    """Arrays on the host: of each result, and of each part of codes."""
    if result is None:
        return []
    if isinstance(result, cuattn.QuantizedArray):
        result = [x for x in (result.data, result.scale, result.minimum) if x is not None]
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [None if part is None else part.get() for part in parts]


def same_bits(results: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(results) == len(expected) and all(
        (a is None and b is None) or (a.shape == b.shape and a.tobytes() == b.tobytes())
        for a, b in zip(results, expected, strict=True)
    )


# ------------------------------------------------------------------------------ arrays and memory


def pick(rng: Generator, among: Sequence[Any]) -> Any:
    return among[int(rng.integers(len(among)))]


def numbers(rng: Generator, shape: Sequence[int], dtype: Any, size: float = 1.0) -> np.ndarray:
    """Random numbers, now and then the same along an axis."""
    array = (size * rng.standard_normal(shape)).astype(dtype)
    if array.ndim > 1 and array.size and rng.random() < 0.07:
        axis = int(rng.integers(array.ndim - 1))
        array[...] = array.take([0], axis)
    return array


def given(rng: Generator, array: np.ndarray) -> Any:
    """`array` on the device, amid what spoils a result, somehow in memory."""
    for axis in range(array.ndim - 1):
        if array.shape[axis] > 1 and rng.random() < 0.5:
            first = np.broadcast_to(array.take([0], axis), array.shape)
            if np.array_equal(first, array):
                return cupy.broadcast_to(given(rng, array.take([0], axis)), array.shape)
    chance = rng.random()
    if chance < 0.45 or not array.size:
        return cupy.asarray(np.ascontiguousarray(array))
    if chance < 0.6 and array.ndim > 1:
        axes = [a for a in range(array.ndim - 1) if rng.random() < 0.5]
        turned = np.ascontiguousarray(np.flip(array, axes))
        return cupy.asarray(turned)[tuple(
            slice(None, None, -1) if axis in axes else slice(None) for axis in range(array.ndim)
        )]  # fmt: skip
    if chance < 0.65:
        if rng.random() < 0.5:
            return cupy.asarray(np.ascontiguousarray(array[..., ::-1]))[..., ::-1]
        return cupy.asarray(np.repeat(array, 2, axis=-1))[..., ::2]
    border = np.nan if array.dtype.kind not in "iub" else 0x7F
    view, _ = within(array, rng, border)
    view[...] = cupy.asarray(array)
    return view


def given_options(rng: Generator, options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: given(rng, value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }


def moved(value: Any) -> Any:
    """A copy with the same strides and the same distance to 16 bytes, at another address."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(moved, value))
    if isinstance(value, cuattn.QuantizedArray):
        scale, minimum = moved(value.scale), moved(value.minimum)
        if minimum is not None and value.minimum.data.mem is value.scale.data.mem:  # in one array
            distance = value.minimum.data.ptr - value.scale.data.ptr
            place = scale.data + distance
            minimum = cupy.ndarray(minimum.shape, minimum.dtype, place, minimum.strides)
        return value.of(moved(value.data), scale, minimum)
    if not isinstance(value, cupy.ndarray) or not value.size:
        return value
    base = value if value.base is None else value.base
    if not base.flags.c_contiguous:
        return value
    copied = base.copy()
    distance = value.data.ptr - base.data.ptr
    if copied.data.ptr % 16 != base.data.ptr % 16:
        return value
    return cupy.ndarray(value.shape, value.dtype, copied.data + distance, value.strides)


# ------------------------------------------------------------------------------------ running calls


def check(drawn: Drawn, rng: Generator) -> None:
    """Make a call, judge its results, and make it again, at other addresses, on another stream or
    from a graph."""
    expected = drawn()
    drawn.judge(expected)
    check_border(drawn)
    if drawn.also is not None and rng.random() < 0.5:
        drawn.also(expected)
    ways = ["not", "same", "moved", "stream", "threads", "graph", "varied", "overlapping"]
    way = rng.choice(ways)
    if way == "not":
        return
    if way == "varied":
        return check_varied(drawn, expected, rng)
    if way == "threads":
        return check_threads(drawn, expected)
    if way == "overlapping":
        return check_overlapping(drawn, rng)
    if way == "graph":
        if not drawn.captured:
            return
        results = from_graph(drawn)
    elif way == "stream":
        cupy.cuda.Device().synchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            results = drawn.function(*drawn.arrays, **drawn.options)
            stream.synchronize()
        results = drawn.results(results)
    elif way == "moved":
        options = {
            name: value if name == "out" else moved(value) for name, value in drawn.options.items()
        }
        results = drawn.results(drawn.function(*map(moved, drawn.arrays), **options))
    else:
        results = drawn()
    check_border(drawn)
    if drawn.same_bits:
        assert same_bits(results, expected), f"made again ({way}): other bits"
    else:
        drawn.judge(results)


#: Options that may be left out.
DROPPED = ("window", "softcap", "bias", "mask", "key_mask", "alibi_slopes", "sinks", "out")


def varied(drawn: Drawn, rng: Generator) -> Drawn:
    """A call that differs a little: without an option, of other integers, or with an array that
    lies elsewhere by an element or with a gap."""
    arrays, options = list(drawn.arrays), dict(drawn.options)
    ways = [*(name for name in DROPPED if name in options), "integers", "shifted", "gap"]
    way = pick(rng, ways)
    if way in options:
        for name in (way, f"grad_{way.removesuffix('_slopes')}"):
            options.pop(name, None)
        return dataclasses.replace(drawn, arrays=arrays, options=options)
    places: list[tuple[Any, Any]] = [(arrays, i) for i in range(len(arrays))]
    places += [(options, name) for name in options if name != "out"]
    of_ints = way == "integers"
    places = [
        (holder, at)
        for holder, at in places
        if isinstance(holder[at], cupy.ndarray)
        and holder[at].size
        and holder[at].ndim
        and (holder[at].dtype.kind == "i") == of_ints
    ]
    if places:
        holder, at = pick(rng, places)
        array = holder[at]
        if of_ints:
            other = np.int64 if array.dtype == np.int32 else np.int32
            holder[at] = cupy.asarray(array.get().astype(other))
        elif way == "shifted":
            base = cupy.empty(array.size + 1, array.dtype)
            holder[at] = base[1:].reshape(array.shape)
            holder[at][...] = array
        else:
            base = cupy.empty((*array.shape[:-1], array.shape[-1] + 8), array.dtype)
            holder[at] = base[..., : array.shape[-1]]
            holder[at][...] = array
    return dataclasses.replace(drawn, arrays=arrays, options=options)


def check_varied(drawn: Drawn, expected: list[Any], rng: Generator) -> None:
    """Calls that differ a little, in turns with the first one: what is remembered of each does not
    serve another."""
    others = [varied(drawn, rng) for _ in range(3)]
    results = []
    for _ in range(2):
        results = [other() for other in others]
        if drawn.same_bits:
            assert same_bits(drawn(), expected), "made again amid others: other bits"
    for other, result in zip(others, results, strict=True):
        forget()
        if drawn.same_bits:
            assert same_bits(other(), result), f"a call like earlier ones: other bits: {other}"


def check_threads(drawn: Drawn, expected: list[Any]) -> None:
    """The call from several threads at once, each on a stream of its own: nothing is shared that
    one of them spoils for another."""

    def call(n: int) -> list[Any]:
        options = {
            name: value.copy() if name == "out" else moved(value)
            for name, value in drawn.options.items()
        }
        arrays = list(map(moved, drawn.arrays))
        cupy.cuda.Device().synchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            results = [drawn.function(*arrays, **options) for _ in range(3)][-1]
            stream.synchronize()
            return drawn.results(results)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for results in pool.map(call, range(4)):
            if drawn.same_bits and "out" not in drawn.options:  # whose copy is contiguous
                assert same_bits(results, expected), "made in a thread: other bits"
            else:
                drawn.judge(results)


#: Functions whose `out` may overlap their inputs, which are read as they were.
INTO_INPUTS = (
    *("flash_attention", "flash_attention_varlen", "flash_decode", "paged_attention"),
    *("mla_decode", "rope"),
)


def check_overlapping(drawn: Drawn, rng: Generator) -> None:
    """The call with an `out` that lies across one of the inputs, and with one beside it: the bits
    are the same."""
    arrays, options = list(drawn.arrays), dict(drawn.options)
    options.pop("out", None)
    if drawn.function.__name__ not in INTO_INPUTS:
        return
    result = drawn.function(*arrays, **options)
    result = result[0] if isinstance(result, tuple) else result
    places = [
        i
        for i, array in enumerate(arrays)
        if isinstance(array, cupy.ndarray) and array.size and array.dtype == result.dtype
    ]
    if not places or not result.size:
        return
    at = pick(rng, places)
    arrays[at] = array = cupy.ascontiguousarray(arrays[at])
    begin, out_begin = 0, 256 * int(rng.integers(0, 1 + array.nbytes // 256))
    if rng.random() < 0.5:
        begin, out_begin = 256 * int(rng.integers(0, 1 + result.nbytes // 256)), 0
    memory = cupy.zeros(begin + array.nbytes + out_begin + result.nbytes, np.uint8)
    across = cupy.ndarray(array.shape, array.dtype, memory.data + begin)
    out = cupy.ndarray(result.shape, result.dtype, memory.data + out_begin)
    across[...] = array
    beside = drawn.results(drawn.function(*arrays, **options, out=out.copy()))
    arrays[at] = across
    for _ in range(2):
        across[...] = array
        results = drawn.results(drawn.function(*arrays, **options, out=out))
        assert same_bits(results, beside), f"out across argument {at}: other bits"


def from_graph(drawn: Drawn) -> list[Any]:
    """The results of a replay; those of the call in the graph are spoilt before it."""
    replay, result = captured(lambda: drawn.function(*drawn.arrays, **drawn.options))
    parts = result if isinstance(result, (tuple, list)) else [result]
    for part in parts:
        if isinstance(part, cupy.ndarray) and part.dtype.kind not in "iub":
            part[...] = np.nan
    replay()
    return drawn.results(result)


def check_border(drawn: Drawn) -> None:
    if drawn.border is not None:
        view, base = drawn.options["out"], drawn.border
        kept = view.copy()
        view[...] = BORDER
        assert bool((base == BORDER).all()), "memory around out was written to"
        view[...] = kept


def draw_out(rng: Generator, shape: Sequence[int], dtype: Any) -> tuple[dict[str, Any], Any]:
    """`out` as an option, or none, and the memory around it."""
    if rng.random() < 0.5:
        return {}, None
    view, base = within(np.empty(shape, dtype), rng, BORDER)
    view[...] = np.nan
    return {"out": view}, base


# ----------------------------------------------------------------------------- options of attention


@dataclasses.dataclass
class Kind:
    """What calls have in common that share kernels."""

    dtype: np.dtype
    head_dim: int
    head_dim_v: int
    options: frozenset[str]
    term_dtype: np.dtype  # of bias
    group: int  # query heads a key head


def draw_kind(kind: Generator, names: Sequence[str], *, largest: int = 512) -> Kind:
    dtype = DTYPES[str(kind.choice([*DTYPES], p=[0.3, 0.35, 0.25, 0.1]))]
    if kind.random() < 0.5:
        head_dim = int(kind.choice([64, 128]))
    else:
        head_dim = int(kind.choice([d for d in (*HEAD_DIMS, 300, 384, 511, 512) if d <= largest]))
    head_dim_v = head_dim
    if kind.random() < 0.25:
        head_dim_v = int(kind.choice([d for d in (*HEAD_DIMS, 320, 512) if d <= largest]))
    chance = kind.choice([0.1, 0.25, 0.5])
    chosen = frozenset(str(name) for name in names if kind.random() < chance)
    term = dtype if kind.random() < 0.7 else DTYPES[str(kind.choice([*DTYPES]))]
    group = int(kind.choice([1, 1, 2, 3, 4, 5, 8, 16, 64]))
    return Kind(dtype, head_dim, head_dim_v, chosen, term, group)


#: Of calls of many queries.
OPTIONS = (
    *("causal", "window", "scale", "softcap", "bias", "mask", "key_mask", "alibi_slopes", "sinks"),
    "dropout",
)


def draw_options(
    rng: Generator, kind: Kind, batch: int, heads_q: int, seqlen_q: int, seqlen_k: int
) -> dict[str, Any]:
    """What a kind's options are in one call; arrays on the host."""
    acc = np.float64 if kind.dtype == np.float64 else np.float32
    options: dict[str, Any] = {}
    if "causal" in kind.options:
        options["causal"] = bool(rng.random() < 0.8)
    if "window" in kind.options:
        near = int(rng.choice([3, 40, 300]))
        sides = [None if rng.random() < 0.2 else int(rng.integers(0, near)) for _ in "lr"]
        if rng.random() < 0.3:
            side = int(rng.integers(2))
            sides[side] = -int(rng.integers(0, near))
        left, right = sides
        right = min(0 if right is None else right, 0) if options.get("causal", True) else right
        if None not in (left, right) and -left > right:  # an error: no query sees a key
            sides[0] = int(rng.integers(0, near)) - right
        options["window"] = tuple(sides)
    if "scale" in kind.options:
        huge = 20.0 if kind.dtype == np.float16 else 1e4  # the plain formula's scores are finite
        drawn = [rng.uniform(-0.3, 0.3), 1.0, 0.0, -1.0, 1e-6, 1e-30, 20.0, huge, -huge]
        odds = [0.4, 0.2, 0.1, 0.1, 0.03, 0.02, 0.1, 0.03, 0.02]
        options["scale"] = float(rng.choice(drawn, p=odds))
    if "softcap" in kind.options:
        options["softcap"] = float(rng.choice([0.1, 1.0, 5.0, 30.0]))
    scores = (batch, heads_q, seqlen_q, seqlen_k)
    if "bias" in kind.options:
        options["bias"] = numbers(rng, broadcast(rng, scores), kind.term_dtype)
        if rng.random() < 0.3:
            options["bias"][rng.random(options["bias"].shape) < 0.3] = -np.inf
    if "mask" in kind.options:
        options["mask"] = rng.random(broadcast(rng, scores)) < rng.choice([0.05, 0.5, 0.9])
    if "key_mask" in kind.options:
        options["key_mask"] = rng.random((batch, seqlen_k)) < rng.choice([0.1, 0.5, 0.9])
    if "alibi_slopes" in kind.options:
        shape = (batch, heads_q) if rng.random() < 0.5 else (heads_q,)
        options["alibi_slopes"] = rng.uniform(-0.1, 0.5, shape).astype(np.float32)
    if "sinks" in kind.options:
        options["sinks"] = numbers(rng, (heads_q,), acc, 3.0)
        if rng.random() < 0.2:
            options["sinks"][int(rng.integers(heads_q))] = -np.inf
    if "dropout" in kind.options:
        options["dropout"] = float(rng.choice([0.0, 0.01, 0.3, 0.9]))
        options["seed"] = pick(rng, [0, 1, int(rng.integers(2**63)), 2**64 - 1])
    return options


def broadcast(rng: Generator, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array that broadcasts to this one, of keys at least most of the time."""
    ones = tuple(1 if rng.random() < 0.3 else n for n in shape[:3])
    return (*ones, 1 if rng.random() < 0.1 else shape[3])[int(rng.integers(0, 4)) :]


# ------------------------------------------------------------------------------------------ judging


@dataclasses.dataclass
class Sequence_:
    """One sequence of a call: (tokens, heads, head_dim), and its own options of the formula."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any]
    #: Other (q, k, v) of the same meaning that a kernel may round instead.
    others: tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...] = ()


def of_sequence(options: dict[str, Any], b: int, rows: int, keys: int) -> dict[str, Any]:
    """What a call's options say of its sequence `b`."""
    own = dict(options)
    for name in ("bias", "mask"):
        if name in own:
            array = own[name].reshape((1,) * (4 - own[name].ndim) + own[name].shape)
            array = array[b : b + 1] if len(array) > 1 else array
            own[name] = array[:, :, :rows, :keys]
    if "key_mask" in own:
        own["mask"] = own.get("mask", True) & own.pop("key_mask")[b, None, None, None, :keys]
    if "alibi_slopes" in own and own["alibi_slopes"].ndim == 2:
        own["alibi_slopes"] = own["alibi_slopes"][b : b + 1]
    return own


def judge_attention(
    dtype: np.dtype, parts: Sequence[tuple[np.ndarray, np.ndarray]], sequences: list[Sequence_]
) -> None:
    """Judge each sequence's out (tokens, heads, head_dim_v) and lse (heads, tokens) by the rule of
    two, the largest errors of all of them.

    Where luck may spare the plain formula, four roundings of the largest score change a weight; of
    few numbers a unit of the largest value in the inputs' dtype is allowed besides.
    """
    wide, _ = precisions(dtype)
    outs: list[list[np.ndarray]] = []
    lses: list[list[np.ndarray]] = []
    score = value = 0.0
    for (out, lse), s in zip(parts, sequences, strict=True):
        runs = [formulas.attention(s.q[None], s.k[None], s.v[None], precision=wide, **s.options)]
        for order in formulas.orders(s.q.shape[-1], 4):
            arrays = s.q[None, ..., order], s.k[None, ..., order], s.v[None]
            runs.append(formulas.attention(*arrays, precision=dtype, **s.options))
        for n in range(3):
            other = s.others[n] if n < len(s.others) else (s.q, s.k, s.v)
            other = [a[None] for a in other]
            runs.append(formulas.attention(*other, precision=dtype, **s.options))
            if s.others:  # what was rounded alone: the formula's roundings may make up for it
                runs.append(formulas.attention(*other, precision=wide, **s.options))
        outs.append([a.ravel() for a in (out, *(run[0] for run in runs))])
        lses.append([a.ravel() for a in (lse, *(run[1] for run in runs))])
        score = max(score, largest_score(s))
        value = max(value, largest(s.v))
    unit = float(np.finfo(np.float64 if dtype == np.float64 else np.float32).eps)
    unit *= 64 if dtype == np.float64 else 4
    for results, size in ((outs, value), (lses, 1.0)):
        if not results:
            continue
        actual, exact, *plain = map(np.concatenate, zip(*results, strict=True))
        own = float(ml_dtypes.finfo(actual.dtype).eps)
        slack = unit * (1 + score) * size + own * largest(exact)
        if exact.size < 1000 and results is outs:
            slack += float(ml_dtypes.finfo(dtype).eps) * value
        formulas.assert_accurate(actual, exact, *plain, slack=slack)


def largest(array: np.ndarray) -> float:
    array = array.astype(np.float64)
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def largest_score(s: Sequence_) -> float:
    """No score of a sequence is larger, before or after softcap."""
    q, k = (np.sqrt((a.astype(np.float64) ** 2).sum(axis=-1)).max(initial=0.0) for a in (s.q, s.k))
    scale = s.options.get("scale")
    size = abs(s.q.shape[-1] ** -0.5 if scale is None else scale) * float(q * k)
    if "bias" in s.options:
        size += largest(s.options["bias"])
    if "alibi_slopes" in s.options:
        size += largest(s.options["alibi_slopes"]) * (len(s.q) + len(s.k))
    if s.options.get("sinks") is not None:
        size += largest(s.options["sinks"])
    return size


def lengths(rng: Generator, count: int, most: int) -> np.ndarray:
    """Of sequences, where kernels change their minds."""
    near = [n for n in (0, 0, *SEQLENS) if n <= most] or [0]
    if rng.random() < 0.3:
        return rng.integers(0, most + 1, count)
    return rng.choice(near, count)


def ends_of(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def poison_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels write for each other begins as anything, NaN where it is of floats."""
    from cuattn.gpu import decoding, gradients, mla, plan

    scratch = plan.scratch

    def dirty(nbytes: int) -> Any:
        memory = scratch(nbytes)
        if nbytes and not cupy.cuda.get_current_stream().is_capturing():
            cupy.ndarray(nbytes, np.uint8, memory)[...] = 0xFF
        return memory

    for module in (plan, mla):
        monkeypatch.setattr(module, "scratch", dirty)
    for module in (decoding, gradients):
        allocate = module.scratch_array

        def poisoned(shape: Any, dtype: Any, allocate: Callable = allocate) -> Any:
            array = allocate(shape, dtype)
            array[...] = np.nan
            return array

        monkeypatch.setattr(module, "scratch_array", poisoned)
