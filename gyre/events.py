"""The event log of a run: `events.jsonl`, one JSON object per line, written by gyre-buffer alone.

Invariants
- `seq` grows by one from line to line, across restarts. `t_wall` is seconds since the epoch (UTC), `t_mono` seconds on the writer's monotonic clock.
- A line is whole or, at the very end, torn by a kill: readers leave a torn tail alone, the writer cuts it off when it starts again.
- Lines that were durable in the ledger but not yet in the file are given to `replay` at start, so that none is lost and none is there twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from gyre.errors import UsageError

SCHEMA: Final = "gyre.event/1"
_TAIL_BYTES: Final = 1 << 20

log = logging.getLogger(__name__)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line. What the fields hold depends on `kind`."""

    schema: str = SCHEMA
    seq: int
    t_wall: float
    t_mono: float
    proc: str  # the process it came from
    cause: str  # the id of the message that led to it
    kind: str
    fields: dict[str, Any] = {}


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Event)


def encode(event: Event) -> str:
    """The line of an event, without its newline."""
    return _encoder.encode(event).decode()


def decode(line: str) -> Event:
    """The event of a line. Raises `msgspec.MsgspecError`."""
    return _decoder.decode(line)


class EventWriter:
    """Appends lines; knows the last sequence number in the file. Raises `UsageError` when the last line is no event."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.last_seq = self._mend()

    def _mend(self) -> int:
        """Cut off a torn last line; the sequence number of the last whole one, -1 if there is none."""
        size = os.fstat(self._fd).st_size
        block = _TAIL_BYTES
        while True:
            start = max(0, size - block)
            tail = os.pread(self._fd, size - start, start)
            end = tail.rfind(b"\n") + 1
            previous = tail.rfind(b"\n", 0, end - 1) if end else -1
            if start == 0 or (end and previous >= 0):
                break
            block *= 2
        if end < len(tail):
            os.ftruncate(self._fd, start + end)
        try:
            return _decoder.decode(tail[previous + 1 : end]).seq if end else -1
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            os.close(self._fd)
            raise UsageError(str(self._path), f"its last line is damaged ({e})", "cut it off, or restore the file from a copy") from None

    def replay(self, lines: Iterable[tuple[int, str]]) -> None:
        """Append those of (seq, line) that the file lacks."""
        self.write([(seq, line) for seq, line in lines if seq > self.last_seq])

    def write(self, lines: list[tuple[int, str]]) -> None:
        """Append (seq, line) pairs, in order."""
        if not lines:
            return
        data = memoryview("".join(f"{line}\n" for _, line in lines).encode())
        while data:
            data = data[os.write(self._fd, data) :]
        self.last_seq = lines[-1][0]

    def sync(self) -> None:
        """All lines are on disk when this returns."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class EventReader:
    """Reads whole lines from the start, and again those that came since."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> Iterator[bytes]:
        """New whole lines, without newlines. A missing file has none yet."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line[:-1]

    def events(self) -> Iterator[Event]:
        """New events. Lines that are none (a damaged disk, a stray hand) are left out, with a warning that counts them."""
        damaged, first = 0, ""
        for line in self.lines():
            try:
                event = _decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as e:
                damaged, first = damaged + 1, first or str(e)
                continue
            yield event
        if damaged:
            log.warning("%s: left out %d damaged lines: %s", self._path, damaged, first)
