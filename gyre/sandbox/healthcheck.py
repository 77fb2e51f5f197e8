"""A task's healthcheck: a shell command that must succeed in the workspace before the agent starts.

It runs in a sandbox of its own, like everything else: what it leaves in the workspace stays, processes and other files do not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import msgspec

from gyre.sandbox.backends.base import Backend, Limits, Spec, TaskSetupFailed, Workspace


class Healthcheck(msgspec.Struct, frozen=True, kw_only=True):
    """`[environment.healthcheck]`; the names and defaults are Harbor's."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3

    def __post_init__(self) -> None:
        numbers = (self.interval_sec, self.timeout_sec, self.start_period_sec, self.start_interval_sec)
        if not self.command.strip() or "\0" in self.command or self.retries < 1 or not all(0 <= n < float("inf") for n in numbers):
            raise ValueError("it needs a command, retries of at least 1, and times of at least 0")


async def healthy(backend: Backend, workspace: Workspace, check: Healthcheck | None, env: Mapping[str, str], limits: Limits) -> None:
    """Return when it has succeeded. `TaskSetupFailed` after `retries` failures, those of the start period not counted; `SandboxLost` and the like."""
    if check is None:
        return
    limits = msgspec.structs.replace(limits, timeout_s=max(check.timeout_sec, 0.1))
    started, failures = time.monotonic(), 0
    while True:
        ended = await backend.run(Spec(workspace=workspace, argv=["sh", "-c", check.command], limits=limits, env=env))
        if ended.status == 0:
            return
        starting = time.monotonic() - started < check.start_period_sec
        failures += not starting
        if failures >= check.retries:
            last = ended.output.decode(errors="replace").strip().rpartition("\n")[2]
            raise TaskSetupFailed(f"the task's healthcheck failed {failures} times, at last with status {ended.status}: {last}")
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)
