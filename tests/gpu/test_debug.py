"""CUATTN_DEBUG=1 on a device: in processes of their own, since it is read once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

SETUP = """
import cupy, numpy as np, cuattn
q = cupy.zeros((2, 4, 64), np.float16)
pages = cupy.zeros((6, 16, 2, 64), np.float16)
lens = cupy.array([20, 40], np.int32)
def attend(table):
    return cuattn.paged_attention(q, pages, pages, cupy.array(table, np.int32), lens)
"""


def run(program: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"CUATTN_DEBUG": "1"}
    command = [sys.executable, "-c", SETUP + program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_a_bad_page_is_named():
    done = run("attend([[0, 1, 77], [2, 3, 6]])")
    assert done.returncode != 0
    assert "ValueError: paged_attention: page_table[1, 2] is 6, must be from 0 to 5" in done.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "cuattn.mla_decode(q, q[..., :16], pages[:, :, 0], pages[:, :, 0, :16], bad, lens, "
            "scale=1)",
            "mla_decode: page_table[1, 2] is 6, must be from 0 to 5",
        ),
        (
            "cuattn.mla_prefill(q[:, None], q[:, None, :, :16], pages[:, :, 0], "
            "pages[:, :, 0, :16], bad, lens, w, w, scale=1, absorbed=False)",
            "mla_prefill: page_table[1, 2] is 6, must be from 0 to 5",
        ),
        (
            "cuattn.paged_attention(q, pages, pages, good, lens, prefix=16)",
            "paged_attention: prefix is 16, and page_table has [2] there for sequence 1",
        ),
        (
            "cuattn.paged_attention(q[:1, None].repeat(3, 1), pages, pages, good[:1], lens[:1] * 0,"
            " prefix=(pages[0], pages[0]))",
            "paged_attention: prefix is a pair (k, v), and seq_lens has 0 for sequence 0",
        ),
    ],
)
def test_latents_and_prefixes_are_checked_too(call, message):
    done = run(
        f"""
good = cupy.array([[0, 1, 77], [2, 3, 5]], np.int32)
bad = cupy.array([[0, 1, 77], [2, 3, 6]], np.int32)
w = cupy.zeros((4, 64, 64), np.float16)
{call.replace("bad", "good") if "mla" in call else ""}
print("right")
{call}
"""
    )
    assert done.stdout.startswith("right"), done.stderr
    assert f"ValueError: {message}" in done.stderr


def test_good_calls_pass_and_can_be_captured():
    done = run(
        """
attend([[0, 1, 77], [2, 3, 5]])
table = cupy.array([[0, 1, 77], [2, 3, 5]], np.int32)
with cupy.cuda.Stream(non_blocking=True) as stream:
    stream.begin_capture()
    out = cuattn.paged_attention(q, pages, pages, table, lens)
    graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
print(float(abs(out).max()))
"""
    )
    assert done.stdout.strip() == "0.0", done.stderr
