"""What happened in a run and when: the one thing every figure is drawn from.

`gyre.report.history` fills a `Timeline` from a run's event log; a simulator may fill one directly, and the same figures draw it.

Invariants
- Times are seconds since the run began; the clock starts where the filler says, figures count from `start`.
- Tuples are in order of time; the spans of a cell do not overlap and lie within [start, end].
- Bursts are numbered from 1: number k lies between publication k and the next, as a rule's `View.burst` counts them. The last publication
  of a run that has reached its end begins none: its `end` is its `start`.

Pure: dataclasses and numbers, no files, no clock. Not here: drawing.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gyre.rules import staleness
from gyre.rules.roles import CellPhase


class MarkKind(StrEnum):
    """What cells do to each other in a step."""

    JOIN = "join"  # a cell has the open step's weights and accumulates from now on
    LEAVE = "leave"
    REDUCE = "reduce"  # its cells' gradients to the core
    UPDATE = "update"
    BROADCAST = "broadcast"
    VOID = "void"  # the buffer gave an incarnation up


@dataclass(frozen=True, slots=True)
class RoleSpan:
    """A cell in one phase. `reason` is the rule's, where it made the cell turn."""

    cell: str
    phase: CellPhase
    start: float
    end: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Burst:
    """From one publication to the next. `version` is the policy published at its start, `steps` those committed in it."""

    number: int
    start: float
    end: float
    version: int
    steps: tuple[int, ...] = ()
    predicted: float | None = None  # mean staleness that the quota predicts
    seconds: float = 0.0  # until its engines had the policy


@dataclass(frozen=True, slots=True)
class Step:
    """A committed step of the lineage that survived. `micro_steps` counts those of each cell that accumulated. `score` is its groups' mean reward,
    `grad_norm` before clipping, `compute_s` the core's forward and backward passes; None where the log does not tell."""

    step: int
    opened: float
    committed: float
    closed: float | None = None  # it had all its groups
    sealed: float | None = None
    micro_steps: tuple[tuple[str, int], ...] = ()
    score: float | None = None
    grad_norm: float | None = None
    compute_s: float | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """One query's executions together. `version` is the policy at its dispatch, `step` the one that consumed it."""

    group: str
    admitted: float
    version: int
    burst: int
    ready: float | None = None
    step: int | None = None
    discarded: float | None = None


@dataclass(frozen=True, slots=True)
class Execution:
    """One lease of an execution: a sandbox held it from `start` to `end` (None: still). `ending` is empty when the lease was lost."""

    rollout: str
    group: str
    holder: str
    start: float
    end: float | None = None
    ending: str = ""
    kept: bool = True  # not discarded
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """Something in a step that ended at `at` and took `seconds`."""

    kind: MarkKind
    at: float
    cells: tuple[str, ...]
    step: int | None = None
    seconds: float = 0.0
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Timeline:
    """See the module. `messages` say what the figures cannot show, and why."""

    name: str
    start: float
    end: float
    cells: tuple[str, ...] = ()  # the core first
    spans: tuple[RoleSpan, ...] = ()
    bursts: tuple[Burst, ...] = ()
    steps: tuple[Step, ...] = ()
    groups: tuple[Group, ...] = ()
    executions: tuple[Execution, ...] = ()
    marks: tuple[Mark, ...] = ()
    water_level: tuple[tuple[float, int], ...] = ()  # (time, w from then on)
    dispatch: str = ""
    harness_timeout_s: float | None = None
    overall_timeout_s: float | None = None
    failure: str = ""
    messages: tuple[str, ...] = ()
    budget: int | None = None  # J_max: trajectories trained per execution at most
    begun: dict[str, Any] = field(default_factory=dict)  # what the buffer said of the run when it was last started


def phase_seconds(t: Timeline) -> dict[str, dict[CellPhase, float]]:
    """Seconds of each cell in each phase, over [start, end]."""
    found: dict[str, dict[CellPhase, float]] = {c: dict.fromkeys(CellPhase, 0.0) for c in t.cells}
    for s in t.spans:
        found[s.cell][s.phase] += s.end - s.start
    return found


def water(t: Timeline, start: float, end: float) -> list[tuple[float, int]]:
    """The water level's steps from `start` to `end`, a point at either end included."""
    before = next((w for at, w in reversed(t.water_level) if at <= start), 0)
    points = [(start, before), *((at, w) for at, w in t.water_level if start < at < end)]
    return [*points, (end, points[-1][1])]


def train_fraction(t: Timeline) -> dict[str, float]:
    """Part of [start, end] that each cell was in phase `train`; turning does not count."""
    whole = t.end - t.start
    return {c: (p[CellPhase.TRAIN] / whole if whole > 0 else 0.0) for c, p in phase_seconds(t).items()}


