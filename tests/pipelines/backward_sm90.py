"""The pipelines of Hopper's backward kernels: the roles of their warps, as their sources have them.

An input is a tile, by its number of blocks of queries; in gradients/backward_queries_sm90.cu, whose
blocks are not persistent, it is a block of keys. Counts and switches come from the source and from
`Config`; the .txt files beside this one show what the roles were written after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cuattn.gpu import dispatch
from cuattn.gpu.compiler import Variant
from tests.pipelines import source
from tests.pipelines.explorer import (
    END,
    Advance,
    Arrive,
    Copy,
    Pipeline,
    Read,
    Role,
    Wait,
    Write,
)

WARPS = 4  # of a warpgroup
KEEPS = {"started": False, "turn": 0}
BLOCK = "block"
WHOLE_TILE = ["full_k", "full_v", "empty_k", "empty_v"]  # barriers of a tile's keys and values


def variants() -> dict[str, Variant]:
    """A variant for every protocol, by name."""
    found = {}
    for variant in dispatch.BACKWARD.variants("sm_90a"):
        if variant.source in MODELS:
            config = variant.config
            alternates = config.head_dim == 64  # type: ignore[attr-defined]
            computes = getattr(config, "computes_dq", False)
            stages = getattr(config, "v_stages", 0)
            keys = config.tile_n  # type: ignore[attr-defined]
            stores = getattr(config, "stores_by_tma", False)
            ordered = getattr(config, "in_order", False)
            name = (
                f"{variant.entry}-{alternates=}-{computes=}-{stores=}-{stages=}-{keys=}-{ordered=}"
            )
            found[name] = variant
    return found


def pipeline(variant: Variant) -> Pipeline:
    """The model of a variant's pipeline."""
    text = source.text(variant.source)
    constants = source.Constants(text, variant.config)
    return MODELS[variant.source](variant.config, constants, source.arrivals(text, constants))


def read(*memories: str) -> Iterator[NamedTuple]:
    yield from map(Read, memories)


def load(full: str, *memories: str, empty: str = "") -> Iterator[NamedTuple]:
    if empty:
        yield Wait(empty, before=True)
    yield Arrive(full, copies=len(memories))
    for memory in memories:
        yield Copy(full, memory)


def once(own: Any) -> bool:
    """Whether this is the first block."""
    first, own.started = not own.started, True
    return first


# ------------------------------------------------------------------------------- keys stationary


def find_tiles(own: Any, blocks: Any) -> Iterator[NamedTuple]:
    if own.started:
        yield Wait("queue.loaded")
        yield Advance("loaded")
    own.started = True
    yield Wait("queue.empty", before=True)
    yield Write("tiles")
    yield Arrive("queue.full")
    yield Advance("queue")


def of_tiles(role: Callable, warps: int, *given: Any, keeps: bool = False) -> Role:
    """A role that gets every tile from the queue, and gives its place back at the end."""

    def whole(own: Any, blocks: Any) -> Iterator[NamedTuple]:
        yield Wait("queue.full")
        yield Read("tiles")
        if blocks == END:
            return
        yield from role(*given, *([own] if keeps else []), blocks)
        yield Read("tiles")
        yield Arrive("queue.empty", warps)
        yield Advance("queue")

    return whole


def load_blocks(keys_last: bool, ahead: int, blocks: int) -> Iterator[NamedTuple]:
    """`ahead`: how many blocks are still to be loaded when the next tile is looked for."""
    for number in range(blocks):
        if number == max(blocks - ahead, 0):
            yield Arrive("queue.loaded")
        if number == 0 and not keys_last:
            yield from load("full_k", "k", empty="empty_k")
        yield from load("full_q", "score_start", "q", empty="empty_q")
        if number == 0 and not keys_last:
            yield from load("full_v", "v", empty="empty_v")
        yield from load("full_o", "dp_start", "dout", empty="empty_o")
        if number == 0 and keys_last:
            yield from load("full_v", "v", empty="empty_v")
            yield from load("full_k", "k", empty="empty_k")
        yield Advance("stage")
    if blocks:
        yield Advance("keys")
    else:
        yield Arrive("queue.loaded")
    yield Advance("loaded")


