"""Train a small transformer to write tales, character by character, without torch or JAX: every
gradient of attention is cuattn's, the rest is NumPy, or CuPy on a GPU.

    python examples/train_chars.py                      # two minutes on two CPU cores
    python examples/train_chars.py --text my_book.txt   # learns from another text
    python examples/train_chars.py --plot loss.png      # where the loss curve goes

A layer is a function that returns its result and a pullback, which takes the result's gradient back
to the layer's inputs and weights: as :func:`cuattn.flash_attention_vjp` does. The model is a
transformer with pre-norm blocks; ALiBi tells positions apart, so that there is no embedding of
positions and samples may be longer than what was seen in training.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# OpenBLAS's threads spin between products, which are small here, beside the threads of attention.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import ml_dtypes
import numpy as np
from tales import tales
from tqdm import tqdm

import cuattn
from cuattn import sampling

Array = Any  # of NumPy or CuPy
Weights = dict[str, Array]
TALES = 1500  # some 600 kB


def main() -> None:
    arguments = parse_arguments()
    xp = array_module(arguments.device)
    text = Path(arguments.text).read_text(encoding="utf-8") if arguments.text else tales(TALES)
    alphabet = sorted(set(text))
    tokens = np.array([alphabet.index(c) for c in text], np.int32)
    held_out = len(tokens) // 20  # the end of the text, which training does not see
    train, test = xp.asarray(tokens[:-held_out]), xp.asarray(tokens[-held_out:])

    rng = np.random.default_rng(arguments.seed)
    model = Model(
        xp, rng, len(alphabet), arguments.features, arguments.layers, arguments.heads,
        dropout=arguments.dropout, dtype=arguments.dtype,
    )  # fmt: skip
    count = sum(w.size for w in model.weights.values())
    device = "the CPU" if xp is np else "a GPU"
    print(f"{len(text)} characters, {len(alphabet)} different; {count} weights, on {device}")
    adam = AdamW(model.weights)
    losses, start = [], time.perf_counter()
    progress = tqdm(range(arguments.steps), unit="step", disable=None)
    for step in progress:
        inputs, targets = batch_of(rng, train, arguments.batch, arguments.context)
        loss, pullback = model.loss(inputs, targets, seed=step + 1)
        adam.update(pullback(), rate(step, arguments.steps, arguments.rate))
        losses.append(loss)
        if step % 10 == 0:
            progress.set_postfix(loss=f"{float(loss):.3f}")
    losses = [float(loss) for loss in losses]
    seconds = time.perf_counter() - start
    print(
        f"loss {losses[0]:.3f} -> {np.mean(losses[-20:]):.3f} nats a character in {seconds:.0f} s "
        f"({1e3 * seconds / arguments.steps:.0f} ms a step); "
        f"on unseen text {evaluate(model, rng, test, arguments):.3f}"
    )
    if arguments.plot:
        plot(losses, arguments.plot)
        print(f"loss curve: {arguments.plot}")
    if arguments.sample:
        print("what it writes:\n")
        for written in write(model, alphabet, xp, arguments.sample, arguments.samples):
            print(written.strip(), end="\n\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", help="file to learn from (default: tales of its own)")
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--batch", type=int, default=10, help="sequences of a step")
    parser.add_argument("--context", type=int, default=320, help="characters of a sequence")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--features", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rate", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--dropout", type=float, default=0.0, help="of attention's weights")
    parser.add_argument(
        "--dtype",
        choices=["float32", "float16", "bfloat16"],
        default="float32",
        help="of products and attention; weights and sums stay float32 (16 bit: for GPUs)",
    )
    parser.add_argument("--samples", type=int, default=2, help="texts to write at the end")
    parser.add_argument("--sample", type=int, default=500, help="characters of each")
    parser.add_argument("--plot", default="train_chars.png", help="PNG of the loss; '' for none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    return parser.parse_args()


def array_module(device: str) -> ModuleType:
    """CuPy where there is a GPU, unless the CPU is asked for; else NumPy."""
    if device == "cpu":
        return np
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # no CuPy, no driver, no device: each raises its own
        if device == "gpu":
            sys.exit(f"no GPU: {error}")
        return np
    return cupy


# ----------------------------------------------------------------- layers: a result and a pullback


def linear(x: Array, w: Array, dtype: Any) -> tuple[Array, Callable]:
    """``x @ w`` of x (..., features), multiplied in `dtype`."""
    # One product of matrices is faster than a stack of them.
    rows = x.reshape(-1, x.shape[-1]).astype(dtype, copy=False)
    matrix = w.astype(dtype, copy=False)

    def pullback(dout: Array) -> tuple[Array, Array]:
        drows = dout.reshape(-1, dout.shape[-1]).astype(dtype, copy=False)
        dx, dw = drows @ matrix.T, rows.T @ drows
        return dx.reshape(x.shape).astype(x.dtype, copy=False), dw.astype(w.dtype, copy=False)

    out = (rows @ matrix).reshape(*x.shape[:-1], -1)
    return out.astype(x.dtype, copy=False), pullback


def rms_norm(x: Array, w: Array) -> tuple[Array, Callable]:
    """``w * x / sqrt(mean(x**2))`` of x (..., features)."""
    inverse = 1 / ((x * x).mean(axis=-1, keepdims=True) + 1e-5) ** 0.5
    normed = x * inverse

    def pullback(dout: Array) -> tuple[Array, Array]:
        dnormed = dout * w
        along = (dnormed * normed).mean(axis=-1, keepdims=True)
        dw = (dout * normed).reshape(-1, x.shape[-1]).sum(axis=0)
        return inverse * (dnormed - normed * along), dw

    return normed * w, pullback


def attention(
    qkv: Array, heads: int, slopes: Array, dtype: Any, **options: Any
) -> tuple[Array, Callable]:
    """Causal self-attention of qkv (batch, tokens, 3 * features), computed in `dtype`."""
    batch, tokens, width = qkv.shape
    given = qkv.astype(dtype, copy=False)
    q, k, v = given.reshape(batch, tokens, 3, heads, width // 3 // heads).transpose(2, 0, 1, 3, 4)
    out, attention_pullback = cuattn.flash_attention_vjp(
        q, k, v, causal=True, alibi_slopes=slopes, **options
    )

    def pullback(dout: Array) -> Array:
        grads = attention_pullback(dout.reshape(out.shape).astype(dtype, copy=False))
        dqkv = type(qkv)(shape=(batch, tokens, 3, *out.shape[2:]), dtype=qkv.dtype)
        dqkv[:, :, 0], dqkv[:, :, 1], dqkv[:, :, 2] = grads.dq, grads.dk, grads.dv
        return dqkv.reshape(qkv.shape)

    return out.reshape(batch, tokens, -1).astype(qkv.dtype, copy=False), pullback


def squared_relu(x: Array) -> tuple[Array, Callable]:
    """``max(x, 0) ** 2``."""
    positive = x * (x > 0)
    return positive * positive, lambda dout: 2 * positive * dout


def cross_entropy(xp: ModuleType, logits: Array, targets: Array) -> tuple[Array, Callable]:
    """Mean of -log(softmax(logits)[target]) over logits (tokens, alphabet)."""
    rows = xp.arange(len(targets))
    shifted = logits - logits.max(axis=-1, keepdims=True)
    exponentials = xp.exp(shifted)
    total = exponentials.sum(axis=-1, keepdims=True)
    loss = (xp.log(total[:, 0]) - shifted[rows, targets]).mean()

    def pullback() -> Array:
        dlogits = exponentials / total
        dlogits[rows, targets] -= 1
        return dlogits / len(targets)

    return loss, pullback


# ------------------------------------------------------------------------------------------- model


class Model:
    """A transformer that gives the next character's logits after each character."""

    def __init__(
        self,
        xp: ModuleType,
        rng: np.random.Generator,
        alphabet: int,
        features: int,
        layers: int,
        heads: int,
        *,
        dropout: float = 0.0,
        dtype: str = "float32",
    ) -> None:
        self.xp, self.layers, self.heads, self.dropout = xp, layers, heads, dropout
        self.dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

        def matrix(rows: int, columns: int, scale: float) -> Array:
            return xp.asarray(rng.normal(0, scale, (rows, columns)).astype(np.float32))

        d, scale = features, features**-0.5
        self.weights: Weights = {"embedding": matrix(alphabet, d, 0.5)}
        for i in range(layers):
            self.weights |= {
                f"norm1.{i}": xp.ones(d, np.float32),
                f"qkv.{i}": matrix(d, 3 * d, scale),
                f"out.{i}": matrix(d, d, scale / (2 * layers) ** 0.5),
                f"norm2.{i}": xp.ones(d, np.float32),
                f"up.{i}": matrix(d, 4 * d, scale),
                f"down.{i}": matrix(4 * d, d, scale / (8 * layers) ** 0.5),
            }
        self.weights |= {"norm": xp.ones(d, np.float32), "head": matrix(d, alphabet, scale)}
        # Half of the heads look near, by ALiBi; the others look for what was said before, wherever.
        slopes = 2.0 ** -np.arange(1, 2 * heads, 2)
        slopes[heads // 2 :] = 0
        self.slopes = xp.asarray(slopes.astype(np.float32))

    def __call__(self, tokens: Array, seed: int = 0) -> tuple[Array, Callable]:
        """Logits (batch, tokens, alphabet) of tokens (batch, tokens), and the pullback to all
        weights. `seed` is that of the dropout, which there is none of without one."""
        w, pullbacks = self.weights, []
        x = w["embedding"][tokens]
        for i in range(self.layers):
            dropout = {"dropout": self.dropout, "seed": seed * self.layers + i} if seed else {}
            h, norm1 = rms_norm(x, w[f"norm1.{i}"])
            qkv, project = linear(h, w[f"qkv.{i}"], self.dtype)
            mixed, attend = attention(qkv, self.heads, self.slopes, self.dtype, **dropout)
            update, out = linear(mixed, w[f"out.{i}"], self.dtype)
            x = x + update
            h, norm2 = rms_norm(x, w[f"norm2.{i}"])
            hidden, up = linear(h, w[f"up.{i}"], self.dtype)
            active, activate = squared_relu(hidden)
            update, down = linear(active, w[f"down.{i}"], self.dtype)
            x = x + update
            pullbacks.append((norm1, project, attend, out, norm2, up, activate, down))
        h, norm = rms_norm(x, w["norm"])
        logits, head = linear(h, w["head"], self.dtype)

        def pullback(dlogits: Array) -> Weights:
            grads: Weights = {}
            dh, grads["head"] = head(dlogits)
            dx, grads["norm"] = norm(dh)
            for i in reversed(range(self.layers)):
                norm1, project, attend, out, norm2, up, activate, down = pullbacks[i]
                dactive, grads[f"down.{i}"] = down(dx)
                dh, grads[f"up.{i}"] = up(activate(dactive))
                dmore, grads[f"norm2.{i}"] = norm2(dh)
                dx = dx + dmore
                dmixed, grads[f"out.{i}"] = out(dx)
                dh, grads[f"qkv.{i}"] = project(attend(dmixed))
                dmore, grads[f"norm1.{i}"] = norm1(dh)
                dx = dx + dmore
            # Rows of an embedding are added up by a product, which has one order, on any device.
            chosen = tokens.reshape(-1) == self.xp.arange(len(w["embedding"]))[:, None]
            grads["embedding"] = chosen.astype(np.float32) @ dx.reshape(-1, dx.shape[-1])
            return grads

        return logits, pullback

    def loss(self, inputs: Array, targets: Array, seed: int = 0) -> tuple[Array, Callable]:
        """Mean loss of predicting `targets` (batch, tokens), and the pullback to all weights."""
        logits, model_pullback = self(inputs, seed)
        flat = logits.reshape(-1, logits.shape[-1])
        loss, loss_pullback = cross_entropy(self.xp, flat, targets.reshape(-1))
        return loss, lambda: model_pullback(loss_pullback().reshape(logits.shape))


class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019) of matrices, and gradients
    clipped to a norm of 1."""

    def __init__(self, weights: Weights, betas: tuple = (0.9, 0.98), decay: float = 0.1) -> None:
        self.weights, self.betas, self.decay, self.step = weights, betas, decay, 0
        self.means = {name: 0 * w for name, w in weights.items()}
        self.squares = {name: 0 * w for name, w in weights.items()}

    def update(self, grads: Weights, rate: float) -> None:
        """Move the weights, in place."""
        self.step += 1
        norm = sum((g * g).sum() for g in grads.values()) ** 0.5
        clip = 1 / (norm * (norm > 1) + (norm <= 1))
        first, second = (1 - beta**self.step for beta in self.betas)
        for name, w in self.weights.items():
            grad = grads[name] * clip
            for average, new, beta in zip(
                (self.means[name], self.squares[name]), (grad, grad * grad), self.betas, strict=True
            ):
                average *= beta
                average += (1 - beta) * new
            if w.ndim == 2:
                w *= 1 - rate * self.decay
            w -= rate / first * self.means[name] / ((self.squares[name] / second) ** 0.5 + 1e-8)


def rate(step: int, steps: int, highest: float) -> float:
    """Up in a straight line for 5% of all steps, then down along a cosine to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return highest * (step + 1) / warmup
    along = (step - warmup) / max(1, steps - warmup)
    return highest * (0.55 + 0.45 * math.cos(math.pi * along))


