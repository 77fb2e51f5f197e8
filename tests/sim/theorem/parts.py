"""The processes of a fleet, each as its command runs it: production code from the worker's heartbeat to what it obeys, over virtual sockets.

What stands in memory below it: the buffer's disk, the learner, reductions, the engine that decodes, and the agents that a sandbox runs.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gyre.cli import Setup
from gyre.coord.launch import Plan
from gyre.errors import DeadlineExceeded, WorkFailed
from gyre.net.sockets import Client as RealClient
from gyre.net.sockets import Server as RealServer
from gyre.net.sockets import mint
from gyre.net.worker import Worker
from gyre.rollout.engine import Engine
from gyre.rollout.shell import Desk, _report
from gyre.rollout.shell import Part as EnginePart
from gyre.sandbox.execute import Ended
from gyre.sandbox.gateway.route import EngineLost, Job, Router
from gyre.sandbox.shell import Shell
from gyre.train.orders import Orders
from gyre.types import Ending, Sampling, Ticket, Version
from gyre.wire.codec import Arrays
from gyre.wire.messages import FromBuffer, FromCoord, FromRollout, FromTrain, Message, ToRollout
from theorem.cells import Cell, Engines, core_life, take_part
from theorem.clock import Process
from theorem.engine import CONTEXT, VirtualEngine, token
from theorem.feeder import Execution, execution, message, prompt_of
from theorem.learner import TableLearner
from theorem.network import Client, Server

if TYPE_CHECKING:
    from theorem.fleet import Fleet

CALL_S = 120.0


class Life:
    """One life of a launched process, as its main sees it."""

    def __init__(self, fleet: Fleet, process: Process, plan: Plan, number: int, pid: int) -> None:
        self.fleet, self.process, self.plan, self.number, self.pid = fleet, process, plan, number, pid
        config = fleet.plan.config
        self.worker = Worker(None, kind=plan.kind, name=plan.name, run_id="run", grace_s=config.run.coord_grace_s)
        self.worker.incarnation, self.worker.stop = f"i{number}", asyncio.Event()
        self.worker.cell, self.worker.address = plan.cell, plan.address
        self.setup = Setup(
            run_dir=Path("run"), config=config, buffer="buffer", train="", rollouts=[], coord="coord", bind=plan.address, name=plan.name,
            resolved=cast(Any, None), cell=plan.cell,
        )  # fmt: skip

    def connect(self, address: str, incoming: Any, name: str = "", on_push: Callable[[Message, Arrays], None] | None = None) -> RealClient:
        made = Client(
            self.fleet.network, self.process, address, incoming, kind=self.plan.kind, name=name or self.plan.name,
            incarnation=self.worker.incarnation, resend_s=self.fleet.plan.config.net.resend_s, on_push=on_push, pid=self.pid,
        )  # fmt: skip
        return cast(RealClient, made)

    async def main(self) -> None:
        """As cli.work: until its part ends, or it is told to stop."""
        self.worker.attach(self.connect("coord", FromCoord, on_push=self.worker.on_push))
        part = asyncio.ensure_future({"buffer": _buffer, "sandbox": _sandbox, "rollout": _engine, "train": _trainer}[self.plan.kind](self))
        stop = asyncio.ensure_future(self.worker.stop.wait())
        await asyncio.wait([part, stop], return_when=asyncio.FIRST_COMPLETED)
        if part.done():
            part.result()


async def _buffer(life: Life) -> None:
    life.worker.status("working")
    await life.fleet.new_buffer(life.process, life.number).serve()


# --- sandbox ---


class _Agents:
    """What a sandbox executes: calls to engines for as many tokens as the rollout's draws say, then the outcome that they say."""

    def __init__(self, life: Life, router: Router) -> None:
        self._life, self._plan, self._router = life, life.fleet.plan, router
        self._rng = random.Random(f"{self._plan.seed}/{life.process.name}/agents")

    async def execute(self, ticket: Ticket, grading: Callable[[], None]) -> Ended:
        p = self._plan
        outcome = execution(p.seed, ticket.rollout_id, ticket.epoch, trouble=p.trouble, rewards=p.rewards)
        versions: list[Any] = []
        try:
            for b in outcome.branches:
                await asyncio.sleep(self._rng.expovariate(1.0 / p.rollout_s))
                versions.append(await self._call(ticket, f"{ticket.rollout_id}/{ticket.epoch}/{b.index}", prompt_of(b), len(b.tokens)))
        except (EngineLost, DeadlineExceeded):
            outcome = Execution(Ending.ENGINE_LOST, None, [])
        if outcome.reward is not None:
            grading()
            await asyncio.sleep(0.2 * self._rng.random())
        return Ended(*message(mint(), ticket, outcome, versions))

    async def _call(self, ticket: Ticket, name: str, n_prompt: int, n: int) -> Any:
        loop = asyncio.get_running_loop()
        job = Job(
            ticket.rollout_id, name, array("i", [0] * n_prompt), Sampling(max_tokens=n - n_prompt), ticket.seed, ticket.policy,
            loop.time() + CALL_S, loop.create_future(),
        )  # fmt: skip
        done = await self._router.generate(job)
        expected = [token(ticket.seed, k) for k in range(n - n_prompt)]
        if list(done.token_ids) != expected:
            self._life.fleet.chronicle.odd.append(f"call {name} got tokens {list(done.token_ids)}, an undisturbed one gets {expected}")
        return done.versions


