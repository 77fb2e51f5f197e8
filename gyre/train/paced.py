"""A learner that sleeps instead of computing, with a small real vector for weights and gradient. For time-compressed runs.

Invariants
- Its numerators are sums over trajectories, like any learner's: each adds its advantage, by its share of its execution's trainable tokens, at a place
  of the vector that its rollout's id names. So a trajectory counted twice, or never, shows in the weights.
- Sleeping is by one clock (`Clock`): what the claim, the messages and the disk took between two pieces of work counts as part of the second, so that
  the sum is the workload's.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import torch
from safetensors.torch import load_file, save_file

from gyre.config import Config
from gyre.rules.pace import Pace, open_pace
from gyre.train.metrics import detached
from gyre.train.model import MicroStepData
from gyre.train.optimizer import Learner
from gyre.train.protocols import Update

SIZE: Final = 1024
_ABSORB: Final = 0.5  # a gap up to this part of the work behind it was overhead; a longer one was waiting
_WEIGHTS: Final = "model.safetensors"


class Clock:
    """Work of known durations, one piece behind the other."""

    def __init__(self) -> None:
        self._end = 0.0

    def begin(self, seconds: float) -> float:
        """Begin a piece of work; returns when it ends, in time.monotonic()."""
        now = time.monotonic()
        start = self._end if now - self._end < _ABSORB * seconds else now
        self._end = start + seconds
        return self._end

    def spend(self, seconds: float) -> None:
        """Do a piece of work."""
        time.sleep(max(0.0, self.begin(seconds) - time.monotonic()))


class _Vector(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SIZE))

    def save_pretrained(self, directory: Path) -> None:
        save_file({"weight": self.weight.detach()}, directory / _WEIGHTS)
        (directory / "config.json").write_text(json.dumps({"model_type": "gyre_paced", "size": SIZE}))


class PacedPolicy:
    """What `Policy` is to a learner and its checkpoints: a module, where it came from, where it lives."""

    def __init__(self, source: Path) -> None:
        self.model: Any = _Vector()
        self.source = source
        self.device = torch.device("cpu")
        if (source / _WEIGHTS).is_file():
            self.model.load_state_dict(load_file(source / _WEIGHTS))


class PacedLearner(Learner):
    """See `Learner`."""

    def __init__(self, policy: PacedPolicy, config: Config, pace: Pace) -> None:
        super().__init__(policy, config.train, config.train.steps)  # type: ignore[arg-type]  # all that a learner touches is there
        self._pace, self._clock = pace, Clock()
        self.publish_s = pace.publish_s

    def accumulate(self, data: MicroStepData, version: int) -> None:
        """Sleep for the share of its executions; add the numerators."""
        executions = 0.0
        sums, start = self._sums["weight"], 0
        for t in data.trajectories:
            own = slice(start, start + t.n_tokens)
            trained = data.loss_mask_S[own].bool()
            share = t.n_trainable / max(1, t.execution_trainable)
            executions += share
            sums[crc32(t.rollout_id.encode()) % SIZE] += t.advantage * share
            old_N = detached(data.logprobs_S[own][trained])
            self.tally.add(
                numerator=-t.advantage * share,
                new_logprobs_N=old_N,
                old_logprobs_N=old_N,
                entropy_N=-old_N,
                outside_N=torch.zeros(len(old_N)),
                versions_N=data.versions_S[own][trained],
                version=version,
            )
            start += t.n_tokens
        self._clock.spend(self._pace.execution_train_s * executions)

    @torch.no_grad()
    def update(self, step: int, executions: int, trainable: int | None = None) -> Update:
        """AdamW on the vector, and the workload's time for an update."""
        update = super().update(step, executions, trainable)
        self._clock.spend(self._pace.update_s)
        return update


def open_paced(config: Config, source: Path | None) -> PacedLearner:
    """The learner of a configuration, with the weights of a checkpoint or none. Raises `UsageError`."""
    return PacedLearner(PacedPolicy(source or Path()), config, open_pace(config.run.workload, config.run.compress))
