"""Which kernels compute gradients and which have dropout: every choice is an enumerated variant,
on a grid that a GPU has."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuattn._spec import attention_spec
from cuattn.gpu import dispatch, params
from cuattn.gpu.arguments import backward_arguments
from cuattn.gpu.dispatch import BackwardCall, Call, JvpCall, Layout, Strides, gradients_sm90
from tests.test_dispatch import MAX_GRID, SMEM_LIMITS, specs

#: In the order of their fields.
POINTERS = ["dout", "dlse", "dq", "dk", "dv", "delta", "dbias", "dsinks", "dalibi", "alibi_parts"]
POINTERS += ["nonfinite", "dq_sums"]
#: What every backward launch is given.
KNOWN = [
    *POINTERS,
    *("q", "k", "v", "out", "lse", "bias", "mask", "alibi_slopes", "sinks"),
    *("cu_seqlens_q", "cu_seqlens_k", "seed", "opened"),
]
MAPS = ["q_map", "k_map", "v_map", "dout_map", "dk_map", "dv_map"]  # of Hopper's kernels


def small_spec(dtype=np.float32):
    dtypes = [np.dtype(dtype)] * 3
    return attention_spec("flash_attention", (2, 8, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16), *dtypes)


def fits(launch: dispatch.Launch) -> bool:
    grid = (*launch.grid, 1, 1)[:3]
    return all(0 < n <= most for n, most in zip(grid, MAX_GRID, strict=True))


@given(
    arch=st.sampled_from(list(SMEM_LIMITS)),
    spec=specs(dispatch.MAX_DIM),
    grads=st.tuples(*[st.booleans()] * 3),
    aligned=st.booleans(),
)
@example("sm_90a", small_spec(np.float16), (False, False, True), True)
@example("sm_100", small_spec(np.float16), (False, False, False), True)
def test_every_choice_is_a_listed_variant(arch, spec, grads, aligned):
    call = Call.contiguous(spec, arch)
    if spec.rows == "ragged":
        grads = (False, *grads[1:])
    shape = (1, spec.heads_q, 1, spec.seqlen_k)
    if grads[0]:
        call = dataclasses.replace(call, bias=Layout(shape, (0, 0, 0, 4), np.dtype(np.float32)))
    chosen = dispatch.choose_backward(BackwardCall(call, call.strides.out, *grads, aligned))
    listed = set(dispatch.BACKWARD.variants(arch))
    rows = spec.batch * -(-max(spec.seqlen_q, spec.seqlen_k) // 16) * spec.heads_q
    for launch in chosen.launches:
        assert launch.variant in listed
        assert fits(launch) or rows * 16 > 1 << 31
    entries = [launch.variant.entry for launch in chosen.launches]
    whole = aligned and spec.head_dim % 8 == spec.head_dim_v % 8 == 0
    if "prepare_sm90" in entries:
        assert arch == "sm_90a"
        assert whole
        names = {name for name, _ in chosen.workspaces}
        filled = {
            fill.argument
            for launch in chosen.launches
            for arguments in launch.arguments
            for fill in arguments.fills
        }
        assert filled <= {*names, *KNOWN, *MAPS}
        assert entries[0] == "prepare_sm90"
        assert entries[-1] == "backward_sm80"
        return
    assert entries[0] == "delta_simt"
    if spec.dtype.itemsize == 2 and whole and dispatch.capability(arch) >= 80:
        assert entries.count("backward_sm80") in (2, 3)
        assert "backward_simt" not in entries
    elif "backward_fused_simt" in entries:
        assert not grads[1]
        assert entries.count("clear_dq_simt") == 1
        assert "backward_simt" not in entries
    else:
        assert entries.count("backward_simt") == 2
    for entry, wanted in zip(("bias_simt", "alibi_simt", "sinks_simt"), grads, strict=True):
        assert (entry in entries) == wanted


@given(arch=st.sampled_from(list(SMEM_LIMITS)), spec=specs(dispatch.MAX_DIM), aligned=st.booleans())
def test_every_choice_for_a_direction_is_a_listed_variant(arch, spec, aligned):
    spec = dataclasses.replace(spec, rows="batched", keys="batched")
    call = Call.contiguous(spec, arch)
    launch = dispatch.choose_jvp(JvpCall(call, call.strides[:3], aligned))
    assert launch.variant in set(dispatch.JVP.variants(arch))
    assert fits(launch) or spec.batch * spec.seqlen_q * spec.heads_q > 1 << 30
    tensor_cores = spec.dtype.itemsize == 2 and dispatch.capability(arch) >= 80
    assert launch.variant.entry == ("jvp_sm80" if tensor_cores else "jvp_simt")
    config = launch.variant.config
    if tensor_cores:
        blocks = -(-spec.seqlen_q // config.tile_m) * spec.heads_q
        assert launch.grid[0] == blocks * -(-spec.head_dim_v // config.head_dim_v)
        assert config.head_dim >= spec.head_dim
        plain = aligned and spec.head_dim % 8 == spec.head_dim_v % 8 == 0 and not call.has_score
        assert config.general is not (plain and spec.dropout == 0.0 and spec.scale > 0.0)
    else:
        assert config.head_dim >= spec.head_dim_v


@pytest.mark.parametrize("arch", SMEM_LIMITS)
def test_variants_fit_the_gpu(arch):
    variants = [*dispatch.BACKWARD.variants(arch), *dispatch.JVP.variants(arch)]
    assert len(set(variants)) == len(variants)
    assert all(v.config.smem_bytes <= SMEM_LIMITS[arch] * 1024 for v in variants)
    entries = {v.entry for v in variants}
    assert ("backward_sm80" in entries) == (dispatch.capability(arch) >= 80)
    assert ("jvp_sm80" in entries) == (dispatch.capability(arch) >= 80)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_every_number_of_a_wide_row_is_computed_once(head_dims, arch, deterministic):
    """dq, dk and dv are each the result of one pass, whatever registers allow."""
    dtypes = [np.dtype(np.float16)] * 3
    q, k, v = ((2, 100, 4, d) for d in (head_dims[0], *head_dims))
    spec = attention_spec("flash_attention", q, k, v, *dtypes)
    call = Call.contiguous(spec, arch)
    asked = BackwardCall(call, call.strides.out, deterministic=deterministic)
    chosen = dispatch.gradients.Sm80Backward().serves(asked)
    assert chosen is not None
    entries = [launch.variant.entry for launch in chosen.launches]
    configs = [
        launch.variant.config
        for launch in chosen.launches
        if launch.variant.entry == "backward_sm80"
    ]
    fused = arch == "sm_90a" and not deterministic
    assert entries.count("backward_fused_sm80") == fused
    if fused:
        assert all(config.repairs for config in configs)
    of_keys = [c for c in configs if c.keys_stationary]
    assert sum(c.first for c in of_keys) == sum(c.second for c in of_keys) == 1
    (of_queries,) = (c for c in configs if not c.keys_stationary)
    adds_dq = head_dims in ((64, 64), (256, 256)) and not deterministic and not fused
    assert of_queries.repairs is (adds_dq or fused)
    assert sum(c.adds_dq for c in of_keys) == adds_dq


def test_float32_and_float64_take_one_pass_where_shared_memory_is_large():
    """Not for what it does not compute, nor where dq must be the same bits in every run."""

    def entries(arch="sm_90a", dtype=np.float32, head_dim=64, deterministic=False, **options):
        shapes, dtypes = [(2, 100, 4, head_dim)] * 3, [np.dtype(dtype)] * 3
        spec = attention_spec("flash_attention", *shapes, *dtypes, **options)
        call = Call.contiguous(spec, arch)
        asked = BackwardCall(call, call.strides.out, deterministic=deterministic)
        return {launch.variant.entry for launch in dispatch.choose_backward(asked).launches}

    fused = {"delta_simt", "clear_dq_simt", "backward_fused_simt"}
    assert entries() == entries(causal=True) == entries(dtype=np.float64) == fused
    assert entries(head_dim=100) == entries(softcap=3.0) == entries(head_dim=200) == fused
    for passes in (
        entries(deterministic=True),
        entries(dropout=0.1),
        entries(arch="sm_80"),
        entries(arch="sm_120"),
    ):
        assert passes == {"delta_simt", "backward_simt"}


def test_gradients_of_64_features_have_three_consumers_where_sequences_are_long():
    dtypes = [np.dtype(np.float16)] * 3
    for shape, heads_kv, causal, keys in (
        ((8, 512, 32, 64), 32, False, 128),
        ((8, 513, 32, 64), 32, False, 192),
        ((2, 8192, 4, 64), 4, False, 128),  # 2.6 tiles of 192 keys a multiprocessor are three
        ((2, 8192, 32, 64), 32, True, 192),
        ((8, 2048, 32, 64), 4, True, 192),  # 352 tiles, the longest first, that end together
        ((2, 8192, 32, 64), 4, True, 128),  # 344 tiles that do not
        ((2, 8192, 32, 64), 2, True, 128),  # 172, of which 40 multiprocessors have two
        ((1, 4096, 1, 64), 1, True, 128),  # fewer tiles than multiprocessors
        ((16384, 32, 64), 2, True, 128),  # of several sequences: as many tiles
        ((16384, 32, 64), 2, False, 192),  # measured: faster than 128
        ((16384, 32, 64), 4, True, 192),
    ):
        of_keys = (*shape[:-2], heads_kv, 64)
        name, options = "flash_attention", {"causal": causal}
        if len(shape) == 3:
            name, options = name + "_varlen", {"causal": causal, "sequences": 7}
        spec = attention_spec(name, shape, of_keys, of_keys, *dtypes, **options)
        call = Call.contiguous(spec, "sm_90a")
        chosen = dispatch.choose_backward(BackwardCall(call, call.strides.out))
        configs = {launch.variant.entry: launch.variant.config for launch in chosen.launches}
        assert configs["backward_sm90"].tile_n == keys
        assert configs["backward_sm90"].threads == 128 + 2 * keys


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 0)}])
def test_deterministic_gradients_do_not_depend_on_the_batch(head_dim, options):
    """Neither how they are computed nor in what parts keys are; one pass adds up dq in the order of
    keys."""

    def chosen(batch, heads, multiprocessors=132, ragged=False, dropout=0.0):
        shape, name = (batch, 700, heads, head_dim), "flash_attention"
        more = {"dropout": dropout, **options}
        if ragged:
            shape, name = (700 * batch, *shape[2:]), name + "_varlen"
            more["sequences"] = batch
        v = (*shape[:-1], min(head_dim, 128) if head_dim == 192 else head_dim)
        dtypes = [np.dtype(np.float16)] * 3
        spec = attention_spec(name, shape, shape, v, *dtypes, **more)
        call = Call.contiguous(spec, "sm_90a", multiprocessors)
        asked = BackwardCall(call, call.strides.out, deterministic=True)
        return dispatch.choose_backward(asked)

    def variants(*args, **options):
        return [launch.variant for launch in chosen(*args, **options).launches]

    for heads, ragged in itertools.product((1, 4, 32), (False, True)):
        few = variants(1, heads, ragged=ragged)
        assert few == variants(64, heads, ragged=ragged) == variants(2, heads, 7, ragged=ragged)
        in_order = head_dim <= 128
        entries = [variant.entry for variant in few]
        assert ("finish_sm90" in entries) == in_order
        assert ("backward_queries_sm90" in entries) == (not in_order)
        passes = [v for v in few if v.entry == "backward_sm90"]
        assert all(v.config.in_order == v.config.computes_dq == in_order for v in passes)
        workspaces = dict(chosen(1, heads, ragged=ragged).workspaces)
        assert bool(workspaces["dq_sums"]) == ("opened" in workspaces) == in_order
    with_dropout = variants(1, 8, dropout=0.1)
    assert not any(getattr(v.config, "in_order", False) for v in with_dropout)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 0)}])
@pytest.mark.parametrize("heads_kv", [1, 2, 8])
@pytest.mark.parametrize("heads_q", [4, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_heads_on_one_key_head_have_a_pass_for_dq_where_it_is_deterministic(
    head_dim, heads_q, heads_kv, options
):
    if heads_kv > heads_q:
        return
    k = (2, 700, heads_kv, head_dim)
    dtypes = [np.dtype(np.float16)] * 3
    q = (2, 700, heads_q, head_dim)
    spec = attention_spec("flash_attention", q, k, k, *dtypes, **options)
    call = Call.contiguous(spec, "sm_90a", 132)
    asked = BackwardCall(call, call.strides.out, deterministic=True)
    variants = [launch.variant for launch in dispatch.choose_backward(asked).launches]
    entries = [variant.entry for variant in variants]
    of_one = heads_kv == 1
    assert ("backward_queries_sm90" in entries) == of_one
    assert ("finish_sm90" in entries) == (not of_one)
    assert set(variants) <= set(dispatch.variants("sm_90a"))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("heads_kv", [1, 2, 8])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 0)}])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
def test_grouped_heads_come_before_the_next_block(dims, options, heads_kv, ragged):
    """Without a window on the left, without dropout and where sums have no order; of 192 features
    the last two are not for the one pass."""

    def launches(dropout=0.0, deterministic=False):
        name, rows = "flash_attention", (2, 700)
        if ragged:
            name, rows = "flash_attention_varlen", (1400,)
        shapes = [(*rows, *last) for last in ((8, dims[0]), *((heads_kv, d) for d in dims))]
        more = {"sequences": 2} if ragged else {}
        dtypes = [np.dtype(np.float16)] * 3
        spec = attention_spec(name, *shapes, *dtypes, dropout=dropout, **more, **options)
        call = Call.contiguous(spec, "sm_90a", 132)
        asked = BackwardCall(call, call.strides.out, deterministic=deterministic)
        chosen = dispatch.choose_backward(asked).launches
        return {launch.variant.entry: launch.variant.config for launch in chosen}

    wide = dims[0] > 128
    one_pass = "backward_192_sm90" if wide else "backward_sm90"
    inside = {64: False, 128: heads_kv == 1 and bool(options), 192: heads_kv < 8}[dims[0]]
    is_inside = inside and "window" not in options
    assert launches()[one_pass].heads_inside == is_inside
    assert ("backward_queries_sm90" in launches(deterministic=True)) == (wide or heads_kv == 1)
    for other in (launches(dropout=0.1), launches(deterministic=True)):
        assert one_pass not in other if wide else not other[one_pass].heads_inside


def test_few_tiles_of_a_head_begin_together_where_sums_have_an_order():
    def order(seqlen, in_order, **options):
        shape = (16384 // seqlen, seqlen, 16, 128)
        dtypes = [np.dtype(np.float16)] * 3
        spec = attention_spec("flash_attention", *[shape] * 3, *dtypes, **options)
        return gradients_sm90._order(spec, 128, seqlen // 128, 132, in_order)

    for options in ({}, {"causal": True}, {"window": (1023, 0)}):
        assert order(2048, True, **options)[0] == 33
        assert order(16384, True, **options)[0] == 16
        assert order(512, True, **options)[0] == 48  # what stays in L2
    assert order(8192, False)[0] == 1
    assert order(8192, False, causal=True) == (3, 48)
    assert order(8192, True, causal=True) == (32, 48)


@pytest.mark.parametrize("varlen", [False, True])
def test_gradients_with_dropout_have_a_hopper_kernel(varlen):
    """Up to head_dim 128, where dq may be summed in any order. Kernels before and after it know of
    the dropout, and all but those that repair have what it leaves over its scale."""

    def launches(head_dim=64, dropout=0.25, deterministic=False):
        shape = (600, 8, head_dim) if varlen else (2, 4096, 8, head_dim)
        name = "flash_attention_varlen" if varlen else "flash_attention"
        more = {"sequences": 3} if varlen else {}
        spec = attention_spec(
            name, *[shape] * 3, *[np.dtype(np.float16)] * 3, dropout=dropout, scale=0.5, **more
        )
        call = Call.contiguous(spec, "sm_90a")
        asked = BackwardCall(call, call.strides.out, deterministic=deterministic)
        return {launch.variant.entry: launch for launch in dispatch.choose_backward(asked).launches}

    for head_dim in (8, 64, 72, 128):
        chosen = launches(head_dim)
        assert list(chosen) == ["prepare_sm90", "backward_sm90", "finish_sm90", "backward_sm80"]
        assert chosen["backward_sm90"].variant.config.tile_n == 128
        for entry, scale in (("backward_sm90", 0.5 * 4 / 3), ("backward_sm80", 0.5)):
            of_forward = chosen[entry].arguments[0]
            packed = of_forward.pack({fill.argument: 0 for fill in of_forward.fills})
            assert params.FORWARD_PARAMS.unpack(packed)["scale"] == pytest.approx(scale)
        for entry in ("prepare_sm90", "backward_sm90"):
            config = chosen[entry].variant.config
            assert config.dropout
            assert not launches(head_dim, 0.0)[entry].variant.config.dropout
        assert chosen["backward_sm80"].variant.config.general
    for other in (launches(192), launches(deterministic=True)):
        assert "backward_sm90" not in other
        assert "backward_sm80" in other


@given(spec=specs(dispatch.MAX_DIM), arch=st.sampled_from(list(SMEM_LIMITS)))
def test_dropout_goes_to_a_kernel_that_has_it(spec, arch):
    """What it needs to know follows the other arguments, or is one of its own."""
    launch = dispatch.choose(Call.contiguous(dataclasses.replace(spec, dropout=0.1), arch))
    config = launch.variant.config
    if launch.variant.entry == "forward_simt":
        assert config.has_score
        arguments = launch.arguments[1]
        tensor_cores = spec.dtype.itemsize == 2 and dispatch.capability(arch) >= 80
        assert not tensor_cores or max(spec.head_dim, spec.head_dim_v) > dispatch.MAX_DIM
    else:
        assert config.dropout
        arguments = launch.arguments[0]
    values = {fill.argument: 0 for fill in arguments.fills} | {"seed": 2**64 - 1}
    dropout = arguments.pack(values)[-params.DROPOUT_PARAMS.size :]
    assert params.DROPOUT_PARAMS.unpack(dropout) == {
        "seed": 2**64 - 1,
        "scale": 65536 / (65536 - 6554),
        "threshold": 6554,
    }


def test_values_are_in_their_fields():
    packed = backward_arguments(
        small_spec(),
        (4000, 400, 40, 4),
        (1, 6, 1, 9),
        alibi_batched=True,
        alibi_slots=7,
        alibi_tile=64,
    ).pack({name: n for n, name in enumerate(POINTERS)})
    values = params.BACKWARD_PARAMS.unpack(packed)
    assert [values[name] for name in POINTERS] == list(range(len(POINTERS)))
    assert values["dout_stride"] == (1000, 100, 10)
    axes = ("bias_batch", "bias_heads", "bias_rows", "bias_cols")
    assert [values[name] for name in axes] == [1, 6, 1, 9]
    alibi = ("alibi_batched", "alibi_slots", "alibi_tile")
    assert [values[name] for name in alibi] == [1, 7, 64]


def test_tangents_keep_their_strides():
    spec = small_spec()
    call = Call.contiguous(spec, "sm_80")
    tangents = Strides(*((4000 * n, 400 * n, 40 * n, 4) for n in (1, 2, 3, 4)))
    launch = dispatch.choose_jvp(JvpCall(call, tangents[:3]))
    addresses = {"tangent_q": 1, "tangent_k": 2, "tangent_v": 3, "dout": 4}
    values = params.JVP_PARAMS.unpack(launch.arguments[1].pack(addresses))
    assert {name: values[name] for name in addresses} == addresses
    for n, name in enumerate("qkv", start=1):
        assert values[f"tangent_{name}_stride"] == (1000 * n, 100 * n, 10 * n)


def test_tiers_of_gradients_are_chosen_by_context():
    """As those of attention, and each kind of call for itself."""
    dtypes = [np.dtype(np.float16)] * 3
    spec = attention_spec("flash_attention", *[(2, 100, 4, 64)] * 3, *dtypes)
    call = Call.contiguous(spec, "sm_90a")
    backward = BackwardCall(call, call.strides.out)

    def entries():
        chosen = dispatch.choose_backward(backward, dispatch.BACKWARD.current())
        return {launch.variant.entry for launch in chosen.launches}

    with dispatch.use_tiers("backward_sm80", "backward_simt"):
        assert "backward_sm80" in entries()
        assert "prepare_sm90" not in entries()
        assert dispatch.current_tiers() is dispatch.TIERS
        with dispatch.use_tiers("forward_simt", "jvp_simt", "mla_simt"):
            assert "backward_sm80" in entries()
            for tiers in (dispatch.ATTENTION, dispatch.JVP, dispatch.MLA):
                assert [tier.name.split("_")[1] for tier in tiers.current()] == ["simt"]
        with dispatch.use_tiers("backward_simt"):
            assert entries() == {"delta_simt", "backward_simt"}
        assert "backward_sm80" in entries()
    assert "prepare_sm90" in entries()
    odd = dataclasses.replace(backward, addresses_aligned=False)
    with dispatch.use_tiers("backward_sm80"), pytest.raises(LookupError, match="backward_sm80"):
        dispatch.choose_backward(odd, dispatch.BACKWARD.current())
    with pytest.raises(ValueError, match="mla_sm80"), dispatch.use_tiers("backward_sm100"):
        pass


@given(
    lengths=st.tuples(*[st.integers(1, 3000)] * 2),
    heads=st.integers(1, 12),
    group=st.integers(1, 4),
    keys=st.sampled_from([128, 192]),
)
def test_tiles_of_a_causal_mask_are_dealt_out_as_the_kernel_does(lengths, heads, group, keys):
    """By the number of each tile, as layout_sm90.cuh finds it, and by what its keys are seen by."""
    seqlen_q, seqlen_k = lengths
    shapes = [(2, seqlen_q, heads * group, 64)] + [(2, seqlen_k, heads, 64)] * 2
    dtypes = [np.dtype(np.float16)] * 3
    spec = attention_spec("flash_attention", *shapes, *dtypes, causal=True)
    slots, everyone = -(-seqlen_k // keys), 2 * heads
    section, late = gradients_sm90._order(spec, 64, slots, 7)
    sees = np.arange(seqlen_k) <= np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    ends = np.zeros(7, int)
    for number in range(slots * everyone):
        if number >= late * everyone:
            slot = late + (number - late * everyone) // everyone
        else:
            before = number // (late * section) * section
            slot = (number - before * late) // min(section, everyone - before)
        rows = np.flatnonzero(sees[:, slot * keys : (slot + 1) * keys].any(axis=1))
        blocks = -(-seqlen_q // 64) - rows[0] // 64 if len(rows) else 0
        ends[ends.argmin()] += group * blocks
    assert gradients_sm90._dealt_time(spec, 64, keys, 7) == ends.max()


def test_where_sums_do_not_begin_as_zeros():
    def workspaces(seqlen, head_dim=128, heads_kv=2, ragged=False, **options):
        rows, of_keys = (1, seqlen, 2, head_dim), (1, seqlen, heads_kv, head_dim)
        name = "flash_attention"
        if ragged:
            name, rows, of_keys = name + "_varlen", rows[1:], of_keys[1:]
            options["sequences"] = 2
        dtypes = [np.dtype(np.float16)] * 3
        spec = attention_spec(name, rows, of_keys, of_keys, *dtypes, **options)
        call = Call.contiguous(spec, "sm_90a")
        return dict(dispatch.choose_backward(BackwardCall(call, call.strides.out)).workspaces)

    for head_dim, causal in ((64, False), (64, True), (128, False), (128, True)):
        options = {"head_dim": head_dim, "causal": causal}
        assert ("opened" in workspaces(16384, **options)) == (causal and head_dim == 128)
        assert ("opened" in workspaces(16384, ragged=True, **options)) == causal
        for ragged in (False, True):
            assert "opened" not in workspaces(16384, heads_kv=1, ragged=ragged, **options)

    parts = 8 * 2 * 2 * 128  # of 64 queries and columns of two heads, 8 bytes each
    assert workspaces(8192)["dq_sums"] and "opened" not in workspaces(8192)
    assert workspaces(8192, window=(1023, 0))["opened"] == parts
    assert workspaces(2048, causal=True)["opened"] == parts // 4
    assert workspaces(1024)["opened"] == parts // 8
    assert "opened" not in workspaces(2048)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1023, 0)}])
def test_which_calls_have_maps_of_dk_and_dv(head_dim, options):
    rows = (1, 8192, 2, head_dim)
    dtypes = [np.dtype(np.float16)] * 3
    spec = attention_spec("flash_attention", rows, rows, rows, *dtypes, **options)
    call = Call.contiguous(spec, "sm_90a")
    backward = BackwardCall(call, call.strides.out)
    launches = dispatch.choose_backward(backward).launches
    mapped = [launch for launch in launches if "dk" in launch.tensor_maps]
    assert all({"dk", "dv"} <= set(launch.tensor_maps) for launch in mapped)
    entries = [launch.variant.entry for launch in mapped]
    stores = "window" in options
    assert entries == ["backward_sm90"] * stores
    alone = dataclasses.replace(backward, deterministic=True)
    assert all(
        "dk" not in launch.tensor_maps for launch in dispatch.choose_backward(alone).launches
    )
