"""gyre-buffer's shell: sockets and disk around the machine.

One loop: take all messages that have arrived, hand them to the machine, make the whole batch durable in one commit, then send its replies. So what a
peer hears is on disk, and many messages share a sync.

Not here: decisions (machine), formats (wire), SQL (ledger).
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from array import array
from collections.abc import Awaitable
from typing import Any, Final

import msgspec

from gyre.buffer.effects import Deliver, Drop, Effect, Log, Now, Prune, Put, Received, Reply, Store, Tick
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
from gyre.trajectory.flatten import flatten, offsets
from gyre.wire import payload
from gyre.wire.codec import Arrays
from gyre.wire.messages import AskRecords, Counters, Events, LeaseTickets, Message, Refuse, RolloutEnded, Subscribe, Tickets, ToBuffer
from gyre.wire.rows import RolloutRow, Row
from gyre.wire.segments import Place

log = logging.getLogger(__name__)

_PIECE_BYTES: Final = 512
_INBOX: Final = 4096  # messages held before the socket is left to fill
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


class Lessee(msgspec.Struct):
    """A sandbox that asks for tickets. One that lives is heard of within its leases' time: it polls, or it renews."""

    heard_at: float
    told: bool = False  # that the run is over


def malformed(m: RolloutEnded, arrays: Arrays) -> str:
    """Why an execution's graph cannot be what it says; "" if it can."""
    total = sum(n.n_tokens for n in m.nodes)
    for name, values in arrays.items():
        if len(values) != total:
            return f"{name} has {len(values)} elements, the nodes {total} tokens"
    if any(n.n_tokens < 0 or not -1 <= n.parent < i for i, n in enumerate(m.nodes)):
        return "a node has a parent that does not come before it"
    if len({t.index for t in m.trajectories}) < len(m.trajectories):
        return "two trajectories have one index"
    for t in m.trajectories:
        if any(not 0 <= i < len(m.nodes) for i in t.nodes) or not set(t.trainable) <= set(t.nodes):
            return f"trajectory {t.index} names nodes that are not there"
        if [m.nodes[i].parent for i in t.nodes] != [-1, *t.nodes][: len(t.nodes)] or len(set(t.trainable)) < len(t.trainable):
            return f"trajectory {t.index} is no path of the graph, or has a node twice"
        sizes = sum(m.nodes[i].n_tokens for i in t.nodes), sum(m.nodes[i].n_tokens for i in t.trainable)
        if sizes != (t.n_tokens, t.n_trainable):
            return f"trajectory {t.index} has {sizes[0]} tokens and {sizes[1]} trainable ones, not {t.n_tokens} and {t.n_trainable}"
    return ""


def distinct(values: memoryview) -> set[int]:
    """The values of an i32 array. Runs are long, so most pieces are equal: only one of each is looked into."""
    data = values.tobytes()
    return set(memoryview(b"".join({data[i : i + _PIECE_BYTES] for i in range(0, len(data), _PIECE_BYTES)})).cast("i"))


def assemble(ledger: Ledger, items: list[Any], rollouts: dict[str, RolloutRow]) -> dict[str, Any]:
    """The arrays of a micro-step, from the payloads."""
    packed: dict[str, array[Any]] = {"token_ids": array("i"), "loss_mask": array("b"), "logprobs": array("f"), "versions": array("i")}
    parsed: dict[str, tuple[RolloutEnded, Arrays, list[int], dict[int, int]]] = {}
    for item in items:
        if item.rollout_id not in parsed:
            row = rollouts[item.rollout_id]
            assert row.segment is not None, f"{row.rollout_id} has trajectories and no payload"
            message, arrays = payload.parse(ledger.payloads.read(Place(row.segment, row.offset, row.length)))
            at = {t.index: k for k, t in enumerate(message.trajectories)}
            parsed[item.rollout_id] = (message, arrays, offsets(message.nodes), at)
        message, arrays, starts, at = parsed[item.rollout_id]
        flat = flatten(message.nodes, message.trajectories[at[item.index]], arrays, starts)
        if len(items) == 1:
            return {name: getattr(flat, name) for name in packed}
        for name, values in packed.items():
            values.extend(getattr(flat, name))
    return packed


class Batch:
    """Effects of a batch of inputs, sorted by what has to happen to them."""

    def __init__(self) -> None:
        self.puts: dict[tuple[Any, ...], Row] = {}
        self.drops: dict[tuple[Any, ...], Row] = {}
        self.lines: list[tuple[int, str]] = []
        self.outgoing: list[tuple[Any, Reply | Deliver]] = []
        self.prune: int | None = None


