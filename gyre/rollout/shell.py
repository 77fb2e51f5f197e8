"""gyre-rollout: an engine behind a socket, following the trainer's policy.

Invariants
- Before an engine serves a version, pongs say so (version null) and requests are refused as `behind`; pings are answered from the first moment, so
  that a slow load is not taken for a death.
- A request is answered once per message id, and again when that message is repeated (a lost answer); repeated while it runs, it runs once.
- A client that goes away changes nothing: its requests go on and their answers wait in the memory of answers.
- The first request of a (new or woken) engine is taken after its version was acknowledged to the trainer that lent it.
- Told by the coordinator to give its cell to training, it refuses as `closing`, answers what is in flight as `abort` with the tokens had until then,
  sleeps, and only then says so. Told to roll out it wakes and follows the core that the order names. The newest order counts, in whatever order
  they come.
- On stop: requests are refused as `closing`, those in flight are answered with what they have, then the process ends.

Not here: what an engine does (engine.py), how weights travel (gyre/weights/transfer.py).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gyre.config import Config
from gyre.errors import DeadlineExceeded
from gyre.net.endpoints import endpoint
from gyre.net.sockets import Client, Peer, Server, mint
from gyre.rollout.engine import INITIAL, Completion, Engine, EngineRefused, EngineRequest
from gyre.types import TensorSpec, Version
from gyre.weights.transfer import PolicyClient
from gyre.wire.arrays import f32, i32
from gyre.wire.codec import Arrays
from gyre.wire.messages import Abort, EngineRefuse, FromTrain, Generate, Generated, Message, Ping, Pong, ToRollout

if TYPE_CHECKING:
    from gyre.cli import Setup
    from gyre.net.worker import Worker

log = logging.getLogger(__name__)

ANSWERS_KEPT: Final = 1024
STATUS_EVERY_S: Final = 1.0


def open_engine(config: Config) -> Engine:
    """The engine that the configuration names. Slow (it reads weights). Raises `UsageError`."""
    if config.rollout.engine == "scripted":
        from gyre.rollout.scripted import open_scripted

        return open_scripted(config)
    if config.rollout.engine == "paced":
        from gyre.rollout.paced import open_paced

        return open_paced(config)
    # Threads that spin at barriers cost a shared machine an order of magnitude; OpenMP reads this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if config.rollout.engine == "vllm":
        from gyre.rollout.vllm_engine import open_vllm

        return open_vllm(config)
    from gyre.rollout.torch_engine import open_torch

    return open_torch(config)


class _Job(msgspec.Struct):
    """A request in flight: whom to answer, and which message."""

    peer: Peer
    cause: str


class Desk:
    """The engine's side of the wire: messages in, answers out. `engine` is None until it is open."""

    def __init__(self, server: Server, cell: str, context: int) -> None:
        self.engine: Engine | None = None
        self._server = server
        self._cell = cell
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[str, _Job] = {}
        self._answers: OrderedDict[str, tuple[Generated, Completion]] = OrderedDict()
        self._idle = asyncio.Event()
        self.version: Version | None = None  # acknowledged

    def handle(self, peer: Peer, message: Message, arrays: Arrays) -> None:
        match message:
            case Generate():
                self._generate(peer, message, arrays)
            case Abort():
                if self.engine is not None:
                    self.engine.abort(message.request_id)
            case Ping():
                self._server.send(peer, self._pong(peer, message))

    def _generate(self, peer: Peer, message: Generate, arrays: Arrays) -> None:
        if message.id in self._answers:
            self._send(peer, *self._answers[message.id])
            return
        job = self._jobs.get(message.request_id)
        if job is not None:
            job.peer, job.cause = peer, message.id
            return
        try:
            future = self._submit(message, arrays)
        except EngineRefused as e:
            self._server.send(
                peer,
                EngineRefuse(
                    id=mint(),
                    cause=message.id,
                    request_id=message.request_id,
                    reason=e.reason,
                    detail=e.detail,
                    context_limit=self.engine.context if self.engine is not None else self._context,
                ),
            )
            return
        self._jobs[message.request_id] = _Job(peer, message.id)
        future.add_done_callback(lambda f: self._loop.call_soon_threadsafe(self._finished, message.request_id, f))

    def _submit(self, message: Generate, arrays: Arrays) -> Future[Completion]:
        if self.engine is None:
            raise EngineRefused("behind", "no model is loaded")
        if self.version is None and self.engine.state().version is not None:
            raise EngineRefused("behind", "the version loaded is not acknowledged yet")
        return self.engine.submit(
            EngineRequest(
                request_id=message.request_id,
                rollout_id=message.rollout_id,
                prompt_ids=arrays["prompt_ids"],
                sampling=message.sampling,
                seed=message.seed,
                drawn=message.drawn,
                stop_ids=message.stop_ids,
                min_version=message.min_version,
                moved=message.moved,
            )
        )

    def _finished(self, request_id: str, future: Future[Completion]) -> None:
        job = self._jobs.pop(request_id)
        if not self._jobs:
            self._idle.set()
        if future.exception() is not None:
            return  # the engine has died of it, and so will this process
        done = future.result()
        message = Generated(id=mint(), cause=job.cause, request_id=request_id, finish_reason=done.finish_reason, spans=done.spans, cell=self._cell)
        self._answers[job.cause] = message, done
        if len(self._answers) > ANSWERS_KEPT:
            self._answers.popitem(last=False)
        self._send(job.peer, message, done)

    def _send(self, peer: Peer, message: Generated, done: Completion) -> None:
        self._server.send(peer, message, {"token_ids": i32(done.token_ids), "logprobs": f32(done.logprobs)})

    def _pong(self, peer: Peer, ping: Ping) -> Pong:
        state = self.engine.state() if self.engine is not None else None
        return Pong(
            id=mint(),
            cause=ping.id,
            incarnation=self._server.incarnation,
            cell=self._cell,
            version=state.version if state and self.version is not None else None,
            request_ids=[r for r, job in self._jobs.items() if (job.peer.name, job.peer.incarnation) == (peer.name, peer.incarnation)],
            free_slots=state.free if state and state.version is not None else 0,
            context_limit=self.engine.context if self.engine is not None else self._context,
            slots=state.slots if state else 0,
            open=len(self._jobs),
        )

    async def close(self, deadline_s: float = 5.0) -> None:
        """Answer everything in flight with what it has. The engine has ended afterwards."""
        if self.engine is None:
            return
        await asyncio.to_thread(self.engine.close)
        self._idle.clear()
        if self._jobs:
            try:
                async with asyncio.timeout(deadline_s):
                    await self._idle.wait()
            except TimeoutError:
                log.warning("%d requests were not answered", len(self._jobs))


