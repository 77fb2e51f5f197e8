"""gyre-buffer's shell: sockets and disk around the machine.

One loop: hand the messages that have arrived to the machine, have a thread make the whole batch durable in one commit, then send its replies. So what
a peer hears is on disk, and many messages share a sync; the next batch is gathered meanwhile.

Not here: decisions (machine), formats (wire), SQL (ledger).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import sqlite3
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from gyre.buffer.effects import Deliver, Drop, Effect, Log, Now, Prune, Put, Received, Reply, Store, Tick
from gyre.buffer.executions import assemble, malformed, span
from gyre.buffer.ledger import Ledger
from gyre.buffer.machine import Machine
from gyre.buffer.queries import load_task_set
from gyre.buffer.readers import Readers
from gyre.cli import Setup
from gyre.config import Config
from gyre.errors import UsageError, WorkFailed
from gyre.events import Event, encode
from gyre.net.sockets import Peer, Server, mint
from gyre.net.worker import Worker
from gyre.wire.codec import Arrays
from gyre.wire.messages import (
    AskRecords,
    Counters,
    Events,
    LeaseTickets,
    Message,
    Refuse,
    RolloutEnded,
    Subscribe,
    Tickets,
    ToBuffer,
)
from gyre.wire.rows import Row

log = logging.getLogger(__name__)

_INBOX: Final = 4096  # messages held before the socket is left to fill
_BATCH_BYTES: Final = 64 << 20  # of payload, in the batch that is gathered while another is committed, and in the inbox
_M_TRIM_THRESHOLD: Final = -1  # <malloc.h>
_M_MMAP_THRESHOLD: Final = -3
_SUBSCRIBERS: Final = 256
_LESSEES: Final = 16_384
_DRAIN_ROUNDS: Final = 8
_QUIET_S: Final = 1.0  # after the end, and all have heard of it
_FAILURE_LINGER_S: Final = 2.0  # after a failure, so that those who ask hear of it
_LINGER_S: Final = 30.0  # after the end, when someone does not ask any more


class Subscriber(msgspec.Struct):
    """Who gets counters, and when next."""

    peer: Peer
    cause: str
    events: bool
    min_interval_s: float
    seen: int = -1
    next_at: float = 0.0
    due: bool = False  # counters, once the batch is on disk


class Lessee(msgspec.Struct):
    """A sandbox that asks for tickets. One that lives is heard of within its leases' time: it polls, or it renews."""

    heard_at: float
    told: bool = False  # that the run is over


class Batch:
    """Effects of a batch of inputs, sorted by what has to happen to them."""

    def __init__(self) -> None:
        self.puts: dict[tuple[Any, ...], Row] = {}
        self.drops: dict[tuple[Any, ...], Row] = {}
        self.lines: list[tuple[int, str]] = []
        self.outgoing: list[tuple[Any, Reply | Deliver]] = []
        self.prune: int | None = None
        self.stored = 0  # bytes of payload
        self.counters: Counters | None = None  # as they are when it is whole, if somebody is to be told
        self.revision = -1
        self.subscribers: dict[bytes, Subscriber] = {}  # from this batch on
        self.stats: dict[str, Any] = {}  # of a step

    @property
    def full(self) -> bool:
        return self.stored >= _BATCH_BYTES or len(self.outgoing) >= _INBOX


