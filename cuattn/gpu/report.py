"""Compiling every kernel there is, with one row of resources each."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
import pathlib
import time

from cuattn.gpu import compiler, dispatch
from cuattn.gpu.compiler import CompileError, Report, Variant

#: Ampere, Hopper and Blackwell: what is compiled where no architecture is named and there is no GPU
#: to ask.
DEFAULT_ARCHS = ["sm_80", "sm_90a", "sm_120"]


def compile_report(
    archs: list[str] | None = None, jobs: int | None = None, digest: str | None = None
) -> int:
    """Compile every variant that :mod:`cuattn.gpu.dispatch` can choose and print a row of resources
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
    digest : str, optional
        A file for digests of the variants' machine code. Where it exists, the variants are compared
        with it, what differs is printed, and the file stays as it is; else it is written.

    Returns
    -------
    int
        0 if every variant compiled without a spill or a serialised instruction, else 1.
    """
    devices = _devices()
    archs = archs or list(devices) or DEFAULT_ARCHS
    tasks = [(variant, arch) for arch in archs for variant in dispatch.variants(arch)]
    jobs = min(jobs or os.cpu_count() or 1, len(tasks))
    print(f"compiling {len(tasks)} variants for {', '.join(archs)} in {jobs} processes", flush=True)
    start = time.perf_counter()
    failed = 0
    reports: list[Report] = []
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
            if isinstance(result, Report):
                reports.append(result)
            print(
                f"[{number:{len(str(len(tasks)))}}/{len(tasks)}]",
                _row(result) if isinstance(result, Report) else f"{task[1]:7} {result}",
                "" if clean else "  <-- FAILED",
                flush=True,
            )
    seconds = time.perf_counter() - start
    verdict = f"{failed} FAILED" if failed else "no spill, no serialised instruction"
    cached = sum(report.from_cache for report in reports)
    print(
        f"{len(tasks)} variants in {seconds:.0f} s, {cached} of them from the cache in "
        f"{compiler.cache_dir()}: {verdict}"
    )
    if digest is not None:
        _write_or_compare(pathlib.Path(digest), reports)
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
        report = compiler.report(variant, arch)
        if arch in devices:
            import cupy

            with cupy.cuda.Device(devices[arch]):
                compiler.kernel(variant, devices[arch])
    except CompileError as error:
        return str(error)
    return report


def _write_or_compare(file: pathlib.Path, reports: list[Report]) -> None:
    """Write a line ``digest arch source entry config`` for each variant, or say what differs from
    the lines that are there.

    A variant whose line has gone and one that is new are the same one renamed where their machine
    code is the same.
    """
    new = {_name(report): report.code_digest for report in reports}
    if not file.exists():
        lines = (f"{digest} {name}\n" for name, digest in sorted(new.items()))
        file.write_text("".join(lines), encoding="utf-8")
        print(f"digests of {len(new)} variants written to {file}")
        return
    lines = file.read_text(encoding="utf-8").splitlines()
    old = {name: digest for digest, name in (line.split(" ", 1) for line in lines)}
    changed = sorted(name for name in new.keys() & old.keys() if new[name] != old[name])
    gone, added = old.keys() - new.keys(), new.keys() - old.keys()
    kept = {old[name] for name in gone} & {new[name] for name in added}
    gone_code = sorted(name for name in gone if old[name] not in kept)
    added_code = sorted(name for name in added if new[name] not in kept)
    for what, names in (("changed", changed), ("gone", gone_code), ("new", added_code)):
        for name in names:
            print(f"{what:8}{name}")
    renamed = len(added) - len(added_code)
    same = len(new.keys() & old.keys()) - len(changed)
    print(
        f"machine code against {file}: {same} variants the same, {renamed} renamed and the same, "
        f"{len(changed)} changed, {len(gone_code)} gone, {len(added_code)} new"
    )


def _name(report: Report) -> str:
    variant = report.variant
    return f"{report.arch} {variant.source} {variant.entry} {variant.config}"


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
