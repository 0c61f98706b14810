"""PagedKVCache when a step is killed, as Ctrl-C kills it: nothing is found that was not written."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import sys

import numpy as np
import pytest

from tests.caches import (
    LAYERS,
    assert_finds_only_what_was_written,
    check_books,
    content,
    filled,
    held_pages,
    new_cache,
)


class Killed(BaseException):
    """As KeyboardInterrupt: nothing catches it."""


def steps(cache):
    """Calls that meet every branch of the bookkeeping, each as a function; pages are few."""
    texts = {}

    def add(tokens):
        id = cache.add_sequence(tokens)
        texts[id] = list(tokens[: cache.num_tokens(id)])
        return id

    def extend(batch):
        flat = [token for tokens in batch.values() for token in tokens]
        cache.extend(list(batch), [len(tokens) for tokens in batch.values()], tokens=flat)

    def write(layer, batch):
        parts = [content(texts[id] + new, layer) for id, new in batch.items()]
        counts = [len(new) for new in batch.values()]
        arrays = (
            np.concatenate(
                [part[i][len(part[i]) - n :] for part, n in zip(parts, counts, strict=True)]
            )
            for i in range(2)
        )
        cache.write(layer, list(batch), *arrays)

    def step(batch):
        yield lambda: extend(batch)
        for layer in range(cache.num_layers):
            yield lambda layer=layer: write(layer, batch)
        for id, new in batch.items():
            texts[id] = texts[id] + new

    yield lambda: add([*range(9)])
    yield from step({0: [*range(9)]})
    yield lambda: texts.update({cache.fork(0): list(texts[0])})
    yield from step({0: [9, 10, 11], 1: [9, 12]})
    yield lambda: add([*range(12)])
    yield from step({2: [*range(texts[2][-1] + 1, 12)]})
    yield lambda: (cache.truncate(2, 7), texts.update({2: texts[2][:7]}))
    yield from step({2: [7, 8, 9, 10, 11, 12]})
    yield lambda: (cache.remove(0), texts.pop(0))
    for start in (100, 200, 300):  # evicts
        yield lambda start=start: add([*range(start, start + 14)])
        yield from step({max(texts): [*range(start, start + 14)]})
        yield lambda: (cache.remove(max(texts)), texts.pop(max(texts)))
    for _ in range(8):  # more rows than there are
        yield lambda: add([*range(9)])
    yield from step({2: [13], max(texts): [8]})


TEXTS = [[*range(9), *range(9, 13)], [*range(9), 9, 12], *([*range(s, s + 14)] for s in (100, 300))]


def run(calls):
    for call in calls:
        call()


def test_a_step_killed_between_any_two_calls():
    calls = 0
    while True:
        cache = new_cache(num_pages=12, num_layers=LAYERS)
        done = [call() for call in itertools.islice(steps(cache), calls)]
        found = [assert_finds_only_what_was_written(cache, text) for text in TEXTS]
        if len(done) < calls:
            break
        calls += 1
    assert found == [12, 8, 0, 12]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("function", "least"), [("write", 16), ("copy_pages", 2)])
def test_a_step_killed_within_the_device(monkeypatch, function, least, when):
    device = new_cache()._store.device
    original = getattr(device, function)
    for kill_at in itertools.count():
        cache = new_cache(num_pages=12, num_layers=LAYERS)
        calls = itertools.count()

        def killed(*args, calls=calls, kill_at=kill_at, **options):
            fatal = next(calls) == kill_at
            if not (fatal and when == "before"):
                original(*args, **options)
            if fatal:
                raise Killed

        monkeypatch.setattr(device, function, killed)
        survived = False
        with contextlib.suppress(Killed):
            run(steps(cache))
            survived = True
        monkeypatch.setattr(device, function, original)
        for text in TEXTS:
            assert_finds_only_what_was_written(cache, text)
        check_books(cache, {id: cache.num_tokens(id) for id in cache})
        if survived:
            break
    assert kill_at >= least


def test_a_step_killed_at_any_line(rng):
    """As Ctrl-C kills: pages may be lost, but none is found that was not written, none has two
    owners, and the cache goes on."""
    lines = run_until(new_cache(num_pages=12, num_layers=LAYERS), None)
    for kill_at in rng.choice(lines, 40, replace=False):
        cache = new_cache(num_pages=12, num_layers=LAYERS)
        run_until(cache, kill_at)
        check_after_kill(cache)


def run_until(cache, kill_at):
    """Run the steps, killed at that line of cuattn.kvcache; the number of lines that were run."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        code = frame.f_code
        if "cuattn/kvcache" not in pathlib.Path(code.co_filename).as_posix():
            return None
        # A signal is not handled while a lock is released, as a trace function is called there.
        if event == "line" and code.co_name != "call":
            lines += 1
            if lines == kill_at:
                raise Killed
        return trace

    before = sys.gettrace()
    calls = steps(cache)
    with contextlib.suppress(Killed):
        while True:
            sys.settrace(None)
            call = next(calls, None)
            if call is None:
                break
            sys.settrace(trace)
            call()
    sys.settrace(before)
    return lines


def check_after_kill(cache):
    manager = cache._manager
    owners = np.zeros(cache.num_pages, int)
    free = manager.free[: manager.num_free]
    owners[free] += 1
    owners[list(manager.kept)] += 1
    assert len({*free.tolist(), *manager.kept}) == len(free) + len(manager.kept)
    held = np.zeros(cache.num_pages, int)
    for id in cache:
        np.add.at(held, held_pages(cache, id), 1)
    assert (held <= manager.references).all()
    assert not (owners[held > 0]).any()
    for text in TEXTS:
        assert_finds_only_what_was_written(cache, text)
    for id in list(cache):
        cache.remove(id)
    filled(cache, [*range(4)])
    for text in TEXTS:
        assert_finds_only_what_was_written(cache, text)
    cache.reset()
    assert (len(cache), cache.num_free_pages) == (0, cache.num_pages)
    filled(cache, [*range(4 * cache.num_pages)])
    assert assert_finds_only_what_was_written(cache, [*range(20)]) == 20
