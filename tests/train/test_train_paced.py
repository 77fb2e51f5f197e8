"""The paced learner: numerators that tell what was counted, and a clock that keeps the workload's time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from gyre import config as configuration
from gyre.train import checkpoint
from gyre.train.paced import Clock, PacedLearner, open_paced

WORKLOAD = Path(__file__).resolve().parents[2] / "examples" / "workloads" / "nl2repo-122b.toml"


def learner(source: Path | None = None) -> PacedLearner:
    sets = ["train.engine=paced", f'run.workload="{WORKLOAD}"', "run.compress=1000000", "train.lr=0.01"]
    return open_paced(configuration.load(None, sets).config, source)


def steps(micro_step: Any) -> list[Any]:
    """Two executions of one trajectory, one of two."""
    return [
        micro_step(([1, 2, 3], [0, 1, 1], 0.5, 2, None, 0)),
        micro_step(([1, 2, 3, 4], [0, 1, 1, 1], -0.5, 5, None, 0), ([1, 2, 3], [0, 1, 1], -0.5, 5, None, 0)),
    ]


def test_the_gradient_is_a_sum_whatever_the_order(micro_step: Any) -> None:
    one, other = learner(), learner()
    for data in steps(micro_step):
        one.accumulate(data, 0)
    for data in reversed(steps(micro_step)):
        other.accumulate(data, 0)
    assert torch.allclose(one.sums[0], other.sums[0]) and one.sums[0].abs().sum() > 0
    assert one.tally.trainable == 7
    other.accumulate(steps(micro_step)[0], 0)
    assert not torch.allclose(one.sums[0], other.sums[0])
    one.zero()
    assert not one.sums[0].any()


def test_update_and_checkpoint(micro_step: Any, tmp_path: Path) -> None:
    one = learner()
    one.accumulate(steps(micro_step)[0], 0)
    assert one.update(1, 2).updated
    path = checkpoint.save(tmp_path, one, term=1, step=1, lr=0.01, keep=1)
    two = learner(path)
    two.read(checkpoint.verify(path).path)
    assert torch.equal(one.policy.model.weight, two.policy.model.weight) and one.policy.model.weight.any()
    for each in (one, two):
        each.zero()
        each.accumulate(steps(micro_step)[1], 1)
        each.update(2, 2)
    assert torch.equal(one.policy.model.weight, two.policy.model.weight)


def test_the_clock_counts_what_lies_between_as_work() -> None:
    clock = Clock()
    first = clock.begin(10.0)
    assert first - time.monotonic() > 9
    clock = Clock()
    clock.spend(0.05)
    time.sleep(0.005)
    assert clock.begin(0.05) < time.monotonic() + 0.05  # overhead: the second ends 0.1 s after the first began
    time.sleep(0.2)
    assert clock.begin(0.05) > time.monotonic() + 0.04  # a wait: it begins now
