"""Train a small transformer to write tales, character by character, without torch or JAX: every
gradient of attention is cuattn's, the rest is NumPy, or CuPy on a GPU.

    python examples/train_chars.py                      # two minutes on two CPU cores
    python examples/train_chars.py --text my_book.txt   # learns from another text
    python examples/train_chars.py --plot loss.png      # where the loss curve goes
    python examples/train_chars.py --dtype bfloat16     # on a GPU, where a step is one CUDA graph

A layer is a function that returns its result and a pullback, which takes the result's gradient back
to the layer's inputs and weights: as :func:`cuattn.flash_attention_vjp` does. The model is a
transformer with pre-norm blocks; ALiBi tells positions apart, so that there is no embedding of
positions and samples may be longer than what was seen in training.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import string
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

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
    text = read(arguments.text) if arguments.text else tales(TALES)
    alphabet = sorted(set(text))
    tokens = np.array([alphabet.index(c) for c in text], np.int32)
    held_out = len(tokens) // 20  # the end of the text, which training does not see
    train, test = xp.asarray(tokens[: len(tokens) - held_out]), xp.asarray(tokens[-held_out:])
    if len(train) <= arguments.context or held_out < 2:
        sys.exit(f"--text has {len(text)} characters: too few for --context {arguments.context}")

    rng = np.random.default_rng(arguments.seed)
    model = Model(
        xp, rng, len(alphabet), arguments.features, arguments.layers, arguments.heads,
        dropout=arguments.dropout, dtype=arguments.dtype,
    )  # fmt: skip
    count = sum(w.size for w in model.weights.values())
    device = "the CPU" if xp is np else "a GPU"
    print(f"{len(text)} characters, {len(alphabet)} different; {count} weights, on {device}")
    trainer = Trainer(model, arguments.batch, arguments.context)
    losses, start = [], time.perf_counter()
    progress = tqdm(range(arguments.steps), unit="step", disable=None)
    for step in progress:
        inputs, targets = batch_of(rng, train, arguments.batch, arguments.context)
        losses.append(trainer.step(inputs, targets, rate(step, arguments.steps, arguments.rate)))
        if step % 10 == 0:
            progress.set_postfix(loss=f"{float(losses[-1]):.3f}")
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
    if arguments.samples and arguments.sample:
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
    arguments = parser.parse_args()
    least = dict.fromkeys(("steps", "batch", "context", "layers", "features", "heads"), 1)
    for name, low in {**least, "dropout": 0, "samples": 0, "sample": 0, "seed": 0}.items():
        if getattr(arguments, name) < low:
            parser.error(f"--{name} is {getattr(arguments, name)}, must be at least {low}")
    if arguments.features % arguments.heads:
        parser.error(f"--heads is {arguments.heads}, must divide --features, {arguments.features}")
    if arguments.dropout >= 1:
        parser.error(f"--dropout is {arguments.dropout}, must be less than 1")
    if arguments.plot and not Path(arguments.plot).parent.is_dir():
        parser.error(f"--plot is {arguments.plot}, must be in a folder that is there")
    return arguments


def read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"--text {path}: {error}")


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


class Formula:
    """An expression of arrays, element by element, that is Python and CUDA C++ alike: NumPy
    evaluates it operation by operation; on a GPU it is one kernel, which reads and writes memory
    once. Arrays of 16 bits count as float32.

    >>> Formula("x * x + y")(x=..., y=..., dtype=np.float32)
    """

    FUNCTIONS: ClassVar = {"fmaxf": np.maximum, "powf": np.power, "sqrtf": np.sqrt}

    def __init__(self, expression: str) -> None:
        self.expression, self.code = expression, compile(expression, "a formula", "eval")
        self.kernels: dict = {}  # by which values are arrays

    def __call__(self, *, dtype: Any = None, out: Array = None, **values: Any) -> Array:
        """A new array of `dtype`, the first value's by default; or `out`."""
        first = next(iter(values.values()))
        dtype = first.dtype if dtype is None else dtype
        if isinstance(first, np.ndarray):
            exact = {name: np.float32(v) if is_narrow(v) else v for name, v in values.items()}
            result = eval(self.code, self.FUNCTIONS | exact).astype(dtype, copy=False)
            if out is None:
                return result
            out[...] = result
            return out
        arrays = tuple(hasattr(value, "shape") for value in values.values())
        if arrays not in self.kernels:
            self.kernels[arrays] = self.compiled(dict(zip(values, arrays, strict=True)))
        if out is None:
            shapes = [v.shape for v in values.values() if hasattr(v, "shape")]
            out = type(first)(np.broadcast_shapes(*shapes), dtype)
        return self.kernels[arrays](*values.values(), out)

    def compiled(self, is_array: dict[str, bool]) -> Callable:
        """The kernel of values that are arrays of any type, or numbers."""
        import cupy

        parameters, floats = [], ""
        for letter, (name, array) in zip(string.ascii_uppercase, is_array.items(), strict=False):
            parameters.append(f"{letter if array else 'float32'} {name}_")
            floats += f"const float {name} = static_cast<float>({name}_); "
        code = f"{floats}out = static_cast<Z>({self.expression});"
        name = re.sub(r"\W+", "_", f"formula {self.expression}")  # as profilers show it
        return cupy.ElementwiseKernel(", ".join(parameters), "Z out", code, name)