def batch_of(
    rng: np.random.Generator, tokens: Array, batch: int, context: int
) -> tuple[Array, Array]:
    """Random pieces of a text, and each one's next characters: (batch, context) both."""
    starts = rng.integers(0, len(tokens) - context, batch)
    pieces = type(tokens)(shape=(batch, context + 1), dtype=tokens.dtype)
    for i, start in enumerate(starts):
        pieces[i] = tokens[start : start + context + 1]
    return pieces[:, :-1], pieces[:, 1:]


def evaluate(
    model: Model, rng: np.random.Generator, test: Array, arguments: argparse.Namespace
) -> float:
    """Mean loss on some of a text that training has not seen."""
    context = min(arguments.context, len(test) - 1)
    batches = [batch_of(rng, test, arguments.batch, context) for _ in range(4)]
    return float(np.mean([float(model.loss(*batch)[0]) for batch in batches]))


def write(
    model: Model, alphabet: list[str], xp: ModuleType, length: int, count: int
) -> Iterator[str]:
    """Texts that the model goes on writing after an empty line."""
    first = alphabet.index("\n") if "\n" in alphabet else 0
    tokens = xp.full((count, 1), first, np.int32)
    for i in tqdm(range(length), unit="character", leave=False, disable=None):
        logits, _ = model(tokens)
        drawn = sampling.sample(
            xp.ascontiguousarray(logits[:, -1]), temperature=0.7, seed=1, offset=i
        )
        tokens = xp.concatenate([tokens, drawn[:, None].astype(np.int32)], axis=1)
    for row in tokens.tolist():
        yield "".join(alphabet[token] for token in row)


def plot(losses: list[float], path: str) -> None:
    """Draw the loss of every step, and its running mean."""
    import matplotlib.pyplot as plt

    window = max(1, len(losses) // 50)
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(losses, color="#d1495b", alpha=0.3, linewidth=1)
    axis.plot(np.arange(len(smooth)) + window - 1, smooth, color="#d1495b")
    axis.set(xlabel="step", ylabel="loss (nats a character)", ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
