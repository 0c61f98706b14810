"""NumPy: the meaning of every operation, and the path taken for NumPy arrays."""
