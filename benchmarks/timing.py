"""Timing several contestants, turn by turn, in one process.

A big kernel heats the chip until its clock falls, and the next one measured pays for it.
Contestants therefore take turns of some milliseconds, round after round, and each is judged by the
median of its turns: what one figure is worth depends on the day, their ratio does not.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


def by_events(run: Callable[[int], Any], launches: int) -> float:
    """Seconds on the device of ``run(launches)``, by CUDA events on the current stream."""
    import cupy

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    run(launches)
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end) * 1e-3


def by_host(run: Callable[[int], Any], launches: int) -> float:
    """Seconds on the host of ``run(launches)`` and of waiting for its last result: for JAX, whose
    streams are its own."""
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    start = time.perf_counter()
    run(launches).block_until_ready()
    return time.perf_counter() - start


def by_issue(run: Callable[[int], Any], launches: int) -> float:
    """Seconds the host takes to issue ``run(launches)``, on an idle device whose queue holds them
    all."""
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    start = time.perf_counter()
    run(launches)
    return time.perf_counter() - start


def by_wall(run: Callable[[int], Any], launches: int) -> float:
    """Seconds of ``run(launches)``, which returns when its work is done: for work on the CPU."""
    start = time.perf_counter()
    run(launches)
    return time.perf_counter() - start


def by_cpu(run: Callable[[int], Any], launches: int) -> float:
    """Seconds of this process's CPU time that ``run(launches)`` takes: for work on one core, which
    other programs use too."""
    start = time.process_time()
    run(launches)
    return time.process_time() - start


@dataclasses.dataclass(frozen=True)
class Contestant:
    """Something that can be timed: `run(n)` launches it n times, asynchronously, and returns the
    last result."""

    name: str
    run: Callable[[int], Any]
    timer: Callable[[Callable[[int], Any], int], float] = by_events

    def launches(self, seconds: float) -> int:
        """How many launches take about `seconds`, once it is warm; never more than a device's queue
        holds."""
        self.timer(self.run, 2)
        return max(1, min(200, round(seconds / (self.timer(self.run, 4) / 4))))


class Clock:
    """A clock for pytest-benchmark: :func:`race` advances it by the time that it measured."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


clock = Clock()


def reason(error: Exception) -> str:
    """Why a contestant is left out, in a line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first[:200]}"


def race(
    benchmark: Any,
    contestants: list[Contestant],
    *,
    rounds: int = 9,
    turn: float = 20e-3,
    judge: Callable[[Sequence[float]], float] = statistics.median_low,
    left_out: dict[str, str] | None = None,
):
    """Time contestants turn by turn; pytest-benchmark's figures become the first one's seconds per
    launch.

    Parameters
    ----------
    benchmark : pytest_benchmark.fixture.BenchmarkFixture
        Of a test marked with ``pytest.mark.benchmark(timer=timing.clock)``.
    contestants : list of Contestant
        The first is the one that is benchmarked.
    rounds : int
        How many turns each takes.
    turn : float
        About how many seconds a turn lasts.
    judge : callable
        What counts of a contestant's turns; `min` where other programs slow some of them down.
    left_out : dict of str to str, optional
        Gets the names of contestants that raise an error, and why. The others go on without them.
        The first one's errors are raised, and without this dictionary all are.

    Returns
    -------
    dict of str to float
        Seconds per launch, by name.
    """
    turns = _Turns(contestants, turn, left_out)

    def one_round() -> None:
        clock.now += turns.take()

    benchmark.pedantic(one_round, rounds=rounds, warmup_rounds=1)
    return turns.judged(judge)


def race_alone(contestants: list[Contestant], *, rounds: int = 9, turn: float = 20e-3):
    """The same without pytest-benchmark: median seconds per launch, by name."""
    turns = _Turns(contestants, turn)
    for _ in range(rounds + 1):
        turns.take()
    return turns.judged()


class _Turns:
    """Rounds in which each contestant has a turn of some `turn` seconds; the first is a warm-up."""

    def __init__(
        self, contestants: list[Contestant], turn: float, left_out: dict[str, str] | None = None
    ) -> None:
        self._first, self._left_out = contestants[0].name, left_out
        self._rounds: list[dict[str, float]] = []
        launches = self._of_each(contestants, lambda c: c.launches(turn))
        self._contestants = [(c, launches[c.name]) for c in contestants if c.name in launches]

    def take(self) -> float:
        """Have one round, and return the first one's seconds per launch. Every second round goes
        backward: who follows whom changes the clock by some per cent."""
        launches = {c.name: n for c, n in self._contestants}
        order = -1 if len(self._rounds) % 2 else 1
        seconds = self._of_each(
            [c for c, _ in self._contestants][::order],
            lambda c: c.timer(c.run, launches[c.name]) / launches[c.name],
        )
        self._contestants = [(c, n) for c, n in self._contestants if c.name in seconds]
        self._rounds.append(seconds)
        return seconds[self._first]

    def judged(
        self, judge: Callable[[Sequence[float]], float] = statistics.median_low
    ) -> dict[str, float]:
        names = [c.name for c, _ in self._contestants]
        return {name: judge([seconds[name] for seconds in self._rounds[1:]]) for name in names}

    def _of_each(
        self, contestants: Sequence[Contestant], of: Callable[[Contestant], Any]
    ) -> dict[str, Any]:
        """``of(contestant)`` by name, without those that are left out."""
        found = {}
        for contestant in contestants:
            try:
                found[contestant.name] = of(contestant)
            except Exception as error:
                if self._left_out is None or contestant.name == self._first:
                    raise
                self._left_out[contestant.name] = reason(error)
        return found


def captured(name: str, calls: list[Callable[[], Any]]) -> Contestant:
    """A contestant whose every launch is a replay of all these calls, in one CUDA graph; the result
    is the last one's."""
    import cupy

    cupy.cuda.Device().synchronize()  # the inputs are there
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        calls[0]()  # compiles
        stream.synchronize()
        stream.begin_capture()
        results = [call() for call in calls]
        graph = stream.end_capture()

    # Kept with it: what the graph reads and writes.
    def run(replays: int, kept: list = calls) -> Any:
        for _ in range(replays):
            graph.launch()
        return results[-1]

    return Contestant(name, run)


def rotate(function: Callable[..., Any], inputs: list[tuple]) -> Callable[[int], Any]:
    """``run(n)`` that calls `function` on each of several sets of inputs in turn, so that no call
    finds its own in L2."""

    def run(launches: int) -> Any:
        for launch in range(launches):
            result = function(*inputs[launch % len(inputs)])
        return result

    return run


def sets_past_l2(nbytes: int) -> int:
    """How many sets of `nbytes` it takes so that a set has left L2 when its turn comes again."""
    import cupy

    l2 = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["l2CacheSize"]
    return 1 + -(-2 * l2 // nbytes)
