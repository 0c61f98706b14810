"""Other implementations of attention behind one interface. Those that cannot be imported are left
out.

None is a dependency. CuPy arrays go to them by DLPack, without a copy, as 16-bit integers that are
then seen as what they are, since not every DLPack reader knows bfloat16.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import timing

#: Distributions whose versions belong beside a figure.
DISTRIBUTIONS = ("torch", "jax", "dew-flash-attn-cu13", "sgl-flash-mla")
#: Reading this many bytes takes longer than launching a JAX call.
CAPTURE_FREE = 512 << 20
#: What JAX may take of the device's memory: its pool gives none back to CuPy and torch.
JAX_MEMORY = 0.4


def versions() -> dict[str, str]:
    """The versions of the peers that are installed."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def attention_forward(
    sets: list[tuple], *, causal: bool, portable: bool = False
) -> Iterator[timing.Contestant]:
    """Every peer that computes this forward attention.

    Parameters
    ----------
    sets : list of (q, k, v)
        float16 or bfloat16 CuPy arrays (batch, seqlen, heads, head_dim), used in turn.
    causal : bool
        With as many queries as keys, so that every peer means the same by it.
    portable : bool
        Only the peers whose kernels run on Ampere and newer, with the instructions that all of
        these have.
    """
    torch = importlib.util.find_spec("torch")
    if torch:
        yield timing.Contestant("FA-2", _torch_sdpa("FLASH_ATTENTION", sets, causal=causal))
    if portable:
        return
    if torch:
        yield timing.Contestant("cuDNN", _torch_sdpa("CUDNN_ATTENTION", sets, causal=causal))
    if _has_fa3():
        run = timing.rotate(_jax_flash_mha(causal=causal), [tuple(map(_to_jax, s)) for s in sets])
        yield timing.Contestant("FA-3", run, timing.by_host)


def free_memory() -> None:
    """Give back the memory of what is no longer needed: the pools of CuPy and torch, and what JAX
    keeps of its programs."""
    # The frames of a test that failed hold its arrays.
    traceback.clear_frames(getattr(sys, "last_traceback", None))
    gc.collect()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    if "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()


def _made(
    name: str,
    make: Callable[[], Callable[[int], Any]],
    left_out: dict[str, str],
    timer: Callable[[Callable[[int], Any], int], float] = timing.by_events,
) -> Iterator[timing.Contestant]:
    """The contestant whose ``run`` is ``make()``. If that fails, be it for a shape that is not
    served or for want of memory, `left_out` says why."""
    try:
        run = make()
    except Exception as error:
        left_out[name] = timing.reason(error)
    else:
        yield timing.Contestant(name, run, timer)


def attention_forward_graphs(
    sets: list[tuple], *, causal: bool, fa3: bool, left_out: dict[str, str]
) -> Iterator[timing.Contestant]:
    """The same peers, each launch using all sets in turn; torch's in a captured graph, so that
    short calls show what the device takes. Key heads may be fewer than query heads, and queries
    fewer or more than keys: under a causal mask the last query sees all keys, which of torch's back
    ends FlashAttention-2 alone computes.

    Parameters
    ----------
    sets, causal
        As in `attention_forward`.
    fa3 : bool
        Whether FlashAttention-3 takes part, which is timed from the host: only where a call takes
        longer than its launch.
    left_out : dict of str to str
        Gets the names of peers that fail, and why.
    """
    seqlen_q, seqlen_k = (array.shape[1] for array in sets[0][:2])
    if causal and seqlen_q != seqlen_k:
        attend = functools.partial(
            _flash_2, lengths=(None, None), longest=(seqlen_q, seqlen_k), causal=True
        )
        yield from _torch_kernels({"FA-2": attend}, sets, left_out)
    else:
        yield from _torch_graphs(sets, causal=causal, left_out=left_out)
    if fa3 and _has_fa3():
        yield from _jax_sets(sets, causal=causal, left_out=left_out)


