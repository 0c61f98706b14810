"""Argument structs: Python and C++ agree on every byte. No GPU needed."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn.gpu import compiler, dispatch, params
from cuattn.gpu.structs import Struct


def assertions(struct: Struct, shift: int = 0) -> str:
    """C++ that fails with AGREES alone if `struct` has the size and the offsets of CUDA's, these
    moved by `shift`: the compiler then gets no further, which takes it a tenth of the time."""
    name = struct.name
    lines = [f'static_assert(sizeof({name}) == {struct.size}, "size of {name}");']
    for field, (_, offset, _) in struct.fields.items():
        # NVRTC has no offsetof without a header; this is what the header makes of it.
        member = f"__INTADDR__(&static_cast<{name}*>(nullptr)->{field})"
        lines.append(f'static_assert({member} == {offset + shift}, "offset of {name}::{field}");')
    return "\n".join(("", *lines, f'static_assert(sizeof({name}) == 0, "{AGREES}");'))


AGREES = "nothing else differs"


@pytest.fixture
def compile_with(monkeypatch):
    """The compiler's complaints about a kernel file with more text after it."""
    full_source = compiler.full_source

    def compile_file(source: str, text: str) -> list[str]:
        variant = next(v for v in dispatch.variants("sm_90a") if v.source == source)
        monkeypatch.setattr(compiler, "full_source", lambda v: full_source(v) + text)
        with pytest.raises(compiler.CompileError) as failure:
            compiler.compile_variant(variant, "sm_90a")
        return re.findall(r"error: (.*)", str(failure.value))

    return compile_file


@pytest.mark.skipif(sys.platform == "darwin", reason="NVIDIA's compiler does not exist for macOS")
@pytest.mark.parametrize("struct", params.STRUCTS, ids=lambda struct: struct.name)
def test_same_bytes_in_cuda(struct, compile_with):
    (complaint,) = compile_with(params.STRUCTS[struct], assertions(struct))
    assert AGREES in complaint
    first = next(iter(struct.fields))
    assert any(
        f"offset of {struct.name}::{first}" in complaint
        for complaint in compile_with(params.STRUCTS[struct], assertions(struct, shift=8))
    )


def test_every_struct_is_compared():
    """Each that a kernel takes by value is declared in params.py under its name."""
    taken = set()
    for variant in dispatch.variants("sm_90a"):
        signature = re.search(rf"\b{variant.entry}\(([^)]*)\) {{", compiler.resolve(variant.source))
        words = re.findall(r"\b([A-Z]\w*) \w+[,)]", signature[1] + ")")
        # Params: ForwardParams, perhaps with DropoutParams or CacheParams behind it; Sm90Arguments:
        # Sm90Params, perhaps with CodeScales.
        known = {"Params": "ForwardParams", "Arrays": "QuantizeParams"}
        known["Sm90Arguments"] = "Sm90Params"
        taken.update(known.get(word, word) for word in words)
    taken |= {"CacheParams", "CodeScales"}
    taken.remove("Numbers")  # an array of integers
    assert taken == {struct.name for struct in params.STRUCTS}


def test_layout_follows_cpp():
    struct = Struct(
        "Example",
        ("int", "a"),
        ("const void*", "b"),
        ("unsigned char*[2]", "c"),
        ("RowValue<float>", "d"),
        ("tile::Divisor", "e"),
        ("int", "f"),
        ("ptx::TensorMap", "g"),
        ("int", "h"),
    )
    offsets = {name: field.offset for name, field in struct.fields.items()}
    assert offsets == {"a": 0, "b": 8, "c": 16, "d": 32, "e": 48, "f": 56, "g": 64, "h": 192}
    assert struct.size == 256
    packed = struct.pack(1, 2, 3, 4, 5, 0.5, 6, 7, 8, b"map", 9)
    fields = {"a": 1, "b": 2, "c": (3, 4), "d": (5, 0.5), "e": (6, 7), "f": 8, "h": 9}
    assert struct.unpack(packed) == fields | {"g": b"map".ljust(128, b"\0")}

    constants = {name: value for name, value in fields.items() if name != "b"}
    arguments = struct.arguments(**constants)
    assert arguments.pack({"b": 2, "g_map": b"map", "x": 3}) == packed


@pytest.mark.parametrize(
    ("change", "match"),
    [({"z": 1}, r"no fields \['z'\]"), ({"a": None}, r"missing \['a'\]")],
)
def test_every_field_is_packed_once(change, match):
    struct = Struct("Example", ("const void*", "p"), ("int", "a"), ("int", "b"))
    values = {"a": 1, "b": 2} | change
    with pytest.raises(TypeError, match=match):
        struct.arguments(**{name: value for name, value in values.items() if value is not None})


@given(d=st.integers(1, 2**31 - 1), n=st.integers(0, 2**31 - 1))
def test_division_by_a_product_and_a_shift_is_exact(d, n):
    magic, shift = params.divisor(d)
    assert magic < 2**32
    assert n * magic < 2**64
    for dividend in (n, n // d * d, max(n // d * d - 1, 0), 2**31 - 1):
        assert dividend * magic >> shift == dividend // d
