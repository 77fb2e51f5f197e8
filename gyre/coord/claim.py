"""Who coordinates a run: whoever holds the lock on coord.pid in its directory, wherever the file's words come from."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gyre.errors import Busy, UsageError

PID: Final = "coord.pid"


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Be the one coordinator of a run meanwhile. Raises `Busy`, naming the holder."""
    fd = os.open(run_dir / PID, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _lock(fd):
            holder = os.read(fd, 100).decode(errors="replace").strip()
            raise Busy(f"{run_dir}: another gyre-coord (process {holder}) has this run; stop it or give another --run")
        os.truncate(fd, 0)
        os.write(fd, f"{os.getpid()} on {socket.gethostname()}\n".encode())
        yield  # the file stays: were it removed, one who opened it before and one who made it anew would both hold a lock
    finally:
        os.close(fd)


def holder(run_dir: Path) -> int:
    """The process that coordinates a run on this host now. Raises `UsageError` if there is none."""
    try:
        with (run_dir / PID).open("r+") as file:
            if not _lock(file.fileno()):
                return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        pass
    raise UsageError("--reload", f"{run_dir} has no running coordinator on this host", "name its run directory with --run")


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
