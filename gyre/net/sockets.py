"""Request and reply over ZeroMQ, with pushes: a ROUTER that serves and DEALERs that ask.

Invariants
- The first thing on a connection is `Hello`; a server that does not know a client (it was restarted) says `HelloRequired`, and the client says
  hello and repeats what it had asked. So servers may restart at any time and requests must be idempotent.
- A request is repeated until it is answered or its deadline passes, and the error names what was waited for.
- Sending never blocks: each socket's queue is bounded, and what does not fit is dropped, logged and made up for by the repetition.
- A server takes from a client what its kind may say, and refuses and counts the rest. With keys the kind is the key's, at every message.

Not here: which kind may say what (gyre/wire/speakers.py), how much (limits.py), keys (keys.py). Without these `check_bind` keeps sockets local.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import zmq

from gyre.errors import DeadlineExceeded, Refused, UsageError
from gyre.net import limits
from gyre.net.endpoints import check_bind, claim_ipc
from gyre.net.keys import Keys
from gyre.wire.arrays import Array
from gyre.wire.codec import Arrays, Decoder, Frame, WireError, encode
from gyre.wire.messages import WIRE_VERSION, Hello, HelloRequired, Message, Refuse, Welcome
from gyre.wire.speakers import ANSWERED_BY, may

log = logging.getLogger(__name__)

_QUEUE: Final = 20_000  # messages a socket holds in each direction
_HELLO_EVERY_S: Final = 0.5
_QUIET_S: Final = 5.0  # a peer that does not answer yet may be starting, which is no news
_BATCH: Final = 256  # messages taken before other tasks get their turn
_SMALL_BYTES: Final = 1 << 14  # a longer frame is not copied out of ZeroMQ
_HANDSHAKE_MS: Final = 10_000  # a connection that says nothing is closed after so long

_prefix = os.urandom(5).hex()
_count = itertools.count()


def mint() -> str:
    """A fresh message id, unique across processes. A forked child must not use its parent's."""
    return f"{_prefix}-{next(_count):x}"


class Peer(msgspec.Struct, frozen=True):
    """A client that said hello."""

    identity: bytes
    kind: str
    name: str
    incarnation: str
    pid: int = 0


Handler = Callable[[Peer, Message, Arrays], Awaitable[None] | None]


class _Socket:
    """A ZeroMQ socket in an asyncio loop: sends at once or not at all, wakes its reader.

    ZeroMQ's file descriptor is edge-triggered and sending may swallow an edge, so a send wakes the reader too.
    """

    def __init__(self, kind: int, address: str) -> None:
        self.zmq: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self.guarded = False
        self.zmq.setsockopt(zmq.LINGER, 500)  # ms: last replies still go out when a process ends
        self.zmq.setsockopt(zmq.SNDHWM, _QUEUE)
        self.zmq.setsockopt(zmq.RCVHWM, _QUEUE)
        self.zmq.setsockopt(zmq.IPV6, int("[" in address))
        if address.startswith("tcp://"):
            self.zmq.setsockopt(zmq.MAXMSGSIZE, limits.MOST_BYTES)  # of a frame; the connection of a longer one is closed
            self.zmq.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._wake = asyncio.Event()
        self._fd: int = self.zmq.fileno()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._wake.set)

    def send(self, frames: Sequence[Frame]) -> None:
        """Queue a message; raises `zmq.ZMQError` when the peer is gone or the queue full."""
        try:
            self.zmq.send_multipart(frames, zmq.DONTWAIT, copy=len(frames) < 3)
        finally:
            self._wake.set()

    async def receive(self) -> list[tuple[str, list[Frame]]]:
        """The messages that have arrived, at least one, at most a batch, each with the public key of its sender (of a guarded socket, else "")."""
        while True:
            batch: list[tuple[str, list[Frame]]] = []
            try:
                while len(batch) < _BATCH:
                    frames = self.zmq.recv_multipart(zmq.DONTWAIT, copy=False)
                    key = str(frames[-1].get("User-Id")) if self.guarded else ""
                    batch.append((key, [f.bytes if len(f) < _SMALL_BYTES else f.buffer for f in frames]))
                self._wake.set()  # there may be more
            except zmq.Again:
                pass
            if batch:
                return batch
            self._wake.clear()
            if not self.zmq.poll(0, zmq.POLLIN):
                await self._wake.wait()

    def close(self, linger_ms: int | None = None) -> None:
        if not self.zmq.closed:
            self._loop.remove_reader(self._fd)
            self.zmq.close(linger_ms)


