"""From logits to tokens, beside torch and one read of the logits at the copy ceiling; replays of
captured graphs.

``pytest benchmarks/bench_sampling.py --benchmark-json=benchmarks/results/NAME.json``
"""

from __future__ import annotations

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
    "typical_p": lambda x: sampling.sample(x, typical_p=0.9, seed=1),
    "select": lambda x: sampling.top_k(x, 50),
    "softmax": sampling.softmax,
}


def _captured(function, sets):
    """``run(n)`` that replays a graph of one call on each set, n sets at least."""
    for inputs in sets[:1]:
        function(inputs)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        kept = [function(inputs) for inputs in sets]
        graph = stream.end_capture()

    def run(launches: int) -> list:
        for _ in range(launches):
            graph.launch()
        return kept

    return run


def _torch_peers(operation, sets):
    try:
        import torch
    except ImportError:
        return
    functions = {
        "greedy": lambda x: torch.argmax(x, -1),
        "top_k": lambda x: torch.multinomial(torch.softmax(torch.topk(x, 50).values, -1), 1),
        "select": lambda x: torch.topk(x, 50),
        "softmax": lambda x: torch.softmax(x, -1),
    }
    if operation not in functions:
        return
    tensors = [torch.from_dlpack(array) for array in sets]
    function = functions[operation]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for tensor in tensors[:2]:
            function(tensor)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        kept = [function(tensor) for tensor in tensors]

    def run(launches: int):
        with torch.cuda.stream(peers.torch_stream()):
            for _ in range(launches):
                graph.replay()
        return kept

    yield timing.Contestant("torch", run)


@pytest.mark.parametrize("std", [4.0, 1.0], ids=["peaked", "flat"])
@pytest.mark.parametrize("batch", [1, 8, 64, 256, 512])
@pytest.mark.parametrize("vocab", [32768, 128256, 151936])
@pytest.mark.parametrize("operation", OPERATIONS)
def bench_sampling(benchmark, ceilings, operation, vocab, batch, std):
    nbytes = 4 * batch * vocab
    sets = [
        std * cupy.random.standard_normal((batch, vocab), dtype=np.float32)
        for _ in range(min(64, timing.sets_past_l2(nbytes)))
    ]
    contestants = [
        timing.Contestant("cuattn", _captured(OPERATIONS[operation], sets)),
        *_torch_peers(operation, sets),
    ]
    benchmark.group = "sampling"
    seconds = timing.race(benchmark, contestants, rounds=7, turn=2e-3)
    read = nbytes / ceilings["copy"]
    benchmark.extra_info |= {
        "microseconds": {name: s / len(sets) * 1e6 for name, s in seconds.items()},
        "read_microseconds": read * 1e6,
        "copy_tb_per_s": ceilings["copy"] * 1e-12,
    }
    shown = ", ".join(f"{n} {v:.1f}" for n, v in benchmark.extra_info["microseconds"].items())
    print(f"\n{benchmark.param}: {shown} µs, one read {read * 1e6:.1f}")
