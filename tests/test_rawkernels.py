"""The CUDA sources as text: what may include what, and how long a file and a line may be."""

from __future__ import annotations

import re

import pytest

from cuattn.gpu import compiler

ROOT = compiler.source_root()
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.cu*"))

#: The folders that each folder's files may include from, their own aside.
FLOORS = {
    "ptx": set(),
    "tile": {"ptx", "variant"},
    "kvcache": {"tile", "ptx"},
    "positions": {"tile", "ptx"},
    "quantization": {"kvcache", "tile", "ptx"},
    "attention": {"kvcache", "tile", "ptx"},
    "decoding": {"attention", "kvcache", "tile", "ptx"},
    "mla": {"decoding", "attention", "kvcache", "tile", "ptx"},
    "gradients": {"attention", "tile", "ptx"},
    "sampling": {"tile", "ptx"},
}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_includes_come_from_floors_below(file):
    folder = file.parts[0]
    text = (ROOT / file).read_text(encoding="utf-8")
    for include in re.findall(r'#\s*include\s+"([^"]+)"', text):
        assert include.split("/")[0] in FLOORS[folder] | {folder}, f"{file} includes {include}"
        if include != compiler.SCORE_MOD_INCLUDE:
            assert (ROOT / include).is_file(), f"{file} includes {include}"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_can_be_read_in_one_sitting(file):
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 400
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("// "), "the first line says what the file computes"
