"""Role changes of real engine processes under a gateway's requests: nothing is lost, nothing is drawn twice, nothing leaks.

The test is the coordinator and the trainer; engines and the gateway's router are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gyre.net.endpoints import endpoint
from gyre.net.sockets import Peer, Server, mint
from gyre.sandbox.gateway.route import Completion, Job, Router
from gyre.types import Sampling, Version
from gyre.weights.snapshot import Snapshot, checksum_of
from gyre.weights.transfer import PolicyServer
from gyre.wire.codec import Arrays
from gyre.wire.messages import Ack, Message, PolicyLoaded, Route, Routes, SetRole, ToCoord, ToTrain, WorkerStatus

DEADLINE_S = 120.0
PROMPT = array("i", [11, 12, 13, 14])
LINE = [20 + i % 60 for i in range(400)]
V1, V2 = Version(1, 0), Version(1, 1)


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await story

    asyncio.run(bounded())


async def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DEADLINE_S / 2
    while not condition():
        assert time.monotonic() < end, f"gave up waiting for {what}"
        await asyncio.sleep(0.01)


class Cluster:
    """Engine processes, with the test in the places of coordinator and core."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.dir = folder / "run"
        self.flags = flags
        self.coord = Server.bind(endpoint(self.dir, "coord"), ToCoord, kind="coord", name="coord", run_id="run")
        self.core = Server.bind(endpoint(self.dir, "train"), ToTrain, kind="train", name="core", run_id="run")
        self.policy = PolicyServer(self.core.send)
        self.acknowledged: list[tuple[str, str, Version]] = []  # (cell, incarnation, version)
        self.tasks = [asyncio.create_task(self.coord.serve(self._on_status)), asyncio.create_task(self.core.serve(self._on_train))]
        self.peers: dict[str, Peer] = {}
        self.status: dict[str, WorkerStatus] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.epoch = 0
        self.router: Any = None

    def _on_status(self, peer: Peer, message: Message, arrays: Arrays) -> None:
        if isinstance(message, WorkerStatus):
            self.peers[message.cell], self.status[message.cell] = peer, message
            self.coord.send(peer, Ack(id=mint(), cause=message.id))

    def _on_train(self, peer: Peer, message: Message, arrays: Arrays) -> None:
        if isinstance(message, PolicyLoaded):
            self.acknowledged.append((message.cell, peer.incarnation, message.version))
        self.policy.handle(peer, message)

    def start(self, cell: str) -> None:
        argv = [sys.executable, "-m", "gyre_commands.rollout", "--run", str(self.dir), "--name", f"{cell}-rollout", "--cell", cell, "--role", "auto"]
        argv += ["--coord", self.coord.address, "--train", self.core.address, "--bind", endpoint(self.dir, "rollout", cell), *self.flags]
        with (self.dir.parent / f"{cell}.log").open("ab") as log:
            self.processes[cell] = subprocess.Popen(argv, stdout=log, stderr=log)

    def order(self, cell: str, role: str) -> None:
        self.epoch += 1
        self.coord.send(self.peers[cell], SetRole(id=mint(), role=role, epoch=self.epoch, core=self.core.address, core_cell="core"))

    def says(self, cell: str, role: str) -> bool:
        assert self.processes[cell].poll() is None, (self.dir.parent / f"{cell}.log").read_text()[-3000:]
        status = self.status.get(cell)
        return status is not None and status.epoch >= self.epoch and status.role == role

    async def turn(self, cell: str, role: str) -> None:
        """Tell a cell's engine what its cell is, and wait until it is so."""
        self.order(cell, role)
        said = {"train": "asleep", "rollout": "serving"}[role]
        await until(lambda: self.says(cell, said), f"{cell} to be {said}")

    def routes(self, **open_: bool) -> None:
        """Cells in the order in which they will leave; the last one stays longest."""
        self.epoch += 1
        table = [Route(cell, endpoint(self.dir, "rollout", cell), rank, o) for rank, (cell, o) in enumerate(open_.items())]
        self.router.follow(Routes(id=mint(), epoch=self.epoch, engines=table))

    async def ready(self, *cells: str) -> None:
        for cell in cells:
            self.start(cell)
        await until(lambda: all(cell in self.status for cell in cells), "the engines' statuses")
        for cell in cells:
            assert self.status[cell].role == "asleep" and self.status[cell].version is None
            self.order(cell, "rollout")
        await until(lambda: all(self.status[cell].role == "serving" for cell in cells), "the engines to serve")
        self.routes(**dict.fromkeys(cells, True))
        await until(lambda: all(e.serves(V1) for e in self.router.engines), "pongs")

    def generate(self, name: str, tokens: int, seed: int = 7, policy: Version = V1) -> asyncio.Task[Completion]:
        job = Job(
            name, name, PROMPT, Sampling(max_tokens=tokens), seed, policy, time.monotonic() + DEADLINE_S, asyncio.get_running_loop().create_future()
        )
        return asyncio.create_task(self.router.generate(job))

    def in_flight(self, cell: str) -> int:
        return sum(e.in_flight for e in self.router.engines if e.name == cell)


