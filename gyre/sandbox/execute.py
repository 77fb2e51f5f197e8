"""One ticket, from its workspace to its outcome: the phases of an execution.

Invariants
- Every way an execution can end is a row of `types.ENDINGS`; what is graded and what is not follows from that table alone.
- Each phase has its own deadline (set-up, harness, verifier), and all together have one (overall). None of them waits for anything else.
- The agent is dead before grading starts, its gateway is closed, and the verifier gets a fresh sandbox around the same workspace.
- Whatever happens, cancellation included, nothing of the execution is left: no process, no workspace, no socket.

A fault of an execution becomes an ending. A bug does not: it propagates.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from gyre.config import Config
from gyre.errors import DeadlineExceeded, UsageError
from gyre.net.sockets import mint
from gyre.sandbox.backends import lifeline
from gyre.sandbox.backends.base import (
    HARNESS,
    INSTRUCTION,
    MODEL_SOCKET,
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
from gyre.sandbox.gateway.endpoint import Endpoint, body_limit
from gyre.sandbox.gateway.http import HttpServer
from gyre.sandbox.gateway.render import Renderer
from gyre.sandbox.gateway.route import Router
from gyre.sandbox.gateway.session import Limits as SessionLimits
from gyre.sandbox.gateway.session import Outcome, Session
from gyre.sandbox.grade import grade
from gyre.sandbox.harness.launch import BASE_URL, launch
from gyre.sandbox.healthcheck import healthy
from gyre.sandbox.run_task import printable
from gyre.sandbox.task import Task, load_task, tighter_s
from gyre.trajectory.classes import rules_of
from gyre.types import ENDINGS, Ending, Purpose, Sampling, Ticket
from gyre.wire.arrays import Array, f32, i32
from gyre.wire.messages import RolloutEnded

log = logging.getLogger(__name__)

FORWARD: Final = "/run/gyre/forward.py"
FILES: Final = "/run/gyre/home"
_DETAIL_CHARS: Final = 500
_CACHED_TASKS: Final = 1024
_GRACE_S: Final = 30.0  # calls may outlast the harness's time: closing the session gets the tokens of those in flight


class Ended(NamedTuple):
    """An execution's outcome, ready for the wire."""

    message: RolloutEnded
    arrays: Mapping[str, Array]


class _Stop(Exception):
    """The execution cannot go on; its ending, and why."""

    def __init__(self, ending: Ending, detail: str) -> None:
        super().__init__(detail)
        self.ending, self.detail = ending, detail


@contextmanager
def _setting_up() -> Iterator[None]:
    """Faults of a workspace's set-up are endings."""
    try:
        yield
    except (UsageError, TaskSetupFailed) as e:
        raise _Stop(Ending.TASK_SETUP_FAILED, str(e)) from None
    except (InfraSetupFailed, DeadlineExceeded) as e:
        raise _Stop(Ending.INFRA_SETUP_FAILED, str(e)) from None
    except SandboxLost as e:
        raise _Stop(Ending.SANDBOX_LOST, str(e)) from None


class _Agent(NamedTuple):
    """What the harness did."""

    ending: Ending
    detail: str
    status: int | None
    outcome: Outcome


