"""A cell's engine in virtual time: the engine protocol, below the production desk and part, which answer and obey.

Invariant: draw k of a request is `token(seed, k)`, whichever engine draws it; so whoever asked can tell whether a move lost, doubled or changed one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Future

from gyre.rollout.engine import Completion, EngineRequest, EngineState, Transcript, check, uniform
from gyre.types import TensorSpec, Version
from theorem.clock import Process

CONTEXT = 4096
SLOTS = 8


def token(seed: int, k: int) -> int:
    return int(uniform(seed, k) * 1000)


class VirtualEngine:
    """See `rollout.engine.Engine`. `holds(bool)`: takes and leaves the device; `sampled(request, draw, version)`: drew a token."""

    context = CONTEXT

    def __init__(
        self, process: Process, seed: str, seconds: float, holds: Callable[[bool], None], sampled: Callable[[str, int, Version], None]
    ) -> None:
        self._process, self._seconds, self._holds, self._sampled = process, seconds, holds, sampled
        self._rng = random.Random(seed)
        self._open: dict[str, tuple[Future[Completion], Transcript]] = {}
        self._version: Version | None = None
        self._closing, self._asleep = False, False
        self._generated = 0
        self.stopped: Future[None] = Future()
        holds(True)

    def submit(self, request: EngineRequest) -> Future[Completion]:
        check(request, version=self._version, context=CONTEXT, open_requests=len(self._open), capacity=2 * SLOTS, closing=self._closing)
        future: Future[Completion] = Future()
        self._open[request.request_id] = future, Transcript(request, frozenset(), CONTEXT)
        self._process.spawn(self._decode(request), f"decode {request.request_id}")
        return future

    async def _decode(self, request: EngineRequest) -> None:
        while True:
            await asyncio.sleep(self._seconds * self._rng.random())
            if request.request_id not in self._open:
                return
            if self._version is None:
                continue  # between two versions
            transcript, version = self._open[request.request_id][1], self._version
            draw = transcript.draws
            self._sampled(request.request_id, draw, version)
            self._generated += 1
            if transcript.add(token(request.seed, draw), -1.0, version):
                self._complete(request.request_id, abort=False)
                return

    def _complete(self, request_id: str, *, abort: bool) -> None:
        future, transcript = self._open.pop(request_id)
        future.set_result(transcript.completion("abort" if abort else "length"))

    def abort(self, request_id: str) -> None:
        if request_id in self._open:
            self._complete(request_id, abort=True)

    def load(self, version: Version, tensors: list[TensorSpec], data: memoryview) -> Future[None]:
        def serve() -> None:
            assert not self._asleep, "loaded while asleep"
            self._version = version

        return self._after(serve)

    def drain(self) -> Future[None]:
        self._closing = True
        for request_id in list(self._open):
            self._complete(request_id, abort=True)
        return self._after(lambda: None)

    def sleep(self) -> Future[None]:
        self._version = None

        def leave() -> None:
            self._asleep = True
            self._holds(False)

        return self._after(leave)

    def wake(self) -> Future[None]:
        if self._asleep:
            self._asleep = False
            self._holds(True)
        self._closing = False
        return self._after(lambda: None)

    def _after(self, then: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()

        async def work() -> None:
            await asyncio.sleep(self._seconds * self._rng.random())
            then()
            future.set_result(None)

        self._process.spawn(work(), "engine")
        return future

    def state(self) -> EngineState:
        return EngineState(self._version, len(self._open), 0, max(0, SLOTS - len(self._open)), self._generated, SLOTS)

    def close(self) -> None:
        self.drain()
        self.stopped.set_result(None)
