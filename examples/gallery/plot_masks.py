"""
Which keys a query sees
=======================

Causal masks, sliding windows and sequences of different lengths, drawn from what the calls
compute: with an identity matrix as values, the output is the attention weights themselves.
"""

# sphinx_gallery_start_ignore
import argparse

# sphinx_gallery_end_ignore
import matplotlib.pyplot as plt
import numpy as np

import cuattn

# sphinx_gallery_start_ignore
argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
).parse_args()
# sphinx_gallery_end_ignore

rng = np.random.default_rng(0)
queries, keys = 24, 32
q = rng.standard_normal((queries, 1, 16))
k = 0.3 * rng.standard_normal((keys, 1, 16))
identity = np.eye(keys)[:, None, :]


def weights(**options):
    """The matrix of attention weights: rows are queries, columns are keys."""
    return cuattn.flash_attention(q, k, identity, **options)[:, 0]


# %%
# With fewer queries than keys, the last query is the last key: masks are aligned to the bottom
# right corner. A window counts keys on each side of the query's own position.

panels = {
    "no mask": {},
    "causal=True": {"causal": True},
    "window=(7, 0)": {"window": (7, 0)},
    "window=(3, 3)": {"window": (3, 3)},
}
figure, axes = plt.subplots(1, 4, figsize=(11, 2.6), layout="constrained")
for axis, (title, options) in zip(axes, panels.items(), strict=True):
    axis.imshow(weights(**options), cmap="Reds", vmin=0, vmax=0.2)
    axis.set(title=title, xlabel="key", xticks=[], yticks=[])
axes[0].set_ylabel("query")

# %%
# Sequences laid end to end see only themselves. Here are three, of 6, 10 and 8 tokens.

tokens = 24
cu_seqlens = np.array([0, 6, 16, 24], np.int32)
identity = np.eye(tokens)[:, None, :]
out = cuattn.flash_attention_varlen(q, k[:tokens], identity, cu_seqlens, causal=True)
figure, axis = plt.subplots(figsize=(3, 3), layout="constrained")
axis.imshow(out[:, 0], cmap="Reds", vmin=0, vmax=0.4)
axis.set(title="cu_seqlens=[0, 6, 16, 24]", xlabel="key", ylabel="query", xticks=[], yticks=[])
plt.show()
