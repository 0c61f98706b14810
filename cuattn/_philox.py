"""Counter-based random numbers (Philox4x32), the same bits as rawkernels/tile/philox.cuh.

A number is a pure function of where it is used: seed, offset, stream and index. Nothing has a
state, so neither the batch around a row nor the order in which indices are visited can change what
a row draws.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

#: Seeds of a call's rows are this far apart (2**64 over the golden ratio, as in a Weyl sequence),
#: so that rows and small seeds such as 0, 1, 2, … never meet: kPhiloxRowStep of philox.cuh.
ROW_STEP = 0x9E3779B97F4A7C15


def philox4x32(counter: tuple, key: tuple, rounds: int = 10) -> tuple[np.ndarray, ...]:
    """Rounds of Philox.

    Parameters
    ----------
    counter : tuple of 4 arrays of uint64, each below 2**32
        They broadcast together, and with `key`.
    key : tuple of 2 arrays of uint64, each below 2**32
    rounds : int
        Seven are the fewest that pass the tests of [1]_; numbers of streams take ten.

    Returns
    -------
    tuple of 4 arrays of uint64
        32 random bits each.

    References
    ----------
    .. [1] Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _LOW
        k1 = (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniform(seed: np.ndarray, offset: np.ndarray, size: int, stream: int = 0) -> np.ndarray:
    """Uniform numbers strictly between 0 and 1.

    Parameters
    ----------
    seed, offset : array (rows,) of uint64
        What decides a row.
    size : int
        Numbers of a row. Number ``i`` does not depend on it.
    stream : int
        Tells apart the uses that one (seed, offset) is put to.

    Returns
    -------
    array (rows, size) of float32
        The 32 bits ``x`` of each as the float32 nearest to ``(x + 1/2) / 2**32``, but never 1.
    """
    upper, lower = (_halves(seed, offset, size, 2 * stream + half) for half in range(2))
    return _to_float(upper, lower)


def uniform_at(
    seed: np.ndarray, offset: np.ndarray, index: np.ndarray, stream: int = 0
) -> np.ndarray:
    """Some of the numbers of :func:`uniform`.

    Parameters
    ----------
    seed, offset : array (n,) of uint64
        What decides each number's row.
    index : array (n,) of integers
        The number's index in its row.
    stream : int
        As in :func:`uniform`.

    Returns
    -------
    array (n,) of float32
    """
    index = index.astype(np.uint64)
    block = index >> np.uint64(8) << np.uint64(5) | index & np.uint64(31)
    word, side = index >> np.uint64(5) & np.uint64(3), index >> np.uint64(7) & np.uint64(1)
    halves = []
    for half in range(2):
        counter = (block, np.uint64(2 * stream + half), offset & _LOW, offset >> _HALF)
        words = np.choose(word.astype(np.intp), philox4x32(counter, (seed & _LOW, seed >> _HALF)))
        halves.append((words >> side * np.uint64(16) & np.uint64(0xFFFF)).astype(np.uint32))
    return _to_float(*halves)


def _to_float(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Uniform numbers of 32 bits, in two halves."""
    x = (upper << np.uint32(16) | lower).astype(np.float32)
    below_one = np.float32(1 - 2.0**-24)
    return np.minimum(x * np.float32(2.0**-32) + np.float32(2.0**-33), below_one)


def row_seeds(seed: int, rows: int) -> np.ndarray:
    """The seeds that one seed gives the rows of a call: ``seed + row * ROW_STEP`` modulo 2**64.

    Parameters
    ----------
    seed : int
        From 0 to 2**64 - 1; also the seed of row 0.
    rows : int
        How many rows there are.

    Returns
    -------
    array (rows,) of uint64
    """
    return np.uint64(seed) + np.arange(rows, dtype=np.uint64) * np.uint64(ROW_STEP)


def _halves(seed: np.ndarray, offset: np.ndarray, size: int, stream: int) -> np.ndarray:
    """16 bits for each index. Eight of a counter go to indices 32 apart: one a lane of a warp."""
    blocks = -(-size // 256) * 32
    counter = (
        np.arange(blocks, dtype=np.uint64)[None],
        np.uint64(stream),
        (offset & _LOW)[:, None],
        (offset >> _HALF)[:, None],
    )
    words = philox4x32(counter, ((seed & _LOW)[:, None], (seed >> _HALF)[:, None]))
    halves = np.empty((len(seed), blocks // 32, 2, 4, 32), np.uint32)
    for number, word in enumerate(words):
        lanes = word.astype(np.uint32).reshape(len(seed), blocks // 32, 32)
        halves[:, :, 0, number] = lanes & np.uint32(0xFFFF)
        halves[:, :, 1, number] = lanes >> np.uint32(16)
    return halves.reshape(len(seed), blocks * 8)[:, :size]
