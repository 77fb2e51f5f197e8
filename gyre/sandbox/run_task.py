"""One task without a model: its oracle, nothing at all, or a command plays the agent; then it is graded as any rollout is.

Invariants
- What became of it is one `Ending`; a reward is there exactly when the verifier gave one.
- The workspace is removed whatever happens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from gyre.config import Sandbox
from gyre.errors import DeadlineExceeded
from gyre.sandbox.backends.base import (
    HARNESS,
    INSTRUCTION,
    SOLUTION,
    Backend,
    Bind,
    Exit,
    InfraSetupFailed,
    Limits,
    SandboxLost,
    Spec,
    TaskSetupFailed,
    Workspace,
)
from gyre.sandbox.grade import Grade, grade
from gyre.sandbox.healthcheck import healthy
from gyre.sandbox.task import Task, tighter_s
from gyre.types import Ending

ORACLE: Final = "oracle"
NOP: Final = "nop"
_LEAKS: Final = 42
_LOOK: Final = f"""
find . -name .git -prune | while read -r found; do
    g() {{ git -C "${{found%.git}}" -c safe.directory='*' "$@"; }}
    head=$(g rev-parse -q --verify HEAD) && head=^$head
    {{ g cat-file --batch-all-objects --batch-check='%(objecttype) %(objectname)' | sed -n 's/^commit //p'; echo "$head"; }} |
        g rev-list --stdin --format=reference --no-commit-header -n 1
done | grep . && exit {_LEAKS}; exit 0
"""
"""Changes nothing: looks for commits in the workspace that are not behind HEAD, however they are kept."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One task's outcome. `seconds` by phase: setup, harness, grade."""

    task: str
    path: str
    harness: str
    ending: Ending
    reward: float | None = None
    rewards: dict[str, float] = {}
    detail: str = ""
    harness_exit: int | None = None
    attempts: int = 0
    seconds: dict[str, float] = {}
    output: str = ""  # of the harness, then of the verifier; printable


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A task is sound when its oracle gets 1, doing nothing gets 0, and no repository of its workspace has a later commit."""

    oracle: Result
    nop: Result

    @property
    def sound(self) -> bool:
        return self.oracle.reward == 1 and self.nop.reward == 0 and not self.leak

    @property
    def leak(self) -> str:
        """A commit that the agent could find and its HEAD does not have."""
        return f"its history has a later commit: {self.nop.output.splitlines()[0]}" if self.nop.harness_exit == _LEAKS else ""


def base_limits(table: Sandbox) -> Limits:
    """The limits of the [sandbox] table; `timeout_s` is the harness's."""
    return Limits(
        memory_mb=table.memory_mb,
        pids=table.pids,
        workspace_mb=table.workspace_mb,
        output_kb=table.output_kb,
        cpus=table.cpus,
        timeout_s=table.harness_timeout_s,
    )


def harness_limits(task: Task, table: Sandbox) -> Limits:
    limits = task.limits(base_limits(table))
    return msgspec.structs.replace(limits, timeout_s=tighter_s(table.harness_timeout_s, task.agent_timeout_s))


def verifier_limits(task: Task, table: Sandbox) -> Limits:
    limits = task.limits(base_limits(table))
    return msgspec.structs.replace(limits, timeout_s=tighter_s(table.verifier_timeout_s, task.verifier_timeout_s))


def agent_spec(task: Task, workspace: Workspace, argv: Sequence[str], limits: Limits, *, harness_dir: str = "", oracle: bool = False) -> Spec:
    """The agent's sandbox: what it may see of its task is the instruction; of the rest, only an oracle sees the solution."""
    binds = [Bind(str(task.path / "instruction.md"), INSTRUCTION)]
    if harness_dir:
        binds.append(Bind(harness_dir, HARNESS))
    if oracle:
        binds.append(Bind(str(task.solution), SOLUTION))
    env = {**task.env, **task.solution_env} if oracle else task.env
    return Spec(workspace=workspace, argv=argv, limits=limits, env=env, binds=binds)


async def run_task(backend: Backend, task: Task, table: Sandbox, harness: str, argv: Sequence[str] = ()) -> Result:
    """`harness` is oracle or nop (which may have an `argv` to look around), or a name for the command `argv`.

    Faults of the sandbox become endings, those of the task's author `UsageError`.
    """
    argv = task.oracle_argv() if harness == ORACLE else argv
    limits = harness_limits(task, table)
    seconds: dict[str, float] = {}

    def result(ending: Ending, detail: str = "", ended: Exit | None = None, graded: Grade | None = None) -> Result:
        output = (ended.output if ended else b"") + (graded.output if graded else b"")
        return Result(
            task=task.name,
            path=str(task.path),
            harness=harness,
            ending=ending,
            reward=graded.reward if graded else None,
            rewards=graded.rewards if graded else {},
            detail=detail,
            harness_exit=ended.status if ended else None,
            attempts=graded.attempts if graded else 0,
            seconds={name: round(value, 4) for name, value in seconds.items()},
            output=printable(output),
        )

    started = time.monotonic()
    workspace = None
    ended = None
    try:
        source = str(task.workspace) if task.workspace else None
        make = backend.workspace(source, limits.workspace_mb, place=task.workdir, image=task.image, timeout_s=table.setup_timeout_s)
        workspace = await make
        await healthy(backend, workspace, task.healthcheck, task.env, limits)
        seconds["setup"] = time.monotonic() - started
        if argv:
            ended = await backend.run(agent_spec(task, workspace, argv, limits, harness_dir=table.harness_dir, oracle=harness == ORACLE))
            seconds["harness"] = ended.seconds
        graded = await grade(backend, workspace, task, verifier_limits(task, table), retries=table.verifier_retries)
        seconds["grade"] = graded.seconds
    except TaskSetupFailed as e:
        return result(Ending.TASK_SETUP_FAILED, str(e), ended)
    except (InfraSetupFailed, DeadlineExceeded) as e:
        return result(Ending.INFRA_SETUP_FAILED, str(e), ended)
    except SandboxLost as e:
        return result(Ending.SANDBOX_LOST, str(e), ended)
    finally:
        if workspace is not None:
            with suppress(SandboxLost):
                await backend.drop(workspace)
    if graded.reward is None:
        return result(Ending.VERIFIER_FAILED, graded.detail, ended, graded)
    late = ended is not None and ended.timed_out
    return result(Ending.HARNESS_TIMEOUT if late else Ending.FINISHED, "the harness's time was up" if late else "", ended, graded)


async def check_tasks(backend: Backend, tasks: Sequence[Task], table: Sandbox, jobs: int, report: Callable[[Check], None]) -> None:
    """Check tasks, `jobs` at a time, and report each as it is done."""
    queue = iter(tasks)

    async def worker() -> None:
        for task in queue:
            oracle = await run_task(backend, task, table, ORACLE)
            nop = await run_task(backend, task, table, NOP, ["sh", "-c", _LOOK])
            report(Check(oracle=oracle, nop=nop))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(jobs, len(tasks))):
            group.create_task(worker())


def printable(output: bytes) -> str:
    """Text of an agent for a terminal: no control characters but newline and tab."""
    text = output.decode("utf-8", errors="replace")
    return "".join(c if c in "\n\t" or c.isprintable() else "�" for c in text)
