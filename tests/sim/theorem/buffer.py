"""gyre-buffer's shell in memory: the production machine, a disk that survives its process, and the order of production: durable before said.

Invariants
- A batch is taken, made durable at once and whole, and only then answered. Between any two of these the process may die: then nothing of the batch
  was taken, or all of it was and nobody was told.
- A new life is built from what the disk holds, and from nothing else; leases are armed anew, polls are asked again.

Not here: SQLite and files (their tests are in tests/buffer).
"""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from gyre.buffer.effects import Deliver, Drop, Effect, Log, Now, Prune, Put, Received, Reply, Store, Tick
from gyre.buffer.machine import Machine
from gyre.buffer.queries import TaskSet
from gyre.config import Config
from gyre.net.sockets import Peer
from gyre.trajectory.flatten import flatten
from gyre.types import MicroStepState, Purpose, RolloutState
from gyre.wire import payload
from gyre.wire.codec import Arrays, encode
from gyre.wire.messages import Counters, Message, RolloutEnded, Subscribe, ToBuffer
from gyre.wire.rows import GroupRow, GroupState, Item, MicroStepRow, RolloutRow, Row, StepRow
from theorem.clock import Process
from theorem.network import Network, Server

PUSH_S = 0.2  # counters go to subscribers at most so often
WALL_S = 1.7e9  # virtual time 0 as seconds since the epoch


class Event(msgspec.Struct, frozen=True):
    """A line of the event log."""

    at_s: float
    kind: str
    fields: dict[str, Any]


class Disk:
    """What outlives the buffer's process."""

    def __init__(self) -> None:
        self.rows: dict[tuple[Any, ...], tuple[type[Row], bytes]] = {}
        self.payloads: list[list[bytes]] = []
        self.events: list[Event] = []
        self.states: dict[str, RolloutState] = {}  # of training executions, from the rows as written

    def load(self) -> list[Row]:
        """What a machine is built from, as `Ledger.rows` gives it."""
        rows = [msgspec.msgpack.decode(data, type=kind) for kind, data in self.rows.values()]
        return [r for r in rows if not (isinstance(r, MicroStepRow) and r.state is MicroStepState.COMMITTED)]

    def since(self, step: int) -> list[Row]:
        """As `Ledger.rows_from` has them."""
        rows = self.load()
        groups = {r.group_id for r in rows if isinstance(r, GroupRow) and r.state is GroupState.CONSUMED and (r.step or 0) > step}
        return [r for r in rows if (isinstance(r, StepRow) and r.step >= step) or getattr(r, "group_id", "") in groups]

    def commit(self, puts: dict[tuple[Any, ...], Row], drops: set[tuple[Any, ...]], events: list[Event]) -> None:
        for key, row in puts.items():
            self.rows[key] = (type(row), msgspec.msgpack.encode(row))
            if isinstance(row, RolloutRow) and row.purpose is Purpose.TRAIN:
                self.states[row.rollout_id] = row.state
        for key in drops:
            self.rows.pop(key, None)
        self.events += events


def key_of(row: Row) -> tuple[Any, ...]:
    return (row.TABLE, *(getattr(row, k) for k in row.KEY))


def assemble(disk: Disk, items: list[Item], rollouts: dict[str, RolloutRow]) -> dict[str, array[Any]]:
    """The arrays of a micro-step, from the payloads."""
    packed: dict[str, array[Any]] = {"token_ids": array("i"), "loss_mask": array("b"), "logprobs": array("f"), "versions": array("i")}
    for item in items:
        segment = rollouts[item.rollout_id].segment
        assert segment is not None
        message, arrays = payload.parse(disk.payloads[segment])
        trajectory = next(t for t in message.trajectories if t.index == item.index)
        flat = flatten(message.nodes, trajectory, arrays)
        for name, values in packed.items():
            values.extend(getattr(flat, name))
    return packed


