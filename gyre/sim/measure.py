"""Figures of a simulated run, from its trace as a timeline: staleness, roles, idleness, and the lower bound of its time."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import msgspec

from gyre.report import timeline
from gyre.report.timeline import Burst, Group, RoleSpan, Step, Timeline
from gyre.rules.roles import CellPhase
from gyre.sim.world import World

WARM_UP_BURSTS: Final = 2
"""Bursts whose groups do not count for staleness: the system fills up first. All count in a run of no more than four bursts."""


class Measured(msgspec.Struct, frozen=True):
    """One run. Hours; staleness in optimizer steps, by group, after the warm-up; fractions of the run's time."""

    hours: float
    discrete: list[float]
    interpolated: list[float]
    train_fraction: list[float]  # per cell
    idle_train: float
    idle_rollout: float
    bound_hours: float | None  # None where phi > 0, or dispatch is continuous


def timeline_of(world: World) -> Timeline:
    """A run's trace as what reports draw; times are virtual seconds."""
    published: list[tuple[float, int]] = []
    admitted: list[tuple[float, int, int]] = []  # when, at which version, in which burst; groups are numbered in this order
    consumed: dict[int, int] = {}
    steps: list[Step] = []
    spans: list[RoleSpan] = []
    phases = [(CellPhase.ROLLOUT, 0.0) for _ in world.cells]

    def leave(cell: int, now: float) -> None:
        phase, begun = phases[cell]
        spans.append(RoleSpan(world.cells[cell].name, phase, begun, now))

    for now, kind, *rest in world.trace:
        match kind:
            case "publish":
                published.append((now, rest[1]))
            case "admit":
                admitted.append((now, rest[1], len(published)))
            case "commit":
                steps.append(Step(rest[0], now, now))
                consumed.update(dict.fromkeys(rest[1], rest[0]))
            case "role":
                leave(rest[0], now)
                phases[rest[0]] = (CellPhase(rest[2]), now)
    for cell in range(len(phases)):
        leave(cell, world.now)
    ends = [*(at for at, _ in published[1:]), world.now]
    bursts = tuple(Burst(n, at, end, version) for n, ((at, version), end) in enumerate(zip(published, ends, strict=True), 1))
    groups = tuple(Group(f"g{g}", at, version, burst, step=consumed.get(g)) for g, (at, version, burst) in enumerate(admitted))
    return Timeline("simulated", 0.0, world.now, tuple(c.name for c in world.cells), tuple(spans), bursts, tuple(steps), groups)


def measure(world: World) -> Measured:
    """See `Measured`."""
    t = timeline_of(world)
    warm = t.bursts[WARM_UP_BURSTS].start if world.work.bursts > 2 * WARM_UP_BURSTS else 0.0
    samples = [s for s in timeline.trained(t) if s.at > warm]
    seconds = timeline.phase_seconds(t).values()
    trained, rollout = (sum(s[phase] for s in seconds) for phase in (CellPhase.TRAIN, CellPhase.ROLLOUT))
    micro = sum(kind == "micro" for _, kind, *_ in world.trace)
    slots = rollout * world.system.slots_per_cell
    return Measured(
        world.now / 3600,
        [float(s.discrete) for s in samples],
        [s.interpolated for s in samples if s.interpolated is not None],
        list(timeline.train_fraction(t).values()),
        1 - micro * world.micro_s / trained if trained else 0.0,
        max(0.0, 1 - world.pool.busy_s(world.now) / slots) if slots else 0.0,
        bound_hours(world),
    )


def bound_hours(world: World) -> float | None:
    """The least hours, where every burst's groups are admitted at its publication (phi = 0).

    Per burst the larger of max over t of (t + training work of the groups that complete at t or later ÷ cells) and all work ÷ cells; plus its updates
    and the publication. A group completes when its longest execution has run undisturbed, with all cells to itself. Not quite a bound: all updates
    but the last can hide behind executions, so a run may end a few tenths of a percent below it.
    """
    s = world.system
    if s.dispatch != "boundary" or world.quota.groups != world.mu * world.B:
        return None
    per_burst = world.mu * world.B
    work = world.work.train_cell_h_per_group * 3600
    complete: dict[int, list[float]] = defaultdict(list)
    for g in range(world.total_groups):
        complete[g // per_burst].append(max(world.pool.alone_s(g, i, s.cells) for i in range(world.N)))
    total = 0.0
    for times in complete.values():
        times.sort()
        total += max(t + (len(times) - k) * work / s.cells for k, t in enumerate(times))
        total += world.mu * s.update_s + s.publish_s
    return total / 3600
