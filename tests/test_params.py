"""Kernel arguments: Python and C++ agree on every byte, and every value is in the field it belongs
to. No GPU needed."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn._spec import attention_spec
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
        # Params: ForwardParams, with DropoutParams behind it where there is dropout.
        taken.update({"Params": "ForwardParams"}.get(word, word) for word in words)
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


def spec(**options):
    shapes = [(3, 20, 6, 40), (3, 30, 2, 40), (3, 30, 2, 24)]
    return attention_spec("flash_attention", *shapes, *[np.dtype(np.float16)] * 3, **options)


STRIDES = tuple((2 * n, 4 * n, 6 * n, 2) for n in (100, 200, 300, 400))  # bytes


def forward_params(spec, strides=STRIDES, bias=None, mask=None, alibi_slopes=None):
    """The fields of ForwardParams as they would be passed, with the addresses 1 to 11."""
    arguments = params.forward_arguments(spec, strides, bias, mask, alibi_slopes)
    return params.FORWARD_PARAMS.unpack(arguments.pack(addresses(params.FORWARD_PARAMS)))


def addresses(struct):
    """1, 2, … for the pointers that it has."""
    names = [name for name, field in struct.fields.items() if field.argument]
    return {name: address for address, name in enumerate(names, start=1)}


def test_forward_arguments():
    p = forward_params(spec(causal=True, window=(7, 9), scale=0.5, softcap=30.0))
    assert list(p.values())[:11] == list(range(1, 12))
    for n, name in zip((100, 200, 300, 400), ("q", "k", "v", "out"), strict=True):
        assert p[f"{name}_stride"] == (n, 2 * n, 3 * n)  # elements
    assert (p["scale"], p["softcap"]) == (0.5, 30.0)
    sizes = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v")
    assert [p[name] for name in sizes] == [3, 20, 30, 6, 2, 40, 24]
    assert (p["window_left"], p["window_right"]) == (7, 0)  # causal is narrower than 9


def test_no_window_is_unbounded():
    p = forward_params(spec())
    assert p["window_left"] == p["window_right"] == params.UNBOUNDED
    p = forward_params(spec(window=(2**40, 0)))
    assert (p["window_left"], p["window_right"]) == (params.UNBOUNDED, 0)


def test_score_arrays_broadcast_by_strides_of_0():
    half, single, boolean = np.dtype(np.float16), np.dtype(np.float32), np.dtype(bool)
    p = forward_params(
        spec(),
        bias=((6, 1, 30), (480, 80, 4), single),
        mask=((3, 1, 20, 30), (600, 600, 30, 1), boolean),
        alibi_slopes=((3, 6), (24, 4), single),
    )
    assert p["bias_stride"] == (0, 120, 0, 1)
    assert p["mask_stride"] == (600, 0, 30, 1)
    assert p["alibi_batch_stride"] == 6
    assert p["bias_is_float32"] == 1
    p = forward_params(spec(), bias=((30,), (2,), half), alibi_slopes=((6,), (4,), single))
    assert p["bias_stride"] == (0, 0, 0, 1)
    assert p["bias_is_float32"] == 0
    assert p["alibi_batch_stride"] == 0


def test_ragged_rows_have_no_batch_stride():
    shapes = [(50, 6, 40), (60, 2, 40), (60, 2, 40)]
    varlen = attention_spec(
        "flash_attention_varlen", *shapes, *[np.dtype(np.float16)] * 3, sequences=4
    )
    p = forward_params(varlen, tuple(strides[1:] for strides in STRIDES))
    assert p["q_stride"] == (0, 200, 300)
    assert (p["batch"], p["seqlen_q"], p["seqlen_k"]) == (4, 50, 60)


def test_cache_write_arguments():
    arguments = params.cache_write_arguments(
        (50, 3, 40, 24),
        ((480, 160, 4), (960, 320, 4), (8000, 500, 100, 4), (4800, 300, 60, 4)),
        (7, 11),
        itemsizes=(4,) * 4,
        page_slots=16,
        num_pages=90,
        uniform=5,
        vec_bytes=16,
        lanes_shift=6,
        pairs=12,
        interleaved=True,
        table_stride=11,
        max_position=13,
    )
    struct = params.CACHE_WRITE_PARAMS
    p = struct.unpack(arguments.pack(addresses(struct)))
    assert list(p.values())[:9] == list(range(1, 10))
    strides = {"k_token": 120, "k_head": 40, "v_token": 240, "v_head": 80, "table_stride": 11}
    strides |= {"k_page": (2000, 125, 25), "v_page": (1200, 75, 15)}
    sizes = {"total": 50, "batch": 7, "heads": 3, "head_dim": 40, "head_dim_v": 24}
    sizes |= {"page_shift": 4, "num_pages": 90, "capacity": 176, "uniform": 5}
    sizes |= {"lanes_shift": 6, "pairs": 12, "interleaved": 1}
    divisors = {"by_uniform": 5, "by_k_vecs": 10, "by_v_vecs": 6}
    divisors = {name: params.divisor(d) for name, d in divisors.items()}
    others = {"slots": 10, "left_padding": 11, "page_slots": 16, "max_position": 13}
    assert dict(list(p.items())[9:]) == strides | sizes | divisors | others


@given(d=st.integers(1, 2**31 - 1), n=st.integers(0, 2**31 - 1))
def test_division_by_a_product_and_a_shift_is_exact(d, n):
    magic, shift = params.divisor(d)
    assert magic < 2**32
    assert n * magic < 2**64
    for dividend in (n, n // d * d, max(n // d * d - 1, 0), 2**31 - 1):
        assert dividend * magic >> shift == dividend // d
