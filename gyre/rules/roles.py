"""What a rule of scheduling sees and says. Pure: the coordinator and the simulator build a `View`, call the same rule and carry out its `Decision`.

A rule is a function `View -> Decision`. It decides one thing at a time: moves are serial, so while a cell turns, a rule stays.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec


class CellPhase(StrEnum):
    """Where a cell is between its two roles."""

    ROLLOUT = "rollout"
    TO_TRAIN = "to_train"  # admission stopped, requests given back, engine asleep, trainer pulling
    TRAIN = "train"
    TO_ROLLOUT = "to_rollout"  # trainer leaving, engine waking, policy pulled and acknowledged
    LOST = "lost"


class CellView(msgspec.Struct, frozen=True):
    """One cell. `burst` is the burst for which it last turned to training (-1: never)."""

    name: str
    phase: CellPhase
    capacity: int  # executions that it holds as a rollout cell
    burst: int = -1


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


class Move(msgspec.Struct, frozen=True):
    """Turn `cell` to `to` (ROLLOUT or TRAIN)."""

    cell: str
    to: CellPhase
    reason: str


class Stay(msgspec.Struct, frozen=True):
    """Turn nothing now."""

    reason: str


Decision = Move | Stay
Rule = Callable[[View], Decision]
