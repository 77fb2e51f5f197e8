"""Weights on the wire: the core's side, which tells and lends, and the engine's side, which watches, pulls, verifies and loads.

Invariants
- Whoever watches late learns of the current version at once; an engine watches again every few seconds, so neither a lost message nor a restarted
  trainer leaves it behind.
- An engine acknowledges a version only after it serves it. What an earlier life of the engine acknowledged does not count.
- Bytes are verified before they are loaded. When a snapshot goes away during a pull, its bytes are thrown away and the newest is pulled instead.
- One pull at a time, `PULLS_IN_FLIGHT` chunks at once: an engine's memory is bounded by one snapshot.

Not here: what loading means (the engine), what publishing waits for (the trainer), the bytes themselves (snapshot.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

import msgspec

from gyre.errors import DeadlineExceeded
from gyre.net.sockets import Client, Peer, mint
from gyre.types import TensorSpec, Version
from gyre.weights.snapshot import Gone, Snapshot, SnapshotStore, checksum_of
from gyre.wire import messages as w
from gyre.wire.arrays import Array
from gyre.wire.codec import Arrays

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 8 << 20
PULLS_IN_FLIGHT: Final = 4
WATCH_EVERY_S: Final = 2.0
WATCHER_TTL_S: Final = 20.0
"""An engine that did not watch again for so long is no longer waited for."""

Send = Callable[[Peer, w.Message, Mapping[str, Array] | None], None]


def reader(peer: Peer) -> str:
    """Who holds a lease on a snapshot: one life of a process."""
    return f"{peer.name}/{peer.incarnation}"


def serve_chunk(store: SnapshotStore, now: float, peer: Peer, message: w.PullChunk, send: Send, mint: Callable[[], str] = mint) -> None:
    """Answer a `PullChunk` from `store`."""
    try:
        data = store.read(now, reader(peer), message.version, message.offset, message.nbytes)
    except ValueError as e:
        send(peer, w.Refuse(id=mint(), cause=message.id, reason=str(e)), None)
        return
    if not isinstance(data, Gone):
        send(peer, w.Chunk(id=mint(), cause=message.id, version=message.version, offset=message.offset), {"data": data})
    elif data.latest is not None:
        send(peer, w.SnapshotGone(id=mint(), cause=message.id, latest=data.latest), None)
    else:
        send(peer, w.Refuse(id=mint(), cause=message.id, reason="no weights have been published yet", stale=True), None)


class _Watcher(msgspec.Struct):
    peer: Peer
    cause: str  # its last w.WatchPolicy
    seen: float
    loaded: Version | None = None


class PolicyServer:
    """The core's side. `handle` takes the three messages of ToTrain that are about weights; `send` is `Server.send`.

    `clock` returns monotonic seconds. Everything runs in one asyncio loop; `publish` makes snapshots elsewhere possible (a thread may `pack`).
    """

    def __init__(self, send: Send, *, lease_ttl_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._store = SnapshotStore(lease_ttl_s)
        self._watchers: dict[str, _Watcher] = {}  # by cell
        self._changed = asyncio.Event()

    def publish(self, snapshot: Snapshot) -> None:
        """Lend a newer snapshot and tell every engine that watches."""
        self._store.publish(self._clock(), snapshot)
        for watcher in self._watchers.values():
            self._tell(watcher)

    @property
    def latest(self) -> Snapshot | None:
        """What is lent."""
        return self._store.latest

    def handle(self, peer: Peer, message: w.Message) -> bool:
        """Answer `message` if it is one of w.WatchPolicy, w.PullChunk, PolicyLoaded; else return False."""
        now = self._clock()
        self._store.expire(now)
        match message:
            case w.WatchPolicy():
                self._on_watch(now, peer, message)
            case w.PullChunk():
                serve_chunk(self._store, now, peer, message, self._send)
            case w.PolicyLoaded():
                watcher = self._watcher(now, peer, message.cell)
                watcher.loaded = message.version
                self._store.release(now, reader(peer), message.version)
                self._changed.set()
                self._send(peer, w.Ack(id=mint(), cause=message.id), None)
            case _:
                return False
        return True

    def _watcher(self, now: float, peer: Peer, cell: str) -> _Watcher:
        watcher = self._watchers.get(cell)
        if watcher is None or watcher.peer.incarnation != peer.incarnation:
            watcher = self._watchers[cell] = _Watcher(peer, "", now)
            self._changed.set()
        watcher.peer, watcher.seen = peer, now
        return watcher

    def _on_watch(self, now: float, peer: Peer, message: w.WatchPolicy) -> None:
        if message.leaving:
            watcher = self._watchers.get(message.cell)
            if watcher is not None and watcher.peer.incarnation == peer.incarnation:
                del self._watchers[message.cell]
                self._changed.set()
            return
        watcher = self._watcher(now, peer, message.cell)
        watcher.cause = message.id
        if message.have is not None and message.have != watcher.loaded:
            watcher.loaded = message.have
            self._changed.set()
        self._tell(watcher)

    def _tell(self, watcher: _Watcher) -> None:
        latest = self._store.latest
        if latest is None:
            return  # the first publication will tell it
        if watcher.loaded != latest.version:
            self._store.lease(self._clock(), reader(watcher.peer), latest.version)
        self._send(
            watcher.peer,
            w.PolicyAvailable(
                id=mint(), cause=watcher.cause, version=latest.version, tensors=latest.tensors, nbytes=latest.nbytes, checksum=latest.checksum
            ),
            None,
        )

    def loaded(self) -> dict[str, Version | None]:
        """What each engine that watches has acknowledged, by cell."""
        now = self._clock()
        self._watchers = {c: w for c, w in self._watchers.items() if w.seen + WATCHER_TTL_S > now}
        return {cell: w.loaded for cell, w in self._watchers.items()}

    async def wait_loaded(self, version: Version, deadline_s: float, *, grace_s: float | None = None) -> list[str]:
        """The cells that acknowledged `version` or newer, once every engine that watches did.

        If only some did, those after `grace_s` (default: the deadline). Raises `DeadlineExceeded` when none did by then.
        """
        started = self._clock()
        while True:
            self._changed.clear()
            loaded = self.loaded()
            done = sorted(cell for cell, has in loaded.items() if has is not None and has >= version)
            waited_s = self._clock() - started
            if done and (len(done) == len(loaded) or waited_s >= (deadline_s if grace_s is None else grace_s)):
                return done
            if waited_s >= deadline_s:
                missing = ", ".join(sorted(loaded)) or "none watches"
                raise DeadlineExceeded(f"an engine to acknowledge version {version.term}.{version.step} (engines: {missing})", waited_s)
            try:
                async with asyncio.timeout(min(1.0, deadline_s - waited_s + 0.001)):
                    await self._changed.wait()
            except TimeoutError:
                continue  # an engine may have fallen silent meanwhile


Load = Callable[[Version, list[TensorSpec], memoryview], Awaitable[None]]
"""Serve these weights from now on; returns when it is so. The bytes are the callee's until it returns."""

