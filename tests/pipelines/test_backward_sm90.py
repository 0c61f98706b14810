"""No sequence of tiles stops one of Hopper's backward kernels, or has it take one tile's data for
another's: see explorer.py for what a run checks, for all schedules at once."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.pipelines import explorer, source
from tests.pipelines.backward_sm90 import BLOCK, pipeline, variants

VARIANTS = variants()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_sequence_ends(name):
    """Of blocks that are all alike, of any number; or of tiles, with all that can lie between two
    uses of a stage."""
    model = pipeline(VARIANTS[name])
    if model.inputs == (BLOCK,):
        for blocks in range(13):
            explorer.run(model, [BLOCK] * blocks)
    else:
        explorer.run(model, explorer.windows(model, 3))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "missing",
    ["empty_q", "empty_o", "empty_ds", "empty_p", "empty_k", "empty_v", "queue.empty"],
)
def test_a_missing_arrival_stops_a_block(name, missing):
    model = pipeline(VARIANTS[name])
    if missing not in model.barriers:
        return
    ring, count = model.barriers[missing]
    model = dataclasses.replace(model, barriers=model.barriers | {missing: (ring, count + 1)})
    with pytest.raises(explorer.Fault):
        explorer.run(model, list(model.inputs) * 6)


@pytest.mark.parametrize("name", VARIANTS)
def test_warpgroups_do_not_wait_for_registers(name):
    """setmaxnreg gives a warpgroup what others have given back of the registers of the launch, a
    multiple of 8 a thread, and waits where there are fewer."""
    variant = VARIANTS[name]
    text = source.text(variant.source)
    constants = source.Constants(text, variant.config)
    found = re.findall(r"setmaxnreg_(\w+)<([^>]+)>", text)
    (given,) = {constants.value(n) for way, n in found if way == "dec"}
    (taken,) = {constants.value(n) for way, n in found if way == "inc"}
    threads = variant.config.threads
    launched = 65536 // threads // 8 * 8
    assert given + (threads // 128 - 1) * taken <= threads // 128 * launched
