"""gyre-sandbox as a whole, against a scripted buffer and a scripted engine behind real sockets."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.cli import Setup
from gyre.config import Config, Model, Net, Resolved, Sandbox
from gyre.errors import DeadlineExceeded, UsageError
from gyre.net.sockets import Peer, Server, mint
from gyre.net.worker import Worker
from gyre.sandbox import shell
from gyre.sandbox.backends.process import Process
from gyre.types import Ending, Purpose, Ticket, Version
from gyre.wire.messages import (
    Ack,
    GradingStarted,
    LeaseRef,
    LeasesRenewed,
    LeaseTickets,
    Message,
    Refuse,
    RenewLeases,
    RolloutEnded,
    Tickets,
    ToBuffer,
)

HARNESS = """
import json, os, socket, sys, time
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["GYRE_MODEL_SOCKET"])
body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
s.sendall(b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: m\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
assert b"200" in s.recv(100)
if open(os.environ["GYRE_INSTRUCTION"]).read().strip() == "hang":
    time.sleep(600)
"""


def make_task(path: Path, instruction: str) -> str:
    (path / "tests").mkdir(parents=True)
    (path / "task.toml").write_text("")
    (path / "instruction.md").write_text(instruction)
    (path / "tests" / "test.sh").write_text('#!/bin/sh\necho 1 > "$GYRE_LOGS/reward.txt"\n')
    return str(path)


class FakeBuffer:
    """Hands out tickets, ignores the first report of each outcome, then acknowledges or refuses it."""

    def __init__(self, address: str, tickets: list[Ticket], *, finish: bool = True) -> None:
        self.tickets, self.finish = tickets, finish
        self.server = Server.bind(address, ToBuffer, kind="buffer", name="buffer", run_id="run")
        self.ended: dict[str, RolloutEnded] = {}
        self.reports: Counter[str] = Counter()
        self.graded: list[str] = []
        self.renewed: Counter[LeaseRef] = Counter()
        self.asked: list[int] = []
        self.lost: list[LeaseRef] = []
        self.refuse: set[str] = set()
        self.task = asyncio.create_task(self.server.serve(self._handle))
        self.out = 0

    def _handle(self, peer: Peer, message: Message, arrays: dict[str, memoryview]) -> None:
        def reply(answer: Message) -> None:
            self.server.send(peer, msgspec.structs.replace(answer, id=mint(), cause=message.id))

        match message:
            case LeaseTickets():
                self.asked.append(message.n)
                given, self.tickets = self.tickets[: message.n], self.tickets[message.n :]
                self.out += len(given)
                if given:
                    reply(Tickets(id="", tickets=given))
                else:
                    asyncio.get_running_loop().call_later(0.05, self._nothing, reply)
            case RenewLeases():
                self.renewed.update(message.leases)
                reply(LeasesRenewed(id="", lost=self.lost))
            case GradingStarted():
                self.graded.append(message.rollout_id)
                reply(Ack(id=""))
            case RolloutEnded():
                self.reports[message.rollout_id] += 1
                self.ended[message.rollout_id] = message
                if self.reports[message.rollout_id] > 1:
                    reply(Refuse(id="", reason="no", stale=True) if message.rollout_id in self.refuse else Ack(id=""))

    def _nothing(self, reply: Callable[[Message], None]) -> None:
        done = self.finish and not self.tickets and self.out == len(self.ended) and min(self.reports.values(), default=2) > 1
        reply(Tickets(id="", tickets=[], finished=done))

    def close(self) -> None:
        self.task.cancel()
        self.server.close()


@pytest.fixture
def play(tmp_path: Path, model_dir: Path, renderer: Any, fake_engine: Any, sampled: Any) -> Any:
    """Run gyre-sandbox until it ends; `during` runs beside it."""
    harness = tmp_path / "harness"
    harness.mkdir()
    (harness / "h.py").write_text(HARNESS)
    tasks = {name: make_task(tmp_path / name, name) for name in ("quick", "hang")}

    def run(
        names: list[str], during: Any = None, *, ttl_s: float = 30.0, with_buffer: bool = True, drain_s: float = 5.0, **keys: Any
    ) -> tuple[Any, int]:
        sandbox = Sandbox(
            harness="python3 -I -S /harness/h.py",
            harness_dir=str(harness),
            backend="process",
            unsafe=True,
            slots=keys.pop("slots", 2),
            lease_ttl_s=ttl_s,
        )
        net = Net(resend_s=0.2, **keys)
        config = Config(model=Model(path=str(model_dir)), sandbox=sandbox, net=net, run=msgspec.structs.replace(Config().run, start_timeout_s=1.0))
        tickets = [Ticket(f"r{n}", 0, "g", "q", n, tasks[t], Purpose.TRAIN, Version(1, 0), n, ttl_s) for n, t in enumerate(names)]

        async def go() -> tuple[Any, int]:
            engine = fake_engine(f"ipc://{tmp_path}/e", lambda r, p: sampled([renderer.end_id]), run_id="run")
            buffer = FakeBuffer(f"ipc://{tmp_path}/b", tickets) if with_buffer else None
            setup = Setup(
                run_dir=tmp_path / "run", config=config, buffer=f"ipc://{tmp_path}/b", train="", rollouts=[engine.server.address],
                coord=None, bind=None, name="s", resolved=Resolved(config, {}),
            )  # fmt: skip
            try:
                async with Worker(None, kind="sandbox", name="s", run_id="run") as worker, asyncio.timeout(60):
                    beside = asyncio.create_task(during(buffer, worker)) if during else None
                    await shell.run(setup, worker, drain_s)
                    if beside is not None:
                        await beside
                return buffer, worker.exit_code
            finally:
                engine.close()
                if buffer is not None:
                    buffer.close()

        return asyncio.run(go())

    return run


@pytest.mark.pain(5)
def test_tickets_are_run_and_reported_until_acknowledged(play: Any) -> None:
    buffer, code = play(["quick"] * 7)
    assert code == 0
    assert {m.ending for m in buffer.ended.values()} == {Ending.FINISHED}
    assert {m.reward for m in buffer.ended.values()} == {1.0}
    assert len(buffer.ended) == 7 and min(buffer.reports.values()) >= 2
    assert sorted(buffer.graded) == sorted(buffer.ended)
    assert max(buffer.asked) == 2  # never more than there are slots


def test_a_refused_outcome_frees_its_slot(play: Any) -> None:
    async def refuse(buffer: FakeBuffer, worker: Worker) -> None:
        buffer.refuse.update(f"r{n}" for n in range(4))

    buffer, _ = play(["quick"] * 4, refuse, slots=1)
    assert len(buffer.ended) == 4


@pytest.mark.pain(3)
def test_a_lost_lease_kills_its_execution(play: Any, until: Any) -> None:
    """pains 3: leases are renewed, and what is lost makes room."""

    async def lose(buffer: FakeBuffer, worker: Worker) -> None:
        await until(lambda: buffer.renewed[LeaseRef("r0", 0)] >= 2)
        buffer.lost = [LeaseRef("r0", 0)]
        await until(lambda: "r1" in buffer.ended)
        buffer.out -= 1  # r0 will never be reported

    buffer, _ = play(["hang", "quick"], lose, ttl_s=0.6, slots=1)
    assert list(buffer.ended) == ["r1"]


@pytest.mark.pain(35)
def test_one_failure_in_eight_makes_nine_sandboxes_and_removes_nine(play: Any, until: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pains 35: the one whose lease is lost is tried again alone, and nothing of it stays."""
    made: list[str] = []
    dropped: set[str] = set()
    workspace, drop = Process.workspace, Process.drop

    async def counted(self: Process, *arguments: Any, **more: Any) -> Any:
        found = await workspace(self, *arguments, **more)
        made.append(found.path)
        return found

    async def noted(self: Process, which: Any) -> None:
        await drop(self, which)
        dropped.add(which.path)

    monkeypatch.setattr(Process, "workspace", counted)
    monkeypatch.setattr(Process, "drop", noted)

    async def fail(buffer: FakeBuffer, worker: Worker) -> None:
        await until(lambda: buffer.renewed[LeaseRef("r0", 0)] >= 2 and len(buffer.ended) == 7)
        buffer.lost = [LeaseRef("r0", 0)]
        await until(lambda: made[0] in dropped)
        buffer.out -= 1  # epoch 0 will never be reported
        again = Ticket("r0", 1, "g", "q", 0, str(tmp_path / "quick"), Purpose.TRAIN, Version(1, 0), 0, 0.6)
        buffer.tickets.append(again)
        await until(lambda: "r0" in buffer.ended)

    buffer, code = play(["hang", *["quick"] * 7], fail, ttl_s=0.6, slots=4)
    assert code == 0 and len(buffer.ended) == 8 and buffer.ended["r0"].epoch == 1
    assert len(made) == len(set(made)) == 9 and dropped == set(made)
    assert not [path for path in made if Path(path).exists()]


def test_cleaning_up_is_not_interrupted() -> None:
    """A lost lease is said again and again; then the process is told to stop."""
    cleaned = []

    async def execution() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            cleaned.append(True)

    async def run() -> None:
        task = asyncio.create_task(execution())
        for _ in range(4):
            await asyncio.sleep(0.01)
            shell._cancel(task)
        await asyncio.wait((task,))
        assert task.cancelled() and cleaned

    asyncio.run(run())


def test_descriptors_for_all_connections() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        shell._allow_descriptors(600)
        shell._allow_descriptors(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (600, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_signal_stops_in_order(play: Any, until: Any) -> None:

    async def stop(buffer: FakeBuffer, worker: Worker) -> None:
        await until(lambda: buffer.out == 2)
        await asyncio.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    buffer, code = play(["hang", "hang"], stop, drain_s=0.3)
    assert code == 143 and buffer.ended == {}


def test_no_buffer_is_a_deadline_with_a_name(play: Any) -> None:
    """pains 1."""
    with pytest.raises(DeadlineExceeded, match="waiting for gyre-buffer at ipc"):
        play([], with_buffer=False)


def test_a_buffer_that_goes_away_for_good(play: Any, until: Any) -> None:
    async def vanish(buffer: FakeBuffer, worker: Worker) -> None:
        await until(lambda: buffer.reports["r0"])
        buffer.task.cancel()

    with pytest.raises(DeadlineExceeded, match="waiting for gyre-buffer to take the outcome of r0"):
        play(["quick"], vanish, request_timeout_s=0.5)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), ["tokenizer.json", "no such file", "model.path"]),
        (lambda d: (d / "tokenizer.json").write_text("{"), ["tokenizer.json", "not a tokenizer"]),
        (lambda d: (d / "tokenizer_config.json").write_text("{}"), ["tokenizer_config.json: chat_template", "no chat template", "add one"]),
        (lambda d: (d / "tokenizer_config.json").write_text("{"), ["tokenizer_config.json", "cannot be read"]),
        (lambda d: (d / "chat_template.jinja").write_text("{% if %}"), ["chat_template", "does not parse"]),
    ],
)
def test_bad_tokenizers_get_one_line(tmp_path: Path, make_model: Any, break_it: Any, words: list[str]) -> None:
    from gyre.sandbox.gateway.template import ChatTemplate

    model = make_model(tmp_path / "m")
    break_it(model)
    with pytest.raises(UsageError) as e:
        ChatTemplate.load(model)
    assert "\n" not in str(e.value) and all(w in str(e.value) for w in words), str(e.value)
