"""Chaos: a seeded monkey kills and stops processes of the cells of a real run for two minutes; it completes, and the accounts are exact."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

import pytest
from whole_run import RIGHT, WRONG, Run, step_groups

CHAOS_S = 120.0
COMPLETE_S = 600.0
CELLS = "abc"
HOSTS = "buffer localhost\nsandbox localhost name=box slots=8\n" + "".join(f"cell localhost name={c}\n" for c in CELLS)


def monkey(run: Run, rng: random.Random, coord: subprocess.Popen[str]) -> list[str]:
    """Kill, or stop for a while, one process after the other. Returns what it did."""
    began, deeds = time.monotonic(), list[str]()
    names = [f"{c}-{part}" for c in CELLS for part in ("train", "rollout")]
    while time.monotonic() - began < CHAOS_S and coord.poll() is None:
        time.sleep(rng.uniform(2.0, 5.0))
        name, deed, pause_s = rng.choice(names), rng.choice(["kill", "stop", "stop"]), rng.uniform(0.5, 12.0)
        pid = run.pid_of(name)
        if pid is None:
            continue
        deeds.append(f"{time.monotonic() - began:.0f} s: {deed} {name}")
        try:
            os.kill(pid, signal.SIGKILL if deed == "kill" else signal.SIGSTOP)
            if deed == "stop":
                time.sleep(pause_s)
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass  # the coordinator was quicker
    return deeds


@pytest.mark.pain(14)
def test_chaos(run: Run) -> None:
    seed = int(os.environ.get("GYRE_SEED") or random.SystemRandom().randrange(10**6))
    print(f"seed {seed}: GYRE_SEED={seed} repeats the monkey's deeds")
    run.script(RIGHT, WRONG, delay_s=0.12)
    (run.folder / "hosts.txt").write_text(HOSTS)
    text = run.config.read_text().replace("[rollout]", "[rollout]\nslots = 6").replace("[net]", "[net]\nengine_timeout_s = 4")
    run.config.write_text(text)
    steps = 24
    argv = run.argv("coord", "--cells", str(run.folder / "hosts.txt"), "--steps", str(steps), "--rule", "elastic")
    coord = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        run.until(lambda: coord.poll() is not None or bool((run.dir / "ledger.db").exists() and run.dump("--kind", "steps")), "the first step")
        deeds = monkey(run, random.Random(seed), coord)
        _, err = coord.communicate(timeout=COMPLETE_S)
    finally:
        if coord.poll() is None:
            coord.send_signal(signal.SIGINT)
            coord.send_signal(signal.SIGINT)
            print(coord.communicate(timeout=60)[1][-8000:])
    print("\n".join(deeds))
    assert coord.returncode == 0, err[-8000:]
    assert len(deeds) >= 3, "a machine so quick that the run ends before it was disturbed"
    assert [s["step"] for s in run.dump("--kind", "steps")] == list(range(1, steps + 1))
    groups = step_groups(run)
    assert len(groups) == len(set(groups)) == 2 * steps, "every group in exactly one step"
    consumed = [r["rollout_id"] for r in run.dump("--kind", "rollouts") if r["state"] == "consumed"]
    assert len(consumed) == len(set(consumed)) == 8 * steps
    counts = dict(run.report()["counts"])  # type: ignore[call-overload]
    assert counts.pop("admitted") == sum(counts.values())
    run.until(lambda: run.left_behind() == [], "the end of all processes")
