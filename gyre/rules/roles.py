"""What a rule of scheduling sees and says, and the table of a cell's phases.

Pure: the coordinator and the simulator build a `View`, call the same rule and carry out its `Decision`. A rule decides one thing at a time. Whoever
asks, asks again at once after a `Move` (the cell then in its new phase) until the rule says `Stay`: so `colocate` can turn all cells
together while `elastic`, whose moves are serial, says `Stay` for as long as a cell turns to training.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

import msgspec


class CellPhase(StrEnum):
    """Where a cell is between its two roles."""

    ROLLOUT = "rollout"
    TO_TRAIN = "to_train"  # admission stopped, requests given back, engine asleep, trainer pulling
    TRAIN = "train"
    TO_ROLLOUT = "to_rollout"  # trainer leaving, engine waking, policy pulled and acknowledged
    LOST = "lost"


class CellEvent(StrEnum):
    """What moves a cell from phase to phase."""

    ORDER_TRAIN = "order_train"  # a rule's Move
    JOINED = "joined"  # its trainer joined the open step
    ORDER_ROLLOUT = "order_rollout"  # a rule's Move, or a turn to training given up
    SERVING = "serving"  # its engine acknowledged the current policy
    LOST = "lost"  # presumed dead
    FOUND = "found"  # said hello again: it starts as one that wakes


CELL_TRANSITIONS: Final[dict[tuple[CellPhase, CellEvent], CellPhase]] = {
    (CellPhase.ROLLOUT, CellEvent.ORDER_TRAIN): CellPhase.TO_TRAIN,
    (CellPhase.ROLLOUT, CellEvent.LOST): CellPhase.LOST,
    (CellPhase.TO_TRAIN, CellEvent.JOINED): CellPhase.TRAIN,
    (CellPhase.TO_TRAIN, CellEvent.ORDER_ROLLOUT): CellPhase.TO_ROLLOUT,
    (CellPhase.TO_TRAIN, CellEvent.LOST): CellPhase.LOST,
    (CellPhase.TRAIN, CellEvent.ORDER_ROLLOUT): CellPhase.TO_ROLLOUT,
    (CellPhase.TRAIN, CellEvent.LOST): CellPhase.LOST,
    (CellPhase.TO_ROLLOUT, CellEvent.SERVING): CellPhase.ROLLOUT,
    (CellPhase.TO_ROLLOUT, CellEvent.ORDER_TRAIN): CellPhase.TO_TRAIN,
    (CellPhase.TO_ROLLOUT, CellEvent.LOST): CellPhase.LOST,
    (CellPhase.LOST, CellEvent.FOUND): CellPhase.TO_ROLLOUT,
}
"""A pair that is not here cannot happen: `turned` raises."""


def turned(phase: CellPhase, event: CellEvent) -> CellPhase:
    """The phase after `event`. Raises ValueError naming both where the table has no such transition."""
    try:
        return CELL_TRANSITIONS[phase, event]
    except KeyError:
        raise ValueError(f"a cell in phase {phase} knows no {event}") from None


class CellView(msgspec.Struct, frozen=True):
    """One cell. `burst` is the burst for which it last turned to training (-1: never). A `fixed` cell is counted and never moved."""

    name: str
    phase: CellPhase
    capacity: int  # executions that it holds as a rollout cell
    burst: int = -1
    fixed: bool = False


class GroupView(msgspec.Struct, frozen=True):
    """A group with unfinished executions: how many, and the mean of their ages. An execution's age is the seconds that it has been served, in
    seconds of an unloaded engine; one that is queued has age 0."""

    unfinished: int
    age_s: float


class Pace(msgspec.Struct, frozen=True):
    """How executions share the rollout cells: a token takes t0_s + t1_s·(decoding on the cell), beside `tool_s` of an execution's time, which
    does not depend on them. `tokens` and `tool_s` are means of an execution."""

    t0_s: float
    t1_s: float
    tokens: float
    tool_s: float


class Known(msgspec.Struct, frozen=True):
    """What is known beside the counters: the executions in flight, and costs as configured or measured. Times in seconds."""

    groups: tuple[GroupView, ...]  # unfinished, oldest first
    durations_s: tuple[float, ...]  # ages at which executions ended, sorted
    group_durations_s: tuple[float, ...]  # ages at which the last execution of a group ended, sorted
    train_s: float  # one cell, one group
    to_train_s: float
    update_s: float  # per step
    publish_s: float  # per burst
    trained: float = 0.0  # groups of the open step whose training work is done, fractions included
    pace: Pace | None = None  # None: an execution holds a slot, of which a cell has `capacity`


class View(msgspec.Struct, frozen=True):
    """What is known when a rule is asked. `cells` are in their fixed order, the core first."""

    now: float
    cells: tuple[CellView, ...]
    water_level: int  # w: executions admitted and without a terminal outcome
    burst: int  # the burst under way: publications so far, the first included
    steps_left: int  # of this burst, not committed; 0 between its last commit and the publication
    ready: int  # groups ready or taken by the open step, and not in a committed one
    groups_per_step: int
    steps_per_burst: int
    rollouts_per_group: int = 0  # N; 0 where not known
    admitting: int = 0  # executions that the next publication will admit (boundary dispatch); 0 where not known
    quota: int = 0  # continuous dispatch: groups that may be admitted and not yet taken by a step; 0 with boundary dispatch
    known: Known | None = None  # `lookahead` asks for it; the other rules do not look


class Move(msgspec.Struct, frozen=True):
    """Turn `cell` to `to` (ROLLOUT or TRAIN)."""

    cell: str
    to: CellPhase
    reason: str


class Stay(msgspec.Struct, frozen=True):
    """Turn nothing now.

    `above` and `until` spare whoever asks: as long as nothing happens but executions that end, the answer stays while the water level is above
    `above` (if given) and before `until` (if given). Without either it may change at any time. Asking earlier is always right.
    """

    reason: str
    above: int | None = None
    until: float | None = None


Decision = Move | Stay
Rule = Callable[[View], Decision]