class Executor:
    """Runs tickets. Shared by all executions of a process."""

    def __init__(self, config: Config, backend: Backend, router: Router, renderer: Renderer) -> None:
        self._config, self._backend, self._router, self._renderer = config, backend, router, renderer
        self._launch = launch(config)
        self._rules = rules_of(self._launch.name, config.trajectory.leaf_rules)
        self._tasks: dict[str, Task] = {}
        self._noted: set[str] = set()
        self._numbers = itertools.count()
        self._home = _make_home()
        if self._launch.home:
            self._launch.write_files(self._home / "home")

    def close(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)

    async def execute(self, ticket: Ticket, grading: Callable[[], None]) -> Ended:
        """Run one ticket. `grading` is called when the agent is dead and its workspace is about to be graded. Cancelled, it cleans up first."""
        seconds: dict[str, float] = {}
        agent: _Agent | None = None
        rewards: tuple[float, dict[str, float]] | None = None
        try:
            async with asyncio.timeout(self._config.sandbox.overall_timeout_s) as scope:
                async with self._workspace(ticket, seconds) as (task, workspace):
                    agent = await self._agent(ticket, task, workspace, seconds)
                    ending, detail = agent.ending, agent.detail
                    if ENDINGS[ending].grade:
                        grading()
                        rewards = await self._grade(task, workspace, seconds)
        except TimeoutError:
            if not scope.expired():
                raise
            ending, detail = Ending.OVERALL_TIMEOUT, f"it took longer than {self._config.sandbox.overall_timeout_s:g} s"
        except _Stop as e:
            ending, detail = e.ending, e.detail
        if ENDINGS[ending].grade and agent is not None and not agent.outcome.trajectories:
            ending, detail = Ending.NO_TRAINABLE_TOKEN, f"{ending}: {detail}" if detail else ending.value
        return self._ended(ticket, ending, detail, agent, rewards, seconds)

    def _ended(
        self,
        ticket: Ticket,
        ending: Ending,
        detail: str,
        agent: _Agent | None,
        rewards: tuple[float, dict[str, float]] | None,
        seconds: dict[str, float],
    ) -> Ended:
        message = RolloutEnded(
            id=mint(),
            rollout_id=ticket.rollout_id,
            epoch=ticket.epoch,
            ending=ending,
            detail=detail[:_DETAIL_CHARS],
            harness=self._launch.label,
            harness_exit=agent.status if agent else None,
            seconds={k: round(v, 6) for k, v in seconds.items()},
        )
        if agent is None or rewards is None or not ENDINGS[ending].grade:  # what is not graded is not kept
            return Ended(message, {"token_ids": i32(), "logprobs": f32(), "versions": i32()})
        o = agent.outcome
        message = msgspec.structs.replace(
            message,
            reward=rewards[0],
            rewards=rewards[1],
            nodes=o.graph.nodes,
            calls=o.calls,
            trajectories=o.trajectories,
            cells=o.cells,
            left_tokens=o.left_out.tokens,
            left_leaves=o.left_out.leaves,
        )
        return Ended(message, o.graph.arrays())

    # --- phases ----------------------------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _workspace(self, ticket: Ticket, seconds: dict[str, float]) -> AsyncIterator[tuple[Task, Workspace]]:
        """The task and a workspace for it, dropped in the end."""
        started = time.monotonic()
        sandbox = self._config.sandbox
        with _setting_up():
            task = self._task(ticket.task)
            limits = task.limits(self._limits(1.0))
            source = str(task.workspace) if task.workspace else None
            make = self._backend.workspace(
                source, limits.workspace_mb, place=task.workdir, image=task.image, timeout_s=sandbox.setup_timeout_s
            )  # fmt: skip
            workspace = await make
        try:
            with _setting_up():
                await healthy(self._backend, workspace, task.healthcheck, task.env, limits)
            seconds["setup"] = time.monotonic() - started
            yield task, workspace
        finally:
            with suppress(SandboxLost):  # then there is nothing left to drop
                await self._backend.drop(workspace)

    async def _agent(self, ticket: Ticket, task: Task, workspace: Workspace, seconds: dict[str, float]) -> _Agent:
        """Run the harness against the gateway until it ends, its time is up, or the gateway ends the rollout."""
        sandbox = self._config.sandbox
        timeout_s = tighter_s(sandbox.harness_timeout_s, task.agent_timeout_s)
        started = time.monotonic()
        session = Session(ticket, self._renderer, self._router, self._session_limits(ticket, started + timeout_s + _GRACE_S))
        server = HttpServer(Endpoint(session, models=sandbox.models), body_limit(session.limits.context))
        number = next(self._numbers)  # files side by side: on some file systems removing a directory takes milliseconds
        instruction, socket = self._home / f"{number}.md", self._home / f"{number}.sock"
        run: asyncio.Task[Exit] | None = None
        try:
            instruction.write_text(task.instruction + "\n", encoding="utf-8")
            await server.start(socket)
            run = asyncio.create_task(self._backend.run(self._spec(task, workspace, instruction, socket, timeout_s)))
            await asyncio.wait((run, session.ending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if run is not None and not run.done():
                run.cancel()
                await asyncio.wait((run,))
            outcome = await session.close()
            await server.close()
            instruction.unlink(missing_ok=True)
            seconds["harness"], seconds["model"] = time.monotonic() - started, outcome.model_s
        if server.failure is not None:
            raise server.failure
        return self._judge(run, session, outcome, timeout_s)

    def _judge(self, run: asyncio.Task[Exit], session: Session, outcome: Outcome, timeout_s: float) -> _Agent:
        """Which row of the endings table: what the gateway decided comes first, then what became of the process."""
        if session.ending.done():
            status = None if run.cancelled() or run.exception() else run.result().status
            return _Agent(*session.ending.result(), status, outcome)
        try:
            ended = run.result()
        except SandboxLost as e:
            return _Agent(Ending.SANDBOX_LOST, str(e), None, outcome)
        except InfraSetupFailed as e:
            return _Agent(Ending.INFRA_SETUP_FAILED, str(e), None, outcome)
        except TaskSetupFailed as e:
            return _Agent(Ending.TASK_SETUP_FAILED, str(e), None, outcome)
        if ended.timed_out:
            return _Agent(Ending.HARNESS_TIMEOUT, f"the harness ran longer than {timeout_s:g} s", ended.status, outcome)
        if session.context_full:
            return _Agent(Ending.CONTEXT_FULL, "the last call's prompt did not fit", ended.status, outcome)
        detail = ""
        if ended.status != 0:
            tail = printable(ended.output[-_DETAIL_CHARS:]).strip().rpartition("\n")[2]
            detail = f"the harness ended with status {ended.status}: {tail}" if tail else f"the harness ended with status {ended.status}"
            if not outcome.calls:  # it never reached the model: a wrong command or a missing file, not an agent that failed
                return _Agent(Ending.INFRA_SETUP_FAILED, f"{detail}, before any model call", ended.status, outcome)
        return _Agent(Ending.FINISHED, detail, ended.status, outcome)

    async def _grade(self, task: Task, workspace: Workspace, seconds: dict[str, float]) -> tuple[float, dict[str, float]]:
        sandbox = self._config.sandbox
        started = time.monotonic()
        limits = task.limits(self._limits(tighter_s(sandbox.verifier_timeout_s, task.verifier_timeout_s)))
        try:
            result = await grade(self._backend, workspace, task, limits, retries=sandbox.verifier_retries)
        except SandboxLost as e:
            raise _Stop(Ending.SANDBOX_LOST, str(e)) from None
        except InfraSetupFailed as e:
            raise _Stop(Ending.INFRA_SETUP_FAILED, str(e)) from None
        except (UsageError, TaskSetupFailed) as e:
            raise _Stop(Ending.TASK_SETUP_FAILED, str(e)) from None
        finally:
            seconds["grade"] = time.monotonic() - started
        if result.reward is None:
            raise _Stop(Ending.VERIFIER_FAILED, result.detail)
        return result.reward, result.rewards

    # --- what phases are given -------------------------------------------------------------------------------------------------------------

    def _task(self, path: str) -> Task:
        task = self._tasks.get(path)
        if task is None:
            if not Path(path).is_absolute() or ".." in Path(path).parts or "\0" in path:  # it comes from the wire
                raise UsageError("the ticket", f"{path!r} is no place of a task", "give tasks.train of the buffer as an absolute path")
            if len(self._tasks) >= _CACHED_TASKS:
                self._tasks.clear()
            task = self._tasks[path] = load_task(Path(path))
            for note in set(task.notes) - self._noted:
                log.warning("%s: %s (said once, whatever other tasks ask for it)", path, note)
            self._noted |= set(task.notes)
        return task

    def _limits(self, timeout_s: float) -> Limits:
        s = self._config.sandbox
        return Limits(memory_mb=s.memory_mb, pids=s.pids, workspace_mb=s.workspace_mb, output_kb=s.output_kb, timeout_s=timeout_s, cpus=s.cpus)

    def _session_limits(self, ticket: Ticket, deadline: float) -> SessionLimits:
        r = self._config.rollout
        temperature = r.eval_temperature if ticket.purpose is Purpose.EVAL else r.temperature
        return SessionLimits(
            sampling=Sampling(temperature=temperature, top_p=r.top_p, top_k=r.top_k, max_tokens=r.max_tokens),
            context=r.context,
            max_turns=self._config.sandbox.max_turns,
            max_trajectories=self._config.trajectory.max_per_execution,
            deadline=deadline,
            greedy=self._config.trajectory.choice == "greedy",
            rules=self._rules,
        )

    def _spec(self, task: Task, workspace: Workspace, instruction: Path, socket: Path, timeout_s: float) -> Spec:
        binds = [Bind(str(instruction), INSTRUCTION), Bind(str(socket), MODEL_SOCKET, readonly=False)]
        if self._config.sandbox.harness_dir:
            binds.append(Bind(self._config.sandbox.harness_dir, HARNESS))
        used = self._launch
        binds += used.binds
        argv = used.words(task.instruction)
        env = {**task.env, "OPENAI_API_KEY": "gyre", "ANTHROPIC_API_KEY": "gyre", **used.env}
        if used.tcp:
            binds.append(Bind(str(Path(__file__).with_name("forward.py")), FORWARD))
            home = ["--home", FILES] if used.home else []
            binds += [Bind(str(self._home / "home"), FILES)] if used.home else []
            argv = ["python3", "-I", "-S", FORWARD, *home, "--", *argv]
            env |= {"OPENAI_BASE_URL": f"{BASE_URL}/v1", "ANTHROPIC_BASE_URL": BASE_URL}
        limits = used.limits(task.limits(self._limits(timeout_s)))
        return Spec(workspace=workspace, argv=argv, limits=limits, env=env, binds=binds)


def _make_home() -> Path:
    """A directory for this process's sockets, its path short enough for one; those of dead processes go."""
    base = Path(tempfile.gettempdir())
    for left in base.glob(f"gw-{lifeline.PREFIX}*"):
        if lifeline.is_orphaned(left.name.removeprefix("gw-")):
            shutil.rmtree(left, ignore_errors=True)
    for n in itertools.count():
        home = base / f"gw-{lifeline.own_name(n)}"
        with suppress(FileExistsError):
            home.mkdir(mode=0o700)  # the sockets in it are open to all: they are bound into sandboxes of other uids, and nobody else is to find them
            return home
    raise AssertionError("unreachable")