def of_keys(
    constants: source.Constants, count: dict[str, int], *once: str
) -> tuple[dict, dict, dict]:
    """Rings, barriers and memory of both kernels whose tiles are keys; `once`: the barriers of a
    whole tile."""
    rings = {"stage": constants["kStages"], "keys": 1, "queue": constants["kTiles"], "loaded": 1}
    barriers = {name: ("keys", count[name]) for name in once}
    barriers |= {f"{end}_{x}": ("stage", count[f"{end}_{x}"])
                 for end in ("full", "empty") for x in "qo"}  # fmt: skip
    barriers |= {f"queue.{end}": ("queue", count[f"queue.{end}"]) for end in ("full", "empty")}
    barriers["queue.loaded"] = "loaded", count["queue.loaded"]
    memory = {"k": "keys", "v": "keys", "tiles": "queue"}
    memory |= dict.fromkeys(("q", "dout", "score_start", "dp_start"), "stage")
    return rings, barriers, memory


def fused(config: Any, constants: source.Constants, count: dict[str, int]) -> Pipeline:
    """gradients/backward_sm90.cu and backward_192_sm90.cu."""
    alternate, computes_dq = bool(constants["kAlternate"]), config.computes_dq
    pipelined, one_ring = bool(constants["kPipelined"]), bool(constants["kOneRing"])
    # Stages that a ring needs for dk and dv of a tile.
    results = constants["kStagesOfResults"] * bool(constants["kStoresByTma"])
    consumers, adders = range(constants["kConsumers"]), range(constants["kRings"])

    def takes(consumer: int, number: int) -> bool:
        """Whether a consumer computes dq of a tile's block."""
        return computes_dq and (not alternate or number % len(consumers) == consumer)

    def first_products() -> Iterator[NamedTuple]:
        yield Wait("full_q")
        yield Read("score_start")
        yield Wait("full_o")
        yield Read("dp_start")
        yield from read("k", "q", "v", "dout")

    def store_ds(consumer: int) -> Iterator[NamedTuple]:
        if computes_dq:
            yield Wait("empty_ds", before=True)
            yield Write(f"ds.{consumer}")
            yield Arrive("full_ds", WARPS)
            yield Advance("ds")

    def release_values() -> Iterator[NamedTuple]:
        yield Read("v")
        yield Arrive("empty_v", WARPS)

    def second_products(consumer: int, number: int) -> Iterator[NamedTuple]:
        """Of the block whose dS was stored last."""
        yield from read("q", "dout")
        if takes(consumer, number):
            yield Advance("ds", by=-1)
            yield Wait("full_ds")
            yield from read(*(f"ds.{other}" for other in consumers), "k")
            yield Advance("ds")
        yield from read("q", "dout")  # until wgmma_wait_group<0>
        yield Arrive("empty_q", WARPS)
        yield Arrive("empty_o", WARPS)
        yield Advance("stage")
        if takes(consumer, number):
            yield Advance("ds", by=-1)
            yield Arrive("empty_ds", WARPS)
            yield Advance("ds")

    def send(ring: int) -> Iterator[NamedTuple]:
        yield Wait(f"empty_dq.{ring}", before=True)
        yield Write(f"dq.{ring}")
        yield Arrive(f"full_dq.{ring}", WARPS)

    def send_dq(consumer: int, number: int) -> Iterator[NamedTuple]:
        ring = 0 if one_ring else consumer
        if takes(consumer, number):
            yield from send(ring)
        if one_ring or takes(consumer, number):
            yield Advance(f"dq.{ring}")

    def consume(consumer: int, own: Any, blocks: int) -> Iterator[NamedTuple]:
        is_wide = constants["kDim"] > constants["kDimV"]
        yield from (compute_wide if is_wide else compute)(consumer, own, blocks)
        ring = 0 if one_ring else consumer
        for number in range(results):
            if not one_ring or (own.turn + number) % len(consumers) == consumer:
                yield from send(ring)
            yield Advance(f"dq.{ring}")

    def compute(consumer: int, own: Any, blocks: int) -> Iterator[NamedTuple]:
        if blocks == 0:
            return
        yield Wait("full_k")
        yield Wait("full_v")
        first = own.turn if one_ring else 0  # of all tiles' blocks, or of this tile's
        own.turn = (first + blocks) % len(consumers)
        for number in range(first, first + blocks):
            if pipelined and number > first:
                yield Advance("stage")
                yield from first_products()
                yield Advance("stage", by=-1)
                yield from second_products(consumer, number - 1)
            else:
                yield from first_products()
            if not pipelined and number == first + blocks - 1:
                yield from release_values()
            if config.dropout:
                yield Read("dp_start")
            yield from store_ds(consumer)
            if pipelined and number > first:
                yield from send_dq(consumer, number - 1)
            if not pipelined:
                yield from second_products(consumer, number)
                yield from send_dq(consumer, number)
        if pipelined:
            yield from release_values()
            yield from second_products(consumer, blocks - 1)
            yield from send_dq(consumer, blocks - 1)
        yield Read("k")
        yield Arrive("empty_k", WARPS)
        yield Advance("keys")

    def compute_wide(consumer: int, own: Any, blocks: int) -> Iterator[NamedTuple]:
        """Of backward_192_sm90.cu, where products of two blocks are never in flight together."""
        if blocks == 0:
            return
        yield Wait("full_k")
        yield Wait("full_v")
        for number in range(blocks):
            yield Wait("full_q")
            yield from read("score_start", "k", "q")
            yield Wait("full_o")
            yield from read("dp_start", "v", "dout")
            if number == blocks - 1:
                yield from release_values()
            yield Wait("empty_ds", before=True)
            yield Write(f"ds.{consumer}")
            yield Arrive("full_ds", WARPS)
            yield from read("q", "dout")
            yield Wait("full_ds")
            yield from read("q", "dout")
            yield Arrive("empty_q", WARPS)
            yield Arrive("empty_o", WARPS)
            yield from read(*(f"ds.{other}" for other in consumers), "k")
            yield Arrive("empty_ds", WARPS)
            yield Advance("ds")
            yield from send(consumer)
            yield Advance(f"dq.{consumer}")
            yield Advance("stage")
        yield Read("k")
        yield Arrive("empty_k", WARPS)
        yield Advance("keys")

    def add_dq(ring: int, own: Any, blocks: int) -> Iterator[NamedTuple]:
        for number in range(blocks + results):
            if one_ring or number >= blocks or takes(ring, number):
                yield Wait(f"full_dq.{ring}")
                yield Read(f"dq.{ring}")
                if own.started:  # bulk_wait_group_read<1>
                    yield Advance(f"dq.{ring}", by=-1)
                    yield Read(f"dq.{ring}")
                    yield Arrive(f"empty_dq.{ring}")
                    yield Advance(f"dq.{ring}")
                own.started = True
                yield Advance(f"dq.{ring}")

    def add_at_once(ring: int, own: Any, blocks: int) -> Iterator[NamedTuple]:
        """Where a part's stage is given back before the next part: in order, or of one stage."""
        for _ in range(blocks):
            yield Wait(f"full_dq.{ring}")
            yield Read(f"dq.{ring}")
            yield Arrive(f"empty_dq.{ring}")
            yield Advance(f"dq.{ring}")

    rings, barriers, memory = of_keys(constants, count, *WHOLE_TILE)
    rings["ds"] = constants["kStagesDs"]
    if computes_dq:
        barriers |= {f"{end}_ds": ("ds", count[f"{end}_ds"]) for end in ("full", "empty")}
    loader = of_tiles(load_blocks, 1, True, constants["kBlocksAhead"])
    processes: dict[str, Role] = {"finder": find_tiles, "loader": loader}
    for consumer in consumers:
        memory[f"ds.{consumer}"] = "ds"
        processes[f"consumer {consumer}"] = of_tiles(consume, WARPS, consumer, keeps=True)
    for ring in adders:
        rings[f"dq.{ring}"] = constants["kStagesDq"]
        memory[f"dq.{ring}"] = f"dq.{ring}"
        for end in ("full", "empty"):
            barriers[f"{end}_dq.{ring}"] = f"dq.{ring}", count[f"{end}_dq"]
        if computes_dq:
            add = add_at_once if config.in_order or constants["kStagesDq"] == 1 else add_dq
            processes[f"adder {ring}"] = of_tiles(add, 1, ring, keeps=True)
    return Pipeline(rings, barriers, memory, processes, tuple(range(6)), keeps=KEEPS)


