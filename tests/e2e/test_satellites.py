"""Satellites in an ongoing step, with real processes: they help, die, stop and come back; the update stays that of one cell alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from alone import check_against_alone, check_counted_once
from whole_run import DEADLINE_S, RIGHT, WRONG, Run

from gyre.net.endpoints import endpoint
from gyre.net.sockets import Peer, Server, mint
from gyre.wire.messages import Ack, Message, SetRole, ToCoord, WorkerStatus

SATELLITES = ("sat1", "sat2")
STEPS = 4

PAUSE_IN_REDUCTION = """
import pathlib, runpy, sys, time
from gyre.train import group
plain = group._reduce

def reduce(*args):
    pathlib.Path({marker!r}).touch()
    time.sleep(2.0)
    plain(*args)

group._reduce = reduce
sys.argv = ["gyre-train", *sys.argv[2:]]
runpy.run_module("gyre_commands.train", run_name="__main__", alter_sys=True)
"""
"""A satellite that can be killed in the midst of a reduction: it has met the others, and says so before it sends anything."""


@pytest.fixture
def cells(run: Run) -> Run:
    """A run whose steps last a while, every trajectory a micro-step of its own, sizes that three cells do not divide; nothing started yet."""
    text = run.config.read_text()
    for old, new in (
        ("groups_per_step = 2", "groups_per_step = 2\nsteps_per_burst = 2\ntarget_staleness = 1.5"),
        ("rollouts_per_group = 4", "rollouts_per_group = 5"),
        ("steps = 4", f"steps = {STEPS}\nmicro_step_tokens = 1\nratio_low = 1e-9\nratio_high = 1e9\nreduce_timeout_s = 20\nkeep_checkpoints = 9"),
    ):
        assert old in text
        text = text.replace(old, new)
    run.config.write_text(text)
    run.script(RIGHT, WRONG, delay_s=0.03)
    return run


def start(run: Run, **through: str) -> None:
    for command in ("buffer", "rollout"):
        run.start(command)
    run.start("train", "--cell", "core")
    for name in SATELLITES:
        satellite(run, name, through.get(name, ""))
    run.until(lambda: all(len(events(run, "joined", cell=s)) for s in SATELLITES), "the satellites to join")
    run.start("sandbox")


def satellite(run: Run, name: str, through: str = "") -> None:
    run.start("train", "--role", "satellite", "--cell", name, name=name, through=through)


def events(run: Run, kind: str, **fields: Any) -> list[dict[str, Any]]:
    path = run.dir / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    return [e["fields"] for e in lines if e["kind"] == kind and fields.items() <= e["fields"].items()]


def holds(run: Run, cell: str) -> bool:
    """Has this cell accumulated something in the open step?"""
    with sqlite3.connect(f"file:{run.dir}/ledger.db?mode=ro", uri=True) as db:
        return bool(db.execute("SELECT 1 FROM micro_steps WHERE cell = ? AND state = 'accumulated'", (cell,)).fetchall())


def finish(run: Run, *satellites: str, core: str = "train") -> list[dict[str, Any]]:
    """All end by themselves; every step counts every micro-step once; the weights are one cell's alone. Returns the steps."""
    for name in (core, *satellites, "sandbox", "buffer"):
        run.wait(name)
    run.processes["rollout"].send_signal(signal.SIGTERM)
    run.wait("rollout", 143)
    steps = check_counted_once(run, STEPS)
    print("largest difference from one cell alone:", check_against_alone(run))
    assert run.left_behind() == []
    return steps


@pytest.mark.pain(18, 30)
def test_satellites_by_hand(cells: Run) -> None:
    """No coordinator: they join at once and stay; each step is reduced over those that accumulated, and its metrics are of the whole step."""
    start(cells)
    steps = finish(cells, *SATELLITES)
    helped = {entry["cell"] for s in steps for entry in s["entries"]}
    assert helped == {"core", *SATELLITES}, helped
    reduced = {e["step"]: e for e in events(cells, "reduced")}
    for s in steps:
        cells_of = sorted({"core", *(entry["cell"] for entry in s["entries"])})
        if len(cells_of) > 1:
            assert sorted(reduced[s["step"]]["cells"]) == cells_of and reduced[s["step"]]["attempt"] == 1
        assert s["metrics"]["trainable_tokens"] == s["stats"]["trainable_tokens"] > 0 and s["metrics"]["entropy"] > 0
    assert [e["step"] for e in events(cells, "update")] == [1, 2, 3, 4]
    assert events(cells, "broadcast"), "weights go to those that stay"
    assert all(len(events(cells, "joined", cell=s)) == 1 for s in SATELLITES), "who stays needs no second pull"
    assert [p["step"] for p in events(cells, "publication")] == [0, 2, 4]


@pytest.mark.pain(18)
@pytest.mark.parametrize("when", ["in a step", "in the reduction"])
def test_kill_a_satellite(cells: Run, tmp_path: Path, when: str) -> None:
    """kill -9: exactly its micro-steps are computed again, the survivors keep theirs."""
    marker, wrapper = tmp_path / "reducing", tmp_path / "pausing.py"
    wrapper.write_text(PAUSE_IN_REDUCTION.format(marker=str(marker)))
    start(cells, **({"sat1": str(wrapper)} if when == "in the reduction" else {}))
    cells.until(marker.exists if when == "in the reduction" else lambda: holds(cells, "sat1"), "the moment to kill")
    victim = cells.processes.pop("sat1")
    victim.kill()
    victim.wait(30)
    steps = finish(cells, "sat2")
    (voided,) = events(cells, "voided")
    assert voided["cell"] == "sat1" and voided["micro_steps"], voided
    if when == "in the reduction":
        assert voided["reason"].startswith("lost in the reduction")
        assert max(e["attempt"] for e in events(cells, "reduced")) > 1 or all(len(s["entries"]) == 1 for s in steps)


