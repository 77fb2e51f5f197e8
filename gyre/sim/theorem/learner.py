"""A learner small enough for thousands of worlds: a table of logits in float64, its gradient in closed form, Adam. The interface is `train.protocols.Learning`.

Invariants
- `sums` is Σ ∇ numerator over what was accumulated, `counts` how often each trajectory is in it; both go through a reduction alike. So the counts say
  of an update what went into it, whoever accumulated it.
- `totals` is set by a reduction that completed, and forgotten with `zero`. Accumulators are changed by `accumulate` and `zero` alone.

Not here: the formula that judges it (reference), which is written another way on purpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre.sim.theorem.chronicle import Vector
from gyre.sim.theorem.feeder import VOCABULARY
from gyre.train.metrics import Tally
from gyre.train.protocols import Update
from gyre.types import PackedTrajectory


@dataclass(frozen=True)
class MicroStep:
    """A claimed micro-step: trajectories, and their trainable tokens one behind the other. N: trainable tokens."""

    trajectories: Sequence[PackedTrajectory]
    before_N: Any
    token_N: Any
    old_N: Any
    scale_N: Any  # advantage / trainable tokens of the execution

    @classmethod
    def from_arrays(cls, trajectories: Sequence[PackedTrajectory], arrays: Mapping[str, Any]) -> MicroStep:
        tokens, mask = np.array(arrays["token_ids"]), np.array(arrays["loss_mask"])
        scale = np.concatenate([np.full(t.n_tokens, t.advantage / max(1, t.execution_trainable)) for t in trajectories])
        at = np.flatnonzero(mask)
        return cls(trajectories, tokens[at - 1], tokens[at], np.array(arrays["logprobs"], dtype=np.float64)[at], scale[at])


@dataclass
class Sums:
    """An accumulator: a vector, and what is in it."""

    vector: Vector
    counts: Counter[str]

    def copy(self) -> Sums:
        return Sums(self.vector.copy(), self.counts.copy())

    def add(self, other: Sums) -> None:
        self.vector = self.vector + other.vector
        self.counts = self.counts + other.counts


def initial(seed: int) -> Vector:
    """The weights a run starts from."""
    return np.random.default_rng(seed).normal(size=VOCABULARY * VOCABULARY)


class TableLearner:
    """See the module. `observe(step)` is called with the version whose weights are used; `stepped` with each update."""

    def __init__(
        self, weights: Vector, lr: float, clip_norm: float, *, observe: Callable[[int, Vector], None], stepped: Callable[[int, Vector, Counter[str], bool], None]
    ) -> None:
        self.weights = weights.copy()
        self.m, self.v, self.n = np.zeros_like(weights), np.zeros_like(weights), 0
        self.sums = Sums(np.zeros_like(weights), Counter())
        self.totals: Sums | None = None
        self.tally = Tally()
        self.total_steps = 0
        self._lr, self._clip, self._observe, self._stepped = lr, clip_norm, observe, stepped

    def zero(self) -> None:
        self.sums = Sums(np.zeros_like(self.weights), Counter())
        self.totals = None
        self.tally = Tally()

    def accumulate(self, data: MicroStep, version: int) -> None:
        self._observe(version, self.weights)
        logits_NV = self.weights.reshape(VOCABULARY, VOCABULARY)[data.before_N]
        logits_NV = logits_NV - logits_NV.max(axis=1, keepdims=True)
        p_NV = np.exp(logits_NV)
        p_NV /= p_NV.sum(axis=1, keepdims=True)
        at = np.arange(len(data.token_N))
        weight_N = p_NV[at, data.token_N] / np.exp(data.old_N)
        grad_NV = p_NV
        grad_NV[at, data.token_N] -= 1.0
        grad_NV *= (weight_N * data.scale_N)[:, None]
        table = np.zeros((VOCABULARY, VOCABULARY))
        np.add.at(table, data.before_N, grad_NV)
        self.sums.add(Sums(table.ravel(), Counter(t.trajectory_id for t in data.trajectories)))
        self.tally.trainable += len(at)

    def update(self, step: int, executions: int, trainable: int) -> Update:
        sums = self.totals or self.sums
        norm = float(np.linalg.norm(sums.vector / executions)) if executions and trainable else 0.0
        if norm > 0:
            g = sums.vector / executions * (min(1.0, self._clip / norm) if self._clip > 0 else 1.0)
            self.n += 1
            self.m, self.v = 0.9 * self.m + 0.1 * g, 0.95 * self.v + 0.05 * g * g
            self.weights = self.weights - self._lr * (self.m / (1 - 0.9**self.n)) / (np.sqrt(self.v / (1 - 0.95**self.n)) + 1e-8)
        self._stepped(step, self.weights, sums.counts, norm > 0)
        return Update(norm > 0, norm, self._lr)

    def sleep(self) -> None:
        """There is no device."""

    def wake(self) -> None:
        """There is no device."""
