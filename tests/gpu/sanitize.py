"""Small calls of every kernel, to be run under compute-sanitizer.

``compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python -m
tests.gpu.sanitize``, and ``compute-sanitizer --tool racecheck --error-exitcode 1 python -m
tests.gpu.sanitize racecheck``. (cuda-bindings asks the driver for functions that it may not have:
those are the API errors.) CuPy's memory pool is off, so that every array is an allocation of its
own and a step beyond its end is seen.

The calls are in parts, each of which has a name: ``--list`` prints them. Names behind the command
choose parts: ``gradients.float16.64x64`` one, ``gradients`` all those whose names begin with it.
So several processes can share the work.

Any report is to be traced to its instructions, as docs/notes/decoding.md does with one;
docs/notes/forward_sm90.md has those that are no races.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator

import cupy
import ml_dtypes
import numpy as np

import cuattn
from cuattn.gpu import compiler, decoding, dispatch, mla
from cuattn.gpu.dispatch import codes_sm90, decoding_codes_sm90, sm90
from tests import appending
from tests.scores import check_decode, check_paged, check_varlen


def arrays(rng: np.random.Generator, dtype: np.dtype, *shapes: tuple[int, ...]) -> list:
    return [cupy.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


def forward(rng: np.random.Generator, dtype: np.dtype) -> None:
    """Ragged tiles, padded head_dims, every option, lengths that are not what they must be."""
    for head_dim, head_dim_v in [(64, 64), (40, 72), (33, 1), (128, 128), (192, 256)]:
        q, k, v = arrays(
            rng, dtype, (1, 70, 2, head_dim), (1, 150, 1, head_dim), (1, 150, 1, head_dim_v)
        )
        slopes, sinks = arrays(rng, np.dtype(np.float32), (2,), (2,))
        (bias,) = arrays(rng, dtype, (2, 70, 150))
        mask = cupy.asarray(rng.random((1, 1, 70, 150)) < 0.5)
        options = [
            {},
            {"causal": True, "sinks": sinks},
            {"window": (30, 5), "softcap": 5.0, "alibi_slopes": slopes},
            {"bias": bias, "mask": mask, "causal": True},
        ]
        for more in options:
            cuattn.flash_attention(q, k, v, **more, return_lse=True)
        for lengths in [(0, 1, 1, 70), (0, 2**31 - 1, -(2**31), 50)]:
            cu_seqlens = cupy.asarray(np.array(lengths, np.int32))
            cuattn.flash_attention_varlen(q[0], k[0], v[0], cu_seqlens, causal=True)
    # More tiles than a block of forward_sm90 has places for, on any GPU.
    q, k, v = arrays(rng, dtype, (1, 70, 900, 64), (1, 70, 1, 64), (1, 70, 1, 64))
    cuattn.flash_attention(q, k, v, causal=True)


def forward_large_blocks(rng: np.random.Generator, dtype: np.dtype) -> None:
    """Blocks of 176 keys, for one and two consumers."""
    sm90.SM90_MANY_KEYS = 1  # however few there are
    fastest = sm90._fastest
    for warpgroups in (1, 2):
        sm90._fastest = lambda spec, configs, _, w=warpgroups: next(
            c for c in configs if (c.tile_n, c.warpgroups) == (176, w)
        )
        seqlen = 300 * warpgroups
        q, k, v = arrays(rng, dtype, (2, seqlen // 2, 4, 128), *[(2, seqlen, 2, 128)] * 2)
        cuattn.flash_attention(q, k, v, causal=True, return_lse=True)
    sm90._fastest = fastest


def gradients(rng: np.random.Generator, dtype: np.dtype, head_dim: int, head_dim_v: int) -> None:
    """Every gradient and derivative of ragged tiles, padded head_dims, every option, and lengths
    that are not what they must be. Of the kernels without tensor cores, for which racecheck takes
    longest, large heads have the calls that launch each once.
    """
    q, k, v = arrays(
        rng, dtype, (1, 70, 2, head_dim), (1, 150, 1, head_dim), (1, 150, 1, head_dim_v)
    )
    slopes, sinks = arrays(rng, np.dtype(np.float32), (2,), (2,))
    (bias,) = arrays(rng, dtype, (2, 1, 150))
    mask = cupy.asarray(rng.random((1, 1, 70, 150)) < 0.5)
    options = [
        {},
        {"deterministic": True, "causal": True},
        {"causal": True, "sinks": sinks},
        {"window": (30, 5), "softcap": 5.0, "alibi_slopes": slopes, "dropout": 0.5},
        {"bias": bias, "mask": mask, "causal": True},
    ]
    all_lengths = [(0, 1, 1, 70), (0, 2**31 - 1, -(2**31), 50)]
    if dtype != np.float16 and head_dim > 64:
        options, all_lengths = options[2:], all_lengths[1:]
    for more in options:
        wanted = {"grad_bias": "bias" in more, "grad_alibi": "alibi_slopes" in more}
        out, pullback = cuattn.flash_attention_vjp(q, k, v, **wanted, **more)
        pullback(out)
        if "deterministic" not in more:
            cuattn.flash_attention_jvp(q, k, v, q, k, v, **more)
    q, k, v = q[0], k[0, :70], v[0, :70]
    for lengths in all_lengths:
        cu_seqlens = cupy.asarray(np.array(lengths, np.int32))
        more = {"causal": True, "alibi_slopes": slopes}
        out, lse = cuattn.flash_attention_varlen(q, k, v, cu_seqlens, return_lse=True, **more)
        cuattn.flash_attention_varlen_backward(
            out, q, k, v, out, lse, cu_seqlens, grad_alibi=True, **more
        )


def gradients_in_order(rng: np.random.Generator, dtype: np.dtype, head_dim: int) -> None:
    """Sums of dq in the order of keys, of several tiles, and of lengths that are not what they must
    be."""
    q, k, v = arrays(rng, dtype, (1, 150, 8, head_dim), *[(1, 450, 8, head_dim)] * 2)
    for more in ({}, {"causal": True}, {"window": (100, 5)}):
        out, pullback = cuattn.flash_attention_vjp(q, k, v, deterministic=True, **more)
        pullback(out)
    q, k, v = k[0], v[0], k[0]
    for lengths in [(0, 1, 1, 450), (0, 2**31 - 1, -(2**31), 50)]:
        cu_seqlens = cupy.asarray(np.array(lengths, np.int32))
        out, lse = cuattn.flash_attention_varlen(q, k, v, cu_seqlens, causal=True, return_lse=True)
        cuattn.flash_attention_varlen_backward(
            out, q, k, v, out, lse, cu_seqlens, causal=True, deterministic=True
        )


def gradients_wide(rng: np.random.Generator, dtype: np.dtype) -> None:
    """192 features with values of 128 in one pass: several tiles of each head, alone and grouped,
    lengths that are not what they must be, and more tiles than there are multiprocessors."""
    for heads_kv in (4, 1):
        q, dout = arrays(rng, dtype, *[(150, 4, dim) for dim in (192, 128)])
        k, v = arrays(rng, dtype, *[(300, heads_kv, dim) for dim in (192, 128)])
        for more in ({}, {"causal": True}, {"window": (100, 5)}):
            _, pullback = cuattn.flash_attention_vjp(q[None], k[None], v[None], **more)
            pullback(dout[None])
        for lengths in [(0, 1, 1, 150), (0, 2**31 - 1, -(2**31), 50)]:
            cu_seqlens = cupy.asarray(np.array(lengths, np.int32))
            out, lse = cuattn.flash_attention_varlen(
                q, k, v, cu_seqlens, causal=True, return_lse=True
            )
            cuattn.flash_attention_varlen_backward(dout, q, k, v, out, lse, cu_seqlens, causal=True)
    q, k, v = arrays(rng, dtype, *[(1, 70, 150, dim) for dim in (192, 192, 128)])
    out, pullback = cuattn.flash_attention_vjp(q, k, v, causal=True)
    pullback(out)


def decode(
    rng: np.random.Generator, dtype: np.dtype, head_dim: int, head_dim_v: int, heads: int
) -> None:
    """Lengths from 0 to more than was promised, contiguous and in pages that are all needed to the
    last slot, whole and in parts, and merged.
    """
    page_size, capacity, prefix = 16, 512, 256
    table = cupy.asarray(rng.permutation(4 * capacity // page_size).astype(np.int32).reshape(4, -1))
    lens = cupy.asarray(np.array((0, 1, 70, 600), np.int32))
    cu_seqlens = cupy.asarray(np.array([0, 1, 1, 30, 33], np.int32))
    k, v = arrays(rng, dtype, *((4, capacity, 2, dim) for dim in (head_dim, head_dim_v)))
    pages = [a.reshape(-1, page_size, *a.shape[2:]) for a in (k, v)]
    slopes, sinks = arrays(rng, np.dtype(np.float32), (heads,), (heads,))
    options = [
        {},
        {"num_splits": "fixed", "sinks": sinks},
        {"num_splits": 5},
        {"window": (100, 3), "softcap": 5.0, "alibi_slopes": slopes},
    ]
    for seqlen_q, more in itertools.product((1, 3), options):
        (q,) = arrays(rng, dtype, (4, seqlen_q, heads, head_dim))
        cuattn.flash_decode(q, k, v, lens, **more, return_lse=True)
        cuattn.flash_decode(q[:1], k[:1], v[:1], lens[-1:], **more)
        cuattn.paged_attention(q, *pages, table, lens, **more, return_lse=True)
    (q,) = arrays(rng, dtype, (33, heads, head_dim))
    cuattn.paged_attention(q, *pages, table, lens, cu_seqlens_q=cu_seqlens, causal=False)
    table[:, : prefix // page_size] = table[0, : prefix // page_size]
    cuattn.paged_attention(q[:4], *pages, table, lens + prefix, prefix=prefix)


def decode_in_clusters(rng: np.random.Generator, dtype: np.dtype) -> None:
    """Clusters of each size, with tiles of 8 rows, of 16 and twice 16; several clusters for a key
    head; and without clusters so many parts that they are merged in two steps."""
    lens = cupy.asarray(np.array((0, 1, 70, 600), np.int32))
    for head_dim, heads, tokens in itertools.product((64, 128), (2, 5), (2, 4, 6)):
        q, k, v = arrays(
            rng, dtype, (4, tokens, 4 * heads, head_dim), *[(4, 512, heads, head_dim)] * 2
        )
        cuattn.flash_decode(q, k, v, lens, window=(100, 3), return_lse=True)
    for head_dim, heads in ((64, 4), (128, 16)):
        q, k, v = arrays(rng, dtype, (1, 1, heads, head_dim), *[(1, 4608, 1, head_dim)] * 2)
        cuattn.flash_decode(q, k, v, cupy.full(1, 4608 - (heads == 4), np.int32))


#: The tiers that serve caches of codes, each in turn as the fastest one.
CODES_TIERS = (
    ("decode_codes_sm90", "decode_sm80", "decode_simt"),
    ("decode_sm90", "decode_sm80", "decode_simt"),
    ("decode_sm80", "decode_simt"),
    ("decode_simt",),
)


def codes(rng: np.random.Generator, dtype: np.dtype, format: str, dim: int) -> None:
    """Tokens written as codes and read again, kernel by kernel: by few rows and by prompts."""
    decoding_codes_sm90.LEAST_PAIRS = 0  # however few sequences there are
    page_size = 16 if dim == 128 else 64
    cache = cuattn.PagedKVCache(
        640 // page_size, page_size, 2, dim, dtype=dtype, quantization=format, xp=cupy
    )
    ids = [cache.add_sequence() for _ in range(3)]
    cache.extend(ids, [1, 70, 300])
    cache.write(0, ids, *arrays(rng, dtype, (371, 2, dim), (371, 2, dim)))
    of_cache = (*cache.pages(0), cache.page_table(ids), cache.seq_lens(ids))
    for tiers, tokens in itertools.product(CODES_TIERS, (1, 3)):
        (q,) = arrays(rng, dtype, (3, tokens, 8, dim))
        splits = {} if "decode_sm90" in tiers else {"num_splits": 3}  # a cluster has a sequence
        with dispatch.use_tiers(*tiers):
            cuattn.paged_attention(q, *of_cache, return_lse=True)
            cuattn.paged_attention(q, *of_cache, **splits, window=(100, 3))
    (q,) = arrays(rng, dtype, (3, 70, 8, dim))
    cuattn.paged_attention(q, *of_cache)
    if dim == 64:
        cuattn.dequantize(cuattn.quantize(q, "int8" if format == "k8v4" else format))


def codes_of_four_heads(rng: np.random.Generator, dtype: np.dtype) -> None:
    """Four key heads share a block, and where each has two rows, its warp reads more than these."""
    decoding_codes_sm90.LEAST_PAIRS = 0  # however few sequences there are
    decoding_codes_sm90.MANY_KEYS = 0  # however few of them there are
    cache = cuattn.PagedKVCache(40, 16, 4, 64, dtype=dtype, quantization="int4", xp=cupy)
    ids = [cache.add_sequence() for _ in range(2)]
    cache.extend(ids, [300, 33])
    cache.write(0, ids, *arrays(rng, dtype, (333, 4, 64), (333, 4, 64)))
    for group in (1, 2, 3, 8):
        (q,) = arrays(rng, dtype, (2, 1, 4 * group, 64))
        with dispatch.use_tiers(*CODES_TIERS[0]):
            cuattn.paged_attention(q, *cache.pages(0), cache.page_table(ids), cache.seq_lens(ids))


def codes_of_prompts(rng: np.random.Generator, dtype: np.dtype, format: str) -> None:
    """Codes that the forward kernel expands, by single thread blocks and by teams, of batched rows
    and of ragged ones."""
    codes_sm90.expands_each_tile = lambda *call: True  # however few tiles there are
    cache = cuattn.PagedKVCache(40, 16, 2, 128, dtype=dtype, quantization=format, xp=cupy)
    ids = [cache.add_sequence() for _ in range(3)]
    cache.extend(ids, [1, 70, 300])
    cache.write(0, ids, *arrays(rng, dtype, (371, 2, 128), (371, 2, 128)))
    of_cache = (*cache.pages(0), cache.page_table(ids), cache.seq_lens(ids))
    with dispatch.use_tiers("forward_codes_sm90"):
        for team, heads in ((1, 2), (1, 6), (3, 4), (3, 8)):
            codes_sm90.team_of = lambda *call, team=team: team
            q, ragged = arrays(rng, dtype, (3, 70, heads, 128), (150, heads, 128))
            cuattn.paged_attention(q, *of_cache)
            cu_seqlens = cupy.asarray(np.array([0, 0, 20, 150], np.int32))
            cuattn.paged_attention(ragged, *of_cache, cu_seqlens_q=cu_seqlens)


def codes_of_latents(rng: np.random.Generator, dtype: np.dtype, format: str) -> None:
    """Codes of latents, kernel by kernel. Tiles of more than 32 rows have all of them, as if there
    were much work."""
    dispatch.mla.FEW_CODE_BLOCKS = 0
    lens = cupy.asarray(np.array([0, 1, 70, 300], np.int32))
    for heads, tokens, groups, tiers in (
        (128, 1, 1, ("mla_codes", "mla_simt")),
        (16, 3, 4, ("mla_codes",)),
        (16, 1, 1, ("mla_codes",)),
        (16, 1, 4, ("mla_codes",)),
        (24, 1, 1, ("mla_codes",)),
        (40, 2, 2, ("mla_codes",)),
    ):
        latents, rope = arrays(rng, dtype, (20, 64, 1, 512), (20, 64, 1, 64))
        of_groups = {"granularity": "group", "group_size": 512 // groups}
        latents = cuattn.quantize(latents, format, **of_groups if groups > 1 else {})
        table = cupy.asarray(rng.permutation(20).astype(np.int32).reshape(4, -1))
        q, q_rope = arrays(rng, dtype, (4, tokens, heads, 512), (4, tokens, heads, 64))
        chosen = cupy.asarray(rng.integers(-1, 300, (4, tokens, 100)).astype(np.int32))
        for tier, more in itertools.product(tiers, ({}, {"indices": chosen})):
            with dispatch.use_tiers(tier, "mla_simt"):
                cuattn.mla_decode(q, q_rope, latents, rope, table, lens, scale=0.07, **more)


def quantize(rng: np.random.Generator, dtype: np.dtype) -> None:
    """Scales of every kind, of whole vectors and not, rotated and not."""
    for dim, format in itertools.product((128, 40), ("int8", "int4", "float8_e5m2")):
        (x,) = arrays(rng, dtype, (2, 70, 3, dim))
        for granularity in ("token", "group", "head", "channel", "tensor"):
            more = {"group_size": dim // 4} if granularity == "group" else {}
            cuattn.dequantize(cuattn.quantize(x, format, granularity=granularity, **more))
        cuattn.dequantize(cuattn.quantize(x, format, rotate=True))
    codes = cuattn.quantize(x, "int4", symmetric=False, granularity="channel")
    cuattn.dequantize(codes)


def shared_prefix(rng: np.random.Generator, dtype: np.dtype) -> None:
    """Few rows and many, in pages that are all needed to the last slot, and in arrays that end
    within a tile of keys. Forty sequences of one tile of keys each give a thread block of
    decode_sm80.cu several splits, between which each warp keeps its place in shared memory.
    """
    decoding._cascade_pays = lambda *call: True  # of a prefix of any length
    for dims, group, page_size in [
        ((64, 64), 4, 16),
        ((128, 128), 7, 8),
        ((256, 192), 1, 128),
        ((72, 40), 12, 16),
    ]:
        first, own = max(256 // page_size, 1), max(64 // page_size, 1)  # pages
        for tokens in (1, 40):
            (q,) = arrays(rng, dtype, (tokens, 1, 2 * group, dims[0]))
            count = first + tokens * own
            pages = arrays(rng, dtype, *((count, page_size, 2, dim) for dim in dims))
            table = np.tile(np.arange(first + own, dtype=np.int32), (tokens, 1))
            table[:, first:] += own * np.arange(tokens, dtype=np.int32)[:, None]
            lens = cupy.full(tokens, table.shape[1] * page_size, np.int32)
            table = cupy.asarray(table)
            cuattn.paged_attention(
                q, *pages, table, lens, prefix=first * page_size, return_lse=True
            )
            prefix = tuple(arrays(rng, dtype, *((301, 2, dim) for dim in dims)))
            cuattn.paged_attention(q, *pages, table, lens, prefix=prefix)


def kvcache(rng: np.random.Generator, dtype: np.dtype) -> None:
    """Pages that are all needed to the last slot, tokens of no sequence, of one and of several,
    rotated and not.
    """
    angles = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    for dim, dim_v, pairs in [(128, 64, 32), (40, 40, 3), (7, 3, 3)]:
        cache = cuattn.PagedKVCache(7, 16, 3, dim, head_dim_v=dim_v, dtype=dtype, xp=cupy)
        ids = [cache.add_sequence() for _ in range(3)]
        rope = tuple(arrays(rng, angles, (64, pairs), (64, pairs)))
        for counts in [(0, 9, 60), (1, 1, 1)]:
            cache.extend(ids, counts)
            k, v = arrays(rng, dtype, *((sum(counts), 3, d) for d in (dim, dim_v)))
            cache.write(0, ids, k, v)
            for interleaved in (False, True):
                cache.write(0, ids, k, v, rope=rope, interleaved=interleaved)
        fork = cache.fork(ids[1])
        cache.extend([fork], 1)
        cache.write(0, [fork], k[:1], v[:1])


def scores(rng: np.random.Generator, dtype: np.dtype) -> None:
    """Bias and masks with room for as many queries and keys as there are, and large heads; rotary
    embeddings in place, whole vectors and not."""
    for name, dims in (("all", (64, 64)), ("both masks", (40, 72)), ("bias of keys", (300, 270))):
        for check in (check_varlen, check_decode, check_paged):
            check(rng, dtype, name, dims, cupy.asarray)
    for dim, rotary_dim in ((64, 64), (72, 24), (33, 10)):
        (x,) = arrays(rng, dtype, (2, 9, 3, dim))
        for interleaved in (False, True):
            positions = cupy.arange(9)
            cuattn.rope(x, positions, rotary_dim=rotary_dim, interleaved=interleaved, out=x)


def append(rng: np.random.Generator, dtype: np.dtype) -> None:
    """New tokens into every kind of cache."""
    for kind, dims in itertools.product(appending.KINDS, ((64, 40), (33, 7))):
        rope = None if kind == "slots alone" else "halves"
        appending.check(rng, dtype, kind, cupy.asarray, dims=dims, padded=True, rope=rope)


def sampling(rng: np.random.Generator, dtype: np.dtype) -> None:
    """Rows of whole quads and not, aligned and not, with penalties; shared by eight blocks, by two
    and by none.

    racecheck takes a minute for a search of a long row by blocks that meet at each step, so long
    rows are such that a glance tells much of them, and filter.cu, which is the same for all dtypes,
    has one row at a time.
    """
    dispatch.sampling.MIN_TABLE_LOGITS = 0  # tables of penalized logits for rows of any size
    filters = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}, {"top_p": 0.9, "min_p": 0.01}
    for vocab in (9000, 40000):  # softmax by clusters of eight blocks
        cuattn.sampling.softmax(*arrays(rng, dtype, (2, vocab)))
    for rows, vocab, start, penalized in [
        (3, 700, 0, True),
        (3, 700, 3, False),
        (2, 3001, 3, True),
        (25, 700, 0, False),
        (256, 130, 0, False),
    ]:
        (wide,) = arrays(rng, dtype, (rows, vocab + 8))
        if vocab < 1000:
            wide[0], wide[1, :-20] = 1, -1e4  # rows of which a glance tells little
        logits = wide[:, start : start + vocab]
        cuattn.sampling.softmax(logits)
        cuattn.sampling.top_k(logits, 5)
        cuattn.sampling.top_k(logits, 129)
        cuattn.sampling.filter_logits(logits, top_k=20, top_p=0.9, min_p=0.01)
        for options in (
            {}, {"temperature": 0.0}, *filters, {"min_p": 0.1}, {"typical_p": 0.9}, {"top_k": 300}
        ):  # fmt: skip
            cuattn.sampling.sample(logits, **options)
        if not penalized:  # which is the same for any number of rows
            continue
        tokens = cupy.asarray(rng.integers(-1, vocab, (rows, 70)))
        (bias,) = arrays(rng, np.dtype(np.float32), (vocab,))
        triples = (tokens[:, 0] % rows, tokens[:, 1], bias[:rows])
        mask = cupy.asarray(rng.random((rows, vocab)) < 0.5)
        words = cupy.full((rows, -(-vocab // 32)), 0x5A5A5A5A, np.uint32)
        cuattn.sampling.softmax(logits, temperature=0.0)
        cuattn.sampling.logprobs(logits, tokens[:, 0], top_n=5)
        if dtype == np.float32:
            cuattn.sampling.filter_logits(logits[-1], top_p=0.9, typical_p=0.9)
        for options in ({}, {"temperature": 0.0}, filters[0]):
            cuattn.sampling.sample(
                logits, **options, tokens=tokens, repetition=1.2, logit_bias=triples
            )
            cuattn.sampling.sample(logits, **options, logit_bias=bias, allowed=mask)
            cuattn.sampling.sample(logits, **options, allowed=words)


def latents(rng: np.random.Generator, dtype: np.dtype) -> None:
    """Latent attention: two to five blocks of 64 keys, with maxima that rise."""
    dispatch.mla.ROWS_80_BLOCKS = 0
    lens = cupy.asarray(np.array([0, 1, 70, 300], np.int32))
    for page_size, heads, tokens in (
        *((64, 128, 1), (16, 16, 3), (2, 40, 1), (32, 16, 1), (64, 16, 5), (8, 40, 2)),
    ):
        pages, q = arrays(
            rng, dtype, (4 * 320 // page_size, page_size, 576), (4, tokens, heads, 576)
        )
        q *= 8
        table = rng.permutation(len(pages)).astype(np.int32).reshape(4, -1)
        call = (q[..., :512], q[..., 512:], pages[..., :512], pages[..., 512:])
        call += (cupy.asarray(table), lens)
        chosen = cupy.asarray(rng.integers(-1, 300, (4, tokens, 100)).astype(np.int32))
        for more in ({}, {"num_splits": "fixed"}, {"window": (100, 0)}, {"indices": chosen}):
            cuattn.mla_decode(*call, scale=0.07, return_lse=True, **more)
        cu_seqlens = cupy.asarray(np.array([0, 0, 1, 71, 321], np.int32))
        mla.take_tokens(pages[:, :, None], *call[-2:], cu_seqlens, 321)


def speculation(rng: np.random.Generator, dtype: np.dtype) -> None:
    """Chains and trees of which some are rejected, and beams."""
    for vocab in (40, 3000):
        target = rng.dirichlet(np.full(vocab, 0.1), (3, 5)).astype(np.float32)
        draft = (0.5 * target[:, :4] + 0.5 / vocab).astype(np.float32)
        drawn, parents = rng.integers(-1, vocab, (3, 4)), np.tile([-1, -1, 0, 1], (3, 1))
        drawn, parents, draft, target = map(cupy.asarray, (drawn, parents, draft, target))
        cuattn.sampling.speculative_sample(drawn, draft, target)
        cuattn.sampling.speculative_sample_tree(drawn, parents, draft, target)
        (logits,) = arrays(rng, dtype, (2, 3, vocab))
        cuattn.sampling.beam_step(logits, logits[:, :, 0])


# What of the kernels' text racecheck gets in another form, as for_racecheck says.
ONE_LANE = re.compile(
    r"if \((?:threadIdx\.x % 32|slice\.lane) == 0\) ptx::mbarrier_arrive\((.+?)\);\n"
)
EACH_LANE = r"""asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
    ::"r"(ptx::shared_address(&\1)) : "memory");
