"""What the copy engine of Hopper is told: no GPU is asked."""

from __future__ import annotations

import random

import ml_dtypes
import numpy as np
import pytest

from cuattn._spec import attention_spec
from cuattn.gpu import dispatch, sm90, tensormap

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def plan(*shapes, **options):
    spec = attention_spec("flash_attention", *shapes, *[BFLOAT16] * 3, **options)
    config = dispatch.forward(spec, "sm_90a", has_score=False, aligned=True).variant.config
    strides = tuple(np.empty(shape, BFLOAT16).strides for shape in shapes)
    return sm90.plan(spec, config, 132, strides), config


def test_maps_of_fixed_lengths():
    planned, config = plan((2, 300, 8, 128), (2, 500, 4, 128), (2, 500, 4, 64))
    q, k, v, bias, mask = planned.maps
    assert bias is mask is None
    assert q == sm90.Map(BFLOAT16, (128, 300, 8, 2), (2048, 256, 614400), (64, 64, 1, 1))
    assert k == sm90.Map(BFLOAT16, (128, 500, 4, 2), (1024, 256, 512000), (64, config.tile_n, 1, 1))
    assert v == sm90.Map(BFLOAT16, (64, 500, 4, 2), (512, 128, 256000), (64, config.tile_n, 1, 1))
    assert planned.scratch_bytes == 0


def test_maps_of_varlen_calls_end_where_sequences_do():
    """The address of a coordinate, as attention/work_sm90.cuh gives it: within a sequence, and of
    its rows alone."""
    planned, _ = plan((700, 8, 128), (900, 4, 128), (900, 4, 64), sequences=3)
    assert planned.scratch_bytes > 0
    far = sm90.FAR_ROWS
    for m in planned.maps[:3]:
        assert all(stride % 16 == 0 and 0 < stride < 1 << 40 for stride in m.strides)
        begin, length = 123, 456
        for row in (0, 1, length - 1, length, length + 63):
            coordinates = (0, far - length + row, 1, begin + length, far)
            inside = all(0 <= c < n for c, n in zip(coordinates, m.shape, strict=True))
            assert inside == (row < length)
            offset = sum(c * s for c, s in zip(coordinates[1:], m.strides, strict=True)) % 2**64
            if inside:
                assert offset == (begin + row) * m.strides[0] + m.strides[1]


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32), np.dtype(bool)])
def test_maps_of_bias_and_mask(dtype):
    """What the copy engine can address has a map; the rest is left to the kernel."""
    shape = (2, 304, 8, 128)
    spec = attention_spec("flash_attention", *[shape] * 3, *[BFLOAT16] * 3)
    config = dispatch.forward(spec, "sm_90a", has_score=True, aligned=True).variant.config
    strides = (np.empty(shape, BFLOAT16).strides,) * 3

    def mapped(array, **options):
        layout = (array.shape, array.strides, array.dtype)
        return sm90.plan(spec, config, 132, strides, None, layout, **options).maps[4]

    size, n = dtype.itemsize, 304
    whole = np.empty((2, 8, n, n), dtype)
    box = (config.tile_n, 64, 1, 1)
    rows, heads, batch = size * n, size * n * n, size * n * n * 8
    assert mapped(whole) == sm90.Map(dtype, (n, n, 8, 2), (rows, heads, batch), box, False)
    assert mapped(whole[:1, 0]) == sm90.Map(dtype, (n, n, 1, 1), (rows, 16, 16), box, False)
    assert mapped(whole[..., :301]).shape == (301, n, 8, 2)
    assert mapped(whole, score_aligned=False) is None
    assert mapped(whole[:, :, :1]) is None  # all queries share a row
    assert mapped(whole[..., :1]) is None
    assert mapped(whole[..., ::2]) is None
    assert mapped(whole[..., ::-1, :]) is None
    assert mapped(np.empty((2, 8, n, n - 1), dtype)) is None


def test_scales_of_scores():
    """Their product is what the contract says, with a tanh in between or not."""
    shapes = [(2, 300, 8, 64)] * 3

    def scales(**options):
        planned, config = plan(*shapes, **options)
        spec = attention_spec("flash_attention", *shapes, *[BFLOAT16] * 3, **options)
        bias = (300, 300), (600, 2), BFLOAT16
        with_bias = sm90.plan(spec, config, 132, ((64,) * 4,) * 3, bias)
        assert with_bias.scales[:2] == planned.scales[:2]
        assert with_bias.scales[2] == pytest.approx(np.log2(np.e))
        return planned.scales

    assert scales() == pytest.approx((0.0, 0.125, 0.125 * np.log2(np.e)))
    assert scales(scale=0.5, softcap=20.0) == pytest.approx((0.025, 20.0, 20.0 * np.log2(np.e)))


def test_addressable():
    assert tensormap.addressable((4096, 256, 128))
    assert not tensormap.addressable((4096, 256, 136))
    assert not tensormap.addressable((4096, 0, 128))
    assert not tensormap.addressable((4096, -256, 128))
    assert not tensormap.addressable((1 << 40, 256, 128))


def test_new_pointers_change_nothing_but_the_pointer(monkeypatch):
    bindings = pytest.importorskip("cuda.bindings.driver")
    calls = []

    class Driver:
        """The driver's types, and a call that needs no driver."""

        def __getattr__(self, name):
            return getattr(bindings, name)

        def cuTensorMapEncodeTiled(self, *arguments):
            calls.append(arguments)
            return bindings.CUresult.CUDA_SUCCESS, bindings.CUtensorMap()

    monkeypatch.setattr(tensormap, "_driver", Driver)
    shape, strides, box = (128, 64, 2, 1), (256, 512, 1024), (64, 64, 1, 1)
    for pointer in (16, 32):
        encoded = tensormap.encode.__wrapped__(pointer, np.dtype(np.float16), shape, strides, box)
        assert len(encoded) == tensormap.TENSOR_MAP_BYTES
    for pointer, (kind, rank, address, *after) in zip((16, 32), calls, strict=True):
        assert kind == bindings.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
        assert (rank, address) == (4, pointer)
        assert [[int(n) for n in numbers] for numbers in after[:4]] == [
            [*shape],
            [*strides],
            [*box],
            [1, 1, 1, 1],
        ]


def test_launches_leave_the_programs_random_numbers_alone():
    nothing = sm90.Plan((None,) * sm90.MAPS, 0, (1.0, 1.0, 1.0), 0)
    random.seed(1)
    state = random.getstate()
    arguments = {nothing.argument((0, 0, 0), 0) for _ in range(2)}
    assert random.getstate() == state
    assert len(arguments) == 2
