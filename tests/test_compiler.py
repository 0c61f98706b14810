"""Source + Config -> compiled kernel: what is put together, what is reported, and what an error
says. No GPU needed."""

from __future__ import annotations

import dataclasses
import re
import sys
import uuid

import numpy as np
import pytest

from cuattn.__main__ import main
from cuattn._spec import attention_spec
from cuattn.gpu import compiler, dispatch
from cuattn.gpu.compiler import CompileError, Config, Variant
from cuattn.gpu.dispatch import Layout
from cuattn.gpu.report import DEFAULT_ARCHS

pytestmark = pytest.mark.skipif(
    sys.platform == "darwin", reason="NVIDIA's compiler does not exist for macOS"
)


@dataclasses.dataclass(frozen=True)
class Example(Config):
    """A Config with a field of every kind."""

    causal: bool = True
    tile_m: int = 64
    scale: float = 0.5
    dtype: str = "bfloat16"

    @property
    def threads(self) -> int:
        return 128


CLEAN = """
extern "C" __global__ __launch_bounds__(Config::threads) void example(float* x) {
  static_assert(Config::causal && Config::tile_m == 64 && Config::scale == 0.5f &&
  Config::smem_bytes == 0); static_assert(sizeof(Config::dtype) == 2); __shared__ float tile[32];
  tile[threadIdx.x % 32] = x[threadIdx.x]; __syncthreads(); x[threadIdx.x] = tile[(threadIdx.x + 1)
  % 32] * Config::scale;
}
"""

# 128 values stay alive across a barrier where the bounds leave 32 registers a thread.
SPILLS = """
extern "C" __global__ __launch_bounds__(1024, 2) void example(float* x) {
  float kept[128];
  #pragma unroll
  for (int i = 0; i < 128; ++i) kept[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 128; ++i) x[i * 1024 + threadIdx.x] = kept[127 - i] + 1;
}
"""

# The accumulator is touched while wgmma still works on it, so the compiler waits after each one.
SERIALISED = r"""
extern "C" __global__ void example(float* x) {
  float acc[4] = {x[0], x[1], x[2], x[3]};
  unsigned long long a = threadIdx.x >> 7, b = a;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]) : "l"(a), "l"(b));
  acc[0] *= 2.0f;
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 4; ++i) x[threadIdx.x * 4 + i] = acc[i];
}
"""

BROKEN = 'extern "C" __global__ void example(float* x) {\n  *x = no_such_name;\n}\n'


@pytest.fixture
def variant(tmp_path):
    """A Variant of a kernel given by its text."""

    def make(text: str) -> Variant:
        file = tmp_path / "example.cu"
        file.write_text(text, encoding="utf-8")
        return Variant(str(file), "example", Example())

    yield make
    compiler.resolve.cache_clear()


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A rawkernels/ of the test's own."""
    monkeypatch.setattr(compiler, "source_root", lambda: tmp_path)
    compiler.resolve.cache_clear()
    yield tmp_path
    compiler.resolve.cache_clear()


def test_prelude_states_the_config():
    prelude = Example().prelude()
    for constant in (
        "static constexpr bool causal = true;",
        "static constexpr int tile_m = 64;",
        "static constexpr float scale = 0.5;",
        "using dtype = __nv_bfloat16;",
        "static constexpr int threads = 128;",
        "static constexpr int smem_bytes = 0;",
    ):
        assert constant in prelude


def test_includes_go_in_once_and_lines_keep_their_numbers(sources):
    (sources / "tile").mkdir()
    (sources / "tile" / "a.cuh").write_text('#pragma once\n#include "tile/b.cuh"\nint a;\n')
    (sources / "tile" / "b.cuh").write_text("#pragma once\nint b;\n")
    (sources / "kernel.cu").write_text(
        '#include "tile/a.cuh"\n#include "tile/b.cuh"\nint kernel;\n'
    )

    places, file, line = {}, None, 0
    for text in compiler.resolve("kernel.cu").splitlines():
        marker = re.fullmatch(r'#line (\d+) "(.*)"', text)
        if marker:
            file, line = marker[2], int(marker[1])
        else:
            places.setdefault(text, []).append((file, line))
            line += 1
    assert places["int a;"] == [("tile/a.cuh", 3)]
    assert places["int b;"] == [("tile/b.cuh", 2)]
    assert places["int kernel;"] == [("kernel.cu", 3)]


def test_the_compiled_text_changes_with_an_included_file(sources):
    """CuPy's disk cache keys on the text: an edited header must be part of it."""
    (sources / "header.cuh").write_text("#define TILE 64\n")
    (sources / "kernel.cu").write_text('#include "header.cuh"\n')
    before = compiler.resolve("kernel.cu")
    (sources / "header.cuh").write_text("#define TILE 128\n")
    compiler.resolve.cache_clear()
    assert "#define TILE 128" in compiler.resolve("kernel.cu") != before


