"""Floods: of connections, of messages, of clients; frames without end or of 1 GB; while a client that is well behaved is answered. Over real sockets,
against a server in a process of its own whose files and memory are looked at."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from gyre.net import keys, limits
from gyre.net.sockets import Client, mint
from gyre.types import Sampling, Version
from gyre.wire import messages as w
from gyre.wire.arrays import i32
from gyre.wire.codec import encode

DEADLINE_S = 60.0
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
CONNECTIONS = min(10_000, FILES * 3 // 4 - 200)  # what this machine allows


def greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


GREETING = greeting(b"NULL")
READY = b"\x04\x1c\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
SAID = {"a whole handshake": GREETING + READY, "half of one": GREETING, "garbage": b"GET / HTTP/1.1\r\n" * 4}

SERVER = """
import asyncio, json, resource, sys
from pathlib import Path
from gyre.net import keys, limits
from gyre.net.sockets import Server, mint
from gyre.wire import messages as w
from gyre.wire.arrays import f32

files, directory, limits.RATE = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
limits.BURST = 4 * limits.RATE
resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, files), files))

async def main():
    own = keys.load(Path(directory), "rollout") if directory else None
    server = Server.bind("tcp://127.0.0.1:*", w.ToRollout, kind="rollout", name="cell", run_id="r", keys=own)

    def handle(peer, message, arrays):
        if isinstance(message, w.Generate):
            open("/dev/null").close()  # it goes on having files of its own
            ids = arrays["prompt_ids"]
            reply = w.Generated(id=mint(), cause=message.id, request_id=message.request_id, finish_reason="stop", spans=[], cell=peer.name)
            server.send(peer, reply, {"token_ids": ids, "logprobs": f32([-1.0] * len(ids))})

    serving = asyncio.create_task(server.serve(handle))
    print(server.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until nobody is there
    print(json.dumps(server.refusals.counts), flush=True)
    serving.cancel()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys") / "run"
    keys.make(directory)
    return directory


@pytest.fixture(scope="module", autouse=True)
def files() -> None:
    """As many as this process may have."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))


class Engine:
    """A server in a process of its own."""

    def __init__(self, directory: Path | None, files: int, rate: float) -> None:
        argv = [sys.executable, "-c", SERVER, str(files), str(directory or ""), str(rate)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.port = int(self.address.rpartition(":")[2])

    def memory_mb(self) -> float:
        return int(next(x for x in Path(f"/proc/{self.process.pid}/status").read_text().splitlines() if x.startswith("VmRSS")).split()[1]) / 1024

    def files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def end(self) -> None:
        out, _ = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0
        self.refused: dict[str, int] = json.loads(out)  # by reason

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port))


class Good:
    """A client that goes on asking, one question after the other."""

    def __init__(self, engine: Engine, own: keys.Keys | None) -> None:
        self.client = Client.connect(engine.address, w.FromRollout, kind="sandbox", name="good", incarnation="1", resend_s=0.5, keys=own)
        self.answers = 0
        self.task = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        while True:
            message = w.Generate(id=mint(), request_id=mint(), rollout_id="r", min_version=Version(0, 0), sampling=Sampling(), seed=0)
            await self.client.request(message, {"prompt_ids": i32([1, 2])}, deadline_s=DEADLINE_S, what="the engine")
            self.answers += 1
            await asyncio.sleep(0.005)

    async def answered(self, n: int = 5) -> None:
        """Wait for n more answers."""
        wanted, end = self.answers + n, time.monotonic() + DEADLINE_S
        while self.answers < wanted:
            assert not self.task.done() and time.monotonic() < end, "the others are served on"
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.task.cancel()
        self.client.close()


@contextlib.asynccontextmanager
async def served(directory: Path | None, files: int = 4096, rate: float = limits.RATE) -> Any:
    engine = Engine(directory, files, rate)
    good = Good(engine, keys.load(directory, "sandbox") if directory else None)
    try:
        await good.answered()
        yield engine, good
        await good.answered()
        engine.end()
    finally:
        await good.close()
        engine.process.kill()
        engine.process.communicate()


def go(body: Any) -> None:
    asyncio.run(asyncio.wait_for(body(), 3 * DEADLINE_S))


@contextlib.contextmanager
def flood(port: int, n: int) -> Iterator[list[socket.socket]]:
    """Connections that are begun and not waited for."""
    begun = []
    for _ in range(n):
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", port))
        begun.append(sock)
    try:
        yield begun
    finally:
        for sock in begun:
            sock.close()


def test_10000_silent_connections(made: Path) -> None:
    """More than there are files for: none is let in beyond three quarters of them, the server has files of its own meanwhile, and who is new gets in
    when the silent ones were closed."""

    async def body() -> None:
        async with served(made, files=2048) as (engine, good):
            before, most, shut_at = engine.memory_mb(), 0, time.monotonic() + 4
            with flood(engine.port, CONNECTIONS):
                while time.monotonic() < shut_at:
                    await good.answered(1)
                    most = max(most, engine.files())
                late = Good(engine, keys.load(made, "sandbox"))
                await late.answered(1)
                await late.close()
            assert 2048 * 3 // 4 < most < 2048, most
            assert engine.memory_mb() - before < 100
        assert engine.refused["connections"] >= 1

    go(body)


@pytest.mark.parametrize("name", SAID)
def test_10000_connections_that_speak(name: str) -> None:
    """Room is found for all, and others are served meanwhile."""
    words = SAID[name]

    async def body() -> None:
        async with served(None, files=FILES) as (engine, good):
            before = engine.memory_mb()
            with flood(engine.port, CONNECTIONS) as begun:
                waiting, end = set(begun), time.monotonic() + DEADLINE_S
                while waiting:
                    assert time.monotonic() < end, f"{len(waiting)} connections are not there"
                    for sock in list(waiting):
                        with contextlib.suppress(BlockingIOError, ConnectionError):
                            waiting -= {sock} if sock.send(words) else set()
                    await good.answered(1)
                while words.endswith(READY) and engine.files() < CONNECTIONS:  # who said all of it stays
                    assert time.monotonic() < end, f"only {engine.files()} are let in"
                    await good.answered(1)
                grown = engine.memory_mb() - before
                print(f"{len(begun)} connections, {name}: {engine.files()} files, {grown:.0f} MiB more")
                assert grown < 1024
                late = Good(engine, None)
                await late.answered(1)
                await late.close()

    go(body)


def test_a_frame_of_1_gb(made: Path) -> None:
    """From a client with a key and from a stranger, and a smaller one that is no handshake: its connection is closed, in memory there was never more
    than a frame may have."""

    async def body() -> None:
        async with served(made) as (engine, good):
            before, most = engine.memory_mb(), 0.0
            dealer = zmq.Context.instance().socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RECONNECT_IVL, -1)
            keys.load(made, "sandbox").present(dealer, "rollout")
            monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            dealer.connect(engine.address)
            dealer.send(bytes(1 << 30), copy=False)
            while not monitor.poll(0):
                most = max(most, engine.memory_mb())
                await good.answered(1)
            dealer.disable_monitor()
            monitor.close(0)
            dealer.close(0)
            for size in (1 << 30, 200 << 20):  # no key, and this as the first thing after the greeting
                with engine.connect() as sock, contextlib.suppress(OSError):
                    sock.settimeout(DEADLINE_S)
                    sock.sendall(greeting(b"CURVE") + b"\x06" + struct.pack(">Q", size))
                    for _ in range(size >> 20):
                        await asyncio.to_thread(sock.sendall, bytes(1 << 20))
                        most = max(most, engine.memory_mb())
                await good.answered(1)
            await good.answered()
            print(f"at most {most - before:.0f} MiB more")
            assert most - before < 256 + 50

    go(body)


def test_messages_too_fast() -> None:
    """What is beyond a client's rate is dropped unread. (The rate is a fifth of the real one: machines may be slow.)"""

    async def body() -> None:
        async with served(None, rate=limits.RATE / 5) as (engine, good):
            dealer = zmq.Context.instance().socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(engine.address)
            ping = encode(w.Ping(id="x"))
            sent = 0
            while sent < 60_000:
                try:
                    dealer.send_multipart(ping, zmq.DONTWAIT)
                    sent += 1
                except zmq.Again:
                    await good.answered(1)
            await good.answered(20)
            dealer.close(0)
        assert engine.refused["rate"] > 1000

    go(body)


def test_no_more_clients_are_remembered_than_so_many() -> None:
    """Somebody who is forgotten is asked for his hello again, and goes on."""
    clients = limits.Clients()
    for n in range(limits.CLIENTS + 5):
        assert clients.may_send(b"%d" % n, 0.0)
        assert clients.forget() == (b"%d" % (n - limits.CLIENTS) if n >= limits.CLIENTS else None)
    assert all(clients.may_send(b"1", 1.0) for _ in range(int(limits.BURST))) and not clients.may_send(b"1", 1.0)
    assert clients.may_send(b"1", 1.0 + 2 / limits.RATE), "a burst, then a rate"


def test_garbage_and_those_who_say_it_slowly(made: Path) -> None:
    """Random bytes, a greeting and then random bytes; and a greeting byte by byte, which is closed when its time is over."""

    async def body() -> None:
        async with served(made) as (engine, good):
            before = engine.memory_mb()
            slow = engine.connect()
            slow.settimeout(DEADLINE_S)
            closed = asyncio.create_task(asyncio.to_thread(dribble, slow))
            for n in range(200):
                with engine.connect() as sock, contextlib.suppress(OSError):
                    sock.sendall((GREETING if n % 2 else b"") + secrets.token_bytes(1 + n * 50))
                await good.answered(1)
            await closed
            slow.close()
            assert engine.memory_mb() - before < 50

    go(body)


def dribble(sock: socket.socket) -> None:
    """A byte at a time, until the other end has enough of it."""
    for byte in GREETING * 100:
        try:
            sock.send(bytes([byte]))
        except OSError:
            return
        time.sleep(0.25)
    raise AssertionError("a greeting that takes for ever is listened to")


def test_garbage_in_messages() -> None:
    """No key is needed here: what cannot be decoded is counted and dropped, named once for each client."""

    async def body() -> None:
        async with served(None) as (engine, good):
            dealer = zmq.Context.instance().socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(engine.address)
            nested = b"\x84\xa2op\xa4Ping\xa2id\xa1a\xa1z" + b"\x91" * 100_000 + b"\xc0"
            for frames in ([b""], [b"\xc1"], [b"x"] * 50, [nested], [secrets.token_bytes(1000)], [*encode(w.Ping(id="x")), b"more"]):
                dealer.send_multipart(frames)
                await good.answered(1)
            dealer.close(0)
        assert engine.refused == {"garbage": 6}

    go(body)
