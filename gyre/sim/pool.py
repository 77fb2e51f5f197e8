"""The two rollout models: what executions do while so many cells serve them. Each is an event queue of its own under the world's clock.

- `SlotPool`: an execution holds a slot for its whole duration. Without a slot it stands still; the oldest waiting starts first, and when slots go the
  youngest running stop. What it has done is kept.
- `SharedPool`: an execution is turns of a decode phase and a tool phase; every decode phase advances at 1 / (t0 + t1·active/cells) tokens per
  second, so one virtual token clock serves all. Tools run on while no cell serves. The harness's time-out counts the time in which a cell
  served, and is looked at between phases.

Executions are numbered in the order of their admission. Not modelled: the cost of continuing elsewhere, prefix caches, cells that differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Protocol

from gyre.rules.roles import Pace
from gyre.rules.workload import Executions, Shared

Draw = tuple[int, int]  # query, index


class Pool(Protocol):
    """Executions under way."""

    events: int
    last_s: float  # age of the execution that ended last, in seconds of an unloaded engine
    pace: Pace | None

    def admit(self, now: float, ids: range, draws: list[Draw]) -> None: ...

    def serve(self, now: float, cells: int) -> None:
        """So many cells serve from now on."""

    def next(self) -> float:
        """When the next event is; inf if none."""

    def advance(self) -> int:
        """Process that event: the number of an execution that ended, or -1."""

    def running(self) -> int:
        """Executions that are being served."""

    def age_s(self, now: float, execution: int) -> float:
        """Seconds that an unfinished execution has been served, in seconds of an unloaded engine."""

    def busy_s(self, now: float) -> float:
        """Seconds that executions have been served, all together."""

    def alone_s(self, query: int, index: int, cells: int) -> float:
        """Seconds of an execution that shares `cells` with no other."""


class SlotPool:
    """See the module."""

    def __init__(self, workload: Executions, seed: int, slots_per_cell: int) -> None:
        self._w, self._seed, self._per_cell = workload, seed, slots_per_cell
        self._slots = 0
        self._left: dict[int, float] = {}  # seconds left, of those that stand still
        self._done: dict[int, float] = {}  # seconds served so far, of those that stood still once
        self._ends: dict[int, float] = {}  # of those running
        self._since: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        self._waiting: list[int] = []
        self._busy_s = self.last_s = 0.0
        self.pace: Pace | None = None
        self.events = 0

    def admit(self, now: float, ids: range, draws: list[Draw]) -> None:
        for i, (query, index) in zip(ids, draws, strict=True):
            self._left[i] = self._w.duration_s(self._seed, query, index)
            heappush(self._waiting, i)
        self._fill(now)

    def serve(self, now: float, cells: int) -> None:
        self._slots = cells * self._per_cell
        excess = len(self._ends) - self._slots
        if excess > 0:
            for i in sorted(self._ends, reverse=True)[:excess]:
                self._left[i] = self._ends.pop(i) - now
                served = now - self._since.pop(i)
                self._busy_s += served
                self._done[i] = self._done.get(i, 0.0) + served
                heappush(self._waiting, i)
            self._heap = [(t, i) for t, i in self._heap if i in self._ends]
            heapify(self._heap)
        self._fill(now)

    def _fill(self, now: float) -> None:
        while self._waiting and len(self._ends) < self._slots:
            i = heappop(self._waiting)
            self._ends[i] = end = now + self._left.pop(i)
            self._since[i] = now
            heappush(self._heap, (end, i))

    def next(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def advance(self) -> int:
        now, i = heappop(self._heap)
        self.events += 1
        del self._ends[i]
        served = now - self._since.pop(i)
        self._busy_s += served
        self.last_s = served + self._done.pop(i, 0.0)
        if self._waiting:
            self._fill(now)
        return i

    def running(self) -> int:
        return len(self._ends)

    def age_s(self, now: float, execution: int) -> float:
        since = self._since.get(execution)
        return self._done.get(execution, 0.0) + (now - since if since is not None else 0.0)

    def busy_s(self, now: float) -> float:
        return self._busy_s + sum(now - t for t in self._since.values())

    def alone_s(self, query: int, index: int, cells: int) -> float:
        return self._w.duration_s(self._seed, query, index)


class _Life:
    """An execution under way: its turns to come, and the pool's serving clock at its start."""

    __slots__ = ("began", "born_s", "coming", "tool_s", "turns")

    def __init__(self, turns: Iterator[tuple[float, float]], began: float, born_s: float) -> None:
        self.turns, self.began, self.born_s = turns, began, born_s
        self.coming, self.tool_s = next(turns)  # tokens of the coming decode phase, and the tool after the present one