def split(config: Any, constants: source.Constants, count: dict[str, int]) -> Pipeline:
    """gradients/backward_keys_sm90.cu."""

    def consume(role: int, blocks: int) -> Iterator[NamedTuple]:
        stationary, first, start, second = (
            ("k", "q", "score_start", "dout"),
            ("v", "dout", "dp_start", "q"),
        )[role]
        letters = {"q": "q", "dout": "o"}

        def wait_second() -> Iterator[NamedTuple]:
            yield Advance("stage", by=-1)
            yield Wait(f"full_{letters[second]}")
            yield Read(second)
            yield Advance("stage")

        def release_second() -> Iterator[NamedTuple]:
            yield Advance("stage", by=-1)
            yield Read(second)
            yield Arrive(f"empty_{letters[second]}", WARPS)
            yield Advance("stage")

        if blocks == 0:
            return
        yield Wait(f"full_{stationary}")
        for number in range(blocks):
            if number > 0:
                yield from wait_second()
            yield Wait(f"full_{letters[first]}")
            yield Read(start)
            yield from read(stationary, first)
            if number > 0:
                yield from release_second()
            yield from read(stationary, first)
            yield Arrive(f"empty_{letters[first]}", WARPS)
            if role == 0:
                yield Wait("empty_p", before=True)
                yield Write("p")
                yield Arrive("full_p", WARPS)
            else:
                yield Wait("full_p")
                yield Read("p")
                yield Arrive("empty_p", WARPS)
            yield Advance("stage")
        yield Arrive(f"empty_{stationary}", WARPS)
        yield Advance("keys")
        yield from wait_second()
        yield from release_second()

    rings, barriers, memory = of_keys(constants, count, *WHOLE_TILE)
    barriers |= {f"{end}_p": ("stage", count[f"{end}_p"]) for end in ("full", "empty")}
    memory["p"] = "stage"
    loader = of_tiles(load_blocks, 1, False, constants["kBlocksAhead"])
    processes: dict[str, Role] = {"finder": find_tiles, "loader": loader}
    for role in range(2):
        processes[f"consumer {role}"] = of_tiles(consume, WARPS, role)
    return Pipeline(rings, barriers, memory, processes, tuple(range(6)), keeps=KEEPS)


