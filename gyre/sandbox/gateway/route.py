"""From a prompt to its completion, over however many engines it takes.

Invariants
- A call goes only to an engine that acknowledged the wanted version or a later one. A continuation wants the version of its last token.
- No token is drawn twice: what an engine gave back with `abort` is kept, and the next engine continues behind it (`drawn`, remaining budget).
- A request of a lost engine (another incarnation answers, or none within `engine_timeout_s`) is retried elsewhere from the tokens already had.
- Every wait is bounded by the call's deadline, or by `patience_s` without any engine that could serve it, and the error names what was waited for.
  Engines that a route table says are closed are asleep by order, not lost: with no other in it, a call waits as long as its own deadline allows.
- A call goes to the least loaded engine; one that an engine gave back, of those about as loaded, to the one that will stay longest.

Which engines there are, and which are open, says the coordinator's route table; before the first one, and without a coordinator, it is the addresses
that this process was given. Routes are advice: an engine alone decides what it admits.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec

from gyre.errors import DeadlineExceeded, WorkFailed
from gyre.net.sockets import Client, mint
from gyre.sandbox.gateway.line import Lines
from gyre.types import Sampling, Version
from gyre.wire.messages import Abort, EngineRefuse, FromRollout, Generate, Generated, Ping, Pong, Routes

log = logging.getLogger(__name__)

_PING_S: Final = 1.0
_HURRY_S: Final = 0.05  # pings are at least so far apart when a call waits
_ABORT_S: Final = 10.0  # how long an engine may take to give back an aborted request
_BACK_OFF_S: Final = 0.2  # an engine that refused is left alone for so long
_ALIKE: Final = 0.25  # loads that differ by less than this part of an engine's slots are alike


def _now() -> float:
    return asyncio.get_running_loop().time()


class EngineLost(WorkFailed):
    """No engine could serve a call within patience."""


class ContextFull(WorkFailed):
    """The prompt does not fit the engine's context. `limit` in tokens."""

    def __init__(self, n_prompt: int, limit: int) -> None:
        super().__init__(f"the prompt has {n_prompt} tokens, the context holds {limit}")
        self.n_prompt, self.limit = n_prompt, limit


class Job(NamedTuple):
    """One call to be generated."""

    rollout_id: str
    name: str  # unique: request ids derive from it
    prompt: array[int]
    sampling: Sampling
    seed: int
    policy: Version
    deadline: float  # of the event loop
    aborted: asyncio.Future[None]  # set: the caller is gone, give back what there is
    stop_ids: Sequence[int] = ()  # end the completion, beside the model's own


class Completion(NamedTuple):
    """What was sampled: equal lengths; `versions` are policy steps. `finish` is stop | length | context | abort."""

    token_ids: array[int]
    logprobs: array[float]
    versions: array[int]
    finish: str
    cells: list[str]  # the engines that had a part in it, the last one finished it


class Engine:
    """What is known of one engine: from its last pong, and from our own requests."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self.client = client
        self.timeout_s = timeout_s
        self.rank = 0
        self.open = True  # says the route table
        self.pong: Pong | None = None  # None: not reachable
        self.in_flight = 0
        self.since_pong = 0  # requests sent since the last pong
        self.rest_until = 0.0
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._poked = asyncio.Event()

    @property
    def name(self) -> str:
        return self.pong.cell if self.pong else self.client.address

    def serves(self, wanted: Version) -> bool:
        return self.pong is not None and self.pong.version is not None and self.pong.version >= wanted

    @property
    def load(self) -> float:
        """Requests for each that it decodes together: our own as they are now, the others' as of its last pong."""
        if self.pong is None or not self.pong.slots:
            return float(self.in_flight)
        return (self.in_flight + self.pong.open - len(self.pong.request_ids)) / self.pong.slots

    @property
    def tells_slots(self) -> bool:
        return self.pong is not None and self.pong.slots > 0

    @property
    def roomy(self) -> bool:
        """It would decode one more at once, as far as is known. Its queue is for what several gateways send at the same time."""
        if self.tells_slots:
            return self.load < 1
        return self.pong is not None and self.pong.free_slots > self.since_pong

    def poke(self) -> None:
        """Ask for a pong soon."""
        self._poked.set()

    def set_pong(self, pong: Pong | None) -> None:
        if self.pong is not None and (pong is None or pong.incarnation != self.pong.incarnation):
            log.warning("engine %s is lost (%s)", self.name, "restarted" if pong else f"silent for {self.timeout_s:.0f} s")
            self.lose()
        self.pong = pong
        self.since_pong = 0

    def lose(self) -> None:
        """What it held is asked again elsewhere."""
        self.lost.set_result(None)
        self.lost = asyncio.get_running_loop().create_future()

    async def watch(self, changed: asyncio.Event) -> None:
        """Ping until cancelled, and tell every change."""
        while True:
            try:
                reply, _ = await self.client.request(Ping(id=mint()), deadline_s=self.timeout_s, what="a pong of the engine")
                self.set_pong(reply if isinstance(reply, Pong) else None)
            except DeadlineExceeded:
                self.set_pong(None)
            changed.set()
            await asyncio.sleep(_HURRY_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._poked.wait(), _PING_S)
            self._poked.clear()