class SharedPool:
    """See the module. `_tokens` is the virtual clock: tokens that a phase decoding since ever would have."""

    def __init__(self, turns: Callable[[int, int, int], Iterator[tuple[float, float]]], seed: int, shared: Shared) -> None:
        self._turns, self._seed, self._s = turns, seed, shared
        self._timeout_s = shared.harness_timeout_h * 3600
        self._cells = 0
        n = shared.turns.mean
        self._pace = Pace(shared.t0_s, shared.t1_s, n * shared.tokens_per_turn.mean, n * shared.tool_s.mean)
        self.pace: Pace | None = self._pace
        self._unloaded_s = self._pace.tokens * shared.t0_s + self._pace.tool_s
        self._ageing_s = self._ageing = self.last_s = 0.0  # the clock of ages, and how fast it goes
        self._now = self._tokens = self._rate = self._serving_s = self._busy_s = 0.0
        self._decode: list[tuple[float, int]] = []
        self._tools: list[tuple[float, int]] = []
        self._lives: dict[int, _Life] = {}
        self.events = 0

    def admit(self, now: float, ids: range, draws: list[Draw]) -> None:
        self._to(now)
        for i, (query, index) in zip(ids, draws, strict=True):
            life = self._lives[i] = _Life(self._turns(self._seed, query, index), self._serving_s, self._ageing_s)
            heappush(self._decode, (self._tokens + life.coming, i))
        self._rerate()

    def serve(self, now: float, cells: int) -> None:
        self._to(now)
        self._cells = cells
        self._rerate()

    def _to(self, now: float) -> None:
        passed = now - self._now
        self._tokens += self._rate * passed
        self._ageing_s += self._ageing * passed
        if self._cells:
            self._serving_s += passed
            self._busy_s += passed * len(self._lives)
        self._now = now

    def _rerate(self) -> None:
        if not self._cells:
            self._rate = self._ageing = 0.0
            return
        token_s = self._s.t0_s + self._s.t1_s * len(self._decode) / self._cells
        self._rate = 1 / token_s
        self._ageing = self._unloaded_s / (self._pace.tokens * token_s + self._pace.tool_s)

    def _decode_end(self) -> float:
        if not self._decode or not self._rate:
            return math.inf
        return self._now + max(0.0, self._decode[0][0] - self._tokens) / self._rate

    def next(self) -> float:
        decode = self._decode_end()
        return self._tools[0][0] if self._tools and self._tools[0][0] < decode else decode

    def advance(self) -> int:
        self.events += 1
        decode = self._decode_end()
        if self._tools and self._tools[0][0] < decode:
            now, i = heappop(self._tools)
            self._to(now)
            life = self._lives[i]
            if self._over(life):
                return self._end(i)
            heappush(self._decode, (self._tokens + life.coming, i))
        else:
            self._to(decode)
            i = heappop(self._decode)[1]
            life = self._lives[i]
            following = next(life.turns, None)
            if following is None or self._over(life):
                return self._end(i)
            heappush(self._tools, (decode + life.tool_s, i))
            life.coming, life.tool_s = following
        self._rerate()
        return -1

    def _over(self, life: _Life) -> bool:
        return self._serving_s - life.began >= self._timeout_s

    def _end(self, i: int) -> int:
        self.last_s = self._ageing_s - self._lives.pop(i).born_s
        self._rerate()
        return i

    def running(self) -> int:
        return len(self._lives) if self._cells else 0

    def age_s(self, now: float, execution: int) -> float:
        return self._ageing_s + (now - self._now) * self._ageing - self._lives[execution].born_s

    def busy_s(self, now: float) -> float:
        return self._busy_s + ((now - self._now) * len(self._lives) if self._cells else 0.0)

    def alone_s(self, query: int, index: int, cells: int) -> float:
        turns = list(self._turns(self._seed, query, index))
        token_s = self._s.t0_s + self._s.t1_s / cells
        return min(self._timeout_s, sum(tokens * token_s + tool_s for tokens, tool_s in turns) - turns[-1][1])
