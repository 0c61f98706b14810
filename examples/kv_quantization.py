"""What a quantised cache costs in accuracy: SmolLM2-135M over each way to store keys and values.

    python examples/kv_quantization.py                       # the table, and kv_quantization.png
    python examples/kv_quantization.py --tokens 1024         # of more text
    python examples/kv_quantization.py --text FILE           # of another text

The model reads a text with every key and value stored in one way, those of the token that is
being read included, and what it predicts is compared with what it predicts over a float32 cache:
perplexity, the Kullback-Leibler divergence in nats a token, and how often the likeliest token is
the same. The second table adds a constant vector to all keys of the first and last layers, which
changes no attention weight but takes up the range of the codes, as the biases of Qwen2's keys do:
there an offset, or more bits for keys, is what helps.

The model (93 MB) is fetched with pip at the first run; the text is this project's documentation.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import generate
import llama
import numpy as np

from cuattn import KVQuantization

DOCS = Path(__file__).parent.parent / "docs"
PLAIN = "float32"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", metavar="N", type=generate.between(2), default=512)
    parser.add_argument("--text", metavar="FILE", type=Path, help="what is read")
    parser.add_argument("--plot", metavar="FILE", type=Path, default=Path("kv_quantization.png"))
    parser.add_argument("--only", metavar="NAME", action="append", help="rows whose names have it")
    parser.add_argument("--device", choices=("cpu", "gpu", "auto"), default="auto")
    arguments = parser.parse_args()
    xp = generate.array_module(arguments.device)
    metadata, weights = generate.smollm2()
    model = llama.Llama(metadata, {name: xp.asarray(array) for name, array in weights.items()})
    ids = llama.Tokenizer(metadata).encode(text(arguments.text))[: arguments.tokens]

    reading = Reading(model, ids)
    exact = reading.predict(None)
    ways = {PLAIN: None, **dict(known_ways(model, reading))}
    planted = dict(planted_ways(model))
    if arguments.only:
        ways, planted = (
            {
                name: way
                for name, way in each.items()
                if any(part in name for part in arguments.only)
            }
            for each in (ways, planted)
        )
    from tqdm import tqdm

    bar = tqdm(total=len(ways) + len(planted), desc="Reading", unit=" caches", leave=False)
    rows = []
    for name, way in ways.items():
        rows.append(compare(name, reading, exact, way))
        bar.update()
    constant = constant_key(model)
    rows_of_planted = []
    for name, way in planted.items():
        rows_of_planted.append(compare(name, reading, exact, way, constant))
        bar.update()
    bar.close()
    show(f"{len(ids)} tokens", rows)
    show("With a constant key", rows_of_planted)
    plot(arguments.plot, rows)


def text(file: Path | None) -> str:
    """The text that is read."""
    files = [file] if file else [DOCS / "tutorial.md", *sorted((DOCS / "guides").glob("*.md"))]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@dataclasses.dataclass
class Row:
    """One way to store keys and values, and what came of it."""

    name: str
    bytes: float  # of a token's keys and values in a layer
    perplexity: float
    divergence: float  # nats a token
    agreement: float


class Reading:
    """A text, and the model that reads it."""

    def __init__(self, model: llama.Llama, ids: list[int]) -> None:
        self.model, self.ids = model, ids
        self.bytes = 0.0

    def predict(self, way: KVQuantization | None, constant: Any = None) -> Any:
        """The logarithms of the probabilities of each next token, over a cache of that kind."""
        model, ids = self.model, self.ids
        cache = self.cache = model.cache(len(ids) + llama.PAGE_SIZE, np.float32, way)
        if constant is not None:
            write = cache.write

            def write_more(layer: int, sequences: list[int], k: Any, v: Any) -> None:
                write(layer, sequences, k + constant[layer], v)

            cache.write = write_more
        self.bytes = cache.nbytes / (cache.num_layers * cache.num_pages * cache.page_size)
        logits = model(cache, [cache.add_sequence()], [ids], [len(ids)])
        logits -= logits.max(axis=-1, keepdims=True)
        logits -= model.xp.log(model.xp.exp(logits).sum(axis=-1, keepdims=True))
        return logits


def compare(
    name: str, reading: Reading, exact: Any, way: KVQuantization | None, constant: Any = None
) -> Row:
    """Read with a cache of one kind, and compare with float32's predictions."""
    xp = reading.model.xp
    got = reading.predict(way, constant)
    next_ids = xp.asarray(reading.ids[1:])
    loss = -got[xp.arange(len(next_ids)), next_ids].mean()
    divergence = (xp.exp(exact) * (exact - got)).sum(axis=-1).mean()
    agreement = (got.argmax(axis=-1) == exact.argmax(axis=-1)).mean()
    return Row(
        name, reading.bytes, float(xp.exp(loss)), max(float(divergence), 0.0), float(agreement)
    )


