"""
What the sampling filters leave
===============================

Temperature, top-k, top-p and min-p change the distribution that a token is drawn from. The bars
are ``softmax(filter_logits(...))``, the dots are frequencies of 20,000 draws.
"""

# sphinx_gallery_start_ignore
import argparse

# sphinx_gallery_end_ignore
import matplotlib.pyplot as plt
import numpy as np

from cuattn import sampling

# sphinx_gallery_start_ignore
argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
).parse_args()
# sphinx_gallery_end_ignore

vocab, draws = 24, 20_000
rng = np.random.default_rng(1)
logits = np.sort(2 * rng.standard_normal(vocab))[::-1].astype(np.float32)

panels = {
    "temperature=1": {},
    "temperature=0.5": {"temperature": 0.5},
    "top_k=5": {"top_k": 5},
    "top_p=0.7": {"top_p": 0.7},
    "min_p=0.1": {"min_p": 0.1},
    "temperature=2, min_p=0.1": {"temperature": 2.0, "min_p": 0.1},
}
rows = np.broadcast_to(logits, (draws, vocab))
figure, axes = plt.subplots(2, 3, figsize=(10, 4.5), sharex=True, layout="constrained")
for axis, (title, options) in zip(axes.flat, panels.items(), strict=True):
    probabilities = sampling.softmax(sampling.filter_logits(logits, **options))
    tokens = sampling.sample(rows, **options, seed=7)
    frequencies = np.bincount(tokens, minlength=vocab) / draws
    axis.bar(range(vocab), probabilities, color="#9fb1bd")
    axis.plot(range(vocab), frequencies, "o", markersize=3, color="#d1495b")
    axis.set_title(title)
    axis.spines[["top", "right"]].set_visible(False)
for axis in axes[-1]:
    axis.set_xlabel("token, the likeliest first")

# %%
# One seed gives every row a stream of random numbers of its own. With the same seed the same tokens
# come out, on the CPU and on a GPU.

plt.show()
