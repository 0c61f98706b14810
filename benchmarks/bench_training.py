"""Training steps of examples/train_chars.py beside the same model in torch: time, and loss.

``pytest benchmarks/bench_training.py --benchmark-json=benchmarks/results/NAME.json``
"""

from __future__ import annotations

import importlib
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks import timing

cupy = pytest.importorskip("cupy")

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
STEPS = 300  # of which the losses are compared
LAST = 50  # losses whose mean is

#: batch, context, features, layers, heads: the example's own, and a model that fills a GPU.
SIZES = {"example": (10, 320, 96, 3, 4), "large": (16, 1024, 512, 6, 8)}


def example() -> Any:
    """The example as a module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("train_chars")


def by_wall_of_device(run: Callable[[int], Any], launches: int) -> float:
    """Seconds of ``run(launches)`` until the device is done: what a user waits for."""
    cupy.cuda.runtime.deviceSynchronize()
    start = time.perf_counter()
    run(launches)
    cupy.cuda.runtime.deviceSynchronize()
    return time.perf_counter() - start


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def bench_training(benchmark, dtype, size):
    chars = example()
    batch, context, features, layers, heads = SIZES[size]
    text = chars.tales(chars.TALES)
    alphabet = sorted(set(text))
    tokens = cupy.asarray(np.array([alphabet.index(c) for c in text], np.int32))
    rng = np.random.default_rng(0)
    batches = [chars.batch_of(rng, tokens, batch, context) for _ in range(STEPS)]
    model = chars.Model(cupy, rng, len(alphabet), features, layers, heads, dtype=dtype)
    weights = {name: w.get() for name, w in model.weights.items()}
    rate = 4e-3 * (96 / features) ** 0.5  # wider models want smaller steps

    ours = chars.Trainer(model, batch, context)

    def step(number: int) -> Any:
        return ours.step(*batches[number % STEPS], chars.rate(number % STEPS, STEPS, rate))

    contestants, losses = [], {"cuattn": _losses(step)}
    contestants.append(timing.Contestant("cuattn", _repeated(step), by_wall_of_device))
    if importlib.util.find_spec("torch"):
        import torch

        from benchmarks.torch_twin import Trainer, Twin

        trainer = Trainer(
            Twin(weights, model.slopes.get(), layers, "cuda"), autocast=dtype == "bfloat16"
        )
        on_torch = [tuple(torch.tensor(a.get(), device="cuda").long() for a in b) for b in batches]

        def torch_step(number: int) -> Any:
            return trainer.step(*on_torch[number % STEPS], chars.rate(number % STEPS, STEPS, rate))

        losses["torch"] = _losses(torch_step)
        contestants.append(timing.Contestant("torch", _repeated(torch_step), by_wall_of_device))
        # Both see the same batches from the same weights: what is left is rounding, which training
        # magnifies. A wrong gradient shows at once.
        first = [curve[0] for curve in losses.values()]
        assert abs(first[0] - first[1]) < 0.02 * first[1], first
        ends = [float(np.mean(curve[-LAST:])) for curve in losses.values()]
        assert abs(ends[0] - ends[1]) < 0.05 * ends[1], ends

    benchmark.group = "training"
    seconds = timing.race(benchmark, contestants)
    benchmark.extra_info |= {
        "milliseconds": {name: 1e3 * s for name, s in seconds.items()},
        "loss": {name: float(np.mean(curve[-LAST:])) for name, curve in losses.items()},
    }
    shown = ", ".join(f"{n} {1e3 * s:.2f} ms" for n, s in seconds.items())
    ends = ", ".join(f"{n} {v:.3f}" for n, v in benchmark.extra_info["loss"].items())
    print(f"\n{dtype} {size}: {shown} a step; loss {ends}")


def _losses(step: Callable[[int], Any]) -> list[float]:
    return [float(loss) for loss in [step(number) for number in range(STEPS)]]


def _repeated(step: Callable[[int], Any]) -> Callable[[int], Any]:
    """``run(n)`` that makes n more steps."""

    def run(launches: int) -> Any:
        for number in range(launches):
            last = step(number)
        return last

    return run