def attention_forward_varlen(
    sets: list[tuple],
    lengths_q: np.ndarray,
    lengths_k: np.ndarray,
    *,
    causal: bool,
    fa3: bool,
    left_out: dict[str, str],
) -> Iterator[timing.Contestant]:
    """Every peer that computes attention within sequences of these lengths, each launch using all
    sets in turn.

    Parameters
    ----------
    sets : list of (q, k, v)
        bfloat16 CuPy arrays (total, heads, head_dim). Key heads may be fewer than query heads.
    lengths_q, lengths_k : numpy.ndarray
        Of each sequence.
    causal, fa3, left_out
        As in `attention_forward_graphs`.
    """
    ends = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (lengths_q, lengths_k)]
    longest = int(lengths_q.max()), int(lengths_k.max())
    if importlib.util.find_spec("torch"):
        import torch

        starts = [torch.from_numpy(n).cuda() for n in ends]
        kernels = {"FA-2": _flash_2}
        if not causal or (lengths_q == lengths_k).all():
            kernels["cuDNN"] = _cudnn
        attend = {
            name: functools.partial(kernel, lengths=starts, longest=longest, causal=causal)
            for name, kernel in kernels.items()
        }
        yield from _torch_kernels(attend, sets, left_out)
    if fa3 and _has_fa3():
        import dew_flash_attn
        import jax

        starts = [jax.numpy.asarray(n) for n in ends]
        attend = jax.jit(
            lambda q, k, v, starts_q, starts_k: dew_flash_attn.flash_mha_varlen(
                q,
                k,
                v,
                starts_q,
                longest[0],
                key_cu_seqlens=starts_k,
                key_max_seqlen=longest[1],
                is_causal=causal,
            )
        )

        def make() -> Callable[[int], Any]:
            once = timing.rotate(attend, [(*map(_to_jax, arrays), *starts) for arrays in sets])
            return lambda launches: once(launches * len(sets))

        yield from _made("FA-3", make, left_out, timing.by_host)


def flash_attention_3(queries: list[Any], k: Any, v: Any) -> Iterator[timing.Contestant]:
    """FlashAttention-3, where it can be imported: all queries (batch, seqlen, heads, head_dim) over
    the same keys under a causal mask, one call after the other in one JAX program, so that short
    calls show what the device takes. The result is the last call's."""
    if not _has_fa3():
        return
    import dew_flash_attn
    import jax

    attend = jax.jit(
        lambda queries, k, v: [dew_flash_attn.flash_mha(q, k, v, is_causal=True) for q in queries]
    )
    once = timing.rotate(attend, [([_to_jax(q) for q in queries], _to_jax(k), _to_jax(v))])
    yield timing.Contestant("FA-3", lambda launches: once(launches)[-1], timing.by_host)


def attention_backward(
    sets: list[tuple],
    *,
    causal: bool,
    portable: bool = False,
    window: tuple[int, int] | None = None,
) -> Iterator[timing.Contestant]:
    """Every peer that computes the gradients of this attention, after its own forward pass, which
    is not timed; a launch's result is (dq, dk, dv).

    Parameters
    ----------
    sets : list of (q, k, v, dout)
        As in `attention_forward`. Key heads may be fewer than query heads.
    causal, portable
        As in `attention_forward`.
    window : (int, int), optional
        Keys that a query sees before and after its own, which FlashAttention-3 alone takes.
    """
    names = (("FA-2", "FLASH_ATTENTION"), ("cuDNN", "CUDNN_ATTENTION"))
    for name, backend in names[: 1 if portable else 2]:
        if importlib.util.find_spec("torch") and window is None:
            try:
                yield timing.Contestant(name, _torch_sdpa_backward(backend, sets, causal=causal))
            except RuntimeError:  # not this shape
                continue
    # FlashAttention-3 has one head_dim for queries, keys and values.
    if _has_fa3() and not portable and sets[0][0].shape[-1] == sets[0][2].shape[-1]:
        import dew_flash_attn

        forward = functools.partial(
            dew_flash_attn.flash_mha, is_causal=causal, window_size=window or (-1, -1)
        )
        yield timing.Contestant("FA-3", _jax_backward(forward, sets), timing.by_host)


def attention_backward_varlen(
    sets: list[tuple], lengths: list[int], *, causal: bool
) -> Iterator[timing.Contestant]:
    """Every peer that computes the gradients of attention within sequences of these lengths, one
    after the other in q, k, v, dout (total, heads, head_dim); as `attention_backward`."""
    if _has_fa3():
        import dew_flash_attn
        import jax

        starts = jax.numpy.asarray(np.cumsum([0, *lengths]).astype(np.int32))
        forward = functools.partial(
            dew_flash_attn.flash_mha_varlen,
            cu_seqlens=starts,
            max_seqlen=max(lengths),
            is_causal=causal,
        )
        yield timing.Contestant("FA-3", _jax_backward(forward, sets), timing.by_host)


