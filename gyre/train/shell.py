"""gyre-train's process: sockets in the event loop, arithmetic in one thread beside it, so that pulls are served and leases renewed while it computes.

What it is: the core, a satellite, or what the coordinator says (`auto`). An `auto` trainer that is told of another core joins that one; told that it
is the core itself, it starts from the last checkpoint that it can read, under a new term.

Not here: the loops (loop.py, satellite.py), what is said between cells (peers.py, corelink.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from gyre.cli import Setup
from gyre.config import Config
from gyre.errors import UsageError
from gyre.net.endpoints import endpoint
from gyre.net.sockets import Client, Peer, Server
from gyre.net.worker import Worker
from gyre.train import checkpoint
from gyre.train.corelink import CoreLink
from gyre.train.group import TorchCollective, host_of
from gyre.train.ledger import Ledger
from gyre.train.loop import Loop
from gyre.train.metrics import Board
from gyre.train.model import Policy, takes_trees
from gyre.train.optimizer import Learner
from gyre.train.orders import Orders
from gyre.train.peers import Peers
from gyre.train.processes import how_many, several
from gyre.train.protocols import LeftLineage
from gyre.train.satellite import Satellite
from gyre.types import Version
from gyre.weights.shared import Shared
from gyre.weights.snapshot import Snapshot
from gyre.weights.transfer import PolicyServer
from gyre.wire.messages import FromBuffer, FromTrain, Message, ToTrain

if TYPE_CHECKING:
    from gyre.train.ranks import RankedLearner

log = logging.getLogger(__name__)

T = TypeVar("T")

_CELL: Final = "core"  # the cell's name, if it was not given one
_FAREWELL_S: Final = 2.0


class _Thread:
    """The thread that computes; torch's number of threads is its alone."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(1, "compute", (lambda: torch.set_num_threads(threads)) if threads else None)

    async def __call__(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def close(self) -> None:
        """Waits for what is being computed."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Engines:
    """Publication to the engines that watch."""

    def __init__(self, make: Callable[[Version], Snapshot], server: PolicyServer, compute: _Thread, config: Config, publish_s: float) -> None:
        self._make, self._server, self._compute, self._config, self._publish_s = make, server, compute, config, publish_s

    async def lend(self, version: Version) -> None:
        self._server.publish(await self._compute(self._make, version))

    async def acknowledged(self, version: Version) -> list[str]:
        started = time.monotonic()
        cells = await self._server.wait_loaded(version, self._config.run.start_timeout_s, grace_s=self._config.net.engine_timeout_s)
        if version.step:  # the first publication is the run's beginning
            await asyncio.sleep(self._publish_s - (time.monotonic() - started))
        return cells


async def run(setup: Setup, worker: Worker, *, role: str = "core", resume: bool = False) -> None:
    """Take part until the run's last step is committed (the core: published and saved), or until told to stop.

    Raises `UsageError` or `WorkFailed`.
    """
    life = asyncio.create_task(_life(setup, worker, role, resume))
    stop = asyncio.create_task(worker.stop.wait())
    await asyncio.wait([life, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    life.cancel()  # no effect on one that is done
    try:
        await life
    except asyncio.CancelledError:
        if not worker.stop.is_set():
            raise
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the tasks; the others are its consequences."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def _life(setup: Setup, worker: Worker, role: str, resume: bool) -> None:
    """Serve weights from the beginning, so that engines may start first; then be what the role says."""
    cell = Cell(setup, worker, trains=role != "auto")
    try:
        cell.connect(listen=role != "satellite", alone=role == "core")
        async with asyncio.TaskGroup() as tasks:
            cell.tasks = tasks
            serving = [tasks.create_task(cell.server.serve(cell.handle))] if cell.server is not None else []
            match role:
                case "core":
                    await cell.be_core(resume, fresh=not resume)
                case "satellite":
                    await cell.be_satellite(setup.train)
                case _:
                    await cell.be_told(resume)
            for task in serving:
                task.cancel()
    finally:
        cell.close()


class Cell:
    """What a cell's trainer has whatever its role: a thread, the buffer, a socket for those who pull, its orders."""

    def __init__(self, setup: Setup, worker: Worker, *, trains: bool) -> None:
        self.setup, self.worker, self.config = setup, worker, setup.config
        self.name = setup.cell or setup.name or _CELL
        self.orders = Orders(worker, trains=trains)
        self.compute = _Thread(self.config.train.threads)
        self.server: Server | None = None
        self.tasks: asyncio.TaskGroup
        self._client: Client | None = None
        self._policy: PolicyServer | None = None
        self._peers: Peers | None = None
        self._watching: asyncio.Task[None] | None = None  # over the cell's other ranks

    def connect(self, *, listen: bool, alone: bool) -> None:
        """Bind and connect. `alone`: this is the run's only core, at the run directory's own address."""
        s, insecure = self.setup, self.config.net.insecure
        name = s.name or self.name
        if listen:
            address = s.bind or endpoint(s.run_dir, "train", "" if alone else self.name)
            self.server = Server.bind(address, ToTrain, kind="train", name=name, run_id=s.run_id, insecure=insecure, keys=s.keys)
            self._policy = PolicyServer(self.server.send)
            self.worker.server = self.server
        self._client = Client.connect(
            s.buffer, FromBuffer, kind="train", name=name, incarnation=self.worker.incarnation, run_id=s.run_id,
            resend_s=self.config.net.resend_s, keys=s.keys,
        )  # fmt: skip
        self.worker.cell, self.worker.address = self.name, self.server.address if self.server is not None else ""

    def close(self) -> None:
        """Wait for what is being computed, close the sockets."""
        self.compute.close()
        if self._client is not None:
            self._client.close()
        if self.server is not None:
            self.server.close()

    def handle(self, peer: Peer, message: Message, _: Any) -> None:
        """What engines and satellites ask. Satellites have no answer from a cell that is no core; they ask again."""
        if self._peers is not None and self._peers.handle(peer, message):
            return
        if self._policy is not None and not self._policy.handle(peer, message):
            log.debug("from %s %s: %s, and this cell is no core", peer.kind, peer.name, type(message).__name__)

    async def _buffer(self) -> Client:
        assert self._client is not None
        self.worker.status("starting", f"waiting for gyre-buffer at {self.setup.buffer}")
        await self._client.ready(self.config.run.start_timeout_s, "gyre-buffer")
        return self._client

    def _collective(self, learner: Learner | RankedLearner) -> TorchCollective:
        if isinstance(learner, Learner):
            wanted, natural = self.config.train.backend, "nccl" if learner.policy.device.type == "cuda" else "gloo"
            return TorchCollective(learner, self.compute, natural if wanted == "auto" else wanted)
        from gyre.train.ranks import RankedCollective

        self._watching = self.tasks.create_task(learner.watch())
        return RankedCollective(learner, self.compute)

    async def _end(self, learner: Learner | RankedLearner) -> None:
        """End its other ranks. Nothing is being computed any more."""
        if not isinstance(learner, Learner):
            if self._watching is not None:
                self._watching.cancel()
            await asyncio.to_thread(learner.close)

    # --- auto ---

    async def be_told(self, resume: bool) -> None:
        """Be what the newest order says, until the run's end."""
        self.worker.status("ready", "waits for the coordinator")
        await self.orders.be_told(self.name, lambda again: self.be_core(again, fresh=not again), self.be_satellite, resume)

    # --- core ---

    async def be_core(self, resume: bool, *, fresh: bool) -> None:
        """Load, take a term, train until the last step is committed, published and saved."""
        config, worker, server = self.config, self.worker, self.server
        assert server is not None and self._policy is not None
        worker.status("starting", "loading the model")
        learner, ledger, step = await self._take_term(resume, fresh)
        log.info("core of term %d from step %d of %d", ledger.term, step, learner.total_steps)
        worker.status("ready", f"step {step} of {learner.total_steps}", step=step)
        collective = self._collective(learner)
        policy = self._policy

        def make(version: Version) -> Snapshot:
            lent = policy.latest
            return lent if lent is not None and lent.version == version else learner.snapshot(version, Shared)

        store, spawn = collective.open_store(host_of(server.address)), self.tasks.create_task
        peers = self._peers = Peers(server.send, collective, store, make, self.compute, spawn, config, cell=self.name, ranks=how_many(config))
        board = Board(self.setup.run_dir / "tensorboard", purge_after=step)

        def save(term: int, at: int, lr: float) -> Path:
            return checkpoint.save(self.setup.run_dir / "checkpoints", learner, term=term, step=at, lr=lr, keep=config.train.keep_checkpoints)

        def report(detail: str, gauges: dict[str, float]) -> None:
            worker.version = Version(ledger.term, loop.step)
            worker.status("working", detail, **gauges)

        engines = _Engines(make, policy, self.compute, config, learner.publish_s)
        loop = Loop(
            learner, ledger, engines, peers, self.orders, self.compute, spawn, save, board, config, step=step, report=report,
        )  # fmt: skip
        self.orders.on_turn = ledger.hurry
        renewing = self.tasks.create_task(ledger.renew_for_ever())
        try:
            await loop.run()
            await self.compute(learner.sleep)  # the cell's engine may wake before this process has ended
            self.orders.phase("idle")
            worker.status("working", "lends the last policy until it is evaluated")
            await peers.farewell(_FAREWELL_S)
            await ledger.until_finished()  # engines that wake, or come back, pull it still
        finally:
            renewing.cancel()
            board.close()
            await asyncio.to_thread(self.compute.close)  # in threads: a second signal, which ends the process at once, must be seen meanwhile
            collective.close()
            if worker.stop.is_set() and not loop.dirty and loop.step > loop.saved:
                log.info("stopped after step %d: saved as %s", loop.step, await asyncio.to_thread(loop.save))
            await self._end(learner)

    async def _take_term(self, resume: bool, fresh: bool) -> tuple[Learner | RankedLearner, Ledger, int]:
        """Become the core from the newest checkpoint of the lineage that survives. Returns the step it begins at beside its parts."""
        before: int | None = None
        while True:
            found = await self.compute(checkpoint.last_good, self.setup.run_dir / "checkpoints", before) if resume else None
            learner = await self.compute(_learner, self.config, found)
            step, term = (found.state.step, found.state.term) if found else (0, 0)
            ledger = Ledger(await self._buffer(), self.config, cell=self.name, incarnation=self.worker.incarnation)
            try:
                learner.total_steps = await ledger.acquire(step, fresh=fresh, checkpoint_term=term)
                return learner, ledger, step
            except LeftLineage as e:
                log.warning("%s; trying an older one", e)
                before = step
                await self._end(learner)

    # --- satellite ---

    async def be_satellite(self, address: str) -> None:
        """Take part in the steps of the core at `address` until the run's last one is committed, or until cancelled."""
        config, worker = self.config, self.worker
        worker.status("starting", "loading the model")
        learner = await self.compute(_learner, config, None)
        client = await self._buffer()
        ledger = Ledger(client, config, cell=self.name, incarnation=worker.incarnation)
        collective = self._collective(learner)
        link = Client.connect(
            address, FromTrain, kind="train", name=self.name, incarnation=worker.incarnation, run_id=self.setup.run_id,
            resend_s=config.net.resend_s, keys=self.setup.keys,
        )  # fmt: skip
        core = CoreLink(link, learner.install, self.compute, config, cell=self.name, ranks=how_many(config))

        def turn() -> None:
            ledger.hurry()
            core.hurry(leaving=not self.orders.trains)

        def report(detail: str, gauges: dict[str, float]) -> None:
            if "step" in gauges:
                worker.version = Version(ledger.term, int(gauges["step"]) - 1)
            worker.status("working", detail, **gauges)

        self.orders.on_turn = turn
        worker.status("ready", f"satellite of the core at {address}")
        renewing = self.tasks.create_task(ledger.renew_for_ever())
        try:
            await Satellite(learner, ledger, core, collective, self.orders, self.compute, report=report).run()
        finally:
            renewing.cancel()
            self.orders.on_turn = lambda: None
            link.close()
            with contextlib.suppress(RuntimeError):  # the thread may be closed already
                await self.compute(collective.close)
            await self._end(learner)


def _learner(config: Config, found: checkpoint.Checkpoint | None) -> Learner | RankedLearner:
    """The model and its optimizer, from a checkpoint or from where the run starts."""
    source = found.path if found else Path(config.model.path)
    learner: Learner | RankedLearner
    torch.manual_seed(config.run.seed)
    if config.train.engine == "paced":
        from gyre.train.paced import open_paced

        learner = open_paced(config, found.path if found else None)
    elif not config.model.path and found is None:
        raise UsageError("run.toml", "missing", "name a Hugging Face model directory (--set model.path=DIR)", "model.path")
    elif several(config):
        from gyre.train.ranks import RankedLearner

        learner = RankedLearner(config, source, config.train.steps)
    else:
        learner = Learner(Policy.load(source, config.model, config.rollout.temperature, tree=takes_trees(config)), config.train, config.train.steps)
    if found:
        learner.read(found.path)
        log.info("resumed from %s", found.path)
    return learner
