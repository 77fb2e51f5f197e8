"""What a payload record holds: the frames of a `RolloutEnded`. `gyre.trajectory.flatten` lays trajectories out of its prefix graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gyre.wire.codec import Arrays, Decoder, Frame
from gyre.wire.messages import RolloutEnded

_decoder: Final = Decoder(RolloutEnded)


def parse(frames: Sequence[Frame]) -> tuple[RolloutEnded, Arrays]:
    """The message and its arrays, from a record."""
    message, arrays = _decoder.decode(frames)
    assert isinstance(message, RolloutEnded)
    return message, arrays