# Scores that a user might write; a kernel takes them where it takes the contract's.
USER_SCORES = """
template <class T, bool kFast, bool kLog2>
struct ScoreMod {
  using Acc = tile::Accumulator<T>;
  tile::ScoreInputs inputs;

  __device__ Acc slope(int, int) const { return 0; }
  template <class Visit>
  __device__ void terms(const Visit& visit) const {
    visit([this](Acc score, const tile::ScoreRow<Acc>& row, int key) {
      const Acc shifted = score * static_cast<Acc>(inputs.scale) + row.head % 2 - row.batch;
      return (row.query - key) % 3 ? shifted : shifted * (kLog2 ? 2 : 1);
    });
  }
};
"""


@pytest.mark.parametrize(
    ("tier", "keys", "arrays"),
    [
        ("forward_simt", "batched", True),
        ("forward_sm80", "batched", True),
        ("forward_sm90", "batched", False),
        ("forward_sm90", "batched", True),
        ("forward_sm90", "cached", False),
        ("decode_simt", "cached", False),
        ("decode_sm80", "cached", False),
        ("decode_sm90", "cached", False),
    ],
)
def test_a_score_functor_is_a_part_of_the_kernel(tier, keys, arrays):
    """A call with a functor of its own gets the kernel of a call with other scores, with this
    functor in it, on every tier: with bias and mask, or without."""
    dtype = np.dtype(np.float16)
    q, k = (2, 2, 4, 64), (2, 512, 2, 64)
    spec = attention_spec("flash_attention", q, k, k, *[dtype] * 3, softcap=5.0, keys=keys)
    bias = Layout((2, 4, 2, 512), (8192, 2048, 1024, 2), dtype)
    mask = Layout((2, 512), (512, 1), np.dtype(bool))
    tiers = tuple(each for each in dispatch.TIERS if each.name == tier)
    builtin, own = (
        dispatch.choose(dispatch.Call.contiguous(spec, "sm_90a", **options), tiers).variant
        for options in (
            {},
            {"score_mod": USER_SCORES, **({"bias": bias, "mask": mask} if arrays else {})},
        )
    )
    assert own.source == builtin.source
    assert [USER_SCORES in compiler.full_source(each) for each in (builtin, own)] == [False, True]
    report = compiler.report(own, "sm_90a")
    assert report.code_digest != compiler.report(builtin, "sm_90a").code_digest
    assert report.clean


def test_report_of_a_clean_kernel(variant):
    report = compiler.compile_variant(variant(CLEAN), "sm_90a")
    assert report.clean
    assert 0 < report.registers <= 255
    assert report.static_smem == 128
    assert report.milliseconds > 0


def test_report_shows_a_spill(variant):
    report = compiler.compile_variant(variant(SPILLS), "sm_80")
    assert report.spill_bytes > 0
    assert not report.clean


def test_report_shows_a_serialised_instruction(variant):
    report = compiler.compile_variant(variant(SERIALISED), "sm_90a")
    assert report.warnings
    assert not report.clean


def test_error_shows_kernel_config_and_log(variant):
    with pytest.raises(CompileError) as caught:
        compiler.compile_variant(variant(BROKEN), "sm_80")
    message = str(caught.value)
    assert "example did not compile for sm_80" in message
    assert "causal=True tile_m=64 scale=0.5 dtype=bfloat16" in message
    assert re.search(r"example\.cu\(2\): error: .*no_such_name", message)


@pytest.mark.parametrize(
    ("text", "status", "shown"),
    [(CLEAN, 0, "no spill"), (SPILLS, 1, "FAILED"), (BROKEN, 1, "no_such_name")],
    ids=["clean", "spills", "broken"],
)
def test_command_reports_and_fails_where_it_must(
    variant, monkeypatch, tmp_path, capsys, text, status, shown
):
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "reports"))
    example = variant(text)
    monkeypatch.setattr(dispatch, "variants", lambda arch: iter([example]))
    assert main(["compile", "--arch", "sm_80,sm_90a", "--jobs", "1"]) == status
    printed = capsys.readouterr().out
    assert printed.count("example") >= 2
    assert shown in printed


@pytest.fixture
def compiled(variant, monkeypatch, tmp_path):
    """Compile a text as the only variant there is, through the command; what it printed."""
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "reports"))

    def run(text: str, *arguments: str, entry: str = "example") -> int:
        example = dataclasses.replace(variant(text), entry=entry)
        compiler.resolve.cache_clear()
        monkeypatch.setattr(dispatch, "variants", lambda arch: iter([example]))
        return main(["compile", "--arch", "sm_80", "--jobs", "1", *arguments])

    return run


def test_digest_tells_changed_machine_code_from_a_changed_text(compiled, capsys, tmp_path):
    file = tmp_path / "digest"
    assert compiled(CLEAN, "--digest", str(file)) == 0
    assert len(file.read_text().splitlines()) == 1
    capsys.readouterr()

    same = CLEAN.replace("tile[", "renamed[") + "constexpr int kUnused = 7;  // and a comment\n"
    assert compiled(same, "--digest", str(file)) == 0
    assert "1 variants the same, 0 renamed and the same, 0 changed" in capsys.readouterr().out

    renamed = CLEAN.replace(" example(", " other(")
    assert compiled(renamed, "--digest", str(file), entry="other") == 0
    assert "0 variants the same, 1 renamed and the same, 0 changed" in capsys.readouterr().out

    changed = CLEAN.replace("+ 1", "+ 2")
    assert compiled(changed, "--digest", str(file)) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^changed +sm_80 .* example ", printed, re.MULTILINE)
    assert "0 variants the same, 0 renamed and the same, 1 changed" in printed


