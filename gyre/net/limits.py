"""What a server takes from its clients, and the count of what it refused. The bounds are far above what 200 nodes of 8 GPUs do.

Invariants
- However many clients come and whatever they send, a server keeps notes of at most `CLIENTS` of them: the one not heard of for the longest time is
  forgotten first, and asked for its hello when it speaks again.
- A client gets `RATE` messages a second, and a burst. What is beyond is dropped unread; who is honest repeats it.
- A process keeps files for itself: with fewer than a quarter left, no connection is let in until others end. Those that stand are served on, those
  that are begun are not answered, which their kernels take for a busy network.
- A refusal is logged at its client's first, and then at every doubling of their number.

Not here: how long a frame may be, and a handshake (sockets.py), who may say what (gyre/wire/speakers.py). The frames of a message that never ends
cannot be counted: ZeroMQ holds them until the last one. So a client with a key of the run can fill its server's memory.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import select
import socket
import stat
import struct
import threading
from collections import Counter
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

CLIENTS: Final = 16_384
FILES: Final = 65_536  # of the process; each connection is one
RATE: Final = 5_000.0  # messages a second; chunks of weights alone are 40 GB in that time
BURST: Final = 20_000.0
MOST_BYTES: Final = 256 << 20  # of a message: an execution of 60 million tokens
_FILES: Final = Path("/proc/self/fd")
_LOOK_S: Final = (0.002, 0.1)  # between two looks, while it is open and while it is shut
_WAIT_MS: Final = 50
_CLOSE_S: Final = 5.0  # it looks more often than that
_NAMED: Final = 1024  # clients whose first refusal is logged
_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and its opposite, which Python does not name
_NOBODY: Final = struct.pack("HBBI", 6, 0, 0, 0)  # a packet filter of one instruction: take 0 bytes of it


class Refusals:
    """Counts by reason: key, kind, garbage, size, rate, connections."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._named: set[tuple[str, object]] = set()

    def add(self, reason: str, client: object, text: str) -> None:
        self.counts[reason] += 1
        n, who = self.counts[reason], (reason, client)
        if first := who not in self._named and len(self._named) < _NAMED:
            self._named.add(who)
        if first or n & (n - 1) == 0:
            log.warning("refused (%s, %d so far): %s", reason, n, text)

    def gauges(self) -> dict[str, float]:
        """For whoever watches. A stranger has no key of the run."""
        strangers = self.counts["key"]
        return {"refused": float(self.counts.total() - strangers), "strangers": float(strangers)}


class Clients:
    """How much each may still send, by identity; the one not heard of for longest comes first."""

    def __init__(self) -> None:
        self._notes: dict[bytes, tuple[float, float]] = {}  # allowance, heard at

    def may_send(self, identity: bytes, now: float) -> bool:
        allowance, heard_at = self._notes.pop(identity, (BURST, now))
        allowance = min(BURST, allowance + (now - heard_at) * RATE)
        self._notes[identity] = max(0.0, allowance - 1.0), now
        return allowance >= 1.0

    def forget(self) -> bytes | None:
        """The one that is too many, if there is."""
        if len(self._notes) <= CLIENTS:
            return None
        oldest = next(iter(self._notes))
        del self._notes[oldest]
        return oldest


class Door(threading.Thread):
    """The listening socket of a bound tcp address, shut while the process has too many files open. A thread of its own, since what it guards may be
    busy: it looks when somebody comes."""

    def __init__(self, address: str, refusals: Refusals) -> None:
        """Lets this process have as many files as it may, up to `FILES`."""
        super().__init__(name=f"door of {address}", daemon=True)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = max(soft, min(hard, FILES))
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        self._most, self._address, self._refusals = files - files // 4, address, refusals
        port = int(address.rpartition(":")[2])
        self._socket = next(s for fd in list(_FILES.iterdir()) if (s := _listener(int(fd.name), port)) is not None)
        self._closed = threading.Event()
        self.start()

    def run(self) -> None:
        comers, shut = select.poll(), False
        comers.register(self._socket, select.POLLIN)
        while not self._closed.wait(_LOOK_S[shut]):
            if not shut and not comers.poll(_WAIT_MS):
                continue
            files = self._files()
            if not shut and files > self._most:
                code = ctypes.create_string_buffer(_NOBODY)
                self._socket.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("HP", 1, ctypes.addressof(code)))
                self._refusals.add("connections", self._address, f"new connections to {self._address}, until others end")
            elif shut and files < self._most * 0.9:
                self._socket.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
            else:
                continue
            shut = not shut
        self._socket.close()

    def _files(self) -> int:
        try:
            with os.scandir(_FILES) as found:
                return sum(1 for _ in found)
        except OSError:  # not even for this is there one
            return self._most + 1

    def close(self) -> None:
        self._closed.set()
        self.join(_CLOSE_S)


def _listener(fd: int, port: int) -> socket.socket | None:
    """The socket behind a file, if it listens at this port. No other file is touched: to close a copy of one would drop the locks that SQLite has."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
    except OSError:
        return None  # the listing's own
    found = socket.socket(fileno=os.dup(fd))
    listens = found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if listens and found.getsockname()[1] == port:
        return found
    found.close()
    return None
