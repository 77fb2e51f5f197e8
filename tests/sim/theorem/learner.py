"""A learner small enough for thousands of worlds: a table of logits in float64, its gradient in closed form, Adam (`train.protocols.Learning`).

Invariants
- `sums` is Σ ∇ numerator over what was accumulated and, behind it, how often each trajectory is in it; both go through a reduction alike. So the
  counts of an update say what went into it, whoever accumulated it.
- `totals` is set by a reduction that completed, and forgotten with `zero`. Accumulators are changed by `accumulate` and `zero` alone.

Not here: the formula that judges it (reference), which is written another way on purpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gyre.train.metrics import Tally
from gyre.train.model import MicroStepData
from gyre.train.protocols import Update
from gyre.types import TensorSpec, Version
from gyre.weights.snapshot import Allocate, Snapshot, pack, unpack
from theorem.chronicle import Vector
from theorem.feeder import VOCABULARY
from theorem.plan import Plan
from theorem.reference import Table

Observe = Callable[[int, Vector], None]
Stepped = Callable[[int, Vector, Vector, Counter[str]], None]

TOLERANCE: Final = 1e-9


class State(NamedTuple):
    """What a checkpoint holds: weights, first and second moments, updates so far."""

    weights: Vector
    m: Vector
    v: Vector
    n: int

    def copy(self) -> State:
        """Arrays of its own."""
        return State(self.weights.copy(), self.m.copy(), self.v.copy(), self.n)


@dataclass(frozen=True)
class MicroStep:
    """The trainable tokens of a claimed micro-step, one behind the other. N: trainable tokens."""

    before_N: Any
    token_N: Any
    old_N: Any
    scale_N: Any  # advantage / trainable tokens of the execution

    @classmethod
    def of(cls, data: MicroStepData) -> MicroStep:
        tokens, at = data.token_ids_S.numpy(), np.flatnonzero(data.loss_mask_S.numpy())
        scale = np.concatenate([np.full(t.n_tokens, t.advantage / max(1, t.execution_trainable)) for t in data.trajectories])
        return cls(tokens[at - 1], tokens[at], data.logprobs_S.numpy().astype(np.float64)[at], scale[at])


WIDTH: Final = 4  # trajectories of an execution at most


def number(trajectory_id: str, rollouts_per_group: int) -> int:
    """A trajectory's place in `counts`."""
    group, position, index = trajectory_id.split(".")
    return (int(group[1:]) * rollouts_per_group + int(position)) * WIDTH + int(index)


def named(n: int, rollouts_per_group: int) -> str:
    """The inverse of `number`."""
    execution, index = divmod(n, WIDTH)
    group, position = divmod(execution, rollouts_per_group)
    return f"g{group:06d}.{position}.{index}"


def initial(seed: int) -> State:
    """Where a run starts."""
    weights = np.random.default_rng(seed).normal(size=VOCABULARY * VOCABULARY)
    return State(weights, np.zeros_like(weights), np.zeros_like(weights), 0)


class TableLearner:
    """See the module. `observe(version, weights)` is called when weights are used, `stepped(step, gradient, weights, counts)` with each update."""

    def __init__(
        self, start: State, lr: float, clip_norm: float, groups: int, rollouts_per_group: int, *, observe: Observe, stepped: Stepped
    ) -> None:
        self.state = start.copy()
        self.totals: list[Tensor] | None = None
        self.tally = Tally()
        self.total_steps = 0
        self._gradient = np.zeros_like(self.state.weights)
        self._counts = np.zeros(groups * rollouts_per_group * WIDTH)
        self._lr, self._clip, self._per_group, self._observe, self._stepped = lr, clip_norm, rollouts_per_group, observe, stepped

    @property
    def sums(self) -> list[Tensor]:
        """The accumulator: the gradient's numerators, and how often each trajectory is in them."""
        return [torch.from_numpy(self._gradient), torch.from_numpy(self._counts)]

    @property
    def weights(self) -> list[Tensor]:
        return [torch.from_numpy(self.state.weights)]

    @property
    def vector(self) -> Vector:
        """All weights in one row."""
        return self.state.weights

    def saved(self) -> State:
        """What a checkpoint holds."""
        return self.state.copy()

    def restore(self, state: State) -> None:
        self.state = state.copy()

    def zero(self) -> None:
        self._gradient[:] = 0.0
        self._counts[:] = 0.0
        self.totals = None
        self.tally = Tally()

    def accumulate(self, data: MicroStepData, version: int) -> None:
        m = MicroStep.of(data)
        self._observe(version, self.state.weights)
        logits_NV = self.state.weights.reshape(VOCABULARY, VOCABULARY)[m.before_N]
        p_NV = np.exp(logits_NV - logits_NV.max(axis=1, keepdims=True))
        p_NV /= p_NV.sum(axis=1, keepdims=True)
        at = np.arange(len(m.token_N))
        weight_N = p_NV[at, m.token_N] / np.exp(m.old_N)
        p_NV[at, m.token_N] -= 1.0
        np.add.at(self._gradient.reshape(VOCABULARY, VOCABULARY), m.before_N, p_NV * (weight_N * m.scale_N)[:, None])
        for t in data.trajectories:
            self._counts[number(t.trajectory_id, self._per_group)] += 1
        self.tally.trainable += len(at)

    def update(self, step: int, executions: int, trainable: int) -> Update:
        gradient, counts = (t.numpy() for t in (self.sums if self.totals is None else self.totals))
        norm = float(np.linalg.norm(gradient / executions)) if executions and trainable else 0.0
        if norm > 0:
            g = gradient / executions * (min(1.0, self._clip / norm) if self._clip > 0 else 1.0)
            w, m, v, n = self.state
            n, m, v = n + 1, 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            w -= self._lr * (m / (1 - 0.9**n)) / (np.sqrt(v / (1 - 0.95**n)) + 1e-8)  # in place: snapshots must be copies
            self.state = State(w, m, v, n)
        self._stepped(
            step,
            gradient / max(1, executions),
            self.state.weights,
            Counter({named(int(k), self._per_group): int(counts[k]) for k in np.flatnonzero(counts)}),
        )
        return Update(norm > 0, norm, self._lr)

    def snapshot(self, version: Version, allocate: Allocate = bytearray) -> Snapshot:
        """A copy of the weights."""
        return pack(version, {"table": self.weights[0]}, allocate)

    def install(self, specs: list[TensorSpec], data: memoryview) -> None:
        """Take the weights of a snapshot."""
        self.state.weights[:] = unpack(specs, data)["table"].numpy()

    def sleep(self) -> None:
        """There is no device."""

    def wake(self) -> None:
        """There is no device."""


class Tables:
    """Learners of one world, all alike, and one cell alone (`world.Kind`)."""

    tolerance = TOLERANCE

    def __init__(self, plan: Plan) -> None:
        self._plan, self._train = plan, plan.config.train
        self.start = initial(plan.seed)
        self.alone = Table([float(x) for x in self.start.weights], self._train.lr, self._train.clip_norm)

    def learner(self, observe: Observe, stepped: Stepped) -> TableLearner:
        n = self._plan.config.system.rollouts_per_group
        return TableLearner(self.start, self._train.lr, self._train.clip_norm, self._plan.groups, n, observe=observe, stepped=stepped)
