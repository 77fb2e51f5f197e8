"""The fast model behind `lookahead`: a burst as a fluid of executions, from what is known of those in flight. Pure, deterministic, no draws.

Groups of like age are a `_Chunk`, which thins out as it ages by the survival curves of the executions and groups that ended before. Cells that serve
set how fast chunks age: with slots, the oldest chunks hold them and the youngest stand still; with shared engines all age at one rate. Training
works off groups as they become ready. A `Plan` says when the next cell turns; `burst_end` how long it takes.

What it leaves out: the borders of steps (their updates are added), micro-steps, and the seconds of a turn beyond their count per moment.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import msgspec

from gyre.rules.roles import CellPhase, GroupView, Known, Pace, View

CHUNKS: Final = 6
GRID: Final = 96
MOMENTS: Final = 32  # per span of the executions' remaining time
NEVER: Final = 1e12  # seconds
MOST_MOMENTS: Final = 400


class Plan(msgspec.Struct, frozen=True):
    """When the next cell turns: under any of `terms` (filling, backlog): w <= filling·(capacity that remains), and `backlog` groups wait for
    training per training cell, the next included. The paper's rule is the one term (1, 0). Without executions cells turn under every plan."""

    terms: tuple[tuple[float, float], ...]

    def turns(self, w: float, remaining: float, waiting: float, trainers: int) -> bool:
        """Whether one more cell than `trainers` is to train; `remaining` is the capacity then left."""
        if w < 0.5:
            return True
        share = waiting / (trainers + 1)
        return any(share >= backlog and (filling == math.inf or w <= filling * remaining + 0.5) for filling, backlog in self.terms)


class Survival:
    """The part of executions (or groups) older than an age; beyond the oldest seen it decays, with a tenth of their mean as its scale."""

    def __init__(self, ages: Sequence[float]) -> None:
        n, last = len(ages), ages[-1]
        self.step = max(last, 1e-9) * 1.5 / GRID
        tail = max(sum(ages) / n / 10, 1e-9)
        self.values = []
        for i in range(GRID + 2):
            x = i * self.step
            self.values.append((n - bisect_right(ages, x)) / n if x < last else 0.5 / n * math.exp((last - x) / tail))
        self.least = self.values[-1]

    def at(self, age: float) -> float:
        """In (0, 1]."""
        x = age / self.step
        i = int(x)
        if i >= GRID:
            return self.least * math.exp(GRID - x)
        here = self.values[i]
        return here + (self.values[i + 1] - here) * (x - i)


class _Chunk:
    """Groups of like age, as numbers that need not be whole."""

    __slots__ = ("age", "groups", "groups_0", "live", "live_0")

    def __init__(self, age: float, live: float, groups: float, executions: Survival, whole: Survival) -> None:
        self.age, self.live, self.groups = age, live, groups
        self.live_0 = live / max(executions.at(age), 1e-300)  # such that live = live_0·S(age)
        self.groups_0 = groups / max(whole.at(age), 1e-300)

    def copy(self) -> _Chunk:
        twin = object.__new__(_Chunk)
        twin.age, twin.live, twin.groups, twin.live_0, twin.groups_0 = self.age, self.live, self.groups, self.live_0, self.groups_0
        return twin


def ageing(pace: Pace, live: float, cells: int) -> float:
    """How fast `live` executions on `cells` age, next to an unloaded engine: 1 or less. From decoding = live·(its part of an execution's time)."""
    per, t0, tool = pace.t1_s / cells, pace.t0_s, pace.tool_s
    a, b, c = pace.tokens * per, pace.tokens * t0 + tool - live * pace.tokens * per, -live * pace.tokens * t0
    decoding = (-b + math.sqrt(b * b - 4 * a * c)) / (2 * a) if a else live
    return (pace.tokens * t0 + tool) / (pace.tokens * (t0 + per * decoding) + tool)