Connect = Callable[[Callable[[w.Message, Arrays], None]], Client]
"""A client of the trainer, given what takes its pushes."""


class PolicyClient:
    """The engine's side: keeps the engine at the newest version that the trainer lends, until cancelled.

    What `load` raises ends `run`. Losing the trainer does not: the engine goes on serving what it has and watches again.
    """

    def __init__(
        self,
        connect: Connect,
        load: Load,
        *,
        cell: str,
        request_timeout_s: float = 60.0,
        chunk_bytes: int = CHUNK_BYTES,
        watch_every_s: float = WATCH_EVERY_S,
    ) -> None:
        self._connect, self._load, self._cell = connect, load, cell
        self._timeout_s, self._watch_every_s, self._chunk_bytes = request_timeout_s, watch_every_s, chunk_bytes
        self._offer: w.PolicyAvailable | None = None
        self._offered = asyncio.Event()
        self.version: Version | None = None

    async def run(self, start_timeout_s: float) -> None:
        """Watch and load until cancelled. Raises `DeadlineExceeded` when no trainer answers within `start_timeout_s`, or `Refused`."""
        client = self._connect(self._on_push)
        tasks: list[asyncio.Task[None]] = []
        try:
            await client.ready(start_timeout_s, "gyre-train")
            tasks += [asyncio.create_task(self._watch(client)), asyncio.create_task(self._follow(client))]
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            client.send(w.WatchPolicy(id=mint(), cell=self._cell, leaving=True))  # else a publication would wait for an engine that sleeps
            client.close()

    def _on_push(self, message: w.Message, arrays: Arrays) -> None:
        if isinstance(message, w.PolicyAvailable) and (self.version is None or message.version > self.version):
            self._offer = message
            self._offered.set()

    async def _watch(self, client: Client) -> None:
        while True:
            client.send(w.WatchPolicy(id=mint(), cell=self._cell, have=self.version))
            await asyncio.sleep(self._watch_every_s)

    async def _follow(self, client: Client) -> None:
        while True:
            await self._offered.wait()
            self._offered.clear()
            offer, self._offer = self._offer, None
            if offer is None or (self.version is not None and offer.version <= self.version):
                continue
            started = time.monotonic()
            data = await self._pull(client, offer)
            if data is None:
                continue  # what replaced it was offered already, or the next watch is answered by what there is
            await self._load(offer.version, offer.tensors, memoryview(data))
            self.version = offer.version
            await self._acknowledge(client, offer.version, time.monotonic() - started)

    async def _acknowledge(self, client: Client, version: Version, seconds: float) -> None:
        loaded = w.PolicyLoaded(id=mint(), version=version, cell=self._cell, seconds=seconds)
        try:
            await client.request(loaded, deadline_s=self._timeout_s, what=f"gyre-train to note version {version.term}.{version.step}")
        except DeadlineExceeded as e:
            log.warning("%s; the next watch tells it", e)

    async def _pull(self, client: Client, offer: w.PolicyAvailable) -> bytearray | None:
        """All bytes of a snapshot, verified, or None when it is gone (or the trainer is)."""
        partial = Partial(offer.version, offer.checksum, bytearray(offer.nbytes))
        failure = await pull(client, partial, timeout_s=self._timeout_s, chunk_bytes=self._chunk_bytes)
        if not failure and await asyncio.to_thread(checksum_of, partial.data) != offer.checksum:
            failure = "its bytes do not have its checksum"
        if failure:
            log.warning("version %d.%d not loaded: %s", offer.version.term, offer.version.step, failure)
            return None
        return partial.data