async def _sandbox(life: Life) -> None:
    config, worker = life.fleet.plan.config, life.worker
    buffer = life.connect("buffer", FromBuffer)
    router = Router([], lambda address: life.connect(address, FromRollout), config.net.engine_timeout_s, config.run.start_timeout_s)
    worker.on_routes = router.follow
    if worker.routes is not None:
        router.follow(worker.routes)
    try:
        await Shell(life.setup, worker, buffer, _Agents(life, router), router).run(5.0)
    finally:
        router.close()


# --- engine ---


class _Part(EnginePart):
    """The engine's part, with an engine in virtual time."""

    def __init__(self, life: Life, desk: Desk) -> None:
        super().__init__(life.setup, life.worker, desk, life.plan.cell, follow=True, auto=True)
        self._life = life

    async def open(self) -> Engine:
        life = self._life
        await asyncio.sleep(life.fleet.plan.compute_s)

        def sampled(request: str, draw: int, version: Version) -> None:
            life.fleet.sampled(life.process, request, draw, version)

        seed = f"{life.fleet.plan.seed}/{life.process.name}"
        return VirtualEngine(life.process, seed, life.fleet.plan.compute_s, lambda held: life.fleet.hold(life, held), sampled)

    def connect(self, core: str, on_push: Callable[[Message, Arrays], None]) -> RealClient:
        return self._life.connect(core, FromTrain, self._life.plan.cell, on_push)


async def _engine(life: Life) -> None:
    desks: list[Desk] = []
    server = Server(life.fleet.network, life.process, life.plan.address, ToRollout, lambda *heard: desks[0].handle(*heard))
    desks.append(Desk(cast(RealServer, server), life.plan.cell, CONTEXT))
    reporting = asyncio.ensure_future(_report(life.worker, desks[0]))
    part = asyncio.ensure_future(_Part(life, desks[0]).run())
    await asyncio.wait([part, reporting], return_when=asyncio.FIRST_COMPLETED)
    for task in (part, reporting):
        if task.done():
            task.result()


# --- trainer ---


class OnDevice(TableLearner):
    """A learner that says when it takes and leaves its cell's device."""

    holds: Callable[[bool], None]

    def sleep(self) -> None:
        self.holds(False)

    def wake(self) -> None:
        self.holds(True)


class _Engines(Engines):
    """Publication to the engines that watch, as train.shell has it."""

    async def acknowledged(self, version: Version) -> list[str]:
        config = self._cell.world.plan.config
        return await self._policy.wait_loaded(version, config.run.start_timeout_s, grace_s=config.net.engine_timeout_s)


async def _trainer(life: Life) -> None:
    orders = Orders(life.worker, trains=False)
    name = life.plan.cell

    def make(core: str) -> Cell:
        cell = Cell(life.fleet, life.process, name, life.number, orders, core, life.plan.address)
        cell.learner.holds = lambda held: life.fleet.hold(life, held)
        cell.learner.wake()  # it is made on the device
        return cell

    async def core(resume: bool) -> None:
        await core_life(make(""), fresh=not resume, publisher=_Engines)

    async def satellite(address: str) -> None:
        await take_part(make(address))

    life.worker.status("ready")
    await orders.be_told(name, core, satellite, "--resume" in life.plan.argv)


def gives_up(error: BaseException | None) -> bool:
    """Is this an end that a process may come to by itself, with exit code 1?"""
    if isinstance(error, BaseExceptionGroup):
        return all(gives_up(e) for e in error.exceptions)
    return isinstance(error, WorkFailed | DeadlineExceeded)