"""
#: Of mbarriers, which count 32 for each arrival.
BY_32 = {
    '"r"(arrivals));': '"r"(32 * arrivals));',
    '"mbarrier.arrive.shared::cta.b64 _, [%0];"': '"mbarrier.arrive.shared::cta.b64 _, [%0], 32;"',
    '"cp.async.mbarrier.arrive.noinc': (
        '"mbarrier.arrive.shared::cta.b64 _, [%0], 31; cp.async.mbarrier.arrive.noinc'
    ),
    '"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"': (
        '"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1; "'
        '"mbarrier.arrive.shared::cta.b64 _, [%0], 32;"'
    ),
}
OPENED_INBOX = "ptx::mbarrier_init(received, 1);"
REPLACED = "if (threadIdx.x % 32 == 0) smem.replaced"
#: Kernels in which only some warps meet at a named barrier, each as often as it has work.
OF_SOME_WARPS = re.compile(
    r'extern "C" __global__[^;{]*\b'
    r"(?:decode_sm80|backward_fused_sm80|mla_decode_(?:80_sm90|codes|codes_sm90|few_sm90))\([^;{]*\{\n"
)
NAMED_BARRIER = r"""__device__ __forceinline__ void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
"""
# In its place; each counts 768 for any number of threads, of which 768 is a multiple.
MBARRIER = r"""
__shared__ unsigned long long named_barriers[8];
__shared__ unsigned char named_parities[Config::threads];
__shared__ unsigned named_votes[8][4];
__shared__ unsigned char named_voted[Config::threads];  // how often
__device__ __forceinline__ unsigned named_barrier(int barrier) {
  return static_cast<unsigned>(__cvta_generic_to_shared(&named_barriers[barrier]));
}
__device__ __forceinline__ void init_named_barriers() {
  if (threadIdx.x < 8)
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(named_barrier(threadIdx.x)), "r"(768)
                 : "memory");
  if (threadIdx.x < 32) named_votes[threadIdx.x / 4][threadIdx.x % 4] = 0;
  named_parities[threadIdx.x] = named_voted[threadIdx.x] = 0;
  __syncthreads();
}
__device__ __forceinline__ void bar_sync(int barrier, int threads) {
  const unsigned parity = named_parities[threadIdx.x] >> barrier & 1;
  unsigned done = 0;
  asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(named_barrier(barrier)),
               "r"(768 / threads) : "memory");
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; "
                 "selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(named_barrier(barrier)), "r"(parity) : "memory");
  named_parities[threadIdx.x] ^= 1 << barrier;
