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
