"""What this installation is made of: versions, devices, tiers and the kernel cache."""

from __future__ import annotations

import os
import pathlib
import platform
from collections.abc import Iterator
from typing import Any

import cuattn


def show_config() -> None:
    """Print the versions cuattn runs with, the devices it sees, their kernels, and the kernel
    cache.

    Put its output into a bug report. Nothing is compiled, and nothing is allocated on a device.

    Examples
    --------
    >>> import cuattn
    >>> cuattn.show_config()  # doctest: +SKIP
    """
    print("\n".join(_lines()))


def _lines() -> Iterator[str]:
    yield f"cuattn        {cuattn.__version__}"
    yield f"python        {platform.python_version()} ({platform.system()} {platform.machine()})"
    for name in ("numpy", "ml_dtypes"):
        yield f"{name:13} {_version(name)}"
    try:
        import cupy
    except ImportError as error:
        yield f"cupy          not available ({error}); NumPy arrays are served"
        yield f"{'':13} in a checkout of cuattn, pip install '.[cuda13]' adds the GPU"
        return
    yield f"cupy          {cupy.__version__}"
    yield f"cuda-bindings {_version('cuda-bindings')}"
    yield "nvrtc         {}.{}".format(*cupy.cuda.nvrtc.getVersion())
    yield from _devices(cupy.cuda.runtime)
    yield from _kernel_cache()


def _version(distribution: str) -> str:
    import importlib.metadata  # 40 ms: not part of `import cuattn`

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices(runtime: Any) -> Iterator[str]:
    from cuattn.gpu import compiler

    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        yield f"devices       none ({error})"
        return
    driver = runtime.driverGetVersion()
    yield f"driver        CUDA {driver // 1000}.{driver % 1000 // 10}"
    for device in range(count):
        properties = runtime.getDeviceProperties(device)
        arch = compiler.device_arch(device)
        yield (
            f"device {device:<6} {properties['name'].decode()}, {arch}, "
            f"{properties['multiProcessorCount']} multiprocessors, "
            f"{properties['totalGlobalMem'] / 2**30:.0f} GiB; tiers: {', '.join(_tiers(arch))}"
        )


def _tiers(arch: str) -> list[str]:
    """The tiers with kernels for an architecture, fastest first."""
    from cuattn.gpu import dispatch

    stems = (pathlib.PurePosixPath(variant.source).stem for variant in dispatch.variants(arch))
    found = {stem.rpartition("_")[2] for stem in stems}
    return [tier for tier in ("sm90", "sm80", "simt") if tier in found]


def _kernel_cache() -> Iterator[str]:
    """CuPy's folder of compiled kernels, cuattn's among them."""
    folder = pathlib.Path(
        os.environ.get("CUPY_CACHE_DIR") or pathlib.Path.home() / ".cupy" / "kernel_cache"
    )
    sizes = [file.stat().st_size for file in folder.glob("*.cubin")]
    yield f"kernel cache  {folder}: {len(sizes)} kernels, {sum(sizes) / 2**20:.1f} MiB"