@pytest.mark.pain(18)
def test_a_zombie_comes_back(cells: Run) -> None:
    """Stopped, presumed dead, woken: what it held is refused, it zeroes and joins again as a new incarnation."""
    start(cells)
    cells.until(lambda: holds(cells, "sat1"), "a satellite with gradients")
    zombie = cells.processes["sat1"]
    os.kill(zombie.pid, signal.SIGSTOP)
    cells.until(lambda: bool(events(cells, "voided", cell="sat1")), "the satellite to be given up")
    os.kill(zombie.pid, signal.SIGCONT)
    steps = finish(cells, *SATELLITES)
    (voided,) = events(cells, "voided")
    parts = [entry["incarnation"] for s in steps for entry in s["entries"] if entry["cell"] == "sat1"]
    assert voided["incarnation"] not in parts, "nothing of the zombie counts"
    assert "joining again" in cells.log("sat1")


def test_kill_the_core(cells: Run) -> None:
    """Restarted with --resume it takes a new term; the satellites live through it, zero and join again; the run completes."""
    start(cells)
    cells.until(lambda: bool(events(cells, "step", step=3)), "a step after the checkpoint of step 2")
    core = cells.processes["train"]
    core.kill()
    core.wait(30)
    cells.start("train", "--cell", "core", "--resume")
    finish(cells, *SATELLITES)
    assert [e["term"] for e in events(cells, "term")] == [1, 2]
    assert all(len(events(cells, "joined", cell=s)) >= 2 for s in SATELLITES)


class TinyCoordinator:
    """Tells every trainer what it is to be, again and again, and keeps what each said last. In a thread of its own."""

    def __init__(self, run: Run) -> None:
        self.address = endpoint(run.dir, "coord")
        self.heard: dict[str, WorkerStatus] = {}
        self.orders: dict[str, tuple[str, int]] = {}  # cell: (role, epoch)
        self.core = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(run.dir.name)))
        self._thread.start()

    def tell(self, epoch: int, core: str, **roles: str) -> None:
        self.core = core
        self.orders |= {cell: (role, epoch) for cell, role in roles.items()}

    def says(self, cell: str, role: str) -> bool:
        said = self.heard.get(cell)
        return said is not None and said.role == role and said.epoch == self.orders[cell][1]

    async def _main(self, run_id: str) -> None:
        server = Server.bind(self.address, ToCoord, kind="coord", name="coord", run_id=run_id)

        def handle(peer: Peer, message: Message, _: Any) -> None:
            if isinstance(message, WorkerStatus):
                self.heard[message.cell] = message
                server.send(peer, Ack(id=mint(), cause=message.id))
                core = self.heard.get(self.core)
                if message.cell in self.orders and core is not None:
                    role, epoch = self.orders[message.cell]
                    server.send(peer, SetRole(id=mint(), role=role, epoch=epoch, core=core.address, core_cell=self.core))

        serving = asyncio.create_task(server.serve(handle))
        while not self._stop.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        serving.cancel()
        server.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)


def test_a_cell_turns_and_is_promoted(cells: Run) -> None:
    """auto: idle until told; the core told to roll out keeps its optimizer and goes on where it was; killed, another cell takes over from the last
    checkpoint under a new term, and an old core that wakes later ends with a clear error."""
    coord = TinyCoordinator(cells)
    try:
        for command in ("buffer", "rollout"):
            cells.start(command, *(("--train", endpoint(cells.dir, "train", "a")) if command == "rollout" else ()))
        for name in ("a", "b"):
            cells.start("train", "--role", "auto", "--cell", name, "--coord", coord.address, name=name)
        cells.until(lambda: {"a", "b"} <= coord.heard.keys() and coord.heard["b"].role == "idle", "two idle trainers")
        coord.tell(1, "a", a="rollout", b="rollout")
        cells.until(lambda: bool(events(cells, "publication", step=0)), "the core to publish, though it rolls out")
        cells.until(lambda: coord.says("a", "idle"), "the core to be idle")
        cells.start("sandbox")
        coord.tell(2, "a", a="train", b="train")
        cells.until(lambda: coord.says("a", "training") and coord.says("b", "training"), "both to train")
        cells.until(lambda: holds(cells, "b"), "the satellite to have a part")
        coord.tell(3, "a", b="rollout")
        cells.until(lambda: coord.says("b", "idle"), "the satellite to leave")
        assert events(cells, "left", cell="b")
        coord.tell(4, "a", b="train")
        cells.until(lambda: bool(events(cells, "checkpoint", step=2)), "a checkpoint")
        os.kill(cells.processes["a"].pid, signal.SIGSTOP)
        coord.orders.pop("a")  # it will hear of the new core from the buffer alone
        coord.tell(5, "b", b="train")
        cells.until(lambda: len(events(cells, "term")) == 2, "the promotion")
        zombie, engine = cells.processes.pop("a"), cells.processes["rollout"]
        engine.kill()
        engine.wait(30)
        cells.start("rollout", "--train", endpoint(cells.dir, "train", "b"))
        os.kill(zombie.pid, signal.SIGCONT)
        assert zombie.wait(DEADLINE_S) == 1
        assert cells.log("a").splitlines()[-1].startswith("error: "), cells.log("a")[-500:]
        steps = finish(cells, core="b")
        assert [e["cell"] for e in events(cells, "term")] == ["a", "b"] and {s["term"] for s in steps} == {1, 2}
    finally:
        coord.close()