def test_reports_are_kept_until_what_they_depend_on_changes(variant, monkeypatch, tmp_path):
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "reports"))
    first = compiler.report(variant(CLEAN), "sm_80")

    def must_not(*_):
        raise AssertionError("compiled again")

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compile_variant", must_not)
        kept = compiler.report(first.variant, "sm_80")
        assert kept == first
        assert (first.from_cache, kept.from_cache) == (False, True)
        with pytest.raises(AssertionError, match="compiled again"):
            compiler.report(first.variant, "sm_90a")
    compiler.resolve.cache_clear()
    again = compiler.report(variant(CLEAN.replace("+ 1", "+ 2")), "sm_80")
    assert again.code_digest != first.code_digest
    for file in (tmp_path / "reports").iterdir():
        file.write_text("{}")
    assert compiler.report(again.variant, "sm_80").code_digest == again.code_digest


def test_every_kernel_compiles(say):
    """Each kernel in one variant for each generation; `python -m cuattn compile` is for all of
    them."""
    chosen = {
        (variant.source, variant.entry, arch): variant
        for arch in DEFAULT_ARCHS
        for variant in dispatch.variants(arch)
    }
    say(f"compiling {len(chosen)} kernels with NVRTC")
    for (_, _, arch), variant in chosen.items():
        assert compiler.report(variant, arch).registers > 0


def test_show_config(capsys):
    import cuattn

    cuattn.show_config()
    printed = capsys.readouterr().out
    assert cuattn.__version__ in printed
    assert "numpy" in printed


@pytest.mark.gpu
def test_cupy_compiles_for_the_architecture_with_all_instructions():
    """CuPy adds its own -arch after ours; NVRTC must take the more specific of the two."""
    import cupy

    device = cupy.cuda.Device()
    arch = compiler.device_arch(device.id)
    if not arch.endswith("a"):
        pytest.skip(f"{arch} has no architecture-specific instructions")
    code = """
    extern "C" __global__ void specific(int* x) {
    #ifdef __CUDA_ARCH_FEAT_SM90_ALL
      *x = 1;
    #else
      *x = 0;
    #endif
    }
    """
    flag = cupy.full(1, -1, dtype=cupy.int32)
    kernel = cupy.RawModule(code=code, options=compiler.options(arch)).get_function("specific")
    kernel((1,), (1,), (flag,))
    assert int(flag[0]) == 1


@pytest.mark.gpu
@pytest.mark.not_emulated("CuPy's own options")
def test_reports_are_compiled_with_the_options_that_cupy_adds(monkeypatch):
    import cupy

    program = cupy.cuda.compiler._NVRTCProgram
    compile_program, seen = program.compile, []

    def compile_and_note(self, options=(), *args, **kwargs):
        seen.append(options)
        return compile_program(self, options, *args, **kwargs)

    monkeypatch.setattr(program, "compile", compile_and_note)
    arch = compiler.device_arch(cupy.cuda.Device().id)
    code = f'extern "C" __global__ void of_no_cache_{uuid.uuid4().hex}() {{}}'
    cupy.RawModule(code=code, options=compiler.options(arch)).compile()
    added = {
        option
        for option in seen[-1]  # an empty program comes first, which says the compiler's version
        if not option.startswith(("-I", "-arch=")) and option not in compiler.options(arch)
    }
    assert added == set(compiler.CUPY_OPTIONS)


@pytest.mark.gpu
@pytest.mark.not_emulated("CuPy's cache on disk")
def test_command_fills_the_kernel_cache(variant, monkeypatch, tmp_path):
    import cupy

    example = variant(CLEAN)
    cache = tmp_path / "cache"
    monkeypatch.setattr(dispatch, "variants", lambda arch: iter([example]))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(cache))
    arch = compiler.device_arch(cupy.cuda.Device().id)
    assert main(["compile", "--arch", arch, "--jobs", "1"]) == 0
    assert list(cache.glob("*.cubin"))


def test_command_without_the_compiler_says_what_brings_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(SystemExit) as exit:
        main(["compile"])
    assert exit.value.code == 1
    assert "pip install '.[cuda13]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_80,compute_90"], "argument --arch: 'compute_90' is no architecture"),
        (["--arch", "sm_80,"], "argument --arch: '' is no architecture"),
        (["--jobs", "0"], "argument --jobs: '0' is no number from 1 on"),
        (["--digest", "."], "argument --digest: '.' is no file in a folder that is there"),
        (["--digest", "nowhere/x"], "argument --digest: 'nowhere/x' is no file"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_compiled(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["compile", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