class Server:
    """The ROUTER of a process. Answers hellos itself, hands everything else to the handler of `serve`."""

    def __init__(
        self, sock: _Socket, address: str, incoming: Any, kind: str, welcome: Welcome, lock: int | None, keys: Keys | None, refusals: limits.Refusals
    ) -> None:  # fmt: skip
        self.address = address
        self.incarnation = welcome.incarnation
        self.kind = kind
        self.refusals = refusals
        self._sock = sock
        self._decoder = Decoder(incoming)
        self._welcome = welcome
        self._clients = limits.Clients()
        self._peers: dict[bytes, Peer] = {}  # those of them that said hello
        self._lock = lock
        self._keys = keys
        self._door = limits.Door(address, refusals) if address.startswith("tcp://") else None

    @classmethod
    def bind(cls, address: str, incoming: Any, *, kind: str, name: str, run_id: str, insecure: bool = False, keys: Keys | None = None) -> Server:
        """Bind `address`; `keys` guard it if it is tcp. Raises `UsageError` for an address in use, not allowed or not usable."""
        check_bind(address, insecure or keys is not None)
        lock = claim_ipc(address)
        sock = _Socket(zmq.ROUTER, address)
        sock.zmq.setsockopt(zmq.ROUTER_MANDATORY, 1)
        refusals = limits.Refusals()
        if keys is not None and address.startswith("tcp://"):
            keys.guard(sock.zmq, f"{name}-{mint()}", refusals)
            sock.guarded = True
        try:
            sock.zmq.bind(address)
        except zmq.ZMQError as e:
            sock.close(0)
            if e.errno == zmq.EADDRINUSE:
                raise UsageError("--bind", f"{address} is in use", "stop its holder or bind another address") from None
            raise UsageError("--bind", f"{address} cannot be bound ({e})", "give tcp://127.0.0.1:PORT or ipc://PATH") from None
        real = sock.zmq.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        welcome = Welcome(id=mint(), wire_version=WIRE_VERSION, run_id=run_id, incarnation=os.urandom(6).hex())
        return cls(sock, real, incoming, kind, welcome, lock, keys, refusals)

    def send(self, peer: Peer, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        """Queue a message for a client; a client that is gone, or whose queue is full, misses it and will ask again."""
        self._put(peer.identity, message, arrays)

    def _put(self, identity: bytes, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        try:
            self._sock.send([identity, *encode(message, arrays)])
        except zmq.ZMQError as e:
            if e.errno == zmq.EHOSTUNREACH:
                self._peers.pop(identity, None)
            log.debug("message %s to %r dropped: %s", type(message).__name__, identity, e)

    async def serve(self, handler: Handler) -> None:
        """Handle messages until cancelled. What the handler raises ends the server."""
        while True:
            for key, (identity, *frames) in await self._sock.receive():
                accepted = self._accept(key, bytes(identity), frames)
                if accepted is not None and inspect.isawaitable(answer := handler(*accepted)):
                    await answer
            await asyncio.sleep(0)

    def _accept(self, key: str, identity: bytes, frames: list[Frame]) -> tuple[Peer, Message, Arrays] | None:
        """What the handler is given, if anything."""
        if not self._clients.may_send(identity, time.monotonic()):
            self.refusals.add("rate", identity, f"more than {limits.RATE:.0f} messages a second from {self._who(identity)}")
            return None
        if (forgotten := self._clients.forget()) is not None:
            self._peers.pop(forgotten, None)
        if sum(map(len, frames)) > limits.MOST_BYTES:
            self.refusals.add("size", identity, f"a message of more than {limits.MOST_BYTES >> 20} MiB from {self._who(identity)}")
            return None
        try:
            message, arrays = self._decoder.decode(frames)
        except WireError as e:
            self.refusals.add("garbage", identity, f"from {self._who(identity)}: {e}")
            return None
        kind = self._keys.kind_of(key) if self._sock.guarded and self._keys is not None else None  # None: nobody can prove one
        if isinstance(message, Hello):
            self._greet(identity, message, kind)
        elif (peer := self._peers.get(identity)) is None:
            self._put(identity, HelloRequired(id=mint(), cause=message.id))
        elif kind not in (None, peer.kind) or not may(self.kind, peer.kind, message):
            self._refuse(identity, message, f"{peer.kind} {peer.name} may not send {type(message).__name__} to gyre-{self.kind}")
        else:
            return peer, message, arrays
        return None

    def _who(self, identity: bytes) -> str:
        peer = self._peers.get(identity)
        return f"{peer.kind} {peer.name}" if peer is not None else repr(identity)

    def _refuse(self, identity: bytes, message: Message, reason: str) -> None:
        self.refusals.add("kind", identity, reason)
        self._put(identity, Refuse(id=mint(), cause=message.id, reason=reason))

    def _greet(self, identity: bytes, hello: Hello, kind: str | None) -> None:
        if kind not in (None, hello.kind):
            reason = f"{hello.kind} {hello.name} shows the key of {kind}: give each process the keys of its kind"
        elif hello.wire_version != WIRE_VERSION:
            reason = f"{hello.kind} {hello.name} speaks wire version {hello.wire_version}, this process {WIRE_VERSION}: run the same gyre on both"
        elif hello.run_id and hello.run_id != self._welcome.run_id:
            reason = f"{hello.kind} {hello.name} belongs to run {hello.run_id}, this process to {self._welcome.run_id}"
        else:
            self._peers[identity] = Peer(identity, hello.kind, hello.name, hello.incarnation, hello.pid)
            self._put(identity, msgspec.structs.replace(self._welcome, id=mint(), cause=hello.id))
            return
        self._refuse(identity, hello, reason)

    def close(self) -> None:
        self._sock.close()
        if self._door is not None:
            self._door.close()
        if self._lock is not None:
            os.close(self._lock)


class Client:
    """A DEALER to one server. Reconnects for ever; requests are repeated until answered."""

    def __init__(
        self, address: str, incoming: Any, hello: Hello, resend_s: float, on_push: Callable[[Message, Arrays], None] | None, keys: Keys | None
    ) -> None:  # fmt: skip
        self.address = address
        self.server: Welcome | None = None
        self._hello = hello
        self._resend_s = resend_s
        self._on_push = on_push
        self._decoder = Decoder(incoming)
        self._pending: dict[str, tuple[asyncio.Future[tuple[Message, Arrays]], list[Any]]] = {}
        self._refused: Refuse | None = None
        self._welcomed = asyncio.Event()
        self._sock = _Socket(zmq.DEALER, address)
        self._sock.zmq.setsockopt(zmq.ROUTING_ID, f"{hello.name}:{hello.incarnation}:{mint()}".encode()[-200:])
        self._sock.zmq.setsockopt(zmq.RECONNECT_IVL, 50)
        self._sock.zmq.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor: zmq.Socket[bytes] | None = None
        if keys is not None and address.startswith("tcp://"):
            keys.present(self._sock.zmq, ANSWERED_BY[incoming])
            self._monitor = self._sock.zmq.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        try:
            self._sock.zmq.connect(address)
        except zmq.ZMQError as e:
            self._sock.close(0)
            raise UsageError("address", f"{address} cannot be connected to ({e})", "give tcp://HOST:PORT or ipc://PATH") from None
        self._task = asyncio.create_task(self._receive())

    @classmethod
    def connect(
        cls,
        address: str,
        incoming: Any,
        *,
        kind: str,
        name: str,
        incarnation: str,
        run_id: str = "",
        resend_s: float = 5.0,
        on_push: Callable[[Message, Arrays], None] | None = None,
        keys: Keys | None = None,
    ) -> Client:
        """Begin to connect; returns at once. `keys` are shown to a server at a tcp address."""
        hello = Hello(
            id=mint(), wire_version=WIRE_VERSION, kind=kind, name=name, incarnation=incarnation, run_id=run_id,
            host=socket.gethostname(), pid=os.getpid(),
        )  # fmt: skip
        return cls(address, incoming, hello, resend_s, on_push, keys)

    def _who(self, what: str) -> str:
        """What is waited for, where, and what is known of why."""
        if self._monitor is not None and self._monitor.poll(0):
            return f"{what} at {self.address}, which refuses this process's key (is net.keys that of this run?)"
        return f"{what} at {self.address}"

    def _given_up(self, what: str, waited_s: float) -> DeadlineExceeded:
        who = self._who(what)
        if self.server is None and not who.endswith(")"):
            who += ", where nobody answers (does it run, and there?)"
        return DeadlineExceeded(who, waited_s)

    async def ready(self, deadline_s: float, what: str) -> Welcome:
        """Wait until the server welcomed us. Raises `DeadlineExceeded` naming `what`, or `Refused`."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._welcomed.wait()
        except TimeoutError:
            raise self._given_up(what, deadline_s) from None
        if self._refused is not None:
            raise Refused(self._refused.reason)
        assert self.server is not None
        return self.server

    async def request(self, message: Message, arrays: Mapping[str, Array] | None = None, *, deadline_s: float, what: str) -> tuple[Message, Arrays]:
        """Ask, and repeat, until the reply whose cause is this message arrives. Raises `DeadlineExceeded` naming `what`, `Refused`, or what ended
        the receiving task (what `on_push` raised)."""
        future: asyncio.Future[tuple[Message, Arrays]] = asyncio.get_running_loop().create_future()
        frames = encode(message, arrays)
        self._pending[message.id] = (future, frames)
        began, said = time.monotonic(), False
        deadline = began + deadline_s
        try:
            while True:
                if self._refused is not None:
                    raise Refused(self._refused.reason)
                if self.server is not None:  # else the welcome sends all that is pending
                    self._send(frames)
                # asyncio.wait, not wait_for: on Python 3.11 that swallows a cancellation that arrives together with the reply
                timeout = max(0.0, min(deadline - time.monotonic(), self._resend_s))
                await asyncio.wait((future, self._task), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if future.done():
                    return future.result()
                if self._task.done():  # what `on_push` raised: nothing will be received any more
                    self._task.result()
                if self.server is None and not said and time.monotonic() >= began + _QUIET_S:
                    said = True
                    log.info("nobody answers yet: waiting for %s", self._who(what))
                if time.monotonic() >= deadline:
                    raise self._given_up(what, deadline_s)
        finally:
            del self._pending[message.id]
            future.cancel()

    def send(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        """Send without expecting an answer; lost if there is no connection."""
        self._send(encode(message, arrays))

    def _send(self, frames: list[Any]) -> None:
        try:
            self._sock.send(frames)
        except zmq.ZMQError as e:
            log.debug("to %s dropped: %s", self.address, e)

    async def _receive(self) -> None:
        greeter = asyncio.create_task(self._greet())
        try:
            while True:
                for _, frames in await self._sock.receive():
                    self._dispatch(frames)
                await asyncio.sleep(0)
        finally:
            greeter.cancel()

    async def _greet(self) -> None:
        while True:
            if self.server is None and self._refused is None:
                self._send(encode(self._hello))
            await asyncio.sleep(_HELLO_EVERY_S)

    def _dispatch(self, frames: list[Frame]) -> None:
        try:
            message, arrays = self._decoder.decode(frames)
        except WireError as e:
            log.warning("from %s: %s", self.address, e)
            return
        match message:
            case Welcome():
                if self.server is None or self.server.incarnation != message.incarnation:
                    self.server = message
                    self._welcomed.set()
                    for _, pending in list(self._pending.values()):
                        self._send(pending)
            case HelloRequired():
                self.server = None
                self._send(encode(self._hello))
            case Refuse() if message.cause == self._hello.id:
                self._refused = message
                self._welcomed.set()
            case _:
                waiting = self._pending.get(message.cause)
                if waiting is not None and not waiting[0].done():
                    waiting[0].set_result((message, arrays))
                elif self._on_push is not None:
                    self._on_push(message, arrays)

    def close(self) -> None:
        self._task.cancel()
        if self._monitor is not None:
            self._sock.zmq.disable_monitor()
            self._monitor.close(0)
        self._sock.close()
