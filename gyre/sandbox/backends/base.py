"""What a backend is: it makes workspaces, and runs one command at a time in a sandbox around one of them.

Invariants every backend keeps (tests/sandbox/test_contract.py)
- One sandbox is one command. When `run` returns, or is cancelled, every process of that sandbox is dead.
- A workspace outlives the sandboxes that used it: the agent's, then, fresh, the verifier's.
- `/logs/verifier` is a new, empty directory in each run; the small regular files asked for by `Spec.collect` come back in `Exit.files`.
  Links, directories, devices and large files do not: nothing an agent made is ever followed.
- A run has a deadline, its output a cap. What a backend cannot enforce on this machine is in `notes` once it has started.

docs/sandbox.md has the table of what is contained where. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec

from gyre.errors import WorkFailed

WORK: Final = "/work"
TESTS: Final = "/tests"
SOLUTION: Final = "/solution"
HARNESS: Final = "/harness"
LOGS: Final = "/logs/verifier"
INSTRUCTION: Final = "/run/gyre/instruction.md"
MODEL_SOCKET: Final = "/run/gyre/model.sock"

PLACES: Final[dict[str, str]] = {
    TESTS: "GYRE_TESTS",
    SOLUTION: "GYRE_SOLUTION",
    HARNESS: "GYRE_HARNESS",
    LOGS: "GYRE_LOGS",
    INSTRUCTION: "GYRE_INSTRUCTION",
    MODEL_SOCKET: "GYRE_MODEL_SOCKET",
}
"""Where things are in a sandbox, and the environment variable that says so: a backend without mounts puts the true path there.
The workspace itself is `GYRE_WORK`."""

MAX_COLLECT_BYTES: Final = 65536


class SandboxLost(WorkFailed):
    """The sandbox died for no reason of its own (the machinery around it did)."""


class TaskSetupFailed(WorkFailed):
    """A workspace cannot be made, and the task is at fault: its files are too large, or of a kind that cannot be copied."""


class InfraSetupFailed(WorkFailed):
    """A workspace or a sandbox cannot be made, and this machine is at fault."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one sandbox may use; `memory_mb` and `pids` are over all its processes together."""

    memory_mb: int = 1024
    pids: int = 128
    workspace_mb: int = 256
    tmp_mb: int = 64
    output_kb: int = 1024
    timeout_s: float = 600.0
    cpus: float = 0.0  # processors' worth of time, for backends that can limit it; 0: no limit


class Bind(msgspec.Struct, frozen=True):
    """`source`, a file, directory or socket of the host, is seen at `target`."""

    source: str
    target: str
    readonly: bool = True


class Image(msgspec.Struct, frozen=True):
    """The file system that a task asks for, for backends that have images. A name wins; neither: the backend's own default."""

    name: str = ""
    context: str = ""  # a directory with a Dockerfile, to build it from
    timeout_s: float = 600.0  # to build or fetch it, once


class Workspace(msgspec.Struct, frozen=True):
    """A handle on a workspace. `path` is the backend's own business: only the process backend's exists on the host."""

    key: str
    place: str  # where sandboxes see it
    path: str
    slot: int


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox: a command in a workspace."""

    workspace: Workspace
    argv: Sequence[str]
    limits: Limits
    env: Mapping[str, str] = {}
    binds: Sequence[Bind] = ()
    collect: Sequence[str] = ()  # names of files in /logs/verifier to return


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a sandbox ended. `status` is 128 + n after signal n; killed at the deadline it is 137 and `timed_out`."""

    status: int
    timed_out: bool
    oom: bool  # the memory limit killed a process; container engines do not always say so, then it is a death by signal 9 like any other
    output: bytes  # standard output and error, the middle left out beyond the cap
    output_bytes: int  # before the cap
    seconds: float
    files: dict[str, bytes] = {}


class Backend(Protocol):
    """Makes workspaces and runs sandboxes. Used from one event loop."""

    name: str
    notes: list[str]  # one line for each limit that cannot be enforced here; filled by `start`

    async def start(self) -> None:
        """Probe this machine, remove what an earlier life left. `UsageError` with the remedy when it cannot contain anything."""

    async def workspace(self, source: str | None, size_mb: int, *, place: str = "", image: Image | None = None, timeout_s: float = 60.0) -> Workspace:
        """A workspace with a copy of the directory `source`, over what the image has at `place` ("": the image's working directory, else WORK).

        `TaskSetupFailed`, `InfraSetupFailed`, `DeadlineExceeded`. `timeout_s` does not count the making of an image.
        """

    async def run(self, spec: Spec) -> Exit:
        """Run one command. `SandboxLost`, `InfraSetupFailed`, `TaskSetupFailed` (a command too long). Cancelled, it kills the sandbox first."""

    async def drop(self, workspace: Workspace) -> None:
        """Remove a workspace; none of its sandboxes may be running. Dropping twice is harmless."""

    async def close(self) -> None:
        """Kill every sandbox and remove every workspace."""
