"""examples/train_chars.py: its gradients by central differences, and a few steps of training."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("tqdm", reason="needs the extra 'examples'")

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import tales  # noqa: E402
import train_chars  # noqa: E402

from tests.programs import run_example  # noqa: E402


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_of_the_model(rng, dropout):
    """Every kind of weight, in float64."""
    model = train_chars.Model(np, rng, 7, 8, 2, 2, dropout=dropout, dtype="float64")
    model.weights = {name: w.astype(np.float64) for name, w in model.weights.items()}
    tokens = rng.integers(0, 7, (2, 10))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    _, pullback = model.loss(inputs, targets, seed=5)
    grads = pullback()
    assert grads.keys() == model.weights.keys()
    for name, w in model.weights.items():
        direction = rng.standard_normal(w.shape)
        expected = 0.0
        # Steps so small that hardly a unit of the squared ReLU, whose slope has a kink, crosses it.
        for step, factor in ((-2e-6, 1), (-1e-6, -8), (1e-6, 8), (2e-6, -1)):
            model.weights[name] = w + step * direction
            expected += factor / 12e-6 * model.loss(inputs, targets, seed=5)[0]
        model.weights[name] = w
        # The error of differences does not shrink where gradient and direction happen to be at
        # right angles.
        size = np.linalg.norm(grads[name]) * np.linalg.norm(direction)
        assert abs((grads[name] * direction).sum() - expected) < 1e-7 * size, name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_in_16_bit_change_little(rng, dtype):
    """The loss stays float32, and so do sums along the layers."""
    exact = train_chars.Model(np, rng, 7, 16, 2, 2)
    rounded = train_chars.Model(np, rng, 7, 16, 2, 2, dtype=dtype)
    rounded.weights = exact.weights
    tokens = rng.integers(0, 7, (2, 10))
    (loss, pullback), (near, rounded_pullback) = (
        model.loss(tokens[:, :-1], tokens[:, 1:]) for model in (exact, rounded)
    )
    assert near.dtype == np.float32
    assert 0 < abs(near - loss) < 0.02 * loss
    for name, grad in rounded_pullback().items():
        expected = pullback()[name]
        grad = grad.astype(np.float32)
        assert np.linalg.norm(grad - expected) < 0.1 * np.linalg.norm(expected), name


def test_adamw_goes_downhill():
    weights = {"matrix": np.full((2, 2), 3.0), "vector": np.full(2, 3.0)}
    adam = train_chars.AdamW(np, weights, decay=0.0)
    for _ in range(200):
        adam.update({name: 2 * w for name, w in weights.items()}, 0.05)
    assert all(np.abs(w).max() < 0.05 for w in weights.values())


def test_rate_rises_and_falls():
    rates = [train_chars.rate(step, 100, 1.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == pytest.approx(1.0)
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_tales_are_the_same_everywhere():
    text = tales.tales(train_chars.TALES)
    assert text == tales.tales(train_chars.TALES)
    assert text.startswith(tales.tales(3))
    assert 500_000 < len(text) < 1_000_000
    assert text.count("\n\n") == train_chars.TALES
    assert text != tales.tales(train_chars.TALES, seed=1)


def test_a_few_steps(tmp_path):
    arguments = ["--steps", "25", "--batch", "4", "--context", "64", "--features", "32"]
    arguments += ["--layers", "1", "--samples", "1", "--sample", "30", "--dropout", "0.1"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "train_chars.py", "--device", "cpu", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "MPLBACKEND": "agg"},
        capture_output=True,
        encoding="utf-8",
    )
    assert run.returncode == 0, run.stderr
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+) nats", run.stdout).groups())
    assert last < first - 0.5
    assert (tmp_path / "train_chars.png").read_bytes().startswith(b"\x89PNG")
    assert "what it writes" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps is 0, must be at least 1"),
        (["--heads", "5"], "--heads is 5, must divide --features, 96"),
        (["--dropout", "1"], "--dropout is 1.0, must be less than 1"),
        (["--plot", "nowhere/loss.png"], "--plot is nowhere/loss.png, must be in a folder"),
        (["--text", "nowhere"], "--text nowhere: [Errno 2]"),
        (["--text", "tests/programs.py", "--context", "3000"], "too few for --context 3000"),
    ],
)
def test_wrong_arguments_are_named_before_training(arguments, message):
    run = run_example("examples/train_chars.py", "--device", "cpu", *arguments)
    assert run.returncode and message in run.stderr
    assert "Traceback" not in run.stderr


def test_training_without_samples():
    arguments = ["--steps", 1, "--context", 8, "--layers", 1, "--features", 8, "--samples", 0]
    run = run_example("examples/train_chars.py", "--device", "cpu", *arguments, "--plot", "")
    assert run.returncode == 0, run.stderr
    assert "what it writes" not in run.stdout


@pytest.mark.gpu
@pytest.mark.not_emulated("cuBLAS, and a graph of CuPy's own operations")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_on_a_gpu_are_those_of_numpy(dtype):
    """The first two steps compile and are captured, the others are replays."""
    cupy = pytest.importorskip("cupy")
    losses = []
    for xp in (np, cupy):
        rng = np.random.default_rng(0)
        model = train_chars.Model(xp, rng, 11, 32, 2, 2, dtype=dtype)
        trainer = train_chars.Trainer(model, 3, 40)
        tokens = xp.asarray(rng.integers(0, 11, 400).astype(np.int32))
        steps = [train_chars.batch_of(rng, tokens, 3, 40) for _ in range(8)]
        losses.append([float(trainer.step(*batch, 4e-3)) for batch in steps])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3 if dtype == "float32" else 2e-2)


@pytest.mark.gpu
@pytest.mark.not_emulated("cuBLAS")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_products_of_cublas(rng, dtype):
    cupy = pytest.importorskip("cupy")
    import cublas_matmul

    kind = np.dtype(train_chars.ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for rows, inner, columns in ((5, 7, 3), (1, 64, 8), (40, 1, 24), (16, 100, 1)):
        a, b = rng.standard_normal((rows, inner)), rng.standard_normal((inner, columns))
        expected = a @ b
        a, b = (cupy.asarray(x.astype(kind)) for x in (a, b))
        for left in (a, cupy.ascontiguousarray(a.T).T):
            for right in (b, cupy.ascontiguousarray(b.T).T):
                product = cublas_matmul.matmul(left, right).get().astype(np.float64)
                error = np.linalg.norm(product - expected)
                assert error < 0.02 * np.linalg.norm(expected)
                twice = cublas_matmul.matmul(left, right)
                assert cublas_matmul.matmul(left, right, add_to=twice) is twice
                error = np.linalg.norm(twice.get().astype(np.float64) - 2 * expected)
                assert error < 0.04 * np.linalg.norm(expected)
