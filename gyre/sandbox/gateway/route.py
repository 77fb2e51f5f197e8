"""From a prompt to its completion, over however many engines it takes.

Invariants
- A call goes only to an engine that acknowledged the wanted version or a later one. A continuation wants the version of its last token.
- No token is drawn twice: what an engine gave back with `abort` is kept, and the next engine continues behind it (`drawn`, remaining budget).
- A request of a lost engine (another incarnation answers, or none within `engine_timeout_s`) is retried elsewhere from the tokens already had.
- Every wait is bounded by the call's deadline, or by `patience_s` without any engine that could serve it, and the error names what was waited for.

Routes are advice: an engine alone decides what it admits. Which engines there are is fixed for now: the addresses that this process was given.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec

from gyre.errors import DeadlineExceeded, WorkFailed
from gyre.net.sockets import Client, mint
from gyre.types import Sampling, Version
from gyre.wire.messages import Abort, EngineRefuse, FromRollout, Generate, Generated, Ping, Pong

log = logging.getLogger(__name__)

_PING_S: Final = 1.0
_HURRY_S: Final = 0.05  # pings are at least so far apart when a call waits
_ABORT_S: Final = 10.0  # how long an engine may take to give back an aborted request
_BACK_OFF_S: Final = 0.2  # an engine that refused is left alone for so long


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
    deadline: float  # time.monotonic()
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

    def poke(self) -> None:
        """Ask for a pong soon."""
        self._poked.set()

    def set_pong(self, pong: Pong | None) -> None:
        if self.pong is not None and (pong is None or pong.incarnation != self.pong.incarnation):
            log.warning("engine %s is lost (%s)", self.name, "restarted" if pong else f"silent for {self.timeout_s:.0f} s")
            self.lost.set_result(None)
            self.lost = asyncio.get_running_loop().create_future()
        self.pong = pong
        self.since_pong = 0

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
    """All engines, shared by the rollouts of one process."""

    def __init__(self, engines: Sequence[Engine], patience_s: float) -> None:
        self.engines = list(engines)
        self.patience_s = patience_s
        self._changed = asyncio.Event()
        self._watchers = [asyncio.create_task(e.watch(self._changed)) for e in self.engines]

    @classmethod
    def connect(cls, addresses: Sequence[str], timeout_s: float, patience_s: float, **identity: Any) -> Router:
        """`identity`: name, incarnation, run_id, resend_s of `Client.connect`."""
        clients = [Client.connect(a, FromRollout, kind="sandbox", **identity) for a in addresses]
        return cls([Engine(c, timeout_s) for c in clients], patience_s)

    async def watch(self) -> None:
        """Runs until cancelled; raises what a watcher raised (an engine refused this process, a bug)."""
        await asyncio.gather(*self._watchers)

    def close(self) -> None:
        for task in self._watchers:
            task.cancel()
        for engine in self.engines:
            engine.client.close()

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
            engine = await self._choose(wanted, job)
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
                engine.rest_until = time.monotonic() + _BACK_OFF_S
                return None
            case Generated() as reply, arrays:
                partial.add(reply, arrays)
                if reply.finish_reason != "abort":
                    return reply.finish_reason
                if not job.aborted.done():
                    engine.rest_until = time.monotonic() + _BACK_OFF_S  # it is closing, or loading weights
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
                engine.rest_until = time.monotonic() + _BACK_OFF_S
                engine.poke()
                return None
            case _:
                raise WorkFailed(f"engine {engine.name} refused a request: {reply.reason} {reply.detail}")

    async def _ask(self, engine: Engine, job: Job, message: Generate, prompt: array[int]) -> Any:
        """The engine's reply, or None if the engine was lost. When the caller goes, the request is aborted and its tokens awaited, for a while."""
        left = job.deadline - time.monotonic()
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

    async def _choose(self, wanted: Version, job: Job) -> Engine | None:
        """The least loaded engine that may serve; waits until there is one. None: the job was aborted meanwhile."""
        able_at = started = time.monotonic()
        while not job.aborted.done():
            now = time.monotonic()
            able = [e for e in self.engines if e.serves(wanted)]
            ready = [e for e in able if e.rest_until <= now]
            roomy = [e for e in ready if e.pong is not None and e.pong.free_slots > e.since_pong]
            if roomy or ready:
                return min(roomy or ready, key=lambda e: e.in_flight)
            able_at = now if able else able_at
            what = f"an engine at version {wanted.term}.{wanted.step} with room"
            if now - able_at > self.patience_s:
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
