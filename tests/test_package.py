"""What is installed: the wheel and an editable install, each in an empty virtual environment; what
importing costs; what docstrings show."""

from __future__ import annotations

import doctest
import importlib
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]

#: What compiling a kernel needs beside the package's own requirements, under the names of either
#: CUDA version.
COMPILER = [
    "cuda-bindings",
    "cuda-pathfinder",
    *("nvidia-cuda-nvrtc", "nvidia-cuda-runtime"),
    *("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12"),
]

needs_compiler = pytest.mark.skipif(
    sys.platform == "darwin", reason="NVIDIA's compiler does not exist for macOS"
)


@pytest.mark.parametrize(
    "file",
    [
        file.relative_to(ROOT)
        for file in sorted((ROOT / "cuattn").rglob("*.py"))
        if re.search(r"^ +>>> ", file.read_text(encoding="utf-8"), re.MULTILINE)
    ],
    ids=str,
)
def test_examples_in_docstrings(file):
    failed, attempted = doctest.testmod(
        importlib.import_module(".".join(file.with_suffix("").parts))
    )
    assert attempted
    assert not failed


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory) -> pathlib.Path:
    """A copy of what is packaged, free of what earlier builds left behind."""
    tree = tmp_path_factory.mktemp("source") / "cuattn"
    tree.mkdir()
    leave = shutil.ignore_patterns("__pycache__", "_build", "generated")
    for name in ("cuattn", "rawkernels", "tests", "examples", "docs"):
        shutil.copytree(ROOT / name, tree / name, ignore=leave)
    for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree)
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tree)
    return tree


@pytest.fixture(scope="module")
def distributions(source_tree, tmp_path_factory, say) -> tuple[pathlib.Path, pathlib.Path]:
    """The sdist, and the wheel built from it."""
    say("building the sdist, and the wheel from it")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source_tree)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def run(*command: object, **kwargs) -> str:
    """Run a command and return what it printed; it sees this process's environment but
    PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        **kwargs,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def empty_environment(folder: pathlib.Path, *, borrow: list[str]) -> tuple[str, pathlib.Path]:
    """Make a virtual environment that holds nothing but the named distributions of this one.

    They are linked (copied where links are not allowed): nothing is downloaded.
    """
    builder = venv.EnvBuilder(with_pip=False)
    builder.create(folder)
    python = builder.ensure_directories(folder).env_exe
    site_packages = pathlib.Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    entries = set()
    for name in borrow:
        distribution = importlib.metadata.distribution(name)
        home = pathlib.Path(str(distribution.locate_file("")))
        entries |= {(home, file.parts[0]) for file in distribution.files or []}
    for home, entry in entries:
        if entry in ("..", "__pycache__"):
            continue
        try:
            (site_packages / entry).symlink_to(home / entry)
        except OSError:
            copy = shutil.copytree if (home / entry).is_dir() else shutil.copy
            copy(home / entry, site_packages / entry)
    return python, site_packages


def requirements(wheel: pathlib.Path) -> list[str]:
    """The distributions that installing the wheel, without extras, asks for."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    wanted = [
        line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]
    return [re.match(r"Requires-Dist: ([\w-]+)", line)[1] for line in wanted]


COMPILE_ONE = """
import pathlib
import cuattn
from cuattn.gpu import compiler, dispatch
variant = next(dispatch.variants("sm_80"))
report = compiler.compile_variant(variant, "sm_80")
assert report.registers > 0
print(pathlib.Path(cuattn.__file__).parent, compiler.source_root(), sep="\\n")
"""

ATTEND = """
import numpy as np, cuattn
q = np.random.default_rng().standard_normal((1, 33, 2, 16))
assert np.isfinite(cuattn.flash_attention(q, q, q, causal=True)).all()
cuattn.show_config()
"""


def test_sdist_and_wheel_hold_every_kernel(distributions):
    sdist, wheel = distributions
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rawkernels").rglob("*.cu*")}
    assert files
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    assert files <= in_sdist
    assert {f"cuattn/{file}" for file in files} <= in_wheel
    assert not {name for name in in_wheel if name.startswith(("rawkernels/", "tests/"))}


def test_wheel_attends_with_its_requirements_alone(distributions, tmp_path, say):
    say("installing the wheel into an empty environment")
    _, wheel = distributions
    python, site_packages = empty_environment(tmp_path / "env", borrow=requirements(wheel))
    pip_install(python, "--no-deps", "--no-index", wheel)
    shown = run(python, "-c", ATTEND, cwd=tmp_path)
    assert "cupy          not available" in shown
    assert (site_packages / "cuattn" / "rawkernels" / "README.md").is_file()


@needs_compiler
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_install_compiles_a_kernel(distributions, source_tree, tmp_path, say, kind):
    say(f"compiling a kernel from the {kind} install, in an empty environment")
    _, wheel = distributions
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    borrow = [*requirements(wheel), *(name for name in COMPILER if name in installed)]
    if kind == "editable":
        borrow.append("setuptools")
    python, site_packages = empty_environment(tmp_path / "env", borrow=borrow)
    if kind == "wheel":
        pip_install(python, "--no-deps", "--no-index", wheel)
    else:
        pip_install(python, "--no-deps", "--no-index", "--no-build-isolation", "-e", source_tree)
    package, kernels = run(python, "-c", COMPILE_ONE, cwd=tmp_path).split()
    home = site_packages / "cuattn" if kind == "wheel" else source_tree / "cuattn"
    assert pathlib.Path(package).samefile(home)
    kernel_home = home / "rawkernels" if kind == "wheel" else source_tree / "rawkernels"
    assert pathlib.Path(kernels).samefile(kernel_home)


def pip_install(python: str, *arguments: object) -> None:
    """Install into another environment with this one's pip."""
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *arguments)


def test_importing_is_fast_and_leaves_cupy_alone():
    code = (
        "import sys, time, numpy\n"
        "start = time.process_time()\n"  # other programs of a busy machine are not counted
        "import cuattn\n"
        "print(time.process_time() - start, 'cupy' in sys.modules)"
    )
    runs = [run(sys.executable, "-c", code, cwd=ROOT).split() for _ in range(3)]
    assert min(float(seconds) for seconds, _ in runs) < 0.3
    assert {cupy for _, cupy in runs} == {"False"}


def test_version_is_the_packages():
    import cuattn

    assert re.fullmatch(r"\d+\.\d+\.\d+", cuattn.__version__)
    assert f"## {cuattn.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
