"""What rawkernels/ptx says of instructions on matrices and of asynchronous ones: which lane holds
what, where TMA puts a box, what completes an mbarrier."""

from __future__ import annotations

import ctypes
import dataclasses

import ml_dtypes
import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from cuattn.gpu import compiler, tensormap  # noqa: E402

pytestmark = pytest.mark.gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16}


@dataclasses.dataclass(frozen=True)
class Example(compiler.Config):
    """Of a kernel of these tests."""

    T: str = "float16"
    kN: int = 64
    kTransA: bool = False
    kTransB: bool = False
    kRegisters: bool = False
    warps: int = 1
    bytes: int = 0

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        return self.bytes


@pytest.fixture
def launch(tmp_path):
    """Compile a kernel from its text and launch it: arguments are arrays, and bytes for structs."""

    def run(text: str, config: Example, *arguments, blocks: int = 1) -> None:
        file = tmp_path / "example.cu"
        file.write_text(text, encoding="utf-8")
        variant = compiler.Variant(str(file), "example", config)
        kernel = compiler.kernel(variant, cupy.cuda.Device().id)
        values = [
            a if isinstance(a, bytes) else a.data.ptr.to_bytes(8, "little") for a in arguments
        ]
        held = [ctypes.create_string_buffer(value, len(value)) for value in values]
        table = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        address = ctypes.addressof(table)
        kernel((blocks, 1, 1), (config.threads, 1, 1), address, config.smem_bytes)

    yield run
    compiler.resolve.cache_clear()
    compiler.kernel.cache_clear()


@pytest.fixture
def hopper():
    if compiler.device_arch(0) != "sm_90a":
        pytest.skip("not a Hopper GPU")


def integers(rng, dtype, *shape):
    """Small ones, whose products and sums are exact."""
    return rng.integers(-8, 9, shape).astype(dtype)


MMA = """
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
// d (16, 16) += a (16, 16) b (16, 16)
extern "C" __global__ void example(const Config::T* a, const Config::T* b, float* d) {
  __shared__ alignas(16) Config::T rows_a[16][16], rows_b[16][16];
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) {
    rows_a[i / 16][i % 16] = a[i];
    rows_b[i / 16][i % 16] = b[i];
  }
  __syncwarp();
  const int row = lane % 16, column = lane / 16 * 8;
  unsigned a_tile[4], b_tile[4];
  ptx::ldmatrix_x4(a_tile, ptx::shared_address(&rows_a[row][column]));
  ptx::ldmatrix_x4_trans(b_tile, ptx::shared_address(&rows_b[row][column]));
  for (int half = 0; half < 2; ++half) {
    const auto place = [&](int i) -> float& {
      return d[(lane / 4 + i / 2 * 8) * 16 + half * 8 + lane % 4 * 2 + i % 2];
    };
    float sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = place(i);
    ptx::mma_m16n8k16<Config::T>(sums, a_tile, b_tile[2 * half], b_tile[2 * half + 1]);
    for (int i = 0; i < 4; ++i) place(i) = sums[i];
  }
}
"""


@pytest.mark.parametrize("dtype", DTYPES)
def test_mma_takes_what_ldmatrix_loads(launch, dtype, rng):
    a, b = (integers(rng, DTYPES[dtype], 16, 16) for _ in "ab")
    before = integers(rng, np.float32, 16, 16)
    d = cupy.asarray(before)
    launch(MMA, Example(T=dtype), cupy.asarray(a), cupy.asarray(b), d)
    np.testing.assert_array_equal(cupy.asnumpy(d), before + np.float32(a) @ np.float32(b))


