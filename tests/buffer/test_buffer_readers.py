"""What those see who look at a run: late, or across a restart of its core."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from gyre import config as configuration
from gyre.buffer import shell
from gyre.buffer.ledger import Ledger
from gyre.cli import Setup
from gyre.events import Event, EventWriter, encode
from gyre.net.endpoints import endpoint
from gyre.net.sockets import Client, mint
from gyre.net.worker import Worker
from gyre.report import dump
from gyre.report.read import RunReader, Selection
from gyre.types import Version
from gyre.wire import messages as w

DEADLINE_S = 30.0


def setup_of(folder: Path) -> Setup:
    task = folder / "tasks" / "one"
    (task / "tests").mkdir(parents=True)
    (task / "task.toml").write_text("")
    (task / "instruction.md").write_text("do it")
    (task / "tests" / "test.sh").write_text("exit 0")
    resolved = configuration.load(None, [f"tasks.train={folder}/tasks", "system.groups_per_step=2", "system.rollouts_per_group=3"])
    run_dir = folder / "run"
    return Setup(
        run_dir=run_dir, config=resolved.config, resolved=resolved, buffer=endpoint(run_dir, "buffer"), train="", rollouts=[],
        coord=None, bind=None, name="",
    )  # fmt: skip


@pytest.mark.pain(11)
def test_a_late_subscriber_is_told_the_state_first(tmp_path: Path) -> None:
    """A process that joins when everything was said long ago learns version and counts at once, by a snapshot; then it hears of changes."""

    async def story() -> None:
        s = setup_of(tmp_path)
        async with asyncio.timeout(DEADLINE_S), Worker(None, kind="buffer", name="buffer", run_id=s.run_id) as worker:
            running = asyncio.create_task(shell.run(s, worker))
            core = Client.connect(s.buffer, w.FromBuffer, kind="train", name="core", incarnation="1", resend_s=0.3)
            granted, _ = await core.request(w.AcquireTerm(id=mint(), cell="core", step=0), deadline_s=DEADLINE_S, what="a term")
            assert isinstance(granted, w.TermGranted)
            published = w.Published(id=mint(), version=Version(granted.term, 0), cells=["c"], seconds=0.0)
            await core.request(published, deadline_s=DEADLINE_S, what="an acknowledgement")

            pushed: asyncio.Queue[w.Message] = asyncio.Queue()
            late = Client.connect(
                s.buffer, w.FromBuffer, kind="observer", name="late", incarnation="1", resend_s=0.3, on_push=lambda m, _: pushed.put_nowait(m)
            )
            snapshot, _ = await late.request(w.Subscribe(id=mint(), min_interval_s=0.0), deadline_s=DEADLINE_S, what="a snapshot")
            assert isinstance(snapshot, w.Counters)
            assert (snapshot.published, snapshot.term, snapshot.admitted) == (Version(1, 0), 1, 12)
            assert sum(snapshot.states.values()) == snapshot.admitted

            box = Client.connect(s.buffer, w.FromBuffer, kind="sandbox", name="box", incarnation="1", resend_s=0.3)
            leased, _ = await box.request(w.LeaseTickets(id=mint(), n=2, wait_s=0.0), deadline_s=DEADLINE_S, what="tickets")
            assert isinstance(leased, w.Tickets) and len(leased.tickets) == 2
            change = await pushed.get()
            assert isinstance(change, w.Counters) and change.states["running"] == 2 and sum(change.states.values()) == 12
            for client in (core, box, late):
                client.close()
            worker.stop.set()
            await running

    asyncio.run(story())


def test_following_goes_on_when_a_finished_run_is_continued(tmp_path: Path) -> None:
    """What an earlier life said of its end does not end the reader of a later one; each event is told once."""
    Ledger(tmp_path).close()
    kinds = ["buffer_started", "finished", "buffer_started", "step", "finished"]

    def write(first: int, last: int) -> None:
        writer = EventWriter(tmp_path / "events.jsonl")
        lines = [Event(seq=i, t_wall=0.0, t_mono=0.0, proc="buffer", cause="", kind=kinds[i]) for i in range(first, last)]
        writer.write([(e.seq, encode(e)) for e in lines])
        writer.close()

    write(0, 4)
    following = dump.follow(RunReader(tmp_path), "events", Selection(), tokens=False)
    assert [e and e["kind"] for e in itertools.islice(following, 5)] == [*kinds[:4], None]
    write(4, 5)
    assert [e and e["kind"] for e in following] == ["finished"]


@pytest.mark.pain(41)
def test_lines_of_steps_go_on_after_a_core_came_back(world):
    """The event log keeps what was; steps that are replayed come again under a larger term, so (term, step) only grows."""
    wd = world(system__groups_per_step=1, system__rollouts_per_group=1, system__target_staleness=0.0, train__steps=5)
    wd.core()
    wd.publish(0)
    for step in (1, 2, 3):
        wd.finish_all()
        wd.train(step)
        wd.publish(step)
    wd.core(1)  # its last checkpoint is older than the last commit
    wd.publish(1)
    for step in (2, 3, 4, 5):
        wd.finish_all()
        wd.train(step, incarnation="i2")
        wd.publish(step)
    lines = [(e["term"], e["step"]) for e in wd.events("step")]
    assert lines == [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (2, 4), (2, 5)]
    assert [(s.term, s.step) for s in wd.machine.state.steps.values()] == [(1, 1), (2, 2), (2, 3), (2, 4), (2, 5)], "what remains: each once"
