"""Calls like an earlier one: they launch the same kernel with the same bytes as the ordinary way,
and nothing that the ordinary way refuses gets past. The driver and memory are stand-ins: no GPU
needed."""

from __future__ import annotations

import ctypes
import itertools

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn import _repeat
from cuattn._repeat import forget

cupy = pytest.importorskip("cupy")

from cuattn.gpu import compiler, dispatch, memory, plan, repeat, tensormap  # noqa: E402

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INT32 = np.dtype(np.int32)
WORKSPACE = 0x600000000000


class Stream:
    ptr = 0

    def is_capturing(self):
        return False


class Device:
    """What stands in for a device: memory that nobody reads, and notes of the launches."""

    def __init__(self):
        self.next = itertools.count(0x7F0000000000, 1 << 32)
        self.launches = []  # the kernel, its grid, and the structs' bytes but for a launch's id
        self.ordinary = 0  # calls that took the ordinary way

    def array(self, shape, dtype=BFLOAT16, offset=0, device=0, strides=None):
        memory = cupy.cuda.UnownedMemory(next(self.next), 1 << 32, self, device)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, offset), strides)

    def kernel(self, variant, device):
        def launch(grid, block, arguments, shared_mem=0):
            assert type(arguments) is int
            chosen = self.plans[variant, grid]
            structs = []
            for i, struct in enumerate(chosen.arguments):
                address = ctypes.c_uint64.from_address(arguments + 8 * i).value
                data = bytearray(ctypes.string_at(address, struct.struct.size))
                for offset, name, size in struct.fills:
                    if name == "launch_id":
                        assert any(data[offset : offset + size])
                        data[offset : offset + size] = bytes(size)
                structs.append(bytes(data))
            self.launches.append((variant, grid, structs))

        return launch


