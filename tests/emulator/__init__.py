"""Runs kernels on the CPU.

This is a package, so that pytest does not put its folder into ``sys.path``, where the `cupy` in it
would come before the real one.
"""
