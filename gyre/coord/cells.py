"""A cell as the coordinator sees it, and what is said to and by `roles.Roles`. Plain data."""

from __future__ import annotations

from typing import Any

import msgspec

from gyre.rules.roles import CellPhase
from gyre.wire.messages import Route


class Cell(msgspec.Struct, kw_only=True):
    """A cell of hosts.txt. Without a trainer or an engine it is fixed in the other's role."""

    name: str
    trainer: str | None  # names of its processes
    engine: str | None
    core_address: str = ""  # where its trainer listens
    address: str = ""  # where its engine does
    capacity: int = 1
    phase: CellPhase = CellPhase.TO_ROLLOUT
    burst: int = -1
    epoch: int = 0
    since: float = 0.0  # of the phase, or of the last complaint

    @property
    def fixed(self) -> bool:
        return self.trainer is None or self.engine is None

    @property
    def parts(self) -> list[str]:
        return [p for p in (self.trainer, self.engine) if p is not None]


class Level(msgspec.Struct, frozen=True):
    """What the buffer's counters say; the fields are `View`'s."""

    water_level: int
    burst: int
    steps_left: int
    ready: int
    admitting: int = 0


# events
class Heard(msgspec.Struct, frozen=True):
    """A status of a cell's process."""

    name: str
    role: str
    epoch: int


class Followed(msgspec.Struct, frozen=True):
    """A sandbox follows the route table of this epoch. `first`: so it said when it was first heard, hence it may be another coordinator's."""

    epoch: int
    first: bool = False


class Lost(msgspec.Struct, frozen=True):
    name: str
    reason: str


class Done(msgspec.Struct, frozen=True):
    """A trainer ended because the run's steps are done."""

    name: str


class GivenUp(msgspec.Struct, frozen=True):
    """This process will not be started again."""

    name: str


class Counted(msgspec.Struct, frozen=True):
    level: Level


class Joined(msgspec.Struct, frozen=True):
    """A cell was added to the hosts file."""

    cell: Cell


class Retired(msgspec.Struct, frozen=True):
    """A cell was taken out of the hosts file: it gives its requests back, and its processes can be stopped."""

    cell: str


class Tick(msgspec.Struct, frozen=True):
    pass


Event = Heard | Followed | Lost | Done | GivenUp | Counted | Joined | Retired | Tick


# effects
class SendRole(msgspec.Struct, frozen=True):
    name: str
    role: str
    epoch: int
    core: str
    core_cell: str


class SendRoutes(msgspec.Struct, frozen=True):
    epoch: int
    engines: tuple[Route, ...]


class Report(msgspec.Struct, frozen=True):
    """An event `role` for the run's log."""

    fields: dict[str, Any]


class Complain(msgspec.Struct, frozen=True):
    text: str


class Retire(msgspec.Struct, frozen=True):
    """Nothing is in flight at these processes any more."""

    names: tuple[str, ...]


Effect = SendRole | SendRoutes | Report | Complain | Retire