"""
VOTE = re.compile(r"(bar_sync_or\([^{]*\{\n).*?return any;\n", re.DOTALL)
# Four votes at a barrier have places; the one after the next is cleared, which all have read.
VOTE_AT_MBARRIER = r"""\1
  const int place = named_voted[threadIdx.x]++ % 4;
  if (predicate) atomicOr(&named_votes[barrier][place], 1u);
  bar_sync(barrier, threads);
  const bool any = *const_cast<volatile unsigned*>(&named_votes[barrier][place]);
  if (threadIdx.x % threads == 0) named_votes[barrier][(place + 2) % 4] = 0;
  return any;
"""


def for_racecheck(text: str) -> str:
    """The text of a kernel in which racecheck sees the order that there is.

    - Every lane arrives at an mbarrier, where otherwise one arrives for its warp after
      ``__syncwarp`` (as ``arrive_warp`` of rawkernels/tile/pipeline.cuh). The tool follows the lane
      that arrives, and takes what the others have read or written before for unordered. All
      mbarriers count 32 times as much, so that any other arrival is one of 32.
    - Where some warps of a block meet at named barriers more often than others, they meet at
      mbarriers. Otherwise the tool takes accesses for unordered that ``__syncthreads`` lies
      between; it seems to compare how many barriers each warp has met.
    - A filter warp of forward_sm90.cu writes its flag of replaced values only where it changes. A
      consumer that skips a tile's last block may read it while it is written for that block; to
      this consumer either value is right.
    - The thread that initialises the mbarrier of decode_sm90.cu's inbox, and arrives at it in the
      next instruction, does so in a branch of its own. Otherwise the initialisation may become one
      instruction of its whole warp, which the tool takes for another lane's than the arrival.
    """
    text = text.replace(OPENED_INBOX, f"{OPENED_INBOX} __syncwarp(1);")
    if ONE_LANE.search(text):
        for whole, of_lanes in BY_32.items():
            text = text.replace(whole, of_lanes)
        text = ONE_LANE.sub(EACH_LANE, text)
        changes = "if (threadIdx.x % 32 == 0 && (replaced || block == tile.block_end - 1))"
        text = text.replace(REPLACED, f"{changes} smem.replaced")
    if OF_SOME_WARPS.search(text) and "warps_q = 1;" not in text:  # which has none
        text = text.replace(NAMED_BARRIER, MBARRIER)
        text = VOTE.sub(VOTE_AT_MBARRIER, text)
        text = OF_SOME_WARPS.sub(r"\g<0>  ptx::init_named_barriers();\n", text)
    return text


#: head_dim of queries and keys, and of values.
HEAD_DIMS = [(64, 64), (40, 72), (33, 1), (128, 128), (192, 128), (192, 256)]
FORMATS = ("int8", "float8_e4m3", "int4", "k8v4")


def in_tiers(
    call: Callable[..., None], *tiers: str
) -> Callable[[np.random.Generator, np.dtype], None]:
    """`call` with these tiers alone."""

    def limited(rng: np.random.Generator, dtype: np.dtype) -> None:
        with dispatch.use_tiers(*tiers):
            call(rng, dtype)

    return limited


def parts() -> Iterator[tuple[str, Callable[[np.random.Generator, np.dtype], None], str]]:
    """Name, call and dtype of each part: with every tier of a kind in turn as the fastest one, in
    every dtype that it serves."""
    real = ("float16", "float32", "float64")
    tiers = ("sm90", "sm80", "simt")
    calls = [("forward", "", forward), ("decode", ".clusters", decode_in_clusters)]
    for *dims, heads in [(64, 64, 8), (40, 72, 2), (33, 1, 4), (128, 128, 40)]:
        call = functools.partial(decode, head_dim=dims[0], head_dim_v=dims[1], heads=heads)
        calls.append(("decode", ".{}x{}".format(*dims), call))
    for (kind, case, call), (first, tier) in itertools.product(calls, enumerate(tiers)):
        limited = in_tiers(call, *(f"{kind}_{below}" for below in tiers[first:]))
        for dtype in real if tier == "simt" else real[:1]:
            yield f"{kind}.{tier}.{dtype}{case}", limited, dtype
    yield "forward.large_blocks.float16", forward_large_blocks, "float16"
    for dtype, dims in itertools.product(real, HEAD_DIMS):
        call = functools.partial(gradients, head_dim=dims[0], head_dim_v=dims[1])
        yield "gradients.{}.{}x{}".format(dtype, *dims), call, dtype
        if dtype == "float16" and dims[0] >= 64:  # as where there is no wgmma
            below = in_tiers(call, "backward_sm80", "backward_simt")
            yield "gradients.sm80.{}.{}x{}".format(dtype, *dims), below, dtype
    for dim in (64, 128):
        call = functools.partial(gradients_in_order, head_dim=dim)
        yield f"gradients.in_order.float16.{dim}", call, "float16"
    yield "gradients.wide.float16", gradients_wide, "float16"
    for call, dtypes in (
        (shared_prefix, real[:1]),
        (kvcache, real),
        (quantize, real),
        (scores, real[::2]),
        (append, real[::2]),
    ):
        for dtype in dtypes:
            yield f"{call.__name__}.{dtype}", call, dtype
    for format, dim in itertools.product(FORMATS, (128, 64)):
        yield f"codes.{format}.{dim}", functools.partial(codes, format=format, dim=dim), "float16"
    yield "codes.four_heads", codes_of_four_heads, "float16"
    for format in FORMATS[::2]:
        call = functools.partial(codes_of_prompts, format=format)
        yield f"codes.prompts.{format}", call, "bfloat16"
    for format in FORMATS[:2]:
        call = functools.partial(codes_of_latents, format=format)
        yield f"codes.latents.{format}", call, "float16"
    names = [tier.name for tier in dispatch.MLA.all]
    for first, tier in enumerate(names):
        yield f"latents.{tier}", in_tiers(latents, *names[first:]), "float16"
    for dtype in ("float16", "bfloat16", "float32"):
        yield f"sampling.{dtype}", sampling, dtype
    yield "speculation", speculation, "float32"


def see_order() -> None:
    """Compile every kernel as :func:`for_racecheck` has it."""
    root = compiler.source_root()
    known = "".join(file.read_text(encoding="utf-8") for file in root.rglob("*.cu*"))
    for pattern in (
        OPENED_INBOX,
        REPLACED,
        NAMED_BARRIER,
        *BY_32,
    ):
        if pattern not in known:
            raise ValueError(
                f"no kernel has the text that racecheck gets in another form: {pattern}"
            )
    text_of = compiler.full_source
    compiler.full_source = lambda variant: for_racecheck(text_of(variant))


def main() -> None:
    """Run all parts, or those that are named on the command line, and name what ran."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the names of all parts")
    parser.add_argument("names", nargs="*", help="parts, or how their names begin; and racecheck")
    arguments = parser.parse_args()
    named = [name for name in arguments.names if name != "racecheck"]
    known = list(parts())
    chosen = [
        part for part in known if not named or any(f"{part[0]}.".startswith(f"{n}.") for n in named)
    ]
    if arguments.list:
        print("\n".join(name for name, *_ in chosen))
        return
    for name in named:
        if not any(f"{part[0]}.".startswith(f"{name}.") for part in known):
            parser.error(f"no part has the name {name}; --list prints them")
    cupy.cuda.set_allocator(None)
    if "racecheck" in arguments.names:
        see_order()
    for name, call, dtype in chosen:
        start = time.perf_counter()
        call(np.random.default_rng(0), np.dtype(getattr(ml_dtypes, dtype, dtype)))
        cupy.cuda.Device().synchronize()
        seconds = time.perf_counter() - start
        print(f"{name}, {compiler.device_arch(0)}: {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
