"""Request, reply and push over real sockets: restarts, late joiners, refusals, deadlines."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from gyre.errors import DeadlineExceeded, Refused, UsageError
from gyre.net import sockets
from gyre.net.endpoints import endpoint
from gyre.net.sockets import Client, Peer, Server, mint
from gyre.types import Sampling, Version
from gyre.wire import messages as w
from gyre.wire.arrays import f32, i32
from gyre.wire.codec import Arrays

DEADLINE_S = 30.0


def serve(address: str, run_id: str = "r") -> tuple[Server, asyncio.Task[None]]:
    """An engine that echoes its prompt."""
    server = Server.bind(address, w.ToRollout, kind="rollout", name="cell", run_id=run_id)

    def handle(peer: Peer, message: w.Message, arrays: Arrays) -> None:
        if isinstance(message, w.Generate):
            ids = arrays["prompt_ids"]
            reply = w.Generated(id=mint(), cause=message.id, request_id=message.request_id, finish_reason="stop", spans=[], cell=peer.name)
            server.send(peer, reply, {"token_ids": ids, "logprobs": f32([-1.0] * len(ids))})

    return server, asyncio.create_task(server.serve(handle))


def ask(n: int) -> tuple[w.Generate, dict[str, object]]:
    message = w.Generate(id=mint(), request_id=str(n), rollout_id="r", min_version=Version(0, 0), sampling=Sampling(), seed=n)
    return message, {"prompt_ids": i32([n, n + 1])}


def client(address: str, **kw: object) -> Client:
    return Client.connect(address, w.FromRollout, kind="sandbox", name="s", incarnation="1", **{"resend_s": 0.3, **kw})  # type: ignore[arg-type]


def go(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))  # type: ignore[arg-type]


def test_many_requests_at_once(tmp_path: Path) -> None:
    async def body() -> None:
        server, task = serve(f"ipc://{tmp_path}/e")
        c = client(server.address)
        answers = await asyncio.gather(*[c.request(*ask(n), deadline_s=DEADLINE_S, what="echo") for n in range(500)])  # type: ignore[arg-type]
        assert [list(a["token_ids"]) for _, a in answers] == [[n, n + 1] for n in range(500)]
        c.close()
        task.cancel()
        server.close()

    go(body)


@pytest.mark.pain(11)
def test_a_restarted_server_is_asked_again(tmp_path: Path) -> None:
    async def body() -> None:
        address = f"ipc://{tmp_path}/e"
        c = client(address)
        first = asyncio.create_task(c.request(*ask(1), deadline_s=DEADLINE_S, what="echo"))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)  # nobody listens yet
        server, task = serve(address)
        assert list((await first)[1]["token_ids"]) == [1, 2]
        welcomed = c.server
        task.cancel()
        server.close()
        second = asyncio.create_task(c.request(*ask(2), deadline_s=DEADLINE_S, what="echo"))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        server, task = serve(address)
        assert list((await second)[1]["token_ids"]) == [2, 3]
        assert c.server is not None and welcomed is not None and c.server.incarnation != welcomed.incarnation
        c.close()
        task.cancel()
        server.close()

    go(body)


@pytest.mark.pain(1)
def test_a_wait_ends_and_names_what_it_waited_for(tmp_path: Path) -> None:
    async def body() -> None:
        c = client(f"ipc://{tmp_path}/nobody")
        with pytest.raises(DeadlineExceeded, match="the echo of 1 at ipc://"):
            await c.request(*ask(1), deadline_s=0.2, what="the echo of 1")  # type: ignore[arg-type]
        with pytest.raises(DeadlineExceeded, match="an engine at ipc://"):
            await c.ready(0.1, "an engine")
        c.close()

    go(body)


def test_a_peer_that_is_starting_is_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sockets, "_QUIET_S", 0.8)
    caplog.set_level("INFO", "gyre.net.sockets")

    async def body() -> None:
        c = client(f"ipc://{tmp_path}/nobody")
        for deadline_s, said in ((0.2, 0), (1.7, 1)):
            with pytest.raises(DeadlineExceeded):
                await c.request(*ask(1), deadline_s=deadline_s, what="the echo of 1")  # type: ignore[arg-type]
            assert caplog.text.count("nobody answers yet: waiting for the echo of 1") == said
        c.close()

    go(body)


def test_what_a_push_handler_raises_reaches_whoever_asks(tmp_path: Path) -> None:
    """Nothing is received after it: whoever waits, and whoever asks later, must not wait for his deadline."""

    async def body() -> None:
        server = Server.bind(f"ipc://{tmp_path}/e", w.ToRollout, kind="rollout", name="cell", run_id="r")
        arrived: asyncio.Queue[Peer] = asyncio.Queue()
        task = asyncio.create_task(server.serve(lambda peer, message, arrays: arrived.put_nowait(peer)))

        def bug(message: w.Message, arrays: Arrays) -> None:
            raise ZeroDivisionError("a bug in a handler")

        c = client(server.address, on_push=bug)
        waiting = asyncio.create_task(c.request(*ask(1), deadline_s=DEADLINE_S, what="echo"))  # type: ignore[arg-type]
        server.send(await arrived.get(), w.EngineRefuse(id=mint(), cause="nobody", request_id="x", reason="full"))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(waiting, 5.0)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(c.request(*ask(2), deadline_s=DEADLINE_S, what="echo"), 5.0)  # type: ignore[arg-type]
        c.close()
        task.cancel()
        server.close()

    go(body)


def test_versions_and_runs_must_agree(tmp_path: Path) -> None:
    async def body() -> None:
        server, task = serve(f"ipc://{tmp_path}/e", run_id="mine")
        other = client(server.address, run_id="yours")
        with pytest.raises(Refused, match=r"belongs to run yours, this process to mine"):
            await other.ready(DEADLINE_S, "an engine")
        old = client(server.address)
        old._hello = msgspec.structs.replace(old._hello, wire_version=99)
        with pytest.raises(Refused, match=r"speaks wire version 99, this process 2"):
            await old.ready(DEADLINE_S, "an engine")
        for c in (other, old):
            c.close()
        task.cancel()
        server.close()

    go(body)


def test_garbage_does_not_stop_a_server(tmp_path: Path) -> None:
    async def body() -> None:
        server, task = serve(f"ipc://{tmp_path}/e")
        c = client(server.address)
        await c.ready(DEADLINE_S, "an engine")
        for frames in ([b""], [b"\xc1\xff"], [b"x"] * 40, [os.urandom(100)]):
            c._send(frames)
        assert list((await c.request(*ask(5), deadline_s=DEADLINE_S, what="echo"))[1]["token_ids"]) == [5, 6]  # type: ignore[arg-type]
        c.close()
        task.cancel()
        server.close()

    go(body)


def test_a_vanished_client_does_not_block_the_server(tmp_path: Path) -> None:
    async def body() -> None:
        server, task = serve(f"ipc://{tmp_path}/e")
        gone = client(server.address)
        await gone.ready(DEADLINE_S, "an engine")
        gone.send(*ask(1))  # type: ignore[arg-type]
        gone.close()
        c = client(server.address)
        assert list((await c.request(*ask(2), deadline_s=DEADLINE_S, what="echo"))[1]["token_ids"]) == [2, 3]  # type: ignore[arg-type]
        c.close()
        task.cancel()
        server.close()

    go(body)


def test_addresses_in_use_are_refused(tmp_path: Path) -> None:
    async def body() -> None:
        for address in (f"ipc://{tmp_path}/e", "tcp://127.0.0.1:0"):
            server, task = serve(address)
            with pytest.raises(UsageError, match="is in use; stop its holder"):
                Server.bind(server.address, w.ToRollout, kind="rollout", name="x", run_id="r")
            task.cancel()
            server.close()

    go(body)


@pytest.mark.pain(11)
@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.1.2.3:1", "tcp://example.com:1", "udp://127.0.0.1:1", "nonsense"]
)
def test_only_loopback_and_ipc_without_keys(address: str) -> None:
    async def body() -> None:
        with pytest.raises(UsageError):
            Server.bind(address, w.ToRollout, kind="rollout", name="x", run_id="r")

    go(body)


def test_long_run_directories_have_short_sockets(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90) / ("e" * 60)
    address = endpoint(deep, "rollout", "cell-with-a-long-name")
    assert len(address) < 108 and address == endpoint(deep, "rollout", "cell-with-a-long-name")
    assert address != endpoint(deep, "rollout", "another")


def test_a_held_address_is_free_after_kill_9(tmp_path: Path) -> None:
    code = (
        "import asyncio,sys\nfrom gyre.net.sockets import Server\nfrom gyre.wire import messages as w\n"
        "async def main():\n Server.bind(sys.argv[1], w.ToRollout, kind='rollout', name='x', run_id='r'); print('up', flush=True)\n"
        " await asyncio.sleep(60)\nasyncio.run(main())"
    )
    address = f"ipc://{tmp_path}/e"
    holder = subprocess.Popen([sys.executable, "-c", code, address], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"up\n"

    async def body() -> None:
        with pytest.raises(UsageError, match="is in use"):
            serve(address)
        holder.kill()
        holder.wait(DEADLINE_S)
        server, task = serve(address)
        task.cancel()
        server.close()

    go(body)
    holder.stdout.close()


def test_binding_tcp_leaves_the_locks_of_files_alone(tmp_path: Path) -> None:
    """SQLite's are such that closing any copy of the file's descriptor drops them; its next user would then cut the ledger's memory off under it."""
    file = tmp_path / "locked"
    ours = os.open(file, os.O_CREAT | os.O_RDWR)
    fcntl.lockf(ours, fcntl.LOCK_EX)

    async def body() -> None:
        server, task = serve("tcp://127.0.0.1:*")
        other = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        tried = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", other, str(file)], capture_output=True, text=True, check=False)
        assert "BlockingIOError" in tried.stderr, tried
        task.cancel()
        server.close()

    go(body)
    os.close(ours)
