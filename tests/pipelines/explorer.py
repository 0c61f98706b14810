"""Runs a model of a pipeline through all inputs, and finds deadlocks and races.

A pipeline is a set of processes (warps) that wait for and arrive at barriers, copy asynchronously,
and read and write shared memory. One of them, the first, takes inputs (tiles of work) one after the
other, and the others get the same inputs in the same order through a queue, which is part of the
model. Between two inputs a process runs a list of operations that depends on nothing but the input
and what the process has kept from earlier ones.

Why one schedule for each sequence of inputs is enough
------------------------------------------------------
No process chooses: its operations follow from the inputs alone. If, besides, every arrival counts
for the same phase of its barrier whatever the schedule is, the pipeline is a marked graph (a Kahn
network): an operation that can run stays able to run until it does, and any two maximal runs over
the same inputs consist of the same operations in the same causal order. So either all schedules
end or none does, and running whatever can run finds out which.

The premise is not taken on trust. Every process, barrier and copy carries the set of events that
have happened before it in every schedule, and each run checks by these sets, for all schedules at
once, that

- an arrival comes after the end of the phase before the one it counts for,
- a wait names a phase by its parity alone, and no schedule can take another phase for it: the wait
  comes after the end of the phase before, and the phase after cannot end before the wait is over,
- a barrier gets exactly as many arrivals as it was initialised with,
- what is written into shared memory is written after all that was there has been read, and read
  after it was written (where copies are asynchronous: after the barrier that counts them),
- every copy has been waited for when the last process ends.

Why all sequences of inputs are covered, of any length
------------------------------------------------------
After an input everything runs until nothing can run any more. What is done from there on depends on
what the processes keep, where they are in each ring relative to each other, and the phases of the
barriers. `explore` looks at each such state once, with every possible input. There are few: the
search ends by itself, at a set of states that no longer sequence of inputs leaves.

The checks of events depend on who knows of which events, too, so on what came before a state. Each
of them is about two uses of one stage that follow each other, and what orders the two lies between
them: `windows` gives a sequence with all that can lie there. And ``explore(exact=True)`` counts
what is known into the states, which takes minutes where inputs are many.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

END = "end"  # the last input


# ------------------------------------------------------------------------------ operations
# Barriers and shared memory are arrays over the stages of a ring; an operation is about the stage
# that the process has reached in it.


class Wait(NamedTuple):
    """Wait for the phase of the process's current use of the stage, or of the use before that: what
    the kernels write as ``mbarrier_wait(b[ring.index], ring.parity)``, or ``... ^ 1``."""

    barrier: str
    before: bool = False


class Arrive(NamedTuple):
    """Arrive `times` times, and announce so many copies: ``arrive.expect_tx``."""

    barrier: str
    times: int = 1
    copies: int = 0


class Sync(NamedTuple):
    """Arrive `times` times at a named barrier and wait for it: ``bar.sync``."""

    barrier: str
    times: int = 1


class Copy(NamedTuple):
    """Start a copy into memory that counts for the current phase of the barrier, which cannot end
    before all copies that were announced to it have."""

    barrier: str
    memory: str


class Read(NamedTuple):
    """Read shared memory."""

    memory: str


class Write(NamedTuple):
    """Write shared memory."""

    memory: str


class Advance(NamedTuple):
    """Go on to another use of a ring, the next one if not said otherwise."""

    ring: str
    by: int = 1


class _Await(NamedTuple):
    """The second half of `Sync`."""

    barrier: str
    phase: int


# ------------------------------------------------------------------------------- pipelines

#: What a process does about an input: it may keep things in the namespace from one to the next.
Role = Callable[[types.SimpleNamespace, Any], Iterable[NamedTuple]]


@dataclasses.dataclass
class Pipeline:
    """What `explore` runs.

    Parameters
    ----------
    rings
        The number of stages of each ring.
    barriers
        The ring and the number of arrivals of each barrier. Named barriers have a ring of one stage
        on which nobody advances, and `Sync` in place of `Wait`.
    memory
        The ring of each piece of shared memory.
    processes
        Each one's role. The first takes the inputs.
    inputs
        Every input but `END`.
    again
        Memory that is written several times while it may be read, as a flag is: readers need one
        of the writes of their own use of the stage, and only those of other uses have to be over.
    keeps
        What every process keeps at the start.
    """

    rings: Mapping[str, int]
    barriers: Mapping[str, tuple[str, int]]
    memory: Mapping[str, str]
    processes: Mapping[str, Role]
    inputs: tuple[Hashable, ...]
    again: frozenset[str] = frozenset()
    keeps: Mapping[str, Hashable] = dataclasses.field(default_factory=dict)


class Fault(AssertionError):
    """A pipeline that can stop, or take one thing for another: how it comes to that."""


class _Broken(Exception):
    """A rule that does not hold, before it is known which inputs led there."""


class _Process:
    def __init__(self, keeps: Mapping[str, Hashable]) -> None:
        self.own = types.SimpleNamespace(**keeps)
        self.knows = 0
        self.operations: list[NamedTuple] = []
        self.done = 0  # of the operations
        self.inputs = 0  # that it has begun
        self.use: dict[str, int] = {}  # of each ring

    def __copy__(self) -> _Process:
        other = _Process(vars(self.own))
        other.knows, other.operations, other.done = self.knows, self.operations.copy(), self.done
        other.inputs, other.use = self.inputs, self.use.copy()
        return other


@dataclasses.dataclass
class _Barrier:
    phase: int = 0  # how many have ended
    arrived: int = 0
    copies: int = 0  # that were announced and have not ended, or have ended less those announced
    knows: int = 0  # what those know who have arrived
    ended: int = 0  # what those knew who arrived in the last phase
    ends: tuple[int, int] = (0, 0)  # the events of the last two ends
    waits: tuple[tuple[int, int, int], ...] = ()  # that are over: (phase, process, event)


@dataclasses.dataclass
class _Memory:
    writes: tuple[tuple[int, int], ...] = ()  # (use, event): of this use
    reads: tuple[tuple[int, int, int], ...] = ()  # (process, use, event): each one's last


class _State:
    """A pipeline under way. An event is a bit, and what somebody knows a set of bits: what has
    happened before, whatever the schedule."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.names = list(pipeline.processes)
        self.processes = [_Process(pipeline.keeps) for _ in self.names]
        self.barriers = {
            (name, stage): _Barrier()
            for name, (ring, _) in pipeline.barriers.items()
            for stage in range(pipeline.rings[ring])
        }
        self.memory = {
            (name, stage): _Memory()
            for name, ring in pipeline.memory.items()
            for stage in range(pipeline.rings[ring])
        }
        self.events = 0
        self.inputs: tuple[Any, ...] = ()
        self.log: list[tuple[str, NamedTuple]] | None = None

    def fork(self) -> _State:
        other = copy.copy(self)
        other.processes = [copy.copy(process) for process in self.processes]
        other.barriers = {at: copy.copy(barrier) for at, barrier in self.barriers.items()}
        other.memory = {at: copy.copy(memory) for at, memory in self.memory.items()}
        return other

    def _event(self) -> int:
        self.events += 1
        return 1 << self.events

    # ------------------------------------------------------------------------------- running

    def give(self, value: Any) -> None:
        """Run until nothing can run any more."""
        self.inputs += (value,)
        moved = True
        while moved:
            moved = False
            for number, process in enumerate(self.processes):
                while self._step(number, process):
                    moved = True
        waiting = self.processes if value == END else self.processes[:1]
        if any(p.done < len(p.operations) or p.inputs < len(self.inputs) for p in waiting):
            raise _Broken("deadlock")
        if value == END:
            for (name, stage), memory in self.memory.items():
                for _, event in memory.writes:
                    if not any(process.knows & event for process in self.processes):
                        raise _Broken(f"a copy to {_at(name, stage)} may be under way at the end")

    def _step(self, number: int, process: _Process) -> bool:
        if process.done == len(process.operations):
            if process.inputs == len(self.inputs):
                return False
            role = self.pipeline.processes[self.names[number]]
            process.operations = list(role(process.own, self.inputs[process.inputs]))
            process.done = 0
            process.inputs += 1
            return True
        operation = process.operations[process.done]
        if not self._run(number, process, operation):
            return False
        process.done += 1
        if self.log is not None:
            self.log.append((self.names[number], operation))
        return True

    def _place(self, process: _Process, ring: str) -> tuple[int, int, int]:
        use, size = process.use.get(ring, 0), self.pipeline.rings[ring]
        return use, use % size, use // size

    def _run(self, number: int, process: _Process, operation: NamedTuple) -> bool:
        match operation:
            case Advance(ring, by):
                process.use[ring] = process.use.get(ring, 0) + by
            case Wait(name, before):
                _, stage, phase = self._place(process, self.pipeline.barriers[name][0])
                return self._wait(number, name, stage, phase - before)
            case Arrive(name, times, copies):
                stage = self._place(process, self.pipeline.barriers[name][0])[1]
                self._arrive(number, name, stage, times, copies)
            case Sync(name, times):
                # In two steps: the arrival, then the wait for the phase it counted for.
                awaited = _Await(name, self.barriers[name, 0].phase)
                process.operations[process.done] = awaited
                process.operations.insert(process.done, Arrive(name, times))
                self._arrive(number, name, 0, times, 0)
            case _Await(name, phase):
                return self._wait(number, name, 0, phase)
            case Copy(name, memory):
                stage = self._place(process, self.pipeline.barriers[name][0])[1]
                barrier = self.barriers[name, stage]
                barrier.knows |= process.knows | self._write(number, memory)
                barrier.copies -= 1
                self._end_phase(name, stage)
            case Read(memory):
                self._read(number, memory)
            case Write(memory):
                process.knows |= self._write(number, memory)
        return True

    def _wait(self, number: int, name: str, stage: int, phase: int) -> bool:
        barrier, process = self.barriers[name, stage], self.processes[number]
        if barrier.phase <= phase:
            return False
        what = f"{self.names[number]} waits for the end of phase {phase} of {_at(name, stage)}"
        if barrier.phase > phase + 1:
            raise _Broken(f"{what}, which the end of the next phase may hide")
        if barrier.ends[0] & ~process.knows:
            raise _Broken(f"{what}, before it knows of the end of phase {phase - 1}")
        if phase >= 0:
            process.knows |= barrier.ended
        event = self._event()
        process.knows |= event
        barrier.waits += ((phase, number, event),)
        return True

    def _arrive(self, number: int, name: str, stage: int, times: int, copies: int) -> None:
        barrier, process = self.barriers[name, stage], self.processes[number]
        count = self.pipeline.barriers[name][1]
        if barrier.ends[1] & ~process.knows:
            raise _Broken(
                f"{self.names[number]} may arrive at {_at(name, stage)} before the end of phase "
                f"{barrier.phase - 1}, and count for that"
            )
        barrier.arrived += times
        barrier.copies += copies
        barrier.knows |= process.knows
        if barrier.arrived > count:
            raise _Broken(f"{_at(name, stage)} gets {barrier.arrived} arrivals, of {count}")
        self._end_phase(name, stage)

    def _end_phase(self, name: str, stage: int) -> None:
        """If all have arrived that are to."""
        barrier, count = self.barriers[name, stage], self.pipeline.barriers[name][1]
        if barrier.arrived < count or barrier.copies:
            return
        for phase, waiter, event in barrier.waits:
            if phase == barrier.phase - 1 and event & ~barrier.knows:
                raise _Broken(
                    f"phase {barrier.phase} of {_at(name, stage)} may end before "
                    f"{self.names[waiter]} has seen the end of phase {phase}"
                )
        end = self._event()
        barrier.waits = tuple(wait for wait in barrier.waits if wait[0] >= barrier.phase)
        barrier.ends = barrier.ends[1], end
        barrier.ended, barrier.knows = barrier.knows | end, 0
        barrier.arrived = 0
        barrier.phase += 1

    def _read(self, number: int, name: str) -> None:
        process = self.processes[number]
        use, stage, _ = self._place(process, self.pipeline.memory[name])
        memory = self.memory[name, stage]
        known = [w for w in memory.writes if w[0] == use and w[1] & process.knows]
        if not known or (name not in self.pipeline.again and len(known) < len(memory.writes)):
            raise _Broken(f"{self.names[number]} may read {_at(name, stage)} before it is written")
        event = self._event()
        process.knows |= event
        others = tuple(read for read in memory.reads if read[0] != number)
        memory.reads = (*others, (number, use, event))

    def _write(self, number: int, name: str) -> int:
        """By a process, or by a copy that it starts; the event."""
        process = self.processes[number]
        use, stage, _ = self._place(process, self.pipeline.memory[name])
        memory = self.memory[name, stage]
        again = name in self.pipeline.again
        what = f"{self.names[number]} may write {_at(name, stage)} again before"
        for reader, its_use, event in memory.reads:
            if event & ~process.knows and not (again and its_use == use):
                raise _Broken(f"{what} {self.names[reader]} has read it")
        if any(event & ~process.knows for _, event in memory.writes):
            raise _Broken(f"{what} the write before is over")
        event = self._event()
        memory.reads = tuple(read for read in memory.reads if again and read[1] == use)
        first = tuple(write for write in memory.writes if again and write[0] == use)[:1]
        memory.writes = (*first, (use, event))
        return event

    # ------------------------------------------------------------------------------- states

    def key(self, exact: bool) -> Hashable:
        """What the operations of the rest of all runs depend on; if `exact`, what their checks by
        events depend on, too.

        Uses of a ring count from the earliest that a process has reached; of what somebody knows
        only those events matter that may still be asked for, and that not every process knows.
        """
        rings = self.pipeline.rings
        uses: dict[str, list[int]] = {ring: [] for ring in rings}
        for process in self.processes:
            for ring, use in process.use.items():
                uses[ring].append(use)
        first = {ring: min(found, default=0) for ring, found in uses.items()}
        begun = min(process.inputs for process in self.processes)
        parts: list[Hashable] = [self.inputs[begun:]]
        for process in self.processes:
            place = tuple(sorted((ring, use - first[ring]) for ring, use in process.use.items()))
            own = tuple(sorted(vars(process.own).items()))
            rest = tuple(process.operations[process.done :])
            parts.append((len(self.inputs) - process.inputs, rest, own, place))
        for name, (ring, _) in self.pipeline.barriers.items():
            size = rings[ring]
            for stage in range(first[ring], first[ring] + size):
                barrier = self.barriers[name, stage % size]
                use = barrier.phase * size + stage % size - first[ring]
                parts.append((use if uses[ring] else 0, barrier.arrived, barrier.copies))
        if not exact:
            return tuple(parts)

        everybody = functools.reduce(int.__and__, (p.knows for p in self.processes))
        asked: list[tuple[Hashable, int]] = []
        knowing = [process.knows for process in self.processes]
        for name, (ring, _) in self.pipeline.barriers.items():
            for stage in range(rings[ring]):
                barrier = self.barriers[name, (first[ring] + stage) % rings[ring]]
                at = name, stage
                knowing += [barrier.knows, 0 if barrier.ends[1] & everybody else barrier.ended]
                asked += [((*at, "end", n), event) for n, event in enumerate(barrier.ends)]
                asked += [
                    ((*at, phase - barrier.phase, number), event)
                    for phase, number, event in barrier.waits
                ]
        for name, ring in self.pipeline.memory.items():
            for stage in range(rings[ring]):
                memory = self.memory[name, (first[ring] + stage) % rings[ring]]
                at = name, stage
                asked += [
                    ((*at, "write", n, use - first[ring]), event)
                    for n, (use, event) in enumerate(memory.writes)
                ]
                asked += [((*at, n, use - first[ring]), event) for n, use, event in memory.reads]
        parts.append(
            frozenset(
                (name, tuple(bool(known & event) for known in knowing))
                for name, event in asked
                if event & ~everybody
            )
        )
        return tuple(parts)

    def describe(self) -> Iterator[str]:
        """Who waits for what."""
        for name, process in zip(self.names, self.processes, strict=True):
            doing = f"input {process.inputs - 1}" if process.inputs else "the start"
            if process.done == len(process.operations):
                ended = process.inputs and self.inputs[process.inputs - 1] == END
                yield f"{name}: {'has ended' if ended else f'is done with {doing}'}"
                continue
            match process.operations[process.done]:
                case Wait(barrier, before):
                    ring, count = self.pipeline.barriers[barrier]
                    use, stage, _ = self._place(process, ring)
                    use -= self.pipeline.rings[ring] * before
                case _Await(barrier, phase):
                    count, stage, use = self.pipeline.barriers[barrier][1], 0, phase
                case operation:
                    yield f"{name}: at {doing}, {_written(operation)}"
                    continue
            state = self.barriers[barrier, stage]
            copies = f" and lacks {state.copies} copies" if state.copies else ""
            yield (
                f"{name}: at {doing}, waits for {_at(barrier, stage)}, use {use}, "
                f"which has {state.arrived} of {count} arrivals{copies}"
            )


