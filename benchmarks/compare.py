"""The kernels of two commits beside each other, call by call, in one process.

``python -m benchmarks.compare CHECKOUT [--only REGEX] [--random N] [--json FILE]``

`CHECKOUT` is a folder with the other commit (``git worktree add CHECKOUT COMMIT``). Each case is a
captured CUDA graph of one call, timed turn by turn; a figure of 1.05 says that this commit takes 5%
less time. The other commit takes part twice, and what its two figures differ by is the noise of the
case. The cases are the tables' and, with ``--random``, calls drawn at random: what is tuned to a
table should not cost the rest. The exit status is 1 where a case is below ``--least`` by more than
its noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import math
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import cupy
import ml_dtypes
import numpy as np

import cuattn
from benchmarks import timing

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TOKENS, FEATURES = 16384, 2048  # of a forward call


@dataclasses.dataclass(frozen=True)
class Case:
    """A call that both commits make: `prepare` draws the inputs, and gives what calls a package
    with them."""

    name: str
    prepare: Callable[[], Callable[[Any], Any]]


def normal(*shape: int, dtype: np.dtype = BFLOAT16) -> cupy.ndarray:
    """Random numbers, drawn in parts that leave room for the result."""
    array = cupy.empty(shape, dtype)
    flat = array.reshape(-1)
    for part in (flat[i : i + (1 << 26)] for i in range(0, flat.size, 1 << 26)):
        part[...] = cupy.random.standard_normal(part.size, dtype=np.float32)
    return array


def forward(
    name: str,
    batch: int,
    seqlens: tuple[int, int],
    heads: tuple[int, int],
    dim: int,
    dtype: np.dtype = BFLOAT16,
    **options: Any,
) -> Case:
    """A call of ``flash_attention``; options that are functions are made of the shape's numbers."""

    def prepare() -> Callable[[Any], Any]:
        (seqlen_q, seqlen_k), (heads_q, heads_kv) = seqlens, heads
        q = normal(batch, seqlen_q, heads_q, dim, dtype=dtype)
        k, v = (normal(batch, seqlen_k, heads_kv, dim, dtype=dtype) for _ in "kv")
        made = {
            n: o(batch, heads_q, seqlen_q, seqlen_k) if callable(o) else o
            for n, o in options.items()
        }
        return lambda package: package.flash_attention(q, k, v, **made)

    return Case(f"forward {name}", prepare)


def varlen(name: str, lengths: np.ndarray, heads: int, dim: int, **options: Any) -> Case:
    """A call of ``flash_attention_varlen``."""

    def prepare() -> Callable[[Any], Any]:
        q, k, v = (normal(int(lengths.sum()), heads, dim) for _ in "qkv")
        ends = cupy.asarray(np.concatenate([[0], np.cumsum(lengths)]), np.int32)
        return lambda package: package.flash_attention_varlen(q, k, v, ends, **options)

    return Case(f"varlen {name}", prepare)


