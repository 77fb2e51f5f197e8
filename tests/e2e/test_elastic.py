"""Whole runs whose cells turn between rollout and training."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest
from whole_run import DEADLINE_S, RIGHT, WRONG, Run, step_groups

THREE = "buffer localhost\nsandbox localhost name=box slots=8\ncell localhost name=a\ncell localhost name=b\ncell localhost name=c\n"


def elastic(run: Run, hosts: str = THREE, delay_s: float = 0.01) -> None:
    """Three cells of six slots each, for the sixteen executions of a burst."""
    run.script(RIGHT, WRONG, delay_s=delay_s)
    (run.folder / "hosts.txt").write_text(hosts)
    run.config.write_text(run.config.read_text().replace("[rollout]", "[rollout]\nslots = 6"))


def roles(run: Run) -> list[dict[str, object]]:
    events = [json.loads(line) for line in (run.dir / "events.jsonl").read_text().splitlines()]
    return [e["fields"] for e in events if e["kind"] == "role"]


def check_complete(run: Run, steps: int) -> None:
    """Every step once, every group in one step, every execution in one state."""
    assert [s["step"] for s in run.dump("--kind", "steps")] == list(range(1, steps + 1))
    groups = step_groups(run)
    assert len(groups) == len(set(groups)) == 2 * steps
    counts = dict(run.report()["counts"])  # type: ignore[call-overload]
    assert counts.pop("admitted") == sum(counts.values())
    run.until(lambda: run.left_behind() == [], "the end of all processes")


@pytest.mark.pain(31)
def test_elastic(run: Run) -> None:
    """The default rule where there are cells: core first, then the others; each is told to sleep, trains, and comes home.

    A step here is short: it may be over before a satellite that was told to train has joined, so the run goes on until one has.
    """
    elastic(run)
    run.config.write_text(run.config.read_text().replace("[train]", "[train]\nmicro_step_tokens = 1"))  # a micro-step per trajectory
    for steps in range(5, 45, 5):
        done = run.coord("--steps", str(steps), *(["--resume"] if steps > 5 else []))
        assert done.returncode == 0, done.stderr[-6000:]
        check_complete(run, steps)
        turns = roles(run)
        assert {"a", "b"} <= {r["cell"] for r in turns if r["phase"] == "to_train"}, turns
        trained = {r["cell"] for r in turns if r["phase"] == "train"}
        if len(trained) >= 2:
            break
    assert "a" in trained and len(trained) >= 2, turns
    for cell in trained:
        phases = [r["phase"] for r in turns if r["cell"] == cell]
        assert "to_train" in phases and phases.index("to_train") < phases.index("train")
    assert all(r["rule"] == "elastic" for r in turns) and not [r for r in turns if r["phase"] == "lost"]
    for t in run.dump():
        assert all(v is None or v >= t["version_at_dispatch"] for v in t["versions"])  # type: ignore[attr-defined]


def test_one_cell_does_both(run: Run) -> None:
    """It trains when nothing is left to serve, and serves again before the last publication can be acknowledged."""
    elastic(run, "buffer localhost\nsandbox localhost name=box slots=8\ncell localhost name=a\n", delay_s=0.0)
    done = run.coord("--steps", "3")
    assert done.returncode == 0, done.stderr[-6000:]
    check_complete(run, 3)
    assert [r["phase"] for r in roles(run)].count("train") >= 2


def test_colocate(run: Run) -> None:
    """All cells turn together; calls wait meanwhile, and none is given up."""
    elastic(run, "buffer localhost\nsandbox localhost name=box slots=8\ncell localhost name=a\ncell localhost name=b\n", delay_s=0.0)
    hosts = str(run.folder / "hosts.txt")
    argv = run.argv("coord", "--cells", hosts, "--steps", "1000", "--rule", "colocate")
    coord = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def turned(cell: str, times: int) -> bool:
        assert coord.poll() is None, coord.communicate()[1][-5000:]
        there = (run.dir / "events.jsonl").exists()
        return there and [r["phase"] for r in roles(run) if r["cell"] == cell].count("to_train") >= times

    run.until(lambda: turned("a", 2) and turned("b", 1), "both cells to turn")
    assert not [e for e in run.dump("--kind", "events") if e["kind"] == "reissued"]
    coord.send_signal(signal.SIGINT)
    _, err = coord.communicate(timeout=DEADLINE_S)
    assert coord.returncode == 130, err[-5000:]
    steps = len(run.dump("--kind", "steps")) + 2
    done = run.coord("--steps", str(steps), "--resume", "--rule", "colocate")
    assert done.returncode == 0, done.stderr[-6000:]
    check_complete(run, steps)


@pytest.mark.pain(31)
def test_a_cell_is_added_and_one_is_taken_out_while_the_run_goes_on(run: Run) -> None:
    """gyre-coord --reload; the new cell serves, the old one gives its requests back and its processes end. The run has steps enough for all that."""
    two = THREE.replace("cell localhost name=c\n", "")
    elastic(run, two, delay_s=0.05)
    hosts = run.folder / "hosts.txt"
    coord = subprocess.Popen(run.argv("coord", "--cells", str(hosts), "--steps", "1000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def serving(cell: str) -> bool:
        assert coord.poll() is None, coord.communicate()[1][-5000:]
        return (run.dir / "events.jsonl").exists() and any(r["cell"] == cell and r["phase"] == "rollout" for r in roles(run))

    run.until(lambda: serving("a") and serving("b"), "the first two cells")
    for text, why in (("cell\n", "hosts.txt:1"), (two.replace("name=a", "name=d"), "lacks a-train")):
        hosts.write_text(text)
        refused = subprocess.run(run.argv("coord", "--reload"), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert refused.returncode == 2 and why in refused.stderr, refused.stderr
    hosts.write_text(THREE)
    assert subprocess.run(run.argv("coord", "--reload"), timeout=DEADLINE_S, check=False).returncode == 0
    run.until(lambda: serving("c"), "the third cell")
    hosts.write_text(THREE.replace("cell localhost name=b\n", ""))
    assert subprocess.run(run.argv("coord", "--reload"), timeout=DEADLINE_S, check=False).returncode == 0
    run.until(lambda: not [p for p in run.left_behind() if "--cell b " in p], "the end of cell b")
    coord.send_signal(signal.SIGINT)
    _, err = coord.communicate(timeout=DEADLINE_S)
    assert coord.returncode == 130, err[-5000:]
    steps = len(run.dump("--kind", "steps")) + 2
    done = run.coord("--steps", str(steps), "--resume")
    assert done.returncode == 0, done.stderr[-5000:]
    check_complete(run, steps)
    assert {c for r in run.dump("--kind", "rollouts") for c in r["cells"]} == {"a", "b", "c"}  # type: ignore[attr-defined]
    late = subprocess.run(run.argv("coord", "--reload"), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert late.returncode == 2 and "has no running coordinator" in late.stderr
