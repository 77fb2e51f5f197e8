"""Cells of a run in one process: production loops, ledger, peers and links around the buffer's real machine, with pipes instead of sockets."""

from __future__ import annotations

import array
import asyncio
import hashlib
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch

from gyre.buffer.effects import Deliver, Now, Received, Reply, Tick
from gyre.buffer.machine import Machine
from gyre.buffer.queries import Task, TaskSet
from gyre.config import Config, Model
from gyre.net.sockets import Peer
from gyre.train.corelink import CoreLink
from gyre.train.ledger import Ledger
from gyre.train.loop import Loop
from gyre.train.model import Policy
from gyre.train.optimizer import Learner
from gyre.train.peers import Peers
from gyre.train.protocols import CollectiveFailed, Group
from gyre.train.satellite import Satellite
from gyre.types import Ending, LeafClass, TrajectoryMeta, Version
from gyre.weights.shared import Shared
from gyre.wire import messages as w

DEADLINE_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Pipe:
    """A `Requester`: each message goes to `take(message, answer)`, whose answer ends the request."""

    def __init__(self, take: Callable[[w.Message, Callable[[w.Message, Any], None]], None]) -> None:
        self._take = take
        self._pending: dict[str, asyncio.Future[Any]] = {}

    async def request(self, message: w.Message, arrays: Any = None, *, deadline_s: float, what: str) -> Any:
        answered = self._pending[message.id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not answered.done():  # repeated until answered
                    self.send(message)
                    await asyncio.wait([answered], timeout=1.0)
                return answered.result()
        finally:
            del self._pending[message.id]

    def send(self, message: w.Message, arrays: Any = None) -> None:
        self._take(message, self._answer)

    def _answer(self, message: w.Message, arrays: Any) -> None:
        waiting = self._pending.get(message.cause)
        if waiting is not None and not waiting.done():
            waiting.set_result((message, arrays or {}))


class Buffer:
    """The machine, and sandboxes that end rollouts one after the other, so that groups are ready in one order whatever the cells do."""

    def __init__(self, config: Config, pace_s: float = 0.0) -> None:
        self.config, self.pace_s = config, pace_s
        self.machine = Machine(config, TaskSet(tuple(Task(f"/t/{i}") for i in range(7))), (), self._now(), "run")
        self.machine.start(self._now())
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.manifests: dict[int, w.Manifest] = {}
        self._ids = itertools.count()

    @staticmethod
    def _now() -> Now:
        t = asyncio.get_running_loop().time()
        return Now(t, 1e9 + t)

    def take(self, message: w.Message, answer: Callable[[w.Message, Any], None]) -> None:
        if isinstance(message, w.Note):
            self.notes.append((message.event, message.fields))
        self._carry_out(self.machine.handle(self._now(), Received(answer, message, "p/1", (0, 0))))

    def _carry_out(self, effects: list[Any]) -> None:
        for e in effects:
            if isinstance(e, Reply | Deliver):
                arrays = self._arrays(e.items) if isinstance(e, Deliver) else None
                if isinstance(e.message, w.Manifest):
                    self.manifests[e.message.step] = e.message
                asyncio.get_running_loop().call_soon(e.to, msgspec.structs.replace(e.message, id=f"b{next(self._ids)}"), arrays)

    @staticmethod
    def _arrays(items: list[Any]) -> dict[str, Any]:
        packed = {"token_ids": array.array("i"), "loss_mask": array.array("b"), "logprobs": array.array("f"), "versions": array.array("i")}
        for i in items:
            g = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(f"{i.rollout_id}.{i.index}".encode(), digest_size=4).digest()))
            n, k = i.n_tokens, i.n_trainable
            packed["token_ids"].extend(torch.randint(2, 32, (n,), generator=g).tolist())
            packed["loss_mask"].extend([0] * (n - k) + [1] * k)
            packed["logprobs"].extend([float("nan")] * (n - k) + [-3.4] * k)
            packed["versions"].extend([-1] * (n - k) + [0] * k)
        return {k: memoryview(v) for k, v in packed.items()}

    async def sandboxes(self) -> None:
        """Lease and end tickets, one at a time; of every two rollouts one succeeds."""
        pipe = Pipe(self.take)
        while True:
            lease = w.LeaseTickets(id=f"l{next(self._ids)}", n=1, wait_s=0.2)
            for ticket in (await pipe.request(lease, deadline_s=9, what="tickets"))[0].tickets:
                size = 6 + sum(ticket.rollout_id.encode()) % 7
                meta = [TrajectoryMeta(0, LeafClass.MAIN, [], [], size, size - 3)]
                ended = w.RolloutEnded(
                    id=f"e{next(self._ids)}", rollout_id=ticket.rollout_id, epoch=ticket.epoch, ending=Ending.FINISHED,
                    reward=float(ticket.index % 2), trajectories=meta,
                )  # fmt: skip
                await pipe.request(ended, deadline_s=9, what="the end")
            await asyncio.sleep(self.pace_s)

    async def ticks(self) -> None:
        while True:
            due = self.machine.next_deadline()
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(min(0.05, max(0.001, (due or now + 1) - now)))
            self._carry_out(self.machine.handle(self._now(), Tick()))