def attention_forward_cpu(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool,
    timer: Callable[[Callable[[int], Any], int], float] = timing.by_wall,
) -> Iterator[timing.Contestant]:
    """torch's attention on the CPU, on NumPy arrays (batch, seqlen, heads, head_dim). Key heads may
    be fewer than query heads."""
    if importlib.util.find_spec("torch"):
        import torch

        arrays = [torch.from_numpy(array).transpose(1, 2) for array in (q, k, v)]
        gqa = q.shape[2] != k.shape[2]

        def run(launches: int) -> Any:
            with torch.no_grad():
                for _ in range(launches):
                    out = torch.nn.functional.scaled_dot_product_attention(
                        *arrays, is_causal=causal, enable_gqa=gqa
                    )
            return out.transpose(1, 2).numpy()

        yield timing.Contestant("torch", run, timer)


def decode(sets: list[tuple], left_out: dict[str, str]) -> Iterator[timing.Contestant]:
    """Every peer that computes attention of one query to contiguous caches; a launch uses all sets
    in turn.

    Parameters
    ----------
    sets : list of (q, k, v)
        As in `attention_forward`, with one query and all keys valid.
    left_out : dict of str to str
        Gets the names of peers that fail, and why.
    """
    yield from _torch_graphs(sets, causal=False, left_out=left_out)
    if _has_fa3() and sum(k.nbytes + v.nbytes for _, k, v in sets) / len(sets) >= CAPTURE_FREE:
        yield from _jax_sets(sets, causal=False, left_out=left_out)


def decode_varlen(q: Any, k: Any, v: Any, lens: np.ndarray) -> Iterator[timing.Contestant]:
    """Every peer that computes attention of one query, q (batch, heads, head_dim), to each of
    sequences of these lengths that lie one after the other: k, v (total, heads_kv, head_dim)."""
    if _has_fa3():
        import dew_flash_attn
        import jax

        arrays = [_to_jax(a) for a in (q, k, v)]
        starts = [
            jax.numpy.asarray(np.concatenate([[0], np.cumsum(n)]).astype(np.int32))
            for n in (np.ones_like(lens), lens)
        ]
        attend = jax.jit(
            lambda q, k, v, starts_q, starts_k: dew_flash_attn.flash_mha_varlen(
                q, k, v, starts_q, 1, key_cu_seqlens=starts_k, key_max_seqlen=int(lens.max())
            )
        )
        run = timing.rotate(attend, [(*arrays, *starts)])
        yield timing.Contestant("FA-3", run, timing.by_host)


def mla_decode(
    sets: list[tuple], lens: Any, *, scale: float, left_out: dict[str, str]
) -> Iterator[timing.Contestant]:
    """Every peer that computes latent attention to pages; a launch uses all sets in turn.

    Parameters
    ----------
    sets : list of (q, rows, page_table)
        bfloat16 q (batch, queries, heads, 576), rows (num_pages, 64, 576) whose first 512 columns
        are values, too, and int32 page_table (batch, max_pages).
    lens : cupy.ndarray
        int32 (batch,): how many tokens each sequence has.
    scale : float
        Of scores.
    left_out : dict of str to str
        Gets the names of peers that fail, and why.
    """
    if importlib.util.find_spec("torch") and importlib.util.find_spec("flash_mla"):
        make = functools.partial(_flash_mla, sets, lens, scale)
        yield from _made("FlashMLA", make, left_out)


def _flash_mla(sets: list[tuple], lens: Any, scale: float) -> Callable[[int], Any]:
    """FlashMLA on all sets, captured in one CUDA graph, with a schedule that it has made before."""
    import torch
    from flash_mla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    def bfloat16(array: Any) -> Any:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)

    schedule, _ = get_mla_metadata()
    lengths = torch.from_dlpack(lens)
    tensors = [
        (bfloat16(q), bfloat16(rows[:, :, None]), torch.from_dlpack(table))
        for q, rows, table in sets
    ]

    def attend(q: Any, rows: Any, table: Any) -> Any:
        return flash_mla_with_kvcache(
            *(q, rows, table, lengths, 512, schedule),
            softmax_scale=scale,
            causal=True,
            use_legacy=True,
        )[0]

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        attend(*tensors[0])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for each in tensors:
            out = attend(*each)

    def run(replays: int, kept: list = tensors) -> Any:  # kept: what the graph reads
        with torch.cuda.stream(torch_stream()):
            for _ in range(replays):
                graph.replay()
        return out.transpose(1, 2)

    return run


