"""The prefix index of a paged cache: which page holds the keys and values of which tokens."""

from __future__ import annotations

import numpy as np


class Node:
    """A full page in the prefix index. The path to it from the root holds all tokens before it."""

    __slots__ = ("children", "key", "page", "parent")

    def __init__(self, parent: Node | None, key: bytes, page: int) -> None:
        self.parent = parent
        self.key = key  # the page's tokens
        self.page = page  # -1: no longer in the index
        self.children: dict[bytes, Node] = {}


class PrefixIndex:
    """A radix tree of written pages: an edge is labelled with the tokens of a whole page, all of
    which are compared, so that a look-up cannot mistake one prefix for another.

    Attributes
    ----------
    contains : bool (num_pages,)
        Which pages can be found.
    """

    def __init__(self, num_pages: int) -> None:
        self.root = Node(None, b"", -1)
        self.contains = np.zeros(num_pages, bool)
        self._node_of: dict[int, Node] = {}

    def find(self, tokens: np.ndarray, page_size: int) -> list[Node]:
        """The pages that hold the longest prefix of `tokens`, as far as whole pages are found."""
        key, size = tokens.tobytes(), page_size * tokens.itemsize
        node, path = self.root, []
        for start in range(0, len(key) - size + 1, size):
            child = node.children.get(key[start : start + size])
            if child is None:
                break
            path.append(node := child)
        return path

    def insert(self, parent: Node, tokens: np.ndarray, page: int) -> Node:
        """Let a page be found behind another, or return the one that is found there already."""
        key = tokens.tobytes()
        node = parent.children.get(key)
        if node is None:
            node = Node(parent, key, page)
            self.contains[page] = True
            self._node_of[page] = node
            parent.children[key] = node
        return node

    def replace(self, node: Node, page: int) -> int:
        """Let another page with the same tokens be found in a node's place; returns the former."""
        former = node.page
        self.contains[page] = True
        self._node_of[page] = node
        node.page = page
        self._node_of.pop(former, None)
        self.contains[former] = False
        return former

    def remove(self, page: int) -> list[int]:
        """Let a page, and all that are found behind it, be found no more; returns them."""
        removed = []
        node = self._node_of.get(page)
        if node is None or node.page != page:
            self._node_of.pop(page, None)
            self.contains[page] = False
            return [page]
        if node.parent is not None:
            node.parent.children.pop(node.key, None)
        behind = [node]
        while behind:
            node = behind.pop()
            behind += node.children.values()
            self._node_of.pop(node.page, None)
            self.contains[node.page] = False
            removed.append(node.page)
            node.page = -1
        return removed
