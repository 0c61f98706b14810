"""
How options change a row of weights
===================================

ALiBi, softcap and sinks act on the scores of a query before the softmax. This draws the weights
that one query gives to 64 keys.
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

rng = np.random.default_rng(3)
q = 3 * rng.standard_normal((1, 1, 32))
k = rng.standard_normal((64, 1, 32))
identity = np.eye(64)[:, None, :]


def weights(**options):
    """The weights that the query gives to the keys."""
    return cuattn.flash_attention(q, k, identity, **options)[0, 0]


panels = {
    "plain": {},
    "alibi_slopes=[0.1]": {"alibi_slopes": np.array([0.1])},
    "softcap=2": {"softcap": 2.0},
    "sinks=[8]": {"sinks": np.array([8.0])},
}
figure, axes = plt.subplots(2, 2, figsize=(8, 4), sharex=True, sharey=True, layout="constrained")
for axis, (title, options) in zip(axes.flat, panels.items(), strict=True):
    row = weights(**options)
    axis.bar(range(64), row, width=1, color="#d1495b")
    axis.set_title(f"{title}: sum {row.sum():.2f}")
    axis.spines[["top", "right"]].set_visible(False)
for axis in axes[-1]:
    axis.set_xlabel("key")

# %%
# ALiBi prefers recent keys. A softcap bounds the scores, so that no key takes everything. A sink
# takes a share of the softmax and gives no value: the weights no longer sum to 1.

plt.show()
