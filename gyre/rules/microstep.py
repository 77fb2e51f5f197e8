"""The table of a micro-step's states. Pure; the ledger of gradients in prose is in docs/architecture.md.

An accumulator belongs to (cell, incarnation, step): `void` takes every uncommitted micro-step of a lost incarnation at once.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from gyre.types import MicroStepState


class MicroStepEvent(StrEnum):
    """What moves a micro-step from state to state."""

    CLAIM = "claim"
    ACCUMULATE = "accumulate"
    VOID = "void"  # the claim's lease ran out, or its incarnation was lost
    COMMIT = "commit"  # the step of its manifest is committed
    REPLAY = "replay"  # a core restarted from a checkpoint that had not consumed it


MICROSTEP_TRANSITIONS: Final[dict[tuple[MicroStepState, MicroStepEvent], MicroStepState]] = {
    (MicroStepState.QUEUED, MicroStepEvent.CLAIM): MicroStepState.CLAIMED,
    (MicroStepState.CLAIMED, MicroStepEvent.ACCUMULATE): MicroStepState.ACCUMULATED,
    (MicroStepState.CLAIMED, MicroStepEvent.VOID): MicroStepState.QUEUED,
    (MicroStepState.ACCUMULATED, MicroStepEvent.VOID): MicroStepState.QUEUED,
    (MicroStepState.ACCUMULATED, MicroStepEvent.COMMIT): MicroStepState.COMMITTED,
    (MicroStepState.COMMITTED, MicroStepEvent.REPLAY): MicroStepState.QUEUED,
}
