"""Messages to frames and back.

Frame 0 is the MessagePack map, one raw frame follows for each name in the message class's `ARRAYS`, in that order. Whatever cannot be decoded is a
`WireError`: the sender's fault, which the receiver logs and answers or drops, and never a crash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gyre.errors import GyreError
from gyre.wire.arrays import Array, raw, view
from gyre.wire.messages import Message


class WireError(GyreError):
    """Bytes that are no message of this direction."""


Frame = bytes | memoryview
Arrays = dict[str, memoryview]

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message, arrays: Mapping[str, Array] | None = None) -> list[Frame]:
    """Frames of a message. `arrays` must hold exactly the names in its class's `ARRAYS` (a bug otherwise)."""
    frames: list[Frame] = [_encoder.encode(message)]
    expected = type(message).ARRAYS
    given = arrays or {}
    if given.keys() != expected.keys():
        raise TypeError(f"{type(message).__name__} takes arrays {sorted(expected)}, got {sorted(given)}")
    frames.extend(raw(given[name], dtype) for name, dtype in expected.items())
    return frames


class Decoder:
    """Decodes the messages of one direction (a union of `DIRECTIONS`)."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(union)

    def decode(self, frames: Sequence[Frame]) -> tuple[Message, Arrays]:
        """The message with its arrays. Raises `WireError`."""
        if not frames:
            raise WireError("an empty message")
        try:
            message: Message = self._decoder.decode(frames[0])
            expected = type(message).ARRAYS
            if len(frames) - 1 != len(expected):
                raise WireError(f"{type(message).__name__} comes with {len(expected)} arrays, got {len(frames) - 1}")
            return message, {name: view(frame, dtype) for (name, dtype), frame in zip(expected.items(), frames[1:], strict=True)}
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as e:
            raise WireError(f"not a message of this direction: {e}") from None
