"""The coordinator with processes that are none of gyre: what it does when they do not answer."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gyre import config as configuration
from gyre.cli import Setup
from gyre.coord.explain import explain
from gyre.coord.launch import Plan
from gyre.coord.machine import End
from gyre.coord.shell import Coordinator
from gyre.errors import UsageError
from gyre.events import decode
from gyre.net.endpoints import endpoint
from gyre.net.sockets import Server
from gyre.wire.messages import ToCoord

# Says that it is there and what it hears, but for the first Stop, as if that had been lost; ends at the second.
WORKER = """
import asyncio, sys
from pathlib import Path
from gyre.net.worker import Worker
from gyre.wire.messages import Stop

class Deaf(Worker):
    lost = 0
    def on_push(self, message, arrays):
        if isinstance(message, Stop) and not self.lost:
            self.lost = 1
        else:
            super().on_push(message, arrays)

async def main():
    async with Deaf(sys.argv[1], kind="sandbox", name="box", run_id=sys.argv[2]) as worker:
        await worker.stop.wait()
        return worker.exit_code

sys.exit(asyncio.run(main()))
"""


def setup_of(run_dir: Path, *sets: str) -> Setup:
    run_dir.mkdir()
    resolved = configuration.load(None, sets)
    return Setup(
        run_dir=run_dir, config=resolved.config, resolved=resolved, buffer="", train="", rollouts=[], coord=None, bind=None, name=""
    )  # fmt: skip


def plan(name: str, kind: str, code: str, *arguments: str, address: str = "") -> Plan:
    return Plan(name, kind, [sys.executable, "-c", code, *arguments], {}, address)


def see_through(setup: Setup, *plans: Plan) -> End:
    coordinator = Coordinator(setup, list(plans), endpoint(setup.run_dir, "coord"))
    end: Any = asyncio.run(asyncio.wait_for(coordinator.run(), 90.0))
    assert all(child.task.done() for child in coordinator.children.values())
    return end


def test_a_buffer_that_never_answers_ends_the_run_in_order(tmp_path: Path) -> None:
    setup = setup_of(tmp_path / "run", "run.start_timeout_s=1.0")
    buffer = plan("buffer", "buffer", "import time; time.sleep(60)", address=endpoint(setup.run_dir, "buffer"))
    end = see_through(setup, buffer)
    assert (end.code, end.culprit) == (1, "buffer") and "gave up after" in end.reason


def test_a_lost_stop_is_said_again(tmp_path: Path) -> None:
    """The sandbox goes first and does not hear it; were it not said again, it would be terminated half a minute later."""
    setup = setup_of(tmp_path / "run")
    box = plan("box", "sandbox", WORKER, endpoint(setup.run_dir, "coord"), setup.run_id)
    failing = plan("core", "train", "import time; time.sleep(3); raise SystemExit(1)")
    buffer = plan("buffer", "buffer", "import time; time.sleep(60)", address=endpoint(setup.run_dir, "buffer"))

    assert see_through(setup, buffer, failing, box) == End(1, "core ended with exit code 1", "core")


def test_a_python_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    setup = setup_of(tmp_path / "run")
    box = Plan("box", "sandbox", ["/no/python"], {}, "")
    buffer = plan("buffer", "buffer", "import time; time.sleep(60)", address=endpoint(setup.run_dir, "buffer"))
    end, told = see_through(setup, buffer, box), io.StringIO()
    explain(end, setup.run_dir / "logs", told)
    assert end.code == 2 and told.getvalue() == "error: box: --cells: /no/python cannot be run; mend python= of that line\n"


def test_a_run_that_another_coordinator_has_keeps_its_configuration(tmp_path: Path) -> None:
    setup = setup_of(tmp_path / "run", "train.steps=7")
    (setup.run_dir / "run.toml").write_text("[train]\nsteps = 3\n")

    async def run() -> None:
        bind = endpoint(setup.run_dir, "coord")
        other = Server.bind(bind, ToCoord, kind="coord", name="coord", run_id=setup.run_id)
        try:
            with pytest.raises(UsageError, match="is in use"):
                await Coordinator(setup, [], bind).run()
        finally:
            other.close()

    asyncio.run(run())
    assert (setup.run_dir / "run.toml").read_text() == "[train]\nsteps = 3\n"


# Works for a moment, then hangs with its loop blocked.
HUNG = """
import asyncio, sys, time
from gyre.net.worker import Worker