def _at(name: str, stage: int) -> str:
    return f"{name}[{stage}]"


def explore(pipeline: Pipeline, exact: bool = False, most: int = 20_000) -> int:
    """Run a pipeline through all sequences of inputs; the number of its states between two.

    Raises
    ------
    Fault
        A schedule of some sequence stops or breaks a rule of the module's docstring. The message
        has a shortest such sequence, who waits for what, and what everybody did last.
    """
    start = _State(pipeline)
    known = {start.key(exact)}
    frontier = [start]
    while frontier:
        reached = []
        for state in frontier:
            for value in (END, *pipeline.inputs):
                following = state.fork()
                try:
                    following.give(value)
                except _Broken as broken:
                    raise Fault(report(pipeline, following.inputs, str(broken))) from None
                if value == END:
                    continue
                key = following.key(exact)
                if key not in known:
                    known.add(key)
                    reached.append(following)
                    if len(known) > most:
                        raise Fault(f"more than {most} states, as after {following.inputs}")
        frontier = reached
    return len(known)


def run(pipeline: Pipeline, inputs: Iterable[Any]) -> None:
    """Run one sequence of inputs, to which `END` is added; errors as of `explore`."""
    state = _State(pipeline)
    try:
        for value in (*inputs, END):
            state.give(value)
    except _Broken as broken:
        raise Fault(report(pipeline, state.inputs, str(broken))) from None