def _has_fa3() -> bool:
    return bool(importlib.util.find_spec("dew_flash_attn") and importlib.util.find_spec("jax"))


def to_cupy(array: Any) -> Any:
    """A peer's result as a float32 CuPy array (batch, seqlen, heads, head_dim)."""
    import cupy

    if type(array).__module__.startswith("torch"):
        return cupy.from_dlpack(array.float().transpose(1, 2))
    # JAX ends the process where DLPack is to share a result whose memory could not be had. Waiting
    # for the result raises an error instead.
    return cupy.from_dlpack(array.astype(np.float32).block_until_ready())


def torch_stream() -> Any:
    """CuPy's current stream, for torch. (It takes a null pointer to mean one of its own.)"""
    import cupy
    import torch

    pointer = cupy.cuda.get_current_stream().ptr
    return torch.cuda.ExternalStream(pointer) if pointer else torch.cuda.default_stream()


def _torch_sdpa(backend: str, sets: list[tuple], *, causal: bool) -> Callable[[int], Any]:
    """torch's scaled_dot_product_attention on one of its back ends."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def heads_first(array: Any) -> Any:
        dtype = getattr(torch, array.dtype.name)
        return torch.from_dlpack(array.view(np.int16)).view(dtype).transpose(1, 2)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    rotated = timing.rotate(attend, [tuple(map(heads_first, arrays)) for arrays in sets])

    def run(launches: int) -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)), torch.no_grad():
            return rotated(launches)

    return run


def _torch_sdpa_backward(backend: str, sets: list[tuple], *, causal: bool) -> Callable[[int], Any]:
    """The gradients of torch's scaled_dot_product_attention on one of its back ends."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def heads_first(array: Any) -> Any:
        dtype = getattr(torch, array.dtype.name)
        return torch.from_dlpack(array.view(np.int16)).view(dtype).transpose(1, 2)

    after_forward = []
    with sdpa_kernel(getattr(SDPBackend, backend)):
        for arrays in sets:
            *inputs, dout = map(heads_first, arrays)
            inputs = [x.detach().requires_grad_() for x in inputs]
            out = torch.nn.functional.scaled_dot_product_attention(
                *inputs, is_causal=causal, enable_gqa=True
            )
            after_forward.append((out, inputs, dout))

    def gradients(out: Any, inputs: list, dout: Any) -> Any:
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    gradients(*after_forward[0])  # raises where the back end has no backward pass for the shape
    return timing.rotate(gradients, after_forward)


def _torch_graphs(
    sets: list[tuple], *, causal: bool, left_out: dict[str, str]
) -> Iterator[timing.Contestant]:
    """torch's back ends that serve the shape, each as a captured graph of all sets."""
    if not importlib.util.find_spec("torch"):
        return
    for name, backend in (("cuDNN", "CUDNN_ATTENTION"), ("FA-2", "FLASH_ATTENTION")):
        make = functools.partial(_torch_sdpa_graph, backend, sets, causal=causal)
        yield from _made(name, make, left_out)


def _torch_sdpa_graph(backend: str, sets: list[tuple], *, causal: bool) -> Callable[[int], Any]:
    """torch's scaled_dot_product_attention on all sets, captured in one CUDA graph."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def heads_first(array: Any) -> Any:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16).transpose(1, 2)

    tensors = [tuple(map(heads_first, arrays)) for arrays in sets]
    graph = torch.cuda.CUDAGraph()
    with sdpa_kernel(getattr(SDPBackend, backend)), torch.no_grad():
        attend = functools.partial(
            torch.nn.functional.scaled_dot_product_attention, is_causal=causal, enable_gqa=True
        )
        attend(*tensors[0])
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for arrays in tensors:
                result = attend(*arrays)

    def run(replays: int) -> Any:
        with torch.cuda.stream(torch_stream()):
            for _ in range(replays):
                graph.replay()
        return result

    return run


def _torch_kernels(
    attend: dict[str, Callable[..., Any]], sets: list[tuple], left_out: dict[str, str]
) -> Iterator[timing.Contestant]:
    """Kernels of torch's, by name, that take tensors as they lie."""
    for name, kernel in attend.items():
        yield from _made(name, functools.partial(_torch_kernel, kernel, sets), left_out)


