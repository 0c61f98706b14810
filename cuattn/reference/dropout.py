"""Which scores dropout removes: a function of seed, head, query and key alone.

Nothing is stored: forward, backward and every GPU kernel evaluate the same
function, and ``rawkernels/tile/dropout.cuh`` gives the same bits. The mask is made of blocks of 16
queries and 16 keys, aligned to the first of their sequence. For block (m, n) of query head ``head``
of sequence ``b``, Philox4x32-10 with the key ``(seed % 2**32, seed >> 32)`` is evaluated at the 32
counters

``(m, n, lane, b * heads_q + head)``, lane = 0, ..., 31,

and each gives 16 random bits to eight entries of the block, those that a lane of a warp holds in
the accumulators of ``mma.sync``: word ``2 * (key // 8) + query // 8`` of lane ``4 * (query % 8) +
key % 8 // 2`` belongs to the entry (query, key) of the block, its lower half where the key is even
and its upper half where it is odd. An entry is dropped where its bits are below
``AttentionSpec.dropout_threshold``.
"""

from __future__ import annotations

import numpy as np

from cuattn._philox import philox4x32
from cuattn._spec import AttentionSpec

BLOCK = 16


def kept(
    spec: AttentionSpec, seed: int, index: int, heads: slice, rows: slice, keys: slice
) -> np.ndarray:
    """Whether dropout leaves each score of a tile of sequence `index`: bool (heads, rows, keys)."""
    m, n = (
        np.arange(part.start // BLOCK, -(-part.stop // BLOCK), dtype=np.uint64)
        for part in (rows, keys)
    )
    head = np.arange(heads.start, heads.stop, dtype=np.uint64) + np.uint64(index * spec.heads_q)
    lane = np.arange(32, dtype=np.uint64)
    words = philox4x32(
        (m[:, None, None], n[:, None], lane, head[:, None, None, None]),
        (np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)),
    )
    shape = len(head), len(m), len(n), 32
    blocks = np.stack([np.broadcast_to(word, shape) for word in words], axis=-1).astype("<u4")
    halves = blocks.view("<u2").reshape(*shape[:3], 8, 4, 2, 2, 2)
    # (head, m, n, query % 8, key % 8 // 2, key // 8, query // 8, key % 2)
    bits = halves.transpose(0, 1, 6, 3, 2, 5, 4, 7).reshape(shape[0], BLOCK * shape[1], -1)
    first_row, first_key = rows.start % BLOCK, keys.start % BLOCK
    bits = bits[:, first_row:, first_key:][:, : rows.stop - rows.start, : keys.stop - keys.start]
    return bits >= spec.dropout_threshold


def factors(
    spec: AttentionSpec, seed: int, index: int, heads: slice, rows: slice, keys: slice
) -> np.ndarray:
    """What dropout multiplies the probabilities of a tile by: 0 where it drops one, and else what
    keeps their expectation: (heads, rows, keys)."""
    there = kept(spec, seed, index, heads, rows, keys)
    return there * spec.acc_dtype.type(spec.dropout_scale)
