"""A run in virtual time: the rules, quotas and phases of production, over modelled executions and training. Deterministic.

Invariants (looked at afterwards by `gyre.sim.checkers`, from the trace alone)
- Two worlds of the same workload, rule, target and seed have the same trace.
- Every execution is admitted once and ends once; a group is consumed once, by a step that has B groups.
- A cell has one phase; phases follow `CELL_TRANSITIONS`.

The model of training: a group is N micro-steps of equal work, which training cells claim one at a time; a step takes its B groups as they become
ready (or, without streaming, when all B are), while the core trains; it commits `update_s` after its last micro-step, and the burst's last commit
is followed by `publish_s`. A satellite joins only while a step is open, else when the next one opens. A cell that goes back during a step hands in
what it accumulated; one that dies loses it. Not modelled: the network, checkpoints, evaluation, discarded executions.
"""

from __future__ import annotations

import hashlib
import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any, Final

from gyre.errors import WorkFailed
from gyre.rules import admission
from gyre.rules.roles import CellEvent, CellPhase, CellView, GroupView, Known, Move, Rule, Stay, View, turned
from gyre.rules.workload import Workload
from gyre.sim.pool import Pool, SharedPool, SlotPool

ROLLOUT, TO_TRAIN, TRAIN, TO_ROLLOUT, LOST = CellPhase
Trace = list[tuple[Any, ...]]
RULE_LIMIT: Final = 10  # moves per cell that a rule may make at one instant


class Cell:
    """A cell: its phase, the burst of its last turn, and what its trainer holds of the open step."""

    __slots__ = ("accumulated", "burst", "busy_since", "index", "life", "name", "phase", "turn")

    def __init__(self, index: int) -> None:
        self.index, self.name = index, f"cell-{index}"
        self.phase, self.burst = ROLLOUT, -1
        self.turn = 0  # changes with every change of phase: what was announced for an older one is void
        self.life = 0
        self.busy_since = -1.0
        self.accumulated: list[int] = []  # groups, one entry per micro-step


class Group:
    """An admitted group."""

    __slots__ = ("admitted", "ended", "first", "index", "live", "longest_s", "version")

    def __init__(self, index: int, first: int, admitted: float, version: int) -> None:
        self.index, self.first, self.admitted, self.version = index, first, admitted, version
        self.ended = 0
        self.longest_s = 0.0  # age of its longest execution that ended
        self.live: set[int] = set()


DEATHS_MOST: Final = 1000  # of a cell, on average, in one step


