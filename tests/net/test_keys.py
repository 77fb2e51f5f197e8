"""Keys: who is let in, who is not, and that the others are served meanwhile. Hostile clients over real tcp sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from click.testing import CliRunner

from commands.keys import main as gyre_keys
from gyre.errors import DeadlineExceeded, Refused, UsageError
from gyre.net import keys
from gyre.net.sockets import Client, Peer, Server, mint
from gyre.types import Sampling, Version
from gyre.wire import messages as w
from gyre.wire.arrays import f32, i32
from gyre.wire.codec import Arrays, encode
from gyre.wire.speakers import KINDS

DEADLINE_S = 60.0
SHORT_S = 1.5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys") / "run"
    assert keys.make(directory) == list(KINDS)
    return directory


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys of another run."""
    directory = tmp_path_factory.mktemp("keys") / "other"
    keys.make(directory)
    return directory


class Echo:
    """An engine that echoes prompts, and counts what reached it."""

    def __init__(self, own: keys.Keys) -> None:
        self.handled: list[w.Message] = []
        self.server = Server.bind("tcp://127.0.0.1:*", w.ToRollout, kind="rollout", name="cell", run_id="r", keys=own)

    def handle(self, peer: Peer, message: w.Message, arrays: Arrays) -> None:
        self.handled.append(message)
        if isinstance(message, w.Generate):
            ids = arrays["prompt_ids"]
            reply = w.Generated(id=mint(), cause=message.id, request_id=message.request_id, finish_reason="stop", spans=[], cell=peer.name)
            self.server.send(peer, reply, {"token_ids": ids, "logprobs": f32([-1.0] * len(ids))})


def client(address: str, own: keys.Keys | None, kind: str = "sandbox") -> Client:
    return Client.connect(address, w.FromRollout, kind=kind, name="s", incarnation="1", resend_s=0.3, keys=own)


async def ask(c: Client, deadline_s: float = DEADLINE_S) -> w.Message:
    message = w.Generate(id=mint(), request_id="q", rollout_id="r", min_version=Version(0, 0), sampling=Sampling(), seed=0)
    return (await c.request(message, {"prompt_ids": i32([1, 2])}, deadline_s=deadline_s, what="the engine"))[0]


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[Echo]:
    """An engine and a client that it knows; at the end that client is still served."""
    echo = Echo(keys.load(directory, "rollout"))
    task = asyncio.create_task(echo.server.serve(echo.handle))
    good = client(echo.server.address, keys.load(directory, "sandbox"))
    try:
        assert isinstance(await ask(good), w.Generated)
        yield echo
        assert isinstance(await ask(good), w.Generated), "the others are served on"
    finally:
        good.close()
        task.cancel()
        echo.server.close()


def go(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))  # type: ignore[arg-type]


def port_of(echo: Echo) -> int:
    return int(echo.server.address.rpartition(":")[2])


def test_who_is_not_let_in(made: Path, others: Path) -> None:
    """No key, another run's, a server that is not the one meant: nobody answers, nothing reaches the process, the error says so."""
    mine, foreign = keys.load(made, "sandbox"), keys.load(others, "sandbox")
    stranger = msgspec.structs.replace(foreign, public={**mine.public, "sandbox": foreign.public["sandbox"]})
    misled = msgspec.structs.replace(mine, public={**mine.public, "rollout": mine.public["buffer"]})

    async def body() -> None:
        async with served(made) as echo:
            before = len(echo.handled)
            for own, words in ((None, "the engine"), (stranger, "refuses this process's key"), (misled, "the engine")):
                c = client(echo.server.address, own)
                with pytest.raises(DeadlineExceeded, match=words):
                    await ask(c, SHORT_S)
                c.close()
            assert len(echo.handled) == before and echo.server.refusals.counts["key"] >= 1

    go(body)


def test_the_right_key_in_the_wrong_role(made: Path) -> None:
    """A kind that its key is not is refused at the hello; a message its kind may not send is refused by name, and counted."""

    async def body() -> None:
        async with served(made) as echo:
            posing = client(echo.server.address, keys.load(made, "sandbox"), kind="train")
            with pytest.raises(Refused, match="train s shows the key of sandbox"):
                await posing.ready(DEADLINE_S, "the engine")
            posing.close()
            before, reader = len(echo.handled), client(echo.server.address, keys.load(made, "observer"), kind="observer")
            answer = await ask(reader)
            assert isinstance(answer, w.Refuse) and answer.reason == "observer s may not send Generate to gyre-rollout"
            assert len(echo.handled) == before and echo.server.refusals.counts["kind"] == 2
            reader.close()

    go(body)


