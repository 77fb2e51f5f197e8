"""A coordinated run in which every process is killed once: the coordinator starts it again, and nothing is lost or had twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter

import pytest
from whole_run import DEADLINE_S, RIGHT, WRONG, Run, step_groups


@pytest.mark.pain(14)
def test_every_process_is_killed_once(run: Run) -> None:
    seed = random.SystemRandom().randrange(1000)
    print("seed", seed)
    rng = random.Random(seed)
    run.script(RIGHT, WRONG, delay_s=0.02)
    (run.folder / "hosts.txt").write_text(
        "buffer localhost\ntrain-cell localhost name=core\nrollout-cell localhost name=x\nrollout-cell localhost name=y\nsandbox localhost name=box\n"
    )
    names = ["buffer", "core", "x", "box"]
    rng.shuffle(names)
    argv = run.argv("coord", "--cells", str(run.folder / "hosts.txt"), "--steps", "12")
    coord = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def committed() -> int:
        return len(run.dump("--kind", "steps")) if (run.dir / "ledger.db").exists() else 0

    for n, name in enumerate(names):
        run.until(lambda n=n: coord.poll() is not None or committed() > n, f"step {n + 1}")
        time.sleep(rng.uniform(0, 1.0))
        pid = run.pid_of(name)
        assert pid is not None and coord.poll() is None, f"{name}: {coord.communicate()[1][-3000:]}"
        os.kill(pid, signal.SIGKILL)
        run.until(lambda name=name, pid=pid: coord.poll() is not None or run.pid_of(name) not in (None, pid), f"{name} to be started again")
    _, err = coord.communicate(timeout=DEADLINE_S)
    assert coord.returncode == 0, err[-5000:]
    assert all(f"{name} is started again" in err for name in names)
    assert [s["step"] for s in run.dump("--kind", "steps")] == list(range(1, 13))
    assert max(Counter(step_groups(run)).values()) == 1
    counts = dict(run.report()["counts"])  # type: ignore[call-overload]
    assert counts.pop("admitted") == sum(counts.values())
    run.until(lambda: run.left_behind() == [], "the end of all processes")