class Buffer:
    """One life of the buffer."""

    def __init__(
        self, network: Network, process: Process, disk: Disk, config: Config, tasks: TaskSet, seed: str, snapshot: Callable[[Counters], None]
    ) -> None:
        self.process, self.disk = process, disk
        self._network, self._loop, self._snapshot = network, network.loop, snapshot
        self._rng = random.Random(seed)
        self._inbox: list[tuple[Peer, Message, Arrays]] = []
        self._arrived = asyncio.Event()
        self._ids = 0
        self._subscribers: dict[str, tuple[Peer, Subscribe]] = {}
        self._told = (-1, 0.0)  # subscribers: at which revision, and when
        self.machine = Machine(config, tasks, disk.load(), self._now(), "run")
        self._server = Server(network, process, "buffer", ToBuffer, self._hear)

    def _now(self) -> Now:
        return Now(self._loop.time(), WALL_S + self._loop.time())

    def _hear(self, peer: Peer, message: Message, arrays: Arrays) -> None:
        self._inbox.append((peer, message, arrays))
        self._arrived.set()

    async def serve(self) -> None:
        """Until the process dies."""
        await self._process([], self.machine.start(self._now()))
        while True:
            due = self.machine.next_deadline()
            if self._subscribers and self._told[0] != self.machine.revision:
                due = min(due or math.inf, self._told[1] + PUSH_S)
            if not self._inbox:
                timer = None if due is None else self._loop.call_at(due, self._arrived.set)
                await self._arrived.wait()
                if timer is not None:
                    timer.cancel()
            self._arrived.clear()
            inbox, self._inbox = self._inbox, []
            await self._process(inbox, [])

    async def _process(self, inbox: list[tuple[Peer, Message, Arrays]], first: list[Effect]) -> None:
        now = self._now()
        puts: dict[tuple[Any, ...], Row] = {}
        drops: set[tuple[Any, ...]] = set()
        events: list[Event] = []
        outgoing: list[Reply | Deliver] = []

        def apply(effects: list[Effect], message: Message | None = None, arrays: Arrays | None = None) -> None:
            for effect in effects:
                match effect:
                    case Put(row):
                        puts[key_of(row)] = row
                        drops.discard(key_of(row))
                    case Drop(row):
                        puts.pop(key_of(row), None)
                        drops.add(key_of(row))
                    case Store(row):
                        assert isinstance(message, RolloutEnded) and arrays is not None
                        row.segment = len(self.disk.payloads)
                        self.disk.payloads.append([bytes(f) for f in encode(message, arrays)])
                    case Log(kind, fields):
                        events.append(Event(now.mono, kind, msgspec.to_builtins(fields)))
                    case Prune():  # a run here keeps all
                        pass
                    case Reply() | Deliver():
                        outgoing.append(effect)

        apply(first)
        for peer, message, arrays in inbox:
            if isinstance(message, Subscribe):
                self._subscribers[peer.name] = peer, message
                self._told = -1, 0.0
                continue
            versions = None
            if isinstance(message, RolloutEnded):
                seen = set(arrays["versions"]) - {-1}
                versions = (min(seen), max(seen)) if seen else None
            if (step := self.machine.missing(message)) is not None:
                self.machine.recall(self.disk.since(step))
            apply(self.machine.handle(now, Received(peer, message, f"{peer.name}/{peer.incarnation}", versions)), message, arrays)
        due = self.machine.next_deadline()
        if due is not None and due <= now.mono:
            apply(self.machine.handle(now, Tick()))
        await asyncio.sleep(0.001 * self._rng.random())  # a kill here, and the batch was never taken
        self.disk.commit(puts, drops, events)
        self._snapshot(self.machine.counters())
        await asyncio.sleep(0.001 * self._rng.random())  # a kill here, and nobody is told
        for effect in outgoing:
            self._say(effect)
        if self._told[0] != self.machine.revision and now.mono >= self._told[1] + PUSH_S:
            self._told = self.machine.revision, now.mono
            for peer, subscribe in self._subscribers.values():
                self._say(Reply(peer, self.machine.counters(cause=subscribe.id)))

    def _say(self, effect: Reply | Deliver) -> None:
        self._ids += 1
        message = msgspec.structs.replace(effect.message, id=f"{self.process.name}-{self._ids}")
        arrays = assemble(self.disk, effect.items, effect.rollouts) if isinstance(effect, Deliver) else None
        assert isinstance(effect.to, Peer)
        self._server.send(effect.to, message, arrays)
