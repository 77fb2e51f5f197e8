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

from gyre.net.sockets import Peer
from gyre.train.corelink import CoreLink
from gyre.train.ledger import Ledger
from gyre.train.loop import Loop
from gyre.train.peers import Peers
from gyre.train.protocols import LeftLineage
from gyre.train.satellite import Satellite
from gyre.types import TensorSpec, Version
from gyre.weights.snapshot import Snapshot
from gyre.weights.transfer import PolicyServer
from gyre.wire.codec import Arrays
from gyre.wire.messages import FromBuffer, FromTrain, Message, ToTrain
from theorem.chronicle import Sight, Update, Vector
from theorem.clock import Process
from theorem.collective import MemoryCollective
from theorem.compute import Compute
from theorem.network import Client, Server
from theorem.world import World


class Told:
    """What the coordinator told a cell (`train.protocols.Duty`)."""

    def __init__(self, trains: bool) -> None:
        self.trains = trains
        self.role = ""
        self.on_turn: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()

    def tell(self, trains: bool) -> None:
        before, self.trains = self.trains, trains
        self._changed.set()
        if before != trains:
            self.on_turn()

    async def to_train(self) -> None:
        while not self.trains:
            self._changed.clear()
            await self._changed.wait()

    def phase(self, role: str) -> None:
        self.role = role


class Cell:
    """One life of a cell's trainer. `core` is where the core listens, "" if it is the core itself."""

    def __init__(self, world: World, process: Process, name: str, life: int, duty: Any, core: str, address: str = "") -> None:
        """`duty` is `Told`, or `train.orders.Orders`; `address` is where it listens, as the core, if not at one of its own."""
        self.world, self.process, self.name, self.duty = world, process, name, duty
        self.address = address or address_of(process)
        self.incarnation = f"i{life}"
        config = world.plan.config
        self.compute = Compute(world.loop, process, f"{world.plan.seed}/{process.name}/compute", world.plan.compute_s)
        client = Client(
            world.network, process, "buffer", FromBuffer,
            kind="train", name=name, incarnation=self.incarnation, resend_s=config.net.resend_s,
        )  # fmt: skip
        self.core: Client | None = None
        if core:
            self.core = Client(
                world.network, process, core, FromTrain,
                kind="train", name=name, incarnation=self.incarnation, resend_s=config.net.resend_s,
            )  # fmt: skip
        self.ledger = Ledger(client, config, cell=name, incarnation=self.incarnation, mint=self.mint)
        self.learner = world.kind.learner(self._observe, self._stepped)

    def mint(self) -> str:
        return self.world.mint(self.process)

    def sight(self, where: str, version: Version, weights: Vector) -> None:
        self.world.chronicle.sights.append(Sight(self.world.loop.time(), f"{self.process.name} {where}", version.term, version.step, weights.copy()))

    def _observe(self, step: int, weights: Vector) -> None:
        self.sight("accumulates", Version(self.ledger.term, step), weights)
        self.world.moment("accumulate")

    def _stepped(self, step: int, gradient: Vector, weights: Vector, counts: Counter[str]) -> None:
        update = Update(self.world.loop.time(), self.process.name, self.ledger.term, step, gradient.copy(), weights.copy(), counts)
        self.world.chronicle.updates.append(update)
        self.world.moment("update")


class Engines:
    """Publication to engines that always load (`train.protocols.Publisher`)."""

    def __init__(self, cell: Cell, policy: PolicyServer) -> None:
        self._cell, self._policy = cell, policy
        self._rng = random.Random(f"{cell.world.plan.seed}/{cell.process.name}/engines")

    async def lend(self, version: Version) -> None:
        self._policy.publish(await self._cell.compute(self._snapshot, version))
        self._cell.world.moment("lend")

    def _snapshot(self, version: Version) -> Snapshot:
        self._cell.sight("lends", version, self._cell.learner.vector)
        made: Snapshot = self._cell.learner.snapshot(version)
        return made

    async def acknowledged(self, version: Version) -> list[str]:
        await asyncio.sleep(self._rng.random())
        return ["engine"]


class _NoBoard:
    def write(self, step: int, numbers: dict[str, float | None]) -> None:
        """Nobody looks."""


def address_of(process: Process) -> str:
    """Where a core's trainer listens."""
    return f"train/{process.name}"


