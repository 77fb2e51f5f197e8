"""What a backend tells its warden, and what that reports: MessagePack over a socket between two processes of one gyre-sandbox.

This is no wire format: both sides are always of the same version.
"""

from __future__ import annotations

from typing import Final

import msgspec

MAX_MESSAGE: Final = 160_000  # below the smallest usual limit of a socket's buffer


class Mapped(msgspec.Struct, tag=True):
    """The owner has written the id maps."""


class Setup(msgspec.Struct, tag=True):
    """The first order. `scratch` is an empty directory to mount on."""

    scratch: str
    name: str
    bwrap: str
    seccomp: bytes
    python: list[tuple[str, str]]  # files for scratch/python: (source, relative target)
    python_links: list[tuple[str, str]]
    python_cfg: str
    root: bool  # sandboxes can have uids of their own
    own_users: bool  # in a user namespace of its own


class MakeWorkspace(msgspec.Struct, tag=True):
    """A sized tmpfs at `path` with a copy of `source` in `path`/work."""

    id: int
    path: str
    uid: int
    size_mb: int
    source: str | None


class DropWorkspace(msgspec.Struct, tag=True):
    id: int
    path: str


class Launch(msgspec.Struct, tag=True):
    """Start bwrap. Its output goes to the descriptor that comes with the message."""

    id: int
    slot: int
    uid: int
    args: list[str]  # bwrap's, without the command
    command: list[str]
    work: str  # the workspace's directory; made passable again, whatever the last sandbox did to it
    path: str  # mount point of the run's own tmpfs, "" for none
    copies: list[tuple[str, str]]
    collect: list[str]
    timeout_s: float
    memory_mb: int
    pids: int


class Kill(msgspec.Struct, tag=True):
    id: int


class Unshared(msgspec.Struct, tag=True):
    """In new namespaces; if there is a new user namespace too, waiting for `Mapped`."""

    own_users: bool


class Ready(msgspec.Struct, tag=True):
    notes: list[str]


class Failed(msgspec.Struct, tag=True):
    """The warden cannot work here."""

    reason: str


class Done(msgspec.Struct, tag=True):
    """A workspace was made or dropped, or not."""

    id: int
    error: str = ""
    task_at_fault: bool = False


class Exited(msgspec.Struct, tag=True):
    """A sandbox ended; `status` is None if its command was never started."""

    id: int
    status: int | None
    timed_out: bool
    oom: bool
    seconds: float
    error: str
    files: dict[str, bytes]


Order = Mapped | Setup | MakeWorkspace | DropWorkspace | Launch | Kill
Report = Unshared | Ready | Failed | Done | Exited
