"""What a sandbox writes: read as it comes, so that it is never blocked for long, and kept up to a cap.

Invariant: memory is bounded by the cap whatever is written, and a flood takes a small, fixed share of the event loop.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

PIPE_BYTES: Final = 1 << 20
THROTTLE_S: Final = 0.005  # between reads of output that is not kept any more


class Capped:
    """Output as it arrives: the first and the last bytes of it, at most `cap` together, and how many there were."""

    def __init__(self, cap: int) -> None:
        self.total = 0
        self._head_cap = cap // 2
        self._tail_cap = cap - self._head_cap
        self._head = bytearray()
        self._tail = bytearray()

    @property
    def full(self) -> bool:
        return self.total > self._head_cap + self._tail_cap

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_cap - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data[-self._tail_cap :]
        if len(self._tail) > 2 * self._tail_cap:
            del self._tail[: -self._tail_cap]

    def value(self) -> bytes:
        tail = bytes(self._tail[-self._tail_cap :])
        left_out = self.total - len(self._head) - len(tail)
        middle = f"\n[… {left_out} bytes left out …]\n".encode() if left_out else b""
        return bytes(self._head) + middle + tail


class Frames:
    """Undoes how a container engine frames the output of what it attached: eight bytes of header, the last four of them a length."""

    def __init__(self) -> None:
        self._header = b""
        self._left = 0

    def undo(self, data: bytes) -> Iterator[bytes]:
        """The content of what arrived, in pieces."""
        while data:
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                self._left -= len(piece)
                yield piece
                continue
            need = 8 - len(self._header)
            self._header, data = self._header + data[:need], data[need:]
            if len(self._header) == 8:
                self._left, self._header = int.from_bytes(self._header[4:]), b""


class Reader:
    """Reads a pipe from an event loop; owns its descriptor."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, cap: int) -> None:
        self.output = Capped(cap)
        self._loop = loop
        self._fd = fd
        self._closed = False
        os.set_blocking(fd, False)
        with suppress(OSError):  # a user may only have so many large pipes: then a flood is slower
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        loop.add_reader(fd, self._readable)

    def _readable(self) -> None:
        if not self._read():
            self._close()
        elif self.output.full:
            self._loop.remove_reader(self._fd)
            self._loop.call_later(THROTTLE_S, self._resume)

    def _read(self) -> bool:
        """False at the end."""
        try:
            data = os.read(self._fd, PIPE_BYTES if self.output.full else 65536)
        except BlockingIOError:
            return True
        self.output.add(data)
        return bool(data)

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._fd, self._readable)

    def finish(self) -> bytes:
        """All writers are dead, or are not waited for: read what is in the pipe and close it."""
        for _ in range(64):
            before = self.output.total
            if self._closed or not self._read() or self.output.total == before:
                break
        self._close()
        return self.output.value()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