def is_narrow(value: Any) -> bool:
    """Whether a value is an array of 16 bits."""
    return getattr(value, "dtype", np.dtype(np.float32)).itemsize == 2


added = Formula("x + y")
inverse_rms = Formula("1 / sqrtf(norm * norm / width + epsilon)")
scaled = Formula("x * inverse * w")
normed_gradient = Formula("inverse * (dout * w - x * along) + skip")
squared_relu_of = Formula("x * fmaxf(x, 0)")
squared_relu_gradient = Formula("2 * fmaxf(x, 0) * dout")


def product(a: Array, b: Array) -> Array:
    """``a @ b`` of two matrices of one dtype."""
    if isinstance(a, np.ndarray):
        return a @ b
    import cublas_matmul

    return cublas_matmul.matmul(a, b)


def linear(x: Array, w: Array) -> tuple[Array, Callable]:
    """``x @ w`` of x (rows, features), both of the dtype in which products are computed."""

    def pullback(dout: Array) -> tuple[Array, Array]:
        dout = dout.astype(w.dtype, copy=False)
        return product(dout, w.T), product(x.T, dout)

    return product(x, w), pullback


def rms_norm(xp: ModuleType, x: Array, w: Array, dtype: Any) -> tuple[Array, Callable]:
    """``w * x / sqrt(mean(x**2))`` of x (rows, features), in `dtype`."""
    width = x.shape[1]
    norm = xp.linalg.norm(x, axis=1, keepdims=True)
    inverse = inverse_rms(norm=norm, width=width, epsilon=1e-5)

    def pullback(dout: Array, skip: Array) -> tuple[Array, Array]:
        """`skip`: x's gradient by way of what bypasses the norm, which is added."""
        unscaled = scaled(x=x, inverse=inverse, w=dout)
        along = scaled(x=product(unscaled, w[:, None]), inverse=inverse, w=1 / width)
        dx = normed_gradient(x=x, inverse=inverse, w=w, dout=dout, along=along, skip=skip)
        return dx, product(xp.ones((1, len(x)), x.dtype), unscaled)[0]

    return scaled(x=x, inverse=inverse, w=w, dtype=dtype), pullback


