"""The table of a micro-step's states, which the buffer's machine follows. Pure; the ledger of gradients in prose is in docs/architecture.md.

An accumulator belongs to (cell, incarnation, step): `void` takes every uncommitted micro-step of a lost incarnation at once. A core that starts from
an older checkpoint has its groups packed anew, into other micro-steps.
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


MICROSTEP_TRANSITIONS: Final[dict[tuple[MicroStepState, MicroStepEvent], MicroStepState]] = {
    (MicroStepState.QUEUED, MicroStepEvent.CLAIM): MicroStepState.CLAIMED,
    (MicroStepState.CLAIMED, MicroStepEvent.ACCUMULATE): MicroStepState.ACCUMULATED,
    (MicroStepState.CLAIMED, MicroStepEvent.VOID): MicroStepState.QUEUED,
    (MicroStepState.ACCUMULATED, MicroStepEvent.VOID): MicroStepState.QUEUED,
    (MicroStepState.ACCUMULATED, MicroStepEvent.COMMIT): MicroStepState.COMMITTED,
}
"""A pair that is not here cannot happen."""