def in_slots(executions: Iterable[Execution], end: float) -> list[tuple[int, Execution]]:
    """(slot, execution): each lease in the lowest slot of its holder that is free at its start. Slots of a holder are next to each other, holders in
    order of appearance. The log does not say which of its slots a sandbox used, so this is a drawing of how many were held, and for how long."""
    rows: dict[str, list[tuple[int, Execution]]] = {}
    free: dict[str, list[int]] = defaultdict(list)
    held: dict[str, list[tuple[float, int]]] = defaultdict(list)
    width: Counter[str] = Counter()
    for e in sorted(executions, key=lambda e: e.start):
        ends, room = held[e.holder], free[e.holder]
        while ends and ends[0][0] <= e.start:
            heapq.heappush(room, heapq.heappop(ends)[1])
        if room:
            slot = heapq.heappop(room)
        else:
            slot = width[e.holder]
            width[e.holder] += 1
        heapq.heappush(ends, (end if e.end is None else e.end, slot))
        rows.setdefault(e.holder, []).append((slot, e))
    placed, first = [], 0
    for holder, own in rows.items():
        placed += [(first + slot, e) for slot, e in own]
        first += width[holder]
    return placed


def bursts_to_show(t: Timeline, n: int, number: int | None = None) -> list[Burst]:
    """At most `n` bursts next to each other: burst `number` and those after it; by default, from the last of those with the most role changes (a
    run's first burst seldom stands for it), else from the middle. The last publication begins no burst."""
    bursts = [b for b in t.bursts if b.end > b.start]
    if not bursts:
        return []
    index = next((i for i, b in enumerate(bursts) if b.number == number), None)
    if index is None:
        moves = [sum(s.phase is CellPhase.TO_TRAIN and b.start <= s.start < b.end for s in t.spans) if b.steps else 0 for b in bursts]
        index = max(range(len(moves)), key=lambda i: (moves[i], i)) if any(moves) else (len(bursts) - 1) // 2
    index = max(0, min(index, len(bursts) - n))
    return bursts[index : index + n]


def _between(t: Timeline, group: Group, v_t: int) -> float | None:
    """Interpolated staleness at `v_t`; None where it depends on a publication that has not happened."""
    number = group.burst
    if not 0 < number <= len(t.bursts):
        return None
    own = t.bursts[number - 1]
    if group.admitted <= own.start:  # at the publication itself: nothing of the interval had passed
        return staleness.interpolated(v_t, group.version, group.version, 0.0)
    if number == len(t.bursts):
        return 0.0 if v_t <= group.version else None
    upcoming = t.bursts[number]
    passed = staleness.fraction_of_interval(group.admitted, own.start, upcoming.start)
    return staleness.interpolated(v_t, group.version, upcoming.version, passed)


@dataclass(frozen=True, slots=True)
class Sample:
    """Staleness of one group, both ways, in optimizer steps; `at` is when."""

    at: float
    discrete: int
    interpolated: float | None


def trained(t: Timeline) -> list[Sample]:
    """Of every consumed group, at v_t = its step - 1."""
    committed = {s.step: s.committed for s in t.steps}
    found = [(committed[g.step], g.step - 1, g) for g in t.groups if g.step is not None and g.step in committed]
    return [Sample(at, staleness.discrete(v_t, g.version), _between(t, g, v_t)) for at, v_t, g in sorted(found, key=lambda f: f[0])]


def offered(t: Timeline) -> list[Sample]:
    """At every publication, of every group that was ready and not consumed: its staleness were it consumed there."""
    committed = {s.step: s.committed for s in t.steps}
    samples = []
    for b in t.bursts:
        for g in t.groups:
            gone = committed.get(g.step) if g.step is not None else g.discarded
            if g.ready is not None and g.ready <= b.start and (gone is None or gone > b.start):
                samples.append(Sample(b.start, staleness.discrete(b.version, g.version), _between(t, g, b.version)))
    return samples


def time_to_step(t: Timeline) -> dict[int, float]:
    """Seconds from `start` (the first publication) to each step's commit."""
    return {s.step: s.committed - t.start for s in t.steps}


def speedup(t: Timeline, other: Timeline) -> list[tuple[int, float]]:
    """(step, how many times sooner `t` reached it than `other`), over the steps that both reached."""
    mine, theirs = time_to_step(t), time_to_step(other)
    return [(step, theirs[step] / mine[step]) for step in sorted(mine.keys() & theirs.keys()) if mine[step] > 0]


def compute_per_step(t: Timeline) -> float | None:
    """Seconds of forward and backward passes of the core, a step's mean."""
    known = [s.compute_s for s in t.steps if s.compute_s is not None]
    return sum(known) / len(known) if known else None


def widest(runs: Sequence[Timeline]) -> Timeline:
    """The run with the largest trajectory budget, which others' times are relative to; the first of equals."""
    return max(runs, key=lambda t: t.budget or 0)


def durations(t: Timeline) -> tuple[list[float], list[float]]:
    """(queries, rollouts) in seconds. A rollout's is that of its last lease, from lease to end; a query's is its longest rollout's, once the group is
    ready. Evaluation and lost leases are left out."""
    rollouts = {e.rollout: (e.group, e.end - e.start) for e in t.executions if e.end is not None and e.ending and not e.evaluation}
    longest: dict[str, float] = {}
    for group, seconds in rollouts.values():
        longest[group] = max(longest.get(group, 0.0), seconds)
    ready = {g.group for g in t.groups if g.ready is not None}
    return [s for g, s in longest.items() if g in ready], [s for _, s in rollouts.values()]


def within(spans: Iterable[RoleSpan], start: float, end: float) -> Iterator[RoleSpan]:
    """The spans cut to [start, end]."""
    for s in spans:
        if s.end > start and s.start < end:
            yield RoleSpan(s.cell, s.phase, max(s.start, start), min(s.end, end), s.reason)
