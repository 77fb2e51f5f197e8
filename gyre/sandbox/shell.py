"""gyre-sandbox: leases tickets, runs them, reports what became of them.

Invariants
- At most `slots` executions at once; a slot is free again when its outcome is acknowledged (or refused: the lease was another's by then).
- Leases are renewed at a third of their time; an execution whose lease is lost is killed, since its outcome would be refused.
- A bug in an execution ends the process with its traceback; a buffer that stays away for `net.request_timeout_s` ends it too. An execution's own
  faults are endings (see `execute`).
- Told to stop, it takes no more tickets and gives running executions a moment; what is left then is killed, and its leases expire.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from gyre.cli import Setup
from gyre.config import Config
from gyre.errors import DeadlineExceeded, UsageError
from gyre.net.sockets import Client, mint
from gyre.net.worker import Worker
from gyre.sandbox.backends.choose import choose
from gyre.sandbox.execute import Ended, Executor
from gyre.sandbox.gateway.http import CONNECTIONS
from gyre.sandbox.gateway.render import Renderer
from gyre.sandbox.gateway.route import Router
from gyre.sandbox.gateway.template import ChatTemplate
from gyre.sandbox.paced import open_paced
from gyre.types import Ticket
from gyre.wire.messages import FromBuffer, GradingStarted, LeaseRef, LeasesRenewed, LeaseTickets, Refuse, RenewLeases, Tickets

log = logging.getLogger(__name__)

_POLL_S: Final = 10.0
_DESCRIPTORS: Final = 256  # beside those of connections


async def run(setup: Setup, worker: Worker, drain_s: float = 5.0) -> None:
    """Run tickets until the buffer says that no more are needed, or until told to stop."""
    config = setup.config
    identity: dict[str, Any] = {
        "name": setup.name, "incarnation": worker.incarnation, "run_id": setup.run_id, "resend_s": config.net.resend_s, "keys": setup.keys
    }  # fmt: skip
    buffer = Client.connect(setup.buffer, FromBuffer, kind="sandbox", **identity)
    patience_s = max(config.net.request_timeout_s, config.run.start_timeout_s)
    router = Router.connect(setup.rollouts, config.net.engine_timeout_s, patience_s, **identity)
    worker.on_routes = router.follow
    if worker.routes is not None:
        router.follow(worker.routes)
    try:
        async with _executor(config, router, setup.run_id) as executor:
            await Shell(setup, worker, buffer, executor, router).run(drain_s)
    finally:
        router.close()
        buffer.close()


class _Executes(Protocol):
    """Runs tickets: `Executor`, or one that only plays them."""

    async def execute(self, ticket: Ticket, grading: Callable[[], None]) -> Ended: ...


@asynccontextmanager
async def _executor(config: Config, router: Router, run_id: str) -> AsyncIterator[_Executes]:
    """What runs tickets, with all that it needs. Raises `UsageError`."""
    if config.sandbox.backend == "paced":
        yield open_paced(config, router)
        return
    if not config.model.path:
        raise UsageError("run.toml", "missing", "give the model directory whose tokenizer and chat template are used", "model.path")
    renderer = Renderer(ChatTemplate.load(Path(config.model.path)))
    if renderer.end_id is None:
        log.warning("%s: the chat template has no end-of-turn token after a reply: every call is rendered in full, as a branch", config.model.path)
    _allow_descriptors(_DESCRIPTORS + config.sandbox.slots * CONNECTIONS)
    backend = choose(config.sandbox.backend, unsafe=config.sandbox.unsafe, table=config.sandbox, run=run_id)
    await backend.start()
    for note in backend.notes:
        log.warning("%s", note)
    executor = Executor(config, backend, router, renderer)
    try:
        yield executor
    finally:
        executor.close()
        await backend.close()


class Shell:
    """Leases tickets, has them executed, and reports what came of it."""

    def __init__(self, setup: Setup, worker: Worker, buffer: Client, executor: _Executes, router: Router) -> None:
        self._setup, self._worker, self._buffer, self._executor, self._router = setup, worker, buffer, executor, router
        self._slots = setup.config.sandbox.slots
        self._running: dict[LeaseRef, asyncio.Task[None]] = {}
        self._ttl_s = setup.config.sandbox.lease_ttl_s
        self._ended = 0
        self._finished = False
        self._bug: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # what an execution raised

    async def run(self, drain_s: float) -> None:
        """Until the run needs no more, or `stop`. What any part raises ends all."""
        try:
            await self._until_stop(self._buffer.ready(self._setup.config.run.start_timeout_s, "gyre-buffer"))
            self._status()
            parts = [asyncio.create_task(part) for part in (self._lease(), self._renew(), self._router.watch())]
            stop = asyncio.create_task(self._worker.stop.wait())
            try:
                ends: list[asyncio.Future[Any]] = [*parts, stop, self._bug]
                while not self._finished and not stop.done():
                    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                    for part in done:
                        part.result()
                if self._running and not self._finished:
                    log.info("stopping; %d executions have %.0f s to end", len(self._running), drain_s)
                    parts[0].cancel()
                    await asyncio.wait(self._running.values(), timeout=drain_s)
                if self._bug.done():
                    self._bug.result()
            finally:
                for task in [*parts, stop]:
                    task.cancel()
                await asyncio.wait([*parts, stop])
        finally:
            await self._kill_all()

    async def _kill_all(self) -> None:
        while self._running:
            for task in self._running.values():
                _cancel(task)
            await asyncio.wait(self._running.values(), timeout=1.0)
            await asyncio.sleep(0)  # its callback frees the slot

    async def _until_stop(self, waiting: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(waiting)
        stop = asyncio.ensure_future(self._worker.stop.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            task.cancel()
            stop.cancel()

    def _status(self) -> None:
        self._worker.status("working", f"{len(self._running)} of {self._slots} slots", running=len(self._running), ended=self._ended)

    async def _lease(self) -> None:
        """Fill free slots. Returns when the run needs no more rollouts."""
        while True:
            free = self._slots - len(self._running)
            if free == 0:
                await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(0)  # its callback frees the slot
                continue
            ask = LeaseTickets(id=mint(), n=free, wait_s=_POLL_S)
            reply, _ = await self._buffer.request(ask, deadline_s=_POLL_S + self._setup.config.net.request_timeout_s, what="tickets of gyre-buffer")
            if not isinstance(reply, Tickets):
                log.warning("the buffer answered a request for tickets with %s", reply)
                await asyncio.sleep(1.0)
                continue
            for ticket in reply.tickets:
                self._start(ticket)
            if reply.finished:
                self._finished = True
                return

    def _start(self, ticket: Ticket) -> None:
        ref = LeaseRef(ticket.rollout_id, ticket.epoch)
        if ref in self._running:
            return
        self._ttl_s = ticket.lease_ttl_s
        task = asyncio.create_task(self._one(ticket), name=ticket.rollout_id)
        self._running[ref] = task
        task.add_done_callback(lambda t: self._free(ref, t))
        self._status()

    def _free(self, ref: LeaseRef, task: asyncio.Task[None]) -> None:
        del self._running[ref]
        if not task.cancelled() and (error := task.exception()) is not None and not self._bug.done():
            self._bug.set_exception(error)
        self._ended += 1
        self._status()

    async def _one(self, ticket: Ticket) -> None:
        def grading() -> None:
            self._buffer.send(GradingStarted(id=mint(), rollout_id=ticket.rollout_id, epoch=ticket.epoch))

        ended = await self._executor.execute(ticket, grading)
        log.debug("%s: %s %s", ticket.rollout_id, ended.message.ending, ended.message.detail)
        await self._report(ended)

    async def _report(self, ended: Ended) -> None:
        """Say it until the buffer has it on disk, or refuses it."""
        message = ended.message
        deadline_s, what = self._setup.config.net.request_timeout_s, f"gyre-buffer to take the outcome of {message.rollout_id}"
        reply, _ = await self._buffer.request(message, ended.arrays, deadline_s=deadline_s, what=what)
        if isinstance(reply, Refuse):
            log.warning("the outcome of %s was refused: %s", message.rollout_id, reply.reason)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            if not self._running:
                continue
            try:
                reply, _ = await self._buffer.request(
                    RenewLeases(id=mint(), leases=list(self._running)), deadline_s=self._ttl_s, what="leases to be renewed"
                )
            except DeadlineExceeded as e:
                log.warning("%s", e)
                continue
            if isinstance(reply, LeasesRenewed):
                for ref in reply.lost:
                    if (task := self._running.get(ref)) is not None:
                        log.warning("the lease of %s (epoch %d) is lost", ref.rollout_id, ref.epoch)
                        _cancel(task)


def _allow_descriptors(n: int) -> None:
    """Agents decide how many connections they open: no number of them may be the end of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < n:
        log.warning("only %d files may be open (ulimit -Hn): %d would be safe for so many slots", hard, n)
        n = hard
    if soft != resource.RLIM_INFINITY and soft < n:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n, hard))


def _cancel(task: asyncio.Task[None]) -> None:
    """Once: a second time would interrupt its cleaning up. That may be on already, after the overall timeout say."""
    if not task.cancelling():
        task.cancel()
