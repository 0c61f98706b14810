"""Upper limits of this GPU, measured in the same process as the kernels that are compared with
them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import cupy
import numpy as np
from cupy.cuda import cublas, device

from benchmarks.timing import by_events

#: 64 bytes a thread, as four accesses of 16, each a warp's 512 bytes in a row.
_COPY = r"""
extern "C" __global__ void copy(const uint4* source, uint4* target, unsigned long long n) {
  for (int k = 0; k < 4; ++k) {
    const unsigned long long i = (blockIdx.x * 4ull + k) * blockDim.x + threadIdx.x;
    if (i < n) target[i] = source[i];
  }
}
"""
_CUDA_TYPES = {"float16": 2, "bfloat16": 14}  # cudaDataType: CUDA_R_16F, CUDA_R_16BF
_CUBLAS_COMPUTE_32F = 68
_CUBLAS_GEMM_DEFAULT = -1


def _median(run: Callable[[int], None], launches: int, rounds: int = 9) -> float:
    """Median seconds per launch."""
    run(launches)
    return sorted(by_events(run, launches) / launches for _ in range(rounds))[rounds // 2]


def copy_bytes_per_second(nbytes: int = 1 << 31) -> float:
    """Bytes per second of a copy on the device, counting what is read and what is written."""
    source = cupy.random.randint(0, 256, nbytes, dtype=np.uint8)
    target = cupy.empty_like(source)

    def run(launches: int) -> None:
        for _ in range(launches):
            target.data.copy_from_device_async(source.data, nbytes)

    return 2 * nbytes / _median(run, 4)


@functools.cache
def _copy_kernel() -> cupy.RawKernel:
    return cupy.RawKernel(_COPY, "copy")


def copied(source: cupy.ndarray) -> cupy.ndarray:
    """A kernel that only copies: how long a kernel that reads and writes as many bytes could take
    at best. (A device copy captured in a graph becomes a memcpy node, which is slower.)"""
    target = cupy.empty_like(source)
    count, threads = source.nbytes // 16, 512
    assert source.nbytes % 16 == 0
    blocks = -(-count // (4 * threads))
    _copy_kernel()((blocks,), (threads,), (source, target, np.uint64(count)))
    return target


def matmul_flops_per_second(dtype: str, n: int = 8192) -> float:
    """FLOP/s of cuBLAS on square matrices of random 16-bit floats, accumulated in float32."""
    values = cupy.random.standard_normal((2, n, n), dtype=np.float32)
    if dtype == "float16":
        values = values.astype(np.float16)
    else:  # bfloat16 is the upper half of float32
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    a, b = values
    c = cupy.empty_like(a)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    kind = _CUDA_TYPES[dtype]

    def run(launches: int) -> None:
        for _ in range(launches):
            cublas.gemmEx(
                device.get_cublas_handle(),
                cublas.CUBLAS_OP_N,
                cublas.CUBLAS_OP_N,
                *(n, n, n),
                one.ctypes.data,
                *(a.data.ptr, kind, n),
                *(b.data.ptr, kind, n),
                zero.ctypes.data,
                *(c.data.ptr, kind, n),
                _CUBLAS_COMPUTE_32F,
                _CUBLAS_GEMM_DEFAULT,
            )

    return 2 * n**3 / _median(run, 10)