class World:
    """One run. `run()` returns when its last publication is done; the trace then has all that happened."""

    def __init__(self, workload: Workload, rule: Rule, target: float, seed: int, *, stream: bool = True, ask_known: bool = False) -> None:
        s = self.system = workload.system
        self.work = workload.workload
        self.rule, self.seed, self.stream, self._ask_known = rule, seed, stream, ask_known
        self.B, self.N, self.mu = s.groups_per_step, s.rollouts_per_group, s.steps_per_burst
        self.quota = admission.quota(s.dispatch, target, self.B, self.mu)
        self.total_groups = self.work.bursts * self.mu * self.B
        self.micro_s = self.work.train_cell_h_per_group * 3600 / self.N
        self.pool: Pool
        if self.work.model == "slots":
            self.pool = SlotPool(self.work, seed, s.slots_per_cell)
        else:
            assert self.work.shared is not None
            self.pool = SharedPool(self.work.turns, seed, self.work.shared)
        self.cells = [Cell(i) for i in range(s.cells)]
        self.views = [CellView(c.name, c.phase, s.slots_per_cell) for c in self.cells]
        self.serving = len(self.cells)
        self.now = 0.0
        self.trace: Trace = []
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self.groups: list[Group] = []
        self.living: dict[int, Group] = {}
        self.water = 0
        self.ready: deque[int] = deque()
        self.taken: list[int] = []
        self.queued: deque[int] = deque()  # micro-steps to claim, by group
        self.undone = 0  # micro-steps of the open step, not accumulated
        self.idle: list[Cell] = []
        self.joining: list[Cell] = []
        self.step_open = False
        self.steps = self.version = self.burst = 0
        self.steps_left = self.mu
        self.durations: list[float] = []  # ages at which executions and groups ended, sorted
        self.group_durations: list[float] = []
        self._stay: Stay | None = None
        self._asking = False
        self._done = False
        self._deaths = 0  # since the last commit
        self._random = Random(f"faults/{seed}")

    def at(self, delay: float, what: Callable[..., None], *args: Any) -> None:
        self._number += 1
        heappush(self._heap, (self.now + delay, self._number, what, args))

    def run(self) -> World:
        """To the last publication. Raises `WorkFailed` when nothing more can happen before it, or cells die quicker than they work."""
        self._start()
        heap, pool = self._heap, self.pool
        while not self._done:
            due = pool.next()
            if heap and heap[0][0] <= due:
                self.now, _, what, args = heappop(heap)
                self.events += 1
                what(*args)
            elif due < math.inf:
                self.now = due
                ended = pool.advance()
                if ended >= 0:
                    self._execution_ended(ended)
            else:
                raise WorkFailed(f"nothing more can happen after {self.now:.0f} s, in burst {self.burst}: {self._story()}")
        self.events += pool.events
        return self

    def _story(self) -> str:
        phases = " ".join(c.phase for c in self.cells)
        return f"w = {self.water}, {len(self.ready)} groups ready, {len(self.taken)} taken, {self.steps_left} steps left; cells: {phases}"

    def digest(self) -> str:
        """Of all that happened, to the last bit of every time."""
        return hashlib.blake2b(repr(self.trace).encode(), digest_size=8).hexdigest()

    def _start(self) -> None:
        self.trace.append((0.0, "publish", 0, 0))
        self.pool.serve(0.0, self.serving)
        if self.work.faults is not None:
            for c in self.cells:
                self.at(self._random.expovariate(1 / (self.work.faults.cell_mtbf_h * 3600)), self._die, c)
        self._dispatch()
        self._open_step()
        self._ask()

    # --- admission and executions ---------------------------------------------------------------------------------------------------------

    def _outstanding(self) -> int:
        """Groups that count against the quota."""
        gone = self.steps * self.B if self.system.dispatch == "boundary" else self.steps * self.B + len(self.taken)
        return len(self.groups) - gone

    def _dispatch(self) -> None:
        n = admission.admit(self.quota.groups, self._outstanding(), self.total_groups - len(self.groups), None)
        if not n:
            return
        first = len(self.groups) * self.N
        draws = [(len(self.groups) + g, i) for g in range(n) for i in range(self.N)]
        for g in range(len(self.groups), len(self.groups) + n):
            group = Group(g, g * self.N, self.now, self.version)
            self.groups.append(group)
            group.live.update(range(g * self.N, (g + 1) * self.N))
            self.living[group.index] = group
            self.trace.append((self.now, "admit", group.index, self.version))
        self.water += n * self.N
        self.pool.admit(self.now, range(first, first + n * self.N), draws)
        self._stay = None

    def _execution_ended(self, execution: int) -> None:
        group = self.groups[execution // self.N]
        group.ended += 1
        group.live.remove(execution)
        self.water -= 1
        self.trace.append((self.now, "end", execution))
        if self._ask_known:
            age = self.pool.last_s
            insort(self.durations, age)
            group.longest_s = max(group.longest_s, age)
        if group.ended == self.N:
            del self.living[group.index]
            insort(self.group_durations, group.longest_s)
            self.trace.append((self.now, "ready", group.index))
            self.ready.append(group.index)
            self._take()
        self._ask()

    # --- training ---------------------------------------------------------------------------------------------------------------------------

    def _open_step(self) -> None:
        self.step_open = True
        for c in self.joining:
            self._join(c)
        self.joining = []
        self._take()

    def _take(self) -> None:
        """The open step takes ready groups, if the core trains."""
        if not self.step_open or self.cells[0].phase is not TRAIN:
            return
        room = self.B - len(self.taken)
        if not self.stream and len(self.ready) < room:
            return
        took = 0
        while self.ready and took < room:
            g = self.ready.popleft()
            took += 1
            self.taken.append(g)
            self.trace.append((self.now, "take", g, self.steps))
            self.queued.extend([g] * self.N)
            self.undone += self.N
        if took:
            if self.system.dispatch == "continuous":
                self._dispatch()
            self._claim()

    def _claim(self) -> None:
        while self.queued and self.idle:
            c = self.idle.pop()
            c.busy_since = self.now
            self.at(self.micro_s, self._accumulated, c, c.turn, self.queued.popleft())

    def _accumulated(self, c: Cell, turn: int, group: int) -> None:
        if c.turn != turn:
            return  # it left or died meanwhile, and the micro-step is queued again
        c.accumulated.append(group)
        self.undone -= 1
        self.trace.append((self.now, "micro", c.index, group, c.busy_since))
        if self.queued:
            c.busy_since = self.now
            self.at(self.micro_s, self._accumulated, c, turn, self.queued.popleft())
            return
        c.busy_since = -1.0
        self.idle.append(c)
        self._seal()

    def _seal(self) -> None:
        if self.step_open and not self.undone and len(self.taken) == self.B and self.cells[0].phase is TRAIN:
            self.step_open = False
            self.at(self.system.update_s, self._commit, self.cells[0].life)

    def _commit(self, core_life: int) -> None:
        if self.cells[0].life != core_life or self.undone:
            self.step_open = True  # somebody died in the reduction: what it held is computed again
            self._claim()
            self._seal()
            return
        self.steps += 1
        self.steps_left -= 1
        self._deaths = 0
        self.trace.append((self.now, "commit", self.steps, tuple(self.taken)))
        self.taken = []
        for c in self.cells:
            c.accumulated = []
        self._stay = None
        if self.steps_left:
            self._open_step()
        else:
            self.at(self.system.publish_s, self._publish)
        self._ask()

    def _publish(self) -> None:
        self.burst += 1
        self.version, self.steps_left = self.steps, self.mu
        self.trace.append((self.now, "publish", self.burst, self.version))
        if self.burst == self.work.bursts:
            self._done = True
            return
        self._stay = None
        self._dispatch()
        self._open_step()
        self._ask()

    # --- roles --------------------------------------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask the rule until it says Stay. Events that its moves cause at once do not ask again within."""
        stay = self._stay
        if stay is not None and (stay.above is not None or stay.until is not None):
            level = stay.above is None or self.water > stay.above
            if level and (stay.until is None or self.now < stay.until):
                return
        if self._asking:
            return
        self._asking = True
        for _ in range(RULE_LIMIT * len(self.cells)):
            decision = self.rule(self.view())
            if isinstance(decision, Move):
                self._order(self.cells[int(decision.cell[5:])], decision)
            elif self._stay is not decision:
                self._stay = decision
                break
        else:
            raise WorkFailed(f"the rule turns cells without end at {self.now:.0f} s: {self._story()}")
        self._asking = False
        if self._stay is not None and self._stay.until is not None and not self._done:
            self.at(max(0.0, self._stay.until - self.now), self._reask, self._stay)

    def _reask(self, stay: Stay) -> None:
        if self._stay is stay:
            self._stay = None
            self._ask()

    def view(self) -> View:
        """What the rule sees."""
        s = self.system
        admitting = 0
        if s.dispatch == "boundary":
            admitted = len(self.groups) - (self.steps + self.steps_left) * self.B
            admitting = admission.admit(self.quota.groups, admitted, self.total_groups - len(self.groups), None) * self.N
        return View(
            self.now, tuple(self.views), self.water, self.burst, self.steps_left, len(self.ready) + len(self.taken), self.B, self.mu,
            self.N, admitting, self.quota.groups if s.dispatch == "continuous" else 0, self._known() if self._ask_known else None,
        )  # fmt: skip

    def _known(self) -> Known:
        s, age = self.system, self.pool.age_s
        groups = tuple([GroupView(len(g.live), sum([age(self.now, e) for e in g.live]) / len(g.live)) for g in self.living.values()])
        done = len(self.taken) - self.undone / self.N
        costs = (self.micro_s * self.N, s.to_train_s, s.update_s, s.publish_s)
        return Known(groups, tuple(self.durations), tuple(self.group_durations), *costs, done, self.pool.pace)

    def _set(self, c: Cell, event: CellEvent) -> None:
        before = c.phase
        c.phase = turned(before, event)
        c.turn += 1
        self.views[c.index] = CellView(c.name, c.phase, self.system.slots_per_cell, c.burst)
        self.trace.append((self.now, "role", c.index, str(before), str(c.phase), self.burst))
        self._stay = None
        if ROLLOUT in (before, c.phase):
            self.serving += 1 if c.phase is ROLLOUT else -1
            self.pool.serve(self.now, self.serving)

    def _order(self, c: Cell, move: Move) -> None:
        if move.to is TRAIN:
            c.burst = self.burst
            self._set(c, CellEvent.ORDER_TRAIN)
            self.at(self.system.to_train_s, self._awake, c, c.turn)
            return
        if c.phase is TRAIN:
            self._release(c)
        if c in self.joining:
            self.joining.remove(c)
        self._set(c, CellEvent.ORDER_ROLLOUT)
        self.at(self.system.to_rollout_s, self._serving, c, c.turn)

    def _awake(self, c: Cell, turn: int) -> None:
        if c.turn != turn:
            return
        if c.index == 0 or self.step_open:
            self._join(c)
            self._take()
            self._ask()
        else:
            self.joining.append(c)

    def _join(self, c: Cell) -> None:
        self._set(c, CellEvent.JOINED)
        self.idle.append(c)
        self._claim()
        if c.index == 0:
            self._seal()

    def _release(self, c: Cell) -> None:
        """A trainer stops: its claim goes back in the queue."""
        if c in self.idle:
            self.idle.remove(c)
        if c.busy_since >= 0:
            group = next(a[2] for _, _, what, a in self._heap if what == self._accumulated and a[0] is c and a[1] == c.turn)
            self.queued.appendleft(group)
            c.busy_since = -1.0
            self._claim()

    def _serving(self, c: Cell, turn: int) -> None:
        if c.turn == turn:
            self._set(c, CellEvent.SERVING)
            self._ask()

    # --- faults -------------------------------------------------------------------------------------------------------------------------------

    def _die(self, c: Cell) -> None:
        faults = self.work.faults
        assert faults is not None
        self._deaths += 1
        if self._deaths > DEATHS_MOST * len(self.cells):
            raise WorkFailed(f"no step ends: each cell died {DEATHS_MOST} times in burst {self.burst}; give a larger workload.faults.cell_mtbf_h")
        if c.phase is TRAIN:
            self._release(c)
        if c in self.joining:
            self.joining.remove(c)
        for group in c.accumulated:  # what it held is lost with it
            self.queued.append(group)
            self.trace.append((self.now, "void", c.index, group))
        self.undone += len(c.accumulated)
        c.accumulated = []
        c.life += 1
        self._set(c, CellEvent.LOST)
        self._claim()
        self.at(faults.repair_s, self._found, c)
        self._ask()

    def _found(self, c: Cell) -> None:
        assert self.work.faults is not None
        self._set(c, CellEvent.FOUND)
        self.at(self.system.to_rollout_s, self._serving, c, c.turn)
        self.at(self._random.expovariate(1 / (self.work.faults.cell_mtbf_h * 3600)), self._die, c)
        self._ask()
