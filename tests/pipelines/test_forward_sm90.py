"""No sequence of tiles stops attention/forward_sm90.cu, or has it take one tile's data for
another's: see explorer.py for what is explored, and why that is all."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cuattn._spec import attention_spec
from cuattn.gpu import dispatch
from cuattn.gpu.dispatch.order_sm90 import blocks_of_keys, sm90_section
from tests.pipelines import explorer, forward_sm90
from tests.pipelines.forward_sm90 import Tile, pipeline, protocols

PROTOCOLS = protocols()
#: Of variants where one warp loads keys and values.
NAMES_OF_ONE_LOADER = [n for n, p in PROTOCOLS.items() if not (p.value_warps or p.expand_warps)]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_sequence_of_tiles_ends(name):
    explorer.explore(pipeline(PROTOCOLS[name]))


@pytest.mark.parametrize("name", PROTOCOLS)
def test_stages_are_not_taken_for_each_other(name, rng):
    """All that can lie between two uses of a stage: a queue of tiles with and without keys, and any
    two of up to ten kinds of tiles, which are other ones in each run where there are more."""
    model = pipeline(PROTOCOLS[name])
    two = dataclasses.replace(model, inputs=(model.inputs[0], model.inputs[-1]))
    explorer.run(two, explorer.windows(two, PROTOCOLS[name].queue + 1))
    some = [model.inputs[n] for n in rng.permutation(len(model.inputs))[:10]]
    ten = dataclasses.replace(model, inputs=tuple(some))
    explorer.run(ten, explorer.windows(ten, 2))


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("number", [0, 1])
def test_warps_of_a_consumer_need_not_keep_in_step(consumers, number):
    """A consumer that is alone takes no turns, which would keep its warps together."""
    name = [n for n, p in PROTOCOLS.items() if p.consumers == consumers][number]
    model = pipeline(PROTOCOLS[name], warps=1)
    few = dataclasses.replace(model, inputs=model.inputs[:3])
    explorer.explore(few)


def test_what_is_known_is_counted_into_the_states():
    name = next(name for name, p in PROTOCOLS.items() if p.value_warps)
    assert explorer.explore(pipeline(PROTOCOLS[name]), exact=True) > explorer.explore(
        pipeline(PROTOCOLS[name])
    )


@pytest.mark.parametrize("name", NAMES_OF_ONE_LOADER)
def test_values_that_wait_for_a_tile_with_keys_stop_a_block(name):
    """The deadlock of commit e77b6e5: with filter warps, after a tile with keys and four without,
    which fill the queue, it cannot even end."""
    p = PROTOCOLS[name]
    model = pipeline(p, loader=forward_sm90.load_keys_and_values_of_e77b6e5)
    if not p.filter_warps:
        explorer.explore(model)
        return
    with pytest.raises(explorer.Fault, match="deadlock") as found:
        explorer.explore(model)
    lines = str(found.value).splitlines()
    assert lines[0] == "deadlock"
    assert lines[1] == "inputs: [1 blocks]" + ", [0 blocks]" * p.queue + ", end"
    waits = {line.partition(":")[0]: line for line in lines[2:]}
    assert f"waits for queue.empty[{1 % p.queue}]" in waits["finder"]
    assert "waits for full_v[0], use 0, which has 0 of 1 arrivals" in waits["filter warp 0"]
    assert f"at input {p.queue + 1}, waits for queue.full" in waits["loader"]


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize(
    ("name", "barrier"),
    [
        (name, barrier)
        for name in (
            "2consumers-2q_stages-2filter_warps-elementwise",
            "2consumers-1q_stages-1value_warps",
            "2consumers-1q_stages-2filter_warps-skips_blocks",
            *(name for name, p in PROTOCOLS.items() if p.expand_warps),
        )
        for barrier, count in PROTOCOLS[name].arrivals
        if count and ("rows" not in barrier or "elementwise" in name)
        if "codes" not in barrier or PROTOCOLS[name].code_stages
        if "of_warp" not in barrier or PROTOCOLS[name].shares_codes
        if "rotated" not in barrier or PROTOCOLS[name].rotates_queries
    ],
)
def test_a_count_that_changes_alone_is_found(name, barrier, change):
    p = PROTOCOLS[name]
    arrivals = tuple((at, n + change * (at == barrier)) for at, n in p.arrivals)
    with pytest.raises(explorer.Fault):
        explorer.explore(pipeline(dataclasses.replace(p, arrivals=arrivals)))


@pytest.mark.parametrize("number", [224, 288])
def test_a_count_of_a_turn_that_changes_alone_is_found(number):
    p = next(p for p in PROTOCOLS.values() if p.consumers > 1)
    p = dataclasses.replace(p, turn_threads=number)
    with pytest.raises(explorer.Fault):
        explorer.explore(pipeline(p))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_queue_may_have_any_length(size):
    for p in (
        next(p for p in PROTOCOLS.values() if p.filter_warps),
        *list(PROTOCOLS.values())[-1:],
    ):
        explorer.explore(pipeline(dataclasses.replace(p, queue=size)))


def changed(model, process, function):
    """The model with other operations of a process."""
    role = model.processes[process]

    def other(own, tile):
        return function(list(role(own, tile)))

    return dataclasses.replace(model, processes={**model.processes, process: other})


@pytest.mark.parametrize("barrier", ["empty_k", "empty_v", "queue.empty"])
def test_what_is_released_before_it_is_read_is_found(barrier):
    """A consumer that arrives for a stage as soon as it has waited for it."""
    p = PROTOCOLS["3consumers-2q_stages-2filter_warps-releases_late-takes_late"]
    full = {"empty_k": "full_k", "empty_v": "filtered_v", "queue.empty": "queue.full"}[barrier]

    def early(operations):
        arrivals = [op for op in operations if op[0] == barrier]
        moved = [op for op in operations if op[0] != barrier]
        for at in reversed([n for n, op in enumerate(moved) if op[0] == full]):
            if arrivals:
                moved.insert(at + 1, arrivals.pop())
        return moved

    model = changed(pipeline(p), "consumer 1", early)
    with pytest.raises(explorer.Fault, match="again before consumer 1 has read it"):
        explorer.run(model, [*model.inputs, *model.inputs[:1] * 6])


def test_flags_that_are_not_double_buffered_are_found():
    """`replaced` of a tile, which consumers read while filter warps are at the next."""
    model = pipeline(PROTOCOLS["2consumers-2q_stages-2filter_warps-releases_late-takes_late"])
    model = dataclasses.replace(model, rings={**model.rings, "number": 1})
    with pytest.raises(explorer.Fault, match="replaced"):
        explorer.explore(model)


def test_a_tile_says_what_it_is():
    assert str(Tile(2, (False, True))) == "[2 blocks, skipped by 1]"


BLOCKS = 132  # of a grid


def tiles_of_block(spec, config, block):
    """The tiles that a thread block works on in a call of fixed lengths, as its scheduler deals
    them out: heads in sections, the last rows first, forward and backward in turn."""
    counts = blocks_of_keys(spec, config).tolist()
    heads, section = spec.batch * spec.heads_q, sm90_section(spec, config, BLOCKS)
    even, section = section == 0, section or heads
    for number, first in enumerate(range(0, heads, section)):
        size = min(section, heads - first)
        order = [(m, h) for m in reversed(range(len(counts))) for h in range(size)]
        if even:
            order = [(m, h) for h in range(size) for m in range(len(counts))]
        for turn in range(-(-len(order) // BLOCKS)):
            backward = not even and (turn + number) % 2
            item = turn * BLOCKS + (BLOCKS - 1 - block if backward else block)
            if item < len(order):
                yield counts[order[item][0]]


def call(seqlen_q, seqlen_k, heads, **options):
    """A call's spec, and the Config of the kernel that serves it."""
    shapes = [(1, n, heads, 128) for n in (seqlen_q, seqlen_k, seqlen_k)]
    dtype = np.dtype(np.float16)
    spec = attention_spec("flash_attention", *shapes, *[dtype] * 3, **options)
    launch = dispatch.sm90.Sm90Forward().serves(dispatch.Call.contiguous(spec, "sm_90a"))
    return spec, launch.variant.config


