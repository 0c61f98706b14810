"""A cache of keys and values in pages: many sequences of any length, sharing what they have in
common; and writing into caches that the caller owns.

cache.py is what the user sees, pages.py keeps the books (prefixes.py finds what was there before),
layout.py says how tokens lie in pages, store.py has the arrays, snapshot.py and files.py save both,
append.py writes elsewhere.
"""

from cuattn.kvcache.append import append_kv
from cuattn.kvcache.cache import PagedKVCache, SwappedSequence
from cuattn.kvcache.layout import KVQuantization

__all__ = ["KVQuantization", "PagedKVCache", "SwappedSequence", "append_kv"]
