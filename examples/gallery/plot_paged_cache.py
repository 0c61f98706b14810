"""
Pages that sequences share
==========================

A :class:`cuattn.PagedKVCache` keeps the keys and values of many sequences in pages. Sequences
that begin with the same tokens share the pages that hold them; a page is copied when one of them
is about to write into it.
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

PAGE = 8
rng = np.random.default_rng(0)
cache = cuattn.PagedKVCache(24, PAGE, num_kv_heads=1, head_dim=4, dtype=np.float32)


def write(ids, counts, **options):
    """Make room for new tokens and fill it."""
    cache.extend(ids, counts, **options)
    total = sum(counts)
    cache.write(0, ids, *rng.standard_normal((2, total, 1, 4), dtype=np.float32))


# %%
# One sequence has a prompt of 28 tokens. Two more begin with its first 24 tokens, and one is
# forked from it.

prompt = np.arange(28)
first = cache.add_sequence(prompt)
write([first], [28])
second = cache.add_sequence(np.append(prompt[:24], [99, 98]))
third = cache.add_sequence(np.append(prompt[:24], [77]))
write([second, third], [2, 1])
fork = cache.fork(first)
ids = [first, second, third, fork]


def draw(title):
    """A row for each sequence, a cell for each of its pages; a colour is a page."""
    _, axis = plt.subplots(figsize=(7, 2.5), layout="constrained")
    table, lengths = cache.page_table(ids), cache.seq_lens(ids)
    for row in range(len(ids)):
        for column in range(-(-int(lengths[row]) // PAGE)):
            page = int(table[row, column])
            color = plt.cm.tab20(page % 20)
            axis.add_patch(plt.Rectangle((column, row), 0.94, 0.9, color=color, alpha=0.6))
            axis.text(column + 0.47, row + 0.45, f"page {page}", ha="center", va="center")
    axis.set(xlim=(0, 4), ylim=(len(ids), 0), title=title, xlabel="column of the page table")
    axis.set_xticks(np.arange(4) + 0.47, range(4))
    axis.set_yticks(np.arange(len(ids)) + 0.45, ["first", "second", "third", "fork of first"])
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axis.tick_params(length=0)


draw(f"6 of {cache.num_pages} pages are in use")

# %%
# Now the fork writes a token: the last page, which is not full, is copied first.

write([fork], [1])
draw("after the fork has written a token")
print(cache)
plt.show()
