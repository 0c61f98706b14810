"""The file that PagedKVCache.save writes: arrays by name, as NumPy's savez has them."""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from cuattn.kvcache.layout import KVQuantization

VERSION = 1
CONTENT = ("k", "v", "pages")  # arrays that a PageStore may have


class Saved(NamedTuple):
    """A cache as it is saved.

    Attributes
    ----------
    config : dict
        The arguments that make such a cache, but xp.
    state : dict of arrays
        The books, from :func:`cuattn.kvcache.snapshot.take`.
    in_use : int64 array (pages,)
        The pages that hold something.
    content : dict of arrays
        What they hold. As read from a file, unsigned integers of the dtypes' sizes.
    """

    config: dict[str, Any]
    state: dict[str, np.ndarray]
    in_use: np.ndarray
    content: dict[str, np.ndarray]


def write(file: str | os.PathLike | BinaryIO, saved: Saved) -> None:
    """Write the file; one of that name is replaced once all has been written."""
    if not isinstance(file, (str, os.PathLike)):
        np.savez(file, **_as_arrays(saved))
        return
    path = os.fspath(file)
    partial = f"{path}.partial"
    try:
        with open(partial, "wb") as target:
            np.savez(target, **_as_arrays(saved))
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(partial)
        raise


def read(file: str | os.PathLike | BinaryIO) -> Saved:
    """Read what :func:`write` has written; fails in any way where it is something else."""
    if isinstance(file, (str, os.PathLike)):
        with open(file, "rb") as opened:
            return read(opened)
    place = file.tell()
    if not zipfile.is_zipfile(file):  # NumPy's message would be about pickle
        raise ValueError("it is no archive of arrays")
    file.seek(place)
    with np.load(file, allow_pickle=False) as arrays:
        config = json.loads(arrays["config"].tobytes())
        if config.pop("version") != VERSION:
            raise ValueError("another version")
        config["dtype"] = np.dtype(getattr(ml_dtypes, config["dtype"], config["dtype"]))
        if config.get("quantization") is not None:
            given: Any = _with_prefix(arrays, "quantization_")
            config["quantization"] = KVQuantization(**config["quantization"], **given)
        content = {name: arrays[name] for name in CONTENT if name in arrays}
        return Saved(config, _with_prefix(arrays, "state_"), arrays["in_use"], content)


def _as_arrays(saved: Saved) -> dict[str, Any]:
    config = {**saved.config, "dtype": saved.config["dtype"].name, "version": VERSION}
    arrays: dict[str, Any] = {f"state_{name}": array for name, array in saved.state.items()}
    if config["quantization"] is not None:
        config["quantization"], given = config["quantization"].as_saved()
        arrays |= {f"quantization_{name}": array for name, array in given.items()}
    for name, array in saved.content.items():  # bfloat16 is no dtype that a file could name
        arrays[name] = array.view(f"u{array.itemsize}")
    arrays["config"] = np.frombuffer(json.dumps(config).encode(), np.uint8)
    arrays["in_use"] = saved.in_use
    return arrays


def _with_prefix(arrays: Any, prefix: str) -> dict[str, np.ndarray]:
    return {name[len(prefix) :]: arrays[name] for name in arrays if name.startswith(prefix)}
