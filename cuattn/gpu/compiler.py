"""CUDA source and a Config -> a kernel.

A kernel file in ``rawkernels/`` is joined with its includes into one text (CuPy's disk cache keys
on the text, not on included files), under a prelude that states its ``Config``. CuPy compiles it on
a GPU machine; :func:`compile_variant` compiles the same text with NVRTC where there is no GPU, and
reports what ptxas said.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.resources
import json
import os
import pathlib
import re
import struct
import time
from collections.abc import Callable
from typing import Any

from cuattn.gpu import debug

#: The CUDA type of a dtype name.
CTYPES = {
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
}

#: From compute capability to the architecture that has all its instructions.
ARCH_SPECIFIC = {(9, 0): "sm_90a"}
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class CompileError(RuntimeError):
    """A kernel did not compile. The message shows the kernel, its Config and the compiler's log."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One variant of a kernel; a subclass's fields become ``Config``'s constants in CUDA.

    A bool, int or float field ``x`` becomes ``static constexpr``, a dtype name (a str) becomes
    ``using x = …;``.
    """

    @property
    def threads(self) -> int:
        """Threads of a block."""
        raise NotImplementedError

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 0

    def prelude(self) -> str:
        """The text above the kernel's source."""
        names = [field.name for field in dataclasses.fields(self)] + ["threads", "smem_bytes"]
        body = "".join(f"  {_constant(name, getattr(self, name))}\n" for name in names)
        return f"#include <cuda_fp16.h>\n#include <cuda_bf16.h>\nstruct Config {{\n{body}}};\n"

    def __str__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return " ".join(f"{name}={value}" for name, value in values)


def _constant(name: str, value: Any) -> str:
    if isinstance(value, str):
        return f"using {name} = {CTYPES[value]};"
    ctype = {bool: "bool", int: "int", float: "float"}[type(value)]
    return f"static constexpr {ctype} {name} = {str(value).lower()};"


#: Where rawkernels/tile/score_mod.cuh includes the text of a variant's score functor.
SCORE_MOD_INCLUDE = "variant/score_mod.cuh"
#: The score functor of :func:`cuattn.flash_attention`: scale, softcap, bias, ALiBi, mask.
CONTRACT_SCORES = """template <class T, bool kFast, bool kLog2>
using ScoreMod = tile::ContractScores<T, kFast, kLog2>;
"""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kernel that can be launched: a file below rawkernels/, its entry point and a Config, and
    the text that defines ``ScoreMod``, as rawkernels/tile/score_mod.cuh describes it."""

    source: str
    entry: str
    config: Config
    score_mod: str = CONTRACT_SCORES


@dataclasses.dataclass(frozen=True)
class Report:
    """What compiling a variant gave."""

    variant: Variant
    arch: str
    registers: int
    static_smem: int
    spill_bytes: int
    stack_bytes: int  # local memory: what spills, and arrays that are indexed at run time
    warnings: tuple[str, ...]  # serialised wgmma and the like: C7510 to C7519
    milliseconds: float
    code_digest: str  # of the machine code: the same where two variants run the same instructions
    from_cache: bool = dataclasses.field(default=False, compare=False)  # not compiled this time

    @property
    def clean(self) -> bool:
        """Whether nothing spills and nothing is serialised."""
        return self.spill_bytes == 0 and not self.warnings


@functools.cache
def source_root() -> pathlib.Path:
    """The folder of the CUDA sources: inside the installed package, or beside it in a source
    tree."""
    package = pathlib.Path(str(importlib.resources.files("cuattn")))
    installed = package / "rawkernels"
    return installed if installed.is_dir() else package.parent / "rawkernels"


@functools.cache
def resolve(source: str, score_mod: str = CONTRACT_SCORES) -> str:
    """The text of `source` (a path below rawkernels/) with every ``#include "…"`` put in once, with
    ``#line``; `score_mod` is the text of `SCORE_MOD_INCLUDE`."""
    return "".join(_resolve(source, score_mod, set()))


