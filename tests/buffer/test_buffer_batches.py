"""The buffer's shell between two commits: what is taken while one is under way is heard after its own, in order, and no deadline is missed for it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.buffer import shell
from gyre.buffer.ledger import Ledger
from gyre.buffer.machine import Machine
from gyre.buffer.queries import Task, TaskSet
from gyre.buffer.shell import Shell
from gyre.config import Config
from gyre.net.sockets import Peer, mint
from gyre.net.worker import Worker
from gyre.types import Ending, GraphNode, LeafClass, TrajectoryMeta, Version
from gyre.wire import messages as w
from gyre.wire.arrays import f32, i32

EMPTY = {"token_ids": memoryview(i32()), "logprobs": memoryview(f32()), "versions": memoryview(i32())}


class Sent:
    """In the server's place: remembers what was sent to whom."""

    def __init__(self) -> None:
        self.to: dict[str, list[Any]] = {}

    def send(self, peer: Peer, message: w.Message, arrays: Any = None) -> None:
        self.to.setdefault(peer.name, []).append(message)


class Buffer:
    """A shell whose commits begin and end when it is told to."""

    def __init__(self, folder: Path, **tables: Any) -> None:
        config = msgspec.convert({"system": {"groups_per_step": 1, "rollouts_per_group": 2}, **tables}, Config)
        tasks = TaskSet(tuple(Task(f"/t/{i}", "kind") for i in range(3)), ())
        self.sent, self.ledger = Sent(), Ledger(folder / "run")
        self.machine = Machine(config, tasks, (), Shell._now(), "r")
        self.worker = Worker(None, kind="buffer", name="buffer", run_id="r")
        self.shell = Shell(config, self.machine, self.ledger, self.sent, self.worker)  # type: ignore[arg-type]
        self.shell._apply(self.shell._batch, self.machine.start(now := Shell._now()), None, now)

    def take(self, kind: str, *messages: w.Message, arrays: Any = None) -> None:
        for message in messages:
            room = self.shell._receive(Peer(kind.encode(), kind, kind, "1"), message, arrays or {})
            if inspect.iscoroutine(room):
                room.close()
        self.shell._process()

    async def committed(self) -> None:
        """Wait for the commit under way, or make one."""
        if self.shell._committing is None:
            self.shell._begin()
        if self.shell._committing is not None:
            await self.shell._committing[1]
            self.shell._end()

    async def ask(self, kind: str, message: w.Message, arrays: Any = None) -> Any:
        self.take(kind, message, arrays=arrays)
        await self.committed()
        while self.shell._assembling:
            await asyncio.wait(self.shell._assembling)
            self.shell._deliver()
        return next(m for m in reversed(self.sent.to[kind]) if m.cause == message.id)


def play(folder: Path, story: Callable[[Buffer], Awaitable[None]], **tables: Any) -> None:
    async def main() -> None:
        buffer = Buffer(folder, **tables)
        try:
            await asyncio.wait_for(story(buffer), 60)
        finally:
            await buffer.committed()
            buffer.ledger.close()

    asyncio.run(main())


def note(n: int) -> w.Note:
    return w.Note(id=mint(), event="note", fields={"n": n})


def test_who_subscribes_again_misses_nothing_of_a_commit_under_way(tmp_path: Path) -> None:
    async def story(buffer: Buffer) -> None:
        await buffer.ask("observer", w.Subscribe(id=mint(), events=True, min_interval_s=0.0))
        for n in range(5):
            buffer.take("train", note(n))
            if buffer.shell._committing is None:
                buffer.shell._begin()
            buffer.take("observer", w.Subscribe(id=mint(), events=True, min_interval_s=0.0))
            await buffer.committed()
        await buffer.committed()
        lines = [msgspec.json.decode(line) for m in buffer.sent.to["observer"] if isinstance(m, w.Events) for line in m.lines]
        assert [x["fields"]["n"] for x in lines if x["kind"] == "note"] == list(range(5))

    play(tmp_path, story)


def test_the_state_is_told_before_what_happened(tmp_path: Path) -> None:
    async def story(buffer: Buffer) -> None:
        buffer.take("observer", w.Subscribe(id=mint(), events=True, min_interval_s=0.0))
        buffer.take("train", note(0))
        await buffer.committed()
        assert [type(m) for m in buffer.sent.to["observer"]] == [w.Counters, w.Events]

    play(tmp_path, story)


def test_nothing_is_heard_before_it_is_on_disk(tmp_path: Path) -> None:
    async def story(buffer: Buffer) -> None:
        await buffer.committed()
        buffer.take("train", w.AcquireTerm(id="t", cell="core", step=0))
        buffer.shell._begin()
        buffer.take("train", w.Published(id="p", version=Version(1, 0), cells=["a"], seconds=0.0))
        assert buffer.sent.to.get("train", []) == []
        await buffer.committed()
        assert [m.cause for m in buffer.sent.to["train"]] == ["t"]
        await buffer.committed()
        assert [m.cause for m in buffer.sent.to["train"]] == ["t", "p"]

    play(tmp_path, story)