def test_an_identity_is_not_proof(made: Path) -> None:
    """Whoever takes the routing identity of another kind's client speaks with its own key."""

    async def body() -> None:
        async with served(made) as echo:
            context, identity = zmq.Context.instance(), b"taken"

            def dealer(kind: str) -> zmq.Socket[bytes]:
                sock = context.socket(zmq.DEALER)
                sock.setsockopt(zmq.ROUTING_ID, identity)
                sock.setsockopt(zmq.LINGER, 0)
                keys.load(made, kind).present(sock, "rollout")
                sock.connect(echo.server.address)
                return sock

            first = dealer("sandbox")
            hello = w.Hello(id=mint(), wire_version=w.WIRE_VERSION, kind="sandbox", name="s", incarnation="1", run_id="r", host="h", pid=1)
            first.send_multipart(encode(hello))
            await until(lambda: first.poll(0), "the welcome")
            first.close(0)
            await asyncio.sleep(0.3)  # the server forgets the connection, not the name
            before, second = len(echo.handled), dealer("observer")
            second.send_multipart(encode(w.Ping(id=mint())))
            await until(lambda: echo.server.refusals.counts["kind"] or second.poll(0), "an answer")
            assert len(echo.handled) == before
            second.close(0)

    go(body)


async def until(done: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not done():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.02)
    assert done(), what


@contextmanager
def wiretap(port: int) -> Iterator[tuple[int, list[bytes]]]:
    """A proxy before `port` for one connection; the bytes that the client sent, as they passed."""
    seen: list[bytes] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def pipe(source: socket.socket, sink: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if keep:
                    seen.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def through() -> None:
        here, there = listening.accept()[0], socket.create_connection(("127.0.0.1", port))
        with here, there:
            back = threading.Thread(target=pipe, args=(there, here, False))
            back.start()
            pipe(here, there, True)
            back.join(DEADLINE_S)

    thread = threading.Thread(target=through)
    thread.start()
    yield listening.getsockname()[1], seen
    thread.join(DEADLINE_S)
    listening.close()


def test_replayed_frames(made: Path) -> None:
    """What a known client sent, sent again on a connection of one's own, does nothing; and on the wire there is no plain text."""

    async def body() -> None:
        async with served(made) as echo:
            with wiretap(port_of(echo)) as (port, seen):
                c = client(f"tcp://127.0.0.1:{port}", keys.load(made, "sandbox"))
                assert isinstance(await ask(c), w.Generated)
                c.close()
                before, recorded = len(echo.handled), b"".join(seen)
            assert b"rollout_id" not in recorded and len(recorded) > 500
            with socket.create_connection(("127.0.0.1", port_of(echo))) as sock, contextlib.suppress(OSError):
                sock.sendall(recorded)
                await asyncio.to_thread(sock.recv, 1 << 20)  # what the server says to the first of it
                await asyncio.sleep(0.5)
            assert len(echo.handled) == before

    go(body)


def test_gyre_keys(tmp_path: Path) -> None:
    directory = tmp_path / "k"
    first, again = (CliRunner().invoke(gyre_keys, [str(directory)]) for _ in range(2))
    assert first.exit_code == again.exit_code == 0 and first.stdout == again.stdout, "a second time it keeps what there is"
    assert [line.split()[0] for line in first.stdout.splitlines()] == list(KINDS) and f"{len(KINDS)} pairs made" in first.stderr
    for kind in KINDS:
        secret = directory / f"{kind}.key_secret"
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert keys.load(directory, kind).secret.decode() not in first.stdout + first.stderr


def test_keys_that_are_none(tmp_path: Path) -> None:
    directory = tmp_path / "k"
    with pytest.raises(UsageError, match=r"buffer.key: cannot be read .*; make them with gyre-keys"):
        keys.load(directory, "sandbox")
    keys.make(directory)
    secret = directory / "sandbox.key_secret"
    text = secret.read_text()
    for content, mode, words in (
        ("", 0o600, "holds no"),
        ("\0\xff", 0o600, "holds no"),
        ((directory / "buffer.key_secret").read_text(), 0o600, "does not belong to sandbox.key"),
        (text, 0o640, "can be read by others; chmod 600"),
    ):
        secret.write_text(content)
        secret.chmod(mode)
        with pytest.raises(UsageError, match=words):
            keys.load(directory, "sandbox")
    secret.unlink()
    with pytest.raises(UsageError, match=r"sandbox.key_secret: cannot be read"):
        keys.load(directory, "sandbox")
