"""What the emulator says of races in shared memory, with ``races=1``: of each rule a kernel that
breaks it, which is reported in any order of the warps, and the same kernel mended, which is not.
They run with --emulate alone."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cuattn.gpu.compiler import source_root

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

HEADERS = ("shared", "mbarrier", "bulk", "cp_async", "bar", "cluster", "tma", "wgmma", "ldmatrix")
INCLUDES = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>"
#: Of seeds, slices and `late`, which must not change what is found.
ORDERS = ("", "late=1", "seed=1", "seed=2 late=1 slice=1")
RACE = "a race"
UNFENCED = r"no fence\.proxy\.async"
KERNEL = """extern "C" __global__ void CLUSTER example(const float4* from, float4* to) {
__shared__ alignas(1024) int x[2048];
__shared__ ptx::Mbarrier full, empty;
const int t = threadIdx.x, warp = t / 32;
int* out = reinterpret_cast<int*>(to);
const unsigned flag = ptx::shared_address(x);
"""


@pytest.fixture
def run(request, monkeypatch):
    """Launch a kernel of `cluster` blocks in several orders; returns what is reported, if
    anything."""
    if not request.config.getoption("emulate"):
        pytest.skip("of the emulator itself")

    def launch(body: str, threads: int, cluster: int = 1, option: str = "races=1") -> str:
        from cupy._errors import EmulationError

        files = [source_root() / "ptx" / f"{name}.cuh" for name in HEADERS]
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
        lines = [line for line in text.splitlines() if not line.startswith(("#include", "#pragma"))]
        monkeypatch.setenv("CUATTN_EMULATE", f"sm_90 {option}")
        kernel = KERNEL.replace("CLUSTER", f"__cluster_dims__({cluster})" if cluster > 1 else "")
        code = "\n".join((INCLUDES, *lines, kernel, body, "}"))
        module = cupy.RawModule(code=code, options=("-std=c++17", "-arch=sm_90a"))
        reports = []
        for order in ORDERS:
            monkeypatch.setenv("CUATTN_EMULATE", f"sm_90 {order} {option}")
            arrays = cupy.ones((256, 4), np.float32), cupy.zeros((256, 4), np.float32)
            try:
                module.get_function("example")((cluster,), (threads,), arrays)
                reports.append("")
            except EmulationError as error:
                reports.append(str(error))
        assert len({bool(report) for report in reports}) == 1, reports
        return reports[0]

    return launch


def init(full: int = 1, empty: int = 1) -> str:
    """The mbarriers, with the arrivals that they count."""
    return f"""if (t == 0) {{
      ptx::mbarrier_init(full, {full}); ptx::mbarrier_init(empty, {empty});
      ptx::fence_mbarrier_init();
    }}
    __syncthreads();"""


LOAD = "ptx::mbarrier_arrive_expect_tx(full, 512); ptx::bulk_load(x, from, 512, full);"
FULL, EMPTY = "ptx::mbarrier_wait(full, 0);", "ptx::mbarrier_wait(empty, 0);"
ADD = """ptx::bulk_reduce_add((float*)to, (const float*)x, 256); ptx::bulk_commit_group();"""
PRODUCT = """float d[32] = {};
    const auto tile = ptx::wgmma_descriptor(x, 1, 1024);
    ptx::wgmma_fence();
    ptx::Wgmma<64, __half>::shared_shared<false, false>(d, tile, tile, true);
    ptx::wgmma_commit_group();"""
AWAITED = "ptx::wgmma_wait_group<0>(); ptx::wgmma_keep(d);"

#: Threads, what is reported, and the kernel: of each «mended|broken» it has one half.
RULES = {
    "a barrier of the block": (
        64, RACE, "x[t] = t; «__syncthreads();|» out[t] = x[63 - t];",
    ),
    "a barrier of the block before memory is written again": (
        64, RACE, "x[t] = t; __syncthreads(); out[t] = x[63 - t]; «__syncthreads();|» x[t] = 0;",
    ),
    "a barrier of the warp": (
        32, RACE, "x[t] = t; «__syncwarp();|» out[t] = x[31 - t];",
    ),
    "a shuffle is no barrier": (
        32, RACE,
        "x[t] = t; «__syncwarp();|if (__shfl_xor_sync(~0u, t, 1) < 0) return;» out[t] = x[31 - t];",
    ),
    "a shuffle after reads": (
        32, RACE,
        """x[t] = t; __syncwarp(); int y = x[31 - t]; «y = __shfl_xor_sync(~0u, y, 1);|»
        x[t] = 0; out[t] = y;""",
    ),
    "a barrier of half the warp": (
        32, RACE, """x[t] = t; if (t < 16) { __syncwarp(0xffff); out[t] = x[«15|16» - t]; }""",
    ),
    "a barrier of the warp before one lane arrives for all": (
        64, RACE,
        f"""{init()}
        if (warp == 0) {{ x[t] = t; «__syncwarp();|» if (t == 0) ptx::mbarrier_arrive(full); }}
        else {{ {FULL} out[t] = x[t - 32]; }}""",
    ),
    "one lane waits, and the others for it": (
        64, RACE,
        f"""{init(32)}
        if (warp == 0) {{ x[t] = t; ptx::mbarrier_arrive(full); }}
        else {{ if (t == 32) {FULL} «__syncwarp();|» out[t] = x[t - 32]; }}""",
    ),
    "a named barrier": (
        96, RACE,
        """if (warp == 0) { x[t] = t; ptx::bar_arrive(1, 64); }
        else if (warp == 1) { ptx::bar_sync(1, 64); out[t] = x[«t - 32|t + 32»]; }
        else { x[t] = t; }""",
    ),
    "a full mbarrier": (
        64, RACE,
        f"""{init(32)}
        if (warp == 0) {{ x[t] = t; ptx::mbarrier_arrive(full); }}
        else {{ «{FULL}|» out[t] = x[t - 32]; }}""",
    ),
    "an empty mbarrier": (
        64, RACE,
        f"""{init(32)}
        if (warp == 0) {{ x[t] = t; ptx::mbarrier_arrive(full); «{EMPTY}|» x[t] = 5; }}
        else {{
          {FULL} out[t] = x[t - 32]; __syncwarp(); if (t == 32) ptx::mbarrier_arrive(empty);
        }}""",
    ),
    "another mbarrier's phase": (
        64, RACE,
        f"""{init()}
        if (t == 0) {{
          {LOAD} ptx::mbarrier_arrive_expect_tx(empty, 512);
          ptx::bulk_load(x + 128, from, 512, empty);
        }}
        if (warp == 1) {{ «{FULL}|{EMPTY}» out[t] = x[t]; {FULL} {EMPTY} }}""",
    ),
    "copies by cp.async": (
        64, RACE,
        """ptx::cp_async_16(ptx::shared_address(&x[4 * t]), from + t);
        «ptx::cp_async_wait_all();|» __syncthreads(); out[t] = x[255 - t];""",
    ),
    "groups of copies": (
        64, RACE,
        """for (int i = 0; i < 2; ++i) {
          ptx::cp_async_16(ptx::shared_address(&x[4 * t + 256 * i]), from + t);
          ptx::cp_async_commit();
        }
        ptx::cp_async_wait<1>(); __syncthreads(); out[t] = x[255 - t + «0|256»];
        ptx::cp_async_wait_all();""",
    ),
    "copies by the thread itself": (
        32, RACE,
        """ptx::cp_async_16(ptx::shared_address(&x[4 * t]), from + t);
        «ptx::cp_async_wait_all();|» out[t] = x[4 * t];""",
    ),
    "copies that arrive at an mbarrier": (
        64, RACE,
        f"""{init(32)}
        if (warp == 0) {{
          ptx::cp_async_16(ptx::shared_address(&x[4 * t]), from + t);
          «ptx::mbarrier_arrive_after_copies|ptx::mbarrier_arrive»(full);
        }} else {{ {FULL} out[t] = x[t - 32]; }}""",
    ),
    "copies for wgmma": (
        128, UNFENCED,
        f"""for (int i = t; i < 256; i += 128)
          ptx::cp_async_16(ptx::shared_address(&x[4 * i]), from);
        ptx::cp_async_wait_all(); «ptx::fence_proxy_async();|» __syncthreads();
        {PRODUCT} {AWAITED} to[0].x = d[0];""",
    ),
    "a bulk copy": (
        64, RACE,
        f"""{init()} if (t == 0) {{ {LOAD} }}
        if (warp == 1) {{ «{FULL}|» out[t] = x[t]; {FULL} }}""",
    ),
    "a bulk copy into memory that was read": (
        64, RACE,
        f"""{init()}
        if (warp == 1) {{ out[t] = x[t]; __syncwarp(); if (t == 32) ptx::mbarrier_arrive(empty); }}
        if (t == 0) {{ «{EMPTY}|» {LOAD} {FULL} }}""",
    ),
    "a bulk copy into memory that was written": (
        64, UNFENCED,
        f"""{init()} x[t] = t; «ptx::fence_proxy_async();|» __syncthreads();
        if (t == 0) {{ {LOAD} {FULL} }}""",
    ),
    "a bulk copy that is still under way at the end": (
        32, "a block may end before|when the block ended",
        f"""{init()} if (t == 0) {{ {LOAD} «{FULL}|» }}""",
    ),
    "the initialisation of an mbarrier for bulk copies": (
        32, r"without fence\.mbarrier_init",
        f"""if (t == 0) {{
          ptx::mbarrier_init(full, 1); «ptx::fence_mbarrier_init();|» {LOAD} {FULL}
        }}""",
    ),
    "the initialisation of an mbarrier": (
        64, "without having waited for it|not initialised",
        """if (t == 0) ptx::mbarrier_init(full, 32);
        «__syncthreads();|» if (warp == 1) ptx::mbarrier_arrive(full);""",
    ),
    "a bulk sum of memory that was written": (
        64, UNFENCED,
        f"""x[t] = 0; «ptx::fence_proxy_async();|» __syncthreads();
        if (t == 0) {{ {ADD} ptx::bulk_wait_group_read<0>(); }}""",
    ),
    "a bulk sum of memory that is written again": (
        64, RACE,
        f"""x[t] = 0; ptx::fence_proxy_async(); __syncthreads();
        if (t == 0) {{ {ADD} «ptx::bulk_wait_group_read<0>();|» }}
        __syncthreads(); x[t] = 1; if (t == 0) ptx::bulk_wait_all();""",
    ),
    "a product of memory that was written": (
        128, UNFENCED,
        f"""for (int i = t; i < 2048; i += 128) x[i] = 0;
        «ptx::fence_proxy_async();|» __syncthreads(); {PRODUCT} {AWAITED} to[0].x = d[0];""",
    ),
    "a product of memory that was written, fenced by who waited": (
        128, UNFENCED,
        f"""for (int i = t; i < 2048; i += 128) x[i] = 0;
        «__syncthreads(); ptx::fence_proxy_async();|ptx::fence_proxy_async(); x[t] = 1;
        __syncthreads();» {PRODUCT} {AWAITED} to[0].x = d[0];""",
    ),
    "a product of memory that is written again": (
        128, RACE,
        f"""for (int i = t; i < 2048; i += 128) x[i] = 0;
        ptx::fence_proxy_async(); __syncthreads(); {PRODUCT}
        «{AWAITED}|» __syncthreads(); x[t] = 0; {AWAITED} to[0].x = d[0];""",
    ),
    "rows of matrices": (
        64, RACE,
        """x[2 * t] = x[2 * t + 1] = t; «__syncthreads();|__syncwarp();»
        unsigned d[4]; ptx::ldmatrix_x4(d, ptx::shared_address(&x[t % 32 * 4])); out[t] = d[0];""",
    ),
    "atomic operations": (
        64, RACE,
        """if (t == 0) x[0] = 0; __syncthreads();
        atomicAdd(&x[0], 1); «__syncthreads();|» out[t] = x[0];""",
    ),
    "a flag that is released": (
        64, RACE,
        """if (t == 0) x[0] = 0; __syncthreads();
        if (t == 0) {
          x[1] = 7;
          asm volatile("st.«release|relaxed».cta.shared.u32 [%0], 1;" ::"r"(flag) : "memory");
        } else if (t == 32) {
          int seen = 0;
          while (!seen)
            asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"(flag) : "memory");
          out[0] = x[1];
        }""",
    ),
    "a flag that is acquired": (
        64, RACE,
        """if (t == 0) x[0] = 0; __syncthreads();
        if (t == 0) {
          x[1] = 7;
          asm volatile("st.release.cta.shared.u32 [%0], 1;" ::"r"(flag) : "memory");
        } else if (t == 32) {
          while (!*(volatile int*)x) {}
          «__threadfence_block();|» out[0] = x[1];
        }""",
    ),
    "a flag between fences": (
        64, RACE,
        """if (t == 0) x[0] = 0; __syncthreads();
        if (t == 0) { x[1] = 7; «__threadfence_block();|» atomicExch(&x[0], 1); }
        else if (t == 32) {
          while (atomicAdd(&x[0], 0) == 0) {}
          __threadfence_block(); out[0] = x[1];
        }""",
    ),
    "lanes of one instruction that write the same": (
        32, RACE, "x[t / 8] = t; «__syncwarp();|» out[t] = x[t % 4];",
    ),
    "writes of one value": (
        64, RACE, "x[0] = «7|warp»; __syncthreads(); out[t] = x[0];",
    ),
    "parts of a word": (
        64, RACE,
        """auto* bytes = (unsigned char*)x;
        if (t % 32 == 0) bytes[«warp|warp / 2»] = warp; __syncthreads(); out[t] = bytes[0];""",
    ),
}  # fmt: skip

#: Of clusters of two blocks.
CLUSTER_RULES = {
    "a barrier of the cluster": (
        RACE,
        """const int rank = ptx::cluster_ctarank(); x[t] = t; ptx::cluster_barrier();
        out[t] = *ptx::mapa(&x[31 - t], 1 - rank); ptx::cluster_barrier();
        out[t] += *ptx::mapa(&x[t], 1 - rank); «ptx::cluster_barrier();|» x[t] = 0;
        ptx::cluster_barrier();""",
    ),
    "a relaxed arrival at the barrier of the cluster": (
        RACE,
        """const int rank = ptx::cluster_ctarank(); x[t] = t;
        «ptx::cluster_arrive|ptx::cluster_arrive_relaxed»(); ptx::cluster_wait();
        out[t] = *ptx::mapa(&x[31 - t], 1 - rank); ptx::cluster_barrier();""",
    ),
    "a block that may have ended": (
        "a block may end before|has ended",
        """const int rank = ptx::cluster_ctarank(); x[t] = t; ptx::cluster_barrier();
        out[t] = *ptx::mapa(&x[31 - t], 1 - rank); «ptx::cluster_barrier();|»""",
    ),
    "a block that may not have begun": (
        "may not have begun",
        """const int rank = ptx::cluster_ctarank();
        «ptx::cluster_arrive_relaxed(); ptx::cluster_wait();|»
        *ptx::mapa(&x[t], 1 - rank) = t; ptx::cluster_barrier();""",
    ),
    "stores to another block": (
        RACE,
        """const int rank = ptx::cluster_ctarank(); float2* pairs = (float2*)x;
        if (t == 0) {
          ptx::mbarrier_init(full, 1); ptx::fence_mbarrier_init();
          ptx::mbarrier_arrive_expect_tx(full, 32 * 8);
        }
        __syncwarp(); ptx::cluster_arrive_relaxed(); ptx::cluster_wait();
        ptx::store_async(pairs[t], 1, 2, full, 1 - rank);
        ptx::«mbarrier_wait_cluster|mbarrier_wait»(full, 0); out[t] = x[t];
        ptx::mbarrier_wait_cluster(full, 0);""",
    ),
}


def halves(body: str) -> tuple[str, str]:
    """A kernel, mended and broken."""
    marks = r"«([^|»]*)\|([^»]*)»"
    return re.sub(marks, r"\1", body), re.sub(marks, r"\2", body)


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_a_block(run, rule):
    threads, message, body = RULES[rule]
    mended, broken = halves(body)
    assert run(mended, threads) == ""
    assert re.search(message, run(broken, threads))


@pytest.mark.parametrize("rule", CLUSTER_RULES)
def test_rules_of_a_cluster(run, rule):
    message, body = CLUSTER_RULES[rule]
    mended, broken = halves(body)
    assert run(mended, 32, cluster=2) == ""
    assert re.search(message, run(broken, 32, cluster=2))


def test_a_report_names_both_sides(run):
    report = run("x[t] = t;\nout[t] = x[63 - t];", 64)
    for part in (
        r"shared address \d+ of block \(0, 0, 0\): a race",
        r"warp 0, lane \d+ .* it",
        r"warp 1, lane \d+ .* it",
        r"PTX line \d+: st\.shared",
        r"PTX line \d+: ld\.shared",
        r"line \d+$",
    ):
        assert re.search(part, report, re.MULTILINE), part


def test_memory_that_was_never_written(run):
    mended, broken = halves("if (t < «64|32») x[t] = 1; __syncthreads(); out[t] = x[t];")
    assert run(mended, 64, option="initcheck=1") == ""
    assert "was never written" in run(broken, 64, option="initcheck=1")


def test_nothing_is_looked_for_without_the_option(run):
    assert run("x[t] = t; out[t] = x[63 - t];", 64, option="") == ""