async def begin(buffer: Buffer) -> int:
    """A term and a policy."""
    term = (await buffer.ask("train", w.AcquireTerm(id=mint(), cell="core", step=0))).term
    await buffer.ask("train", w.Published(id=mint(), version=Version(term, 0), cells=["a"], seconds=0.0))
    return int(term)


def test_a_lease_lives_while_its_renewal_waits_behind_an_inbox_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(buffer: Buffer) -> None:
        await begin(buffer)
        tickets = (await buffer.ask("sandbox", w.LeaseTickets(id=mint(), n=2, wait_s=0.0))).tickets
        await asyncio.sleep(0.3)  # longer than a lease
        monkeypatch.setattr(shell, "_INBOX", 1)
        buffer.take("train", note(0))
        monkeypatch.undo()
        buffer.take("sandbox", w.RenewLeases(id=mint(), leases=[w.LeaseRef(t.rollout_id, t.epoch) for t in tickets]))
        await buffer.committed()
        assert "lease_lost" not in (tmp_path / "run" / "events.jsonl").read_text()
        for t in tickets:
            ended = w.RolloutEnded(id=mint(), rollout_id=t.rollout_id, epoch=t.epoch, ending=Ending.FINISHED, reward=1.0)
            assert isinstance(await buffer.ask("sandbox", ended, EMPTY), w.Ack)

    play(tmp_path, story, sandbox={"lease_ttl_s": 0.2})


async def train(buffer: Buffer, term: int, step: int) -> int:
    """One step from tickets to a checkpoint; its micro-steps."""
    for t in (await buffer.ask("sandbox", w.LeaseTickets(id=mint(), n=8, wait_s=0.0))).tickets:
        graph: dict[str, Any] = {
            "nodes": [GraphNode(-1, 2, None), GraphNode(0, 3, "c")],
            "trajectories": [TrajectoryMeta(0, LeafClass.MAIN, [0, 1], [1], 5, 3)],
        }
        arrays = {"token_ids": i32(range(5)), "logprobs": f32([-1.0]) * 5, "versions": i32([-1, -1, 0, 0, 0])}
        ended = w.RolloutEnded(id=mint(), rollout_id=t.rollout_id, epoch=t.epoch, ending=Ending.FINISHED, reward=float(t.index), **graph)
        await buffer.ask("sandbox", ended, {k: memoryview(a) for k, a in arrays.items()})
    who: dict[str, Any] = {"term": term, "step": step, "cell": "core", "incarnation": str(term)}
    claimed = 0
    while isinstance(m := await buffer.ask("train", w.ClaimMicroStep(id=mint(), wait_s=0.0, **who)), w.MicroStepClaimed):
        await buffer.ask("train", w.Accumulated(id=mint(), micro_step_id=m.micro_step_id, **who))
        claimed += 1
    manifest = await buffer.ask("train", w.SealStep(id=mint(), term=term, step=step, wait_s=0.0))
    assert isinstance(manifest, w.Manifest), manifest
    assert isinstance(await buffer.ask("train", w.CommitStep(id=mint(), term=term, step=step, hash=manifest.hash, metrics={})), w.Ack)
    await buffer.ask("train", w.CheckpointSaved(id=mint(), term=term, step=step, path=f"step-{step}"))
    await buffer.ask("train", w.Published(id=mint(), version=Version(term, step), cells=["a"], seconds=0.0))
    return claimed


def test_two_cores_that_go_back_in_one_batch_train_every_step(tmp_path: Path) -> None:
    async def story(buffer: Buffer) -> None:
        term = await begin(buffer)
        assert [await train(buffer, term, step) for step in (1, 2, 3, 4)] == [1, 1, 1, 1]
        buffer.take("train", w.AcquireTerm(id=mint(), cell="core", step=2), w.AcquireTerm(id="last", cell="core", step=1))
        await buffer.committed()
        term = next(m.term for m in buffer.sent.to["train"] if m.cause == "last")
        await buffer.ask("train", w.Published(id=mint(), version=Version(term, 1), cells=["a"], seconds=0.0))
        assert [await train(buffer, term, step) for step in (2, 3, 4, 5)] == [1, 1, 1, 1]

    play(
        tmp_path,
        story,
        system={"groups_per_step": 1, "rollouts_per_group": 2, "target_staleness": 0.0, "steps_per_burst": 1},
        train={"steps": 6, "keep_checkpoints": 5},
    )
