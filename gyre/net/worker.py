"""One process of a run, as its signals and its coordinator see it.

Invariants
- The first SIGINT or SIGTERM, or the coordinator's `Stop`, sets `stop`: the process ends in order. A second signal ends it at once.
- After an orderly stop the exit code is 130 or 143 when a signal asked for it, 0 when the coordinator did.
- SIGUSR1 writes the stacks of all threads and tasks to stderr, and changes nothing.
- Losing the coordinator changes nothing, since nothing but launching and roles depends on it; but a worker that hears none for the grace time
  ends in order, so that none is left behind.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

from gyre.net.keys import Keys
from gyre.net.sockets import Client, Server, mint
from gyre.types import Version
from gyre.wire.codec import Arrays
from gyre.wire.messages import Ack, Counters, FromCoord, Message, ProcessStatus, Routes, SetRole, Stop, WorkerStatus

log = logging.getLogger(__name__)

_HEARTBEAT_S: Final = 1.0


class Worker:
    """Async context of a process's whole life."""

    def __init__(self, coord: str | None, *, kind: str, name: str, run_id: str, grace_s: float = 600.0, keys: Keys | None = None) -> None:
        self.kind, self.name = kind, name
        self.incarnation = os.urandom(6).hex()
        self.stop: asyncio.Event
        self.exit_code = 0
        self.on_role: Callable[[SetRole], None] = lambda order: None
        self.order: SetRole | None = None  # the newest role command
        self.on_routes: Callable[[Routes], None] = lambda routes: None
        self.routes: Routes | None = None  # the newest route table, for gyre-sandbox
        self.cell = self.address = self.role = ""
        self.version: Version | None = None
        self.server: Server | None = None  # its own, if it has one
        self.counters: Counters | None = None  # the buffer's, for its metrics
        self.stats: dict[str, Any] = {}  # of the last step; likewise
        self._coord, self._run_id = coord, run_id
        self._client: Client | None = None
        self._status: tuple[str, str, dict[str, float]] = ("starting", "", {})
        self._beat: asyncio.Task[None] | None = None
        self._grace_s, self._beat_s = grace_s, _HEARTBEAT_S
        self._keys = keys
        self._silent_s = 0.0  # since the coordinator was heard; time in which this process itself stood still does not count

    def status(self, phase: str, detail: str = "", **gauges: float) -> None:
        """What this process does now, for the live view; sent with the next heartbeat, or at once when the phase changes."""
        changed = phase != self._status[0]
        self._status = (phase, detail, gauges)
        if changed:
            self._send()

    def seen(self) -> ProcessStatus:
        """What it last said, as its coordinator would know it."""
        phase, detail, gauges = self._status
        if self.server is not None:
            gauges = {**gauges, **self.server.refusals.gauges()}
        return ProcessStatus(
            name=self.name, kind=self.kind, phase=phase, detail=detail, cell=self.cell, role=self.role, gauges=gauges, version=self.version
        )  # fmt: skip

    def _send(self) -> None:
        if self._client is not None:
            seen, newest = self.seen(), self.order or self.routes
            epoch = newest.epoch if newest is not None else 0
            self._client.send(
                WorkerStatus(
                    id=mint(), phase=seen.phase, detail=seen.detail, gauges=seen.gauges,
                    cell=self.cell, address=self.address, role=self.role, epoch=epoch, version=self.version,
                )
            )  # fmt: skip

    def set_role(self, role: str) -> None:
        """This process's part in its cell's role (`WorkerStatus.role`); told at once."""
        self.role = role
        self._send()

    async def __aenter__(self) -> Worker:
        self.stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGUSR1, write_tasks)
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or sys.stderr, chain=True)  # the threads', even when the loop itself hangs
        if self._coord is not None:
            self.attach(
                Client.connect(
                    self._coord, FromCoord, kind=self.kind, name=self.name, incarnation=self.incarnation, run_id=self._run_id,
                    on_push=self.on_push, keys=self._keys,
                )
            )  # fmt: skip
        return self

    def attach(self, client: Client) -> None:
        """Beat to the coordinator behind `client`, whose pushes come to `on_push`."""
        self._client = client
        self._beat = asyncio.create_task(self._heartbeat())

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None and not isinstance(error, asyncio.CancelledError):
            last = traceback.format_exception_only(error)[-1].strip()
            self.status("failed", last)
        if self._beat is not None:
            self._beat.cancel()
        if self._client is not None:
            self._client.close()

    def _on_signal(self, number: int) -> None:
        if self.stop.is_set():
            os._exit(128 + number)
        log.info("%s: stopping in order; again to stop at once", signal.Signals(number).name)
        self.exit_code = 128 + number
        self.stop.set()

    def on_push(self, message: Message, arrays: Arrays) -> None:
        self._silent_s = 0.0
        if isinstance(message, Ack):
            self._beat_s = message.beat_s or _HEARTBEAT_S
        elif isinstance(message, Stop):
            if not self.stop.is_set():
                log.info("stop: %s", message.reason)
            self.stop.set()
        elif isinstance(message, SetRole) and (self.order is None or message.epoch > self.order.epoch):
            self.order = message
            self.on_role(message)
        elif isinstance(message, Routes) and (self.routes is None or message.epoch > self.routes.epoch):
            self.routes = message
            self.on_routes(message)

    async def _heartbeat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._send()
            began = loop.time()
            await asyncio.sleep(self._beat_s)
            self._silent_s += min(loop.time() - began, 2 * self._beat_s)
            if self._silent_s > self._grace_s and not self.stop.is_set():
                log.warning("no coordinator for %.0f s: ending", self._silent_s)
                self.stop.set()


def write_tasks() -> None:
    """Where each task of the loop waits, which no thread's stack shows; in faulthandler's form."""
    for task in asyncio.all_tasks():
        print(f"Task {task.get_name()} (most recent call last):", file=sys.stderr)
        at: Any = task.get_coro()
        while (frame := getattr(at, "cr_frame", None)) is not None:
            print(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_qualname}', file=sys.stderr)
            at = at.cr_await
    sys.stderr.flush()
