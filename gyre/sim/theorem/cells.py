"""What a cell's trainer is made of in the deterministic world: production loops and ledger, and in memory what stands below them.

Mirrors `train.shell`: the same parts in the same order, with virtual sockets, threads, disk and engines.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from gyre.sim.theorem.chronicle import Sight, Update, Vector
from gyre.sim.theorem.clock import Process
from gyre.sim.theorem.compute import Compute
from gyre.sim.theorem.learner import State, TableLearner
from gyre.sim.theorem.network import Client
from gyre.sim.theorem.world import World
from gyre.train.ledger import Ledger
from gyre.train.loop import Loop
from gyre.types import Version
from gyre.wire.messages import FromBuffer


class Told:
    """What the coordinator told a cell (`train.protocols.Duty`)."""

    def __init__(self, trains: bool) -> None:
        self.trains = trains
        self.role = ""
        self._changed = asyncio.Event()

    def tell(self, trains: bool) -> None:
        self.trains = trains
        if trains:
            self._changed.set()
        else:
            self._changed.clear()

    async def to_train(self) -> None:
        while not self.trains:
            self._changed.clear()
            await self._changed.wait()

    def phase(self, role: str) -> None:
        self.role = role


class Cell:
    """One life of a cell's trainer."""

    def __init__(self, world: World, process: Process, name: str, life: int, state: State, duty: Told) -> None:
        self.world, self.process, self.name, self.duty = world, process, name, duty
        self.incarnation = f"i{life}"
        config = world.plan.config
        self.compute = Compute(world.loop, process, f"{world.plan.seed}/{process.name}/compute", world.plan.compute_s)
        client = Client(
            world.network, process, "buffer", FromBuffer,
            kind="train", name=name, incarnation=self.incarnation, resend_s=config.net.resend_s,
        )  # fmt: skip
        self._minted = 0
        self.ledger = Ledger(client, config, cell=name, incarnation=self.incarnation, mint=self.mint)
        self.learner = TableLearner(
            state, config.train.lr, config.train.clip_norm, world.plan.groups, config.system.rollouts_per_group,
            observe=self._observe, stepped=self._stepped,
        )  # fmt: skip

    def mint(self) -> str:
        self._minted += 1
        return f"{self.process.name}-{self._minted}"

    def sight(self, where: str, version: Version, weights: Vector) -> None:
        self.world.chronicle.sights.append(Sight(self.world.loop.time(), f"{self.process.name} {where}", version.term, version.step, weights.copy()))

    def _observe(self, step: int, weights: Vector) -> None:
        self.sight("accumulates", Version(self.ledger.term, step), weights)
        self.world.moment("accumulate")

    def _stepped(self, step: int, weights: Vector, counts: Counter[str]) -> None:
        self.world.chronicle.updates.append(
            Update(self.world.loop.time(), self.process.name, self.ledger.term, step, weights.copy(), counts)
        )  # fmt: skip
        self.world.moment("update")


class Engines:
    """Publication to engines that always load (`train.protocols.Publisher`)."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._rng = random.Random(f"{cell.world.plan.seed}/{cell.process.name}/engines")

    async def lend(self, version: Version) -> None:
        await self._cell.compute(self._cell.sight, "lends", version, self._cell.learner.state.weights)
        self._cell.world.moment("lend")

    async def acknowledged(self, version: Version) -> list[str]:
        await asyncio.sleep(self._rng.random())
        return ["engine"]


class _NoBoard:
    def write(self, step: int, numbers: dict[str, float | None]) -> None:
        """Nobody looks."""


class NoPeers:
    """An exchange without satellites."""

    idle = False

    def opened(self, version: Version) -> None: ...

    def again(self) -> None: ...

    async def reduce(self, manifest: Any, own: Any, attempt: int) -> list[Any]:
        raise AssertionError("nobody else")

    def closing(self) -> None: ...

    async def committed(self, version: Version, *, finished: bool) -> list[str]:
        return []


async def core_life(cell: Cell, step: int, *, fresh: bool) -> None:
    """Acquire a term from the checkpoint at `step`, train to the end."""
    world, config = cell.world, cell.world.plan.config
    cell.learner.total_steps = await cell.ledger.acquire(step, fresh=fresh)

    def save(term: int, step: int, lr: float) -> Path:
        cell.sight("saves", Version(term, step), cell.learner.state.weights)
        world.moment("save")
        s = cell.learner.state
        world.checkpoints.append((step, State(s.weights.copy(), s.m.copy(), s.v.copy(), s.n)))
        return Path(f"step-{step}")

    async with asyncio.TaskGroup() as tasks:
        renewing = tasks.create_task(cell.ledger.renew_for_ever())

        def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            return tasks.create_task(work)

        await Loop(
            cell.learner, cell.ledger, Engines(cell), NoPeers(), cell.duty, cell.compute, spawn, save, _NoBoard(), config, step=step
        ).run()  # fmt: skip
        renewing.cancel()


Life = Callable[[Cell], Coroutine[Any, Any, None]]
