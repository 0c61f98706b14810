"""Benchmarks on a GPU, beside peers and ceilings measured in the same process. CONTRIBUTING.md says
how to run them."""
