"""Time-compressed runs: real processes play a tiny workload, and take about as long as the simulator says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gyre.rules.named import make_rule, parse_rule
from gyre.rules.workload import load
from gyre.sim.world import World

ROOT = Path(__file__).resolve().parents[2]
PACED = ROOT / "examples" / "paced"
COMPRESS = 1500
WORKLOAD = """
[system]
cells = 4
groups_per_step = 4
rollouts_per_group = 4
steps_per_burst = 2
target_staleness = 0.5
slots_per_cell = 10
to_train_s = 100
to_rollout_s = 100
update_s = 200
publish_s = 300

[workload]
model = "slots"
train_cell_h_per_group = 0.6
bursts = 2
seeds = [0]

[workload.execution_h]
median = 1.5
sigma = 0.5
correlation = 0.5
harness_timeout_h = 4.0
"""
HOSTS = "buffer localhost\nsandbox localhost name=box\n" + "".join(f"cell localhost name=cell{i}\n" for i in range(4))


@pytest.mark.parametrize("rule", ["elastic"])
def test_real_processes_take_as_long_as_the_simulator_says(tmp_path: Path, rule: str) -> None:
    workload, hosts, run = tmp_path / "tiny.toml", tmp_path / "hosts.txt", tmp_path / "run"
    workload.write_text(WORKLOAD)
    hosts.write_text(HOSTS)
    argv = [sys.executable, "-m", "gyre_commands.coord", "--run", str(run), "--config", str(PACED / "run.toml"), "--cells", str(hosts)]
    argv += ["--rule", rule, "--steps", "4", "--set", f"run.compress={COMPRESS}", "--set", f"run.workload={workload}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [e["fields"] for e in events if e["kind"] == "step"]
    groups = Counter(g for s in steps for g in s["groups"])
    assert [s["step"] for s in steps] == [1, 2, 3, 4] and len(groups) == 16 and set(groups.values()) == {1}
    assert all(s["stats"]["executions"] == s["stats"]["trajectories"] == 16 for s in steps)
    ended = [e["fields"] for e in events if e["kind"] == "rollout_ended"]
    assert len(ended) == 64 and {e["ending"] for e in ended} <= {"finished", "harness_timeout"}

    parsed, w = parse_rule(rule), load(workload)
    predicted = World(w, make_rule(rule), 0.5, 0, stream=parsed.stream).run().now / COMPRESS
    began = next(e["t_mono"] for e in events if e["kind"] == "admitted")
    played = max(e["t_mono"] for e in events if e["kind"] == "publication") - began
    assert 0.95 < played / predicted < 2.0, f"{rule}: {played:.1f} s, predicted {predicted:.1f} s"
