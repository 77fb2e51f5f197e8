"""What a payload record holds: the frames of a `RolloutEnded`. `gyre.trajectory.flatten` lays trajectories out of its prefix graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gyre.wire.arrays import Array
from gyre.wire.codec import Arrays, Decoder, Frame, encode
from gyre.wire.messages import RolloutEnded

_decoder: Final = Decoder(RolloutEnded)


def record(message: RolloutEnded, arrays: Mapping[str, Array]) -> list[Frame]:
    """The frames to append to a segment."""
    return encode(message, arrays)


def parse(frames: Sequence[Frame]) -> tuple[RolloutEnded, Arrays]:
    """The message and its arrays, from a record."""
    message, arrays = _decoder.decode(frames)
    assert isinstance(message, RolloutEnded)
    return message, arrays
