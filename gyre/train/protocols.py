"""What the trainer's loops stand on: who keeps the ledger, who sums accumulators, who lends weights, who computes.

`loop.Loop` (the core) and `satellite.Satellite` take these and nothing else of the world: no thread, socket, clock but the event loop's, or random
number. So they run unchanged over real processes and in a deterministic world with virtual time.

They also take `ledger.Ledger`, `peers.Peers` and `corelink.CoreLink` as they are: these have no transport of their own, but are given a `Requester`,
or a function that sends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gyre.train.metrics import Tally
from gyre.types import Version
from gyre.wire.messages import Member

Compute = Callable[..., Awaitable[Any]]
"""`await compute(function, *args)`: runs it where the cell computes, one call at a time in the order of asking."""


class Voided(Exception):
    """This cell's part is refused as stale: its incarnation was voided, its step is over or its term is. Zero, rejoin as a new incarnation."""


class LeftLineage(Exception):
    """The buffer went back behind this checkpoint since it was written: an older one may do."""


class Lost(Exception):
    """A reduction failed. `cells` are those that did not come back from it, to be voided; empty: all did, the same manifest may be tried again."""

    def __init__(self, cells: list[Member], why: str) -> None:
        super().__init__(why)
        self.cells = cells


class CollectiveFailed(Exception):
    """A reduction or a broadcast did not complete for this member; its accumulator is as before."""


class Update(NamedTuple):
    """What an update did. Without one (nothing to learn from, or a gradient that is zero or not finite) weights and moments are as before."""

    updated: bool
    grad_norm: float | None  # before clipping
    lr: float


@dataclass(frozen=True, slots=True)
class Claimed:
    """A micro-step to accumulate; `data` is what the learner takes."""

    micro_step_id: str
    data: Any


@dataclass(frozen=True, slots=True)
class Group:
    """A group of cells for one collective: who has the same `name` meets at `store`. Rank 0 is the core."""

    name: str
    store: str
    rank: int
    size: int


class Learning(Protocol):
    """A policy with its accumulator; in the core with the optimizer too. Called through `Compute` only, but for `tally`."""

    tally: Tally
    total_steps: int

    def zero(self) -> None:
        """Forget what was accumulated, and what was reduced."""

    def accumulate(self, data: Any, version: int) -> None:
        """Add a micro-step's gradient of the objective's numerator. `version` is that of the weights."""

    def update(self, step: int, executions: int, trainable: int) -> Update:
        """Divide by `executions` what was reduced (else what was accumulated), clip, step. `trainable`: the whole step's trainable tokens."""

    def sleep(self) -> None:
        """Leave the device: weights, accumulator and optimizer go to the host. Nothing changes in value."""

    def wake(self) -> None:
        """Come back to the device."""


class Publisher(Protocol):
    """How weights become the policy."""

    async def lend(self, version: Version) -> None:
        """Copy the weights and offer them to engines; afterwards they may change."""

    async def acknowledged(self, version: Version) -> list[str]:
        """Wait for the engines that load it. Returns their cells."""


@dataclass(frozen=True, slots=True)
class Reduce:
    """Take part in the reduction now."""

    attempt: int
    group: Group
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The step is committed. The new weights come by `group`, None: join again."""

    version: Version
    group: Group | None
    deadline_s: float
    finished: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing yet: claim again, then ask again. `idle`: the step cannot end now, its groups are missing or the core rolls out."""

    idle: bool


class Finished(Exception):
    """The run's last step is committed."""


class Collective(Protocol):
    """One member's part in what cells do together."""

    async def reduce(self, group: Group, deadline_s: float) -> None:
        """Sum all members' accumulators into the core's learner, in fp32; every accumulator stays as it is. Raises `CollectiveFailed`."""

    async def broadcast(self, group: Group, deadline_s: float) -> None:
        """Copy the core's weights into every member's. Raises `CollectiveFailed`: a member's weights may then be torn, and it must join again."""


class Duty(Protocol):
    """Is this cell to train now? The coordinator says; without one, always."""

    @property
    def trains(self) -> bool: ...

    async def to_train(self) -> None:
        """Wait until it is to train."""

    def phase(self, role: str) -> None:
        """Report idle | joining | training | leaving."""