def without(pipeline: Pipeline, kind: type, barrier: str) -> Pipeline:
    """The pipeline in which nobody has operations of this kind with this barrier."""

    def left_out(role: Role) -> Role:
        def other(own: Any, value: Any) -> Iterator[NamedTuple]:
            for operation in role(own, value):
                if not (isinstance(operation, kind) and operation[0] == barrier):
                    yield operation

        return other

    roles = {name: left_out(role) for name, role in pipeline.processes.items()}
    return dataclasses.replace(pipeline, processes=roles)


def report(pipeline: Pipeline, inputs: tuple[Any, ...], what: str) -> str:
    """How a sequence of inputs leads to a fault."""
    state = _State(pipeline)
    state.log = []
    try:
        for value in inputs:
            state.give(value)
    except _Broken:
        pass
    lines = [what, "inputs: " + ", ".join(map(str, inputs)), *state.describe(), "last operations:"]
    for name in state.names:
        did = [_written(operation) for by, operation in state.log if by == name][-6:]
        lines.append(f"  {name}: ... {', '.join(did)}")
    return "\n".join(lines)


def _written(operation: NamedTuple) -> str:
    values = [str(value) for value in operation if value is not False and value != 1]
    return f"{type(operation).__name__.lower().lstrip('_')} {' '.join(values)}"


def windows(pipeline: Pipeline, length: int) -> list[Any]:
    """A short sequence of inputs that contains every sequence of `length` of them: a de Bruijn
    sequence."""
    count, word = len(pipeline.inputs), [0] * (length + 1)
    found: list[int] = []

    def extend(size: int, period: int) -> None:
        if size > length:
            if length % period == 0:
                found.extend(word[1 : period + 1])
            return
        word[size] = word[size - period]
        extend(size + 1, period)
        for letter in range(word[size - period] + 1, count):
            word[size] = letter
            extend(size + 1, size)

    extend(1, 1)
    return [pipeline.inputs[number] for number in (*found, *found[: length - 1])]
