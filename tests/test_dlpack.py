"""Arrays of other libraries: dtypes that NumPy has no name for, and what cannot be taken."""

from __future__ import annotations

import ctypes
import pathlib
import sys

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn import _dlpack
from cuattn._arrays import as_arrays

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


class Exporter:
    """An array of another library, which exports elements of a DLPack type code."""

    def __init__(self, array: np.ndarray, code: int, versioned: bool = True) -> None:
        self.array, self.code, self.versioned = array, code, versioned
        self.dtype = "strange"

    def __dlpack__(self, **options):
        options = options if self.versioned else {}
        capsule = self.array.view(f"u{self.array.itemsize}").__dlpack__(**options)
        name = _dlpack._capsule_name(capsule)
        assert (name == b"dltensor_versioned") is self.versioned
        address = _dlpack._capsule_pointer(capsule, name) + _dlpack._DTYPE_OFFSETS[name]
        ctypes.c_uint8.from_address(address).value = self.code
        return capsule

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.fixture
def jax():
    """JAX on the CPU, also where it finds a GPU: exact products, arrays on the host."""
    library = pytest.importorskip("jax")
    with library.default_device(library.devices("cpu")[0]):
        yield library


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize(("code", "bits"), _dlpack.DTYPES)
def test_dtypes_without_a_name_in_numpy(rng, code, bits, versioned):
    dtype = _dlpack.DTYPES[code, bits]
    array = rng.uniform(1, 2, (3, 5)).astype(dtype)
    xp, (taken,) = as_arrays("f", x=Exporter(array, code, versioned))
    assert xp is np
    assert taken.dtype == dtype
    np.testing.assert_array_equal(taken.view(f"u{bits // 8}"), array.view(f"u{bits // 8}"))
    assert np.shares_memory(taken, array)


def test_memory_lives_as_long_as_the_result():
    taken = as_arrays("f", x=Exporter(np.full(1000, 3, ml_dtypes.bfloat16), 4))[1][0]
    np.empty(1000, np.uint16).fill(0)
    assert (taken == 3).all()


def test_attention_of_bfloat16(rng):
    q = rng.standard_normal((1, 5, 2, 8)).astype(ml_dtypes.bfloat16)
    out = cuattn.flash_attention(*[Exporter(q, 4)] * 3)
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(out, cuattn.flash_attention(q, q, q))


def test_what_cannot_be_taken_is_named():
    q = np.ones((1, 2, 2, 4), np.float16)
    with pytest.raises(TypeError, match=r"^flash_attention: k is a \S+Exporter of dtype strange,"):
        cuattn.flash_attention(q, Exporter(q, 99), q)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "bool"])
def test_torchs_tensors(name):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6.0).reshape(2, 3).to(getattr(torch, name)).T
    taken = as_arrays("f", x=tensor)[1][0]
    assert taken.dtype.name == name
    assert taken.astype(np.float32).tolist() == tensor.float().tolist()
    assert taken.__array_interface__["data"][0] == tensor.data_ptr()


def test_a_tensor_that_requires_a_gradient():
    torch = pytest.importorskip("torch")
    q = torch.ones(1, 2, 2, 4, requires_grad=True)
    said = r"^flash_attention: q requires a gradient, .* pass q\.detach\(\)$"
    with pytest.raises(TypeError, match=said):
        cuattn.flash_attention(q, q, q)
    cuattn.flash_attention(q.detach(), q.detach(), q.detach())


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "bool"])
def test_jaxs_arrays(jax, name):
    array = jax.numpy.arange(6).reshape(2, 3).astype(name)
    taken = as_arrays("f", x=array)[1][0]
    assert taken.dtype.name == name
    np.testing.assert_array_equal(taken.astype(np.float32), np.asarray(array, np.float32))


def test_a_traced_array(jax):
    q = jax.numpy.ones((1, 2, 2, 4))
    with pytest.raises(TypeError, match=r"^flash_attention: q is traced by JAX .*pure_callback\b"):
        jax.jit(cuattn.flash_attention)(q, q, q)


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["example"])


def test_the_torch_example(examples, capsys):
    torch = pytest.importorskip("torch")
    import with_torch

    model = with_torch.Attention(64, 4)
    x = torch.randn(2, 9, 64)
    with torch.no_grad():
        q, k, v = model.to_qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        expected = model.to_out(out.transpose(1, 2).flatten(-2))
        assert (model(x) - expected).abs().max() < 1e-5
    with_torch.main()
    assert "(2, 128, 256) to (2, 128, 256)" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_gradients_through_torch(examples, name):
    torch = pytest.importorskip("torch")
    import with_torch

    dtype = getattr(torch, name)
    dout, q = torch.randn(2, 2, 9, 4, 16).to(dtype)
    k, v = torch.randn(2, 2, 11, 4, 16).to(dtype)  # as many heads: torch repeats none by itself
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with_torch.FlashAttention.apply(*inputs, {"scale": 0.3}).backward(dout)
    expected = [x.detach().requires_grad_() for x in (q, k, v)]
    heads_first = (x.transpose(1, 2) for x in expected)
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, scale=0.3)
    out.transpose(1, 2).backward(dout)
    for ours, theirs in zip(inputs, expected, strict=True):
        tolerance = 1e-5 if name == "float32" else 2**-5
        assert ours.grad.dtype == dtype
        assert (ours.grad - theirs.grad).abs().max() <= tolerance * theirs.grad.abs().max()


def test_the_jax_example(jax, examples, capsys):
    import with_jax

    q, k, v = jax.random.normal(jax.random.key(1), (3, 2, 9, 4, 16))
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    compiled = jax.jit(lambda *arrays: with_jax.attention(*arrays, causal=True))
    assert abs(compiled(q, k, v) - expected).max() < 1e-5
    mapped = jax.vmap(compiled)(q[:, None], k[:, None], v[:, None])[:, 0]
    assert abs(mapped - expected).max() < 1e-5
    with_jax.main()
    assert "gradients of {'to_out': (4, 64, 256)" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_gradients_through_jax(jax, examples, name):
    import with_jax

    arrays = jax.random.normal(jax.random.key(2), (4, 2, 9, 4, 16)).astype(name)
    dout, inputs = arrays[0], arrays[1:]

    def loss(attention, *inputs):
        return (attention(*inputs) * dout).astype("float32").sum()

    def ours(q, k, v):
        return with_jax.attention(q, k, v, causal=True)

    def theirs(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    of_all = jax.grad(loss, argnums=(1, 2, 3))
    actual = jax.jit(of_all, static_argnums=0)(ours, *inputs)
    for a, e in zip(actual, of_all(theirs, *inputs), strict=True):
        assert a.dtype == e.dtype
        tolerance = 1e-5 if name == "float32" else 2**-5
        assert abs(a - e).max() <= tolerance * abs(e).max()
