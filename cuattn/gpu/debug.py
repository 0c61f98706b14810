"""``CUATTN_DEBUG=1``: lengths and pages on the device are checked before each call, and every
launch is waited for, so that an error names the call and the kernel that it comes from.

The environment is read once, at import. Without the variable nothing here runs: functions and
kernels are left as they are. While a CUDA graph is captured nothing can be read or waited for, and
nothing is.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cuattn._decoding_spec import check_after_prefix, check_shared_pages
from cuattn._spec import AttentionSpec, check_reach

if TYPE_CHECKING:
    from cuattn.gpu.compiler import Variant

ENABLED = os.environ.get("CUATTN_DEBUG", "0") not in ("", "0")
NOT_READY = 600  # cudaErrorNotReady
PATIENCE_S = 10.0  # a kernel that runs for longer is named in a warning: it may never end


def checks(check: Callable[..., None]) -> Callable[[Callable], Callable]:
    """Decorate a function: before each call `check` is given the name of the public function that
    was called, and the same arguments."""

    def decorate(function: Callable) -> Callable:
        if not ENABLED:
            return function

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not _capturing():
                check(public_function(), *args, **kwargs)
            return function(*args, **kwargs)

        return checked

    return decorate


def watched(kernel: Callable[..., None], variant: Variant) -> Callable[..., None]:
    """A kernel whose launches are waited for.

    Raises
    ------
    RuntimeError
        From a launch that failed. It names the public function that was called, the kernel and its
        Config.
    """

    def launch(grid: tuple[int, ...], block: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        name = f"{public_function()}: {variant.source} ({variant.config}), grid {grid}"
        try:
            kernel(grid, block, *args, **kwargs)
            if not _capturing():
                _wait(name)
        except Exception as error:
            raise RuntimeError(f"{name}, failed: {error}") from error

    return launch


def public_function() -> str:
    """The function of cuattn that the user called: the outermost one on the stack, but for what
    private modules wrap it in."""
    frame, name = sys._getframe(1), "cuattn"
    while frame is not None:
        package, *inner = frame.f_globals.get("__name__", "").split(".")
        code = frame.f_code.co_name
        if package == "cuattn" and not any(n.startswith("_") for n in inner) and code[0] != "<":
            name = code
        frame = frame.f_back
    return name


def check_attention(
    function: str,
    q: Any,
    k: Any,
    v: Any,
    spec: AttentionSpec,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seq_lens: Any = None,
    page_table: Any = None,
    prefix: Any = None,
    bias: Any = None,
    mask: Any = None,
    **_: Any,
) -> None:
    """Check lengths and pages of an attention call.

    Raises
    ------
    ValueError
        Cumulative lengths do not rise from 0 to at most the total, a length is negative, an entry
        of the page table that is used is not the number of a page, bias or mask is too small, or
        the prefix is not what all sequences share and have before their queries.
    """
    counts: Any = spec.seqlen_q
    queries, keys = spec.seqlen_q, spec.seqlen_k
    if cu_seqlens_q is not None:
        bounds = _host(cu_seqlens_q)
        _check_rising(function, "cu_seqlens_q", bounds, spec.seqlen_q)
        counts = np.diff(bounds)
        queries = int(counts.max(initial=0))
    if cu_seqlens_k is not None:
        bounds = _host(cu_seqlens_k)
        _check_rising(function, "cu_seqlens_k", bounds, spec.seqlen_k)
        keys = int(np.diff(bounds).max(initial=0))
    if seq_lens is not None:
        lengths = _host(seq_lens)
        _check_range(function, "seq_lens", lengths, np.full(lengths.shape, True), 1 << 31)
        keys = min(int(lengths.max(initial=0)), spec.seqlen_k)
        if page_table is not None:
            table = _host(page_table)
            check_table(function, table, lengths, k.shape[0], spec.page_size)
            own = np.minimum(lengths, spec.seqlen_k)
            if isinstance(prefix, int):
                check_shared_pages(function, table, own - counts, prefix, spec.page_size)
            elif prefix is not None and spec.window_right == 0:
                check_after_prefix(function, own, counts)
    check_reach(function, queries, keys, bias=bias, mask=mask, key_mask=None)


def check_table(
    function: str, page_table: Any, seq_lens: Any, num_pages: int, page_size: int
) -> None:
    """Check that each entry of the page table that is used is the number of a page."""
    table, lengths = _host(page_table), _host(seq_lens)
    used = np.arange(table.shape[1]) < -(-lengths[:, None] // page_size)
    _check_range(function, "page_table", table, used, num_pages)


def _check_rising(function: str, name: str, bounds: np.ndarray, total: int) -> None:
    if bounds[0] != 0 or bounds[-1] > total or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"{function}: {name} is {bounds}, must start at 0, never fall, and end at {total} at "
            "most"
        )


def _check_range(function: str, name: str, numbers: np.ndarray, used: np.ndarray, end: int) -> None:
    """Check that those of the numbers that are used are from 0 to before `end`."""
    bad = np.argwhere(used & ((numbers < 0) | (numbers >= end)))
    if bad.size:
        at = tuple(bad[0].tolist())
        index = ", ".join(map(str, at))
        raise ValueError(
            f"{function}: {name}[{index}] is {numbers[at]}, must be from 0 to {end - 1}"
        )


def _host(array: Any) -> np.ndarray:
    """A device array's content, once all that writes it has run."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def _capturing() -> bool:
    import cupy

    return cupy.cuda.get_current_stream().is_capturing()


def _wait(name: str) -> None:
    """Wait for all that is on the current stream; say so if it takes long."""
    import cupy
    from cupy.cuda import runtime

    stream, start, warned = cupy.cuda.get_current_stream(), time.monotonic(), False
    while runtime.streamQuery(stream.ptr) == NOT_READY:
        time.sleep(1e-4)
        if not warned and time.monotonic() - start > PATIENCE_S:
            warnings.warn(f"{name}, still runs after {PATIENCE_S:.0f} s", stacklevel=4)
            warned = True
    stream.synchronize()  # raises what the kernel met