@pytest.fixture(params=["scripted", "torch"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@contextlib.asynccontextmanager
async def cluster(folder: Path, kind: str, delay_s: float = 0.002) -> AsyncIterator[Cluster]:
    flags = ["--set", f"rollout.engine={kind}", "--set", "rollout.threads=1", "--set", "rollout.slots=128", "--set", "rollout.queue=64"]
    flags += ["--set", "net.resend_s=0.5", "--set", "rollout.context=512"]
    if kind == "torch":
        flags += ["--set", f"model.path={folder / 'model'}", "--set", "model.device=cpu"]
        snapshots = torch_snapshots(folder / "model")
    else:
        (folder / "script.jsonl").write_text(json.dumps({"token_ids": LINE, "token_delay_s": delay_s}) + "\n")
        flags += ["--set", f"rollout.script={folder / 'script.jsonl'}"]
        snapshots = {v: Snapshot(v, [], memoryview(b"weights"), checksum_of(b"weights")) for v in (V1, V2)}
    c = Cluster(folder, *flags)
    c.snapshots = snapshots  # type: ignore[attr-defined]
    c.policy.publish(snapshots[V1])
    c.router = Router.connect([], 20.0, 60.0, name="box", incarnation="1", run_id="run", resend_s=0.5)
    try:
        yield c
    finally:
        for process in c.processes.values():
            process.kill()
            process.wait(30)
        c.router.close()
        for task in c.tasks:
            task.cancel()
        await asyncio.gather(*c.tasks, return_exceptions=True)
        c.coord.close()
        c.core.close()


def torch_snapshots(directory: Path) -> dict[Version, Snapshot]:
    """A tiny model without an end-of-turn id, saved, and two versions of its weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from gyre.weights.snapshot import model_tensors, pack

    found: dict[Version, Snapshot] = {}
    for seed, version in enumerate((V1, V2)):
        torch.manual_seed(seed)
        config = Qwen3Config(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                             head_dim=8, max_position_embeddings=512, initializer_range=0.3, eos_token_id=None, bos_token_id=None)  # fmt: skip
        model = Qwen3ForCausalLM(config)
        model.save_pretrained(directory)
        found[version] = pack(version, model_tensors(model))
    return found


@pytest.mark.pain(31)
def test_a_long_request_moves_and_is_what_it_would_have_been(tmp_path: Path, kind: str) -> None:
    """There, and back again: three engines' parts make the tokens of one undisturbed request, each stamped with its version."""

    async def story() -> None:
        async with cluster(tmp_path, kind, delay_s=0.005) as c:
            await c.ready("a", "b")
            c.routes(a=True, b=True)
            whole = await c.generate("whole", 300)
            assert whole.cells == ["b"], "of two alike it goes to the one that stays longer"
            c.routes(b=True, a=True)
            moving = c.generate("moving", 300)
            await until(lambda: c.in_flight("a"), "the request")
            await asyncio.sleep(0.2)
            c.routes(a=False, b=True)
            await c.turn("a", "train")
            assert c.status["a"].version is None
            await until(lambda: c.in_flight("b"), "the request at b")
            await asyncio.sleep(0.1)
            await c.turn("a", "rollout")
            c.routes(a=True, b=False)
            await c.turn("b", "train")
            done = await moving
            assert done.cells == ["a", "b"] and done.finish == whole.finish == "length"
            assert done.token_ids == whole.token_ids and set(done.versions) == {0}
            assert list(done.logprobs) == pytest.approx(list(whole.logprobs), abs=1e-4)
            assert [x for x in c.acknowledged if x[0] == "a"] != [] and c.policy.loaded()["a"] == V1

    run(story())


@pytest.mark.pain(2)
def test_200_open_streams_at_a_publication_and_a_move(tmp_path: Path) -> None:
    """Pains 2: all engines acknowledge the new policy while 200 requests are open and one engine gives its own away; all complete."""

    async def story() -> None:
        async with cluster(tmp_path, "scripted", delay_s=0.01) as c:
            await c.ready("a", "b", "c")
            c.routes(a=True, b=True, c=True)
            streams = [c.generate(f"s{i}", 200, seed=i) for i in range(200)]
            await until(lambda: min(c.in_flight(x) for x in "abc") > 20 and sum(c.in_flight(x) for x in "abc") == 200, "200 open streams")
            c.policy.publish(c.snapshots[V2])  # type: ignore[attr-defined]
            c.routes(a=False, b=True, c=True)
            c.order("a", "train")
            cells = await c.policy.wait_loaded(V2, 60)
            assert {"b", "c"} <= set(cells)
            await until(lambda: c.says("a", "asleep"), "a to sleep")
            done = await asyncio.gather(*streams)
            assert all(d.finish == "length" and list(d.token_ids) == LINE[:200] for d in done)
            assert {v for d in done for v in d.versions} == {0, 1} and all(list(d.versions) == sorted(d.versions) for d in done)

    run(story())


@pytest.mark.pain(12)
def test_a_killed_engine_is_asked_only_after_it_acknowledged(tmp_path: Path) -> None:
    """Pains 12: kill -9, its requests go on elsewhere; back again, it is asked nothing before the core heard that it serves the current policy."""

    async def story() -> None:
        async with cluster(tmp_path, "scripted", delay_s=0.01) as c:
            await c.ready("a", "b")
            c.routes(b=True, a=True)
            asked = [c.generate(f"s{i}", 150, seed=i) for i in range(8)]
            await until(lambda: c.in_flight("a") == c.in_flight("b") == 4, "requests at both")
            await asyncio.sleep(0.1)
            c.processes["a"].kill()
            c.processes["a"].wait(30)
            first_life = c.peers["a"].incarnation
            c.policy.publish(c.snapshots[V2])  # type: ignore[attr-defined]
            del c.status["a"], c.peers["a"]
            c.start("a")
            (engine,) = [e for e in c.router.engines if e.client.address == endpoint(c.dir, "rollout", "a")]
            c.routes(b=True, a=True)

            def acknowledged() -> bool:
                return any(cell == "a" and life != first_life and version == V2 for cell, life, version in c.acknowledged)

            async def watch() -> None:
                while True:
                    assert acknowledged() or not engine.serves(V1) or engine.pong.incarnation == first, "asked before it acknowledged"
                    await asyncio.sleep(0.001)

            first = engine.pong.incarnation if engine.pong else ""
            watching = asyncio.create_task(watch())
            done = await asyncio.gather(*asked)
            assert all(list(d.token_ids) == LINE[:150] for d in done) and all(d.cells[-1] == "b" for d in done)
            await until(lambda: "a" in c.status, "a")
            assert c.status["a"].role == "asleep", "it wakes when it is told to"
            await c.turn("a", "rollout")
            c.routes(b=False, a=True)
            await until(lambda: engine.serves(V2), "a's pong")
            last = await c.generate("last", 20)
            assert last.cells == ["a"] and set(last.versions) == {1} and acknowledged()
            assert not watching.done()
            watching.cancel()

    run(story())


def test_calls_wait_for_engines_that_are_asleep_by_order(tmp_path: Path) -> None:
    """No engine serves because all cells train: a call waits beyond the patience for lost engines, and is served when one is back."""

    async def story() -> None:
        async with cluster(tmp_path, "scripted") as c:
            c.router.patience_s = 0.3
            await c.ready("a")
            c.routes(a=False)
            await c.turn("a", "train")
            call = c.generate("patient", 10)
            await asyncio.sleep(1.0)
            assert not call.done()
            await c.turn("a", "rollout")
            c.routes(a=True)
            assert list((await call).token_ids) == LINE[:10]

    run(story())


def holds(pid: int | str = "self") -> tuple[int, int, int]:
    """Open files, threads, resident KiB of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    value = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith(("Threads", "VmRSS"))}
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), int(value["Threads"]), int(value["VmRSS"])


@pytest.mark.pain(31)
def test_100_role_changes_leak_nothing(tmp_path: Path, kind: str) -> None:
    """Pains 31: under requests that move each time; files, threads, memory and requests are what they were after the first few."""

    async def story() -> None:
        async with cluster(tmp_path, kind, delay_s=0.005) as c:
            await c.ready("a", "b")
            answered = 0
            before: dict[str, tuple[int, int, int]] = {}
            ours = (0, 0)
            streams: set[asyncio.Task[Completion]] = set()
            for change in range(50):  # twice: into sleep and out of it
                cell, other = ("a", "b") if change % 2 else ("b", "a")
                c.routes(**{other: True, cell: True})
                while len(streams) < 6:
                    streams.add(c.generate(f"s{change}.{len(streams)}.{answered}", 60, seed=change))
                await until(lambda cell=cell: c.in_flight(cell) > 0, "a request to move")
                c.routes(**{cell: False, other: True})
                await c.turn(cell, "train")
                await c.turn(cell, "rollout")
                ended = {s for s in streams if s.done()}
                assert all(s.result().finish == "length" for s in ended)
                answered, streams = answered + len(ended), streams - ended
                if change == 10:
                    before = {x: holds(c.processes[x].pid) for x in "ab"}
                    ours = holds()[0], len(asyncio.all_tasks()) - len(streams)
            for s in await asyncio.gather(*streams):
                assert s.finish == "length"
            await asyncio.sleep(1.5)
            assert len(asyncio.all_tasks()) <= ours[1] and holds()[0] <= ours[0] + 2
            for x in "ab":
                files, threads, kib = holds(c.processes[x].pid)
                assert files <= before[x][0] + 2 and threads <= before[x][1] + 1, (before[x], (files, threads, kib))
                assert kib <= before[x][2] * 1.1 + 4096, (before[x], kib)
            assert all(c.in_flight(x) == 0 for x in "ab") and answered >= 6
            assert all(s.gauges.get("in_flight", 0) == 0 for s in c.status.values())

    run(story())
