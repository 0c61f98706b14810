"""benchmarks/torch_twin.py is the model of examples/train_chars.py: same losses from the same
weights and batches, step by step, on the CPU."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm", reason="needs the extra 'examples'")

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
import train_chars  # noqa: E402

from benchmarks.torch_twin import Trainer, Twin  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_is_the_same(rng, dtype):
    alphabet, layers, steps = 11, 2, 12
    tokens = rng.integers(0, alphabet, 400).astype(np.int32)
    model = train_chars.Model(np, rng, alphabet, 16, layers, 2, dtype=dtype)
    weights = {name: w.copy() for name, w in model.weights.items()}
    trainer = Trainer(Twin(weights, model.slopes, layers, "cpu"), autocast=dtype == "bfloat16")
    adam = train_chars.AdamW(np, model.weights)
    for step in range(steps):
        inputs, targets = train_chars.batch_of(rng, tokens, 3, 20)
        rate = train_chars.rate(step, steps, 4e-3)
        loss, pullback = model.loss(inputs, targets)
        adam.update(pullback(), rate)
        on_torch = (torch.tensor(a).long() for a in (inputs, targets))
        theirs = float(trainer.step(*on_torch, rate))
        # Adam divides by the size of a gradient, so that rounding of small ones goes on.
        assert float(loss) == pytest.approx(theirs, rel=2e-4 if dtype == "float32" else 2e-2)