class Requester(Protocol):
    """What a pull, and a trainer's questions, need of a `Client`: ask, and repeat until answered; or tell."""

    async def request(
        self, message: w.Message, arrays: Mapping[str, Array] | None = None, *, deadline_s: float, what: str
    ) -> tuple[w.Message, Arrays]: ...

    def send(self, message: w.Message, arrays: Mapping[str, Array] | None = None) -> None: ...


class Partial:
    """A snapshot's bytes as far as they have come."""

    def __init__(self, version: Version, checksum: str, data: bytearray) -> None:
        self.version, self.checksum, self.data = version, checksum, data
        self.done: set[int] = set()  # offsets of the chunks that are there


async def pull(client: Requester, partial: Partial, *, timeout_s: float, chunk_bytes: int = CHUNK_BYTES) -> str:
    """Pull the chunks that are missing, each repeated for `timeout_s`. Returns "", or why not all came; then it may be called again."""
    offsets = iter([o for o in range(0, len(partial.data), chunk_bytes) if o not in partial.done])
    failures: list[str] = []

    async def puller() -> None:
        for offset in offsets:  # shared: each puller takes the next one
            failure = await _pull_chunk(client, partial, offset, chunk_bytes, timeout_s)
            if failure:
                failures.append(failure)
            if failures:
                return

    await asyncio.gather(*(puller() for _ in range(PULLS_IN_FLIGHT)))
    return failures[0] if failures else ""


async def _pull_chunk(client: Requester, partial: Partial, offset: int, chunk_bytes: int, timeout_s: float) -> str:
    nbytes = min(chunk_bytes, len(partial.data) - offset)
    message = w.PullChunk(id=mint(), version=partial.version, offset=offset, nbytes=nbytes)
    try:
        reply, arrays = await client.request(message, deadline_s=timeout_s, what="a chunk of weights")
    except DeadlineExceeded as e:
        return str(e)
    match reply:
        case w.Chunk() if len(arrays["data"]) == nbytes:
            partial.data[offset : offset + nbytes] = arrays["data"]
            partial.done.add(offset)
            return ""
        case w.SnapshotGone():
            return f"gone, {reply.latest.term}.{reply.latest.step} replaced it"
        case w.Refuse():
            return reply.reason
        case _:
            return f"unexpected answer {type(reply).__name__}"
