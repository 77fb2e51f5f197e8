"""The network of the deterministic world: clients that ask one server, as `gyre.net.sockets` does it, through weather.

Invariants
- A connection keeps its order, as ZeroMQ's do. A connection that breaks loses what is on its way with it or not, and what the new one carries may
  overtake what is left of the old.
- A request is repeated until it is answered or its deadline passes, so every message may be heard twice, late, or by the server's next life.
- Each connection draws from a seed of its own: what happens on one does not depend on the traffic of another.
- Messages pass through the wire's codec: nothing is shared between two processes but bytes.

Not here: hello and welcome (a server that was restarted hears the repetition).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gyre.errors import DeadlineExceeded
from gyre.net.sockets import Peer
from gyre.wire.arrays import Array
from gyre.wire.codec import Arrays, Decoder, encode
from gyre.wire.messages import Message
from theorem.clock import Life, Process, VirtualLoop


@dataclass(frozen=True)
class Weather:
    """What the network does to messages. Probabilities are per message."""

    delay_s: float = 0.01  # at most, usually
    late: float = 0.0
    late_s: float = 1.0  # how much later at most
    lost: float = 0.0
    doubled: float = 0.0
    broken: float = 0.0  # the connection is made anew


Handler = Callable[[Peer, Message, Arrays], None]


class _Way:
    """One direction of a connection."""

    def __init__(self, loop: VirtualLoop, weather: Weather, seed: str) -> None:
        self._loop, self._weather, self._rng = loop, weather, random.Random(seed)
        self._last_s = 0.0

    def carry(self, deliver: Callable[[], None], at: Callable[..., object], *, cut: bool) -> None:
        """Deliver once, twice or never, behind what this connection carries already. `cut`: never."""
        w, r = self._weather, self._rng
        if r.random() < w.broken:
            self._last_s = 0.0
        late_s = w.late_s * r.random() if r.random() < w.late else 0.0
        self._last_s = max(self._last_s, self._loop.time() + w.delay_s * r.random() + late_s)
        lost, doubled, again_s = r.random() < w.lost, r.random() < w.doubled, w.late_s * r.random()
        if cut:
            return
        if not lost:
            at(self._last_s, deliver)
        if doubled:
            at(self._last_s + again_s, deliver)


class Network:
    """Who listens where, and who is connected to it. Over when the world is judged: nothing is carried any more."""

    def __init__(self, loop: VirtualLoop, weather: Weather, seed: int, listen: Callable[[str, str, Message], None]) -> None:
        self.loop = loop
        self.over = False
        self.listen = listen  # hears every message as it is sent: (from, to, message)
        self._weather, self._seed = weather, seed
        self._servers: dict[str, Server] = {}
        self._clients: dict[bytes, Client] = {}
        self._connections = 0
        self._cuts: list[tuple[str, str, float]] = []
        self._outside = Process(loop, "network")

    def bind(self, server: Server) -> None:
        self._servers[server.name] = server

    def connect(self, client: Client) -> tuple[bytes, _Way, _Way]:
        self._connections += 1
        n = str(self._connections).encode()
        self._clients[n] = client
        ways = [_Way(self.loop, self._weather, f"{self._seed}/{client.peer_name}/{client.address}/{self._connections}/{d}") for d in ("up", "down")]
        return n, ways[0], ways[1]

    def cut(self, name: str, until_s: float, other: str = "") -> None:
        """Lose all that processes of this name and another (every other) say to each other, until then."""
        self._cuts.append((name, other, until_s))

    def _is_cut(self, client: Client, server: Process | None) -> bool:
        ends = client.process.name.partition("/")[0], server.name.partition("/")[0] if server is not None else ""
        now = self.loop.time()
        self._cuts = [c for c in self._cuts if c[2] > now]
        return any(a in ends and (not b or b in ends) for a, b, _ in self._cuts)

    def at(self, when_s: float, deliver: Callable[[], None]) -> None:
        """A delivery belongs to no process: it happens whoever is stopped."""
        self.loop.call_at(when_s, deliver, context=self._outside.context)

    def to_server(self, client: Client, frames: list[Any]) -> None:
        def deliver() -> None:
            server = self._servers.get(client.address)
            if server is not None and server.process.life is not Life.DEAD and not self.over:
                server.process.call(server.hear, client.peer, frames)

        if not self.over:
            server = self._servers.get(client.address)
            client.up.carry(deliver, self.at, cut=self._is_cut(client, server.process if server is not None else None))

    def to_client(self, server: Server, identity: bytes, frames: list[Any]) -> None:
        client = self._clients[identity]

        def deliver() -> None:
            if client.process.life is not Life.DEAD and client.peer.identity == identity and not self.over:
                client.process.call(client.hear, frames)

        if not self.over:
            client.down.carry(deliver, self.at, cut=self._is_cut(client, server.process))


class Server:
    """Listens under its process's name; a later one of that name takes its place."""

    def __init__(self, network: Network, process: Process, name: str, incoming: Any, handler: Handler) -> None:
        self.process, self.name = process, name
        self.incarnation = process.name
        self._network, self._decoder, self._handler, self._closed = network, Decoder(incoming), handler, False
        network.bind(self)

    def hear(self, peer: Peer, frames: list[Any]) -> None:
        if not self._closed:
            message, arrays = self._decoder.decode(frames)
            self._handler(peer, message, arrays)

    def close(self) -> None:
        """Hear nothing more."""
        self._closed = True

    def send(self, peer: Peer, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        self._network.listen(self.name, f"{peer.name}/{peer.incarnation}", message)
        self._network.to_client(self, peer.identity, [bytes(f) for f in encode(message, arrays)])


class Client:
    """Asks the server at an address, and repeats it, as `gyre.net.sockets.Client` does."""

    def __init__(
        self, network: Network, process: Process, address: str, incoming: Any, *, kind: str, name: str, incarnation: str, resend_s: float,
        on_push: Callable[[Message, Arrays], None] | None = None, pid: int = 0,
    ) -> None:  # fmt: skip
        self.process, self.address, self.peer_name = process, address, name
        self._network, self._decoder, self._resend_s, self._on_push = network, Decoder(incoming), resend_s, on_push
        self._pending: dict[str, asyncio.Future[tuple[Message, Arrays]]] = {}
        self._closed = False
        self._kind, self._incarnation, self._pid = kind, incarnation, pid
        self.connect(address)

    def connect(self, address: str) -> None:
        """Talk to another server from now on; what the old one still says is not heard."""
        self.address = address
        identity, self.up, self.down = self._network.connect(self)
        self.peer = Peer(identity, self._kind, self.peer_name, self._incarnation, self._pid)

    async def ready(self, deadline_s: float, what: str) -> None:
        """There is no greeting."""

    async def request(self, message: Message, arrays: Mapping[str, Array] | None = None, *, deadline_s: float, what: str) -> tuple[Message, Arrays]:
        """Ask until the reply whose cause is this message arrives. Raises `DeadlineExceeded` naming `what`."""
        loop = self._network.loop
        future: asyncio.Future[tuple[Message, Arrays]] = loop.create_future()
        self._pending[message.id] = future
        ends_s = loop.time() + deadline_s
        try:
            while True:
                self.send(message, arrays)
                await asyncio.wait((future,), timeout=max(0.0, min(ends_s - loop.time(), self._resend_s)))
                if future.done():
                    return future.result()
                if loop.time() >= ends_s:
                    raise DeadlineExceeded(f"{what} at {self.address}", deadline_s)
        finally:
            del self._pending[message.id]
            future.cancel()

    def send(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        """Send without expecting an answer."""
        if not self._closed:
            self._network.listen(f"{self.peer.name}/{self.peer.incarnation}", self.address, message)
            self._network.to_server(self, [bytes(f) for f in encode(message, arrays)])

    def hear(self, frames: list[Any]) -> None:
        message, arrays = self._decoder.decode(frames)
        waiting = self._pending.get(message.cause)
        if waiting is not None and not waiting.done():
            waiting.set_result((message, arrays))
        elif self._on_push is not None and not self._closed:
            self._on_push(message, arrays)

    def close(self) -> None:
        self._closed = True
