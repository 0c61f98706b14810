"""Models of the kernels' pipelines: roles that wait for and arrive at barriers, and what they may
never do. `explorer` runs them, `source` reads counts and sizes out of the CUDA files."""
