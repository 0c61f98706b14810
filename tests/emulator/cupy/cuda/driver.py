"""``cupy.cuda.driver``."""

from cupy._kernels import CUDADriverError
from cupy._kernels import launch_kernel as launchKernel

__all__ = ["CUDADriverError", "get_build_version", "launchKernel"]


def get_build_version() -> int:
    return 13000
