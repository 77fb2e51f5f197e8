"""One cell alone, from scratch: the update of a step as a formula over its groups, one token after the other.

    A_i   = R_i - mean of R over the group's graded executions
    g     = 1/E · Σ_i Σ_t  -(w_it · A_i / T_i) · ∇ log π(x_it | x_i,t-1),   w_it = π(x_it | x_i,t-1) / exp(log-prob when sampled)
    g    ← g · min(1, c / |g|)
    m     = 0.9 m + 0.1 g,   v = 0.95 v + 0.05 g²,   θ ← θ - lr · (m / (1 - 0.9^n)) / (sqrt(v / (1 - 0.95^n)) + 1e-8)

E is the step's graded executions, T_i an execution's trainable tokens over all its trajectories, c the norm at which the gradient is clipped. The
policy is a table: row x of θ holds the logits behind token x. Plain Python floats; shares no code with learner, loop, packing or advantage.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from gyre.types import Ending
from theorem.feeder import VOCABULARY, Execution

GRADED_WITHOUT_REWARD = Ending.TASK_SETUP_FAILED  # the task is at fault: reward 0, in the mean, no loss


@dataclass(frozen=True)
class State:
    """Weights and moments after some steps; `n` counts those that changed anything."""

    weights: list[float]
    m: list[float]
    v: list[float]
    n: int


def reward(e: Execution) -> float:
    return 0.0 if e.ending is GRADED_WITHOUT_REWARD or e.reward is None else e.reward


def advantages(group: list[Execution]) -> list[float]:
    """Of each execution; exactly 0 where all rewards are equal."""
    rewards = [reward(e) for e in group]
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def gradient(weights: list[float], groups: list[list[Execution]]) -> list[float]:
    """The step's gradient before clipping. `groups` hold graded executions."""
    total = [0.0] * len(weights)
    graded = sum(len(g) for g in groups)
    for group in groups:
        for e, advantage in zip(group, advantages(group), strict=True):
            trainable = sum(sum(b.trainable) for b in e.branches)
            for b in e.branches:
                for t in range(1, len(b.tokens)):
                    if b.trainable[t]:
                        _add(total, weights, b.tokens[t - 1], b.tokens[t], b.logprobs[t], advantage / trainable / graded)
    return total


def _add(total: list[float], weights: list[float], before: int, token: int, old: float, scale: float) -> None:
    row = weights[before * VOCABULARY : (before + 1) * VOCABULARY]
    top = max(row)
    partition = math.fsum(math.exp(x - top) for x in row)
    probabilities = [math.exp(x - top) / partition for x in row]
    weight = probabilities[token] / math.exp(_single(old))
    for k, p in enumerate(probabilities):
        total[before * VOCABULARY + k] -= scale * weight * ((1.0 if k == token else 0.0) - p)


def _single(x: float) -> float:
    """As it is after the wire, which carries single precision."""
    value: float = struct.unpack("f", struct.pack("f", x))[0]
    return value


class Table:
    """One cell alone, as the judges ask it (`chronicle.Alone`)."""

    def __init__(self, start: list[float], lr: float, clip: float) -> None:
        self._start, self._lr, self._clip = start, lr, clip

    def begin(self) -> State:
        return State(self._start, [0.0] * len(self._start), [0.0] * len(self._start), 0)

    def weights(self, state: State) -> list[float]:
        return state.weights

    def step(self, state: State, groups: list[list[Execution]], step: int) -> tuple[State, list[float]]:
        """The state after one more step, the same if there is nothing to learn from; and the gradient."""
        g = gradient(state.weights, groups)
        norm = math.sqrt(math.fsum(x * x for x in g))
        if norm == 0.0:
            return state, g
        scale = self._clip / norm if 0 < self._clip < norm else 1.0
        clipped = [x * scale for x in g]
        n = state.n + 1
        m = [0.9 * a + 0.1 * x for a, x in zip(state.m, clipped, strict=True)]
        v = [0.95 * a + 0.05 * x * x for a, x in zip(state.v, clipped, strict=True)]
        factor = self._lr / (1 - 0.9**n)
        moved = [w - factor * a / (math.sqrt(b / (1 - 0.95**n)) + 1e-8) for w, a, b in zip(state.weights, m, v, strict=True)]
        return State(moved, m, v, n), g