def _resolve(path: str, score_mod: str, seen: set[str]) -> list[str]:
    seen.add(path)
    parts = [f'#line 1 "{path}"\n']
    if path == SCORE_MOD_INCLUDE:
        text = score_mod
    else:
        text = (source_root() / path).read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        include = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if include is None:
            parts.append("\n" if line.strip() == "#pragma once" else line)
        elif include[1] in seen:
            parts.append("\n")
        else:
            parts += [*_resolve(include[1], score_mod, seen), f'#line {number + 1} "{path}"\n']
    return parts


def full_source(variant: Variant) -> str:
    """The one text that is compiled."""
    return variant.config.prelude() + resolve(variant.source, variant.score_mod)


def options(arch: str) -> tuple[str, ...]:
    """The compiler options of every kernel that CuPy is given."""
    return ("-std=c++17", f"-arch={arch}")


#: What CuPy adds to these, beside where headers are and an architecture that is less specific.
#: With -ftz=true arithmetic takes subnormal float32 numbers for 0: that is other machine code with
#: other registers, so reports are compiled with it too.
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")


@functools.cache  # asking takes the driver a millisecond
def device_arch(device: int) -> str:
    """The architecture to compile for on a device, such as ``sm_90a``."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(device)
    capability = (properties["major"], properties["minor"])
    return ARCH_SPECIFIC.get(capability, "sm_{}{}".format(*capability))


@functools.cache
def multiprocessors(device: int) -> int:
    """How many multiprocessors a device has."""
    from cupy.cuda import runtime

    return runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device)


@functools.cache
def kernel(variant: Variant, device: int) -> Callable[..., None]:
    """Compile a variant for a device, which must be the current one.

    Returns
    -------
    callable
        Launches on the current stream: ``launch(grid, block, arguments, shared_mem=0)``, where
        `arguments` is a sequence as ``cupy.RawKernel`` takes it. The fast way is an int: the
        address of a table of the arguments' addresses, with `grid` and `block` of three numbers.

    Raises
    ------
    CompileError
        With the kernel, the Config and the log.
    """
    import cupy

    module = cupy.RawModule(code=full_source(variant), options=options(device_arch(device)))
    try:
        function = module.get_function(variant.entry)
        # 48 KiB and above have to be asked for, static memory counted in.
        if variant.config.smem_bytes:
            function.max_dynamic_shared_size_bytes = variant.config.smem_bytes
    except cupy.cuda.compiler.CompileException as error:
        raise CompileError(_message(variant, device_arch(device), str(error))) from error
    handle = function.kernel.ptr
    driver, get_current_stream = cupy.cuda.driver, cupy.cuda.get_current_stream

    def launch(grid: tuple, block: tuple, arguments: Any, shared_mem: int = 0) -> None:
        if type(arguments) is not int:
            function(grid, block, arguments, shared_mem=shared_mem)
            return
        stream = get_current_stream().ptr
        try:
            driver.launchKernel(handle, *grid, *block, shared_mem, stream, arguments, 0)
        except driver.CUDADriverError as error:
            if error.status != INVALID_CONTEXT:
                raise
            cupy.cuda.runtime.free(0)  # a thread has no context before its first call of this kind
            driver.launchKernel(handle, *grid, *block, shared_mem, stream, arguments, 0)

    return debug.watched(launch, variant) if debug.ENABLED else launch


def report(variant: Variant, arch: str) -> Report:
    """What compiling a variant gives: from the cache on disk, or by :func:`compile_variant`.

    The cache is the folder ``CUATTN_CACHE_DIR``, or else ``cuattn`` in the user's cache folder
    (``XDG_CACHE_HOME``, ``~/.cache``). An entry's name is a hash of everything that the result
    depends on, so none is ever out of date; a variant that does not compile has no entry.
    """
    file = cache_dir() / f"{_cache_key(variant, arch)}.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        fields["warnings"] = tuple(fields["warnings"])
        return Report(variant, arch, **fields, from_cache=True)
    except (OSError, ValueError, TypeError, KeyError):  # not there, or not written by this version
        pass
    compiled = compile_variant(variant, arch)
    fields = {
        field.name: getattr(compiled, field.name)
        for field in dataclasses.fields(Report)
        if field.name not in ("variant", "arch", "from_cache")
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")  # processes may write the same entry
    unfinished.write_text(json.dumps(fields), encoding="utf-8")
    unfinished.replace(file)
    return compiled


def cache_dir() -> pathlib.Path:
    """The folder of the compile reports."""
    named = os.environ.get("CUATTN_CACHE_DIR")
    if named:
        return pathlib.Path(named)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cuattn"


_REPORT_VERSION = "2"  # counts up when reports of the same text come out otherwise


def _cache_key(variant: Variant, arch: str) -> str:
    parts = (_REPORT_VERSION, *_compiler_versions(), *options(arch), *CUPY_OPTIONS, variant.entry)
    return hashlib.sha256("\0".join((*parts, full_source(variant))).encode()).hexdigest()


@functools.cache
def _compiler_versions() -> tuple[str, ...]:
    """The versions of NVRTC and of the wheels that bring it and CUDA's headers."""
    from cuda.bindings import nvrtc

    wheels = []
    for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime"):
        try:
            wheels.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            wheels.append("")
    return (*map(str, nvrtc.nvrtcVersion()[1:]), *wheels)