def model_of_block(spec, config, block, **options):
    """A thread block's model, and its tiles: of more than three blocks of keys three stand for all,
    and no consumer skips one."""
    p = forward_sm90.protocol(config)
    tiles = [Tile(min(n, 3), (False,) * p.consumers) for n in tiles_of_block(spec, config, block)]
    return pipeline(p, **options), tiles


def test_the_call_that_hung():
    """20000 queries and 16 keys: every block that meets keys stopped."""
    spec, config = call(20000, 16, 12, causal=True)
    stopped = []
    for block in range(BLOCKS):
        model, tiles = model_of_block(spec, config, block)
        explorer.run(model, tiles)
        old = forward_sm90.load_keys_and_values_of_e77b6e5
        model, _ = model_of_block(spec, config, block, loader=old)
        try:
            explorer.run(model, tiles)
        except explorer.Fault:
            stopped.append(block)
        assert (block in stopped) == any(tile.blocks for tile in tiles)
    assert stopped


@pytest.mark.parametrize("option", [{}, {"causal": True}, {"window": (3, 2)}])
@pytest.mark.parametrize("shape", ["many queries", "many keys", "many heads"])
def test_degenerate_calls_end(shape, option, rng):
    lengths = {"many queries": (20000, 1), "many keys": (1, 20000), "many heads": (1, 1)}[shape]
    heads = 500 if shape == "many heads" else 8
    lengths = [int(n * rng.uniform(1, 3)) for n in lengths]
    spec, config = call(*lengths, heads, **option)
    for block in (0, int(rng.integers(BLOCKS)), BLOCKS - 1):
        explorer.run(*model_of_block(spec, config, block))
