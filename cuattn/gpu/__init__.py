"""CuPy: choosing, compiling and launching kernels."""
