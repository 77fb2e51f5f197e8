"""Figures of a simulated run, from its trace: staleness, roles, idleness, and the lower bound of its time."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import msgspec

from gyre.rules import staleness
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


def measure(world: World) -> Measured:
    """See `Measured`."""
    hours = world.now / 3600
    published: list[tuple[float, int]] = []
    admitted: dict[int, tuple[float, int]] = {}
    taken: dict[int, int] = {}
    trained = [0.0] * len(world.cells)
    rollout = 0.0
    since: dict[int, tuple[str, float]] = {c.index: ("rollout", 0.0) for c in world.cells}

    def leave(cell: int, now: float) -> None:
        nonlocal rollout
        phase, begun = since[cell]
        if phase == "train":
            trained[cell] += now - begun
        elif phase == "rollout":
            rollout += now - begun

    micro = 0
    for now, kind, *rest in world.trace:
        if kind == "publish":
            published.append((now, rest[1]))
        elif kind == "admit":
            admitted[rest[0]] = (now, len(published) - 1)
        elif kind == "take":
            taken[rest[0]] = rest[1]
        elif kind == "micro":
            micro += 1
        elif kind == "role":
            leave(rest[0], now)
            since[rest[0]] = (rest[2], now)
    for cell in since:
        leave(cell, world.now)

    warm = WARM_UP_BURSTS * world.mu if world.work.bursts > 2 * WARM_UP_BURSTS else 0
    discrete, moved = [], []
    for group, v_t in taken.items():
        at, p = admitted[group]
        if v_t < warm:
            continue
        start, v_d = published[p]
        end, v_next = published[p + 1] if p + 1 < len(published) else (world.now, v_d)
        discrete.append(float(staleness.discrete(v_t, v_d)))
        moved.append(staleness.interpolated(v_t, v_d, v_next, staleness.fraction_of_interval(at, start, end)))
    slots = rollout * world.system.slots_per_cell
    return Measured(
        hours,
        discrete,
        moved,
        [t / world.now for t in trained],
        1 - micro * world.micro_s / sum(trained) if sum(trained) else 0.0,
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