@pytest.fixture
def device(monkeypatch):
    """A Hopper device."""
    made = Device()
    made.plans = {}
    initialise = plan.Plan.__init__

    def noted(self, chosen, *args):
        made.plans[chosen.variant, (*chosen.grid, 1, 1)[:3]] = chosen
        initialise(self, chosen, *args)

    def empty(shape, dtype=float, *_):
        return made.array(shape, np.dtype(dtype))

    record = repeat.record

    def counted(*args):
        made.ordinary += 1
        return record(*args)

    monkeypatch.setattr(plan.Plan, "__init__", noted)
    monkeypatch.setattr(repeat, "record", counted)
    monkeypatch.setattr(repeat, "_get_device", lambda: 0)
    monkeypatch.setattr(repeat, "_new", empty)
    monkeypatch.setattr(repeat, "_allocate", lambda n: made.array((n,), np.dtype(np.int8)).data)
    monkeypatch.setattr(cupy, "empty", empty)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", Stream)
    scratch = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(WORKSPACE, 1 << 40, made, 0), 0)
    monkeypatch.setattr(plan, "scratch", lambda nbytes: scratch)
    monkeypatch.setattr(compiler, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(compiler, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(compiler, "kernel", made.kernel)
    monkeypatch.setattr(
        tensormap, "encode", lambda tensor_map, pointer: pointer.to_bytes(8, "little") + bytes(120)
    )
    monkeypatch.setattr(_repeat, "_ndarray", cupy.ndarray)
    monkeypatch.setattr(_repeat, "_memory", memory)
    plans = plan.attention_plan, tensormap.begins_with_address
    for cached in plans:
        cached.cache_clear()
    forget()
    yield made
    forget()
    for cached in plans:
        cached.cache_clear()


def whole(device, dtype=BFLOAT16, **options):
    q, k, v = (device.array((2, 300, heads, 64), dtype) for heads in (8, 2, 2))
    return lambda **more: cuattn.flash_attention(q, k, v, **options, **more)


def ragged(device, **options):
    q, k, v = (device.array((900, heads, 128)) for heads in (8, 2, 2))
    cu = device.array((4,), INT32)
    return lambda **more: cuattn.flash_attention_varlen(q, k, v, cu, **options, **more)


def decode(device, batch=3, heads=(8, 2), length=5000, **options):
    q = device.array((batch, heads[0], 128))
    k, v = (device.array((batch, length, heads[1], 128)) for _ in range(2))
    lens = device.array((batch,), INT32)
    return lambda **more: cuattn.flash_decode(q, k, v, lens, **options, **more)


def paged(device, **options):
    q, table = device.array((3, 1, 8, 128)), device.array((3, 40), INT32)
    k, v = (device.array((200, 16, 2, 128)) for _ in range(2))
    lens = device.array((3,), INT32)
    return lambda **more: cuattn.paged_attention(q, k, v, table, lens, **options, **more)


def torch_like(device, **options):
    q, k, v = (device.array((2, 8, 200, 64)) for _ in range(3))
    return lambda **more: cuattn.scaled_dot_product_attention(q, k, v, **options, **more)


def sampled(device, **options):
    logits = device.array((5, 1000), np.dtype(np.float32))
    return lambda **more: cuattn.sampling.sample(logits, **options, **more)


CALLS = {
    "whole": (whole, {"causal": True, "window": (100, None), "scale": 0.3}),
    "float32": (whole, {"dtype": np.dtype(np.float32), "return_lse": True}),
    "dropout": (whole, {"dropout": 0.1, "seed": 2**64 - 5}),
    "ragged": (ragged, {"causal": True}),
    "decode": (decode, {}),
    "decode, many": (decode, {"batch": 300, "num_splits": "fixed", "return_lse": True}),
    "paged": (paged, {"softcap": 20.0}),
    "torch": (torch_like, {"is_causal": True}),
    "sample": (sampled, {"top_k": 50, "top_p": 0.9, "seed": 7, "offset": 3}),
    "sample, no filters": (sampled, {"temperature": 0.7, "seed": 0}),
    "sample, typical": (sampled, {"typical_p": 0.7, "seed": 0}),
}


def described(result):
    items = result if isinstance(result, tuple) else (result,)
    return type(result), [(a.shape, a.dtype, a.strides) for a in items]


@pytest.mark.parametrize("name", CALLS)
def test_the_launch_is_the_ordinary_one(device, name):
    make, options = CALLS[name]
    first, second = make(device, **options), make(device, **options)
    results = [first(), second(), second()]
    assert device.ordinary == 1
    results_of_repeats, launches = results[1:], device.launches[1:]
    forget()
    expected = second()
    assert device.ordinary == 2
    for result, launch in zip(results_of_repeats, launches, strict=False):
        assert described(result) == described(expected)
        assert same_but_results(launch, result, device.launches[-1], expected)
    # The two sets of arrays differ, and so do the launches.
    assert device.launches[0][:2] == device.launches[1][:2]
    assert device.launches[0][2] != device.launches[1][2]


def same_but_results(launch, result, other, other_result):
    """Whether two launches have the same bytes, but for the addresses of their results."""
    items, others = ((r if isinstance(r, tuple) else (r,)) for r in (result, other_result))
    structs = launch[2]
    for item, second in zip(items, others, strict=True):
        pair = (array.data.ptr.to_bytes(8, "little") for array in (item, second))
        old, new = pair
        assert any(old in struct for struct in structs)
        structs = [struct.replace(old, new) for struct in structs]
    return (*launch[:2], structs) == other


def test_each_option_and_layout_has_a_launch_of_its_own(device):
    q, k = device.array((2, 300, 8, 64)), device.array((2, 300, 2, 64))
    wide = device.array((2, 300, 2, 128))[..., :64]
    odd = device.array((2, 300, 8, 64), offset=2)
    calls = [
        (q, k, {}),
        (q, k, {"causal": True}),
        (q, k, {"causal": False}),
        (q, k, {"scale": 1}),
        (q, k, {"scale": 1.0}),
        (q, k, {"window": (5, 6)}),
        (q, k, {"window": (5, None)}),
        (q, wide, {}),
        (odd, k, {}),
        (*(device.array((2, 300, heads, 64), np.dtype(np.float16)) for heads in (8, 2)), {}),
    ]
    for _ in range(2):
        for q_given, k_given, options in calls:
            cuattn.flash_attention(q_given, k_given, k_given, **options)
    assert device.ordinary == len(calls)
    again = device.launches[len(calls) :]
    for (variant, grid, _), (*expected, _) in zip(again, device.launches, strict=False):
        assert [variant, grid] == expected
    assert device.launches[8][0] != device.launches[0][0]  # an odd address


def test_wrong_arguments_are_refused_as_before(device):
    q, k = device.array((2, 300, 8, 64)), device.array((2, 300, 2, 64))
    for _ in range(2):
        cuattn.flash_attention(q, k, k, causal=True, window=(4, 4))
    with pytest.raises(TypeError, match="causal must be True or False, got 1"):
        cuattn.flash_attention(q, k, k, causal=1, window=(4, 4))
    with pytest.raises(ValueError, match=r"window is \(4, '4'\)"):
        cuattn.flash_attention(q, k, k, causal=True, window=(4, "4"))
    with pytest.raises(ValueError, match="v has length 299"):
        cuattn.flash_attention(q, k, k[:, 1:], causal=True, window=(4, 4))
    other = device.array((2, 300, 2, 64), device=1)
    with pytest.raises(ValueError, match="all arrays must be on one device"):
        cuattn.flash_attention(q, k, other, causal=True, window=(4, 4))
    with pytest.raises(TypeError, match="softmax_scale is a keyword of flash-attn"):
        cuattn.flash_attention(q, k, k, causal=True, window=(4, 4), softmax_scale=1.0)
    with pytest.raises(ValueError, match="seed is -1"):
        cuattn.flash_attention(q, k, k, causal=True, window=(4, 4), seed=-1)
    with pytest.raises(ValueError, match="out has shape"):
        cuattn.flash_attention(q, k, k, causal=True, window=(4, 4), out=k)


def test_out_is_returned(device):
    q, k = device.array((3, 8, 128)), device.array((3, 5000, 2, 128))
    lens, out = device.array((3,), INT32), device.array((3, 8, 128))
    for _ in range(2):
        assert cuattn.flash_decode(q, k, k, lens, out=out) is out
        result, lse = cuattn.flash_decode(q, k, k, lens, out=out, return_lse=True)
        assert result is out
        assert lse.shape == (3, 8, 1)
    assert device.ordinary == 2


def test_what_makes_copies_is_not_repeated(device, monkeypatch):
    """A copy of an argument is made anew at each call."""
    copies = []

    def saturate(array, copy):
        copies.append(array)
        return copy

    monkeypatch.setattr(memory, "_saturate", saturate)
    monkeypatch.setattr(memory, "scratch_array", lambda shape, dtype: device.array(shape, dtype))
    q, k = device.array((3, 8, 128)), device.array((3, 5000, 2, 128))
    lens = device.array((3,), np.dtype(np.int64))
    for n in range(1, 4):
        cuattn.flash_decode(q, k, k, lens)
        assert len(copies) == n


def test_other_tiers_are_asked(device):
    call = whole(device)
    call()
    call()
    with dispatch.use_tiers("forward_simt"):
        call()
    call()
    sources = [variant.source.split("_")[-1] for variant, *_ in device.launches]
    assert sources == ["sm90.cu", "sm90.cu", "simt.cu", "sm90.cu"]
    assert device.ordinary == 1


def test_another_device_is_current(device, monkeypatch):
    call = whole(device)
    call()
    current = [1]
    monkeypatch.setattr(repeat, "_get_device", lambda: current[0])
    launches = len(device.launches)
    call()  # the ordinary way, which changes the device
    assert len(device.launches) == launches + 1


def test_seeds_are_new_at_each_call(device):
    call = sampled(device, temperature=0.5)
    seeds = set()
    for _ in range(5):
        call()
        (_, _, (params, _)) = device.launches[-1]
        seeds.add(repeat_seed(params))
    assert len(seeds) == 5
    assert device.ordinary == 1


def repeat_seed(params):
    from cuattn.gpu.params import SAMPLE_PARAMS

    values = SAMPLE_PARAMS.unpack(params)
    assert values["seed"][0] == 0
    return values["seed"][1]


def test_maps_that_do_not_begin_with_the_address_are_encoded(device, monkeypatch):
    def encode(tensor_map, pointer):
        return (pointer * 3 % 2**64).to_bytes(8, "little") * 16

    monkeypatch.setattr(tensormap, "encode", encode)
    first, second = whole(device), whole(device)
    first()
    result = second()
    forget()
    expected = second()
    assert device.ordinary == 2
    params = [launch[2][1] for launch in device.launches]
    assert params[1] != params[0]
    old, new = ((r.data.ptr * 3 % 2**64).to_bytes(8, "little") for r in (result, expected))
    assert params[1].replace(old, new) == params[2]
