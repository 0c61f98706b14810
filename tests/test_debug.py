"""What CUATTN_DEBUG=1 checks and names. No GPU is asked."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from cuattn._spec import attention_spec
from cuattn.gpu import debug, dispatch

SPEC = attention_spec(
    "paged_attention",
    *((10, 4, 64), (64, 4, 64), (64, 4, 64)),
    *[np.dtype(np.float16)] * 3,
    sequences=3,
    keys="paged",
    page_size=16,
)
PAGES = np.empty((9, 16, 4, 64), np.float16)
GOOD = {
    "cu_seqlens_q": [0, 1, 1, 9],
    "seq_lens": [1, 0, 40],
    "page_table": [[8, 99, -1, 9], [-5, 99, 99, 99], [0, 1, 2, -1]],
}


def check(**changes):
    arrays = {name: np.array(values, np.int32) for name, values in (GOOD | changes).items()}
    debug.check_attention("paged_attention", None, PAGES, PAGES, SPEC, **arrays, sinks=None)


def test_what_is_not_used_may_be_anything():
    check()


def test_lengths_beyond_the_capacity_are_allowed():
    check(seq_lens=[1, 0, 400], page_table=[[8] * 4] * 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": [1, 2, 3, 4]}, r"cu_seqlens_q is \[1 2 3 4\], must start at 0"),
        ({"cu_seqlens_q": [0, 3, 2, 4]}, "cu_seqlens_q"),
        ({"cu_seqlens_q": [0, 3, 4, 11]}, r"cu_seqlens_q is \[.*\], .* end at 10 at most"),
        ({"cu_seqlens_k": [0, 3, 4, 65]}, "cu_seqlens_k is .*, must .* end at 64 at most"),
        ({"seq_lens": [1, -1, 40]}, r"seq_lens\[1\] is -1"),
        ({"seq_lens": [17, 0, 40]}, r"page_table\[0, 1\] is 99, must be from 0 to 8"),
        ({"page_table": [[8] * 4, [8] * 4, [0, -1, 2, 3]]}, r"page_table\[2, 1\] is -1"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    with pytest.raises(ValueError, match=f"paged_attention: {message}"):
        check(**change)


@pytest.fixture
def launched(monkeypatch):
    """A kernel as compiler.kernel gives it, which notes its launches, and whether each was waited
    for."""
    variant = next(dispatch.variants("sm_80"))
    notes = []

    def kernel(grid, block, arguments, shared_mem=0):
        notes.append(("launched", grid, block, arguments, shared_mem))
        if arguments == "bad":
            raise ValueError("no such thing")

    monkeypatch.setattr(debug, "_capturing", lambda: False)
    monkeypatch.setattr(debug, "_wait", lambda name: notes.append(("waited", name)))
    return debug.watched(kernel, variant), notes, variant


def test_launches_are_waited_for_and_named(launched):
    kernel, notes, variant = launched
    kernel((3,), (128,), [1], shared_mem=7)
    assert notes[0] == ("launched", (3,), (128,), [1], 7)
    kind, name = notes[1]
    assert kind == "waited"
    assert f"{variant.source} ({variant.config}), grid (3,)" in name


def test_failed_launches_name_the_call(launched):
    kernel, _, variant = launched
    public = {"__name__": "cuattn.attention", "kernel": kernel}
    exec("def flash_attention(): kernel((1,), (32,), 'bad')", public)
    wrapping = {"__name__": "cuattn._errors", "function": public["flash_attention"]}
    exec("def call(): function()", wrapping)
    with pytest.raises(RuntimeError, match=r"flash_attention: .*no such thing") as failure:
        wrapping["call"]()
    assert variant.source in str(failure.value)


def test_nothing_is_waited_for_while_a_graph_is_captured(launched, monkeypatch):
    kernel, notes, _ = launched
    monkeypatch.setattr(debug, "_capturing", lambda: True)
    kernel((1,), (32,), [])
    assert [note[0] for note in notes] == ["launched"]


def test_functions_are_left_alone_when_it_is_off(monkeypatch):
    def function(x):
        return x

    calls = []
    decorate = debug.checks(lambda *call: calls.append(call))
    monkeypatch.setattr(debug, "ENABLED", False)
    assert decorate(function) is function
    monkeypatch.setattr(debug, "ENABLED", True)
    monkeypatch.setattr(debug, "_capturing", lambda: False)
    assert decorate(function)(5) == 5
    assert [call[1:] for call in calls] == [(5,)]


@pytest.mark.parametrize(("value", "on"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_environment_turns_it_on(value, on):
    environment = {name: text for name, text in os.environ.items() if name != "CUATTN_DEBUG"}
    environment |= {} if value is None else {"CUATTN_DEBUG": value}
    program = "from cuattn.gpu import debug; print(debug.ENABLED)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(on)
