"""What happened in a world, for those who judge it: messages, the durable event log, snapshots, and every sight of weights.

Invariant: recorded from outside. Nothing here is asked of a machine or a loop; an observation is of messages sent, rows on disk, or numbers
in a learner.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gyre.types import RolloutState
from gyre.wire.messages import Counters, Message
from theorem.buffer import Disk
from theorem.feeder import Execution

Vector = npt.NDArray[np.float64]


class Alone(Protocol):
    """One cell alone: the state it begins with, its weights, and a step over graded executions by group, with the step's gradient."""

    def begin(self) -> Any: ...

    def weights(self, state: Any) -> Any: ...

    def step(self, state: Any, groups: list[list[Execution]], step: int) -> tuple[Any, Any]: ...


@dataclass(frozen=True)
class Said:
    """A message as it was sent; whether it was heard is another matter."""

    at_s: float
    sender: str
    to: str
    message: Message


@dataclass(frozen=True)
class Sight:
    """Weights seen somewhere under the name of a version: lent, joined with, trained with, broadcast, saved."""

    at_s: float
    where: str
    term: int
    step: int
    weights: Vector


@dataclass(frozen=True)
class Update:
    """An optimizer step as the learner made it: its gradient before clipping, the weights after, how often each trajectory was in the sum."""

    at_s: float
    process: str
    term: int
    step: int
    gradient: Vector
    weights: Vector
    counts: Counter[str]


@dataclass(frozen=True)
class Snapshot:
    """The buffer's counters beside a recount of the rows that were on its disk."""

    at_s: float
    counters: Counters
    rows: Counter[RolloutState]


@dataclass(frozen=True)
class Held:
    """A process takes its cell's device, or leaves it: by itself, or by its end."""

    at_s: float
    cell: str
    process: str
    held: bool


@dataclass(frozen=True)
class Drawn:
    """A token that an engine sampled: draw number `draw` of a request."""

    at_s: float
    process: str
    request: str
    draw: int
    term: int
    step: int


@dataclass
class Chronicle:
    """One world's history. `trouble` and `rewards` are what the sandboxes draw with, `tolerance` is relative to one cell's gradients and weights."""

    seed: int
    trouble: float
    rewards: int
    alone: Alone
    tolerance: float
    disk: Disk
    said: list[Said] = field(default_factory=list)
    sights: list[Sight] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    ends: dict[str, float] = field(default_factory=dict)  # of processes, when they did not live any more
    verdict: tuple[float, int, str] | None = None  # of the coordinator: when, exit code, reason
    quiet_at_s: float = 0.0  # the last fault is over
    odd: list[str] = field(default_factory=list)  # what a process of the world saw and should not have

    def digest(self) -> str:
        """Of all that happened, ids aside: equal for equal seeds, whatever the machine, the process or the order of hashes."""
        h = hashlib.blake2b(digest_size=16)
        for s in self.said:
            h.update(f"{s.at_s!r} {s.sender} {s.to} {type(s.message).__name__}\n".encode())
        for e in self.disk.events:
            h.update(f"{e.at_s!r} {e.kind} {_plain(e.fields)}\n".encode())
        for u in self.updates:
            h.update(f"{u.at_s!r} {u.process} {u.term} {u.step} {sorted(u.counts.items())}\n".encode() + u.weights.tobytes())
        for g in self.sights:
            h.update(f"{g.at_s!r} {g.where} {g.term} {g.step}\n".encode() + g.weights.tobytes())
        return h.hexdigest()


def _plain(fields: dict[str, Any]) -> str:
    """Fields without what depends on the machine: the seconds that metrics measure."""
    kept = {k: v for k, v in fields.items() if k not in ("metrics", "hash", "waits", "seconds")}
    return repr(sorted(kept.items()))