async def main():
    async with Worker(sys.argv[1], kind="sandbox", name="box", run_id=sys.argv[2]) as worker:
        worker.status("working", "soon to hang")
        await asyncio.sleep(2.5)
        def waiting_for_godot():
            time.sleep(60)
        waiting_for_godot()

asyncio.run(main())
"""


# Says that it works while a thread of it waits; ends when that was noticed.
STUCK = """
import asyncio, pathlib, sys, time
from gyre.net.worker import Worker

def waiting_for_godot():
    until = time.monotonic() + 70
    while '"stall"' not in pathlib.Path(sys.argv[3]).read_text() and time.monotonic() < until:
        time.sleep(0.2)

async def main():
    async with Worker(sys.argv[1], kind="sandbox", name="box", run_id=sys.argv[2]) as worker:
        worker.status("working", "waits in a thread")
        await asyncio.to_thread(waiting_for_godot)

asyncio.run(main())
"""


@pytest.mark.pain(4)
def test_a_stall_is_one_event_that_explains_itself(tmp_path: Path) -> None:
    """Who waits for whom, the counters and all stacks are in one event of the run's log, and gyre-top shows it."""
    task = tmp_path / "tasks" / "one" / "tests"
    task.mkdir(parents=True)
    (task / "test.sh").write_text("#!/bin/sh\n")
    (task.parent / "task.toml").write_text('version = "1.0"\n')
    (task.parent / "instruction.md").write_text("Do.\n")
    sets = ["run.stall_s=4", "run.start_timeout_s=60", f"tasks.train={tmp_path}/tasks"]
    setup = setup_of(tmp_path / "run", *sets)
    coord = endpoint(setup.run_dir, "coord")
    flags = ["--run", str(setup.run_dir), "--coord", coord, "--name", "buffer", *(word for s in sets for word in ("--set", s))]
    buffer = Plan("buffer", "buffer", [sys.executable, "-m", "gyre_commands.buffer", *flags], {}, endpoint(setup.run_dir, "buffer"))
    (setup.run_dir / "events.jsonl").touch()
    box = plan("box", "sandbox", STUCK, coord, setup.run_id, str(setup.run_dir / "events.jsonl"))

    end = see_through(setup, buffer, box)

    assert end == End(1, "box ended before the run's last step", "box")
    events = [decode(line) for line in (setup.run_dir / "events.jsonl").read_text().splitlines()]
    (stall,) = (e for e in events if e.kind == "stall")
    assert stall.proc.startswith("coord/") and 4 < stall.fields["idle_s"] < 60
    assert stall.fields["counts"]["queued"] == 0 and stall.fields["groups_open"] == 0
    assert stall.fields["processes"]["box"] == "working  waits in a thread"
    assert "in waiting_for_godot" in stall.fields["stacks"]["box"] and "in Shell._pump" in stall.fields["stacks"]["buffer"]
    argv = [sys.executable, "-m", "gyre_commands.top", "--stall", str(setup.run_dir)]
    shown = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "waiting_for_godot" in shown and "waits in a thread" in shown and "nothing progressed for" in shown, shown


def test_a_process_that_hangs_is_killed_and_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    setup = setup_of(tmp_path / "run", "run.stall_s=6", "net.engine_timeout_s=1.5")
    box = plan("box", "sandbox", HUNG, endpoint(setup.run_dir, "coord"), setup.run_id)
    failing = plan("core", "train", "import time; time.sleep(15); raise SystemExit(1)")
    buffer = plan("buffer", "buffer", "import time; time.sleep(60)", address=endpoint(setup.run_dir, "buffer"))
    assert see_through(setup, buffer, failing, box).culprit == "core"
    assert "box is silent for" in caplog.text and "box is started again" in caplog.text


def test_what_dies_after_it_worked_is_started_again(tmp_path: Path) -> None:
    """A sandbox that worked and dies is back within a second or two; one that never worked ends the run (pains 33)."""
    mortal = HUNG.replace("waiting_for_godot()\n\nasyncio", "raise SystemExit(1)\n\nasyncio")
    setup = setup_of(tmp_path / "run")
    box = plan("box", "sandbox", f"open('{tmp_path}/lives', 'a').write('x')\n" + mortal, endpoint(setup.run_dir, "coord"), setup.run_id)
    failing = plan("core", "train", "import time; time.sleep(12); raise SystemExit(1)")
    buffer = plan("buffer", "buffer", "import time; time.sleep(60)", address=endpoint(setup.run_dir, "buffer"))
    assert see_through(setup, buffer, failing, box) == End(1, "core ended with exit code 1", "core")
    assert len((tmp_path / "lives").read_text()) >= 2
