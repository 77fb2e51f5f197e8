"""The real gyre-buffer process over real sockets: rates aside, everything a peer relies on; with kill -9."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.buffer import readers
from gyre.events import EventReader
from gyre.net.endpoints import endpoint
from gyre.net.sockets import Client, mint
from gyre.report.read import RunReader, Selection
from gyre.types import CallRecord, CallStatus, Ending, GraphNode, LeafClass, Ticket, TrajectoryMeta, Version
from gyre.wire import messages as w
from gyre.wire.arrays import f32, i32

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0


def make_tasks(root: Path, n: int, kind: str = "k") -> Path:
    for i in range(n):
        task = root / f"task-{i:03d}"
        (task / "tests").mkdir(parents=True)
        (task / "instruction.md").write_text("do it")
        (task / "tests" / "test.sh").write_text("exit 0")
        (task / "task.toml").write_text(f'[metadata]\nkind = "{kind}"\n')
    return root


class Buffer:
    """A gyre-buffer process."""

    def __init__(self, run_dir: Path, tasks: Path, *sets: str) -> None:
        self.run_dir, self.tasks, self.sets = run_dir, tasks, sets
        self.process: subprocess.Popen[str] | None = None

    def start(self, *flags: str) -> None:
        sets = [x for s in (f"tasks.train={self.tasks}", *self.sets) for x in ("--set", s)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "commands.buffer", "--run", str(self.run_dir), *sets, *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.end()

    def end(self) -> tuple[int, str]:
        """Wait for its end; exit code and stderr."""
        assert self.process is not None
        try:
            _, err = self.process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, err = self.process.communicate()
            raise AssertionError(f"gyre-buffer did not end: {err}") from None
        return self.process.returncode, err

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()


@asynccontextmanager
async def client(run_dir: Path, kind: str, on_push: Callable[[w.Message, Any], None] | None = None) -> AsyncIterator[Client]:
    c = Client.connect(endpoint(run_dir, "buffer"), w.FromBuffer, kind=kind, name=kind, incarnation=mint(), resend_s=0.3, on_push=on_push)
    try:
        await c.ready(DEADLINE_S, "the buffer")
        yield c
    finally:
        c.close()


async def ask(c: Client, message: w.Message, arrays: Any = None) -> Any:
    return await c.request(message, arrays, deadline_s=DEADLINE_S, what=type(message).__name__)


def outcome(ticket: Ticket, rng: random.Random) -> tuple[w.RolloutEnded, dict[str, Any]]:
    """A system node, then two turns; the whole path is the trajectory."""
    sizes = [5, 3, 2, 4]
    nodes = [GraphNode(i - 1, n, f"c{i}" if i % 2 else None) for i, n in enumerate(sizes)]
    calls = [CallRecord(f"c{i}", i - 1, i, CallStatus.COMPLETE, "stop", LeafClass.MAIN, "cell0", 0.0, 1.0, sum(sizes[:i]), sizes[i]) for i in (1, 3)]
    meta = TrajectoryMeta(0, LeafClass.MAIN, [0, 1, 2, 3], [1, 3], 14, 7)
    sampled = [i % 2 == 1 for i, n in enumerate(sizes) for _ in range(n)]
    arrays = {
        "token_ids": i32(rng.randrange(1000) for _ in range(14)),
        "logprobs": f32(-rng.random() if s else math.nan for s in sampled),
        "versions": i32(ticket.policy.step if s else -1 for s in sampled),
    }
    message = w.RolloutEnded(
        id=mint(), rollout_id=ticket.rollout_id, epoch=ticket.epoch, ending=Ending.FINISHED, reward=float(rng.random() < 0.5), harness="h",
        nodes=nodes, calls=calls, trajectories=[meta], cells=["cell0"], seconds={"model": 0.5},
    )  # fmt: skip
    return message, arrays


async def sandbox(c: Client, rng: random.Random, sent: dict[str, Any] | None = None) -> int:
    """Run tickets until the buffer says that it is finished; the number of acknowledged ends."""
    n = 0
    while True:
        answer, _ = await ask(c, w.LeaseTickets(id=mint(), n=8, wait_s=1.0))
        if answer.finished:
            return n
        for ticket in answer.tickets:
            await ask(c, w.GradingStarted(id=mint(), rollout_id=ticket.rollout_id, epoch=ticket.epoch))
            message, arrays = outcome(ticket, rng)
            reply, _ = await ask(c, message, arrays)
            if isinstance(reply, w.Ack):
                n += 1
                if sent is not None:
                    sent[ticket.rollout_id] = (message, arrays)


async def core(c: Client, mu: int = 1, last: int | None = None) -> list[w.Manifest]:
    """A core that trains every step, publishing each mu-th; or that is gone behind step `last`."""
    granted, _ = await ask(c, w.AcquireTerm(id=mint(), cell="core", step=0))
    term, manifests, incarnation = granted.term, [], mint()

    async def publish(step: int) -> None:
        answer, _ = await ask(c, w.Published(id=mint(), version=Version(term, step), cells=["cell0"], seconds=0.0))
        assert isinstance(answer, w.Ack), answer

    await publish(0)
    for step in range(1, granted.total_steps + 1):
        while True:
            m, arrays = await ask(c, w.ClaimMicroStep(id=mint(), term=term, step=step, cell="core", incarnation=incarnation, wait_s=1.0))
            if isinstance(m, w.MicroStepClaimed):
                total = sum(t.n_tokens for t in m.trajectories)
                assert {len(a) for a in arrays.values()} == {total}
                assert sum(arrays["loss_mask"]) == sum(t.n_trainable for t in m.trajectories)
                done = w.Accumulated(id=mint(), term=term, step=step, micro_step_id=m.micro_step_id, cell="core", incarnation=incarnation)
                assert isinstance((await ask(c, done))[0], w.Ack)
            elif m.drained:
                break
        manifest, _ = await ask(c, w.SealStep(id=mint(), term=term, step=step, wait_s=5.0))
        assert isinstance(manifest, w.Manifest), manifest
        assert isinstance((await ask(c, w.CommitStep(id=mint(), term=term, step=step, hash=manifest.hash, metrics={"loss": 1.0})))[0], w.Ack)
        manifests.append(manifest)
        if step % mu == 0 or step == granted.total_steps:
            await publish(step)
        if step == last:
            return manifests
    await ask(c, w.CheckpointSaved(id=mint(), term=term, step=granted.total_steps, path="checkpoints/step"))
    return manifests


SMALL = ("system.groups_per_step=2", "system.rollouts_per_group=3", "train.steps=5", "train.micro_step_tokens=40", "sandbox.lease_ttl_s=1.0")


@pytest.mark.pain(32)
def test_a_run_over_sockets_and_what_a_reader_finds(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    held = make_tasks(tmp_path / "held", 3)
    sent: dict[str, Any] = {}
    pushes: list[w.Message] = []

    async def main() -> list[w.Manifest]:
        async with client(run_dir, "observer", lambda m, _: pushes.append(m)) as o, client(run_dir, "sandbox") as s, client(run_dir, "train") as t:
            snapshot, _ = await ask(o, w.Subscribe(id=mint(), events=True, min_interval_s=0.0))
            assert isinstance(snapshot, w.Counters)
            manifests, _ = await asyncio.gather(core(t, mu=2), sandbox(s, random.Random(1), sent))
            return manifests

    sets = (*SMALL, f"tasks.heldout={held}", "tasks.eval_every=1", "system.steps_per_burst=2")
    with Buffer(run_dir, make_tasks(tmp_path / "tasks", 4), *sets) as buffer:
        buffer.start()
        manifests = asyncio.run(main())
        code, err = buffer.end()
    assert code == 0, err
    assert [m.stats.executions for m in manifests] == [6] * 5

    counters = [p for p in pushes if isinstance(p, w.Counters)]
    assert counters[-1].finished and counters[-1].states["consumed"] == 30
    assert all(sum(c.states.values()) == c.admitted for c in counters)
    lines = [line for p in pushes if isinstance(p, w.Events) for line in p.lines]
    with RunReader(run_dir) as reader:
        events = list(reader.events())
        assert [e.seq for e in events] == list(range(len(events)))
        assert lines == (run_dir / "events.jsonl").read_text().splitlines()[-len(lines) :]
        assert [e.fields["step"] for e in events if e.kind == "step"] == [1, 2, 3, 4, 5]
        assert [e.fields["version"] for e in events if e.kind == "eval"] == [0, 2, 4, 5]
        assert [e["version"] for e in reader.evals()] == [0, 2, 4, 5]
        assert reader.counts()["consumed"] == 30
        found = list(reader.trajectories())
        assert len(found) == 30
        for t in found:
            message, arrays = sent[t["rollout_id"]]
            assert t["token_ids"] == list(arrays["token_ids"])
            assert t["logprobs"] == [None if math.isnan(x) else x for x in arrays["logprobs"]]
            assert t["loss_mask"] == [0] * 5 + [1] * 3 + [0] * 2 + [1] * 4
            assert t["versions"] == [None if v < 0 else v for v in arrays["versions"]]
            assert t["calls"] == [{"call_id": "c1", "start": 5, "end": 8}, {"call_id": "c3", "start": 10, "end": 14}]
            assert t["staleness"] == t["version_at_consumption"] - t["version_at_dispatch"]
            assert (t["reward"], t["n_tokens"], t["n_trainable"]) == (message.reward, 14, 7)
            json.dumps(t, allow_nan=False)
        call = next(iter(reader.calls(Selection(rollout_id="g000000.0"))))
        assert call["prompt_ids"] == list(sent["g000000.0"][1]["token_ids"][:5])
        assert len(list(reader.rollouts(Selection(evaluation=True)))) == 30 + 12
        assert [s["stats"]["groups"] for s in reader.steps(Selection(first_step=2, last_step=3))] == [2, 2]
        assert len(list(reader.groups())) == 10 and len(list(reader.queries())) == 13


@pytest.mark.pain(24, 41)
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments_it_loses_nothing_it_acknowledged(tmp_path: Path, seed: int) -> None:
    run_dir = tmp_path / "run"
    rng = random.Random(seed)
    sent: dict[str, Any] = {}

    async def killer(buffer: Buffer, work: asyncio.Future[Any]) -> int:
        kills = 0
        while not work.done() and kills < 6:
            await asyncio.sleep(rng.uniform(0.05, 0.6))
            if not work.done():
                await asyncio.to_thread(buffer.kill)
                buffer.start("--resume")
                kills += 1
        return kills

    async def main(buffer: Buffer) -> int:
        async with client(run_dir, "sandbox") as s, client(run_dir, "train") as t:
            work = asyncio.gather(core(t), sandbox(s, random.Random(1), sent))
            kills = await killer(buffer, work)
            await asyncio.wait_for(work, DEADLINE_S)
            return kills

    with Buffer(run_dir, make_tasks(tmp_path / "tasks", 4), *SMALL, "train.steps=40", "sandbox.reissues=10") as buffer:
        buffer.start()
        kills = asyncio.run(main(buffer))
        code, err = buffer.end()
    assert code == 0, err
    assert kills, "the run was over before the first kill"
    with RunReader(run_dir) as reader:
        counts = reader.counts()
        assert counts["consumed"] + counts["discarded"] == counts["admitted"]
        consumed = [g for s in reader.steps() for g in s["groups"]]
        assert len(consumed) == len(set(consumed)) == 80
        kept = {t["rollout_id"]: t["token_ids"] for t in reader.trajectories()}
        for rollout_id, (_, arrays) in sent.items():
            assert kept[rollout_id] == list(arrays["token_ids"])
        seqs = [e.seq for e in reader.events()]
        assert seqs == list(range(len(seqs)))
        assert [e.fields["step"] for e in reader.events() if e.kind == "step"] == list(range(1, 41))


def test_refusals_name_the_remedy(tmp_path: Path) -> None:
    run_dir, tasks = tmp_path / "run", make_tasks(tmp_path / "tasks", 2)

    async def admit() -> None:
        async with client(run_dir, "train") as t:
            granted, _ = await ask(t, w.AcquireTerm(id=mint(), cell="core", step=0))
            await ask(t, w.Published(id=mint(), version=Version(granted.term, 0), cells=[], seconds=0.0))

    with Buffer(run_dir, tasks) as first, Buffer(run_dir, tasks) as second:
        first.start()
        asyncio.run(admit())
        second.start("--resume")
        code, err = second.end()
        assert code == 75 and f"pid {first.process.pid}" in err.splitlines()[-1]  # type: ignore[union-attr]
        first.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
        assert first.end()[0] == 143
        second.start()
        code, err = second.end()
        assert code == 2 and "--resume" in err.splitlines()[-1]
    with Buffer(tmp_path / "other", tmp_path / "nothing") as third:
        third.start()
        code, err = third.end()
        assert code == 2 and "tasks.train" in err.splitlines()[-1]


@pytest.mark.pain(9)
def test_infrastructure_failures_in_a_row_end_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    async def main() -> None:
        async with client(run_dir, "sandbox") as s, client(run_dir, "train") as t:
            granted, _ = await ask(t, w.AcquireTerm(id=mint(), cell="core", step=0))
            await ask(t, w.Published(id=mint(), version=Version(granted.term, 0), cells=[], seconds=0.0))
            while True:
                answer, _ = await ask(s, w.LeaseTickets(id=mint(), n=1, wait_s=1.0))
                if answer.finished:
                    return
                for k in answer.tickets:
                    m = w.RolloutEnded(id=mint(), rollout_id=k.rollout_id, epoch=k.epoch, ending=Ending.ENGINE_LOST, detail="no engine at ipc://x")
                    s.send(m, {"token_ids": i32(), "logprobs": f32(), "versions": i32()})

    with Buffer(run_dir, make_tasks(tmp_path / "tasks", 2), "run.max_infra_failures=4") as buffer:
        buffer.start()
        asyncio.run(main())
        code, err = buffer.end()
    assert code == 1
    assert "4 infrastructure failures in a row" in err.splitlines()[-1] and "no engine at ipc://x" in err.splitlines()[-1]
    assert "failure" in [e.kind for e in EventReader(run_dir / "events.jsonl").events()]


def test_an_unwritable_run_directory_is_one_line(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with Buffer(blocker / "run", make_tasks(tmp_path / "tasks", 1)) as buffer:
        buffer.start()
        code, err = buffer.end()
    assert code == 2 and len(err.strip().splitlines()) == 1 and os.fspath(blocker) in err


# --- records for observers on other hosts ---


def dumped(*argv: object) -> tuple[int, bytes, str]:
    done = subprocess.run([sys.executable, "-m", "commands.dump", *map(str, argv)], cwd=ROOT, capture_output=True, timeout=DEADLINE_S, check=False)
    return done.returncode, done.stdout, done.stderr.decode()


async def settled(run_dir: Path) -> None:
    """Wait until the leases of who has gone are over."""

    def leased() -> list[str]:
        with RunReader(run_dir) as reader:
            return [r["rollout_id"] for r in reader.rollouts(Selection()) if r["leased_at"] is not None and r["ended_at"] is None]

    until = asyncio.get_running_loop().time() + DEADLINE_S
    while held := await asyncio.to_thread(leased):
        assert asyncio.get_running_loop().time() < until, held
        await asyncio.sleep(0.2)


def test_a_dump_from_the_buffer_is_that_of_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked for, while the run goes on; and a run that ends is followed to its end."""
    run_dir, address = tmp_path / "run", endpoint(tmp_path / "run", "buffer")
    choices: list[tuple[str, ...]] = [
        *(("--kind", kind) for kind in ("trajectories", "rollouts", "groups", "calls", "graphs", "steps", "queries", "events")),
        ("--step", "2:4", "--no-tokens"), ("--group", "g000001", "--fields", "rollout_id,reward"), ("--rollout", "g000000.1", "--format", "msgpack"),
        ("--kind", "rollouts", "--count"),
    ]  # fmt: skip

    async def main() -> bytes:
        async with client(run_dir, "sandbox") as s, client(run_dir, "train") as t:
            working = asyncio.create_task(sandbox(s, random.Random(1)))
            await asyncio.wait_for(core(t, last=3), DEADLINE_S)
            working.cancel()
            await asyncio.wait([working])
            await settled(run_dir)
            for choice in choices:
                here, there = [await asyncio.to_thread(dumped, source, *choice) for source in (run_dir, address)]
                assert here[:2] == there[:2] and there[0] == 0 and there[1], (choice, there)
            code, _, err = await asyncio.to_thread(dumped, address, "--format", "atif")
            assert code == 2 and err == "error: --format atif: needs the run's tokenizer; give the run directory\n"
            argv = [sys.executable, "-m", "commands.dump", address, "--follow", "--fields", "step"]
            following = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
            assert following.stdout is not None
            first = await asyncio.wait_for(following.stdout.readline(), DEADLINE_S)
            await asyncio.wait_for(asyncio.gather(core(t), sandbox(s, random.Random(2))), DEADLINE_S)
            rest, _ = await asyncio.wait_for(following.communicate(), DEADLINE_S)
            assert following.returncode == 0
            return first + rest

    with Buffer(run_dir, make_tasks(tmp_path / "tasks", 4), *SMALL) as buffer:
        buffer.start()
        followed = asyncio.run(main())
    steps = [json.loads(line)["step"] for line in followed.splitlines()]
    assert steps == sorted(steps) and set(steps) == {1, 2, 3, 4, 5}
    monkeypatch.setattr(readers, "_PAGE_BYTES", 1)
    check_pages(run_dir)


def check_pages(run_dir: Path) -> None:
    """More readers than are kept open, each asking twice for every page: all get every record once."""
    pages = readers.Readers(run_dir, None)  # type: ignore[arg-type]
    whole = dumped(run_dir, "--kind", "rollouts")[1].splitlines()
    found: dict[bytes, list[Any]] = {str(i).encode(): [] for i in range(readers._OPEN + 2)}
    for _ in whole:
        for reader, records in found.items():
            asked = w.AskRecords(id="x", kind="rollouts", have=len(records))
            (_, first), (_, again) = (pages._answer(reader, asked) for _ in range(2))
            assert first == again and first is not None
            records += msgspec.msgpack.decode(first["data"])
    assert all(records == [json.loads(line) for line in whole] for records in found.values())