class Shell:
    """The running buffer."""

    def __init__(self, config: Config, machine: Machine, ledger: Ledger, server: Server, worker: Worker) -> None:
        self._config, self._machine, self._ledger, self._server, self._worker = config, machine, ledger, server, worker
        self._inbox: list[tuple[Peer, Message, Arrays]] = []
        self._held = 0  # bytes of arrays in it
        self._batch = Batch()
        self._committing: tuple[Batch, asyncio.Future[None]] | None = None
        self._pool = ThreadPoolExecutor(1, "assemble")
        self._assembling: dict[asyncio.Future[dict[str, Any]], tuple[Any, Message]] = {}
        self._prune: int | None = None  # when nothing is being assembled
        self._arrived = asyncio.Event()  # messages, the end of a commit, a micro-step's arrays
        self._drained = asyncio.Event()
        self._subscribers: dict[bytes, Subscriber] = {}
        self._sandboxes: dict[bytes, Lessee] = {}
        self._heard_at = time.monotonic()
        self._status_at = 0.0
        self._failed_at = 0.0
        worker.server = server
        self._readers = Readers(ledger.run_dir, server)

    async def run(self) -> None:
        """Serve until the run is over, it fails (`WorkFailed`), or the process is told to stop."""
        serving = asyncio.create_task(self._server.serve(self._receive))
        stopping = asyncio.create_task(self._worker.stop.wait())
        pumping = asyncio.create_task(self._pump())
        try:
            done, _ = await asyncio.wait((serving, stopping, pumping), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (serving, stopping, pumping):
                task.cancel()
            await asyncio.gather(serving, stopping, pumping, return_exceptions=True)
            under_way: list[asyncio.Future[Any]] = [*self._assembling, *([self._committing[1]] if self._committing is not None else [])]
            if under_way:  # in the loop, where a second signal is heard
                self._pool.shutdown(wait=False, cancel_futures=True)
                await asyncio.gather(*under_way, return_exceptions=True)
            self._pool.shutdown()
            self._readers.close()

    def _receive(self, peer: Peer, message: Message, arrays: Arrays) -> Awaitable[None] | None:
        self._inbox.append((peer, message, arrays))
        self._held += sum(a.nbytes for a in arrays.values())
        self._arrived.set()
        return self._room() if self._is_held() else None

    def _is_held(self) -> bool:
        return len(self._inbox) >= _INBOX or self._held >= _BATCH_BYTES

    async def _room(self) -> None:
        self._drained.clear()
        await self._drained.wait()

    async def _pump(self) -> None:
        loop = asyncio.get_running_loop()
        with self._complaining():
            self._apply(self._batch, self._machine.start(now := self._now()), None, now)
            while True:
                if self._committing is None:
                    self._begin()
                if self._over():
                    break
                timer = loop.call_later(self._patience(), self._arrived.set)
                await self._arrived.wait()
                timer.cancel()
                await self._gather()
                self._arrived.clear()
                self._deliver()
                if self._committing is not None and self._committing[1].done():
                    self._end()
                if not self._waits():
                    self._process()
        if self._machine.failure:
            raise WorkFailed(self._machine.failure)

    def _waits(self) -> bool:
        """Until the commit under way is done."""
        return self._committing is not None and self._batch.full

    @contextlib.contextmanager
    def _complaining(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as e:
            raise WorkFailed(f"{self._ledger.run_dir}: the ledger cannot be written ({e})") from None

    async def _gather(self) -> None:
        """Let what has reached the socket reach the inbox."""
        for _ in range(_DRAIN_ROUNDS):
            before = len(self._inbox)
            await asyncio.sleep(0)
            if len(self._inbox) == before:
                break

    @staticmethod
    def _now() -> Now:
        return Now(time.monotonic(), time.time())

    def _patience(self) -> float:
        """Seconds until something is due without a message."""
        now = time.monotonic()
        due = [now + 0.5]
        if not self._waits() and (deadline := self._machine.next_deadline()) is not None:
            due.append(deadline)
        if self._committing is None:
            due += [s.next_at for s in self._subscribers.values() if s.seen != self._machine.revision]
        return max(0.001, min(due) - now)

    # --- one batch: messages are taken, a commit begins, it ends ---

    def _process(self) -> None:
        now = self._now()
        more = self._is_held()  # perhaps also what would move a deadline
        inbox, self._inbox, self._held = self._inbox, [], 0
        self._drained.set()
        for peer, message, arrays in inbox:
            self._heard_at = now.mono
            self._take(self._batch, peer, message, arrays, now)
        deadline = self._machine.next_deadline()
        if not more and deadline is not None and deadline <= now.mono:
            self._apply(self._batch, self._machine.handle(now, Tick()), None, now)

    def _begin(self) -> None:
        batch, self._batch, now = self._batch, Batch(), time.monotonic()
        batch.revision = self._machine.revision
        for identity, new in batch.subscribers.items():
            while len(self._subscribers) >= _SUBSCRIBERS and identity not in self._subscribers:
                self._subscribers.pop(next(iter(self._subscribers)))
            self._subscribers[identity] = new
        urgent = self._machine.finished or bool(self._machine.failure)
        for s in self._subscribers.values():
            s.due = s.seen != batch.revision and (urgent or now >= s.next_at)
        if now - self._status_at > 1.0 or any(s.due for s in self._subscribers.values()):
            batch.counters = self._machine.counters()
        if batch.puts or batch.drops or batch.lines or batch.stored:
            done = asyncio.wrap_future(self._ledger.commit(batch.puts.values(), batch.drops.values(), batch.lines))
            done.add_done_callback(lambda _: self._arrived.set())
            self._committing = batch, done
        else:
            self._publish(batch)

    def _end(self) -> None:
        assert self._committing is not None
        (batch, done), self._committing = self._committing, None
        done.result()
        self._publish(batch)

    def _publish(self, batch: Batch) -> None:
        """What is on disk may be heard."""
        self._prune = batch.prune if self._prune is None else self._prune if batch.prune is None else max(self._prune, batch.prune)
        if self._prune is not None and not self._assembling:  # who repeats a claim may be behind its step
            self._ledger.prune(self._prune)
            self._prune = None
        self._worker.stats = batch.stats or self._worker.stats
        for to, answer in batch.outgoing:
            self._send(to, answer)
        self._push(batch)

    def _take(self, batch: Batch, peer: Peer, message: Message, arrays: Arrays, now: Now) -> None:
        versions = None
        if isinstance(message, AskRecords):
            self._readers.take(peer, message)
            return
        if isinstance(message, Subscribe):
            batch.subscribers[peer.identity] = Subscriber(peer, message.id, message.events, message.min_interval_s)
            return
        if isinstance(message, RolloutEnded):
            if reason := malformed(message, arrays):
                log.warning("%s: %s of %s: %s", message.rollout_id, type(message).__name__, peer.name, reason)
                batch.outgoing.append((peer, Reply(peer, Refuse(id="", cause=message.id, reason=reason))))
                return
            versions = span(message, arrays["versions"])
        elif isinstance(message, LeaseTickets):
            while len(self._sandboxes) >= _LESSEES and peer.identity not in self._sandboxes:
                self._sandboxes.pop(next(iter(self._sandboxes)))
            self._sandboxes.setdefault(peer.identity, Lessee(now.mono))
        if peer.identity in self._sandboxes:
            self._sandboxes[peer.identity].heard_at = now.mono
        if (step := self._machine.missing(message)) is not None:
            newer = batch.puts.keys() | batch.drops.keys()
            self._machine.recall([*batch.puts.values(), *(r for r in self._ledger.rows_from(step) if (r.TABLE, *r.key) not in newer)])
        received = Received(peer, message, f"{peer.name}/{peer.incarnation}", versions)
        self._apply(batch, self._machine.handle(now, received), (message, arrays), now)

    def _apply(self, batch: Batch, effects: list[Effect], current: tuple[Message, Arrays] | None, now: Now) -> None:
        for effect in effects:
            match effect:
                case Put(row):
                    batch.puts[row.TABLE, *row.key] = row
                    batch.drops.pop((row.TABLE, *row.key), None)
                case Drop(row):
                    batch.puts.pop((row.TABLE, *row.key), None)
                    batch.drops[row.TABLE, *row.key] = row
                case Store(row):
                    assert current is not None and isinstance(current[0], RolloutEnded)
                    self._ledger.store(row, current[0], current[1])
                    batch.stored += row.length
                case Prune(step):
                    batch.prune = step
                case Log(kind, fields, cause, proc):
                    if kind == "step":
                        batch.stats = fields["stats"]
                    seq = self._ledger.next_seq
                    self._ledger.next_seq += 1
                    event = Event(seq=seq, t_wall=now.wall, t_mono=now.mono, proc=proc or "buffer", cause=cause, kind=kind, fields=fields)
                    batch.lines.append((seq, encode(event)))
                case Reply(to) | Deliver(to):
                    batch.outgoing.append((to, effect))

    def _send(self, to: Peer, answer: Reply | Deliver) -> None:
        message = msgspec.structs.replace(answer.message, id=mint())
        if isinstance(answer, Deliver):
            made = asyncio.get_running_loop().run_in_executor(self._pool, assemble, self._ledger.payloads, answer)
            self._assembling[made] = (to, message)
            made.add_done_callback(lambda _: self._arrived.set())
            return
        self._server.send(to, message)
        if isinstance(message, Tickets) and message.finished and to.identity in self._sandboxes:
            self._sandboxes[to.identity].told = True

    def _deliver(self) -> None:
        """Send the micro-steps that have been assembled."""
        for made in [made for made in self._assembling if made.done()]:
            self._server.send(*self._assembling.pop(made), made.result())

    def _push(self, batch: Batch) -> None:
        now = time.monotonic()
        for s in self._subscribers.values():
            first = s.seen < 0
            if s.events and batch.lines and not first:
                self._server.send(s.peer, Events(id=mint(), cause=s.cause, lines=[line for _, line in batch.lines]))
            if s.due and batch.counters is not None:
                self._server.send(s.peer, msgspec.structs.replace(batch.counters, id=mint(), cause=s.cause))
                s.seen, s.next_at, s.due = batch.revision, now + s.min_interval_s, False
                if first and s.events and batch.lines:
                    self._server.send(s.peer, Events(id=mint(), cause=s.cause, lines=[line for _, line in batch.lines]))
        if (c := batch.counters) is not None and now - self._status_at > 1.0:
            self._status_at, self._worker.counters = now, c
            self._worker.status("working", f"step {c.step}/{c.total_steps}", water_level=c.water_level, groups_open=c.groups_open)

    def _over(self) -> bool:
        """Failed or finished, and all who need to know have heard (bounded)."""
        if self._readers.busy or self._committing is not None or self._assembling or (not self._machine.failure and not self._machine.finished):
            return False
        now = time.monotonic()
        ttl_s = self._config.sandbox.lease_ttl_s
        told = all(x.told for x in self._sandboxes.values() if now - x.heard_at < ttl_s)
        if self._machine.failure:
            self._failed_at = self._failed_at or now
            return now - self._failed_at > (_QUIET_S if told else _FAILURE_LINGER_S)
        quiet_s = now - self._heard_at
        patience_s = max(_LINGER_S, self._config.train.claim_ttl_s)  # a core that writes its last checkpoint is heard of within its claims' time
        return quiet_s > (_QUIET_S if told and self._machine.saved else patience_s)


def keep_freed_memory() -> None:
    """Have what rollouts lay in used for the next ones, and not given back and asked for again page by page, where the C library is glibc."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        for option, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 2 * _BATCH_BYTES)):
            libc.mallopt(option, value)


async def run(setup: Setup, worker: Worker, resume: bool = False) -> None:
    """gyre-buffer. Raises `UsageError` (an existing run without `resume`, bad tasks or configuration), `Busy`, `WorkFailed`."""
    keep_freed_memory()
    config = setup.config
    tasks = load_task_set(config.tasks.train, config.tasks.heldout, config.tasks.eval_tasks)
    now = Now(time.monotonic(), time.time())
    Machine(config, tasks, (), now)  # complain about the configuration before anything is created
    ledger = Ledger(setup.run_dir)
    try:
        rows, counts = list(ledger.rows()), ledger.counts()
        if not resume and counts:
            raise UsageError(str(setup.run_dir), "holds a run already", "continue it with --resume, or give another --run")
        machine = Machine(config, tasks, rows, now, setup.run_id, counts, coordinated=setup.coord is not None)
        del rows
        name = setup.name or "buffer"
        server = Server.bind(
            setup.bind or setup.buffer, ToBuffer, kind="buffer", name=name, run_id=setup.run_id, insecure=config.net.insecure, keys=setup.keys
        )
        quota = machine.state.quota
        log.info("listening at %s; quota %d groups, predicted staleness %.3g", server.address, quota.groups, quota.predicted)
        if quota.rounding:
            log.info("a whole quota moves the mean staleness by %+.3g from the target %.3g", quota.rounding, quota.target)
        if machine.state.meta.total_steps < config.train.steps:
            total = machine.state.meta.total_steps
            log.info("the run ends at step %d of %d: tasks.epochs = %d gives no more queries", total, config.train.steps, config.tasks.epochs)
        try:
            await Shell(config, machine, ledger, server, worker).run()
        finally:
            server.close()
    finally:
        ledger.close()
