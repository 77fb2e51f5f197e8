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
def claimed(run_dir: Path, bind: str) -> Iterator[None]:
    """Be the one coordinator of a run meanwhile, listening at `bind`. Raises `Busy`, naming the holder."""
    fd = os.open(run_dir / PID, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _lock(fd):
            holder = os.read(fd, 300).decode(errors="replace").strip()
            raise Busy(f"{run_dir}: another gyre-coord (process {holder}) has this run; stop it or give another --run")
        os.truncate(fd, 0)
        os.write(fd, f"{os.getpid()} on {socket.gethostname()} at {bind}\n".encode())
        yield  # the file stays: were it removed, one who opened it before and one who made it anew would both hold a lock
    finally:
        os.close(fd)


def holder(run_dir: Path) -> int:
    """The process that coordinates a run on this host now. Raises `UsageError` if there is none."""
    if (words := _held(run_dir)) is None:
        raise UsageError("--reload", f"{run_dir} has no running coordinator on this host", "name its run directory with --run")
    return int(words.split()[0])


def address(run_dir: Path) -> str | None:
    """Where it listens; None if there is none."""
    words = _held(run_dir)
    return words.rpartition(" at ")[2].strip() if words is not None else None


def _held(run_dir: Path) -> str | None:
    try:
        with (run_dir / PID).open("r+") as file:
            if not _lock(file.fileno()):
                return file.read() or None
    except (OSError, UnicodeDecodeError):
        pass
    return None


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
