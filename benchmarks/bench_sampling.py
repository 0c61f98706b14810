"""From logits to tokens, beside torch and one read of the logits at the copy ceiling, and
probabilities beside a kernel that only copies; replays of captured graphs, inputs rotated past L2.

``pytest benchmarks/bench_sampling.py --benchmark-json=benchmarks/results/NAME.json``
"""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

from benchmarks import peers, timing
from cuattn import sampling

cupy = pytest.importorskip("cupy")

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]

OPERATIONS = {
    "greedy": sampling.greedy,
    "temperature": lambda x: sampling.sample(x, temperature=0.9, seed=1),
    "min_p": lambda x: sampling.sample(x, min_p=0.05, seed=1),
    "top_k": lambda x: sampling.sample(x, top_k=50, seed=1),
    "top_p": lambda x: sampling.sample(x, top_p=0.9, seed=1),
    "joint": lambda x: sampling.sample(x, top_k=50, top_p=0.9, seed=1),
    "select": lambda x: sampling.top_k(x, 50),
    "softmax": sampling.softmax,
}
VOCABS = (32768, 128256, 151936)
BATCHES = (1, 8, 64, 256, 512)
STDS = {"peaked": 4.0, "flat": 1.0}
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
LEAST_FLOOR = 4e-6  # seconds
MAX_SETS = 512

#: Microseconds of FlashInfer 0.7.2 on float32 logits with peaked rows, from another run: NVIDIA
#: H200, driver 580.159.04, CUDA 13.0, torch 2.11.0, 2026-11-21. Its softmax is added where it
#: starts from probabilities. By operation and vocabulary, for each batch.
FLASHINFER = {
    ("temperature", 32768): (12.6, None, 13.0, None, 48.4),
    ("temperature", 128256): (45.3, 45.5, 46.0, 91.2, 181),
    ("temperature", 151936): (53.5, None, 54.3, None, 214),
    ("min_p", 32768): (16.5, None, 24.2, None, 94.8),
    ("min_p", 128256): (36.6, 56.7, 85.2, 213, 386),
    ("min_p", 151936): (41.8, None, 101.1, None, 461),
    ("top_k", 32768): (20.8, None, 40.9, None, 124),
    ("top_k", 128256): (57.0, 100.2, 150.7, 290, 495),
    ("top_k", 151936): (63.6, None, 178.9, None, 592),
    ("top_p", 32768): (17.9, None, 33.1, None, 108.1),
    ("top_p", 128256): (39.1, 71.8, 108.7, 230, 394),
    ("top_p", 151936): (44.5, None, 125.4, None, 467),
    ("joint", 32768): (45.2, None, 59.0, None, 229),
    ("joint", 128256): (55.1, 60.6, 67.4, 134, 247),
    ("joint", 151936): (59.4, None, 74.7, None, 277),
    ("select", 32768): (9.1, None, 16.1, None, 67.5),
    ("select", 128256): (10.8, 14.2, 45.3, 106, 219),
    ("select", 151936): (12.0, None, 51.8, None, 258),
    ("softmax", 32768): (8.5, None, 11.2, None, 51.2),
    ("softmax", 128256): (17.0, 17.9, 41.7, 111, 218),
    ("softmax", 151936): (19.0, None, 49.9, None, 256),
}


def _torch_draw(torch, probabilities):
    """torch.multinomial, without the look at its input that no graph can hold."""
    noise = torch.empty_like(probabilities).exponential_()
    return torch.argmax(probabilities / noise, -1, keepdim=True)


def _torch_top_k(torch, x):
    values, indices = torch.topk(x, 50)
    return torch.gather(indices, 1, _torch_draw(torch, torch.softmax(values, -1)))


def _torch_top_p(torch, x):
    """By sorting, as transformers does it."""
    ordered, indices = torch.sort(x, descending=True)
    probabilities = torch.softmax(ordered, -1)
    late = torch.cumsum(probabilities, -1) - probabilities >= 0.9
    return torch.gather(indices, 1, _torch_draw(torch, probabilities.masked_fill(late, 0.0)))