def compile_variant(variant: Variant, arch: str) -> Report:
    """Compile with NVRTC alone, as CuPy would: no GPU, no CuPy. Needs cuda-bindings and NVIDIA's
    NVRTC and runtime wheels.

    Raises
    ------
    CompileError
        With the kernel, the Config and the log.
    """
    from cuda.bindings import nvrtc
    from cuda.pathfinder import find_nvidia_header_directory

    include = find_nvidia_header_directory("cudart")
    flags = [*options(arch), *CUPY_OPTIONS, f"-I{include}", "--ptxas-options=-v"]
    start = time.perf_counter()
    _, program = nvrtc.nvrtcCreateProgram(
        full_source(variant).encode(), b"kernel.cu", 0, None, None
    )
    (result,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    milliseconds = (time.perf_counter() - start) * 1e3
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    buffer = bytes(size)
    nvrtc.nvrtcGetProgramLog(program, buffer)
    cubin = b""
    if result == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = bytes(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    log = buffer.decode(errors="replace").strip("\0\n ")
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(_message(variant, arch, log))
    return Report(
        variant=variant,
        arch=arch,
        registers=_largest(r"Used (\d+) registers", log),
        static_smem=_largest(r"(\d+) bytes smem", log),
        spill_bytes=_largest(r"(\d+) bytes spill stores", log),
        stack_bytes=_largest(r"(\d+) bytes stack frame", log),
        warnings=tuple(re.findall(r"C751\d", log)),
        milliseconds=milliseconds,
        code_digest=code_digest(cubin),
    )


def code_digest(cubin: bytes) -> str:
    """Hash the machine code and the constants of a cubin, an ELF file: neither names nor notes, nor
    the ``constexpr`` variables of the text, which are in ``.nv.global.init`` whether code reads
    them or not, with their addresses in ``.nv.constant4``."""
    (section_headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [
        # (name, type, flags, address, offset, size)
        struct.unpack_from("<2I4Q", cubin, section_headers + i * size)
        for i in range(count)
    ]
    name_table = headers[names][4]
    digest = hashlib.sha256()
    for name, _, _, _, offset, length in headers:
        start = name_table + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        if text.startswith((".text", ".nv.constant")) and text != ".nv.constant4":
            content = cubin[offset : offset + length]
            digest.update(text.split(".")[1].encode() + b"%d" % length)
            digest.update(content)
    return digest.hexdigest()[:32]


def _largest(pattern: str, log: str) -> int:
    return max(map(int, re.findall(pattern, log)), default=0)


def _message(variant: Variant, arch: str, log: str) -> str:
    return (
        f"{variant.source}: {variant.entry} did not compile for {arch}\n"
        f"Config: {variant.config}\n{log}"
    )