def known_ways(model: llama.Llama, reading: Reading) -> Iterator[tuple[str, KVQuantization]]:
    """Formats, scales and rotations by name."""
    yield "int8", KVQuantization("int8", "int8")
    yield "int8, K not rotated", KVQuantization("int8", "int8", rotate_k=False)
    yield "float8_e4m3", KVQuantization("float8_e4m3", "float8_e4m3")
    yield "float8_e5m2", KVQuantization("float8_e5m2", "float8_e5m2")
    yield "k8v4", KVQuantization("int8", "int4")
    yield "k8v4, groups of 32", KVQuantization("int8", "int4", group_size=32)
    yield "int4", KVQuantization("int4", "int4")
    yield "int4, K not rotated", KVQuantization("int4", "int4", rotate_k=False)
    yield "int4, groups of 32", KVQuantization("int4", "int4", group_size=32)
    yield "float32 K, int4 V", KVQuantization(None, "int4")
    yield "int4 K, float32 V", KVQuantization("int4", None)
    # Given scales: the largest of each head, or of each of its channels, in the text itself.
    of_heads, of_channels = [], []
    for k, v in (reading.cache.pages(layer) for layer in range(len(model.layers))):
        used = slice(0, len(reading.ids) // llama.PAGE_SIZE)
        k, v = (abs(pages[used]).max(axis=(0, 1)) / 127 for pages in (k, v))
        of_heads.append([part.max(axis=-1, keepdims=True) for part in (k, v)])
        of_channels.append(k)
    xp = model.xp
    k_scale, v_scale = (xp.stack([pair[i] for pair in of_heads]) for i in range(2))
    yield (
        "int8, by head",
        KVQuantization("int8", "int8", rotate_k=False, k_scale=k_scale, v_scale=v_scale),
    )
    yield (
        "int8, K by channel",
        KVQuantization("int8", "int8", rotate_k=False, k_scale=xp.stack(of_channels)),
    )


def constant_key(model: llama.Llama) -> Any:
    """A vector for each layer and head, which is added to all keys: large in the first and last
    layers."""
    shape = len(model.layers), model.heads_kv, model.head_dim
    constant = np.zeros(shape, np.float32)
    large = np.random.default_rng(0).standard_normal((2, *shape[1:])) * 60
    constant[[0, -1]] = large
    return model.xp.asarray(constant)


def planted_ways(model: llama.Llama) -> Iterator[tuple[str, KVQuantization | None]]:
    """What helps against a constant key."""
    offset = constant_key(model)
    yield PLAIN, None
    for name, k, v in (
        ("int8", "int8", "int8"),
        ("k8v4", "int8", "int4"),
        ("int4", "int4", "int4"),
    ):
        yield name, KVQuantization(k, v)
        yield f"{name} with its offset", KVQuantization(k, v, k_offset=offset)


def show(title: str, rows: list[Row]) -> None:
    """Print a table."""
    if not rows:
        return
    print(f"\n| {title} | bytes | perplexity | KL | same token |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row.name} | {row.bytes:.0f} | {row.perplexity:.3f} | {row.divergence:.4f} | "
            f"{row.agreement:.3f} |"
        )


def plot(file: Path, rows: list[Row]) -> None:
    """Draw divergence against bytes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if PLAIN not in row.name and row.divergence > 0]
    if not rows:
        return
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axis.scatter([row.bytes for row in rows], [row.divergence for row in rows])
    for row in rows:
        axis.annotate(
            row.name, (row.bytes, row.divergence), (5, 3), textcoords="offset points", fontsize=8
        )
    axis.set(
        xlabel="bytes of a token's keys and values in a layer",
        ylabel="KL divergence from float32, nats a token",
        yscale="log",
    )
    axis.margins(x=0.2, y=0.1)
    figure.savefig(file, dpi=150)
    print(f"\n{file}")


if __name__ == "__main__":
    main()
