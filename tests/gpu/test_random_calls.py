"""Calls of every function with random arguments, judged by what they mean: the cross product of
options, which tests of each option by itself do not cover.

A test draws a few calls. Many more are drawn by

    python -m tests.gpu.test_random_calls --seconds 120 --seed 1 flash_decode mla_decode

which goes on after a failure, and prints a line that says how to draw the call again. A fault that
leaves the device unusable ends the program with the code 3.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import zlib

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from tests.gpu import random_families, random_hard_rows, random_others  # noqa: E402
from tests.gpu.conftest import poison_results  # noqa: E402
from tests.gpu.random_calls import check, poison_scratch  # noqa: E402

pytestmark = pytest.mark.gpu

FAMILIES = random_families.FAMILIES | random_others.FAMILIES | random_hard_rows.FAMILIES
CALLS_OF_A_KIND = 6
MOST_SCORES = 200_000  # that a call computes: its formula does so on the host
DEVICE_LOST = 3


@pytest.fixture(autouse=True)
def poisoned_scratch(monkeypatch):
    poison_scratch(monkeypatch)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_calls(rng, request, family, number):
    emulated = request.config.getoption("emulate")
    kind = int(rng.integers(2**62))
    for _ in range(1 if emulated else CALLS_OF_A_KIND):
        draw(family, np.random.default_rng(kind), rng, 3000 if emulated else MOST_SCORES)


def draw(family: str, kind: np.random.Generator, rng: np.random.Generator, most: int) -> None:
    drawn = FAMILIES[family](kind, rng, most)
    if drawn is None:  # it has judged itself
        return
    try:
        check(drawn, rng)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{drawn}") from error


# ---------------------------------------------------------------------------------------- many more


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="function", help=", ".join(FAMILIES))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--calls", type=int, help="how many of each function, whatever the time")
    parser.add_argument("--most", type=int, default=MOST_SCORES, help="scores that a call computes")
    parser.add_argument("--trace", help="a file that names each call before it is made")
    parser.add_argument("--verbose", action="store_true", help="the whole of each failure")
    options = parser.parse_args()
    families = options.families or list(FAMILIES)
    with pytest.MonkeyPatch.context() as monkeypatch:
        poison_results(monkeypatch)
        poison_scratch(monkeypatch)
        return many(options, families)


def many(options: argparse.Namespace, families: list[str]) -> int:
    end = time.monotonic() + options.seconds
    failures, number = 0, options.first
    trace = open(options.trace, "w") if options.trace else None  # noqa: SIM115
    while number - options.first < options.calls if options.calls else time.monotonic() < end:
        for family in families:
            name = zlib.crc32(family.encode())
            kind = np.random.default_rng([options.seed, name, number // CALLS_OF_A_KIND])
            rng = np.random.default_rng([options.seed, name, number, 1])
            if trace is not None:
                print(f"{family} --seed {options.seed} --first {number}", file=trace, flush=True)
            try:
                draw(family, kind, rng, options.most)
                cupy.cuda.Device().synchronize()
            except Exception as error:
                failures += 1
                print(
                    line_of(error, f"{family} --seed {options.seed} --first {number}"), flush=True
                )
                if options.verbose:
                    traceback.print_exc()
                if not device_works():
                    print(f"device lost at {number}", flush=True)
                    return DEVICE_LOST
        number += 1
    print(f"{number - options.first} calls each of {', '.join(families)}: {failures} failures")
    return min(failures, 1)


def line_of(error: Exception, repeated_by: str) -> str:
    """A failure, the place in the code it comes from, and the call, in one line."""
    places = traceback.extract_tb(error.__traceback__)
    place = f"{places[-1].filename.rsplit('/', 1)[-1]}:{places[-1].lineno}"
    message, _, call = str(error).strip().rpartition("\n")
    message = " ".join((message or call).split())[:300]
    return (
        f"FAILED {repeated_by} --calls 1 | {type(error).__name__} {place}: {message} | {call[:900]}"
    )


def device_works() -> bool:
    try:
        cupy.cuda.Device().synchronize()
        cupy.zeros(1, np.float32).get()
    except cupy.cuda.runtime.CUDARuntimeError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
