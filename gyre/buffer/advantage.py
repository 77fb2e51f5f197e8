"""Group-relative advantage per execution.

Over the rewards R of a group's graded executions (placeholders and those without a trainable token included, discarded ones not):

    mean:  A = R - mean(R)
    grpo:  A = (R - mean(R)) / std(R), ddof 0       (Shao et al. 2024, arXiv 2402.03300)
    rloo:  A = R - mean(R of the others) = (R - mean(R))·n / (n - 1)       (leave one out: Ahmadian et al. 2024, arXiv 2402.14740)

A group whose rewards are all equal, or of one execution, has advantages of exactly 0 under each. All trajectories of an execution share its
advantage, so a fanned-out execution weighs in the mean once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Rule = Literal["mean", "grpo", "rloo"]


def uniform(rewards: Sequence[float]) -> bool:
    """Are all rewards equal (or absent)?"""
    return not rewards or min(rewards) == max(rewards)


def advantages(rewards: Sequence[float], rule: Rule) -> list[float]:
    """One advantage per execution, in the order of `rewards`, which must be finite."""
    if not all(math.isfinite(r) for r in rewards):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if uniform(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    if rule == "mean":
        return centred
    if rule == "rloo":
        return [c * len(centred) / (len(centred) - 1) for c in centred]
    norm = math.hypot(*centred)  # of rewards that differ, above 0 however little they do: no square underflows
    return [c / norm * math.sqrt(len(centred)) for c in centred]
