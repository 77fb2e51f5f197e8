"""Whole runs in which something is killed, fails, or is stopped."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from whole_run import DEADLINE_S, RIGHT, WRONG, Run, step_groups


def committed(run: Run) -> int:
    return len(run.dump("--kind", "steps")) if (run.dir / "ledger.db").exists() else 0


def check_nothing_twice(run: Run, steps: int) -> None:
    assert [s["step"] for s in run.dump("--kind", "steps")] == list(range(1, steps + 1)), "monotonic, each step once"
    assert max(Counter(step_groups(run)).values()) == 1, "no group is consumed twice"
    consumed = [r["rollout_id"] for r in run.dump("--kind", "rollouts") if r["state"] == "consumed"]
    assert len(consumed) == len(set(consumed)) == steps * 8
    counts = dict(run.report()["counts"])  # type: ignore[call-overload]
    assert counts.pop("admitted") == sum(counts.values())


@pytest.mark.pain(14)
@pytest.mark.parametrize("seed", [1, 2])
def test_kill_the_buffer(run: Run, seed: int) -> None:
    print("seed", seed)
    run.start_all()
    run.until(lambda: committed(run) >= 1, "the first step")
    time.sleep(random.Random(seed).uniform(0, 1.0))
    run.processes["buffer"].kill()
    run.processes["buffer"].wait(30)
    run.start("buffer", "--resume")
    run.finish()
    check_nothing_twice(run, 4)
    assert run.left_behind() == []


@pytest.mark.pain(3, 14)
def test_kill_a_sandbox(run: Run) -> None:
    """Its leases expire, tickets are issued again, and nothing that it had started is left behind."""
    run.script(RIGHT, WRONG, delay_s=0.02)
    run.start_all()
    run.until(
        lambda: any(r["state"] == "running" for r in run.dump("--kind", "rollouts")) if (run.dir / "ledger.db").exists() else False,
        "a running rollout",
    )
    run.until(lambda: any("harness.py" in line for line in run.left_behind()), "a harness at work")
    killed = run.processes.pop("sandbox")
    killed.kill()
    killed.wait(30)
    run.until(lambda: not any("harness.py" in line for line in run.left_behind()), "the harnesses' end")
    run.start("sandbox")
    run.finish()
    check_nothing_twice(run, 4)
    events = run.dump("--kind", "events")
    assert any(e["kind"] == "reissued" for e in events)
    assert run.left_behind() == []


@pytest.mark.pain(14, 41)
def test_kill_the_trainer(run: Run) -> None:
    """Started again it takes a new term; steps after its checkpoint are replayed; the surviving lineage has every step once."""
    run.script(RIGHT, WRONG, delay_s=0.02)
    run.config.write_text(run.config.read_text().replace("steps = 4", "steps = 8"))
    run.start_all()
    run.until(lambda: committed(run) >= 3, "step 3, after the checkpoint of step 2")
    run.processes["train"].kill()
    run.processes["train"].wait(30)
    run.start("train", "--resume")
    run.finish()
    check_nothing_twice(run, 8)
    terms = [e["fields"]["term"] for e in run.dump("--kind", "events") if e["kind"] == "term"]  # type: ignore[index]
    assert terms == [1, 2]


@pytest.mark.pain(12, 14)
def test_kill_the_engine(run: Run) -> None:
    """Its requests are asked again when it is back; it serves nothing before it acknowledged the current policy."""
    run.script(RIGHT, WRONG, delay_s=0.01)
    run.start_all()
    run.until(lambda: committed(run) >= 1, "the first step")
    run.processes["rollout"].kill()
    run.processes["rollout"].wait(30)
    run.start("rollout")
    run.finish()
    check_nothing_twice(run, 4)
    for t in run.dump():
        assert all(v is None or v >= t["version_at_dispatch"] for v in t["versions"])  # type: ignore[attr-defined]


@pytest.mark.pain(33)
def test_a_workers_failure_ends_the_run_with_its_traceback(run: Run) -> None:
    broken = run.folder / "broken-python"
    broken.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'def serve(): raise RuntimeError(\"the engine burned down\")\nserve()'\n")
    broken.chmod(0o755)
    (run.folder / "hosts.txt").write_text(
        f"buffer localhost\ntrain-cell localhost name=core\nrollout-cell localhost name=cell0 python={broken}\nsandbox localhost name=box\n"
    )
    done = run.coord()
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "RuntimeError: the engine burned down" in done.stderr
    assert done.stderr.endswith("error: cell0 ended with exit code 1\n")
    assert run.left_behind() == []


@pytest.mark.pain(40)
def test_bad_input_to_a_worker_is_one_line_and_2(run: Run) -> None:
    done = run.coord("--set", f"model.path={run.folder}/nowhere")
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and f"{run.folder}/nowhere" in last and "model.path" in last
    assert run.left_behind() == []


@pytest.mark.pain(9)
def test_endless_errors_stop_the_run(run: Run) -> None:
    """An engine that fails every request: the run ends with 1 and says why."""
    (run.folder / "script.jsonl").write_text('{"rollout": "nobody", "text": "x"}\n')
    done = run.coord("--set", "run.max_infra_failures=5")
    assert done.returncode == 1, done.stderr
    assert "5 infrastructure failures in a row" in done.stderr.splitlines()[-1]
    assert run.left_behind() == []


@pytest.mark.pain(34)
def test_ctrl_c_stops_in_order(run: Run) -> None:
    run.script(RIGHT, WRONG, delay_s=0.02)
    coord = subprocess.Popen(
        run.argv("coord", "--cells", str(run.folder / "hosts.txt"), "--steps", "1000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    run.until(lambda: committed(run) >= 1, "the first step")
    coord.send_signal(signal.SIGINT)
    out, err = coord.communicate(timeout=DEADLINE_S)
    assert coord.returncode == 130, err
    assert out.decode() == f"{run.dir}\n" and b"Traceback" not in err
    assert run.left_behind() == []
    steps = committed(run)
    assert f"stopped at step {steps} of 1000; the same command with --resume goes on\n" in err.decode(), err
    resumed = run.coord("--steps", str(steps + 2), "--resume")
    assert resumed.returncode == 0, resumed.stderr
    check_nothing_twice(run, steps + 2)
    finished = run.coord("--steps", str(steps), "--resume")
    assert finished.returncode == 0 and f"step {steps + 2} is done, and train.steps = {steps}: give more --steps" in finished.stderr, finished.stderr
    check_nothing_twice(run, steps + 2)


@pytest.mark.pain(34)
def test_ctrl_c_twice_stops_at_once(run: Run) -> None:
    run.script(RIGHT, WRONG, delay_s=0.02)
    coord = subprocess.Popen(
        run.argv("coord", "--cells", str(run.folder / "hosts.txt"), "--steps", "1000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    run.until(lambda: committed(run) >= 1, "the first step")
    coord.send_signal(signal.SIGINT)
    coord.send_signal(signal.SIGINT)
    coord.communicate(timeout=DEADLINE_S)
    assert coord.returncode == 130
    run.until(lambda: run.left_behind() == [], "the end of all processes")


def test_port_in_use(run: Run, tmp_path: Path) -> None:
    run.start("buffer")
    run.until(lambda: (run.dir / "ledger.db").exists(), "the ledger")
    second = subprocess.run(run.argv("buffer", "--resume"), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert second.returncode in (2, 75) and second.stderr.splitlines()[-1].startswith("error: "), second.stderr
    run.processes["buffer"].send_signal(signal.SIGTERM)
    run.wait("buffer", 143)
