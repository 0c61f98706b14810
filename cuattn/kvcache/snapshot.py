"""The bookkeeping of a paged cache as arrays, for files and copies, and back."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cuattn.kvcache.pages import PageManager
from cuattn.kvcache.prefixes import Node


def take(manager: PageManager) -> dict[str, np.ndarray]:
    """Everything that sequences and look-ups depend on.

    Returns
    -------
    dict of arrays
        The sequences' ids and counts; their pages, tokens and paths, one sequence after the other;
        the nodes of the prefix index, parents first; pages kept for reuse and free ones, in order.
    """
    manager.publish()
    ids = list(manager.row_of)
    rows = np.array([manager.row_of[id] for id in ids], np.intp)
    nodes, number = [manager.index.root], {id(manager.index.root): -1}
    for node in nodes:
        for child in node.children.values():
            number[id(child)] = len(nodes) - 1
            nodes.append(child)
    del nodes[0]
    tokens = b"".join(node.key for node in nodes)
    state = {name: getattr(manager, name)[rows] for name in manager.COUNTS}
    paths = [
        np.array([number[id(node)] for node in manager.paths[row]], np.int64)
        for row in rows.tolist()
    ]
    return state | {
        "ids": np.array(ids, np.int64),
        "layers_written": manager.layers_written[:, rows],
        "pages": _concatenated(manager.table[row, : manager.held[row]] for row in rows),
        "tokens": _concatenated(manager.tokens[row, : manager.known[row]] for row in rows),
        "paths": _concatenated(paths),
        "node_parents": np.array([number[id(node.parent)] for node in nodes], np.int64),
        "node_pages": np.array([node.page for node in nodes], np.int64),
        "node_tokens": np.frombuffer(tokens, np.int64).reshape(-1, manager.page_size),
        "kept": np.array(list(manager.kept), np.int64),
        "free": manager.free[: manager.num_free].copy(),
        "counters": np.array([manager.next_id, manager.hit_pages, manager.missed_pages]),
    }


def restore(manager: PageManager, state: dict[str, np.ndarray]) -> None:
    """Bring a new manager to the state that :func:`take` saw.

    Raises
    ------
    ValueError
        Not every page has one place: the state is not one of such a manager.
    """
    ids, held, known = state["ids"].tolist(), state["held"], state["known"]
    manager.reserve(len(ids), int(held.max(initial=0)), int(known.max(initial=0)))
    rows = np.arange(len(ids))
    for name in manager.COUNTS:
        getattr(manager, name)[rows] = state[name]
    written = state["layers_written"]
    manager.layers_written[:, rows] = written
    manager.marked[rows] = written.any(axis=0)
    manager._any_marked = bool(written.any())
    nodes: list[Node] = []
    places = state["node_parents"].tolist(), state["node_pages"].tolist()
    for parent, page, key in zip(*places, state["node_tokens"], strict=True):
        behind = nodes[parent] if parent >= 0 else manager.index.root
        nodes.append(manager.index.insert(behind, key, page))
    of_rows = zip(
        _parts(state["pages"], held),
        _parts(state["tokens"], known),
        _parts(state["paths"], state["indexed"]),
        strict=True,
    )
    for row, (pages, tokens, path) in enumerate(of_rows):
        manager.table[row, : pages.size] = pages
        manager.tokens[row, : tokens.size] = tokens
        manager.paths[row] = [nodes[i] for i in path.tolist()]
    np.add.at(manager.references, state["pages"], 1)
    manager.kept = dict.fromkeys(state["kept"].tolist())
    free = state["free"]
    manager.free[: free.size], manager.num_free = free, free.size
    manager.row_of = dict(zip(ids, rows.tolist(), strict=True))
    manager.next_id, manager.hit_pages, manager.missed_pages = state["counters"].tolist()
    owners = [free, state["kept"], np.flatnonzero(manager.references)]
    if not np.array_equal(np.sort(np.concatenate(owners)), np.arange(manager.num_pages)):
        raise ValueError("not every page has one place")


def _concatenated(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _parts(array: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    return np.split(array, np.cumsum(counts)[:-1]) if counts.size else []
