"""A Llama on a GPU whose steps are CUDA graphs: the host launches a whole pass of the model, and
not each of its 500 operations.

A module of generate.py, which uses it on a GPU.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nRun generate.py instead; --help lists its options.")

import weakref
from typing import Any, NamedTuple

import cublas_matmul
import cupy
import llama
import numpy as np

import cuattn


class Captured(NamedTuple):
    """A captured pass, and the arrays it reads and writes each time it is launched."""

    graph: cupy.cuda.Graph
    numbers: cupy.ndarray  # a llama.Pass, its arrays end to end
    features: cupy.ndarray


class GraphLlama(llama.Llama):
    """A Llama on a GPU. A pass in which texts go on, and no prompt is read, is captured where it
    has another size than all before it, and replayed from then on.

    Parameters
    ----------
    metadata, weights
        A checkpoint, from `llama.read_gguf` or `llama.load`.
    """

    def __init__(self, metadata: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
        super().__init__(metadata, weights, cupy)
        self.passes: Any = weakref.WeakKeyDictionary()  # of each cache, by their size
        self.stream = cupy.cuda.Stream(non_blocking=True)  # where they are captured
        self.pool = cupy.cuda.MemoryPool()  # what they have in between stays theirs

    def run(
        self, cache: cuattn.PagedKVCache, sequences: list[int], step: llama.Pass
    ) -> cupy.ndarray:
        if len(step.last) < len(step.ids):
            return super().run(cache, sequences, step)
        # The cache updates this table in place, or makes a wider one; and where all texts read as
        # many tokens, it writes them in another way.
        table = cache.page_table(sequences)
        size = *table.shape, len(step.ids), len(set(np.diff(step.cu_seqlens))) == 1
        passes = self.passes.setdefault(cache, {})
        if size not in passes:
            passes[size] = self.capture(cache, sequences, step)
        graph, numbers, features = passes[size]
        numbers.set(np.concatenate(step))
        graph.launch()
        cache.mark_written(sequences)
        return features

    def capture(
        self, cache: cuattn.PagedKVCache, sequences: list[int], step: llama.Pass
    ) -> Captured:
        """Note down what a pass of this size launches, without doing it."""
        numbers = cupy.asarray(np.concatenate(step))
        parts = cupy.split(numbers, np.cumsum([len(array) for array in step[:-1]]))
        with self.stream, cupy.cuda.using_allocator(self.pool.malloc):
            self.stream.begin_capture()
            try:
                features = self.forward(cache, sequences, llama.Pass(*parts))
            finally:
                graph = self.stream.end_capture()
        return Captured(graph, numbers, features)

    def matmul(self, x: cupy.ndarray, weight: cupy.ndarray) -> cupy.ndarray:
        if not self.stream.is_capturing():
            return super().matmul(x, weight)
        return cublas_matmul.matmul(x, weight)

    def add_matmul(self, out: cupy.ndarray, x: cupy.ndarray, weight: cupy.ndarray) -> None:
        if not self.stream.is_capturing():
            super().add_matmul(out, x, weight)
        else:
            cublas_matmul.matmul(x, weight, add_to=out)
