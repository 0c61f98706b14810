"""Attention on random arrays: on a GPU where CuPy finds one, else on the CPU, by the same call."""

import numpy as np

import cuattn

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
except Exception:  # no CuPy, no driver, no device: each raises its own
    xp = np

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 1024, heads, 64), dtype=np.float32) for heads in (8, 2, 2))
out = cuattn.flash_attention(xp.asarray(q), xp.asarray(k), xp.asarray(v), causal=True)

reference = cuattn.flash_attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
error = float(abs(out - xp.asarray(reference)).max())
print(f"{xp.__name__}: {out.shape} in {out.dtype}, {error:.1e} from float64 at most")
assert error < 1e-5