MOVES = """
#include "ptx/ldmatrix.cuh"
#include "ptx/movmatrix.cuh"
#include "ptx/shared.cuh"
#include "ptx/stmatrix.cuh"
// Four matrices (8, 8): copied; each transposed by stmatrix, and by movmatrix.
extern "C" __global__ void example(const unsigned short* from, unsigned short* to) {
  __shared__ alignas(16) unsigned short rows[32][8], results[3][32][8];
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) rows[i / 8][i % 8] = from[i];
  __syncwarp();
  unsigned held[4], moved[4];
  ptx::ldmatrix_x4(held, ptx::shared_address(rows[lane]));
  for (int i = 0; i < 4; ++i) moved[i] = ptx::movmatrix_trans(held[i]);
  ptx::stmatrix_x4(ptx::shared_address(results[0][lane]), held);
  ptx::stmatrix_x4_trans(ptx::shared_address(results[1][lane]), held);
  ptx::stmatrix_x4(ptx::shared_address(results[2][lane]), moved);
  __syncwarp();
  for (int i = lane; i < 768; i += 32) to[i] = results[i / 256][i / 8 % 32][i % 8];
}
"""


def test_matrices_move_between_registers_and_shared_memory(launch, hopper, rng):
    matrices = rng.integers(0, 1 << 16, (4, 8, 8), np.uint16)
    to = cupy.zeros((3, 4, 8, 8), np.uint16)
    launch(MOVES, Example(), cupy.asarray(matrices), to)
    transposed = matrices.swapaxes(1, 2)
    np.testing.assert_array_equal(cupy.asnumpy(to), [matrices, transposed, transposed])


WGMMA = """
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
// d (64, N) += a (64, 64) b (64, N) with a or its transpose in `a_map`, b (kTransB) or its
// transpose in `b_map`; the panels of 64 columns of an operand follow each other.
extern "C" __global__ void __launch_bounds__(128)
    example(const __grid_constant__ ptx::TensorMap a_map,
            const __grid_constant__ ptx::TensorMap b_map, const Config::T* a, float* d) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ ptx::Mbarrier full;
  constexpr int kN = Config::kN, kPanels = Config::kTransB ? (kN + 63) / 64 : 1;
  constexpr int kPanelBytes = Config::kTransB ? 64 * 128 : kN * 128;
  unsigned char *a_tile = smem, *b_tile = smem + 64 * 128;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(full, 64 * 128 + kPanels * kPanelBytes);
    ptx::tma_load(a_tile, a_map, full, 0, 0, 0, 0, ptx::kEvictNormal);
    for (int i = 0; i < kPanels; ++i)
      ptx::tma_load(b_tile + i * kPanelBytes, b_map, full, 64 * i, 0, 0, 0, ptx::kEvictNormal);
  }
  __syncthreads();
  ptx::mbarrier_wait(full, 0);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  const auto place = [&](int i) -> float& {
    return d[(row + i / 2 % 2 * 8) * kN + i / 4 * 8 + lane % 4 * 2 + i % 2];
  };
  float sums[kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) sums[i] = place(i);
  auto a_at = ptx::wgmma_descriptor(a_tile, 0, 1024);
  auto b_at = ptx::wgmma_descriptor(b_tile, kPanelBytes, 1024);
  using Product = ptx::Wgmma<kN, Config::T>;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    ptx::wgmma_fence();
    if constexpr (Config::kRegisters) {
      unsigned x[4];
      for (int i = 0; i < 4; ++i)
        x[i] = *reinterpret_cast<const unsigned*>(
            a + (row + i % 2 * 8) * 64 + 16 * k + i / 2 * 8 + lane % 4 * 2);
      Product::template register_shared<Config::kTransB>(sums, x, b_at, true);
    } else {
      Product::template shared_shared<Config::kTransA, Config::kTransB>(sums, a_at, b_at, true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_keep(sums);
    a_at = ptx::wgmma_advance(a_at, Config::kTransA ? 16 * 128 : 32);
    b_at = ptx::wgmma_advance(b_at, Config::kTransB ? 16 * 128 : 32);
  }
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) place(i) = sums[i];
}
"""