# ---------------------------------------------------------------------------- queries stationary


def of_queries(config: Any, constants: source.Constants, count: dict[str, int]) -> Pipeline:
    """gradients/backward_queries_sm90.cu."""
    consumers = range(constants["kConsumers"])

    def load_keys(own: Any, block: str) -> Iterator[NamedTuple]:
        if block == END:
            return
        first = once(own)
        if first:
            yield from load("full_o", "dout")
        yield from load("full_v", "v", empty="empty_v")
        yield Advance("v")
        if first:
            yield from load("full_q", "q")
        yield from load("full_k", "k", empty="empty_k")
        yield Advance("k")

    def consume(own: Any, block: str) -> Iterator[NamedTuple]:
        before = own.started
        if block == END:
            if before:
                yield Advance("k", by=-1)
                yield Read("k")
            return
        if once(own):
            yield Wait("full_q")
            yield Wait("full_o")
        yield Wait("full_v")
        yield Wait("full_k")
        yield from read("dout", "v", "q", "k")
        if before:
            yield Advance("k", by=-1)
            yield Read("k")
            yield Advance("k")
        yield Arrive("empty_v", WARPS)
        yield Advance("v")
        yield Read("k")
        if before:
            yield Advance("k", by=-1)
            yield Read("k")
            yield Arrive("empty_k", WARPS)
            yield Advance("k")
        yield Advance("k")

    rings = {"k": constants["kStages"], "v": constants["kStagesV"], "once": 1}
    barriers = {f"full_{x}": ("once", 1) for x in "qo"}
    barriers |= {f"{end}_{x}": (x, count[f"{end}_{x}"])
                 for end in ("full", "empty") for x in "kv"}  # fmt: skip
    memory = {"k": "k", "v": "v", "q": "once", "dout": "once"}
    processes: dict[str, Role] = {"loader": load_keys}
    for consumer in consumers:
        processes[f"consumer {consumer}"] = consume
    return Pipeline(rings, barriers, memory, processes, (BLOCK,), keeps={"started": False})


MODELS: dict[str, Callable[[Any, source.Constants, dict[str, int]], Pipeline]] = {
    "gradients/backward_sm90.cu": fused,
    "gradients/backward_192_sm90.cu": fused,
    "gradients/backward_keys_sm90.cu": split,
    "gradients/backward_queries_sm90.cu": of_queries,
}