def decode(
    name: str,
    lens: np.ndarray,
    heads: tuple[int, int],
    dim: int,
    *,
    tokens: int = 1,
    page_size: int | None = None,
    dtype: np.dtype = BFLOAT16,
    **options: Any,
) -> Case:
    """A call of ``flash_decode``, or over pages of ``paged_attention``."""

    def prepare() -> Callable[[Any], Any]:
        heads_q, heads_kv = heads
        q = normal(len(lens), tokens, heads_q, dim, dtype=dtype)
        seq_lens = cupy.asarray(lens, np.int32)
        if page_size is None:
            k, v = (normal(len(lens), int(lens.max()), heads_kv, dim, dtype=dtype) for _ in "kv")
            return lambda package: package.flash_decode(q, k, v, seq_lens, **options)
        counts = -(-lens // page_size)
        table = np.zeros((len(lens), counts.max()), np.int32)
        order = np.random.default_rng(0).permutation(int(counts.sum()))
        table[np.arange(counts.max()) < counts[:, None]] = order
        k, v = (normal(len(order), page_size, heads_kv, dim, dtype=dtype) for _ in "kv")
        pages = cupy.asarray(table)
        return lambda package: package.paged_attention(q, k, v, pages, seq_lens, **options)

    return Case(f"decode {name}", prepare)


def sample(
    name: str,
    rows: int,
    vocab: int,
    std: float,
    dtype: np.dtype,
    call: Callable[[Any, Any, Any], Any],
) -> Case:
    """A call of ``sampling`` on logits of this standard deviation, with a seed for each row."""

    def prepare() -> Callable[[Any], Any]:
        logits = (std * cupy.random.standard_normal((rows, vocab), dtype=np.float32)).astype(dtype)
        seeds = cupy.arange(rows)
        return lambda package: call(package.sampling, logits, seeds)

    return Case(f"sampling {name} {rows}x{vocab} {dtype.name} std {std:g}", prepare)


def _mask(batch: int, _: int, seqlen_q: int, seqlen_k: int) -> cupy.ndarray:
    return cupy.random.random((batch, 1, seqlen_q, seqlen_k), dtype=np.float32) < 0.9


def _bias(_: int, heads: int, seqlen_q: int, seqlen_k: int) -> cupy.ndarray:
    return normal(heads, seqlen_q, seqlen_k)


def _slopes(_: int, heads: int, __: int, ___: int) -> cupy.ndarray:
    return cupy.exp2(-8.0 * cupy.arange(1, heads + 1, dtype=np.float32) / heads)


def table_cases() -> Iterator[Case]:
    """The cases of the recorded tables, every kernel among them."""
    for dim, seqlen, causal in itertools.product((64, 128, 256), (512, 2048, 8192), (False, True)):
        heads = FEATURES // dim
        shape = (TOKENS // seqlen, (seqlen, seqlen), (heads, heads), dim)
        tag = f"{dim} {seqlen}{' causal' if causal else ''}"
        yield forward(f"sm90 {tag}", *shape, causal=causal)
        if seqlen == 2048:
            # A scale that is not positive is what the Hopper kernel leaves to the next one.
            yield forward(f"sm80 {tag}", *shape, causal=causal, scale=-(dim**-0.5))
            small = (2, (seqlen, seqlen), (heads, heads), dim)
            for dtype in (np.float32, np.float64):
                name = np.dtype(dtype).name
                yield forward(f"simt {name} {tag}", *small, np.dtype(dtype), causal=causal)
    for dim in (64, 128):
        heads = FEATURES // dim
        for tier, scale in (("sm90", None), ("sm80", -(dim**-0.5))):
            seqlen = 8192 if tier == "sm90" else 4096
            shape = (1, (seqlen, seqlen), (heads, heads), dim)
            for name, options in (
                ("window", {"window": (1023, 0)}),
                ("softcap", {"softcap": 30.0}),
                ("ALiBi", {"alibi_slopes": _slopes}),
                (
                    "causal ALiBi softcap",
                    {"alibi_slopes": _slopes, "softcap": 30.0, "causal": True},
                ),
                ("mask", {"mask": _mask}),
                ("bias", {"bias": _bias}),
            ):
                yield forward(f"{tier} {name} {dim}", *shape, scale=scale, **options)
        yield forward(f"sm90 GQA {dim}", 2, (8192, 8192), (heads, heads // 8), dim)
        lengths = np.exp(np.random.default_rng(0).uniform(np.log(128), np.log(8192), 24))
        for causal in (False, True):
            tag = f"{dim}{' causal' if causal else ''}"
            yield varlen(tag, lengths.astype(int), heads, dim, causal=causal)
    for heads, dim in (((32, 8), 128), ((64, 4), 128), ((32, 32), 64), ((32, 8), 80)):
        for batch, length in ((1, 1024), (1, 8192), (1, 131072), (16, 8192), (64, 8192)):
            lens = np.full(batch, length)
            for page_size in (None, 16):
                tag = f"{heads[0]}/{heads[1]} of {dim} {batch}x{length} pages {page_size}"
                yield decode(tag, lens, heads, dim, page_size=page_size)
    for heads in ((8, 1), (16, 1), (48, 1)):
        yield decode(f"{heads[0]}/1 of 128 1x32768", np.full(1, 32768), heads, 128)
    for heads, dim, batch, length in (
        ((64, 4), 128, 12, 100),
        ((8, 1), 128, 256, 500),
        ((64, 4), 128, 256, 300),
        ((32, 8), 128, 8, 1024),
        ((64, 8), 64, 512, 128),
        ((4, 4), 112, 200, 300),
    ):
        tag = f"{heads[0]}/{heads[1]} of {dim} {batch}x{length}"
        yield decode(f"{tag} short", np.full(batch, length), heads, dim)
        yield decode(f"{tag} short, mixed", np.linspace(1, length, batch).astype(int), heads, dim)
    for tokens in (2, 4, 8, 64):
        yield decode(f"{tokens} tokens 16x8192", np.full(16, 8192), (32, 8), 128, tokens=tokens)
    mixed = np.linspace(16, 16384, 64).astype(int)
    yield decode("mixed lengths", mixed, (32, 8), 128, page_size=16)
    yield decode("float32 16x8192", np.full(16, 8192), (32, 8), 128, dtype=np.dtype(np.float32))
    yield decode("softcap ALiBi 16x8192", np.full(16, 8192), (32, 8), 128, softcap=30.0)
    operations: dict[str, Callable[[Any, Any, Any], Any]] = {
        "greedy": lambda s, x, seed: s.greedy(x),
        "temperature": lambda s, x, seed: s.sample(x, temperature=0.9, seed=seed),
        "min_p": lambda s, x, seed: s.sample(x, min_p=0.05, seed=seed),
        "top_k": lambda s, x, seed: s.sample(x, top_k=50, seed=seed),
        "top_p": lambda s, x, seed: s.sample(x, top_p=0.9, seed=seed),
        "joint": lambda s, x, seed: s.sample(x, top_k=50, top_p=0.9, seed=seed),
        "top_k_300": lambda s, x, seed: s.sample(x, top_k=300, seed=seed),
        "typical_p": lambda s, x, seed: s.sample(x, typical_p=0.9, seed=seed),
        "select": lambda s, x, seed: s.top_k(x, 50),
        "softmax": lambda s, x, seed: s.softmax(x),
        "filter": lambda s, x, seed: s.filter_logits(x, top_k=50, top_p=0.9),
    }
    for (name, call), rows, std in itertools.product(operations.items(), (1, 64, 512), (4.0, 1.0)):
        for dtype in (np.dtype(np.float32), BFLOAT16):
            if dtype == np.float32 or rows == 64:
                yield sample(name, rows, 128256, std, dtype, call)


def random_cases(rng: np.random.Generator, count: int) -> Iterator[Case]:
    """Calls that no table lists."""
    for _ in range(count):
        dim = int(rng.choice([32, 64, 80, 96, 128, 192, 256]))
        group, heads_kv = int(rng.choice([1, 2, 4, 8, 16])), int(rng.choice([1, 2, 4, 8]))
        heads = (group * heads_kv, heads_kv)
        if rng.random() < 0.5:
            seqlen_q, seqlen_k = np.exp(rng.uniform(np.log(16), np.log(16384), 2)).astype(int)
            batch = max(1, min(64, int(2**28 / seqlen_q / seqlen_k / heads[0])))
            causal = bool(rng.random() < 0.5)
            if causal:  # every query sees a key
                seqlen_q, seqlen_k = sorted((seqlen_q, seqlen_k))
            tag = f"random {batch}x{seqlen_q}x{seqlen_k} {heads} {dim} {causal=}"
            yield forward(tag, batch, (int(seqlen_q), int(seqlen_k)), heads, dim, causal=causal)
        else:
            length = int(np.exp(rng.uniform(np.log(100), np.log(300_000))))
            batch = int(np.exp(rng.uniform(0, np.log(min(512, max(1, 2**22 / length))))))
            lens = rng.integers(1, length + 1, batch)
            lens[0] = length
            tokens = int(rng.choice([1, 1, 1, 2, 5]))
            page_size = rng.choice([None, 16, 64])
            tag = f"random {batch}x{length} tokens {tokens} {heads} {dim} pages {page_size}"
            yield decode(
                tag,
                np.maximum(lens, tokens),
                heads,
                dim,
                tokens=tokens,
                page_size=None if page_size is None else int(page_size),
            )


def load(checkout: pathlib.Path, folder: pathlib.Path) -> Any:
    """The package of another checkout under another name, ``cuattn_before``."""
    package = folder / "cuattn_before"
    shutil.copytree(checkout / "cuattn", package)
    shutil.copytree(checkout / "rawkernels", folder / "rawkernels")
    for file in package.rglob("*.py"):
        text = re.sub(r"\bcuattn\b(?!_)", "cuattn_before", file.read_text(encoding="utf-8"))
        file.write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    return importlib.import_module("cuattn_before")


def compare(case: Case, before: Any) -> dict[str, Any]:
    """Race one case, with the kernels before in it twice: how far these two are apart is what the
    figure is worth."""
    call = case.prepare()
    arrays = [out if isinstance(out, tuple) else (out,) for out in (call(before), call(cuattn))]
    same = all(
        bool((a == b).all()) or a.tobytes() == b.tobytes() for a, b in zip(*arrays, strict=True)
    )
    contestants = [
        timing.captured(name, [lambda package=package: call(package)])
        for name, package in (("before", before), ("now", cuattn), ("again", before))
    ]
    seconds = timing.race_alone(contestants, rounds=12, turn=4e-3)
    old, again, now = (seconds[name] for name in ("before", "again", "now"))
    return {
        "case": case.name,
        "ratio": (old * again) ** 0.5 / now,
        "noise": abs(math.log(old / again)),
        "before_us": old * 1e6,
        "again_us": again * 1e6,
        "now_us": now * 1e6,
        "same_bits": same,
    }


def main(argv: list[str] | None = None) -> int:
    """Compare, print a line a case and the worst, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("checkout", type=pathlib.Path, help="a folder with the other commit")
    parser.add_argument("--only", default="", help="a regular expression for the cases' names")
    parser.add_argument("--random", type=int, default=0, help="how many random calls to add")
    parser.add_argument("--seed", type=int, default=None, help="of the random calls")
    parser.add_argument("--least", type=float, default=0.98, help="the smallest ratio that passes")
    parser.add_argument("--json", type=pathlib.Path, help="where the rows go")
    arguments = parser.parse_args(argv)
    seed = np.random.SeedSequence().entropy % 2**32 if arguments.seed is None else arguments.seed
    print(f"random calls: --seed={seed}", flush=True)
    cases = [*table_cases(), *random_cases(np.random.default_rng(seed), arguments.random)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        before = load(arguments.checkout, pathlib.Path(folder))
        chosen = [case for case in cases if re.search(arguments.only, case.name)]
        for number, case in enumerate(chosen, start=1):
            try:
                row = compare(case, before)
            except Exception as error:  # the other cases are worth having
                row = {"case": case.name, "ratio": 0.0, "error": f"{type(error).__name__}: {error}"}
            rows.append(row)
            figures = row.get("error") or (
                f"{row['before_us']:9.1f} -> {row['now_us']:9.1f} us (noise {row['noise']:.3f})"
                f"{'' if row['same_bits'] else '  other bits'}"
            )
            print(
                f"[{number}/{len(chosen)}] {row['ratio']:.3f} {case.name:60} {figures}", flush=True
            )
            cupy.get_default_memory_pool().free_all_blocks()
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    good = [row["ratio"] for row in rows if row["ratio"] > 0]
    mean = math.exp(sum(map(math.log, good)) / len(good)) if good else 0.0
    low = sorted((r for r in rows if r["ratio"] < arguments.least), key=lambda r: r["ratio"])
    sure = [row for row in low if row["ratio"] + row.get("noise", 0.0) < arguments.least]
    print(
        f"{len(rows)} cases, geometric mean {mean:.3f}; {len(low)} below {arguments.least}, "
        f"{len(sure)} of them by more than their noise"
    )
    for row in low:
        said = row.get("error") or f"noise {row['noise']:.3f}"
        print(f"  {row['ratio']:.3f} {row['case']}: {said}")
    return 1 if sure else 0


if __name__ == "__main__":
    sys.exit(main())