def attention(
    xp: ModuleType, qkv: Array, batch: int, heads: int, slopes: Array, **options: Any
) -> tuple[Array, Callable]:
    """Causal self-attention of qkv (batch * tokens, 3 * features)."""
    q, k, v = qkv.reshape(batch, len(qkv) // batch, 3, heads, -1).transpose(2, 0, 1, 3, 4)
    out, attention_pullback = cuattn.flash_attention_vjp(
        q, k, v, causal=True, alibi_slopes=slopes, **options
    )

    def pullback(dout: Array) -> Array:
        grads = attention_pullback(dout.reshape(out.shape))
        dqkv = xp.empty((*out.shape[:2], 3, *out.shape[2:]), qkv.dtype)
        dqkv[:, :, 0], dqkv[:, :, 1], dqkv[:, :, 2] = grads.dq, grads.dk, grads.dv
        return dqkv.reshape(qkv.shape)

    return out.reshape(len(qkv), -1), pullback


def squared_relu(x: Array) -> tuple[Array, Callable]:
    """``max(x, 0) ** 2``."""
    return squared_relu_of(x=x), lambda dout: squared_relu_gradient(x=x, dout=dout)


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
        """Logits (batch * tokens, alphabet) of tokens (batch, tokens), and the pullback to all
        weights. `seed` is that of the dropout, which there is none of without one."""
        xp, dtype, batch, w, pullbacks = self.xp, self.dtype, len(tokens), self.weights, []
        narrow = {n: m.astype(dtype, copy=False) for n, m in w.items() if m.ndim == 2}
        tokens = tokens.reshape(-1)
        x = w["embedding"][tokens]
        for i in range(self.layers):
            dropout = {"dropout": self.dropout, "seed": seed * self.layers + i} if seed else {}
            h, norm1 = rms_norm(xp, x, w[f"norm1.{i}"], dtype)
            qkv, project = linear(h, narrow[f"qkv.{i}"])
            mixed, attend = attention(xp, qkv, batch, self.heads, self.slopes, **dropout)
            update, out = linear(mixed, narrow[f"out.{i}"])
            x = added(x=x, y=update)
            h, norm2 = rms_norm(xp, x, w[f"norm2.{i}"], dtype)
            hidden, up = linear(h, narrow[f"up.{i}"])
            active, activate = squared_relu(hidden)
            update, down = linear(active, narrow[f"down.{i}"])
            x = added(x=x, y=update)
            pullbacks.append((norm1, project, attend, out, norm2, up, activate, down))
        h, norm = rms_norm(xp, x, w["norm"], dtype)
        logits, head = linear(h, narrow["head"])

        def pullback(dlogits: Array) -> Weights:
            grads: Weights = {}
            dh, grads["head"] = head(dlogits)
            dx, grads["norm"] = norm(dh, xp.zeros(1, dh.dtype))
            for i in reversed(range(self.layers)):
                norm1, project, attend, out, norm2, up, activate, down = pullbacks[i]
                dactive, grads[f"down.{i}"] = down(dx.astype(dtype, copy=False))
                dh, grads[f"up.{i}"] = up(activate(dactive))
                dx, grads[f"norm2.{i}"] = norm2(dh, dx)
                dmixed, grads[f"out.{i}"] = out(dx.astype(dtype, copy=False))
                dh, grads[f"qkv.{i}"] = project(attend(dmixed))
                dx, grads[f"norm1.{i}"] = norm1(dh, dx)
            # Rows of an embedding are added up by a product, which has one order, on any device.
            chosen = tokens == xp.arange(len(w["embedding"]))[:, None]
            grads["embedding"] = product(chosen.astype(dx.dtype), dx)
            return grads

        return logits.astype(x.dtype, copy=False).reshape(batch, -1, logits.shape[1]), pullback

    def loss(self, inputs: Array, targets: Array, seed: int = 0) -> tuple[Array, Callable]:
        """Mean loss of predicting `targets` (batch, tokens), and the pullback to all weights."""
        logits, model_pullback = self(inputs, seed)
        flat = logits.reshape(-1, logits.shape[-1])
        loss, loss_pullback = cross_entropy(self.xp, flat, targets.reshape(-1))
        return loss, lambda: model_pullback(loss_pullback())


class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019) of matrices, and gradients
    clipped to a norm of 1. All weights are moved into one array, of which `weights` has views from
    then on: so a step is the same few operations for any number of weights."""

    MEAN = Formula("beta * mean + (1 - beta) * clip * grad")
    SQUARE = Formula("beta * square + (1 - beta) * clip * clip * grad * grad")
    BIAS = Formula("1 - powf(beta, step)")
    MOVED = Formula(
        "w * (1 - rate * decay) - rate / first * mean / (sqrtf(square / second) + epsilon)"
    )

    def __init__(
        self, xp: ModuleType, weights: Weights, betas: tuple = (0.9, 0.98), decay: float = 0.1
    ) -> None:
        self.xp, self.betas = xp, betas
        self.step = xp.zeros((), np.float32)
        self.values = xp.concatenate([w.reshape(-1) for w in weights.values()])
        self.grads, self.means, self.squares, self.decay = (
            xp.zeros_like(self.values) for _ in range(4)
        )
        self.slices, begin = {}, 0
        for name, w in weights.items():
            self.slices[name] = mine = slice(begin, begin + w.size)
            weights[name] = self.values[mine].reshape(w.shape)
            self.decay[mine] = decay if w.ndim == 2 else 0
            begin += w.size

    def update(self, grads: Weights, rate: float | Array) -> None:
        """Move the weights, in place."""
        for name, mine in self.slices.items():
            self.grads[mine] = grads[name].reshape(-1)
        self.step += 1
        clip = 1 / self.xp.maximum(self.xp.linalg.norm(self.grads), 1)
        average = {"grad": self.grads, "clip": clip}
        for old, formula, name, beta in (
            (self.means, self.MEAN, "mean", self.betas[0]),
            (self.squares, self.SQUARE, "square", self.betas[1]),
        ):
            formula(**{name: old}, **average, beta=beta, out=old)
        first, second = (self.BIAS(step=self.step, beta=beta) for beta in self.betas)
        self.MOVED(
            w=self.values, mean=self.means, square=self.squares, decay=self.decay,
            rate=rate, first=first, second=second, epsilon=1e-8, out=self.values,
        )  # fmt: skip


class Trainer:
    """Steps of training. On a GPU the whole step, gradients and AdamW included, becomes a CUDA
    graph: cuattn's calls keep nothing between them and never wait, so that they may be captured
    like any kernel. A replay costs the host a launch. (Not with dropout, whose seed is new in each
    step.)"""

    def __init__(self, model: Model, batch: int, context: int) -> None:
        xp = model.xp
        self.model, self.adam, self.graph = model, AdamW(xp, model.weights), None
        self.inputs, self.targets = (xp.zeros((batch, context), np.int32) for _ in range(2))
        self.rate, self.loss = (xp.zeros((), np.float32) for _ in range(2))
        self.seed = 0

    def step(self, inputs: Array, targets: Array, rate: float) -> Array:
        """Move the weights by one batch, (batch, context) both; the loss before."""
        self.inputs[...], self.targets[...], self.rate[...] = inputs, targets, rate
        self.seed += 1
        if self.graph is not None:
            self.graph.launch()
        elif self.model.xp is np or self.model.dropout or self.seed == 1:
            self.run()  # the first step compiles the kernels
        else:
            self.capture()
            self.graph.launch()
        return self.loss.copy()

    def run(self) -> None:
        """One step of what :meth:`step` has prepared."""
        loss, pullback = self.model.loss(self.inputs, self.targets, seed=self.seed)
        self.adam.update(pullback(), self.rate)
        self.loss[...] = loss

    def capture(self) -> None:
        """Record what `run` launches."""
        import cupy

        # What the graph uses between its kernels must be nobody else's.
        self.memory = cupy.cuda.MemoryPool()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream, cupy.cuda.using_allocator(self.memory.malloc):
            stream.begin_capture()
            self.run()
            self.graph = stream.end_capture()


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