async def run(setup: Setup, worker: Worker, *, follow: bool = True, auto: bool = False) -> None:
    """Serve until told to stop.

    Without `follow`, the model on disk is served as version (0, 0); `auto`: asleep, without a model, until the coordinator's first order.
    """
    config, cell = setup.config, setup.cell or setup.name or "rollout"
    server = Server.bind(
        setup.bind or endpoint(setup.run_dir, "rollout", setup.name),
        ToRollout,
        kind="rollout",
        name=cell,
        run_id=setup.run_id,
        insecure=config.net.insecure,
        keys=setup.keys,
    )
    worker.cell, worker.address, worker.server = cell, server.address, server
    desk = Desk(server, cell, config.rollout.context)
    part = Part(setup, worker, desk, cell, follow=follow, auto=auto)
    tasks = [
        asyncio.create_task(server.serve(desk.handle), name="serve"),
        asyncio.create_task(part.run(), name="part"),
        asyncio.create_task(_report(worker, desk), name="report"),
    ]
    stop = asyncio.create_task(worker.stop.wait())
    try:
        ended, _ = await asyncio.wait([*tasks, stop], return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        worker.status("draining")
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        await desk.close()
    finally:
        for task in (*tasks, stop):
            task.cancel()
        await asyncio.gather(*tasks, stop, return_exceptions=True)
        await desk.close()
        server.close()


class Part:
    """The engine's part in its cell's role: serving the trainer's newest version, or asleep. `run` ends only by an error, the engine's death among
    them."""

    def __init__(self, setup: Setup, worker: Worker, desk: Desk, cell: str, *, follow: bool, auto: bool) -> None:
        self._setup, self._worker, self._desk, self._cell, self._follow, self._auto = setup, worker, desk, cell, follow, auto
        self._ordered = asyncio.Event()
        worker.on_role = lambda order: self._ordered.set()
        if worker.order is not None:
            self._ordered.set()

    async def open(self) -> Engine:
        """The engine. Raises `UsageError`."""
        return await asyncio.to_thread(open_engine, self._setup.config)

    def connect(self, core: str, on_push: Callable[[Message, Arrays], None]) -> Client:
        """To the core, whose policy is followed."""
        s = self._setup
        return Client.connect(
            core, FromTrain, kind="rollout", name=self._cell, incarnation=self._worker.incarnation, run_id=s.run_id,
            resend_s=s.config.net.resend_s, on_push=on_push, keys=s.keys,
        )  # fmt: skip

    async def run(self) -> None:
        asleep = self._auto
        if asleep:
            self._worker.set_role("asleep")
            await self._ordered.wait()
        while True:
            self._ordered.clear()
            order = self._worker.order
            if order is not None and order.role == "train":
                await self._sleep()
                await self._ordered.wait()
            else:
                await self._serve(order.core if order is not None and order.core else self._setup.train)

    async def _sleep(self) -> None:
        engine, worker = self._desk.engine, self._worker
        if engine is not None and worker.role != "asleep":
            worker.set_role("closing")
            await asyncio.wrap_future(engine.drain())
            self._desk.version = None
            await asyncio.wrap_future(engine.sleep())
            log.info("asleep")
        worker.version = None
        worker.set_role("asleep")

    async def _serve(self, core: str) -> None:
        """Until the next order."""
        desk, worker = self._desk, self._worker
        if desk.version is None:
            worker.set_role("waking")
        if desk.engine is None:
            desk.engine = await self.open()
            log.info("%s is ready for a policy", self._cell)
        else:
            await asyncio.wrap_future(desk.engine.wake())
        following = asyncio.create_task(self._policy(desk.engine, core))
        stopped = asyncio.wrap_future(desk.engine.stopped)
        ordered = asyncio.create_task(self._ordered.wait())
        ends: list[asyncio.Future[Any]] = [following, stopped, ordered]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for future in (stopped, following):
                if future.done():
                    future.result()
        finally:
            following.cancel()
            ordered.cancel()
            await asyncio.gather(following, ordered, return_exceptions=True)

    async def _load(self, version: Version, tensors: list[TensorSpec], data: memoryview) -> None:
        engine, worker, started = self._desk.engine, self._worker, time.monotonic()
        assert engine is not None
        await asyncio.wrap_future(engine.load(version, tensors, data))
        log.info("serving version %d.%d after %.2f s", version.term, version.step, time.monotonic() - started)
        self._desk.version = worker.version = version  # what follows, up to the sending of the acknowledgement, takes no other turn
        if worker.role != "serving":
            asyncio.get_running_loop().call_soon(worker.set_role, "serving")

    async def _policy(self, engine: Engine, core: str) -> None:
        if not self._follow:
            await self._load(INITIAL, [], memoryview(b""))
            await asyncio.Event().wait()
        while True:
            connect = functools.partial(self.connect, core)
            client = PolicyClient(connect, self._load, cell=self._cell, request_timeout_s=self._setup.config.net.request_timeout_s)
            try:
                await client.run(self._setup.config.run.start_timeout_s)
            except DeadlineExceeded as e:
                if self._worker.order is None:
                    raise
                log.warning("%s; asking again", e)  # the coordinator knows what has become of the core, and will name another


async def _report(worker: Worker, desk: Desk) -> None:
    before, at = 0, time.monotonic()
    while True:
        await asyncio.sleep(STATUS_EVERY_S)
        now = time.monotonic()
        if worker.role in ("asleep", "closing"):
            worker.status("ready", worker.role)
            continue
        if desk.engine is None:
            worker.status("starting", "loading the model")
            continue
        state = desk.engine.state()
        rate = (state.generated - before) / (now - at)
        before, at = state.generated, now
        if state.version is None:
            worker.status("starting", "waiting for a policy")
        else:
            phase = "working" if state.running else "ready"
            gauges = {"tokens_s": rate, "in_flight": state.running, "queued": state.queued, "term": state.version.term, "version": state.version.step}
            worker.status(phase, "", **gauges, **state.gauges)
