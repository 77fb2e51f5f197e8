"""Names of what a process leaves behind when it is killed: cgroups, mount points, environment marks.

A name contains its owner's pid and start time, so that a later life can tell for sure that the owner is dead, and clean up. It never touches what
belongs to a living process.
"""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from gyre.sandbox.backends.base import InfraSetupFailed

PREFIX: Final = "gyre-sandbox-"
_NAME: Final = re.compile(re.escape(PREFIX) + r"(\d+)-(\d+)(-\d+)?")


def own_name(number: int) -> str:
    """A name for what the calling process makes; `number` tells several of them apart."""
    return f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}-{number}"


def start_time(pid: int) -> int:
    """When that process started, in clock ticks since boot; 0 if it does not live (a zombie does not) or /proc cannot tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def is_orphaned(name: str) -> bool:
    """Whether `name` was made by `own_name` in a process that is gone."""
    match = _NAME.fullmatch(name)
    return match is not None and start_time(int(match[1])) != int(match[2])


def orphaned_homes() -> list[Path]:
    """What `make_home` made in processes that are gone."""
    return [path for path in Path(tempfile.gettempdir()).glob(PREFIX + "*") if is_orphaned(path.name)]


def make_home() -> Path:
    """A private temporary directory; its name is the backend's."""
    for n in range(1000):
        path = Path(tempfile.gettempdir(), own_name(n))
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
    raise InfraSetupFailed(f"no directory can be made in {tempfile.gettempdir()}")
