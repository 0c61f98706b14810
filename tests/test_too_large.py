"""Arguments that do not fit into a kernel's: which one it is, whatever failed to be packed."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from cuattn import _errors


@pytest.fixture
def packed(monkeypatch):
    """A function that packs numbers as a kernel's arguments are."""
    monkeypatch.setattr(_errors, "_functions", [])

    @_errors.explain_errors
    def packs(q, k=None, parts=(), scale=1.0, *, length=0, **options):
        return struct.pack("=if", length, scale)

    return packs


def far(*shape):
    return np.broadcast_to(np.float16(0), shape)


def test_what_fits_is_packed(packed):
    assert packed(far(2, 3), length=2**31 - 1, scale=3e38)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"k": far(2, 2**31)}, r"packs: k has shape \(2, 2147483648\), of which no axis may be"),
        ({"parts": [far(3), far(2**33)]}, r"packs: parts\[1\] has shape \(8589934592,\)"),
        ({"bias": far(2**31)}, r"packs: bias has shape \(2147483648,\)"),
        (
            {"k": far(2**16, 2**16)},
            r"packs: arrays of these shapes have .*: q \(2, 3\), k \(65536, 65536\)",
        ),
    ],
)
def test_lengths(packed, arguments, words):
    with pytest.raises(ValueError, match=words):
        packed(far(2, 3), length=2**31, **arguments)


def test_numbers(packed):
    with pytest.raises(ValueError, match=r"packs: scale is 1e\+300, must fit into float32 on a"):
        packed(far(2, 3), scale=1e300)


def test_other_overflows_pass(monkeypatch):
    monkeypatch.setattr(_errors, "_functions", [])

    @_errors.explain_errors
    def overflows(q, scale):
        raise OverflowError("something else")

    with pytest.raises(OverflowError, match="something else"):
        overflows(far(2), 1.0)
