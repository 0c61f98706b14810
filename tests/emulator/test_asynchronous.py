"""What the emulator says of asynchronous work that a kernel gets wrong: a missing wait shows as
numbers that were not there yet, misuse of an mbarrier by name. They run with --emulate alone."""

from __future__ import annotations

import numpy as np
import pytest

from cuattn.gpu.compiler import source_root

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu


@pytest.fixture
def run(request, monkeypatch):
    """Compile a kernel of blocks of one warp, one block or a cluster, and launch it; asynchronous
    work is late."""
    if not request.config.getoption("emulate"):
        pytest.skip("of the emulator itself")
    monkeypatch.setenv("CUATTN_EMULATE", "sm_90 late=1 seed=1")

    def launch(body: str, *arguments, blocks: int = 1) -> None:
        names = ("shared", "mbarrier", "bulk", "cp_async", "cluster")
        headers = [source_root() / "ptx" / f"{name}.cuh" for name in names]
        text = "\n".join(header.read_text(encoding="utf-8") for header in headers)
        lines = [line for line in text.splitlines() if not line.startswith(("#include", "#pragma"))]
        kernel = f"""
        extern "C" __global__ void __cluster_dims__({blocks})
            example(const float4* from, float4* to) {{"""
        code = "\n".join((*lines, kernel, body, "}"))
        options = ("-std=c++17", "-arch=sm_90a")
        function = cupy.RawModule(code=code, options=options).get_function("example")
        function((blocks,), (32,), arguments)

    return launch


@pytest.mark.parametrize("waits", [False, True])
def test_copies_come_at_their_wait(run, waits):
    rows = np.arange(128, dtype=np.float32).reshape(32, 4)
    to = cupy.zeros((32, 4), np.float32)
    run(
        f"""
        __shared__ alignas(16) float4 rows[32];
        rows[threadIdx.x] = {{-1, -1, -1, -1}};
        __syncwarp();
        ptx::cp_async_16(ptx::shared_address(&rows[threadIdx.x]), from + threadIdx.x);
        {"ptx::cp_async_wait_all();" if waits else ""}
        to[threadIdx.x] = rows[threadIdx.x];
        """,
        cupy.asarray(rows),
        to,
    )
    np.testing.assert_array_equal(to.get(), rows if waits else -1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ptx::mbarrier_arrive(barrier);", "an mbarrier that is not initialised"),
        (
            "ptx::mbarrier_init(barrier, 1); barrier = 5; ptx::mbarrier_arrive(barrier);",
            "an mbarrier that was overwritten",
        ),
        (
            "ptx::mbarrier_init(barrier, 2); ptx::mbarrier_expect_tx(barrier, (1 << 20) - 1);"
            "ptx::mbarrier_expect_tx(barrier, 1);",
            "count of bytes overflows",
        ),
        (
            "ptx::mbarrier_init(barrier, 2); ptx::mbarrier_arrive(barrier);"
            "ptx::mbarrier_wait(barrier, 0);",
            r"deadlock(.|\n)*phase 0 of the mbarrier at \d+ \(1 of 2 arrivals, 0 bytes to come\)",
        ),
    ],
)
def test_misuse_of_an_mbarrier_is_named(run, body, message):
    from cupy._errors import EmulationError

    rows = cupy.zeros((2, 32, 4), np.float32)
    with pytest.raises(EmulationError, match=message):
        run(f"__shared__ ptx::Mbarrier barrier; if (threadIdx.x == 0) {{ {body} }}", *rows)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("to[rank] = other;", "has ended|may not have begun"),
        (
            "ptx::cluster_barrier(); if (rank == 1) return;"
            "for (int i = 0; i < 1000; ++i) __nanosleep(1);"
            "to[0] = other;",
            "has ended",
        ),
        ("ptx::cluster_barrier(); to[rank] = other; ptx::cluster_barrier();", None),
    ],
)
def test_other_blocks_shared_memory_is_there_while_they_run(run, body, message):
    from cupy._errors import EmulationError

    rows = cupy.zeros((2, 32, 4), np.float32)
    body = f"""
        __shared__ alignas(16) float4 row;
        const int rank = ptx::cluster_ctarank();
        row.x = rank;
        float4& other = *ptx::mapa(&row, 1 - rank);
        {body}
        """
    if message is None:
        run(body, *rows, blocks=2)
        assert rows[1, :2, 0].get().tolist() == [1, 0]
    else:
        with pytest.raises(EmulationError, match=message):
            run(body, *rows, blocks=2)
