"""What one cell alone makes of a run: its consumed trajectories, in the order of the ledger's steps, through one learner. An independent reading of
the ledger: it knows nothing of micro-steps, claims, cells or reductions."""

from __future__ import annotations

import array
import json
import math
from collections import Counter
from typing import Any

import torch
from safetensors.torch import load_file
from whole_run import Run

from gyre import config as configuration
from gyre.train.model import MicroStepData, Policy
from gyre.train.optimizer import Learner
from gyre.types import PackedTrajectory


def _micro_step(records: list[dict[str, Any]]) -> MicroStepData:
    trainable: Counter[str] = Counter()
    for r in records:
        trainable[r["rollout_id"]] += r["n_trainable"]
    packed = [
        PackedTrajectory(
            trajectory_id=r["trajectory_id"], rollout_id=r["rollout_id"], group_id=r["group_id"], n_tokens=r["n_tokens"],
            n_trainable=r["n_trainable"], execution_trainable=trainable[r["rollout_id"]], advantage=r["advantage"], reward=r["reward"],
            version_at_dispatch=r["version_at_dispatch"],
        )
        for r in records
    ]  # fmt: skip
    arrays = {
        "token_ids": array.array("i", [t for r in records for t in r["token_ids"]]),
        "loss_mask": array.array("b", [t for r in records for t in r["loss_mask"]]),
        "logprobs": array.array("f", [math.nan if x is None else x for r in records for x in r["logprobs"]]),
        "versions": array.array("i", [-1 if x is None else x for r in records for x in r["versions"]]),
    }
    return MicroStepData.from_arrays(packed, {k: memoryview(v) for k, v in arrays.items()})


def alone(run: Run) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights at the start and after the last step, by one learner."""
    config = configuration.load(run.config, [], {}).config
    torch.set_num_threads(1)
    steps: list[dict[str, Any]] = run.dump("--kind", "steps")
    policy = Policy.load(configuration.Path(config.model.path), config.model, config.rollout.temperature)
    learner = Learner(policy, config.train, config.train.steps)
    first = {n: p.detach().clone() for n, p in learner.parameters.items()}
    records: list[dict[str, Any]] = run.dump()
    for s in steps:
        mine = [r for r in records if r["step"] == s["step"]]
        learner.zero()
        learner.accumulate(_micro_step(mine), s["step"] - 1)
        update = learner.update(s["step"], s["stats"]["executions"])
        assert update.updated
    return first, {n: p.detach() for n, p in learner.parameters.items()}


def check_against_alone(run: Run, tolerance: float = 1e-5) -> float:
    """The last checkpoint's weights are those of one cell alone, and they have moved. Returns the largest difference."""
    first, expected = alone(run)
    last = max((run.dir / "checkpoints").glob("step-*"), key=lambda p: int(p.name.rpartition("-")[2]))
    saved = load_file(last / "model.safetensors")
    worst = max(float((saved[n] - expected[n]).abs().max()) for n in saved if n in expected)
    moved = max(float((expected[n] - first[n]).abs().max()) for n in expected)
    assert moved > 20 * tolerance, f"weights that hardly moved ({moved:.2g}) prove nothing"
    assert worst <= tolerance, f"differs by {worst:.3g} from one cell alone (moved {moved:.3g})"
    return worst


def check_counted_once(run: Run, steps: int) -> list[dict[str, Any]]:
    """Every micro-step of every step is in exactly one cell's part of the manifest that was committed. Returns the step events that count."""
    events = [json.loads(line) for line in (run.dir / "events.jsonl").read_text().splitlines()]
    counted = {e["fields"]["step"]: e["fields"] for e in events if e["kind"] == "step"}  # of a step that was done again, the last
    assert sorted(counted) == list(range(1, steps + 1))
    trajectories = Counter(r["step"] for r in run.dump("--no-tokens"))
    for n, fields in counted.items():
        named = [m for entry in fields["entries"] for m in entry["micro_steps"]]
        assert len(named) == len(set(named)) == fields["micro_steps"] == trajectories[n], f"step {n}: one trajectory a micro-step"
    return [counted[n] for n in sorted(counted)]
