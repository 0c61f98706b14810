"""``cupy.cuda.compiler``."""

from cupy._build import CompileException

__all__ = ["CompileException"]
