"""gyre-train's process: sockets in the event loop, arithmetic in one thread beside it, so that pulls are served and leases renewed while it computes.

Not here: satellites (one cell, the core, for now).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch

from gyre.cli import Setup
from gyre.config import Config
from gyre.errors import UsageError
from gyre.net.endpoints import endpoint
from gyre.net.sockets import Client, Peer, Server
from gyre.net.worker import Worker
from gyre.train import checkpoint
from gyre.train.ledger import Ledger
from gyre.train.loop import Loop
from gyre.train.metrics import Board
from gyre.train.model import Policy
from gyre.train.optimizer import Learner
from gyre.train.processes import several
from gyre.types import Version
from gyre.weights.transfer import PolicyServer
from gyre.wire.messages import FromBuffer, Message, ToTrain

if TYPE_CHECKING:
    from gyre.train.ranks import RankedLearner

log = logging.getLogger(__name__)

T = TypeVar("T")

_CELL: Final = "core"  # the cell's name, if it was not given one


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

    def __init__(self, learner: Learner | RankedLearner, server: PolicyServer, compute: _Thread, config: Config) -> None:
        self._learner, self._server, self._compute, self._config = learner, server, compute, config

    async def lend(self, version: Version) -> None:
        self._server.publish(await self._compute(self._learner.snapshot, version))

    async def acknowledged(self, version: Version) -> list[str]:
        return await self._server.wait_loaded(version, self._config.run.start_timeout_s, grace_s=self._config.net.engine_timeout_s)


async def run(setup: Setup, worker: Worker, *, resume: bool = False) -> None:
    """Be the core until the run's last step is published and saved, or until told to stop. Raises `UsageError` or `WorkFailed`."""
    core = asyncio.create_task(_core(setup, worker, resume))
    stop = asyncio.create_task(worker.stop.wait())
    await asyncio.wait([core, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    core.cancel()  # no effect on one that is done
    try:
        await core
    except asyncio.CancelledError:
        if not worker.stop.is_set():
            raise
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the tasks; the others are its consequences."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def _core(setup: Setup, worker: Worker, resume: bool) -> None:
    """Serve weights from the beginning, so that engines may start first; load, become the core, train."""
    config = setup.config
    compute = _Thread(config.train.threads)
    server: Server | None = None
    client: Client | None = None
    ends = contextlib.AsyncExitStack()  # of what computes, when nothing is being computed any more
    try:
        server = Server.bind(
            setup.bind or endpoint(setup.run_dir, "train"), ToTrain,
            kind="train", name=setup.name or _CELL, run_id=setup.run_id, insecure=config.net.insecure,
        )  # fmt: skip
        client = Client.connect(
            setup.buffer, FromBuffer,
            kind="train", name=setup.name or _CELL, incarnation=worker.incarnation, run_id=setup.run_id, resend_s=config.net.resend_s,
        )  # fmt: skip
        policy = PolicyServer(server.send)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(lambda peer, message, _: _handle(policy, peer, message)))
            await _train(setup, worker, client, policy, compute, tasks, ends, resume)
            serving.cancel()
    finally:
        compute.close()
        await ends.aclose()
        if client is not None:
            client.close()
        if server is not None:
            server.close()


def _handle(policy: PolicyServer, peer: Peer, message: Message) -> None:
    if not policy.handle(peer, message):
        log.warning("from %s %s: %s is not for a trainer", peer.kind, peer.name, type(message).__name__)


async def _train(
    setup: Setup, worker: Worker, client: Client, policy: PolicyServer, compute: _Thread, tasks: asyncio.TaskGroup,
    ends: contextlib.AsyncExitStack, resume: bool,
) -> None:  # fmt: skip
    config = setup.config
    worker.status("starting", "loading the model")
    found = await compute(checkpoint.last_good, setup.run_dir / "checkpoints") if resume else None
    learner = await compute(_learner, config, found)
    watching: asyncio.Task[None] | None = None
    if not isinstance(learner, Learner):
        ends.push_async_callback(asyncio.to_thread, learner.close)
        watching = tasks.create_task(learner.watch())
    worker.status("starting", f"waiting for gyre-buffer at {setup.buffer}")
    await client.ready(config.run.start_timeout_s, "gyre-buffer")
    ledger = Ledger(client, config, cell=setup.name or _CELL, incarnation=worker.incarnation)
    step = found.state.step if found else 0
    learner.total_steps = await ledger.acquire(step, fresh=not resume)
    log.info("core of term %d from step %d of %d", ledger.term, step, learner.total_steps)
    worker.status("ready", f"step {step} of {learner.total_steps}", step=step)
    board = Board(setup.run_dir / "tensorboard", purge_after=step)
    renewing = tasks.create_task(ledger.renew_for_ever())
    loop = Loop(
        cast(Learner, learner), ledger, _Engines(learner, policy, compute, config), compute, tasks.create_task, board, config,
        setup.run_dir / "checkpoints",
        step=step, total_steps=learner.total_steps, report=lambda detail, gauges: worker.status("working", detail, **gauges),
    )  # fmt: skip
    try:
        await loop.run()
    finally:
        renewing.cancel()
        if watching is not None:
            watching.cancel()
        board.close()
        await asyncio.to_thread(compute.close)  # in threads: a second signal, which ends the process at once, must be seen meanwhile
        if worker.stop.is_set() and not loop.dirty and loop.step > loop.saved:
            log.info("stopped after step %d: saved as %s", loop.step, await asyncio.to_thread(loop.save))


def _learner(config: Config, found: checkpoint.Checkpoint | None) -> Learner | RankedLearner:
    """The model and its optimizer, from a checkpoint or from where the run starts."""
    if not config.model.path and found is None:
        raise UsageError("run.toml", "missing", "name a Hugging Face model directory (--set model.path=DIR)", "model.path")
    torch.manual_seed(config.run.seed)
    source = found.path if found else Path(config.model.path)
    learner: Learner | RankedLearner
    if several(config):
        from gyre.train.ranks import RankedLearner

        learner = RankedLearner(config, source, config.train.steps)
    else:
        learner = Learner(Policy.load(source, config.model, config.rollout.temperature), config.train, config.train.steps)
    if found:
        checkpoint.restore(learner, found)
        log.info("resumed from %s", found.path)
    return learner