class Fluid:
    """A view as a fluid, to be run under several plans."""

    def __init__(self, view: View, known: Known) -> None:
        self.view, self.known = view, known
        self.executions, self.whole = Survival(known.durations_s), Survival(known.group_durations_s)
        usable = [c for c in view.cells if c.phase is not CellPhase.LOST]
        self.trainers = sum(c.phase in (CellPhase.TRAIN, CellPhase.TO_TRAIN) for c in usable)
        self.fixed = sum(c.fixed and c.phase is CellPhase.ROLLOUT for c in usable)
        self.cells = len(usable)
        self.capacity = max(1.0, sum(c.capacity for c in usable) / max(1, self.cells))
        self.chunks = self._chunked(known.groups)
        self.per_group = view.rollouts_per_group or max(1.0, view.water_level / max(1, len(known.groups)))
        oldest = max(known.durations_s[-1], known.group_durations_s[-1])
        self.dt = oldest / MOMENTS

    def _chunked(self, groups: Sequence[GroupView]) -> list[_Chunk]:
        """Neighbours in age, oldest first, in about CHUNKS pieces; a jump in age divides too."""
        out: list[_Chunk] = []
        size = math.ceil(len(groups) / CHUNKS)
        jump = self.executions.step * 4
        piece: list[GroupView] = []
        for g in [*groups, None]:
            if piece and (g is None or len(piece) >= size or abs(g.age_s - piece[0].age_s) > jump):
                live = sum(p.unfinished for p in piece)
                age = sum(p.age_s * p.unfinished for p in piece) / live
                out.append(_Chunk(age, live, len(piece), self.executions, self.whole))
                piece = []
            if g is not None:
                piece.append(g)
        return out

    def admit(self, chunks: list[_Chunk], groups: float) -> None:
        """New groups."""
        pieces = CHUNKS if self.known.pace is None and not self.view.quota else 1
        for _ in range(pieces if groups else 0):
            chunks.append(_Chunk(0.0, groups * self.per_group / pieces, groups / pieces, self.executions, self.whole))

    def burst_end(self, plan: Plan, beyond: bool, limit: float = NEVER) -> float:
        """Seconds from now to the end of the burst under `plan`; with `beyond`, to the end of the next one, so that what a plan does
        to executions that this burst does not need is counted too. Gives up, with `NEVER`, beyond `limit`."""
        v, k = self.view, self.known
        chunks = [c.copy() for c in self.chunks]
        end, ready = self._run(plan, chunks, v.steps_left * v.groups_per_step, float(v.ready), k.trained, self.trainers, limit)
        end += v.steps_left * k.update_s + k.publish_s
        if beyond and end < limit:
            needed = v.steps_per_burst * v.groups_per_step
            self.admit(chunks, v.admitting / self.per_group)
            more, _ = self._run(plan, chunks, needed, max(0.0, ready - v.steps_left * v.groups_per_step), 0.0, 0, limit - end)
            end += more
        return end

    def _run(self, plan: Plan, chunks: list[_Chunk], needed: float, ready: float, trained: float, trainers: int, limit: float) -> tuple[float, float]:
        """(seconds until `needed` groups are trained, groups ready then). Chunks are left as they are then."""
        train_s, dt, pace = self.known.train_s, self.dt, self.known.pace
        fresh = 0.0  # groups that a step took, whose places are not yet taken by new ones
        step = self.view.groups_per_step
        took = min(ready, math.ceil(trained / step + 1e-9) * step)
        at_once = max(1, int(dt / max(self.known.to_train_s, 1e-3)))
        now = 0.0
        for _ in range(MOST_MOMENTS):
            live = unready = 0.0
            for c in chunks:
                live += c.live
                unready += c.groups
            now_ready = needed if unready < 0.5 and ready + unready + 0.5 >= needed else ready
            serving, moved = self.cells - trainers, 0
            waiting = max(0.0, min(now_ready, needed) - trained)
            while serving > self.fixed and moved < at_once and plan.turns(live, (serving - 1) * self.capacity, waiting, trainers):
                trainers, serving, moved = trainers + 1, serving - 1, moved + 1
            if trainers and now_ready >= needed and (live < 0.5 or serving == self.fixed):  # training alone is left
                return now + max(0.0, needed - trained) * train_s / trainers, ready
            work = min(waiting, trainers * dt / train_s)
            trained += work
            if trained >= needed - 1e-6:
                return now + (work * train_s / trainers if trainers else 0.0), ready
            if self.view.quota:
                takes = min(ready, (math.floor(trained / step + 1e-9) + 1) * step, needed)
                fresh, took = fresh + max(0.0, takes - took), max(takes, took)
                if fresh >= step / 4:
                    self.admit(chunks, fresh)
                    unready += fresh
                    fresh = 0.0
            self._age(chunks, serving, live, pace, dt)
            left = 0.0
            for c in chunks:
                left += c.groups
            ready += unready - left
            now += dt
            if now > limit:
                break
        return NEVER, ready

    def _age(self, chunks: list[_Chunk], serving: int, live: float, pace: Pace | None, dt: float) -> None:
        if not serving:
            return
        rate = ageing(pace, live, serving) if pace is not None and live > 0 else 1.0
        slots = math.inf if pace is not None else serving * self.capacity
        executions, whole = self.executions.at, self.whole.at
        for c in chunks:
            if c.groups < 1e-3:
                c.live = c.groups = 0.0
                continue
            part = rate if slots >= c.live else rate * slots / c.live
            slots = max(0.0, slots - c.live)
            c.age += part * dt
            c.live = c.live_0 * executions(c.age)
            c.groups = c.groups_0 * whole(c.age)