class _Partial:
    """Tokens had so far for one job."""

    def __init__(self) -> None:
        self.token_ids: array[int] = array("i")
        self.logprobs: array[float] = array("f")
        self.versions: array[int] = array("i")
        self.last_version: Version | None = None
        self.cells: list[str] = []
        self.moved = False  # an engine gave it back

    def add(self, reply: Generated, arrays: dict[str, memoryview]) -> None:
        n = len(arrays["token_ids"])
        if len(arrays["logprobs"]) != n or (reply.spans[-1].end if reply.spans else 0) != n:
            raise WorkFailed(f"engine {reply.cell}: {n} tokens, but log-probs or version spans for another number")
        self.token_ids.frombytes(arrays["token_ids"].cast("B"))
        self.logprobs.frombytes(arrays["logprobs"].cast("B"))
        for span in reply.spans:
            self.versions.extend(array("i", [span.version.step]) * (span.end - span.start))
            self.last_version = span.version
        if reply.cell not in self.cells:
            self.cells.append(reply.cell)

    def done(self, finish: str) -> Completion:
        return Completion(self.token_ids, self.logprobs, self.versions, finish, self.cells)


class Router:
    """All engines, shared by the rollouts of one process. `connect` makes a client of an address."""

    def __init__(self, addresses: Sequence[str], connect: Callable[[str], Client], timeout_s: float, patience_s: float) -> None:
        self.patience_s = patience_s
        self._connect, self._timeout_s = connect, timeout_s
        self._changed = asyncio.Event()
        self._lines = Lines()
        self._engines: dict[str, tuple[Engine, asyncio.Task[None]]] = {}  # by address
        self._epoch: int | None = None  # of the route table
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for address in addresses:
            self._add(address)

    @classmethod
    def connect(cls, addresses: Sequence[str], timeout_s: float, patience_s: float, **identity: Any) -> Router:
        """`identity`: name, incarnation, run_id, resend_s, keys of `Client.connect`."""
        return cls(addresses, lambda a: Client.connect(a, FromRollout, kind="sandbox", **identity), timeout_s, patience_s)

    @property
    def engines(self) -> list[Engine]:
        return [engine for engine, _ in self._engines.values()]

    def _add(self, address: str) -> None:
        engine = Engine(self._connect(address), self._timeout_s)
        watcher = asyncio.create_task(engine.watch(self._changed))
        watcher.add_done_callback(self._watched)
        self._engines[address] = engine, watcher

    def _watched(self, watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled() and (error := watcher.exception()) is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _remove(self, address: str) -> None:
        engine, watcher = self._engines.pop(address)
        watcher.cancel()
        engine.lose()
        engine.client.close()

    def follow(self, routes: Routes) -> None:
        """Take up a route table, unless a newer one is known. Engines that are not in it are let go; what they held is asked again elsewhere."""
        if self._epoch is not None and routes.epoch <= self._epoch:
            return
        self._epoch = routes.epoch
        known = {route.address: route for route in routes.engines}
        for address in self._engines.keys() - known.keys():
            self._remove(address)
        for address, route in known.items():
            if address not in self._engines:
                self._add(address)
            engine, _ = self._engines[address]
            if route.open and not engine.open:
                engine.poke()
            engine.open, engine.rank = route.open, route.rank
        self._changed.set()

    async def watch(self) -> None:
        """Runs until cancelled; raises what a watcher raised (an engine refused this process, a bug)."""
        await asyncio.shield(self._ended)

    def close(self) -> None:
        for engine, watcher in self._engines.values():
            watcher.cancel()
            engine.client.close()
        self._ended.cancel()

    async def generate(self, job: Job) -> Completion:
        """Raises `ContextFull`, `EngineLost`, or `DeadlineExceeded` at the job's deadline."""
        partial = _Partial()
        attempt = 0
        while True:
            if job.aborted.done():
                return partial.done("abort")
            budget = job.sampling.max_tokens - len(partial.token_ids)
            if budget <= 0:
                return partial.done("length")
            wanted = max(job.policy, partial.last_version or job.policy)
            engine = await self._choose(wanted, job, returned=partial.moved)
            if engine is None:
                continue  # aborted meanwhile
            attempt += 1
            finish = await self._try(engine, job, partial, wanted, budget, attempt)
            if finish is not None:
                return partial.done(finish)

    async def _try(self, engine: Engine, job: Job, partial: _Partial, wanted: Version, budget: int, attempt: int) -> str | None:
        """One request to one engine; how the call finished, or None if it goes on elsewhere."""
        message = Generate(
            id=mint(),
            request_id=f"{job.name}.{attempt}",
            rollout_id=job.rollout_id,
            min_version=wanted,
            sampling=msgspec.structs.replace(job.sampling, max_tokens=budget),
            seed=job.seed,
            drawn=len(partial.token_ids),
            stop_ids=list(job.stop_ids),
            moved=partial.moved,
        )
        prompt = job.prompt + partial.token_ids if partial.token_ids else job.prompt
        engine.in_flight += 1
        engine.since_pong += 1
        try:
            answer = await self._ask(engine, job, message, prompt)
        finally:
            engine.in_flight -= 1
            self._changed.set()
        match answer:
            case None:
                engine.rest_until = _now() + _BACK_OFF_S
                return None
            case Generated() as reply, arrays:
                partial.add(reply, arrays)
                if reply.finish_reason != "abort":
                    return reply.finish_reason
                if not job.aborted.done():
                    partial.moved = True
                    engine.rest_until = _now() + _BACK_OFF_S  # it is closing
                    engine.poke()
                return None
            case EngineRefuse() as reply, _:
                return self._refused(engine, job, partial, reply)
            case _:
                raise WorkFailed(f"engine {engine.name} answered a request with {answer!r:.200}")

    def _refused(self, engine: Engine, job: Job, partial: _Partial, reply: EngineRefuse) -> str | None:
        match reply.reason:
            case "context":
                if partial.token_ids:
                    return "context"
                raise ContextFull(len(job.prompt), reply.context_limit)
            case "full" | "closing" | "behind":
                engine.rest_until = _now() + _BACK_OFF_S
                engine.poke()
                return None
            case _:
                raise WorkFailed(f"engine {engine.name} refused a request: {reply.reason} {reply.detail}")

    async def _ask(self, engine: Engine, job: Job, message: Generate, prompt: array[int]) -> Any:
        """The engine's reply, or None if the engine was lost. When the caller goes, the request is aborted and its tokens awaited, for a while."""
        left = job.deadline - _now()
        request = asyncio.ensure_future(
            engine.client.request(message, {"prompt_ids": prompt}, deadline_s=max(left, 0.0), what=f"call {job.name} on {engine.name}")
        )
        abort = Abort(id=mint(), cause=message.id, request_id=message.request_id)
        lost = engine.lost
        try:
            await asyncio.wait((request, lost, job.aborted), return_when=asyncio.FIRST_COMPLETED)
            if job.aborted.done() and not request.done() and not lost.done():
                engine.client.send(abort)
                await asyncio.wait((request, lost), timeout=_ABORT_S, return_when=asyncio.FIRST_COMPLETED)
            return request.result() if request.done() else None
        finally:
            if not request.done() or request.cancelled() or request.exception() is not None:
                engine.client.send(abort)  # nobody waits any more; an engine that was lost and is back may have taken up the repeated request
            request.cancel()

    async def _choose(self, wanted: Version, job: Job, *, returned: bool = False) -> Engine | None:
        """The engine that serves this version and is least loaded; for a call given back (`returned`), of those alike the one that will stay longest.
        Waits in line until there is one with room. None: the job was aborted meanwhile."""
        started = _now()
        async with self._lines.turn(wanted, job.aborted, job.deadline, returned=returned) as line:
            while not job.aborted.done():
                now = _now()
                able = [e for e in self.engines if e.serves(wanted)]
                ready = [e for e in able if e.rest_until <= now]
                ready = [e for e in ready if e.open] or ready  # closed, they are asked only for want of another
                ready = [e for e in ready if e.roomy] or [e for e in ready if not e.tells_slots]
                if ready:
                    return min(ready, key=lambda e: (int(e.load / _ALIKE) if returned else e.load, -e.rank, e.in_flight))
                asleep = self._epoch is not None and not any(e.open for e in self.engines)
                if able or asleep:
                    line.able_at = now
                what = f"an engine at version {wanted.term}.{wanted.step} with room"
                if now - max(line.able_at, started) > self.patience_s:
                    raise EngineLost(str(DeadlineExceeded(what, now - started)))
                if now >= job.deadline:
                    raise DeadlineExceeded(what, now - started)
                for engine in self.engines:
                    if engine.rest_until <= now:
                        engine.poke()
                self._changed.clear()
                pause = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait((pause, job.aborted), timeout=_BACK_OFF_S, return_when=asyncio.FIRST_COMPLETED)
                pause.cancel()
        return None
