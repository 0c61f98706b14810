"""Compiling every kernel there is, with one row of resources each."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
import time

from cuattn.gpu import compiler, tiles
from cuattn.gpu.compiler import CompileError, Report, Variant

#: Ampere, Hopper and Blackwell: what is compiled where no architecture is named and there is no GPU
#: to ask.
DEFAULT_ARCHS = ["sm_80", "sm_90a", "sm_120"]


def compile_report(archs: list[str] | None = None, jobs: int | None = None) -> int:
    """Compile every variant that :mod:`cuattn.gpu.tiles` can choose and print a row of resources
    for each.

    Where the machine has a GPU of one of the architectures, the variant also goes to CuPy's kernel
    cache.

    Parameters
    ----------
    archs : list of str, optional
        Such as ``["sm_80", "sm_90a"]``. Default: those of this machine's GPUs, or `DEFAULT_ARCHS`
        where it has none.
    jobs : int, optional
        Processes to compile in. Default: one a core.

    Returns
    -------
    int
        0 if every variant compiled without a spill or a serialised instruction, else 1.
    """
    devices = _devices()
    archs = archs or list(devices) or DEFAULT_ARCHS
    tasks = [(variant, arch) for arch in archs for variant in tiles.variants(arch)]
    jobs = min(jobs or os.cpu_count() or 1, len(tasks))
    print(f"compiling {len(tasks)} variants for {', '.join(archs)} in {jobs} processes", flush=True)
    start = time.perf_counter()
    failed = 0
    compile_one = functools.partial(_compile, devices=devices)
    # Spawned, not forked: a process that has touched CUDA cannot be forked.
    with concurrent.futures.ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        for number, (task, result) in enumerate(
            zip(tasks, pool.map(compile_one, tasks), strict=True), start=1
        ):
            clean = isinstance(result, Report) and result.clean
            failed += not clean
            print(
                f"[{number:{len(str(len(tasks)))}}/{len(tasks)}]",
                _row(result) if isinstance(result, Report) else f"{task[1]:7} {result}",
                "" if clean else "  <-- FAILED",
                flush=True,
            )
    seconds = time.perf_counter() - start
    verdict = f"{failed} FAILED" if failed else "no spill, no serialised instruction"
    print(f"{len(tasks)} variants in {seconds:.0f} s: {verdict}")
    return 1 if failed else 0


def _devices() -> dict[str, int]:
    """This machine's GPUs: one device number for each architecture."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError:
        return {}
    except cupy.cuda.runtime.CUDARuntimeError:  # no driver, or no device
        return {}
    return {compiler.device_arch(device): device for device in reversed(range(count))}


def _compile(task: tuple[Variant, str], devices: dict[str, int]) -> Report | str:
    variant, arch = task
    try:
        report = compiler.compile_variant(variant, arch)
        if arch in devices:
            import cupy

            with cupy.cuda.Device(devices[arch]):
                compiler.kernel(variant, devices[arch])
    except CompileError as error:
        return str(error)
    return report


def _row(report: Report) -> str:
    config = report.variant.config
    smem = report.static_smem + config.smem_bytes
    return (
        f"{report.arch:7} {report.variant.source} {report.variant.entry}  {config}  "
        f"threads={config.threads}  {report.registers} registers, {smem} B shared, "
        f"{report.spill_bytes} B spilled, {report.stack_bytes} B local, "
        f"{report.milliseconds:.0f} ms"
        + "".join(f", {warning}" for warning in sorted(set(report.warnings)))
    )
