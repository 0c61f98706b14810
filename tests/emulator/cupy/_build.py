"""Building: the emulator with g++, and kernels with NVRTC. Both are kept on disk by their texts."""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable

from cupy import _errors

FOLDER = pathlib.Path(__file__).resolve().parent.parent
FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-mprefer-vector-width=512", "-fPIC", "-Wno-psabi"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"),
)


class CompileException(Exception):
    """What CuPy raises where a kernel does not compile."""

    def __init__(self, message: str, source: str, name: str, options: tuple[str, ...]) -> None:
        super().__init__(message)
        self.source, self.name, self.options = source, name, options


def _kept(key: tuple[str, ...], suffix: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """The file of a key in the cache folder; `make` writes it where it is not there yet."""
    from cuattn.gpu.compiler import cache_dir

    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()
    file = cache_dir() / "emulator" / f"{digest[:40]}{suffix}"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f"{file.stem}.{os.getpid()}{suffix}")
        try:
            make(unfinished)
            unfinished.replace(file)  # processes may make the same file
        finally:
            unfinished.unlink(missing_ok=True)
    return file


def compiler() -> str | None:
    """The host compiler, if there is one."""
    return shutil.which(os.environ.get("CXX") or "g++")


def shared_object() -> pathlib.Path:
    """The emulator's shared library.

    Raises
    ------
    EmulationError
        There is no host compiler, or it refuses the text.
    """
    command = compiler()
    if command is None:
        raise _errors.EmulationError("the emulator needs a host compiler: g++, or what CXX names")
    version = subprocess.run([command, "--version"], capture_output=True, text=True).stdout
    cpu = pathlib.Path("/proc/cpuinfo")  # -march=native is another machine's on another machine
    features = [line for line in cpu.read_text().splitlines() if line.startswith(("flags", "Feat"))]
    headers = [file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.h"))]
    key = (command, version, *features[:1], *FLAGS, *headers)

    def compiled(source: pathlib.Path) -> pathlib.Path:
        flags = [*FLAGS, "-c", str(source)]
        text = source.read_text(encoding="utf-8")
        return _kept((*key, text), ".o", lambda file: _run(command, *flags, "-o", str(file)))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(file) for file in pool.map(compiled, sorted(FOLDER.glob("*.cpp")))]
    linked = ("-shared", *objects)
    return _kept(linked, ".so", lambda file: _run(command, *linked, "-o", str(file)))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise _errors.EmulationError(f"{' '.join(command)} failed:\n{done.stderr}")


@functools.cache
def _include() -> tuple[str, tuple[str, ...]]:
    """The folder of CUDA's headers, and what says which compiler it is."""
    from cuda.bindings import nvrtc
    from cuda.pathfinder import find_nvidia_header_directory

    return find_nvidia_header_directory("cudart"), tuple(map(str, nvrtc.nvrtcVersion()[1:]))


def ptx(source: str, options: tuple[str, ...]) -> str:
    """Compile CUDA C++ to PTX; ``-arch=sm_…`` among the options stands for its virtual
    architecture.

    Raises
    ------
    CompileException
        With the compiler's log.
    """
    include, version = _include()
    flags = [option.replace("-arch=sm_", "-arch=compute_") for option in options]

    def make(file: pathlib.Path) -> None:
        file.write_text(_compile(source, (*flags, f"-I{include}")), encoding="utf-8")

    return _kept((source, *flags, include, *version), ".ptx", make).read_text(encoding="utf-8")


def _compile(source: str, flags: tuple[str, ...]) -> str:
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, None, None)
    (result,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytes(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        nvrtc.nvrtcDestroyProgram(program)
        text = log.decode(errors="replace").strip("\0\n ")
        raise CompileException(text, source, "kernel.cu", flags)
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = bytes(size)
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode().rstrip("\0")
