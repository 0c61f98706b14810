"""What is recorded beside the figures (machine, versions, commit), and the ceilings."""

from __future__ import annotations

import os
import pathlib
import platform
import subprocess

import cpuinfo
import numpy as np
import pytest

import cuattn
from benchmarks import peers, slim


def _gpu():
    """CuPy's properties of the current device, or None where there is none."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    except ImportError:
        return None
    except cupy.cuda.runtime.CUDARuntimeError:
        return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _gpu() is None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device, or no CuPy"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Reduce the file that pytest-benchmark has written to what the report reads."""
    option = config.getoption("benchmark_json")
    if option is None:
        return
    file = pathlib.Path(getattr(option, "name", option))  # before pytest-benchmark 5.3 an open file
    if file.is_file():
        slim.rewrite(file)


def pytest_benchmark_generate_machine_info() -> dict:
    """The GPU, the driver and the versions; nothing about whose machine it is."""
    cpu = cpuinfo.get_cpu_info().get("brand_raw", platform.machine())
    info = {
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "system": platform.system(),
        "python": platform.python_version(),
        "cuattn": cuattn.__version__,
        "numpy": np.__version__,
    }
    properties = _gpu()
    if properties is not None:
        import cupy

        info["gpu"] = properties["name"].decode()
        info["driver"] = _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        )
        info["nvrtc"] = "{}.{}".format(*cupy.cuda.nvrtc.getVersion())
        info["cupy"] = cupy.__version__
    return info | peers.versions()


def pytest_benchmark_generate_commit_info() -> dict:
    """The commit that was measured; $CUATTN_COMMIT where the tree was copied without its
    history."""
    return {"id": os.environ.get("CUATTN_COMMIT") or _output("git", "rev-parse", "HEAD")}


def _output(*command: str) -> str:
    """The first line a command prints, or "unknown"."""
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return lines.partition("\n")[0].strip()


@pytest.fixture(scope="session")
def ceilings() -> dict[str, float]:
    """What this GPU reaches: bytes/s of a copy, FLOP/s of cuBLAS by dtype."""
    from benchmarks.ceilings import copy_bytes_per_second, matmul_flops_per_second

    return {
        "copy": copy_bytes_per_second(),
        "float16": matmul_flops_per_second("float16"),
        "bfloat16": matmul_flops_per_second("bfloat16"),
    }