class MemoryCollective:
    """All members in one process: they meet in `place` by the group's name, the last one to come does the sum. Passes the real one's contract."""

    def __init__(self, learner: Any, place: dict[str, Any]) -> None:
        self._learner, self._place = learner, place
        self.fails = 0  # so many of the next ones, before anything is sent

    async def reduce(self, group: Group, deadline_s: float) -> None:
        def add(learners: list[Any]) -> None:
            learners[0].totals = [torch.stack(list(sums)).sum(0) for sums in zip(*(x.sums for x in learners), strict=True)]

        await self._meet(group, deadline_s, "reduce", add)

    async def broadcast(self, group: Group, deadline_s: float) -> None:
        @torch.no_grad()
        def copy(learners: list[Any]) -> None:
            for other in learners[1:]:
                for mine, theirs in zip(other.weights, learners[0].weights, strict=True):
                    mine.copy_(theirs)

        await self._meet(group, deadline_s, "broadcast", copy)

    async def _meet(self, group: Group, deadline_s: float, kind: str, together: Callable[[list[Any]], None]) -> None:
        if self.fails:
            self.fails -= 1
            raise CollectiveFailed("made to fail")
        key = f"{group.name}/{kind}"
        here, done = self._place.setdefault(key, ({}, asyncio.get_running_loop().create_future()))
        here[group.rank] = self._learner
        if len(here) == group.size:
            del self._place[key]
            together([here[r] for r in range(group.size)])
            done.set_result(None)
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(done)
        except TimeoutError:
            self._place.pop(key, None)
            raise CollectiveFailed(f"{len(here)} of {group.size} came") from None


class Told:
    """A duty that a test turns."""

    def __init__(self, trains: bool = True) -> None:
        self._trains = trains
        self.phases: list[str] = []
        self.on_turn: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()

    @property
    def trains(self) -> bool:
        return self._trains

    async def to_train(self) -> None:
        while not self._trains:
            self._changed.clear()
            await self._changed.wait()

    def phase(self, role: str) -> None:
        if not self.phases or self.phases[-1] != role:
            self.phases.append(role)

    def turn(self, trains: bool) -> None:
        self._trains = trains
        self._changed.set()
        self.on_turn()

    async def until(self, role: str) -> None:
        await until(lambda: self.phases[-1:] == [role])


class Engines:
    """Every publication is acknowledged at once."""

    async def lend(self, version: Version) -> None:
        pass

    async def acknowledged(self, version: Version) -> list[str]:
        return ["e"]


class Board:
    def __init__(self) -> None:
        self.written: dict[int, dict[str, float | None]] = {}

    def write(self, step: int, numbers: dict[str, float | None]) -> None:
        self.written[step] = numbers