class Shell:
    """The running buffer."""

    def __init__(self, config: Config, machine: Machine, ledger: Ledger, server: Server, worker: Worker) -> None:
        self._config, self._machine, self._ledger, self._server, self._worker = config, machine, ledger, server, worker
        self._inbox: list[tuple[Peer, Message, Arrays]] = []
        self._arrived = asyncio.Event()
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
            self._readers.close()

    def _receive(self, peer: Peer, message: Message, arrays: Arrays) -> Awaitable[None] | None:
        self._inbox.append((peer, message, arrays))
        self._arrived.set()
        return self._room() if len(self._inbox) >= _INBOX else None

    async def _room(self) -> None:
        self._drained.clear()
        await self._drained.wait()

    async def _pump(self) -> None:
        loop = asyncio.get_running_loop()
        self._process([], self._machine.start(self._now()))
        while not self._over():
            timer = loop.call_later(self._patience(), self._arrived.set)
            await self._arrived.wait()
            timer.cancel()
            for _ in range(_DRAIN_ROUNDS):
                before = len(self._inbox)
                await asyncio.sleep(0)
                if len(self._inbox) == before:
                    break
            self._arrived.clear()
            inbox, self._inbox = self._inbox, []
            self._drained.set()
            self._process(inbox, [])
        if self._machine.failure:
            raise WorkFailed(self._machine.failure)

    @staticmethod
    def _now() -> Now:
        return Now(time.monotonic(), time.time())

    def _patience(self) -> float:
        """Seconds until something is due without a message."""
        now = time.monotonic()
        due = [now + 0.5]
        if (deadline := self._machine.next_deadline()) is not None:
            due.append(deadline)
        due += [s.next_at for s in self._subscribers.values() if s.seen != self._machine.revision]
        return max(0.001, min(due) - now)

    # --- one batch ---

    def _process(self, inbox: list[tuple[Peer, Message, Arrays]], first: list[Effect]) -> None:
        batch, now = Batch(), self._now()
        try:
            self._apply(batch, first, None, now)
            for peer, message, arrays in inbox:
                self._heard_at = now.mono
                self._take(batch, peer, message, arrays, now)
            deadline = self._machine.next_deadline()
            if deadline is not None and deadline <= now.mono:
                self._apply(batch, self._machine.handle(now, Tick()), None, now)
            self._ledger.commit(batch.puts, list(batch.drops.values()), batch.lines)
            if batch.prune is not None:
                self._ledger.prune(batch.prune)
        except (OSError, sqlite3.Error) as e:
            raise WorkFailed(f"{self._ledger.run_dir}: the ledger cannot be written ({e})") from None
        for to, answer in batch.outgoing:
            self._send(to, answer)
        self._push(now, batch)

    def _take(self, batch: Batch, peer: Peer, message: Message, arrays: Arrays, now: Now) -> None:
        versions = None
        if isinstance(message, AskRecords):
            self._readers.take(peer, message)
            return
        if isinstance(message, Subscribe):
            while len(self._subscribers) >= _SUBSCRIBERS:
                self._subscribers.pop(next(iter(self._subscribers)))
            self._subscribers[peer.identity] = Subscriber(peer, message.id, message.events, message.min_interval_s)
            return
        if isinstance(message, RolloutEnded):
            if reason := malformed(message, arrays):
                log.warning("%s: %s of %s: %s", message.rollout_id, type(message).__name__, peer.name, reason)
                batch.outgoing.append((peer, Reply(peer, Refuse(id="", cause=message.id, reason=reason))))
                return
            seen = distinct(arrays["versions"]) - {-1}
            versions = (min(seen), max(seen)) if seen else None
        elif isinstance(message, LeaseTickets):
            while len(self._sandboxes) >= _LESSEES and peer.identity not in self._sandboxes:
                self._sandboxes.pop(next(iter(self._sandboxes)))
            self._sandboxes.setdefault(peer.identity, Lessee(now.mono))
        if peer.identity in self._sandboxes:
            self._sandboxes[peer.identity].heard_at = now.mono
        if (step := self._machine.missing(message)) is not None:
            self._machine.recall([*batch.puts.values(), *self._ledger.rows_from(step)])
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
                case Prune(step):
                    batch.prune = step
                case Log(kind, fields, cause, proc):
                    if kind == "step":
                        self._worker.stats = fields["stats"]
                    seq = self._ledger.next_seq
                    self._ledger.next_seq += 1
                    event = Event(seq=seq, t_wall=now.wall, t_mono=now.mono, proc=proc or "buffer", cause=cause, kind=kind, fields=fields)
                    batch.lines.append((seq, encode(event)))
                case Reply(to) | Deliver(to):
                    batch.outgoing.append((to, effect))

    def _send(self, to: Peer, answer: Reply | Deliver) -> None:
        message = msgspec.structs.replace(answer.message, id=mint())
        arrays = assemble(self._ledger, answer.items, answer.rollouts) if isinstance(answer, Deliver) else None
        self._server.send(to, message, arrays)
        if isinstance(message, Tickets) and message.finished and to.identity in self._sandboxes:
            self._sandboxes[to.identity].told = True

    def _push(self, now: Now, batch: Batch) -> None:
        urgent = self._machine.finished or bool(self._machine.failure)
        counters: Counters | None = None
        for s in self._subscribers.values():
            if s.events and batch.lines:
                self._server.send(s.peer, Events(id=mint(), cause=s.cause, lines=[line for _, line in batch.lines]))
            if s.seen != self._machine.revision and (urgent or now.mono >= s.next_at):
                counters = counters or self._machine.counters()
                self._server.send(s.peer, msgspec.structs.replace(counters, id=mint(), cause=s.cause))
                s.seen, s.next_at = self._machine.revision, now.mono + s.min_interval_s
        if now.mono - self._status_at > 1.0:
            self._status_at = now.mono
            c = self._worker.counters = counters or self._machine.counters()
            self._worker.status("working", f"step {c.step}/{c.total_steps}", water_level=c.water_level, groups_open=c.groups_open)

    def _over(self) -> bool:
        """Failed or finished, and all who need to know have heard (bounded)."""
        if self._readers.busy or (not self._machine.failure and not self._machine.finished):
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


async def run(setup: Setup, worker: Worker, resume: bool = False) -> None:
    """gyre-buffer. Raises `UsageError` (an existing run without `resume`, bad tasks or configuration), `Busy`, `WorkFailed`."""
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
