"""Which scores dropout removes: a function of seed, head, query and key alone.

Nothing is stored: forward, backward and every GPU kernel evaluate the same
function, and ``rawkernels/tile/dropout.cuh`` gives the same bits. The mask is made of blocks of 16
queries and 32 keys, aligned to the first of their sequence. For block (m, n) of query head ``head``
of sequence ``b``, Philox4x32-7 with the key ``(seed % 2**32, seed >> 32)`` is evaluated at the 32
counters

``(m, n, lane, b * heads_q + head)``, lane = 0, ..., 31,

and each gives seven random bits to 16 entries of the block, those that a lane of a warp holds in
the accumulators of ``mma.sync``: byte ``2 * (query // 8) + key % 2`` of word ``key // 8`` of lane
``4 * (query % 8) + key % 8 // 2`` belongs to the entry (query, key) of the block, which has its
lower seven bits.

An entry is dropped where its bits are below the counter's threshold, which is one of the two
nearest multiples of 1/128 around the probability ``p = AttentionSpec.dropout_threshold / 2**16``:
``floor(128 * p + u)``, where u is uniform between 0 and 1. So the probability of being dropped is p
to the last bit. The u of a lane's blocks are a Weyl sequence that begins anywhere: the upper 24
bits of ``w + 0x9E3779B9 * n`` modulo 2**32, where w is the last word that three rounds make of the
counter, which does not depend on n.
"""

from __future__ import annotations

import numpy as np

from cuattn._philox import philox4x32
from cuattn._spec import AttentionSpec

BLOCK_ROWS, BLOCK_KEYS = 16, 32
ROUNDS = 7
WEYL_STEP = np.uint64(0x9E3779B9)


def kept(
    spec: AttentionSpec, seed: int, index: int, heads: slice, rows: slice, keys: slice
) -> np.ndarray:
    """Whether dropout leaves each score of a tile of sequence `index`: bool (heads, rows, keys)."""
    m, n = (
        np.arange(part.start // size, -(-part.stop // size), dtype=np.uint64)
        for part, size in ((rows, BLOCK_ROWS), (keys, BLOCK_KEYS))
    )
    head = np.arange(heads.start, heads.stop, dtype=np.uint64) + np.uint64(index * spec.heads_q)
    lane = np.arange(32, dtype=np.uint64)
    counter = m[:, None, None], n[:, None], lane, head[:, None, None, None]
    key = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)
    shape = len(head), len(m), len(n), 32
    words = [np.broadcast_to(word, shape) for word in philox4x32(counter, key, ROUNDS)]
    blocks = np.stack(words, axis=-1).astype("<u4")
    bits = blocks.view(np.uint8).reshape(*shape[:3], 8, 4, 4, 2, 2) & 127
    weyl = philox4x32(counter, key, 3)[3] + WEYL_STEP * n[:, None] & np.uint64(0xFFFFFFFF)
    p = np.uint64(spec.dropout_threshold << 15)
    threshold = (p + (weyl >> np.uint64(8)) >> np.uint64(24)).astype(np.uint8)
    there = bits >= np.broadcast_to(threshold, shape).reshape(*shape[:3], 8, 4, 1, 1, 1)
    # (head, m, n, query % 8, key % 8 // 2, key // 8, query // 8, key % 2)
    there = there.transpose(0, 1, 6, 3, 2, 5, 4, 7).reshape(
        shape[0], BLOCK_ROWS * shape[1], BLOCK_KEYS * shape[2]
    )
    first_row, first_key = rows.start % BLOCK_ROWS, keys.start % BLOCK_KEYS
    there = there[:, first_row:, first_key:]
    return there[:, : rows.stop - rows.start, : keys.stop - keys.start]


def factors(
    spec: AttentionSpec, seed: int, index: int, heads: slice, rows: slice, keys: slice
) -> np.ndarray:
    """What dropout multiplies the probabilities of a tile by: 0 where it drops one, and else what
    keeps their expectation: (heads, rows, keys)."""
    there = kept(spec, seed, index, heads, rows, keys)
    return there * spec.acc_dtype.type(spec.dropout_scale)