class Cell:
    """What every cell has."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.learner = cluster.learner()
        self.collective = MemoryCollective(self.learner, cluster.place)
        self.told = Told()
        self.accumulated = 0
        self.ledger = Ledger(Pipe(cluster.buffer.take), cluster.config, cell=name, incarnation=name, mint=cluster.mint)
        self.pool = ThreadPoolExecutor(1)

    async def compute(self, function: Callable[..., Any], *args: Any) -> Any:
        if function == self.learner.accumulate:
            self.accumulated += 1
            await asyncio.sleep(self.cluster.compute_s)
        return await asyncio.get_running_loop().run_in_executor(self.pool, function, *args)


class Cluster:
    """A core and its satellites. `run(satellites)` goes to the run's end; a test does things to `cells` meanwhile."""

    def __init__(self, model: Path, config: Config, pace_s: float = 0.0, compute_s: float = 0.0) -> None:
        self.model, self.config, self.pace_s, self.compute_s = model, config, pace_s, compute_s
        self.place: dict[str, Any] = {}
        self.cells: dict[str, Cell] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.board = Board()
        self._ids = itertools.count()

    def mint(self) -> str:
        return f"m{next(self._ids)}"

    def learner(self) -> Learner:
        policy = Policy.load(self.model, Model(device="cpu"), 1.0)
        return Learner(policy, self.config.train, self.config.train.steps)

    async def __aenter__(self) -> Cluster:
        torch.set_num_threads(1)
        self.buffer = Buffer(self.config, self.pace_s)
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._beside = [self._spawn(x) for x in (self.buffer.sandboxes(), self.buffer.ticks())]
        await self.restart_core()
        return self

    async def restart_core(self) -> None:
        """Another life of the core, from step 0, under a term of its own."""
        core = self.core = self.cells["core"] = Cell(self, "core")
        self._beside.append(self._spawn(core.ledger.renew_for_ever()))
        core.learner.total_steps = await core.ledger.acquire(0)
        self.peers = Peers(
            lambda peer, message, arrays: peer.identity(message, arrays), core.collective, "store", lambda v: core.learner.snapshot(v, Shared),
            core.compute, self._spawn, self.config, cell="core", mint=self.mint,
        )  # fmt: skip
        core.told.on_turn = core.ledger.hurry
        self.loop = Loop(
            core.learner, core.ledger, Engines(), self.peers, core.told, core.compute, self._spawn, lambda *a: Path("checkpoint"), self.board,
            self.config, step=0,
        )  # fmt: skip

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        return self._group.create_task(coroutine)

    def start(self) -> None:
        self.tasks["core"] = self._spawn(self.loop.run())

    def satellite(self, name: str, *, trains: bool = True) -> Cell:
        cell = self.cells[name] = Cell(self, name)
        cell.told = Told(trains)

        def ask(message: w.Message, answer: Any) -> None:
            self.peers.handle(Peer(answer, "train", name, name), message)  # type: ignore[arg-type]

        link = CoreLink(Pipe(ask), cell.learner.install, cell.compute, self.config, cell=name, mint=self.mint)

        def turn() -> None:
            cell.ledger.hurry()
            link.hurry(leaving=not cell.told.trains)

        cell.told.on_turn = turn
        self._beside.append(self._spawn(cell.ledger.renew_for_ever()))
        satellite = Satellite(cell.learner, cell.ledger, link, cell.collective, cell.told, cell.compute)
        self.tasks[name] = self._spawn(satellite.run())
        return cell

    async def end(self) -> None:
        """Wait for the core's end, and the satellites'."""
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait(self.tasks.values())

    async def __aexit__(self, *error: Any) -> None:
        for task in [*self._beside, *self.tasks.values()]:
            task.cancel()
        try:
            await self._group.__aexit__(*error)
        finally:
            for cell in self.cells.values():
                cell.pool.shutdown()

    def parts(self, step: int) -> dict[str, int]:
        """How many micro-steps each cell has in a step's manifest."""
        return {e.cell: len(e.micro_steps) for e in self.buffer.manifests[step].entries}

    def noted(self, event: str) -> list[dict[str, Any]]:
        return [fields for kind, fields in self.buffer.notes if kind == event]

    def weights(self) -> list[torch.Tensor]:
        return [t.clone() for t in self.core.learner.weights]
