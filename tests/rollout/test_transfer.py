"""From the core to the engines over real sockets: late watchers, slow readers, lost and restarted trainers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gyre.errors import DeadlineExceeded
from gyre.net.sockets import Client, Peer, Server, mint
from gyre.types import TensorSpec, Version
from gyre.weights import transfer
from gyre.weights.snapshot import Snapshot, checksum_of
from gyre.weights.transfer import Connect, PolicyClient, PolicyServer
from gyre.wire.codec import Arrays
from gyre.wire.messages import Chunk, FromTrain, Message, PolicyAvailable, PolicyLoaded, PullChunk, Refuse, SnapshotGone, ToTrain, WatchPolicy

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)
_names = itertools.count()


def snapshot(version: Version, nbytes: int = 10_000) -> Snapshot:
    data = bytes([version.term * 16 + version.step]) * nbytes
    return Snapshot(version, [TensorSpec("w", "U8", [nbytes], 0, nbytes)], memoryview(data), checksum_of(data))


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20))


@contextlib.asynccontextmanager
async def trainer(address: str, **options: Any) -> AsyncIterator[PolicyServer]:
    """A process that lends weights, as far as its socket is concerned."""
    server = Server.bind(address, ToTrain, kind="train", name="core", run_id="run")
    policy = PolicyServer(server.send, **options)

    def handle(peer: Peer, message: Message, arrays: Arrays) -> None:
        assert policy.handle(peer, message)

    task = asyncio.create_task(server.serve(handle))
    try:
        yield policy
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()


def core_at(address: str, cell: str = "cell", incarnation: str = "1", resend_s: float = 5.0) -> Connect:
    return lambda push: Client.connect(
        address, FromTrain, kind="rollout", name=cell, incarnation=incarnation, run_id="run", resend_s=resend_s, on_push=push
    )  # fmt: skip


class Engine:
    """An engine that notes what it is given; `gate` holds it up."""

    def __init__(self, address: str, cell: str = "cell", incarnation: str = "1", **options: Any) -> None:
        self.loaded: list[Version] = []
        self.gate = asyncio.Event()
        self.gate.set()
        options = {"chunk_bytes": 1000, "request_timeout_s": 2.0, "watch_every_s": 0.1, **options}
        self.client = PolicyClient(core_at(address, cell, incarnation, resend_s=0.1), self._load, cell=cell, **options)
        self.task = asyncio.create_task(self.client.run(20.0))

    async def _load(self, version: Version, tensors: list[TensorSpec], data: memoryview) -> None:
        await self.gate.wait()
        assert set(data) == {version.term * 16 + version.step} and len(data) == tensors[0].nbytes
        self.loaded.append(version)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/t{next(_names)}"


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what it waits for has no event
        await asyncio.sleep(0.005)


@pytest.mark.pain(11)
def test_a_late_watcher_learns_the_version_at_once(address: str) -> None:
    async def story() -> None:
        async with trainer(address) as policy:
            policy.publish(snapshot(V1))
            policy.publish(snapshot(V2))
            engine = Engine(address)
            assert await policy.wait_loaded(V2, 30) == ["cell"]
            assert engine.loaded == [V2] and policy.loaded() == {"cell": V2}
            await engine.close()

    run(story())


@pytest.mark.pain(11)
def test_publications_reach_all_engines_whoever_starts_first(address: str) -> None:
    async def story() -> None:
        engines = [Engine(address, cell=f"cell{i}") for i in range(3)]  # before the trainer
        async with trainer(address) as policy:
            await until(lambda: len(policy.loaded()) == 3)
            for version in (V1, V2, V3):
                policy.publish(snapshot(version))
                assert await policy.wait_loaded(version, 30) == ["cell0", "cell1", "cell2"]
            assert [e.loaded for e in engines] == [[V1, V2, V3]] * 3
            for e in engines:
                await e.close()

    run(story())


def test_waiting_is_bounded_and_says_for_whom(address: str) -> None:
    async def story() -> None:
        async with trainer(address) as policy:
            policy.publish(snapshot(V1))
            with pytest.raises(DeadlineExceeded, match=r"an engine to acknowledge version 1\.1 \(engines: none watches\)"):
                await policy.wait_loaded(V1, 0.1)
            slow, fast = Engine(address, cell="slow"), Engine(address, cell="fast")
            slow.gate.clear()
            await until(lambda: policy.loaded() == {"slow": None, "fast": V1})
            assert await policy.wait_loaded(V1, 30, grace_s=0.2) == ["fast"]  # one slow engine does not hold the others
            slow.gate.set()
            assert await policy.wait_loaded(V1, 30) == ["fast", "slow"]
            await slow.close()
            await fast.close()

    run(story())


@pytest.mark.pain(12)
def test_a_new_life_of_an_engine_has_acknowledged_nothing(address: str) -> None:
    """Pains 12: what the engine had loaded before it was killed does not count."""

    async def story() -> None:
        async with trainer(address) as policy:
            policy.publish(snapshot(V1))
            first = Engine(address, incarnation="1")
            await policy.wait_loaded(V1, 30)
            await first.close()
            second = Engine(address, incarnation="2")
            second.gate.clear()
            await until(lambda: policy.loaded() == {"cell": None})
            second.gate.set()
            assert await policy.wait_loaded(V1, 30) == ["cell"] and second.loaded == [V1]
            await second.close()

    run(story())


def test_a_restarted_trainer_is_followed_into_its_new_term(address: str) -> None:
    async def story() -> None:
        async with trainer(address) as policy:
            policy.publish(snapshot(V3))
            engine = Engine(address)
            await policy.wait_loaded(V3, 30)
        async with trainer(address) as policy:  # back to an older step, under a new term
            await until(lambda: policy.loaded() == {"cell": V3})
            policy.publish(snapshot(Version(2, 1)))
            assert await policy.wait_loaded(Version(2, 1), 30) == ["cell"]
        assert engine.loaded == [V3, Version(2, 1)]
        await engine.close()

    run(story())


def test_a_trainer_lost_during_a_pull(address: str) -> None:
    async def story() -> None:
        async with trainer(address) as policy:
            engine = Engine(address, chunk_bytes=10)  # a thousand requests
            policy.publish(snapshot(V1))
            await until(lambda: policy.loaded() == {"cell": None})
        async with trainer(address) as policy:
            policy.publish(snapshot(Version(2, 0)))
            assert await policy.wait_loaded(Version(2, 0), 30) == ["cell"]
        assert engine.loaded[-1] == Version(2, 0)
        await engine.close()

    run(story())


def test_damaged_bytes_are_never_loaded(address: str) -> None:
    async def story() -> None:
        good = snapshot(V1)
        async with trainer(address) as policy:
            policy.publish(Snapshot(V1, good.tensors, good.data, "0" * 32))
            engine = Engine(address)
            with pytest.raises(DeadlineExceeded):
                await policy.wait_loaded(V1, 0.5)
            policy.publish(snapshot(V2))
            await policy.wait_loaded(V2, 30)
            assert engine.loaded == [V2]
            await engine.close()

    run(story())


def test_no_trainer_is_a_deadline_that_names_it(address: str) -> None:
    async def story() -> None:
        client = PolicyClient(core_at(address), Engine(address)._load, cell="c")
        with pytest.raises(DeadlineExceeded, match="waiting for gyre-train at ipc://"):
            await client.run(0.2)

    run(story())


def test_what_loading_raises_ends_the_client(address: str) -> None:
    async def story() -> None:
        async def load(version: Version, tensors: list[TensorSpec], data: memoryview) -> None:
            raise RuntimeError("does not fit")

        async with trainer(address) as policy:
            policy.publish(snapshot(V1))
            with pytest.raises(RuntimeError, match="does not fit"):
                await PolicyClient(core_at(address), load, cell="c").run(20)

    run(story())


@pytest.mark.pain(7)
def test_a_slow_reader_finishes_or_is_told(address: str) -> None:
    """Pains 7, message by message: the lease outlives one publication, not two, and never gives torn bytes."""

    async def story() -> None:
        async with trainer(address) as policy:
            policy.publish(snapshot(V1))
            pushed: list[Message] = []
            client = Client.connect(
                address, FromTrain, kind="rollout", name="slow", incarnation="1", run_id="run", on_push=lambda m, _: pushed.append(m)
            )

            async def pull(version: Version, offset: int, nbytes: int = 5000) -> tuple[Message, Arrays]:
                request = PullChunk(id=mint(), version=version, offset=offset, nbytes=nbytes)
                return await client.request(request, deadline_s=20, what="a chunk")

            await client.ready(20, "the trainer")
            client.send(WatchPolicy(id=mint(), cell="slow"))
            await until(lambda: len(pushed) == 1)
            reply, arrays = await pull(V1, 0)
            assert isinstance(reply, Chunk) and bytes(arrays["data"]) == bytes([17]) * 5000
            policy.publish(snapshot(V2))
            reply, arrays = await pull(V1, 5000)
            assert isinstance(reply, Chunk) and bytes(arrays["data"]) == bytes([17]) * 5000
            policy.publish(snapshot(V3))
            reply, _ = await pull(V1, 5000)
            assert isinstance(reply, SnapshotGone) and reply.latest == V3
            reply, _ = await pull(V3, 0, 10_001)
            assert isinstance(reply, Refuse) and not reply.stale
            await until(lambda: len(pushed) == 3)
            assert [m.version for m in pushed if isinstance(m, PolicyAvailable)] == [V1, V2, V3]
            client.send(PolicyLoaded(id=mint(), version=V3, cell="slow", seconds=0.1))
            assert await policy.wait_loaded(V3, 30) == ["slow"]
            client.close()

    run(story())


def test_a_silent_engine_is_no_longer_waited_for() -> None:
    now = [0.0]
    sent: list[Message] = []
    policy = PolicyServer(lambda peer, message, arrays: sent.append(message), clock=lambda: now[0])
    peers = {name: Peer(name.encode(), "rollout", name, "1") for name in ("a", "b")}
    policy.publish(snapshot(V1))
    for name, peer in peers.items():
        policy.handle(peer, WatchPolicy(id=name, cell=name))
    assert [m.cause for m in sent] == ["a", "b"] and policy.loaded() == {"a": None, "b": None}
    now[0] = transfer.WATCHER_TTL_S - 1
    policy.handle(peers["a"], PolicyLoaded(id="x", version=V1, cell="a", seconds=0.5))
    now[0] = transfer.WATCHER_TTL_S + 1
    assert policy.loaded() == {"a": V1}
    run(_loaded(policy))


async def _loaded(policy: PolicyServer) -> None:
    assert await policy.wait_loaded(V1, 1) == ["a"]