def _torch_kernel(kernel: Callable[..., Any], sets: list[tuple]) -> Callable[[int], Any]:
    """A kernel on all sets, captured in one CUDA graph; or call after call where a replay gives
    another result than the call."""
    import torch

    tensors = [
        [torch.from_dlpack(a.view(np.int16)).view(torch.bfloat16) for a in arrays]
        for arrays in sets
    ]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        wanted = kernel(*tensors[-1])
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for arrays in tensors:
                out = kernel(*arrays)
    graph.replay()
    torch.cuda.synchronize()

    def replayed(replays: int, kept: list = tensors) -> Any:  # kept: what the graph reads
        with torch.cuda.stream(torch_stream()):
            for _ in range(replays):
                graph.replay()
        return out.reshape(-1, *out.shape[-3:]).transpose(1, 2)

    def called(launches: int) -> Any:
        with torch.cuda.stream(torch_stream()), torch.no_grad():
            for _ in range(launches):
                for arrays in tensors:
                    result = kernel(*arrays)
        return result.reshape(-1, *result.shape[-3:]).transpose(1, 2)

    return replayed if torch.equal(out, wanted) else called


def _flash_2(
    q: Any,
    k: Any,
    v: Any,
    *,
    lengths: Sequence[Any],
    longest: tuple[int, int],
    causal: bool,
) -> Any:
    """torch's FlashAttention-2 of (batch, seqlen, heads, head_dim), or with the ends of sequences
    of (total, heads, head_dim)."""
    import torch

    return torch.ops.aten._flash_attention_forward(q, k, v, *lengths, *longest, 0.0, causal, False)[
        0
    ]


def _cudnn(
    q: Any, k: Any, v: Any, *, lengths: Sequence[Any], longest: tuple[int, int], causal: bool
) -> Any:
    """cuDNN's attention, as `_flash_2`, with a causal mask that begins at the first key."""
    import torch

    return torch.ops.aten._cudnn_attention_forward(
        q, k, v, None, *lengths, *longest, False, 0.0, causal, False
    )[0]


def _to_jax(array: Any) -> Any:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if "XLA_CLIENT_MEM_FRACTION" not in os.environ:  # which JAX refuses beside the older name
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(JAX_MEMORY))
    import jax

    integers = jax.dlpack.from_dlpack(array.view(np.int16))
    return jax.lax.bitcast_convert_type(integers, array.dtype)


def _jax_flash_mha(*, causal: bool) -> Callable[..., Any]:
    """FlashAttention-3's Hopper kernels as a JAX call."""
    import dew_flash_attn
    import jax

    return jax.jit(lambda q, k, v: dew_flash_attn.flash_mha(q, k, v, is_causal=causal))


def _jax_sets(
    sets: list[tuple], *, causal: bool, left_out: dict[str, str]
) -> Iterator[timing.Contestant]:
    """FlashAttention-3 on all sets in turn."""

    def make() -> Callable[[int], Any]:
        once = timing.rotate(_jax_flash_mha(causal=causal), [tuple(map(_to_jax, s)) for s in sets])
        return lambda launches: once(launches * len(sets))

    yield from _made("FA-3", make, left_out, timing.by_host)


class _Gradients(tuple):
    """(dq, dk, dv) of JAX, which a timer waits for as for one array."""

    def block_until_ready(self) -> _Gradients:
        for array in self:
            array.block_until_ready()
        return self


def _jax_backward(forward: Callable[..., Any], sets: list[tuple]) -> Callable[[int], Any]:
    """The gradients of ``forward(q, k, v)`` as a JAX call."""
    import jax

    differentiate = jax.jit(lambda q, k, v: jax.vjp(forward, q, k, v)[1])
    pull_back = jax.jit(lambda pullback, dout: pullback(dout))
    after_forward = []
    for arrays in sets:
        *inputs, dout = map(_to_jax, arrays)
        after_forward.append((differentiate(*inputs), dout))
    return timing.rotate(lambda *given: _Gradients(pull_back(*given)), after_forward)