async def core_life(cell: Cell, *, fresh: bool, publisher: Callable[[Cell, PolicyServer], Any] = Engines) -> None:
    """Serve satellites, acquire a term from the last checkpoint of the lineage, train to the end."""
    world, config = cell.world, cell.world.plan.config
    learner = cell.learner

    def save(term: int, step: int, lr: float) -> Path:
        cell.sight("saves", Version(term, step), learner.vector)
        world.moment("save")
        world.save(term, step, learner.saved())
        return Path(f"step-{step}")

    def make(version: Version) -> Snapshot:
        cell.sight("offers", version, learner.vector)
        made: Snapshot = learner.snapshot(version)
        return made

    async with asyncio.TaskGroup() as tasks:

        def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            return tasks.create_task(work)

        def hear(peer: Peer, message: Message, arrays: Arrays) -> None:
            assert peers.handle(peer, message) or policy.handle(peer, message), message

        server = Server(world.network, cell.process, cell.address, ToTrain, hear)
        collective = MemoryCollective(world.meetings, learner, cell.compute, world.moment)
        store = address_of(cell.process)
        policy = PolicyServer(server.send, clock=world.loop.time)
        peers = Peers(server.send, collective, store, make, cell.compute, spawn, config, cell=cell.name, mint=cell.mint)
        step = await _take_term(cell, fresh)
        renewing = tasks.create_task(cell.ledger.renew_for_ever())
        serving = tasks.create_task(_serve(server))
        await Loop(
            learner, cell.ledger, publisher(cell, policy), peers, cell.duty, cell.compute, spawn, save, _NoBoard(), config, step=step
        ).run()  # fmt: skip
        await cell.compute(learner.sleep)
        cell.duty.phase("idle")
        await peers.farewell(10.0)
        await cell.ledger.until_finished()
        renewing.cancel()
        serving.cancel()


async def _take_term(cell: Cell, fresh: bool) -> int:
    before: int | None = None
    while True:
        step, term, state = cell.world.last_checkpoint(before)
        cell.learner.restore(state)
        try:
            cell.learner.total_steps = await cell.ledger.acquire(step, fresh=fresh, checkpoint_term=term)
            return step
        except LeftLineage:
            before = step


async def _serve(server: Server) -> None:
    """Until cancelled, with the rest of the process: then nobody answers."""
    try:
        await asyncio.Event().wait()
    finally:
        server.close()


class Directions:
    """Where the coordinator says that the core is (`train.orders.Orders`)."""

    def __init__(self, core: str) -> None:
        self.core = core
        self._changed = asyncio.Event()

    def tell(self, core: str) -> None:
        self.core = core
        self._changed.set()

    async def other_than(self, core: str) -> None:
        while self.core == core:
            self._changed.clear()
            await self._changed.wait()


async def satellite_life(make: Callable[[str], Cell], directions: Directions) -> None:
    """Be a satellite of whichever cell is the core, as `train.shell` does it: told of another, it begins anew."""
    while True:
        core = directions.core
        part = asyncio.ensure_future(take_part(make(core)))
        other = asyncio.ensure_future(directions.other_than(core))
        try:
            await asyncio.wait([part, other], return_when=asyncio.FIRST_COMPLETED)
            if part.done():
                part.result()
                return
        finally:
            for task in (part, other):
                task.cancel()
            await asyncio.wait([part, other])


async def take_part(cell: Cell) -> None:
    """Take part whenever told to, until the run is over."""
    world, config = cell.world, cell.world.plan.config
    learner = cell.learner

    def install(specs: list[TensorSpec], data: memoryview) -> None:
        learner.install(specs, data)
        world.moment("install")

    def turn() -> None:
        cell.ledger.hurry()
        link.hurry(leaving=not cell.duty.trains)

    assert cell.core is not None
    link = CoreLink(cell.core, install, cell.compute, config, cell=cell.name, mint=cell.mint, host="")
    collective = MemoryCollective(world.meetings, learner, cell.compute, world.moment)
    cell.duty.on_turn = turn
    try:
        async with asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(cell.ledger.renew_for_ever())
            await Satellite(learner, cell.ledger, link, collective, cell.duty, cell.compute).run()
            renewing.cancel()
    finally:
        cell.duty.on_turn = lambda: None
        cell.core.close()