def _torch_operation(operation):
    """The same by torch, or None."""
    try:
        import torch
    except ImportError:
        return None
    return {
        "greedy": lambda x: torch.argmax(x, -1),
        "top_k": functools.partial(_torch_top_k, torch),
        "top_p": functools.partial(_torch_top_p, torch),
        "select": lambda x: torch.topk(x, 50),
        "softmax": lambda x: torch.softmax(x, -1, dtype=torch.float32),
    }.get(operation)


@functools.lru_cache(maxsize=1)
def _inputs(vocab, batch, std, dtype):
    """Sets that rotate past L2 (a row of 32768: nearly); the operations of one shape share them."""
    count = min(timing.sets_past_l2(dtype.itemsize * batch * vocab), MAX_SETS)
    draw = functools.partial(cupy.random.standard_normal, (batch, vocab), dtype=np.float32)
    return [(std * draw()).astype(dtype) for _ in range(count)]


def _torch_captured(function, sets):
    import torch

    tensors = [
        torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
        if array.itemsize == 2
        else torch.from_dlpack(array)
        for array in sets
    ]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        function(tensors[0])
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        kept = [function(tensor) for tensor in tensors]

    def run(launches: int) -> list:
        with torch.cuda.stream(peers.torch_stream()):
            for _ in range(launches):
                graph.replay()
        return kept

    return run


@pytest.fixture(scope="module")
def summary(request):
    """Microseconds by operation, vocabulary, dtype, rows and batch; printed in the end."""
    found = {}
    yield found
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        reporter.ensure_newline()
        for line in _table(found):
            reporter.write_line(line)


def _table(found):
    yield "microseconds at batch " + ", ".join(map(str, BATCHES))
    yield "floor: one read of the logits at the copy ceiling, 4 at least"
    yield "FlashInfer: recorded in another run, with its softmax where it starts from probabilities"
    for operation, vocab, dtype, rows in dict.fromkeys(key[:4] for key in found):
        cells = [found.get((operation, vocab, dtype, rows, batch), {}) for batch in BATCHES]
        yield f"{operation}, {vocab}, {dtype}, {rows}"
        for who in ("floor", "copy", "cuattn", "torch"):
            if any(who in cell for cell in cells):
                yield f"    {who:10} " + "".join(f"{_shown(cell.get(who)):>9}" for cell in cells)
        recorded = FLASHINFER.get((operation, vocab), ())
        if recorded and (dtype, rows) == ("float32", "peaked"):
            yield f"    {'FlashInfer':10} " + "".join(f"{_shown(value):>9}" for value in recorded)


def _shown(microseconds):
    return "" if microseconds is None else f"{microseconds:.1f}"


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("rows", STDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def bench_sampling(benchmark, ceilings, summary, vocab, dtype, rows, batch, operation):
    sets = _inputs(vocab, batch, STDS[rows], DTYPES[dtype])
    calls = [functools.partial(OPERATIONS[operation], logits) for logits in sets]
    contestants = [timing.captured("cuattn", calls)]
    peer = _torch_operation(operation)
    if peer is not None:
        contestants.append(timing.Contestant("torch", _torch_captured(peer, sets)))
    if (operation, dtype) == ("softmax", "float32"):  # of one size: reads and writes as much
        from benchmarks.ceilings import copied

        copies = [functools.partial(copied, logits) for logits in sets]
        contestants.append(timing.captured("copy", copies))
    benchmark.group = "sampling"
    seconds = timing.race(benchmark, contestants, rounds=5, turn=1e-3)
    read = sets[0].nbytes / ceilings["copy"]
    microseconds = {name: s / len(sets) * 1e6 for name, s in seconds.items()}
    summary[operation, vocab, dtype, rows, batch] = microseconds | {
        "floor": max(read, LEAST_FLOOR) * 1e6
    }
    benchmark.extra_info |= {
        "microseconds": microseconds,
        "read_microseconds": read * 1e6,
        "floor_microseconds": max(read, LEAST_FLOOR) * 1e6,
        "copy_tb_per_s": ceilings["copy"] * 1e-12,
    }
