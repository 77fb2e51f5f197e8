"""What goes into the buffer's machine, and what comes out.

The shell carries effects out in this order for a whole batch of inputs: `Store` and `Put`/`Drop` are made durable in one commit together
with the `Log` lines; only then `Reply` and `Deliver` leave. So whatever a peer hears is on disk, also where the machine is ahead of it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec

from gyre.wire.messages import Message, MicroStepClaimed
from gyre.wire.rows import Item, RolloutRow, Row


class Now(msgspec.Struct, frozen=True):
    """The time of an input: `mono` for deadlines, `wall` (seconds since the epoch) for records."""

    mono: float
    wall: float


class Received(msgspec.Struct, frozen=True):
    """A message from a peer. `to` is where replies go (opaque), `holder` names the peer's process and its incarnation, `versions` are the
    lowest and highest version of the sampled tokens that came with a `RolloutEnded`."""

    to: Hashable
    message: Message
    holder: str = ""
    versions: tuple[int, int] | None = None


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Input = Received | Tick


class Reply(msgspec.Struct, frozen=True):
    """Send a message; its `id` is for the shell to mint."""

    to: Hashable
    message: Message


class Deliver(msgspec.Struct, frozen=True):
    """Send a micro-step with the arrays of these trajectories, which are in the payload of `rollouts`."""

    to: Hashable
    message: MicroStepClaimed
    items: list[Item]
    rollouts: dict[str, RolloutRow]


class Store(msgspec.Struct, frozen=True):
    """Keep the arrays of the message being handled, and write their place into `row`."""

    row: RolloutRow


class Put(msgspec.Struct, frozen=True):
    """Insert or replace a row, as it is when the batch is committed."""

    row: Row


class Drop(msgspec.Struct, frozen=True):
    """Delete a row."""

    row: Row


class Prune(msgspec.Struct, frozen=True):
    """Once durable, payloads may go of executions that are out of the run or were consumed up to `step`."""

    step: int


class Log(msgspec.Struct, frozen=True):
    """A line of the event log. `proc` is the process it comes from, "" for the buffer."""

    kind: str
    fields: dict[str, Any]
    cause: str = ""
    proc: str = ""


Effect = Reply | Deliver | Store | Put | Drop | Prune | Log