def matrix_map(array, box_rows: int) -> bytes:
    """Of a matrix, in boxes of 64 columns, with two more axes of length 1."""
    rows, columns = array.shape
    described = tensormap.TensorMap(
        array.dtype, (columns, rows, 1, 1), (array.strides[0], 16, 16), (64, box_rows, 1, 1)
    )
    return tensormap.encode(described, array.data.ptr)


@pytest.mark.parametrize("n", [48, 96, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("a_from", ["rows", "columns", "registers"])
def test_wgmma_takes_what_tma_loads(launch, hopper, dtype, n, trans_b, a_from, rng):
    a = integers(rng, DTYPES[dtype], 64, 64)
    b = integers(rng, DTYPES[dtype], 64, n)
    before = integers(rng, np.float32, 64, n)
    d = cupy.asarray(before)
    stored_a = cupy.asarray(np.ascontiguousarray(a.T if a_from == "columns" else a))
    stored_b = cupy.asarray(np.ascontiguousarray(b if trans_b else b.T))
    config = Example(
        T=dtype,
        kN=n,
        kTransA=a_from == "columns",
        kTransB=trans_b,
        kRegisters=a_from == "registers",
        warps=4,
        bytes=64 * 128 + max(n * 128, -(-n // 64) * 64 * 128),
    )
    maps = matrix_map(stored_a, 64), matrix_map(stored_b, 64 if trans_b else n)
    launch(WGMMA, config, *maps, stored_a, d)
    np.testing.assert_array_equal(cupy.asnumpy(d), before + np.float32(a) @ np.float32(b))


BOX = """
#include "ptx/tma.cuh"
extern "C" __global__ void example(const __grid_constant__ ptx::TensorMap map, const int4* at,
                                   unsigned char* to) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ ptx::Mbarrier full;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(full, Config::bytes);
    ptx::tma_load(smem, map, full, at->x, at->y, at->z, at->w, ptx::kEvictNormal);
  }
  __syncwarp();
  ptx::mbarrier_wait(full, 0);
  for (int i = threadIdx.x; i < Config::bytes; i += 32) to[i] = smem[i];
}
"""


@pytest.mark.parametrize("swizzle_bytes", [0, 32, 64, 128])
@pytest.mark.parametrize("at", [(0, 0, 0, 0), (-8, 3, -1, 1), (24, -5, 2, 0), (8, 0, 0, -1)])
def test_boxes_are_cut_off_and_swizzled(launch, hopper, swizzle_bytes, at, rng):
    shape, box = (2, 3, 10, 40), (1, 2, 12, (swizzle_bytes or 96) // 2)
    array = cupy.asarray(rng.integers(0, 1 << 15, shape).astype(np.int16).view(np.float16))
    described = tensormap.TensorMap(
        array.dtype,
        shape[::-1],
        array.strides[2::-1],
        box[::-1],
        swizzled=bool(swizzle_bytes),
        swizzle_bytes=swizzle_bytes or 128,
    )
    size = 2 * int(np.prod(box))
    to = cupy.zeros(size, np.uint8)
    place = cupy.asarray(np.array(at, np.int32))
    encoded = tensormap.encode(described, array.data.ptr)
    launch(BOX, Example(bytes=size), encoded, place, to)

    expected = np.zeros(box, np.int16)
    whole = cupy.asnumpy(array).view(np.int16)
    for index in np.ndindex(*box):
        place = tuple(i + c for i, c in zip(index, at[::-1], strict=True))
        if all(0 <= i < n for i, n in zip(place, shape, strict=True)):
            expected[index] = whole[place]
    address = np.arange(size)
    swizzled = address ^ (address >> 3 & (max(swizzle_bytes, 16) - 16))
    np.testing.assert_array_equal(cupy.asnumpy(to)[swizzled], expected.view(np.uint8).ravel())


COPIES = """
#include "ptx/bulk.cuh"
#include "ptx/cp_async.cuh"
// to (32, 4) = from, but for 16 zeros in each fourth row, by cp.async and by cp.async.bulk; and
// sums (32, 4) += from.
extern "C" __global__ void example(const float4* from, float4* by_lanes, float4* in_bulk,
                                   float4* sums) {
  __shared__ alignas(16) float4 rows[32], bulk[32];
  __shared__ ptx::Mbarrier copied, full;
  const int lane = threadIdx.x;
  if (lane == 0) {
    ptx::mbarrier_init(copied, 32);
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  ptx::cp_async_16(ptx::shared_address(&rows[lane]), from + lane, lane % 4 != 3);
  ptx::mbarrier_arrive_after_copies(copied);
  if (lane == 0) {
    ptx::mbarrier_arrive_expect_tx(full, sizeof bulk);
    ptx::bulk_load(bulk, from, sizeof bulk, full);
  }
  ptx::mbarrier_wait(copied, 0);
  by_lanes[lane] = rows[(lane + 1) % 32];
  ptx::mbarrier_wait(full, 0);
  in_bulk[lane] = bulk[lane];
  if (lane == 0) {
    ptx::bulk_reduce_add(&sums->x, &bulk->x, sizeof bulk);
    ptx::bulk_commit_group();
    ptx::bulk_wait_all();
  }
}
"""


def test_copies_come_before_their_barriers_complete(launch, hopper, rng):
    rows, sums = (integers(rng, np.float32, 32, 4) for _ in "ab")
    by_lanes, in_bulk = cupy.zeros((2, 32, 4), np.float32)
    total = cupy.asarray(sums)
    launch(COPIES, Example(), cupy.asarray(rows), by_lanes, in_bulk, total)
    expected = np.where(np.arange(32)[:, None] % 4 == 3, 0, rows)
    np.testing.assert_array_equal(cupy.asnumpy(by_lanes), np.roll(expected, -1, axis=0))
    np.testing.assert_array_equal(cupy.asnumpy(in_bulk), rows)
    np.testing.assert_array_equal(cupy.asnumpy(total), sums + rows)


CLUSTER = """
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
// Each of two blocks sends the other its row of 64 floats, in messages of 8 and of 16 bytes, and
// adds what the other holds.
struct alignas(16) Four {
  float x[4];
};
extern "C" __global__ void __cluster_dims__(2)
    example(const float2* from, float2* sent, Four* sent_in_fours, float2* added) {
  __shared__ float2 own[32], received[32];
  __shared__ Four fours[16];
  __shared__ ptx::Mbarrier full;
  const int lane = threadIdx.x, rank = ptx::cluster_ctarank();
  own[lane] = from[rank * 32 + lane];
  if (lane == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(full, sizeof received + sizeof fours);
  }
  ptx::cluster_barrier();
  ptx::store_async(received[lane], own[lane].x, own[lane].y, full, 1 - rank);
  if (lane < 16) {
    const float x[4] = {own[2 * lane].x, own[2 * lane].y, own[2 * lane + 1].x, own[2 * lane + 1].y};
    ptx::store_async(fours[lane], x, full, 1 - rank);
  }
  const float2 other = *ptx::mapa(&own[lane], 1 - rank);
  added[rank * 32 + lane] = {own[lane].x + other.x, own[lane].y + other.y};
  ptx::mbarrier_wait_cluster(full, 0);
  sent[rank * 32 + lane] = received[lane];
  if (lane < 16) sent_in_fours[rank * 16 + lane] = fours[lane];
  ptx::cluster_barrier();
}
"""


def test_blocks_of_a_cluster_reach_each_other(launch, hopper, rng):
    rows = integers(rng, np.float32, 2, 64)
    sent, sent_in_fours, added = cupy.zeros((3, 2, 64), np.float32)
    launch(CLUSTER, Example(), cupy.asarray(rows), sent, sent_in_fours, added, blocks=2)
    np.testing.assert_array_equal(cupy.asnumpy(sent), rows[::-1])
    np.testing.assert_array_equal(cupy.asnumpy(sent_in_fours), rows[::-1])
    np.testing.assert_array_equal(cupy.asnumpy(added), np.stack([rows.sum(0)] * 2))
