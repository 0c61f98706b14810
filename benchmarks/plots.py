"""Recorded figures -> the pictures of the README and of the documentation."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

#: The contestants in order, and their colours.
COLOURS = {
    "cuattn": "#d1495b",
    "cuattn sm80": "#edae9f",
    "cuattn simt": "#f5d9cf",
    "FA-2": "#9fb1bd",
    "cuDNN": "#66829a",
    "FA-3": "#2e4057",
}


@contextmanager
def figure(file: pathlib.Path, rows: int, columns: int, width: float) -> Iterator[tuple[Any, Any]]:
    """A figure and its panels, drawn by the caller and then written to a file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(
        rows, columns, figsize=(width, 2.6 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    yield drawn, axes
    file.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(file, dpi=150)
    plt.close(drawn)


def speeds(rows: dict[str, list[dict[str, Any]]], file: pathlib.Path) -> None:
    """Draw bars of TFLOP/s over seqlen: a row of panels for each list of records, by its name, and
    a column for each head_dim."""
    records = [r for row in rows.values() for r in row]
    head_dims = sorted({r["head_dim"] for r in records})
    seqlens = sorted({r["seqlen"] for r in records})
    names = [name for name in COLOURS if any(name in r["tflops"] for r in records)]
    top = max(speed for r in records for speed in r["tflops"].values())
    with figure(file, len(rows), len(head_dims), 3.6 * len(head_dims)) as (drawn, axes):
        for panels, (title, row) in zip(axes, rows.items(), strict=True):
            for axis, head_dim in zip(panels, head_dims, strict=True):
                cells = {r["seqlen"]: r["tflops"] for r in row if r["head_dim"] == head_dim}
                for i, name in enumerate(names):
                    offset = (i - (len(names) - 1) / 2) * 0.8 / len(names)
                    heights = [cells.get(s, {}).get(name, 0) for s in seqlens]
                    places = [place + offset for place in range(len(seqlens))]
                    axis.bar(places, heights, 0.8 / len(names), label=name, color=COLOURS[name])
                axis.axhline(max(r["matmul_tflops"] for r in row), **_CEILING)
                axis.set_xticks(range(len(seqlens)), [str(s) for s in seqlens])
                axis.set_title(f"{title}, head_dim {head_dim}", fontsize=10)
                axis.set_ylim(0, 1.05 * top)
            panels[0].set_ylabel("TFLOP/s")
        for axis in axes[-1]:
            axis.set_xlabel("sequence length")
        handles, labels = axes[0][0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside upper center", ncols=len(names), frameon=False)
        drawn.supxlabel(
            f"{records[0]['dtype']}, {records[0]['machine']['gpu']}; "
            "dotted: cuBLAS matmul in the same process",
            fontsize=9,
        )


def random_shapes(
    forward: list[dict[str, Any]],
    decoding: list[dict[str, Any]],
    latents: list[dict[str, Any]],
    file: pathlib.Path,
) -> None:
    """Draw cuattn's speed over the best peer's, a dot for each shape that was drawn at random:
    forward over its FLOPs, decoding over the bytes of its keys and values, or latents."""
    panels = [("forward", "floating-point operations of a call", [(_flops(r), r) for r in forward])]
    panels.append(("decoding", "bytes of K and V", [(_bytes(r), r) for r in decoding]))
    if latents:
        panels.append(("latent attention", "bytes of latents", [(_bytes(r), r) for r in latents]))
    with figure(file, 1, len(panels), 4.5 * len(panels)) as (drawn, axes):
        for axis, (title, label, points) in zip(axes[0], panels, strict=True):
            compared = [(x, r["of_best"]) for x, r in points if r.get("of_best")]
            axis.plot(*zip(*compared, strict=True), "o", color=COLOURS["cuattn"], alpha=0.8)
            axis.axhline(1, **_CEILING)
            drawn_by = f"seed {points[0][1]['seed']}, commit {points[0][1]['commit'][:7]}"
            axis.set_title(f"{title} ({drawn_by})", fontsize=10)
            axis.set(xlabel=label, xscale="log", yscale="log")
            ticks = (0.5, 0.7, 1, 1.4, 2)
            axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.set_yticks([], minor=True)
        axes[0][0].set_ylabel("times the best peer's speed")
        drawn.supxlabel(
            f"shapes drawn at random, {forward[0]['machine']['gpu']}; peers: FA-2, FA-3, cuDNN"
            + ", FlashMLA" * bool(latents),
            fontsize=9,
        )


def caches(records: Iterable[dict[str, Any]], file: pathlib.Path) -> None:
    """Draw the time of decoding over caches by format, of 16 bits' in the same call."""
    shapes = {tuple(r["shape"]): r["microseconds"] for r in records}
    names = list(next(iter(shapes.values())))
    with figure(file, 1, 1, 9) as (drawn, axes):
        axis = axes[0][0]
        for i, name in enumerate(names):
            places = [s + (i - (len(names) - 1) / 2) * 0.8 / len(names) for s in range(len(shapes))]
            heights = [times[names[0]] / times[name] for times in shapes.values()]
            shade = (*_rgb(COLOURS["cuattn"]), 1 - 0.8 * i / len(names))
            axis.bar(places, heights, 0.8 / len(names), label=name, color=shade)
        axis.set_xticks(range(len(shapes)), [f"{batch} × {length}" for batch, length in shapes])
        axis.set(xlabel="sequences × keys", ylabel=f"times the speed of {names[0]}")
        drawn.legend(loc="outside upper center", ncols=len(names), frameon=False)


_CEILING = {"color": "black", "linewidth": 0.8, "linestyle": ":"}


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def _flops(record: dict[str, Any]) -> float:
    if "flops" in record:
        return record["flops"]
    shape = record["shape"]
    pairs = shape["seqlen"] ** 2 / (2 if shape["causal"] else 1)
    return 4 * shape["batch"] * shape["heads"][0] * pairs * shape["head_dim"]


def _bytes(record: dict[str, Any]) -> float:
    return record["megabytes"] * 2**20
