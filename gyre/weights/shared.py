"""Bytes that another process of the same host may map: anonymous shared memory (Linux: a file of tmpfs that has no name).

Invariants
- The memory goes with the last who holds it: nothing has a name that a killed process could leave behind.
- Who maps it keeps it whole after its maker let go, so a reader needs no lease; what a reader writes is its own (copy on write).
- Nothing else is opened, whatever path a message names.

Not here: who may read (processes of the same user that see each other in /proc; others pull chunks).
"""

from __future__ import annotations

import mmap
import os
import re
import weakref
from pathlib import Path
from typing import Final

_NAME: Final = "gyre-weights"
_PLACE: Final = re.compile(r"/proc/\d+/fd/\d+", re.A)


class Shared(mmap.mmap):
    """`nbytes` of shared memory, writable here. `path` is where others open it while this lives."""

    path: str

    def __new__(cls, nbytes: int) -> Shared:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, max(1, nbytes))
            made = super().__new__(cls, fd, max(1, nbytes))
        except BaseException:
            os.close(fd)
            raise
        made.path = f"/proc/{os.getpid()}/fd/{fd}"
        weakref.finalize(made, os.close, fd)
        return made


def attach(path: str, nbytes: int) -> memoryview | None:
    """The bytes at `path`, or None where they cannot be had (another host, another namespace, gone, no memory of gyre's)."""
    try:
        if not _PLACE.fullmatch(path) or not str(Path(path).readlink()).startswith(f"/memfd:{_NAME}"):
            return None
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # what is another by now must not block
    except OSError:
        return None
    try:
        return memoryview(mmap.mmap(fd, max(1, nbytes), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))[:nbytes]
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def host_id() -> str:
    """Names this boot of this kernel; "" where it cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
